"""Bit-for-bit comparison of trainings before and after a change of the code.

    python -m benchmarks.checks.same_bits --keep=before.json                  # on the commit before
    python -m benchmarks.checks.same_bits --compare=before.json               # on the commit after: exit code 1 where they differ
    python -m benchmarks.checks.same_bits --only=lora,two --program=../other/train_low_mem.py

Small runs of seconds each, as child processes over data made here: the two trainings of `demo`, a finetuning of another model, LoRA
over int8, preferences (DPO), Muon with clipping, ultra mode with weights in a file, two processes. Each runs once from beginning to
end and once in two halves, stopped by SIGTERM and resumed (two processes: with half of the steps first). One line a run: a digest of
all losses and of the weights that are published, and whether the halves gave the same. Digests of two processors, or of two
versions of torch, need not be equal.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
STEPS = 6
TINY = {
    "d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 2, "num_decoder_layers": 2, "vocab_size": 512,
    "max_seq_len": 64, "effective_batch_size": 8, "dropout_rate": 0.1,
}  # fmt: skip
EVERY = {
    "max_steps": STEPS, "save_steps": STEPS // 2, "eval_steps": STEPS // 2, "eval_rows": 16, "log_steps": 1, "lr_schedule": "constant",
    "warmup_steps": 2, "sample_rows": 0, "num_threads": 1, "memory_budget": "2G", "device": "cpu", "keep_latest_n_ckp": 4,
    "batch_size_per_gpu": 4,  # auto is chosen by free memory, and the sums of a step depend on it
}  # fmt: skip
PAIRS = {"is_finetune": True, "train_file": "pairs.jsonl", "max_target_len": 16}
# name -> (command, processes, the run that it starts from, flags)
RUNS: dict[str, tuple[str, int, str | None, dict[str, Any]]] = {
    "prose": ("train", 1, None, {"preset": "demo_prose", "train_file": "text.txt", "max_seq_len": 64}),
    "dates": ("train", 1, "prose", {"preset": "demo_dates", **PAIRS, "eval_generate_rows": 8}),
    "base": ("train", 1, None, {**TINY, "train_file": "text.txt", "mixed_precision": "no"}),
    "bf16": ("train", 1, None, {**TINY, "train_file": "text.txt", "mixed_precision": "bf16", "optimizer": "adafactor"}),
    "finetuning": ("train", 1, "base", {**PAIRS, "optimizer": "adamw", "mixed_precision": "no"}),
    "lora": ("train", 1, "base", {**PAIRS, "lora_rank": 4, "lora_base": "int8"}),
    "preferences": ("dpo", 1, "base", {"train_file": "preferences.jsonl", "max_target_len": 16, "mixed_precision": "no"}),
    "muon": ("train", 1, "base", {**PAIRS, "optimizer": "muon", "max_grad_norm": 0.5}),
    "file": ("train", 1, None, {**TINY, "train_file": "text.txt", "memory_mode": "ultra", "weights_in": "file"}),
    "two": ("train", 2, None, {**TINY, "train_file": "text.txt"}),
}  # fmt: skip


def write_data(folder: Path) -> None:
    """Text, pairs and preferences, the same for everybody."""
    draw = random.Random(7)
    words = [
        "the", "river", "runs", "under", "a", "stone", "bridge", "where", "small", "boats", "wait", "for", "morning", "light",
        "春天", "的", "河水", "从", "石桥", "下", "流过",
    ]  # fmt: skip

    def sentence() -> str:
        return " ".join(draw.choices(words, k=draw.randint(3, 20)))

    (folder / "text.txt").write_text(
        "".join(f"{sentence()}\n" + "\n" * (line % 4 == 3) for line in range(400)), encoding="utf8"
    )
    for name, fields in {"pairs": ("prompt", "response"), "preferences": ("prompt", "chosen", "rejected")}.items():
        rows = [{field: sentence()[:60] for field in fields} for _ in range(120)]
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows)
        (folder / f"{name}.jsonl").write_text(lines, encoding="utf8")


def digest(folder: Path, name: str) -> str:
    """SHA-256, shortened, of a run's losses and of the tensors in its published weights."""
    sum_ = hashlib.sha256()
    events = map(json.loads, (folder / "logs" / name / "metrics.jsonl").read_text(encoding="utf8").splitlines())
    losses = [(event["step"], event["loss"]) for event in events if event["event"] in ("step", "eval")]
    sum_.update(json.dumps(losses).encode())
    for file in sorted((folder / "runs" / name).glob("*.safetensors")):
        content = file.read_bytes()
        start = 8 + int.from_bytes(content[:8], "little")
        header = json.loads(content[8:start])
        for tensor, about in sorted(header.items()):
            if tensor != "__metadata__":
                first, last = about["data_offsets"]
                sum_.update(f"{tensor} {about['dtype']} {about['shape']}".encode())
                sum_.update(content[start + first : start + last])
    return sum_.hexdigest()[:16]


