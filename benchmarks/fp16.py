"""Loss curves of fp16 beside bf16 for two models on the CPU: `python -m benchmarks.fp16`.

    --steps=1000     --write=True     into docs/benchmarks.md

A tiny T5 1.1 reads 32 bytes of the standard library's sources and predicts the next 16. It is trained as it is, and with the
weights of `wo` scaled so that its outputs reach 2e5, three times fp16's largest number; the norms that follow absorb
that. Both dtypes see the same rows in the same order, from the same bf16 weights, through the engine's own step; the CPU
stands for a card with fp16 tensor cores. Nothing is timed.
"""

from __future__ import annotations

import math
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.parts import children
from benchmarks.parts.results import markdown, write_section
from data.batches.collate import Batch, Row, collate
from engine.blockwise import Blockwise
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from model.loss import LossSettings
from model.t5 import T5
from settings.declared import T5ModelConfig

OPTIONS = {"steps": "1000", "write": "True"}
SHAPE = T5ModelConfig(
    vocab_size=259, d_model=48, d_kv=16, d_ff=96, num_layers=2, num_decoder_layers=2, num_heads=3,
    feed_forward_proj="gated-gelu", tie_word_embeddings=False, scale_decoder_outputs=False,
)  # fmt: skip
ROWS, SOURCE, TARGET, BYTES = 8, 32, 16, 3  # ids of bytes begin behind padding, end and unknown
LARGE = 2e5
PART = 100  # steps whose mean loss is shown
ALLOWED = 5e-3  # of bf16's loss, in the mean of all steps and in the last part


def batches(steps: int) -> Iterator[Batch]:
    """The rows of each step."""
    files = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = np.frombuffer(b"".join(file.read_bytes() for file in files), np.uint8).astype(np.int64) + BYTES
    draw = np.random.default_rng(0)
    for step in range(steps):
        starts = draw.integers(0, len(text) - SOURCE - TARGET, ROWS)
        rows = [
            Row(text[start : start + SOURCE], text[start + SOURCE : start + SOURCE + TARGET], step * ROWS + number)
            for number, start in enumerate(starts)
        ]
        yield collate(rows, SHAPE.pad_token_id)


def watch_outputs(model: T5) -> list[float]:
    """From now on the largest output of a feed-forward layer so far, in a list of one."""
    largest = [0.0]

    def look(module: nn.Module, given: Any, output: Tensor) -> None:
        largest[0] = max(largest[0], float(output.detach().abs().max()))

    for block in (*model.encoder.blocks, *model.decoder.blocks):
        block.feed_forward.register_forward_hook(look)
    return largest


def trained(compute: torch.dtype, factor: float, steps: int) -> dict[str, Any]:
    """The loss of each step, the largest output of `wo` and the loss scale, of a model whose `wo` is multiplied by a factor."""
    model = T5(SHAPE, dtype=torch.bfloat16).initialise(0)
    with torch.no_grad():
        for name, weight in model.named_parameters():
            if name.endswith("wo.weight"):
                weight.mul_(factor)
    largest, scaling = watch_outputs(model), LossScaling() if compute == torch.float16 else None
    store = weight_store_for(torch.bfloat16, compute)
    blockwise = Blockwise(model, 0, store, LossSettings(), 0.0, scaling=scaling)
    update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())), 0.0, scaling)
    losses = []
    for number, batch in enumerate(batches(steps), 1):
        update.begin(Step(number, 1e-2, seed=0))
        micro_batch = to_micro_batch(batch, SHAPE, torch.device("cpu"))
        loss, norm = update.finish(blockwise.gradients([micro_batch], batch.num_labels, update))
        losses.append(loss / batch.num_labels)
        if scaling is not None:
            scaling.count(math.isfinite(norm))
    scale = {} if scaling is None else {"scale": scaling.scale, "skipped": scaling.skipped_steps}
    return {"losses": losses, "largest": largest[0], **scale}


def means_of(losses: list[float]) -> list[float]:
    """Of each `PART` steps."""
    return [round(float(np.mean(losses[first : first + PART])), 4) for first in range(0, len(losses), PART)]


def main(arguments: list[str]) -> None:
    """Train the four models and compare; all flags are --name=value."""
    options = children.options_of(arguments, OPTIONS, str(__doc__))[1]
    steps = int(options["steps"])
    usual = trained(torch.bfloat16, 1.0, 1)["largest"]
    runs = {
        (kind, word): trained(dtype, factor, steps)
        for kind, factor in (("as it is", 1.0), ("large wo", 1.25 * LARGE / usual))
        for word, dtype in (("bf16", torch.bfloat16), ("fp16", torch.float16))
    }
    rows, is_within = [], True
    for (kind, word), run in runs.items():
        losses, expected = np.array(run["losses"]), np.array(runs[kind, "bf16"]["losses"])
        parts = [f"{mean:.3f}" for mean in means_of(run["losses"])]
        beside = [losses.mean() / expected.mean() - 1, losses[-PART:].mean() / expected[-PART:].mean() - 1]
        is_within &= max(map(abs, beside)) <= ALLOWED
        of_scale = f"{run['scale']:g}, {run['skipped']} of {steps}" if "scale" in run else "-"
        told = [f"{each:+.2%}" if word == "fp16" else "-" for each in beside]
        rows.append([kind, word, f"{run['largest']:.3g}", *parts, *told, of_scale])
    heads = [f"{first + 1}-{min(first + PART, steps)}" for first in range(0, steps, PART)]
    head = [
        "model",
        "products",
        "largest output of wo",
        *heads,
        "all, to bf16",
        "last, to bf16",
        "loss scale, steps left out",
    ]
    body = f"{markdown(head, rows)}\n\n{NOTE}"
    print(body)
    if options["write"] == "True":
        figures = {f"{kind}, {word}": run | {"losses": means_of(run["losses"])} for (kind, word), run in runs.items()}
        write_section("fp16", f"fp16 beside bf16: loss of {steps:,} steps", body, figures)
    if not is_within:
        sys.exit(f"fp16 is further than {ALLOWED:.1%} from bf16")


NOTE = (
    "Mean loss of each 100 steps of a tiny T5 1.1 (48 wide, 2 + 2 blocks) that reads 32 bytes of Python sources and predicts the "
    "next 16; Adafactor at 1e-2, the same bf16 weights and rows for both. fp16's largest number is 65,504. On a CPU, whose half "
    "tensors stand for a card's; the bar is 0.5% in all steps and in the last 100."
)

if __name__ == "__main__":
    main(sys.argv[1:])
