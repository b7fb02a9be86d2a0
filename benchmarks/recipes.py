"""A recipe's scores, and those of the same model trained by transformers' Seq2SeqTrainer on equal tokens.

    python -m benchmarks.recipes summarise [--steps=N] [--rows=N] [--eval_rows=N] [--work=FOLDER] [--FLAG=VALUE ...]

Runs `train --preset=recipe_NAME` in a child process, then the peer on the very same shards: same tokenizer, same rows,
same shape, as many steps of as many rows; then the peer once more, with as many steps as it makes in the time that this
project took. All folders are measured by the same `evaluate` command on the same validation rows, those of the recipes
g2p_* by their word error rate too; beside them stand simple methods (the nearest neighbour's answer, the first
sentence). The first ten held-out rows and their answers, not selected, go into docs/recipes.md. Other flags go to
`train`. Peaks are anonymous memory of the whole process tree, sampled every 50 ms; the section of docs/benchmarks.md
is written at the end.

The recipes for encoders with heads have no peer:

    python -m benchmarks.recipes gb1 [--seed=N] [--work=FOLDER] [--FLAG=VALUE ...]

trains one seed, evaluates the folder, and adds a row to the recipe's table in docs/recipes.md, where rows of other
seeds stay. So does

    python -m benchmarks.recipes akkadian [--seed=N] [--work=FOLDER] [--FLAG=VALUE ...]
    python -m benchmarks.recipes akkadian --finished=LOG_FOLDER --equal_rows=False --peer_steps=N --eval_rows=2812

with BLEU and chrF++ of all held-out rows. It has a peer too, which is trained where --peer_steps names its steps, or is
auto.

--peer_optimizer, --peer_learning_rate: of the Trainer; AdamW at 1e-3 with a cosine by default.
--peer_micro_batch: rows of one of its forwards; 8, for words 256. --peer_bf16=True: its products in bfloat16.
--equal_rows=False, --equal_time=False: without that run of the peer. How many steps it makes in equal time is told by
its run on equal rows; without that, by two short runs.
--peer_steps=N: of its run in equal time, where that would be too long; its row says that it took less. auto: those of
equal time. --finished=LOG_FOLDER: of a run that has ended, such as logs/summarise; it stands for this project's, which
is not run anew. Its peak and its time, over all its starts, are those that it told itself.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import FIGURES, ROOT, SummaryRow, class_folder, markdown, show_section, write_part
from benchmarks.parts import children
from benchmarks.parts.pronunciation import answer
from benchmarks.parts.rows import read_rows
from benchmarks.parts.simple_answers import pairs_of, simple_scores
from benchmarks.parts.watched import count_weights, first_event, last_event
from data.prepare.preparing import find_prepared
from model.formats.answering import DECODING_SETTINGS, other_than_default
from settings.consistency import CLASS_SCORES, NUMBER_SCORES
from settings.declared import GenerateConfig
from settings.loading import load
from support.units import format_size
from training.report.run_files import SETTINGS_FILE

TEXT_SCORES = ("geometric_mean", "bleu", "chrf++")  # in percent
RECIPES = {
    "summarise": "rouge_l,rouge_1,exact_match",
    "translate": "chrf,char_bleu",
    "chat_zh": "char_bleu,chrf",
    "g2p_ten": "identical",
    "g2p_english": "identical",
    "akkadian": ",".join(TEXT_SCORES),
}
# The measure of the recipes that are measured by seeds, on validation:
SEED_RECIPES = {
    "gb1": "spearman",
    "structure": "accuracy",
    "classify": "accuracy",
    "akkadian": "geometric_mean",
}
SEED_SCORES = (*TEXT_SCORES, *CLASS_SCORES, *NUMBER_SCORES)
EVERY_ROW = ["--eval_rows=10000000", "--eval_generate_rows=10000000"]
WER = "wer"  # of the recipes for words
LENGTHS = ("max_seq_len", "max_target_len")
PROGRAM = str(ROOT / "train_low_mem.py")
ANSWERS, LONGEST_CELL = 10, 160
TOLD = (
    "model_preset",
    "d_model",
    "d_ff",
    "num_layers",
    "num_decoder_layers",
    "vocab_size",
    "max_seq_len",
    "max_target_len",
    "effective_batch_size",
    "optimizer",
    "learning_rate",
    "mixed_precision",
    "seed",
    "num_beams",
    "length_penalty",
)
OWN = {
    "steps": "",
    "rows": "",
    "eval_rows": "256",
    "work": "",
    "peer_optimizer": "adamw_torch",
    "peer_learning_rate": "1e-3",
    "peer_micro_batch": "",
    "peer_bf16": "False",
    "equal_rows": "True",
    "equal_time": "True",
    "peer_steps": "",
    "finished": "",
}
TRAINED_FILE = "trained.json"  # what a run of the peer took, beside its model
SHORTER = 0.8  # of the time that ours took is no equal time
SHORT_RUNS = (5, 25)  # steps of the peer that tell how long one takes, and how long it takes to begin


@dataclass(frozen=True)
class Trained:
    """A model that a run has left, and what that run took."""

    folder: Path
    seconds: float
    peak_bytes: int


def scores(model: Path, recipe: str, settings: dict[str, Any], eval_rows: str) -> dict[str, float]:
    """What `evaluate` says of a folder: loss, perplexity and the recipe's scores."""
    alike = _same(settings, "validation_file", "cache_dir", "objective", *LENGTHS)
    # ours would search by itself, the peer's would not
    known = {name: settings[name] for name in DECODING_SETTINGS}
    kept = other_than_default(GenerateConfig(**known))
    searched = children.words_of(kept)
    flags = [
        f"--model={model}",
        f"--eval_rows={eval_rows}",
        f"--eval_generate_rows={eval_rows}",
        f"--metrics={RECIPES[recipe]}",
        "--json=True",
        *alike,
        *searched,
    ]
    child = children.must_run([PROGRAM, "evaluate", *flags])
    told = json.loads(child.output)
    found = {"scoring_seconds": child.seconds, "scoring_peak_bytes": child.peak_bytes}
    found |= {name: told[name] for name in ("loss", "perplexity", *RECIPES[recipe].split(","))}
    if recipe.startswith("g2p"):
        words = ["score", str(model), settings["validation_file"], "--max_seq_len=64", *searched]
        told = children.must_run(["-m", "benchmarks.parts.pronunciation", *words]).output
        found[WER] = float(told.split()[-1])  # the mean stands last
    return found


