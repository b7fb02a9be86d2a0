"""Untrusted text for a terminal: letters, line ends and tabs; no control characters.

A row, the name of a file or an answer can hold escape sequences, which move the cursor, rename the window or write into
what was printed before. So whatever is printed passes through here: `guard` wraps standard output (where that is a
terminal; a pipe gets an answer as it is) and before standard error. What draws on the terminal itself asks for `raw`.

Source: Unicode, category Cc (C0, DEL and C1); ECMA-48, control functions.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, TextIO

# Besides the controls, what turns the direction of a line: a name must not read as another.
_COMMANDS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u202a-\u202e\u2066-\u2069]")


def visible(text: str) -> str:
    """Show control characters, but for line ends and tabs, as `\\x1b`; all else stays."""
    return _COMMANDS.sub(lambda match: ascii(match.group())[1:-1], str(text))


class GuardedStream:
    """A text stream that shows what commands a terminal and does not send it; in all else the stream itself."""

    def __init__(self, stream: TextIO) -> None:
        self.unguarded = stream

    def write(self, text: str) -> int:
        """Write text made visible."""
        return self.unguarded.write(visible(text))

    def writelines(self, lines: Any) -> None:
        """Write texts made visible."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.unguarded, name)


def raw(stream: TextIO) -> TextIO:
    """The unguarded stream, for code that draws on the terminal and has made untrusted text `visible`."""
    return stream.unguarded if isinstance(stream, GuardedStream) else stream


@contextmanager
def guard() -> Iterator[None]:
    """Stand before standard output, where it is a terminal, and standard error, until the end of the context."""
    before = sys.stdout, sys.stderr
    stand_guard()
    try:
        yield
    finally:
        sys.stdout, sys.stderr = before


def stand_guard() -> None:
    """The same until the process ends."""
    if sys.stdout.isatty() and not isinstance(sys.stdout, GuardedStream):
        sys.stdout = GuardedStream(sys.stdout)  # type: ignore[assignment]
    if not isinstance(sys.stderr, GuardedStream):
        sys.stderr = GuardedStream(sys.stderr)  # type: ignore[assignment]
