"""Text in a terminal's columns, of which a Chinese letter takes two: aligned, broken, cut or filled.

Messages are laid out in the user's language.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

# what a line may be broken after: blanks, and wide letters where no closing mark follows
_WIDE = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_CLOSING, _OPENING = "，。、；：！？）】》」』”’%", "（【《「『“‘"
_PIECES = re.compile(
    rf"\s*[{_OPENING}]*(?:[{_WIDE}](?=[^{_CLOSING}]|$)|[^\s{_WIDE}]+[{_CLOSING}]*|[{_WIDE}][{_CLOSING}]+|[{_CLOSING}]+)\s*"
    r"|\s+"
)
_QUOTED, _KEPT = re.compile("`[^`]*`"), "\ue000"  # stands for a blank that is no place to break
HANGING = 2  # columns
_JOINER, _SKIN_TONES = "\u200d", "\U0001f3fb\U0001f3fc\U0001f3fd\U0001f3fe\U0001f3ff"


def width(text: str) -> int:
    """Columns that text takes on a terminal: Chinese letters take two, marks over letters none."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in str(text))


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad all cells but the last of each row to the width of their column."""
    widths: dict[int, int] = {}
    rows = [[str(cell) for cell in row] for row in rows]
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), width(cell))
    return [
        "  ".join([*(cell + " " * (widths[column] - width(cell)) for column, cell in enumerate(row[:-1])), *row[-1:]])
        for row in rows
    ]


def one_line(text: str, most: int = 160) -> str:
    """Text without line ends, cut where it is long."""
    flat = " ".join(str(text).split())
    return flat if len(flat) <= most else "".join(letters(flat)[: most - 3]) + "..."


def letters(text: str) -> list[str]:
    """The letters that a reader sees: each character with the marks over it, an emoji with what is joined to it."""
    found = list[str]()
    for character in text:
        is_mark = unicodedata.category(character)[0] == "M" or character == _JOINER or character in _SKIN_TONES
        if found and (is_mark or found[-1][-1] == _JOINER):
            found[-1] += character
        else:
            found.append(character)
    return found


def folded(line: str, room: int, indent: int = 0) -> list[str]:
    """Break a line between words, or between Chinese letters, into lines of at most `room` columns.

    Args:
        indent: blanks before all but the first, fewer where they would take more than half of the room. A word that is
            wider than a line stays whole: it may be a name to copy.
    """
    indent = min(indent, room // 2)
    lines, now = [], ""
    for piece in _PIECES.findall(str(line)):
        if now.strip() and width(now) + width(piece.rstrip()) > room:
            lines.append(now.rstrip())
            now = " " * indent + piece.lstrip()
        else:
            now += piece
    return [*lines, now.rstrip()]


def fitted(line: str, columns: int) -> str:
    """Cut or fill a line to so many columns."""
    taken = 0
    line = str(line)
    for place, letter in enumerate(line):
        wide = width(letter)
        if taken + wide > columns:
            return line[:place] + " " * (columns - taken)
        taken += wide
    return line + " " * (columns - taken)


def shortened(name: str, columns: int) -> str:
    """A name without its middle where it is wider than so many columns: its beginning says what it is, its end
    which.
    """
    name = str(name)
    if width(name) <= columns:
        return name
    head = tail = ""
    parts = letters(name)
    for place in range(len(parts)):
        letter = parts[-1 - place // 2] if place % 2 else parts[place // 2]
        if width(head + tail + letter) + 1 > columns:
            break
        head, tail = (head, letter + tail) if place % 2 else (head + letter, tail)
    return f"{head}…{tail}"


def paragraphs(text: str, room: int) -> list[str]:
    """Text in lines of at most `room` columns, hanging under their first; what is to be copied stays whole.

    That is what stands between backticks, and a line that is a command.
    """
    lines = []
    for line in str(text).splitlines():
        words = line.lstrip()
        if words.startswith("python "):
            lines.append(line)
            continue
        whole = _QUOTED.sub(lambda found: found.group().replace(" ", _KEPT), words)
        indent = len(line) - len(words)
        parts = folded(whole, room - indent - HANGING)
        lines += [" " * (indent + HANGING * (number > 0)) + part.lstrip() for number, part in enumerate(parts)]
    return [line.replace(_KEPT, " ") for line in lines]
