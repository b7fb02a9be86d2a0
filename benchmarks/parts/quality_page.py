"""A table and a picture of the losses of `benchmarks.quality`, for docs/benchmarks.md."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from statistics import mean
from typing import Any

from benchmarks.parts.results import PAGE, class_folder, markdown, picture_place, pyplot, write_section
from settings.fields import counted

DASHES = ("-", "--", "-.", ":")
BAR = 1.0  # percent of the reference's loss that a default may cost


def of_tier(results: Sequence[dict[str, Any]], tier: str) -> list[dict[str, Any]]:
    """The runs of one tier."""
    return [run for run in results if run["tier"] == tier]


def table(results: Sequence[dict[str, Any]], reference: str) -> str:
    """A line a tier: what a weight takes, the loss over the seeds, how far it is from the reference at equal seeds, and after
    which part of the tokens it was where the reference ended."""
    base = {run["seed"]: run["loss"] for run in of_tier(results, reference)}
    metric = metric_of(results)
    rows = []
    for tier in dict.fromkeys(run["tier"] for run in results):
        runs = of_tier(results, tier)
        losses = [run["loss"] for run in runs]
        distances = [100 * (run["loss"] / base[run["seed"]] - 1) for run in runs if run["seed"] in base]
        finite = all(map(math.isfinite, losses))
        rows.append([
            tier, runs[0]["compute"], f"{mean(run['bytes_per_weight'] for run in runs):.2f}",
            f"{runs[0]['learning_rate']:.2g}", f"{mean(losses):.4f}" if finite else "diverged",
            f"{min(losses):.4f}-{max(losses):.4f}" if finite and len(losses) > 1 else "-",
            f"{mean(distances):+.2f}% ({min(distances):+.2f} to {max(distances):+.2f})" if finite and distances else "-",
            _reached([_share_until(run, base[run["seed"]]) for run in runs if run["seed"] in base]),
            *(_finetuned(runs, of_tier(results, reference), metric) if metric else []),
        ])  # fmt: skip
    header = ["tier", "product dtype", "bytes a weight", "learning rate", "evaluation loss", "over seeds"]
    finetuned = ["finetuned: loss", "to the reference", metric, "over seeds"] if metric else []
    return markdown([*header, "to the reference", "reaches its loss after", *finetuned], rows)


def metric_of(results: Sequence[dict[str, Any]]) -> str | None:
    """How finetuned models were scored; None where none was finetuned."""
    finetuned: dict[str, Any] = next((run["finetuned"] for run in results if "finetuned" in run), {})
    return next((name for name in finetuned if name not in ("loss", "learning_rate", "task")), None)


def _finetuned(runs: Sequence[dict[str, Any]], references: Sequence[dict[str, Any]], metric: str) -> list[str]:
    """Loss, distance to the reference at equal seeds, score, and the scores' range."""
    base = {run["seed"]: run["finetuned"]["loss"] for run in references if "finetuned" in run}
    found = {run["seed"]: run["finetuned"] for run in runs if "finetuned" in run}
    if not found:
        return ["-"] * 4
    distances = [100 * (one["loss"] / base[seed] - 1) for seed, one in found.items() if seed in base]
    scores = [one[metric] for one in found.values()]
    return [
        f"{mean(one['loss'] for one in found.values()):.4f}", f"{mean(distances):+.2f}%" if distances else "-",
        f"{mean(scores):.1f}", f"{min(scores):.1f}-{max(scores):.1f}" if len(scores) > 1 else "-",
    ]  # fmt: skip


def _share_until(run: dict[str, Any], loss: float) -> float | None:
    """The part of a run's steps after which an evaluation first gave so low a loss; None: none did."""
    last, _ = run["evaluations"][-1]
    return next((step / last for step, found in run["evaluations"] if found <= loss), None)


def _reached(shares: Sequence[float | None]) -> str:
    found = [share for share in shares if share is not None]
    return f"{mean(found):.0%} of the tokens" if found and len(found) == len(shares) else "-"


