"""Lists and tables that a file keeps as text, as CSV must."""

from __future__ import annotations

import ast
import json
import re
import warnings
from contextlib import suppress
from typing import Any

NUMPY_STRINGS = re.compile(r"['\"]\s+['\"]")  # ['a' 'b'], which Python reads as ['ab']


def parsed(cell: str) -> Any:
    """The value of a cell of JSON, or of a Python literal such as ['a', None], which pandas' to_csv makes of a list.

    Raises:
        ValueError: it is neither.
    """
    try:
        return json.loads(cell)
    except (ValueError, RecursionError) as error:
        if not NUMPY_STRINGS.search(cell):
            with suppress(ValueError, SyntaxError, RecursionError, MemoryError), warnings.catch_warnings():
                warnings.simplefilter("ignore")  # of \\ before an ordinary letter
                return ast.literal_eval(cell.strip())
        raise ValueError(str(error)) from None
