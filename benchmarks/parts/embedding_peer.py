"""The cached contrastive loss of sentence-transformers: a child process of `benchmarks.embeddings`.

    python benchmarks/parts/embedding_peer.py ROWS TOKENS STEPS

It runs in an interpreter that has sentence-transformers, and imports nothing of this project. Random ids, t5-small's
encoder in fp32 with AdamW; prints the median seconds of a step, without the first where there are others, as JSON.
"""

from __future__ import annotations

import json
import statistics
import sys
import time
from typing import Any

import torch
from sentence_transformers.losses import CachedMultipleNegativesRankingLoss
from transformers import T5Config, T5EncoderModel

MINI_BATCH = 64
VOCABULARY = 32128


class Encoder(torch.nn.Module):
    """What the loss asks of a model: features -> `sentence_embedding`, here the mean over all tokens."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = T5EncoderModel(T5Config(vocab_size=VOCABULARY))
        self.device = torch.device("cpu")

    def forward(self, features: dict[str, Any]) -> dict[str, Any]:
        hidden = self.encoder(input_ids=features["input_ids"], attention_mask=features["attention_mask"])
        return {"sentence_embedding": hidden.last_hidden_state.mean(1)}


def main(rows: int, tokens: int, steps: int) -> None:
    """Take some steps."""
    torch.manual_seed(0)
    model = Encoder()
    loss = CachedMultipleNegativesRankingLoss(model, mini_batch_size=MINI_BATCH)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True)
    seconds = []
    for _ in range(steps):
        began = time.perf_counter()
        ids = torch.randint(3, VOCABULARY, (2, rows, tokens))
        features = [{"input_ids": side, "attention_mask": torch.ones_like(side)} for side in ids]
        loss(features, torch.zeros(rows)).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    print(json.dumps({"seconds": statistics.median(seconds[1:] or seconds)}))


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