def verdict(results: Sequence[dict[str, Any]], reference: str) -> str:
    """The tier of the least memory within the bar, in one sentence."""
    base = mean(run["loss"] for run in of_tier(results, reference))
    means = {}
    for tier in dict.fromkeys(run["tier"] for run in results):
        runs = of_tier(results, tier)
        means[tier] = (mean(run["bytes_per_weight"] for run in runs), mean(run["loss"] for run in runs))
    good = {tier: size for tier, (size, loss) in means.items() if loss <= base * (1 + BAR / 100)}
    least = min(good, key=lambda tier: good[tier])
    return (
        f"Least memory within {BAR:g}% of the reference ({reference}): **{least}**, {good[least]:.2f} bytes a weight."
    )


def draw(results: Sequence[dict[str, Any]], heading: str, tokens_per_step: int, path: Path) -> None:
    """Evaluation losses of the first seed over the tokens seen; dashes keep curves visible that lie on each other."""
    plt = pyplot()
    figure, axes = plt.subplots(figsize=(9, 5.5), dpi=110)
    for number, run in enumerate(run for run in results if run["seed"] == 0):
        steps, losses = zip(*run["evaluations"], strict=True)
        label, dashes = f"{run['tier']}: {run['loss']:.3f}", DASHES[number % len(DASHES)]
        axes.plot(
            [step * tokens_per_step / 1e6 for step in steps], losses, dashes, marker=".", linewidth=1.4, label=label
        )
    last = [run["loss"] for run in results if math.isfinite(run["loss"])]
    first = [loss for run in results for _, loss in run["evaluations"][1:2] if math.isfinite(loss)]
    axes.set(xlabel="million tokens", ylabel="evaluation loss", title=heading)
    axes.set_ylim(0.98 * min(last), min(max(first), 1.5 * max(last)))
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8)
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.tight_layout()
    figure.savefig(path, metadata={"Software": None})
    plt.close(figure)


def page_name(study: dict[str, Any]) -> str:
    """Of a study's section, picture and raw figures."""
    return f"quality-{study['size']}-{study['tokens'] / 1e6:g}M"


def published(study: dict[str, Any]) -> list[dict[str, Any]]:
    """The runs of this study whose figures lie beside its page, made by processors of this class; [] where there are none."""
    raw = PAGE.parent / "benchmarks" / class_folder() / f"{page_name(study)}.json"
    if not raw.exists():
        return []
    figures = json.loads(raw.read_text(encoding="utf8"))["figures"]
    same = ("size", "tokens", "rows", "length", "name", "task")
    if any(study.get(name) != figures["study"].get(name) for name in same):
        return []
    return [
        {
            **run, "loss": _or_nan(run["loss"]),
            **{name: [(step, _or_nan(loss)) for step, loss in run[name]] for name in ("evaluations", "curve")},
        } for run in figures["runs"]
    ]  # fmt: skip


def _or_nan(loss: float | None) -> float:
    """A loss as it was before JSON, which has no name for what is not finite."""
    return math.nan if loss is None else loss


def write_page(
    study: dict[str, Any], results: Sequence[dict[str, Any]], rates: dict[str, float], reference: str
) -> None:
    """Write picture and section, one for each size of model and number of tokens."""
    name = page_name(study)
    picture, link = picture_place(name)
    seeds = len({run["seed"] for run in results})
    text = Path(study["text"]).name if study["text"] else "the built-in sample"
    heading = f"Quality at equal tokens: {study['size']} model, {study['tokens'] / 1e6:g}M tokens of {text}, {counted(seeds, 'seed')}"
    draw(results, heading, study["rows"] * study["length"], picture)
    swept = ", ".join(sorted(rates))
    found = f"The learning rates of {swept} come from a sweep on a fifth of the tokens. " if rates else ""
    body = table(results, reference)
    body += f"\n\n{found}{verdict(results, reference)}\n\n![loss curves]({link})"
    print(f"\n{heading}\n{body}")
    figures = json.loads(json.dumps(list(results)), parse_constant=lambda word: None)  # NaN is no JSON
    write_section(name, heading, body, {"study": study, "rates": rates, "runs": figures})