def _same(settings: dict[str, Any], *names: str) -> list[str]:
    """The flags by which a program has these settings too."""
    return [f"--{name}={settings[name]}" for name in names if settings[name] is not None]


def measure_seed(recipe: str, options: dict[str, str], flags: list[str], work: Path) -> dict[str, Any]:
    """Train one seed of a recipe; its figures."""
    answered = [f"--metrics={RECIPES[recipe]}", *EVERY_ROW] if recipe in RECIPES else []
    ours, events = _our_run(recipe, options, flags, work)
    settings, end = first_event(events, "start")["settings"], last_event(events, "end")
    model, files = ours.folder, _same(settings, "validation_file", "cache_dir")
    words = [PROGRAM, "evaluate", f"--model={model}", *files, *answered, "--json=True"]
    found = json.loads(children.must_run(words).output)
    scores_of_run = {name: found[name] for name in ("loss", *SEED_SCORES) if name in found}
    return {
        "seed": settings["seed"],
        **scores_of_run,
        "weights": count_weights(model),
        "steps": end["step"],
        "seconds": ours.seconds,
        "peak_bytes": ours.peak_bytes,
        "planned_peak_bytes": end["planned_peak_bytes"],
    }


def seed_table(recipe: str, runs: Sequence[dict[str, Any]]) -> str:
    """All seeds of a recipe."""
    measure = SEED_RECIPES[recipe]
    scores = (measure, *SEED_SCORES, "loss")
    names = list(dict.fromkeys(name for name in scores if all(name in run for run in runs)))

    def shown(name: str, value: float) -> str:
        return f"{value:.1f}" if name in TEXT_SCORES else f"{value:.4f}"

    rows = [
        [
            str(one["seed"]),
            *(shown(name, one[name]) for name in names),
            f"{one['weights'] / 1e6:.1f}M",
            f"{one['steps']:,}",
            f"{one['seconds'] / 60:.1f} min",
            f"{format_size(one['peak_bytes'])} (planned {format_size(one['planned_peak_bytes'])})",
        ]
        for one in runs
    ]
    mean = shown(measure, sum(one[measure] for one in runs) / len(runs))
    return f"Mean {measure} on validation: {mean}.\n\n{markdown(['seed', *names, 'weights', 'steps', 'time', 'peak'], rows)}"


