"""How are times and tables put on a screen? As people read them, and as wide as they are shown: Chinese letters take two."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Sequence

from language import Said, say

# what a line may be broken after: blanks, and wide letters where no closing mark follows
_WIDE = "\u2e80-\u9fff\uac00-\ud7af\uf900-\ufaff\uff00-\uffef"
_CLOSING = "，。、；：！？）】》」』”’%"
_PIECES = re.compile(
    rf"\s*(?:[{_WIDE}](?=[^{_CLOSING}]|$)|[^\s{_WIDE}]+[{_CLOSING}]*|[{_WIDE}][{_CLOSING}]+|[{_CLOSING}]+)\s*|\s+"
)


def duration(seconds: float) -> Said:
    """Show a time as people read it: `42s`, `3:05 min`, `2:07 h`."""
    whole = round(seconds)
    if whole < 60:
        return say("{seconds}s", seconds=whole)
    if whole < 3600:
        return say("{minutes}:{seconds} min", minutes=whole // 60, seconds=f"{whole % 60:02}")
    minutes = round(seconds / 60)
    return say("{hours}:{minutes} h", hours=minutes // 60, minutes=f"{minutes % 60:02}")


def about(seconds: float, low: float, high: float) -> Said:
    """Show an estimate as people read it: `about 3 h 20 min, between 2 h 50 min and 4 h`."""
    middle, least, most = _roughly(seconds), _roughly(low), _roughly(high)
    if least == most:
        return say("about {time}", time=middle)
    return say("about {time}, between {least} and {most}", time=middle, least=least, most=most)


def _roughly(seconds: float) -> Said:
    """As fine as an estimate can be: seconds up to 90, minutes up to 1 h, tens of minutes up to 2 days, then hours."""
    if seconds < 90:
        return say("{seconds} s", seconds=max(1, round(seconds)))
    minutes = round(seconds / 60)
    if minutes < 60:
        return say("{minutes} min", minutes=minutes)
    if minutes < 48 * 60:
        hours, tens = divmod(round(seconds / 600), 6)
        return say("{hours} h {minutes} min", hours=hours, minutes=10 * tens) if tens else say("{hours} h", hours=hours)
    days, hours = divmod(round(seconds / 3600), 24)
    return say("{days} days {hours} h", days=days, hours=hours) if hours else say("{days} days", days=days)


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Pad all cells but the last of each row to the width of their column."""
    widths: dict[int, int] = {}
    for row in rows:
        for column, cell in enumerate(row[:-1]):
            widths[column] = max(widths.get(column, 0), width(cell))
    return [
        "  ".join([*(cell + " " * (widths[column] - width(cell)) for column, cell in enumerate(row[:-1])), *row[-1:]])
        for row in rows
    ]


def width(text: str) -> int:
    """Columns that text takes on a terminal: Chinese letters take two, marks over letters none."""
    return sum(2 if unicodedata.east_asian_width(c) in "WF" else not unicodedata.combining(c) for c in text)


def one_line(text: str, letters: int = 160) -> str:
    """Text without line ends, cut where it is long."""
    flat = " ".join(text.split())
    return flat if len(flat) <= letters else flat[: letters - 3] + "..."


def folded(line: str, room: int, indent: int = 0) -> list[str]:
    """Break a line between words, or between Chinese letters, into lines of at most `room` columns.

    Args:
        indent: blanks before all but the first, fewer where they would take more than half of the room. A word that is
            wider than a line stays whole: it may be a name to copy.
    """
    indent = min(indent, room // 2)
    lines, now = [], ""
    for piece in _PIECES.findall(line):
        if now.strip() and width(now) + width(piece.rstrip()) > room:
            lines.append(now.rstrip())
            now = " " * indent + piece.lstrip()
        else:
            now += piece
    return [*lines, now.rstrip()]
