"""Memory and speed of encoders with heads: `python -m benchmarks.encoders plan|peer|embed|proteins ... [--name=value ...]`.

plan: training runs of ten configurations; the peak that each planned beside the most that it held.
peer: LoRA of rank 4 on q and v with a token head, beside transformers' `T5EncoderModel` and PEFT on the same rows from the same base.
embed: vectors of proteins, whole, and killed once and continued: the same vectors, and memory that does not grow.
proteins: LoRA of rank 4 with a dense head on encoders of the shapes of ProtT5 and Ankh-large, one long protein at a time under a hard limit.

    --work=FOLDER      bases, rows and runs; data/cache/encoders by default     --write=True    into docs/benchmarks.md
    --proteins=FILE    JSONL with sequence, labels and mask, for peer and embed; else made-up rows
    --cases=NAME,...   of plan, or shapes of proteins                  --repeats=1      turns of peer
    --steps=N          of a run; --rows=N: of a step of peer (8), or texts of embed (5000)
    --residues=3000    of a protein; --limit=8000000000: bytes of the hard limit of proteins

Weights are random. Every run is a child process; of its process tree the anonymous memory is sampled every 50 ms, and where a
training run has measured more itself, that counts. Other flags go to `train` or `embed`.
"""

from __future__ import annotations

import json
import multiprocessing
import random
import shutil
import socket
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.parts import children
from benchmarks.parts.children import Child
from benchmarks.parts.hard_limit import HardLimit
from benchmarks.parts.results import ROOT, class_folder, markdown, show_section
from benchmarks.parts.rows import read_rows, write_rows
from benchmarks.parts.watched import count_weights, last_event
from commands.embed import PART_ROWS
from commands.generate import UNFINISHED
from data.batches.loader import StepLoader
from data.prepare.preparing import prepare
from settings.declared import T5ModelConfig
from settings.loading import load
from units import MIB, format_size, parse_size

