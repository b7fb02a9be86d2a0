"""A token head over a T5 encoder, trained by transformers and PEFT: a child process of `benchmarks.encoders`; prints one JSON line.

    python -m benchmarks.parts.encoder_peer RECOMPUTE BASE BATCHES RATE

As Rostlab's notebooks for ProtT5 do: `T5EncoderModel`, LoRA of rank 4 on q and v, dropout and a linear layer over the hidden
states, cross-entropy over the labels that count, AdamW, fp32. RECOMPUTE: yes for gradient checkpointing. BASE: a model folder. BATCHES:
a file with the rows of each step as ids and labels; the first step warms up. RATE: of dropout.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

IGNORED, CLASSES, RANK, LEARNING_RATE = -100, 3, 4, 3e-4


class TokenClassifier(nn.Module):
    """An encoder with adapters, dropout, and a linear layer over its hidden states."""

    def __init__(self, base: str, is_recomputed: bool, rate: float) -> None:
        super().__init__()
        from peft import LoraConfig, get_peft_model
        from transformers import T5EncoderModel

        encoder: Any = T5EncoderModel.from_pretrained(base, dtype=torch.float32, dropout_rate=rate)
        if is_recomputed:
            name = "activation_checkpointing_enable"  # of transformers 5
            enable = getattr(encoder, name, None) or encoder.gradient_checkpointing_enable
            enable({"use_reentrant": False})
        self.encoder = get_peft_model(encoder, LoraConfig(r=RANK, lora_alpha=2 * RANK, target_modules=["q", "v"]))
        self.dropout = nn.Dropout(rate)
        self.classifier = nn.Linear(encoder.config.d_model, CLASSES)

    def forward(self, input_ids: Tensor, attention_mask: Tensor) -> Tensor:
        """(B, S) -> logits (B, S, classes)."""
        hidden = self.encoder(input_ids=input_ids, attention_mask=attention_mask).last_hidden_state
        logits: Tensor = self.classifier(self.dropout(hidden))
        return logits


def main(is_recomputed: bool, base: str, batches: str, rate: float) -> None:
    """Run all steps and print the figures."""
    model = TokenClassifier(base, is_recomputed, rate).train()
    trained = [weight for weight in model.parameters() if weight.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=LEARNING_RATE)
    losses, seconds = [], []
    for batch in json.loads(Path(batches).read_text(encoding="utf8")):
        began = time.perf_counter()
        ids, lengths = torch.tensor(batch["input_ids"]), torch.tensor(batch["lengths"])
        mask = (torch.arange(ids.shape[1]) < lengths[:, None]).long()
        logits = model(ids, mask)
        loss = nn.functional.cross_entropy(
            logits.flatten(0, 1), torch.tensor(batch["labels"]).flatten(), ignore_index=IGNORED
        )
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": seconds[1:], "losses": losses, "trained": sum(weight.numel() for weight in trained)}))


if __name__ == "__main__":
    main(sys.argv[1] == "yes", sys.argv[2], sys.argv[3], float(sys.argv[4]))