def _our_run(
    recipe: str, options: dict[str, str], flags: list[str], work: Path
) -> tuple[Trained, list[dict[str, Any]]]:
    """Train by the preset, unless a finished run is named; with the events of its log."""
    if options["finished"]:
        events = read_rows(Path(options["finished"]) / "metrics.jsonl")
        return Trained(Path(last_event(events, "end")["model_dir"]), *taken(events)), events
    folders = [f"--output_dir={work / 'runs'}", f"--log_dir={work / 'logs'}", f"--cache_dir={work / 'cache'}"]
    more = [f"--max_steps={options['steps']}"] if options["steps"] else []
    more += [f"--effective_batch_size={options['rows']}"] if options["rows"] else []
    flags = [*folders, *more, *flags]
    words = [PROGRAM, "train", f"--preset=recipe_{recipe}", "--run_name=ours", "--overwrite=True", *flags]
    child = children.must_run(words)
    events = read_rows(work / "logs" / "ours" / "metrics.jsonl")
    return Trained(work / "runs" / "ours", child.seconds, child.peak_bytes), events


def taken(events: list[dict[str, Any]]) -> tuple[float, int]:
    """Seconds and peak of a run that has ended, over all its starts; of one that was broken off from first to last
    step.
    """
    starts: list[list[dict[str, Any]]] = []
    for event in events:
        if event["event"] == "start":
            starts.append([])
        elif event["event"] == "step":
            starts[-1].append(event)
    end = last_event(events, "end")
    earlier = (steps[-1]["time"] - steps[0]["time"] + steps[0]["seconds"] for steps in starts[:-1] if steps)
    peaks = (step["peak_bytes"] for steps in starts for step in steps)
    return sum(earlier) + end["watched_seconds"], max(end["measured_peak_bytes"], *peaks)


class Peer:
    """Seq2SeqTrainer, on the rows of a run of ours.

    Args:
        settings: of that run.
        ours: its model, whose shape and tokenizer are taken.
        options: of this program.
        work: where the models go.
    """

    def __init__(self, recipe: str, settings: dict[str, Any], ours: Path, options: dict[str, str], work: Path) -> None:
        prepared = find_prepared(load("train", {"config": str(ours / SETTINGS_FILE)}))
        if prepared is None:
            sys.exit(f"the rows that {ours} was trained on are no longer in {settings['cache_dir']}")
        micro_batch = options["peer_micro_batch"] or ("256" if recipe.startswith("g2p") else "8")
        self._rows, self._ours, self._work = prepared.train_dir, ours, work
        self._words = [
            str(settings["effective_batch_size"]),
            options["peer_optimizer"],
            options["peer_learning_rate"],
            str(settings["seed"]),
            micro_batch,
            options["peer_bf16"],
        ]

    def train(self, steps: int, name: str) -> Trained:
        """Train from random weights, into the folder `name`; one that lies there after as many such steps is taken as
        it is.
        """
        folder = self._work / name
        places = [str(place) for place in (self._rows, self._ours, folder)]
        words = ["-m", "benchmarks.parts.recipe_peer", *places, str(steps), *self._words]
        before = json.loads((folder / TRAINED_FILE).read_text()) if (folder / TRAINED_FILE).exists() else {}
        if before.get("words") == words:
            return Trained(folder, before["seconds"], before["peak_bytes"])
        child = children.must_run(words)
        one = Trained(folder, child.seconds, child.peak_bytes)
        took = {"seconds": one.seconds, "peak_bytes": one.peak_bytes}
        (folder / TRAINED_FILE).write_text(json.dumps({"words": words, **took}))
        return one

    def steps_in(self, seconds: float) -> int:
        """How many steps it makes in that time, at least 1, by two short runs."""
        few, more = SHORT_RUNS
        shorter, longer = (self.train(steps, "peer_short").seconds for steps in SHORT_RUNS)
        return max(1, few + round((seconds - shorter) / (longer - shorter) * (more - few)))


