"""What does a training hold while it runs? A picture of memory over time: this project, the usual trainer, and the budget."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from units import MIB, format_size

COLORS = {"ours": "#2f6db5", "peer": "#c9772b"}
INK, GRID = "#333333", "#e4e4e4"
NAMES = {"ours": "this project", "peer": "Seq2SeqTrainer"}


def draw_memory(picture: Path, figures: dict[str, Any]) -> None:
    """Draw both curves and the budget's line.

    Args:
        figures: `ours` and `peer`, each with `curve` of (seconds, bytes) and `peak_bytes`; `budget_bytes`.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(9, 3.4))
    for name, color in COLORS.items():
        minutes = [seconds / 60 for seconds, _ in figures[name]["curve"]]
        held = [size / MIB for _, size in figures[name]["curve"]]
        axes.plot(minutes, held, color=color, linewidth=1.6)
        axes.fill_between(minutes, held, color=color, alpha=0.12, linewidth=0)
        where = max(range(len(held)), key=held.__getitem__)
        words = f"{NAMES[name]}: peak {format_size(figures[name]['peak_bytes'])}"
        axes.annotate(
            words, (minutes[-1], held[where]), ha="right", va="bottom", color=color, weight="bold", fontsize=10
        )
    budget = figures["budget_bytes"] / MIB
    most = max(figures[name]["peak_bytes"] for name in COLORS) / MIB
    if budget < 1.5 * most:  # a budget far above both would leave the curves flat
        axes.axhline(budget, color=INK, linestyle="--", linewidth=1)
        axes.annotate(f"budget {format_size(figures['budget_bytes'])}", (0, budget), va="bottom", color=INK, fontsize=9)
    axes.set(xlabel="minutes", ylabel="memory of all processes, MiB", ylim=(0, 1.18 * most), xlim=(0, None))
    axes.grid(color=GRID, linewidth=0.8)
    axes.set_axisbelow(True)
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    picture.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(picture, dpi=120, bbox_inches="tight")
    pyplot.close(figure)
