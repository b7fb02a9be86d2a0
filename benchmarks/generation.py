"""Speed and memory of generation beside transformers: `python -m benchmarks.generation [--model=t5-small]
[--repeats=3]`.

The same random weights in Hugging Face T5 and here, greedy and beam search, all answers of full length: in fp32, with
bf16 weights, and here with int8 weights, which the peer has none of on a CPU. All take turns in one process on one
thread, and the least processor time of the turns counts, so that other work on the machine hardly does.
"""

from __future__ import annotations

import json
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from benchmarks.page import markdown, show_section
from benchmarks.parts.children import options_of
from devices.cpu import CpuDevice
from engine.weights import weight_store_for
from model import hf_format
from model.decoding.generation import generate
from model.quantization import quantize_model
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.precedence import model_presets

# ours -> what it is compared with
PEERS = {"fp32": "transformers fp32", "bf16": "transformers bf16", "int8": "transformers fp32"}
SYSTEMS = (*dict.fromkeys(PEERS.values()), *PEERS)


@dataclass(frozen=True)
class Case:
    """Prompts, their tokens, and the tokens and beams of each answer."""

    rows: int
    source: int
    new: int
    beams: int = 1

    def __str__(self) -> str:
        how = f"{self.beams} beams" if self.beams > 1 else "greedy"
        return f"{self.rows} x {self.source} tokens, {how}"


CASES = (Case(1, 64, 48), Case(8, 64, 48), Case(1, 512, 48), Case(1, 64, 48, 4), Case(8, 64, 32, 4))

Writer = Callable[[list[list[int]], Case], Any]


def systems(name: str) -> dict[str, Writer]:
    """What writes the answers, by name."""
    from transformers import AutoModelForSeq2SeqLM

    config = T5ModelConfig(**model_presets()[name])
    model = T5(config).initialise(0)
    with tempfile.TemporaryDirectory() as folder:
        hf_format.save(model, folder)
        peers = [
            AutoModelForSeq2SeqLM.from_pretrained(folder, dtype=dtype).eval()
            for dtype in (torch.float32, torch.bfloat16)
        ]
        narrow, small = hf_format.load(folder, torch.bfloat16), hf_format.load(folder)
    quantize_model(small)

    def theirs(peer: Any, rows: list[list[int]], case: Case) -> Any:
        ids, lengths = torch.tensor(rows), {"max_new_tokens": case.new, "min_new_tokens": case.new}
        return peer.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=case.beams, do_sample=False, **lengths
        )

    def ours(own: T5, **how: Any) -> Writer:
        return lambda rows, case: generate(
            own, rows, max_new_tokens=case.new, min_new_tokens=case.new, num_beams=case.beams, **how
        )

    compute = CpuDevice().choose_compute_dtype().dtype  # fp32 where bf16 products are slow: weights are widened
    of_bf16 = ours(narrow, with_weights=weight_store_for(torch.bfloat16, compute).for_products, compute_dtype=compute)
    made: list[Writer] = [
        *(partial(theirs, peer) for peer in peers),
        ours(model),
        of_bf16,
        ours(small, compute_dtype=torch.float32),
    ]
    return dict(zip(SYSTEMS, made, strict=True))


def measure(case: Case, ways: dict[str, Writer], vocab: int, repeats: int) -> dict[str, Any]:
    """Tokens per second of processor time of each system, the best of its turns."""
    generator = torch.Generator().manual_seed(0)
    rows = [[*torch.randint(3, vocab, (case.source - 1,), generator=generator).tolist(), 1] for _ in range(case.rows)]
    seconds: dict[str, float] = {}
    for turn in range(repeats + 1):
        for name, write in ways.items():
            began = time.process_time()
            write(rows, case)
            if turn:  # the first warms up
                seconds[name] = min(seconds.get(name, float("inf")), time.process_time() - began)
    return {"case": str(case), **{name: case.rows * case.new / spent for name, spent in seconds.items()}}


def table(runs: list[dict[str, Any]]) -> str:
    """One row a case: tokens/s, and our ratio to the peer."""
    rows = [
        [
            run["case"],
            *(f"{run[name]:.1f}" for name in SYSTEMS),
            *(f"{run[name] / run[peer]:.2f}x" for name, peer in PEERS.items()),
        ]
        for run in runs
    ]
    ratios = [f"{name} to {peer}" for name, peer in PEERS.items()]
    return markdown(["prompts", *(f"{name}, tokens/s" for name in SYSTEMS), *ratios], rows)


def main(arguments: list[str]) -> None:
    """Measure all cases; all flags are --name=value."""
    _, options = options_of(arguments, {"model": "t5-small", "repeats": "3", "write": "True"}, str(__doc__))
    name, repeats = options["model"], int(options["repeats"])
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    ways, runs = systems(name), []
    for case in CASES:
        runs.append(measure(case, ways, T5ModelConfig(**model_presets()[name]).vocab_size, repeats))
        print(json.dumps(runs[-1]), flush=True)
    heading, body = f"Generating answers: {name}, one thread", table(runs)
    show_section(f"generation-{name}", heading, body, runs, is_written=options["write"] == "True")


if __name__ == "__main__":
    main(sys.argv[1:])
