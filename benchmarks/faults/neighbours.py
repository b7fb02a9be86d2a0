"""A run under a hard limit beside a process that eats memory: `python -m benchmarks.faults.neighbours [--pace=12]
[--share=35+60] [--limit=700]`.

Both are in one control group (the limit in MiB); several paces and shares are joined by +. The neighbour begins to take
so many MiB a second behind the second step, until it holds so many percent of the limit: beside 35 there is a plan that
fits, beside 60 there is none. The run has to shrink and do all its steps with exit code 0, or to end before with exit
code 3, saved; being killed is a failure.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

from benchmarks.faults.kill_cases import WORDS
from benchmarks.page import ROOT, markdown
from benchmarks.parts.children import options_of, words_of
from benchmarks.parts.hard_limit import HardLimit
from benchmarks.parts.rows import read_rows, write_rows
from support.units import MIB

FLAGS: dict[str, Any] = {
    "d_model": 384,
    "d_ff": 1536,
    "d_kv": 64,
    "num_heads": 6,
    "num_layers": 6,
    "num_decoder_layers": 6,
    "vocab_size": 384,
    "tokenizer_type": "byte",
    "max_seq_len": 256,
    "max_target_len": 256,
    "effective_batch_size": 6,
    "max_steps": 16,
    "save_steps": 100,
    "eval_steps": 100,
    "eval_rows": 8,
    "sample_rows": 0,
    "log_steps": 1,
    "mixed_precision": "no",
    "num_threads": 1,
    "probe": False,
    "run_name": "run",
}
NEIGHBOUR = """
import sys, time
pace, most, held = int(sys.argv[1]), int(sys.argv[2]), []
print("ready", flush=True)
sys.stdin.readline()
while len(held) * pace < 10 * most:
    held.append(b"x" * (pace * 2**20 // 10))
    time.sleep(0.1)
sys.stdin.readline()
"""


def attack(pace: int, share: int, limit_mib: int) -> dict[str, Any]:
    """One run beside a neighbour of so many MiB a second, and percent of the limit in all: how it ended, and which
    smaller plans it took.
    """
    words = " ".join(WORDS)
    most = share * limit_mib // 100
    with HardLimit(limit_mib * MIB) as limit, tempfile.TemporaryDirectory() as folder:
        text = Path(folder) / "pairs.jsonl"
        write_rows(text, [{"prompt": words[n % 50 :][:250], "response": words[n % 40 :][:250]} for n in range(600)])
        places = {"train_file": text, **{f"{name}_dir": f"{folder}/{name}" for name in ("cache", "output", "log")}}
        neighbour = subprocess.Popen(
            [sys.executable, "-c", NEIGHBOUR, str(pace), str(most)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            preexec_fn=limit.enter,
        )
        run = subprocess.Popen(
            [sys.executable, "train_low_mem.py", "train", *words_of({**FLAGS, **places})],
            cwd=ROOT,
            text=True,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            preexec_fn=limit.enter,
        )
        log = Path(folder) / "log" / "run" / "metrics.jsonl"
        try:
            while run.poll() is None and not (
                log.is_file() and log.read_text(encoding="utf8").count('"event": "step"') >= 2
            ):
                time.sleep(0.1)
            assert neighbour.stdin is not None
            neighbour.stdin.write("go\n")
            neighbour.stdin.flush()
            _, messages = run.communicate()
        finally:
            for process in (run, neighbour):
                process.kill()
                process.wait()
        events = read_rows(log) if log.is_file() else []
    recoveries = [event for event in events if event["event"] == "recovery"]
    steps = [event["step"] for event in events if event["event"] == "step"]
    saved = [event["step"] for event in events if event["event"] == "checkpoint"]
    is_whole = steps[-1:] == [FLAGS["max_steps"]]
    return {
        "pace": pace,
        "share": share,
        "exit": run.returncode,
        "steps": len(steps),
        "is_survived": run.returncode == (0 if is_whole else 3) and saved[-1:] == steps[-1:],
        "plans": [(event["step"], event["reason"]) for event in recoveries],
        "told": "" if run.returncode == 0 else messages.strip()[-300:],
    }


def main(arguments: list[str]) -> None:
    """Attack at each pace, and say what was survived."""
    _, options = options_of(arguments, {"pace": "12", "share": "35+60", "limit": "700"}, str(__doc__))
    if why_not := HardLimit.why_not():
        print(f"neighbours: skipped, {why_not}")
        return
    results = [
        attack(int(pace), int(share), int(options["limit"]))
        for share in options["share"].split("+")
        for pace in options["pace"].split("+")
    ]
    rows = [
        [
            f"{result['pace']} MiB/s, {result['share']}%",
            str(result["exit"]),
            str(result["steps"]),
            str(result["plans"]),
            result["told"],
        ]
        for result in results
    ]
    print(markdown(["neighbour", "exit code", "steps", "smaller plans (step, reason)", "said"], rows))
    failed = sum(not result["is_survived"] for result in results)
    print(f"neighbours: {len(results) - failed} of {len(results)} survived")
    sys.exit(failed > 0)


if __name__ == "__main__":
    main(sys.argv[1:])
