"""What does a recipe reach, and what does the same model reach with transformers' Seq2SeqTrainer on equal tokens?

    python -m benchmarks.recipes summarise [--steps=N] [--rows=N] [--eval_rows=N] [--work=FOLDER] [--FLAG=VALUE ...]

Runs `train --preset=recipe_NAME` in a child process, then the peer on the very same shards: same tokenizer, same rows,
same shape, as many steps of as many rows; then the peer once more, with as many steps as it makes in the time that this
project took. All folders are measured by the same `evaluate` command on the same validation rows, those of the recipes g2p_*
by their word error rate too; beside them stand simple methods (the nearest neighbour's answer, the first sentence). The first ten
held-out rows and their answers, unchosen, go into docs/recipes.md. Other flags go to `train`. Peaks are anonymous memory of the whole process tree, sampled every
50 ms; the section of docs/benchmarks.md and its picture, memory over time beside the budget, are written at the end.

--peer_optimizer, --peer_learning_rate: of the Trainer; AdamW at 1e-3 with a cosine by default.
--peer_micro_batch: rows of one of its forwards; 8, for words 256.
--equal_time=False: without the second run of the peer.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path
from typing import Any

from benchmarks.parts import children
from benchmarks.parts.children import Child
from benchmarks.parts.memory_picture import draw_memory, thinned
from benchmarks.parts.pronunciation import answer
from benchmarks.parts.results import ROOT, markdown, picture_place, write_section
from benchmarks.parts.simple_answers import pairs_of, simple_scores
from benchmarks.parts.watched import events_of
from units import format_size

RECIPES = {
    "summarise": "rouge_l,rouge_1,exact_match", "translate": "chrf,char_bleu", "chat_zh": "char_bleu,chrf",
    "g2p_ten": "identical", "g2p_english": "identical",
}  # fmt: skip
WER = "wer"  # of the recipes for words
PROGRAM = str(ROOT / "train_low_mem.py")
ANSWERS, LONGEST_CELL = 10, 160
TOLD = ("model_preset", "d_model", "d_ff", "num_layers", "num_decoder_layers", "vocab_size", "max_seq_len", "max_target_len",
        "effective_batch_size", "optimizer", "learning_rate", "mixed_precision", "seed")  # fmt: skip
OWN = {
    "steps": "",
    "rows": "",
    "eval_rows": "256",
    "work": "",
    "peer_optimizer": "adamw_torch",
    "peer_learning_rate": "1e-3",
    "peer_micro_batch": "",
    "equal_time": "True",
}


def run(words: list[str], cwd: Path) -> Child:
    """Run a Python child and watch its memory; ends this program where it fails."""
    child = children.run(words, cwd)
    if child.returncode:
        sys.exit(f"{' '.join(words[:3])} ended with {child.returncode}:\n{(child.output + child.messages)[-3000:]}")
    return child


def scores(model: Path, recipe: str, validation: str, eval_rows: str, work: Path) -> dict[str, float]:
    """What `evaluate` says of a folder: loss, perplexity and the recipe's scores."""
    flags = [f"--model={model}", f"--validation_file={validation}", f"--eval_rows={eval_rows}",
             f"--eval_generate_rows={eval_rows}", f"--metrics={RECIPES[recipe]}", f"--cache_dir={work / 'cache'}",
             "--objective=pairs", *_lengths(work)]  # fmt: skip
    child = run([PROGRAM, "evaluate", *flags], ROOT)
    told = child.output + child.messages
    found = {}
    for name in ("loss", "perplexity", *RECIPES[recipe].split(",")):
        match = re.search(rf"^\s*{name}\s+([\d.,]+)\s*$", told, re.MULTILINE)
        if match:
            found[name] = float(match[1].replace(",", ""))
    if recipe.startswith("g2p"):
        told = run(
            ["-m", "benchmarks.parts.pronunciation", "score", str(model), validation, "--max_seq_len=64"], ROOT
        ).output
        found[WER] = float(told.split()[-1])  # the mean stands last
    return found


def _lengths(work: Path) -> list[str]:
    settings = json.loads((work / "runs" / "ours" / "settings.json").read_text(encoding="utf8"))
    return [f"--{name}={settings[name]}" for name in ("max_seq_len", "max_target_len")]