def measure(recipe: str, options: dict[str, str], flags: list[str], work: Path) -> dict[str, Any]:
    """Run ours and the peer; the figures of both."""
    ours, events = _our_run(recipe, options, flags, work)
    settings, end = first_event(events, "start")["settings"], last_event(events, "end")
    runs, peer = {"ours": ours}, Peer(recipe, settings, ours.folder, options, work)
    told = {name: settings[name] for name in TOLD}
    result: dict[str, Any] = {"steps": end["step"], "rows": settings["effective_batch_size"], "settings": told}
    if options["equal_rows"] == "True":
        runs["peer"] = peer.train(end["step"], "peer")
    if options["equal_time"] == "True":
        if options["peer_steps"] not in ("", "auto"):
            steps = int(options["peer_steps"])
        elif "peer" in runs:
            steps = max(1, round(end["step"] * ours.seconds / runs["peer"].seconds))
        else:
            steps = peer.steps_in(ours.seconds)
        result["peer_steps"] = steps
        runs["peer_equal_time"] = peer.train(steps, "peer_equal_time")
    for name, one in runs.items():
        found = scores(one.folder, recipe, settings, options["eval_rows"])
        result[name] = {"seconds": one.seconds, "peak_bytes": one.peak_bytes, **found}
    files, held_out, rows = str(settings["train_file"]), str(settings["validation_file"]), int(options["eval_rows"])
    result["simple"] = simple_scores(recipe, files, held_out, RECIPES[recipe], rows)
    length = [f"--max_seq_len={settings['max_seq_len']}", f"--max_new_tokens={settings['max_target_len']}"]
    result["answers"] = first_answers(ours.folder, recipe, held_out, length)
    return {
        **result,
        "planned_peak_bytes": end["planned_peak_bytes"],
        "budget_bytes": first_event(events, "plan")["budget_bytes"],
    }


def first_answers(model: Path, recipe: str, held_out: str, flags: list[str]) -> list[dict[str, str]]:
    """What the model answers to the first held-out rows, beside what was right."""
    asked = pairs_of(held_out, recipe)[:ANSWERS]
    answers = answer(str(model), [prompt for prompt, _ in asked], flags)
    return [
        {"prompt": prompt, "right": right, "answer": given}
        for (prompt, right), given in zip(asked, answers, strict=True)
    ]


def answers_table(answers: list[dict[str, str]]) -> str:
    """Prompts, right answers and given ones; long ones are cut."""

    def cell(text: str) -> str:
        text = " ".join(text.split()).replace("|", "\\|").replace("<", "\\<")
        return text if len(text) <= LONGEST_CELL else f"{text[: LONGEST_CELL - 1]}…"

    return markdown(["prompt", "right", "answered"], [[cell(text) for text in one.values()] for one in answers])


def _search(made: dict[str, Any]) -> str:
    """How the answers that are scored were written."""
    if made["num_beams"] == 1:
        return "greedy answers"
    return f"answers with {made['num_beams']} beams and a length penalty of {made['length_penalty']}"


