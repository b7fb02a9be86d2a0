"""SentencePiece models of a few sentences, and folders that hold them."""

from __future__ import annotations

import io
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import sentencepiece

NAMES = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "tokenizer_class": "T5Tokenizer"}


def sentencepiece_model(sentences: Iterable[str], vocab_size: int, **more: Any) -> bytes:
    """The content of a model's file, with T5's ids of special tokens."""
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(sentences),
        model_writer=out,
        vocab_size=vocab_size,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        **more,
    )
    return out.getvalue()


def folder_of(folder: Path, proto: bytes, config: dict[str, Any], **files: Any) -> Path:
    folder.mkdir()
    (folder / "spiece.model").write_bytes(proto)
    for name, content in {**files, "tokenizer_config": {**NAMES, **config}}.items():
        (folder / f"{name}.json").write_text(json.dumps(content))
    return folder
