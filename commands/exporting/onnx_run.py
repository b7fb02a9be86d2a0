"""ONNX files of ours, run in onnxruntime: logits of an answer, and greedy answers with keys and values kept."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import torch
from torch.nn.utils.rnn import pad_sequence

from settings.declared import T5ModelConfig

Array = np.ndarray[Any, Any]


def session(path: Path) -> Any:
    """A graph in onnxruntime. Weights beside it stay in their file, mapped: they are not packed for products."""
    options = onnxruntime.SessionOptions()
    options.add_session_config_entry("session.disable_prepacking", "1")
    options.enable_cpu_mem_arena = False  # It takes memory in powers of two.
    options.intra_op_num_threads = torch.get_num_threads()
    return onnxruntime.InferenceSession(str(path), options, providers=["CPUExecutionProvider"])


def padded(sources: Sequence[Sequence[int]]) -> dict[str, Array]:
    """Rows of ids as `input_ids` and `attention_mask` (B, S)."""
    rows = [torch.tensor(row) for row in sources]
    masks = [torch.ones_like(row) for row in rows]
    return {
        "input_ids": pad_sequence(rows, batch_first=True).numpy(),
        "attention_mask": pad_sequence(masks, batch_first=True).numpy(),
    }


class CachedDecoder:
    """A decoder that answers rows token by token.

    Args:
        decoder: its session. config: shape of the model.
        states, mask: the encoder's output (B, S, D), and which of it are tokens (B, S).
    """

    def __init__(self, decoder: Any, config: T5ModelConfig, states: Array, mask: Array) -> None:
        self._decoder = decoder
        self._facts = {"encoder_hidden_states": states, "encoder_attention_mask": mask}
        self._names = [item.name for item in decoder.get_inputs() if item.name.startswith("past_key_values")]
        empty = np.zeros((len(states), config.num_heads, 0, config.d_kv), np.float32)
        self._past = dict.fromkeys(self._names, empty)
        self._is_cached = False

    def step(self, ids: Array) -> Array:
        """Logits (B, T, V) of further tokens (B, T)."""
        inputs = {"input_ids": ids, "use_cache_branch": np.array([self._is_cached]), **self._facts, **self._past}
        logits, *present = self._decoder.run(None, inputs)
        self._past = dict(zip(self._names, present, strict=True))
        self._is_cached = True
        return logits

    def answers(self, config: T5ModelConfig, new_tokens: int) -> list[list[int]]:
        """Greedy answers, without start and end token."""
        tokens = np.full((len(self._facts["encoder_hidden_states"]), 1), config.start_token_id)
        have_ended = np.zeros(tokens.shape, bool)
        columns: list[Array] = []
        while len(columns) < new_tokens and not have_ended.all():
            tokens = self.step(tokens)[:, -1].argmax(-1)[:, None]
            have_ended |= tokens == config.eos_token_id
            columns.append(tokens)
        rows = np.concatenate(columns, axis=1).tolist()
        return [row[: row.index(config.eos_token_id)] if config.eos_token_id in row else row for row in rows]
