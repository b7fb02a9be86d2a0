"""Text in a terminal's columns, of which a Chinese letter takes two: aligned, broken, cut or filled.

Messages are laid out in the user's language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# A line may be broken after blanks, and after wide letters where no closing mark follows.
_WIDE = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_CLOSING = "，。、；：！？）】》」』”’%"
_OPENING = "（【《「『“‘"
_PIECES = re.compile(
    rf"\s*[{_OPENING}]*"
    rf"(?:[{_WIDE}](?=[^{_CLOSING}]|$)|[^\s{_WIDE}]+[{_CLOSING}]*|[{_WIDE}][{_CLOSING}]+|[{_CLOSING}]+)\s*"
    r"|\s+"
)
_QUOTED = re.compile("`[^`]*`")
_NO_BREAK = "\ue000"  # It stands for a blank at which a line must not be broken.
HANGING = 2  # columns
_JOINER = "\u200d"
_SKIN_TONES = "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"


def width(text: str) -> int:
    """Columns that text takes on a terminal: Chinese letters take two, marks over letters none."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in str(text))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad all cells but the last of each row to the width of their column."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), width(cell))
    lines = []
    for row in rows:
        cells = [fitted(cell, widths[column]) for column, cell in enumerate(row[:-1])]
        lines.append("  ".join([*cells, *map(str, row[-1:])]))
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
    """Break a line between words, or between Chinese letters, into lines of at most so many columns.

    Args:
        indent: blanks before all but the first, at most half of the columns. A word that is wider than a line stays
            whole: it may be a name to copy.
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
    """A name without its middle where it is wider than so many columns: its beginning says what it is, its end
    which.
    """
    name = str(name)
    if width(name) <= columns:
        return name
    parts = letters(name)
    for count in range(min(len(parts), columns), 0, -1):  # No letter takes less than a column.
        text = "".join([*parts[: -(-count // 2)], "…", *parts[len(parts) - count // 2 :]])
        if width(text) <= columns:
            return text
    return "…"


def paragraphs(text: str, columns: int) -> list[str]:
    """Text in lines of at most so many columns, hanging under their first; what is to be copied stays whole.

    That is what stands between backticks, and a line that is a command.
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
        lines += [" " * (indent + HANGING * (number > 0)) + part.lstrip() for number, part in enumerate(parts)]
    return [line.replace(_NO_BREAK, " ") for line in lines]
