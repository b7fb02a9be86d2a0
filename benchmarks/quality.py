"""Quality of a model trained by each way of saving memory: `python -m benchmarks.quality [--name=value ...]`.

Every tier (dtype at rest, optimizer) trains the same model from the same initial weights on the same rows in the
same order, for the same number of tokens; only what a tier is about differs. Each run is a child process of the trainer
itself. The study decides the defaults: the least memory whose loss is within 1% of the reference.

    --size=small --tokens=20M --seeds=3 --text=FILE --tiers="muon;8bit" --rows=16 --length=256 --threads=N
    --tune=True      first find each optimizer's learning rate on a fifth of the tokens
    --tiers          parts of names, between ";"; the reference always runs
    --folder=DIR     where runs are kept (data/cache/quality)
    --jobs=N         so many runs beside each other (1); give each its share of the cores by --threads
    --finetune=FILE --held_out=FILE --finetune_steps=500 --metric=rouge_l
                     finetune each model alike on prompts and responses, in its tier's own way, and score its answers

It can be stopped at any moment and started again with the same words: finished runs are kept in `runs.json`, one that was
aborted continues from its last checkpoint. The page is written after each seed, and a study whose page lies here takes the
finished runs from it, so a long one may go on on another day and machine.
"""

from __future__ import annotations

import json
import math
import shutil
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from threading import Lock
from typing import Any

from benchmarks.parts.children import options_of, words_of
from benchmarks.parts.quality_page import published, write_page
from benchmarks.parts.results import ROOT
from benchmarks.parts.rows import read_rows
from benchmarks.parts.watched import first_event
from memory.estimate.precision import dtype_bytes
from memory.estimate.workload import Workload, state_bytes
from model.shapes import weight_counts
from optimizers import OPTIMIZERS
from settings.consistency import SCORES
from settings.declared import T5ModelConfig
from settings.fields import AUTO
from storage import write_text

SIZES: dict[str, dict[str, Any]] = {  # weights with embedding
    "tiny": {"vocab_size": 1024, "d_model": 32, "d_kv": 8, "d_ff": 64, "num_layers": 1, "num_decoder_layers": 1, "num_heads": 4},
    "mini": {"vocab_size": 4096, "d_model": 128, "d_kv": 32, "d_ff": 512, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4},  # 1.4M
    "small": {"model_preset": "tiny"},  # 6M
    "medium": {"vocab_size": 32128, "d_model": 384, "d_ff": 1024, "num_layers": 3, "num_decoder_layers": 3, "num_heads": 6},  # 20M
    "large": {"model_preset": "t5-small"},  # 60M
}  # fmt: skip
SWEEP = (0.3, 1.0, 3.0)  # factors on an optimizer's own learning rate; more where the best is the first or the last
SWEEP_SHARE, SWEEP_LIMITS = 5, (0.03, 30.0)
CURVE_POINTS = 100


@dataclass(frozen=True)
class Tier:
    """A way to hold and update weights; flags of the trainer."""

    name: str
    optimizer: str
    mixed_precision: str = "bf16"


REFERENCE = Tier("fp32, adamw_rms", "adamw_rms", "no")
TIERS = (
    REFERENCE,
    Tier("fp32, adafactor", "adafactor", "no"),
    Tier("bf16 stochastic, adamw_rms", "adamw_rms"),
    Tier("bf16 stochastic, adamw_8bit", "adamw_8bit"),
    Tier("bf16 stochastic, adafactor", "adafactor"),
    Tier("bf16 stochastic, muon", "muon"),
    Tier("bf16 stochastic, adamw", "adamw"),
)


