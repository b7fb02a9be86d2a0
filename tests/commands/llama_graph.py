"""What llama.cpp computes of a GGUF, in plain torch: the graph of its src/models/t5.cpp, over tensors and metadata of
the file.

Written from that source alone, without this program's model: queries are not scaled, nor is the decoder's output.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import Tensor

dequantize = pytest.importorskip("gguf").quants.dequantize

MAX_DISTANCE = 128


class LlamaT5:
    """A GGUF of architecture t5 or t5encoder. Tensors stand as llama.cpp sees them: (out, in)."""

    def __init__(self, reader: Any) -> None:
        self.t: Mapping[str, Tensor] = {
            tensor.name: torch.tensor(dequantize(tensor.data, tensor.tensor_type)) for tensor in reader.tensors
        }
        self._facts = reader.fields
        self._architecture = self._facts["general.architecture"].contents()
        self.heads = self.fact("attention.head_count")
        self.buckets = self.fact("attention.relative_buckets_count")
        self.epsilon = self.fact("attention.layer_norm_rms_epsilon")

    def fact(self, name: str) -> Any:
        return self._facts[f"{self._architecture}.{name}"].contents()

    def logits(self, source: list[int], answer: list[int]) -> Tensor:
        """(T, V) of an answer from the start token on."""
        memory = self.encode(source)
        embeddings = self.t["token_embd.weight"]
        x = embeddings[answer]
        unseen = torch.triu(torch.full((len(answer), len(answer)), -math.inf), 1)
        for layer in range(self.fact("decoder_block_count")):
            at = f"dec.blk.{layer}."
            normed = self.norm(x, f"{at}attn_norm")
            x = x + self.attend(f"{at}attn", normed, normed, self.bias("dec", layer, len(answer)) + unseen)
            normed = self.norm(x, f"{at}cross_attn_norm")
            x = x + self.attend(f"{at}cross_attn", normed, memory, torch.zeros(()))
            x = x + self.feed_forward(at, x)
        return self.norm(x, "dec.output_norm") @ self.t.get("output.weight", embeddings).T

    def encode(self, source: list[int]) -> Tensor:
        x = self.t["token_embd.weight"][source]
        for layer in range(self.fact("block_count")):
            at = f"enc.blk.{layer}."
            normed = self.norm(x, f"{at}attn_norm")
            x = x + self.attend(f"{at}attn", normed, normed, self.bias("enc", layer, len(source)))
            x = x + self.feed_forward(at, x)
        return self.norm(x, "enc.output_norm")

    def norm(self, x: Tensor, name: str) -> Tensor:
        return x * torch.rsqrt((x * x).mean(-1, keepdim=True) + self.epsilon) * self.t[f"{name}.weight"]

    def attend(self, name: str, x: Tensor, over: Tensor, bias: Tensor) -> Tensor:
        q, k, v = (
            (of @ self.t[f"{name}_{role}.weight"].T).unflatten(-1, (self.heads, -1)).transpose(0, 1)
            for role, of in (("q", x), ("k", over), ("v", over))
        )
        return ((q @ k.mT + bias).softmax(-1) @ v).transpose(0, 1).flatten(1) @ self.t[f"{name}_o.weight"].T

    def feed_forward(self, at: str, x: Tensor) -> Tensor:
        normed = self.norm(x, f"{at}ffn_norm")
        inner, gate = normed @ self.t[f"{at}ffn_up.weight"].T, self.t.get(f"{at}ffn_gate.weight")
        inner = inner.relu() if gate is None else torch.nn.functional.gelu(normed @ gate.T, approximate="tanh") * inner
        return inner @ self.t[f"{at}ffn_down.weight"].T

    def bias(self, side: str, layer: int, length: int) -> Tensor:
        """(H, T, T): a layer's own table, or that of the first one."""
        table = self.t.get(f"{side}.blk.{layer}.attn_rel_b.weight", self.t[f"{side}.blk.0.attn_rel_b.weight"])
        buckets = [[self.bucket(key - query, side == "enc") for key in range(length)] for query in range(length)]
        return table[torch.tensor(buckets)].permute(2, 0, 1)

    def bucket(self, distance: int, both_ways: bool) -> int:
        """`llama_relative_position_bucket`."""
        buckets = self.buckets // 2 if both_ways else self.buckets
        offset = buckets if both_ways and distance > 0 else 0
        distance = abs(distance) if both_ways else -min(distance, 0)
        exact = buckets // 2
        if distance < exact:
            return offset + distance
        far = exact + math.log(distance / exact) * (buckets - exact) / math.log(MAX_DISTANCE / exact)
        return offset + min(math.floor(far), buckets - 1)
