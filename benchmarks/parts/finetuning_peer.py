"""Finetuning by transformers and PEFT on the same rows: a child process of `benchmarks.finetuning`, which prints one
JSON line.

    python -m benchmarks.parts.finetuning_peer KIND MICRO_BATCH RECOMPUTE BASE BATCHES

KIND: full, frozen (encoder and embedding) or lora (rank 8 on q and v, PEFT's defaults). MICRO_BATCH: rows of one
forward; gradients add up to the whole step. RECOMPUTE: yes for gradient checkpointing. BASE: a model folder. BATCHES: a
file with the rows of each step as token ids; the first step warms up. fp32 and AdamW, as they ship, dropout as the base
says.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

LEARNING_RATE = 1e-4
FROZEN = ("shared.", "encoder.", "decoder.embed_tokens.")
IGNORED = -100
StepRows = list[dict[str, list[int]]]


def build(kind: str, is_recomputed: bool, base: str) -> nn.Module:
    """The model, ready to learn what `kind` says."""
    from transformers import AutoModelForSeq2SeqLM

    model: Any = AutoModelForSeq2SeqLM.from_pretrained(base, dtype=torch.float32, use_cache=False)
    if kind == "frozen":
        for name, weight in model.named_parameters():
            weight.requires_grad_(not name.startswith(FROZEN))
    if is_recomputed:
        name = "activation_checkpointing_enable"  # of transformers 5
        enable = getattr(model, name, None) or model.gradient_checkpointing_enable
        enable({"use_reentrant": False})
    if kind == "lora":
        from peft import LoraConfig, get_peft_model

        model = get_peft_model(
            model, LoraConfig(task_type="SEQ_2_SEQ_LM", r=8, lora_alpha=16, target_modules=["q", "v"])
        )
    model.train()
    return model  # type: ignore[no-any-return]


def padded(rows: StepRows, name: str, fill: int) -> Tensor:
    """(rows, longest) ids, filled up on the right."""
    return nn.utils.rnn.pad_sequence([torch.tensor(row[name]) for row in rows], batch_first=True, padding_value=fill)


def run_step(model: nn.Module, optimizer: torch.optim.Optimizer, rows: StepRows, batch_size: int) -> float:
    """One step over all rows; the mean loss of a label."""
    total = sum(len(row["labels"]) for row in rows)
    loss = 0.0
    optimizer.zero_grad()
    for at in range(0, len(rows), batch_size):
        part = rows[at : at + batch_size]
        ids, labels = padded(part, "input_ids", 0), padded(part, "labels", IGNORED)
        mask = padded([{"mask": [1] * len(row["input_ids"])} for row in part], "mask", 0)
        share = sum(len(row["labels"]) for row in part) / total
        part_loss = model(input_ids=ids, attention_mask=mask, labels=labels).loss * share
        part_loss.backward()
        loss += float(part_loss.detach())
    optimizer.step()
    return loss


def main(kind: str, batch_size: int, is_recomputed: bool, base: str, batches: str) -> None:
    """Run all steps and print the figures."""
    steps: list[StepRows] = json.loads(Path(batches).read_text(encoding="utf8"))
    model = build(kind, is_recomputed, base)
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    losses, seconds = [], []
    for rows in steps:
        began = time.perf_counter()
        losses.append(run_step(model, optimizer, rows, batch_size))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds[1:], "losses": losses, "trained": sum(weight.numel() for weight in trained)}))


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), sys.argv[3] == "yes", sys.argv[4], sys.argv[5])