@dataclass(frozen=True)
class Task:
    """What each model is finetuned on; files of prompts and responses."""

    train_file: str
    validation_file: str
    steps: int
    metric: str

    def told(self) -> dict[str, Any]:
        """What it is, wherever its files lie."""
        files = {name: Path(getattr(self, name)).name for name in ("train_file", "validation_file")}
        return {**asdict(self), **files}

    def flags(self, base: Path, pretraining: dict[str, Any]) -> dict[str, Any]:
        """The trainer's flags, with the precision, optimizer and seed that `base` was pretrained with."""
        kept = ("optimizer", "mixed_precision", "seed", "memory_mode", "num_threads", "cache_dir")
        return {
            **{name: pretraining[name] for name in kept},
            "is_finetune": True, "finetune_from": base, "train_file": self.train_file,
            "validation_file": self.validation_file, "max_seq_len": 128, "max_target_len": 32, "effective_batch_size": 32,
            "max_steps": self.steps, "eval_steps": self.steps, "save_steps": self.steps, "keep_latest_n_ckp": 1,
            "metrics": self.metric, "eval_rows": 1024, "eval_generate_rows": 1024, "sample_rows": 0,
        }  # fmt: skip


@dataclass(frozen=True)
class Study:
    """What all runs have in common."""

    size: str = "small"
    tokens: int = 20_000_000  # of encoder input
    text: str | None = None
    rows: int = 16
    length: int = 256
    threads: str = AUTO
    folder: Path = ROOT / "data" / "cache" / "quality"
    task: Task | None = None

    @property
    def name(self) -> str:
        """A folder for everything but the number of tokens."""
        text = Path(self.text).stem if self.text else "sample"
        return f"{self.size}-{text}-{self.rows}x{self.length}"

    def flags(self, tier: Tier, seed: int, rate: float | None, tokens: int) -> dict[str, Any]:
        """The trainer's flags of one run."""
        steps = max(10, tokens // (self.rows * self.length))
        flags = {
            **SIZES[self.size], "optimizer": tier.optimizer, "mixed_precision": tier.mixed_precision,
            "learning_rate": AUTO if rate is None else rate, "seed": seed,
            "objective": "span", "max_seq_len": self.length, "effective_batch_size": self.rows, "max_steps": steps,
            "eval_steps": math.ceil(steps / 20), "save_steps": math.ceil(steps / 10), "keep_latest_n_ckp": 1,
            "eval_rows": 256, "sample_rows": 0, "dropout_rate": 0.0, "memory_mode": "standard",
            "num_threads": self.threads, "cache_dir": self.folder / "shards",
        }  # fmt: skip
        return {**flags, "train_file": self.text} if self.text else flags


OPTIONS = {
    "size": Study.size, "tokens": "20M", "seeds": "3", "text": "", "tiers": "", "rows": str(Study.rows), "length": str(Study.length),
    "threads": Study.threads, "tune": "False", "folder": str(Study.folder), "jobs": "1", "finetune": "", "held_out": "",
    "finetune_steps": "500", "metric": "rouge_l",
}  # fmt: skip


class Runs:
    """Finished runs by name, kept in a file; those that are missing are made. Several threads may ask."""

    def __init__(self, study: Study, known: list[dict[str, Any]]) -> None:
        """`known`: runs of this study that a page shows."""
        self.study, self.folder = study, study.folder / study.name
        self.file, self.lock, self.has_failed = self.folder / "runs.json", Lock(), False
        kept = json.loads(self.file.read_text()) if self.file.exists() else {}
        tiers = {tier.name: tier for tier in TIERS}
        self.finished: dict[str, dict[str, Any]] = {
            **{name_of(tiers[run["tier"]], run["seed"], run["rate"], run["tokens"]): run for run in known}, **kept
        }  # fmt: skip

    def get(self, tier: Tier, seed: int, rate: float | None, tokens: int) -> dict[str, Any]:
        """The figures of one run. Ends this process if it fails."""
        name, task = name_of(tier, seed, rate, tokens), self.study.task if tokens == self.study.tokens else None
        if name not in self.finished or lacks_task(self.finished[name], task):
            if self.has_failed:
                sys.exit(f"{name} was not begun")
            print(f"{name} ...", flush=True)
            figures = self._made(name, self.study.flags(tier, seed, rate, tokens), task)
            self._keep(name, {"tier": tier.name, "seed": seed, "rate": rate, "tokens": tokens, **figures})
            print(f"{name}: evaluation loss {figures['loss']:.4f}", flush=True)
        return self.finished[name]

    def _made(self, name: str, flags: dict[str, Any], task: Task | None) -> dict[str, Any]:
        try:
            train(self.folder, name, flags)
            figures, logs = read_metrics(self.folder / "logs" / name / "metrics.jsonl"), self.folder / "logs"
            if task and math.isfinite(figures["loss"]):
                train(self.folder, f"{name}-finetuned", task.flags(self.folder / "models" / name, flags))
                found = read_metrics(logs / f"{name}-finetuned" / "metrics.jsonl", task.metric)
                scores = {key: found[key] for key in ("loss", task.metric, "learning_rate")}
                figures["finetuned"] = {**scores, "task": task.told()}
                shutil.rmtree(self.folder / "models" / f"{name}-finetuned")
        except BaseException:
            self.has_failed = True  # what waits is not begun
            raise
        return figures

    def _keep(self, name: str, figures: dict[str, Any]) -> None:
        with self.lock:
            self.finished[name] = figures
            write_text(self.file, json.dumps(self.finished, indent=1))
        shutil.rmtree(self.folder / "models" / name)


def lacks_task(run: dict[str, Any], task: Task | None) -> bool:
    """Whether a finished run is still to be finetuned, or was on another task; one that diverged is not."""
    was = run.get("finetuned", {}).get("task")
    return task is not None and was != task.told() and math.isfinite(run["loss"])


def name_of(tier: Tier, seed: int, rate: float | None, tokens: int) -> str:
    """What a run is called, and its folders."""
    words = [tier.optimizer, tier.mixed_precision, f"seed{seed}", f"{rate or AUTO}", f"{tokens}"]
    return "_".join(words).replace(".", "p")


def train(folder: Path, name: str, flags: dict[str, Any]) -> None:
    """Run the trainer in a child process, from its last checkpoint where there is one. Ends this process if it fails."""
    folder.mkdir(parents=True, exist_ok=True)
    broken_off = (folder / "models" / name / "checkpoints" / "latest").exists()
    places = {"run_name": name, "output_dir": folder / "models", "log_dir": folder / "logs"}
    begin = {"is_keep_training": True} if broken_off else {"overwrite": True}
    told = folder / f"{name}.txt"
    with told.open("w", encoding="utf8") as output:
        command = [sys.executable, "train_low_mem.py", "train", *words_of({**flags, **places, **begin})]
        child = subprocess.Popen(command, cwd=ROOT, stdout=output, stderr=subprocess.STDOUT)
        try:
            code = child.wait()
        except KeyboardInterrupt:  # the child has it too, and saves
            code = child.wait()
    if code:
        tail = told.read_text(encoding="utf8").splitlines()[-15:]
        print(*tail, f"{name}: the trainer ended with exit code {code}; the same command continues", sep="\n")
        sys.exit(code)


def read_metrics(path: Path, metric: str | None = None) -> dict[str, Any]:
    """Final loss, curve, speed and bytes a weight of a run, and a score of its answers in percent."""
    events = read_rows(path)
    for event in events:
        if event.get("loss", 0.0) is None:  # JSON has no name for what is not finite
            event["loss"] = math.nan
    steps = [event for event in events if event["event"] == "step"]
    evaluations = [event for event in events if event["event"] == "eval"]
    choice = first_event(events, "plan")["choice"]
    return {
        "loss": evaluations[-1]["loss"],
        "evaluations": [(event["step"], event["loss"]) for event in evaluations],
        "curve": list(thinned([(event["step"], event["loss"]) for event in steps])),
        "learning_rate": max(event["learning_rate"] for event in steps),
        "tokens_per_second": sum(e["tokens"] for e in steps) / sum(e["seconds"] for e in steps),
        "storage": choice["storage"], "compute": choice["compute"],
        "bytes_per_weight": bytes_per_weight(first_event(events, "start")["settings"], choice["storage"]),
        **({metric: evaluations[-1][metric]} if metric else {}),
    }  # fmt: skip


def bytes_per_weight(settings: dict[str, Any], storage: str) -> float:
    """Weights at rest and optimizer state, by the formulas of the plan."""
    shape = T5ModelConfig(**{member.name: settings[member.name] for member in fields(T5ModelConfig)})
    work = Workload(shape, 1, 8, 8, False, settings["optimizer"])
    return dtype_bytes(storage) + state_bytes(work) / weight_counts(shape)["total"]


def thinned(points: list[tuple[int, float]]) -> Iterator[tuple[float, float]]:
    """Means over at most CURVE_POINTS stretches of a curve."""
    length = max(1, math.ceil(len(points) / CURVE_POINTS))
    for at in range(0, len(points), length):
        part = points[at : at + length]
        yield sum(step for step, _ in part) / len(part), sum(loss for _, loss in part) / len(part)


def tuned_rate(runs: Runs, tier: Tier, peak: float) -> float:
    """The best of several learning rates after a fifth of the tokens; the sweep is widened until the best has neighbours."""
    losses: dict[float, float] = {}
    wanted = list(SWEEP)
    while wanted:
        for factor in wanted:
            losses[factor] = _or_worst(runs.get(tier, 0, peak * factor, runs.study.tokens // SWEEP_SHARE)["loss"])
        best = min(losses, key=lambda factor: losses[factor])
        wider = {min(losses): best / 3, max(losses): best * 3}.get(best)
        wanted = [wider] if wider is not None and SWEEP_LIMITS[0] < wider < SWEEP_LIMITS[1] else []
    return peak * best


def _or_worst(loss: float) -> float:
    return loss if math.isfinite(loss) else math.inf


def found_rates(runs: Runs, tiers: list[Tier]) -> dict[str, float]:
    """The learning rate of each optimizer by a sweep."""
    rates: dict[str, float] = {}
    for tier in tiers:
        if tier.optimizer not in rates:
            rates[tier.optimizer] = tuned_rate(runs, tier, OPTIMIZERS[tier.optimizer].learning_rate)
    return rates


def run_seed(runs: Runs, tiers: list[Tier], seed: int, rates: dict[str, float], jobs: int) -> list[dict[str, Any]]:
    """The runs of one seed, `jobs` of them beside each other."""
    with ThreadPoolExecutor(jobs) as pool:
        made = [pool.submit(runs.get, tier, seed, rates.get(tier.optimizer), runs.study.tokens) for tier in tiers]
    return [run.result() for run in made]


def study_of(options: dict[str, str]) -> Study:
    """What the options ask for."""
    task = None
    if options["finetune"]:
        if not options["held_out"]:
            sys.exit("--finetune needs --held_out, rows to score")
        train_file, held_out = (str(Path(options[name]).resolve()) for name in ("finetune", "held_out"))
        metric = options["metric"]
        if metric not in SCORES:
            sys.exit(f"--metric = {metric}, is not one score; there are {', '.join(SCORES)}")
        task = Task(train_file, held_out, int(options["finetune_steps"]), metric)
    return Study(
        options["size"], amount(options["tokens"]), options["text"] or None, int(options["rows"]), int(options["length"]),
        options["threads"], Path(options["folder"]).resolve(), task,
    )  # fmt: skip


def main(words: list[str]) -> None:
    """Parse the options, run what is missing and write the page."""
    _, options = options_of(words, OPTIONS, str(__doc__))
    study, asked = study_of(options), options["tiers"].split(";")  # "" is part of each name
    tiers = [tier for tier in TIERS if tier == REFERENCE or any(part in tier.name for part in asked)]
    told = {**asdict(study), "name": study.name, "folder": "", "task": study.task and study.task.told()}
    known = published(told)
    runs = Runs(study, known)
    rates = found_rates(runs, tiers) if options["tune"] == "True" else {}
    results: list[dict[str, Any]] = []
    for seed in range(int(options["seeds"])):
        results += run_seed(runs, tiers, seed, rates, int(options["jobs"]))
        here = {(run["tier"], run["seed"]) for run in results}
        elsewhere = [run for run in known if (run["tier"], run["seed"]) not in here]
        write_page(told, results + elsewhere, rates, REFERENCE.name)


def amount(text: str) -> int:
    """20M -> 20,000,000."""
    return int(float(text.rstrip("kMG")) * {"k": 1e3, "M": 1e6, "G": 1e9}.get(text[-1], 1))


if __name__ == "__main__":
    try:
        main(sys.argv[1:])
    except KeyboardInterrupt:  # the runs had it too, have saved and said how they go on
        sys.exit(130)
