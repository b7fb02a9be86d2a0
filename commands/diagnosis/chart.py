"""How is a picture of bars made without a drawing library? As SVG: text that every browser shows, sharp at any size.

Idea: pairs of bars on one scale, predicted beside measured, grouped by what was changed. The library that would draw
it takes 60 MB of memory and is not needed for rectangles.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from xml.sax.saxutils import escape

WIDTH, LEFT, RIGHT = 900, 170, 230  # pixels: all, labels, figures after the bars
BAR, GAP, GROUP_GAP, HEAD = 11, 9, 12, 64
COLORS = ("#b8c4d6", "#2f6db5")  # predicted, measured
WARNING = "#c0392b"
FONT = "font-family='Helvetica, Arial, sans-serif'"
HALO = "paint-order='stroke' stroke='white' stroke-width='3'"  # words stay readable where the limit's line crosses them


@dataclass(frozen=True)
class Bars:
    """One line of the picture.

    Args:
        group, label: where it is.
        values: predicted and measured; None leaves the bar out.
        words: what is written after the bars. is_bad: whether the words are a warning.
    """

    group: str
    label: str
    values: tuple[float | None, float | None]
    words: str
    is_bad: bool = False


def bar_chart(title: str, names: tuple[str, str], lines: Sequence[Bars], limit: tuple[float, str] | None = None) -> str:
    """Draw pairs of bars from left to right; returns an SVG document.

    Args:
        names: of the two bars. lines: in order; those of one group stand together.
        limit: a value drawn as a line across, and its name; left out where it lies far beyond the bars.
    """
    largest = max((value for line in lines for value in line.values if value is not None), default=1.0)
    shows_limit = limit is not None and limit[0] <= 1.5 * largest
    scale = (WIDTH - LEFT - RIGHT) / max(largest, limit[0] if limit and shows_limit else 0.0, 1e-9)
    parts: list[str] = []
    y, group = float(HEAD), ""
    for line in lines:
        if line.group != group:
            y += GROUP_GAP if group else 0
            group = line.group
            parts.append(_text(16, y + BAR, group, weight="bold"))
            y += BAR + GAP
        parts += _pair(line, y, scale)
        y += 2 * BAR + GAP
    height = int(y + 24)
    if limit and shows_limit:
        parts = [*_limit(limit[1], LEFT + limit[0] * scale, y), *parts]  # below the words
    frame = f"<rect width='{WIDTH}' height='{height}' fill='white'/>"
    head = [_text(16, 24, title, size=15, weight="bold"), *_legend(names)]
    size = f"width='{WIDTH}' height='{height}' viewBox='0 0 {WIDTH} {height}'"
    return "\n".join([f"<svg xmlns='http://www.w3.org/2000/svg' {size}>", frame, *head, *parts, "</svg>", ""])


def _pair(line: Bars, y: float, scale: float) -> list[str]:
    parts = [_text(LEFT - 10, y + BAR + 4, line.label, anchor="end")]
    for number, value in enumerate(line.values):
        if value is not None:
            top, width = y + number * BAR, max(1.0, value * scale)
            color = COLORS[number]
            parts.append(f"<rect x='{LEFT}' y='{top:.0f}' width='{width:.1f}' height='{BAR - 1}' fill='{color}'/>")
    end = LEFT + max((value or 0.0) for value in line.values) * scale + 8
    return [*parts, _text(end, y + BAR + 4, line.words, color=WARNING if line.is_bad else "#333")]


def _legend(names: tuple[str, str]) -> list[str]:
    parts = []
    for number, name in enumerate(names):
        x = 16 + 120 * number
        parts += [f"<rect x='{x}' y='36' width='11' height='11' fill='{COLORS[number]}'/>", _text(x + 17, 46, name)]
    return parts


def _limit(name: str, x: float, bottom: float) -> list[str]:
    line = (
        f"<line x1='{x:.1f}' x2='{x:.1f}' y1='{HEAD - 6}' y2='{bottom:.0f}' stroke='{WARNING}' stroke-dasharray='4 3'/>"
    )
    return [line, _text(x, bottom + 14, name, anchor="middle", color=WARNING)]


def _text(
    x: float,
    y: float,
    words: str,
    *,
    anchor: str = "start",
    size: int = 12,
    weight: str = "normal",
    color: str = "#333",
) -> str:
    place = f"x='{x:.0f}' y='{y:.0f}' text-anchor='{anchor}' font-size='{size}' font-weight='{weight}' fill='{color}'"
    return f"<text {place} {FONT} {HALO}>{escape(words)}</text>"
