"""Text in a terminal's columns, of which a Chinese letter takes two: aligned, broken, cut or filled.

Messages are laid out in the user's language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# A line may be broken after spaces, and after wide letters that no closing mark follows.
_WIDE = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_CLOSING = "，。、；：！？）】》」』”’%"
_OPENING = "（【《「『“‘"
_PIECES = re.compile(
    rf"\s*[{_OPENING}]*"
    rf"(?:[{_WIDE}](?=[^{_CLOSING}]|$)|[^\s{_WIDE}]+[{_CLOSING}]*|[{_WIDE}][{_CLOSING}]+|[{_CLOSING}]+)\s*"
    r"|\s+"
)
_QUOTED = re.compile("`[^`]*`")
_NO_BREAK = "\ue000"  # It stands for a space at which a line must not be broken.
HANGING = 2  # columns
_JOINER = "\u200d"
_SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"


def width(text: str) -> int:
    """Columns that text takes on a terminal: Chinese letters take two, marks over letters none."""
    columns = 0
    for character in str(text):
        if unicodedata.east_asian_width(character) in "WF":
            columns += 2
        elif not unicodedata.combining(character):
            columns += 1
    return columns


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad all cells but the last of each row to the width of their column."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), width(cell))
    lines = []
    for row in rows:
        cells = [fitted(cell, widths[column]) for column, cell in enumerate(row[:-1])]
        cells += map(str, row[-1:])  # A row without cells has no last one.
        lines.append("  ".join(cells))
    return lines


def one_line(text: str, most: int = 160) -> str:
    """Text without line ends, cut where it is long."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= most else "".join(letters(flat)[: most - 3]) + "..."


def letters(text: str) -> list[str]:
    """The letters that a reader sees: each character with the marks over it, an emoji with what is joined to it."""
    groups = list[str]()
    for character in text:
        is_mark = unicodedata.category(character)[0] == "M" or character == _JOINER or character in _SKIN_TONES
        if groups and (is_mark or groups[-1][-1] == _JOINER):
            groups[-1] += character
        else:
            groups.append(character)
    return groups


def folded(line: str, columns: int, indent: int = 0) -> list[str]:
    """Break a line between words, or between Chinese letters, into lines of at most so many columns. A word that is
    wider than a line stays whole: it may be a name to copy.

    Args:
        indent: spaces before all lines but the first, at most half of the columns.
    """
    indent = min(indent, columns // 2)
    lines = []
    current = ""
    for piece in _PIECES.findall(str(line)):
        if current.strip() and width(current) + width(piece.rstrip()) > columns:
            lines.append(current.rstrip())
            current = " " * indent + piece.lstrip()
        else:
            current += piece
    return [*lines, current.rstrip()]


def fitted(line: str, columns: int) -> str:
    """Cut or fill a line to so many columns."""
    fitting = ""
    free = columns
    for letter in str(line):
        if width(letter) > free:
            break
        fitting += letter
        free -= width(letter)
    return fitting + " " * free


def shortened(name: str, columns: int) -> str:
    """A name, with "…" in place of its middle if it is wider than so many columns. Its beginning says what it is, and
    its end tells it from similar ones.
    """
    name = str(name)
    if width(name) <= columns:
        return name
    parts = letters(name)
    for count in range(min(len(parts), columns), 0, -1):  # No letter takes less than a column.
        from_end = count // 2
        from_start = count - from_end
        text = "".join([*parts[:from_start], "…", *parts[len(parts) - from_end :]])
        if width(text) <= columns:
            return text
    return "…"


def paragraphs(text: str, columns: int) -> list[str]:
    """Break each line of a text into lines of at most so many columns, of which all but the first are indented.

    What users copy is not broken: a line that is a command, and text between backticks.
    """
    lines = []
    for line in str(text).splitlines():
        words = line.lstrip()
        if words.startswith("python "):
            lines.append(line)
            continue
        whole = _QUOTED.sub(lambda match: match.group().replace(" ", _NO_BREAK), words)
        indent = len(line) - len(words)
        parts = folded(whole, columns - indent - HANGING)
        lines.append(" " * indent + parts[0].lstrip())
        lines += [" " * (indent + HANGING) + part.lstrip() for part in parts[1:]]
    return [line.replace(_NO_BREAK, " ") for line in lines]
