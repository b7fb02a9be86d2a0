"""What becomes of a tokenizer whose own rules fail?

The `tokenizers` library raises bare `Exception`, and where its Rust code gives up, such as at a regular expression that
never ends, pyo3's `PanicException`, which is no `Exception` at all: it would pass every handler and end the run.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from settings.errors import UserError


@contextmanager
def failure_is_user_error(what: str) -> Iterator[None]:
    """Turn a failure inside of the library into one sentence.

    Args:
        what: the beginning of the sentence, which names the file.
    """
    try:
        yield
    except BaseException as error:
        if not _is_the_librarys(error):
            raise
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{what} ({reason}); name another tokenizer, or fetch it again") from None


def _is_the_librarys(error: BaseException) -> bool:
    # the class of a panic can be imported from nowhere
    return type(error).__name__ == "PanicException" or type(error) in _OF_LIBRARIES


_OF_LIBRARIES = (Exception, ValueError, TypeError, OverflowError, RuntimeError, IndexError, UnicodeDecodeError)
