"""A picture of memory over time: this project, Seq2SeqTrainer, and the budget."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from common.units import MIB, format_size

COLORS = {"ours": "#2f6db5", "peer": "#c9772b"}
POINTS = 150
INK, GRID = "#333333", "#e4e4e4"
WORDS_AT = 0.55  # of the curve's height, below what goes up and down
NAMES = {"ours": "this project", "peer": "Seq2SeqTrainer"}


def thinned(curve: Sequence[tuple[float, int]]) -> list[tuple[float, int]]:
    """At most `POINTS` points of a curve: of neighbours the time of the first, and the most that they held."""
    size = -(-len(curve) // POINTS)
    parts = [curve[start : start + size] for start in range(0, len(curve), size)] if curve else []
    return [(round(part[0][0], 1), max(held for _, held in part)) for part in parts]


def draw_memory(picture: Path, figures: dict[str, Any]) -> None:
    """Draw both curves and the budget's line.

    Args:
        figures: `ours` and `peer`, each with `curve` of (seconds, bytes) and `peak_bytes`; `budget_bytes`.
    """
    import matplotlib

    matplotlib.use("Agg")  # It draws into files alone.
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(9, 3.4))
    longest = max(figures[name]["curve"][-1][0] for name in COLORS)
    for name, color in COLORS.items():
        minutes = [seconds / 60 for seconds, _ in figures[name]["curve"]]
        held = [size / MIB for _, size in figures[name]["curve"]]
        axes.plot(minutes, held, color=color, linewidth=1.6)
        axes.fill_between(minutes, held, color=color, alpha=0.12, linewidth=0)
        words = f"{NAMES[name]}: {format_size(figures[name]['peak_bytes'])}, {minutes[-1]:.0f} min"
        left = name == "ours"  # the shorter curve, whose words are longer than it
        place = (longest / 60 / 80 if left else minutes[-1] / 2, max(held) * WORDS_AT)
        axes.annotate(
            words, place, ha="left" if left else "center", va="center", color=color, weight="bold", fontsize=11
        )
    budget = figures["budget_bytes"] / MIB
    most = max(figures[name]["peak_bytes"] for name in COLORS) / MIB
    if budget < 1.5 * most:  # a budget far above both would leave the curves flat
        axes.axhline(budget, color=INK, linestyle="--", linewidth=1)
        words = f"the budget, {format_size(figures['budget_bytes'])}"
        axes.annotate(words, (longest / 60, budget), ha="right", va="bottom", color=INK, fontsize=10)
    axes.set(xlabel="minutes", ylabel="memory of all processes, MiB", ylim=(0, 1.18 * most), xlim=(0, None))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120, bbox_inches="tight")
    plt.close(figure)