def train(folder: Path, program: Path, name: str, run: str, stop_at: int | None = None, **more: object) -> None:
    """One start of a run, to its end or to a step; raises SystemExit with its words where it fails."""
    command, processes, base, flags = RUNS[name]
    flags = {**EVERY, **flags, "run_name": run, "output_dir": "runs", "log_dir": "logs", "cache_dir": "cache"}
    if base is not None:
        flags["finetune_from"] = f"runs/{base}"
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={processes}"]
    words = [*(launcher if processes > 1 else [sys.executable]), str(program), command]
    lines = []
    with subprocess.Popen(
        [*words, *(f"--{key}={value}" for key, value in {**flags, **more}.items())], cwd=folder, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "ignore", "PYTHONUNBUFFERED": "1"},
    ) as child:  # fmt: skip
        assert child.stdout is not None
        for line in child.stdout:
            lines.append(line)
            if line.split("/")[0].split() == ["step", str(stop_at)]:
                child.send_signal(signal.SIGTERM)
    if child.returncode != (130 if stop_at else 0):
        raise SystemExit(f"{name} ended with exit code {child.returncode}\n{''.join(lines[-60:])}")


def main() -> None:
    """Run, print, keep and compare."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(RUNS), help="names of runs; those that they start from run as well")
    parser.add_argument("--program", type=Path, default=ROOT / "train_low_mem.py")
    parser.add_argument("--keep", type=Path, help="write the digests there")
    parser.add_argument("--compare", type=Path, help="digests of another commit")
    asked = parser.parse_args()
    wanted = set(asked.only.split(","))
    wanted |= {base for name in wanted if (base := RUNS[name][2])}
    digests: dict[str, str] = {}
    with tempfile.TemporaryDirectory() as made:
        folder = Path(made)
        write_data(folder)
        for name in (name for name in RUNS if name in wanted):
            began = time.monotonic()
            train(folder, asked.program.resolve(), name, name)
            if RUNS[name][1] == 1:
                train(folder, asked.program.resolve(), name, f"{name}-halves", stop_at=STEPS // 2)
            else:
                train(folder, asked.program.resolve(), name, f"{name}-halves", max_steps=STEPS // 2)
            train(folder, asked.program.resolve(), name, f"{name}-halves", is_keep_training=True)
            digests[name] = digest(folder, name)
            is_exact = digest(folder, f"{name}-halves") == digests[name]
            if not is_exact:
                digests[f"{name}, resumed"] = digest(folder, f"{name}-halves")
            halves = "resumed: the same" if is_exact else "resumed: ANOTHER"
            print(f"{name:12} {digests[name]}  {halves}  {time.monotonic() - began:.0f} s", flush=True)
    if asked.keep:
        asked.keep.write_text(json.dumps(digests, indent=1) + "\n", encoding="utf8")
    if asked.compare:
        before = json.loads(asked.compare.read_text(encoding="utf8"))
        others = [name for name in digests if digests[name] != before.get(name)]
        print("all the same as before" if not others else f"others than before: {', '.join(others)}")
        sys.exit(bool(others))


if __name__ == "__main__":
    main()
