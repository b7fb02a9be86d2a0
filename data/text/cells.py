"""Lists and tables that a file keeps as text, as CSV must."""

from __future__ import annotations

import ast
import json
import re
import warnings
from contextlib import suppress
from decimal import Decimal
from pathlib import Path
from typing import Any

from support.storage import read_text

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
                warnings.simplefilter("ignore")  # Python warns of \\ before an ordinary letter.
                return ast.literal_eval(cell.strip())
        raise ValueError(str(error)) from None


def list_in(cell: str) -> list[str] | None:
    """The texts of a list that is spelled out as JSON, as in CSV; None where a cell holds none."""
    if not (cell.startswith("[") and cell.endswith("]")):
        return None
    try:
        entries = parsed(cell)
    except ValueError:
        return None
    return entries if isinstance(entries, list) and all(isinstance(entry, str) for entry in entries) else None


def spelled(value: object) -> object:
    """A number in plain decimals, a truth value as JSON has it; anything else as it is."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float, Decimal)) and Decimal(str(value)).is_finite():
        return format(Decimal(str(value)), "f")
    return value


def kind_of(value: object) -> str:
    """The type of a cell, for people."""
    return "null" if value is None else type(value).__name__


def json_object(path: Path) -> dict[str, Any]:
    """The JSON object that a file holds; an empty one where it holds none or cannot be read."""
    with suppress(OSError, ValueError, RecursionError):
        content = json.loads(read_text(path))
        if isinstance(content, dict):
            return content
    return {}