Flags = dict[str, Any]
PROGRAM = str(ROOT / "train_low_mem.py")
OWN = {
    "work": str(ROOT / "data" / "cache" / "encoders"), "write": "True", "proteins": "", "cases": "", "repeats": "1", "steps": "",
    "rows": "", "residues": "3000", "limit": "8000000000",
}  # fmt: skip
AMINO_ACIDS, CLASSES = "ACDEFGHIKLMNPQRSTVWY", "CEH"
PEER_BASE: Flags = {"vocab_size": 128, "d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 12, "num_heads": 8}
EMBED_BASE: Flags = {"vocab_size": 128, "d_model": 256, "d_kv": 32, "d_ff": 1024, "num_layers": 4, "num_heads": 8}
LARGE_BASES: dict[str, Flags] = {
    "ProtT5": {"vocab_size": 128, "d_model": 1024, "d_kv": 128, "d_ff": 16384, "num_layers": 24, "num_heads": 32},
    "Ankh-large": {
        "vocab_size": 144, "d_model": 1536, "d_kv": 64, "d_ff": 3840, "num_layers": 48, "num_heads": 16,
        "feed_forward_proj": "gated-gelu", "relative_attention_num_buckets": 64,
    },
}  # fmt: skip
EVALUATED = 300  # residues, of proteins to validate with
PUBLISHED = {"ProtT5": 500, "Ankh-large": 0}  # residues on a GPU of 8 GB, Schmirler et al. 2024, figure 5b
LORA: Flags = {"lora_rank": 4, "optimizer": "adamw"}
DROPOUT = 0.1
PEAK_MARGIN, MOST_UNDER, MEDIAN = 1.05, 0.03, 0.02
LEAST_SPEED, MOST_MEMORY = 1.3, 1 / 3

# name -> rows, and flags of `train`; shapes in which activations and weights take far more than the libraries
SEQUENCE, TOKEN = {"head": "sequence"}, {"head": "token"}
BLOCKS: Flags = {"d_model": 512, "d_kv": 64, "d_ff": 2048, "num_layers": 6, "num_heads": 8}
WIDE: Flags = {**BLOCKS, "effective_batch_size": 8}
CASES: dict[str, tuple[str, Flags]] = {
    "regression, mean": ("fitness", {**WIDE, **SEQUENCE, "labels": "regression", "memory_mode": "standard"}),
    "classes, first, linear": (
        "family", {**WIDE, **SEQUENCE, "pooling": "first", "head_kind": "linear", "optimizer": "adamw", "memory_mode": "low"},
    ),
    "classes, dropout, gated": (
        "family", {**WIDE, **SEQUENCE, "feed_forward_proj": "gated-gelu", "dropout_rate": DROPOUT, "memory_mode": "standard"},
    ),
    "token classes": ("structure", {**WIDE, **TOKEN, "memory_mode": "standard", "class_weights": "balanced"}),
    "token regression, dense, ultra": (
        "exposure",
        {**WIDE, **TOKEN, "labels": "regression", "head_kind": "dense", "num_layers": 8, "effective_batch_size": 16, "memory_mode": "ultra"},
    ),
    "LoRA on bf16": (
        "structure", {**WIDE, **TOKEN, **LORA, "finetune_from": "base", "lora_base": "bf16", "head_kind": "dense", "memory_mode": "standard"},
    ),
    "LoRA on int4": ("family", {**WIDE, **SEQUENCE, **LORA, "finetune_from": "base", "lora_base": "int4", "memory_mode": "standard"}),
    "long rows": ("long", {**WIDE, **TOKEN, "effective_batch_size": 1, "memory_mode": "low"}),
    "two processes": ("structure", {**WIDE, **TOKEN, "memory_mode": "standard", "processes": 2}),
    "weights in a file": ("fitness", {**WIDE, **SEQUENCE, "labels": "regression", "weights_in": "file", "effective_batch_size": 16}),
}  # fmt: skip
LENGTHS = {"long": (2000, 3000)}  # of other rows 100 to 600


def made_up(path: Path, kind: str, count: int, residues: tuple[int, int]) -> Path:
    """Made-up proteins with a column for each kind of label, once."""
    if not path.is_file():
        draw = random.Random(kind)
        rows = []
        for _ in range(count):
            length = draw.randint(*residues)
            row = {"sequence": "".join(draw.choices(AMINO_ACIDS, k=length)), "fitness": round(draw.gauss(0, 1), 3)}
            row |= {"family": draw.choice("abcd"), "structure": "".join(draw.choices(CLASSES, k=length))}
            rows.append({**row, "exposure": [round(draw.random(), 3) for _ in range(length)]})
        write_rows(path, rows)
    return path


def make_base(folder: Path, shape: Flags) -> Path:
    """An encoder of random weights in bf16, with the tokenizer of amino acids, once, by a child process."""
    if not (folder / "tokenizer.json").is_file():
        maker = multiprocessing.get_context("spawn").Process(target=_save_base, args=(folder, shape))
        maker.start()
        maker.join()
        assert not maker.exitcode, "the base could not be made"
    return folder


def _save_base(folder: Path, shape: Flags) -> None:
    import torch

    from data.tokenizers.training import train_tokenizer
    from model import hf_format
    from model.t5 import T5

    config = T5ModelConfig(**shape, num_decoder_layers=0, head="none")
    hf_format.save(T5(config, dtype=torch.bfloat16).initialise(0), folder)
    train_tokenizer([AMINO_ACIDS], "letters", shape["vocab_size"], MIB).save(folder)


def train(
    work: Path, flags: Flags, enter: Callable[[], None] | None = None
) -> tuple[list[Child], list[dict[str, Any]]]:
    """A training run from preparing to saving: its processes, and the events of its log; its model is not kept."""
    flags = dict(flags)
    processes = flags.pop("processes", 1)
    common = {
        "output_dir": work / "runs", "log_dir": work / "logs", "cache_dir": work / "cache", "run_name": "run", "overwrite": True,
        "sample_rows": 0, "probe": False, "text_column": "sequence",
    }  # fmt: skip
    shutil.rmtree(work / "logs" / "run", ignore_errors=True)
    words = [PROGRAM, "train", *children.words_of({**common, **flags})]
    with ThreadPoolExecutor(processes) as pool:
        runs = [pool.submit(children.run, words, environment=one, enter=enter) for one in _environments(processes)]
        ended = [run.result() for run in runs]
    shutil.rmtree(work / "runs", ignore_errors=True)
    log = work / "logs" / "run" / "metrics.jsonl"
    return ended, read_rows(log) if log.is_file() else []


def _environments(processes: int) -> list[dict[str, str]]:
    """What tells each process of a run which one it is."""
    if processes == 1:
        return [{}]
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    group = {
        "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(processes), "LOCAL_WORLD_SIZE": str(processes),
        "ACCELERATE_USE_CPU": "true",
    }  # fmt: skip
    return [{**group, "RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(processes)]


def figures_of(children_: list[Child], events: list[dict[str, Any]]) -> dict[str, Any]:
    """What a run took, or why it failed."""
    if failure := next((child.failure for child in children_ if child.failure), ""):
        return {"failed": failure, "peak_bytes": max(child.peak_bytes for child in children_)}
    end, steps = last_event(events, "end"), [one for one in events if one["event"] == "step"]
    return {
        "planned": end["planned_peak_bytes"],
        "peak_bytes": max(end["measured_peak_bytes"], *(child.peak_bytes for child in children_)),
        "high_water_bytes": max(child.high_water_bytes for child in children_), "seconds": [one["seconds"] for one in steps],
        "tokens": [one["tokens"] for one in steps], "losses": [one["loss"] for one in steps],
        "choice": last_event(events, "plan").get("choice", {}),
    }  # fmt: skip


def plan(options: dict[str, str], flags: Flags, work: Path) -> tuple[str, str, Any]:
    """Planned and measured peaks."""
    names = options["cases"].split(",") if options["cases"] else list(CASES)
    chosen = {name: CASES[name] for name in CASES if any(name.startswith(one) for one in names)}
    runs = []
    for name, (kind, own) in chosen.items():
        if own.get("finetune_from") == "base":
            own = {**own, "finetune_from": make_base(work / "base-plan", {"vocab_size": 128, **BLOCKS})}
        rows = "long" if kind == "long" else "rows"
        files = [
            made_up(work / f"{rows}_{part}.jsonl", f"{rows} {part}", count, LENGTHS.get(kind, (100, 600)))
            for part, count in (("train", 256), ("valid", 16))
        ]
        steps = int(options["steps"] or 4)
        settings = {
            "train_file": files[0], "validation_file": files[1], "label_column": "structure" if kind == "long" else kind,
            "max_steps": steps, "eval_steps": steps, "save_steps": steps, "memory_budget": "4G",
        }  # fmt: skip
        runs.append({"name": name, **figures_of(*train(work, {**settings, **own, **flags}))})
        print(json.dumps(runs[-1]), flush=True)
    good = [run for run in runs if "failed" not in run]
    deviations = [run["planned"] / run["peak_bytes"] - 1 for run in good]
    lines = [
        [
            run["name"], run["failed"], format_size(run["peak_bytes"]), "", "",
        ] if "failed" in run else [
            run["name"], format_size(run["planned"]), format_size(run["peak_bytes"]),
            f"{run['planned'] / run['peak_bytes'] - 1:+.1%}", f"{statistics.mean(run['seconds']):.1f}",
        ]
        for run in runs
    ]  # fmt: skip
    median, least = statistics.median(map(abs, deviations)), min(deviations)
    is_met = median <= MEDIAN and least >= -MOST_UNDER and len(good) == len(runs)
    body = (
        f"{_target(is_met)}: the median deviation is at most {MEDIAN:.0%} and no plan more than {MOST_UNDER:.0%} under the peak; "
        f"median {median:.1%}, from {least:+.1%} to {max(deviations):+.1%}. No probe corrects these plans. Peaks are those "
        "of one process.\n\n"
    )
    return (
        "Encoders with heads: the plan and the measurement",
        body + markdown(["configuration", "planned", "measured", "deviation", "s a step"], lines),
        runs,
    )


def peer(options: dict[str, str], flags: Flags, work: Path) -> tuple[str, str, Any]:
    """Ours beside transformers and PEFT."""
    base = make_base(work / "base-peer", PEER_BASE)
    rows, steps = int(options["rows"] or 8), int(options["steps"] or 3) + 1
    held_out = made_up(work / "rows_valid.jsonl", "rows valid", 16, (100, 600))
    file = options["proteins"] or made_up(work / "rows_train.jsonl", "rows train", 256, (100, 600))
    columns = {"label_column": "labels"} if options["proteins"] else {"label_column": "structure"}
    if options["proteins"]:
        held_out = _head_of(Path(options["proteins"]), work / "proteins_valid.jsonl", 16)
    common = {
        **TOKEN, **columns, "train_file": file, "validation_file": held_out, "finetune_from": base, "lora_rank": 4, "optimizer": "adamw",
        "dropout_rate": DROPOUT, "effective_batch_size": rows, "max_steps": steps, "eval_steps": steps, "save_steps": steps, "eval_rows": 8,
    }  # fmt: skip
    batches = work / "batches.json"
    batches.write_text(
        json.dumps(_batches({**common, "text_column": "sequence", "cache_dir": work / "cache"}, rows, steps))
    )
    peers = {"shipped": "no", "gradient checkpointing": "yes"}
    runs = []
    for turn in range(int(options["repeats"])):
        for name, recompute in peers.items():
            words = ["-m", "benchmarks.parts.encoder_peer", recompute, str(base), str(batches), str(DROPOUT)]
            child = children.run(words)
            found = {"failed": child.failure} if child.failure else child.figures
            runs.append({
                "side": "peer", "way": name, "turn": turn, "peak_bytes": child.peak_bytes,
                "high_water_bytes": child.high_water_bytes, **found,
            })  # fmt: skip
            print(json.dumps(runs[-1]), flush=True)
        for mode in ("standard", "low", "ultra"):
            found = figures_of(*train(work, {**common, "memory_mode": mode, **flags}))
            if "failed" not in found:
                found["seconds"] = found["seconds"][1:]
            runs.append({"side": "ours", "way": mode, "turn": turn, **found})
            print(json.dumps(runs[-1]), flush=True)
    body = _peer_body(runs, rows, steps - 1)
    return "Encoders with heads, compared with transformers and PEFT", body, runs


def _peer_body(runs: list[dict[str, Any]], rows: int, steps: int) -> str:
    lines, best = [], []
    for mine in (run for run in runs if run["side"] == "ours"):
        others = [run for run in runs if run["side"] == "peer" and run["turn"] == mine["turn"]]
        cells = []
        for other in others:
            if {"failed"} & (mine.keys() | other.keys()):
                cells.append("-")
                continue
            memory = mine["peak_bytes"] / other["peak_bytes"]
            resident = mine["high_water_bytes"] / other["high_water_bytes"]
            speed = sum(other["seconds"]) / sum(mine["seconds"])
            cells.append(f"{speed:.2f}x at {memory:.2f} ({resident:.2f})")
            if other["way"] == "shipped":
                best.append((memory, speed))
        lines.append([mine["way"], _took(mine), *cells])
    for other in (run for run in runs if run["side"] == "peer"):
        lines.append([f"peer, {other['way']}", _took(other), "", ""])
    is_met = any(memory <= MOST_MEMORY and speed >= LEAST_SPEED for memory, speed in best)
    told = "; ".join(f"{speed:.2f}x at {memory:.2f}" for memory, speed in best)
    return (
        f"{_target(is_met)}: one mode takes at most a third of the peer's memory at {LEAST_SPEED} times its speed or more, both as shipped: "
        f"{told}. LoRA of rank 4 on q and v and a token head over {PEER_BASE['num_layers']} frozen blocks of {PEER_BASE['d_model']}, {rows} rows "
        f"a step, {steps} timed steps, dropout {DROPOUT}, AdamW; the peer in fp32. Speed and peak over the peer's: anonymous memory of the process "
        "tree, in brackets with pages of files (VmHWM). This project's is a whole run, with loading, evaluation and saving.\n\n"
    ) + markdown(["by", "peak, s a step", "beside the peer as shipped", "with its gradient checkpointing"], lines)


def _took(run: dict[str, Any]) -> str:
    return (
        run["failed"] if "failed" in run else f"{format_size(run['peak_bytes'])}, {statistics.mean(run['seconds']):.1f}"
    )


def _batches(settings: Flags, rows: int, steps: int) -> list[dict[str, Any]]:
    """The rows of each step as the run gets them, padded."""
    config = load("train", {name: str(value) for name, value in settings.items()})
    prepared = prepare(config)
    loader = StepLoader(prepared.train_dir, prepared.objective, config.data, config.model, config.run.seed)
    found = []
    for step in range(steps):
        (batch,) = loader.micro_batches(step, effective_batch_size=rows, batch_size=rows)
        longest = int(batch.input_lengths.max())
        found.append({
            "input_ids": batch.input_ids[:, :longest].tolist(), "labels": batch.labels[:, :longest].tolist(),
            "lengths": batch.input_lengths.tolist(),
        })  # fmt: skip
    return found


def embed(options: dict[str, str], flags: Flags, work: Path) -> tuple[str, str, Any]:
    """Vectors, whole and continued."""
    base, rows = make_base(work / "base-embed", EMBED_BASE), int(options["rows"] or 5000)
    texts = work / "texts.jsonl"
    if options["proteins"]:
        _head_of(Path(options["proteins"]), texts, rows)
    else:
        texts.unlink(missing_ok=True)
        made_up(texts, "texts", rows, (50, 500))
    files = {name: work / f"{name}.npz" for name in ("whole", "continued")}
    settings = {"model": base, "input": texts, "text_column": "sequence", **flags}
    for file in files.values():
        file.unlink(missing_ok=True)
        shutil.rmtree(file.with_name(file.name + UNFINISHED), ignore_errors=True)
    words = {name: [PROGRAM, "embed", *children.words_of({**settings, "output": file})] for name, file in files.items()}
    parts, quarter_ended, began = -(-rows // PART_ROWS), 0.0, time.perf_counter()

    def after_a_quarter() -> bool:
        nonlocal quarter_ended
        if not quarter_ended and len(_parts_of(files["whole"])) > parts // 4:
            quarter_ended = time.perf_counter() - began
        return False

    whole = children.run(words["whole"], stop=after_a_quarter)
    killed = children.run(words["continued"], stop=lambda: len(_parts_of(files["continued"])) > parts // 3)
    left = len(_parts_of(files["continued"]))
    continued = children.run(words["continued"])
    for child in (whole, continued):
        if child.failure:
            sys.exit(f"{child.failure}\n{child.messages[-2000:]}")
    is_same = files["whole"].read_bytes() == files["continued"].read_bytes()
    with np.load(files["whole"]) as first, np.load(files["continued"]) as second:
        vectors = first["vectors"].shape
        alike = all(np.array_equal(first[name], second[name]) for name in first.files)
    most = max(size for _, size in whole.curve)
    quarter = max(size for seconds, size in whole.curve if seconds <= quarter_ended)
    figures = {
        "rows": rows, "vectors": vectors, "same_bytes": is_same, "same_vectors": alike, "parts_before_the_kill": left,
        "killed": killed.returncode, "peak_bytes": whole.peak_bytes, "first_quarter_bytes": quarter, "whole_bytes": most,
        "continued_peak_bytes": continued.peak_bytes, "seconds": whole.seconds, "continued_seconds": continued.seconds, "curve": whole.curve,
    }  # fmt: skip
    print(json.dumps({name: value for name, value in figures.items() if name != "curve"}), flush=True)
    is_met = alike and killed.returncode != 0 and most <= quarter * PEAK_MARGIN
    body = (
        f"{_target(is_met)}: {rows:,} proteins, killed after {left} of {parts} parts and continued, give the same vectors "
        f"({'the same bytes' if is_same else 'other bytes'} of the file), and memory stays flat: at most {format_size(quarter)} while the first quarter is done, "
        f"{format_size(most)} in all, {format_size(continued.peak_bytes)} in the continued run. {whole.seconds:.0f} s, "
        f"{rows / whole.seconds:.0f} proteins a second, with {EMBED_BASE['num_layers']} blocks of {EMBED_BASE['d_model']}."
    )
    return "Encoders: vectors of proteins", body, figures


def _parts_of(file: Path) -> list[Path]:
    return list(file.with_name(file.name + UNFINISHED).glob("*.arrow"))


def _head_of(source: Path, path: Path, rows: int) -> Path:
    with source.open(encoding="utf8") as file:
        path.write_text("".join(line for line, _ in zip(file, range(rows), strict=False)), encoding="utf8")
    return path


def proteins(options: dict[str, str], flags: Flags, work: Path) -> tuple[str, str, Any]:
    """Long proteins under a hard limit."""
    names, residues = options["cases"].split(",") if options["cases"] else list(LARGE_BASES), int(options["residues"])
    limit, steps = parse_size(options["limit"]), int(options["steps"] or 1)
    train_file = made_up(work / f"{residues}_train.jsonl", "train", 4, (residues, residues))
    validation_file = made_up(work / f"{EVALUATED}_valid.jsonl", "valid", 4, (EVALUATED, EVALUATED))
    runs = []
    for name in names:
        base = make_base(work / f"base-{name}", LARGE_BASES[name])
        settings = {
            **TOKEN, **LORA, "head_kind": "dense", "train_file": train_file, "validation_file": validation_file, "label_column": "structure",
            "finetune_from": base, "effective_batch_size": 1, "max_steps": steps, "eval_steps": steps, "save_steps": steps, "eval_rows": 1,
            "dropout_rate": DROPOUT, "memory_budget": limit, "prepare_text": "ankh" if name.startswith("Ankh") else "prott5",
        }  # fmt: skip
        with _limited(limit) as enter:
            found = figures_of(*train(work, {**settings, **flags}, enter))
        runs.append({"name": name, "weights": count_weights(base), "residues": residues, "limit": limit, **found})
        print(json.dumps(runs[-1]), flush=True)
    file = ROOT / "docs" / "benchmarks" / class_folder() / "encoders-proteins.json"
    if options["write"] == "True" and file.exists():  # other shapes stay in the table
        earlier = json.loads(file.read_text(encoding="utf8"))["figures"]
        runs = [*(run for run in earlier if run["name"] not in names), *runs]
    lines = [
        [
            run["name"], f"{run['weights'] / 1e9:.2f} billion", *(
                [run["failed"], "", ""] if "failed" in run
                else [f"{max(run['seconds']):.0f}", format_size(run["peak_bytes"]), format_size(run["planned"])]
            ),
            str(PUBLISHED[run["name"]]),
        ]
        for run in runs
    ]  # fmt: skip
    is_met = all("failed" not in run for run in runs)
    body = (
        f"{_target(is_met)}: LoRA of rank 4 with a dense token head trains on proteins of {residues:,} residues, one at a time, under a hard limit of "
        f"{limit / 1e9:g} GB ({'a control group' if not HardLimit.why_not() else 'RLIMIT_DATA'}), dropout {DROPOUT}. Weights are random, in the shapes of the "
        "published encoders. Beside them the longest proteins on a GPU of 8 GB in Schmirler et al. 2024 (figure 5b).\n\n"
    ) + markdown(["shape", "weights", "s a step", "peak", "planned", "residues published"], lines)
    return "Long proteins under a hard limit of memory", body, runs


@contextmanager
def _limited(limit: int) -> Iterator[Callable[[], None]]:
    """What a child calls to be limited: a control group where one can be made, else the system's limit of data."""
    if not HardLimit.why_not():
        with HardLimit(limit) as group:
            yield group.enter
        return
    import resource

    yield partial(resource.setrlimit, resource.RLIMIT_DATA, (limit, limit))


def _target(is_met: bool) -> str:
    return "Target met" if is_met else "**Target missed**"


SECTIONS = {"plan": ("plan-encoders", plan), "peer": ("encoders-peer", peer), "embed": ("encoders-embed", embed), "proteins": ("encoders-proteins", proteins)}  # fmt: skip


def main(arguments: list[str]) -> None:
    """Measure what is named and write it."""
    names, options, flags = children.options_and_flags(arguments, OWN)
    if not names or set(names) - SECTIONS.keys():
        sys.exit(__doc__)
    work = Path(options["work"]).absolute()
    work.mkdir(parents=True, exist_ok=True)
    for name in names:
        section, measure = SECTIONS[name]
        heading, body, figures = measure(options, flags, work)
        show_section(section, heading, body, figures, options["write"] == "True")


if __name__ == "__main__":
    main(sys.argv[1:])