def table(recipe: str, figures: dict[str, Any]) -> str:
    """Both sides beside each other."""
    names = ["loss", *(name for name in RECIPES[recipe].split(",")), WER]
    sides = {"ours": "this project"}
    if "peer" in figures:
        sides["peer"] = "Seq2SeqTrainer, equal rows"
    if "peer_equal_time" in figures:
        is_equal = figures["peer_equal_time"]["seconds"] > SHORTER * figures["ours"]["seconds"]
        sides["peer_equal_time"] = (
            f"Seq2SeqTrainer, {'equal' if is_equal else 'less'} time ({figures['peer_steps']:,} steps)"
        )
    rows = []
    for name, shown in sides.items():
        side = figures[name]
        values = [f"{side[key]:.3f}" if key == "loss" else f"{side[key]:.1f}" for key in names if key in side]
        rows.append([shown, format_size(side["peak_bytes"]), f"{side['seconds'] / 60:.1f} min", *values])
    given = [key for key in names if key in figures["ours"]]
    for name, side in figures.get("simple", {}).items():
        rows.append([name, "", "", *(f"{side[key]:.1f}" if key in side else "" for key in given)])
    head = markdown(["trained by", "peak", "time", *given], rows)
    made = figures["settings"]
    setup = (
        f"{figures['steps']} steps of {figures['rows']} rows, from random weights, {made['d_model']} wide, "
        f"{made['num_layers']} + {made['num_decoder_layers']} blocks, {made['vocab_size']:,} tokens, "
        f"{made['optimizer']}; planned peak {format_size(figures['planned_peak_bytes'])}. "
        f"Scores in percent, {_search(made)}. The time includes preparing the data and, for this project, its "
        f"evaluations."
    )
    return f"{setup}\n\n{head}"


def summary(recipe: str, figures: dict[str, Any]) -> list[SummaryRow]:
    """Peak and first score of both sides."""
    peer = figures.get("peer") or figures.get("peer_equal_time")
    if peer is None:
        return []
    ours = figures["ours"]
    score = WER if WER in ours else RECIPES[recipe].split(",")[0]
    our_score, peer_score = (f"{side[score]:.1f} in {side['seconds'] / 60:.0f} min" for side in (ours, peer))
    work = f"recipe {recipe}"
    return [
        ("memory", work, format_size(ours["peak_bytes"]), format_size(peer["peak_bytes"])),
        ("quality", f"{work}, {score}", our_score, peer_score),
    ]


def main(arguments: list[str]) -> None:
    """Measure the named recipe."""
    names, options, others = children.options_and_flags(arguments, OWN)
    if len(names) != 1 or names[0] not in (*RECIPES, *SEED_RECIPES):
        sys.exit(__doc__)
    flags = children.words_of(others)
    work = Path(options["work"] or ROOT / "data" / "cache" / "recipes" / f"work-{names[0]}").absolute()
    work.mkdir(parents=True, exist_ok=True)
    if names[0] in SEED_RECIPES and not options["peer_steps"]:
        section = f"labels-{names[0]}"
        file = FIGURES / class_folder() / f"{section}.json"
        one = measure_seed(names[0], options, flags, work)
        earlier = json.loads(file.read_text())["figures"] if file.exists() else []
        kept_runs = [each for each in earlier if each["seed"] != one["seed"]]
        runs = sorted([*kept_runs, one], key=lambda each: each["seed"])
        print(body := seed_table(names[0], runs), flush=True)
        write_part(ROOT / "docs" / "recipes.md", section, f"Seeds: {names[0]}", body, runs)
        return
    figures = measure(names[0], options, flags, work)
    body = table(names[0], figures)
    answers = figures.pop("answers")
    beside = ", compared with Seq2SeqTrainer" if "peer" in figures or "peer_equal_time" in figures else ""
    show_section(f"recipe-{names[0]}", f"Recipe: {names[0]}{beside}", body, figures, summary(names[0], figures))
    told = f"The first {len(answers)} held-out rows, not selected.\n\n{answers_table(answers)}"
    write_part(ROOT / "docs" / "recipes.md", f"answers-{names[0]}", f"Answers: {names[0]}", told, answers)


if __name__ == "__main__":
    main(sys.argv[1:])