def measure(recipe: str, options: dict[str, str], flags: list[str], work: Path) -> dict[str, Any]:
    """Run ours and the peer; the figures of both."""
    folders = [f"--output_dir={work / 'runs'}", f"--log_dir={work / 'logs'}", f"--cache_dir={work / 'cache'}"]
    more = [f"--max_steps={options['steps']}"] if options["steps"] else []
    more += [f"--effective_batch_size={options['rows']}"] if options["rows"] else []
    ours = run(
        [PROGRAM, "train", f"--preset=recipe_{recipe}", "--run_name=ours", "--overwrite=True", *folders, *more, *flags],
        ROOT,
    )
    events = events_of(work / "logs" / "ours" / "metrics.jsonl")
    end = next(event for event in events if event["event"] == "end")
    settings = next(event for event in events if event["event"] == "start")["settings"]
    shards = max((work / "cache").glob("shards-*"), key=lambda path: path.stat().st_mtime)
    micro_batch = options["peer_micro_batch"] or ("256" if recipe.startswith("g2p") else "8")

    def peer(steps: int, folder: Path) -> Child:
        words = ["-m", "benchmarks.parts.recipe_peer", str(shards / "train"), str(work / "runs" / "ours"), str(folder),
                 str(steps), str(settings["effective_batch_size"]), options["peer_optimizer"],
                 options["peer_learning_rate"], str(settings["seed"]), micro_batch]  # fmt: skip
        return run(words, ROOT)

    runs = {"ours": (ours, work / "runs" / "ours"), "peer": (peer(end["step"], work / "peer"), work / "peer")}
    told = {name: settings[name] for name in TOLD}
    result: dict[str, Any] = {"steps": end["step"], "rows": settings["effective_batch_size"], "settings": told}
    if options["equal_time"] == "True":
        result["peer_steps"] = max(1, round(end["step"] * ours.seconds / runs["peer"][0].seconds))
        runs["peer_equal_time"] = peer(result["peer_steps"], work / "peer_equal_time"), work / "peer_equal_time"
    for name, (child, folder) in runs.items():
        found = scores(folder, recipe, str(settings["validation_file"]), options["eval_rows"], work)
        result[name] = {
            "seconds": child.seconds,
            "peak_bytes": child.peak_bytes,
            "curve": thinned(child.curve),
            **found,
        }
    plan = next(event for event in events if event["event"] == "plan")
    files, held_out, rows = str(settings["train_file"]), str(settings["validation_file"]), int(options["eval_rows"])
    result["simple"] = simple_scores(recipe, files, held_out, RECIPES[recipe], rows)
    length = [f"--max_seq_len={settings['max_seq_len']}", f"--max_new_tokens={settings['max_target_len']}"]
    result["answers"] = first_answers(work / "runs" / "ours", recipe, held_out, length)
    return {**result, "planned_peak_bytes": end["planned_peak_bytes"], "budget_bytes": plan["budget_bytes"]}


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


def table(recipe: str, figures: dict[str, Any]) -> str:
    """Both sides beside each other."""
    names = ["loss", *(name for name in RECIPES[recipe].split(",")), WER]
    sides = {"ours": "this project", "peer": "Seq2SeqTrainer, equal rows"}
    if "peer_equal_time" in figures:
        sides["peer_equal_time"] = f"Seq2SeqTrainer, equal time ({figures['peer_steps']:,} steps)"
    rows = []
    for name, shown in sides.items():
        side = figures[name]
        values = [f"{side[key]:.3f}" if key == "loss" else f"{side[key]:.1f}" for key in names if key in side]
        rows.append([shown, format_size(side["peak_bytes"]), f"{side['seconds'] / 60:.1f} min", *values])
    given = [key for key in names if key in figures["ours"]]
    for name, side in figures.get("simple", {}).items():
        rows.append([name, "", "", *(f"{side[key]:.1f}" if key in side else "" for key in given)])
    head = markdown(["trained by", "peak", "time", *given], rows)
    setup = (
        f"{figures['steps']} steps of {figures['rows']} rows, from random weights, shape "
        f"`{figures['settings']['model_preset']}`; planned peak {format_size(figures['planned_peak_bytes'])}. "
        "Scores in percent, greedy answers. The time includes preparing the data and, for this project, its evaluations."
    )
    return f"{setup}\n\n{head}"


def main(arguments: list[str]) -> None:
    """Measure the named recipe."""
    names = [word for word in arguments if not word.startswith("--")]
    if len(names) != 1 or names[0] not in RECIPES:
        sys.exit(__doc__)
    options, flags = dict(OWN), []
    for word in arguments:
        name, _, value = word.removeprefix("--").partition("=")
        if name in OWN:
            options[name] = value
        elif word.startswith("--"):
            flags.append(word)
    work = Path(options["work"] or ROOT / "data" / "cache" / "recipes" / f"work-{names[0]}").absolute()
    work.mkdir(parents=True, exist_ok=True)
    figures = measure(names[0], options, flags, work)
    body = table(names[0], figures)
    print(body, flush=True)
    body += f"\n\n![memory over time]({picture_place(f'recipe-{names[0]}')[1]})"
    draw_memory(picture_place(f"recipe-{names[0]}")[0], figures)
    answers = figures.pop("answers")
    write_section(f"recipe-{names[0]}", f"Recipe: {names[0]}, beside Seq2SeqTrainer on equal tokens", body, figures)
    told = f"The first {len(answers)} held-out rows, unchosen.\n\n{answers_table(answers)}"
    write_section(f"answers-{names[0]}", f"Answers: {names[0]}", told, answers, ROOT / "docs" / "recipes.md")


if __name__ == "__main__":
    main(sys.argv[1:])
