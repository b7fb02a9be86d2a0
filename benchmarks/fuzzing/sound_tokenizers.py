"""Sound tokenizers of every kind that is read, for `child` to damage."""

from __future__ import annotations

import io
import json
from pathlib import Path

import numpy as np
import sentencepiece

from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer

TEXTS = [f"row {number} of some words " * (1 + number % 4) + "你好" for number in range(60)]


def use_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer.load(folder)
    ids = [ids for ids in tokenizer.encode_batch(["some words </s> <extra_id_0>", "你好 " * 40, ""])]
    tokenizer.decode(np.concatenate(ids).tolist())
    tokenizer.decode(range(min(tokenizer.size, 600)))
    _ = tokenizer.fingerprint


def bpe_folder(folder: Path) -> None:
    folder.mkdir()
    train_tokenizer(TEXTS * 10, "bpe", 400, 2**20, "texts").save(folder)
    (folder / "prompt_template.json").write_text(json.dumps({"prompt_template": "chat", "source_prefix": "x: "}))


def unigram_folder(folder: Path) -> None:
    folder.mkdir()
    train_tokenizer(TEXTS * 10, "unigram", 640, 2**20, "texts").save(folder)


def regex_folder(folder: Path) -> None:
    """A tokenizer with regular expressions in its normalizer, its splitting and its decoding."""
    bpe_folder(folder)
    content = json.loads((folder / "tokenizer.json").read_text())
    replace = {"type": "Replace", "pattern": {"Regex": "(a|b)+ {2,}[^c]"}, "content": " "}
    split = {"type": "Split", "pattern": {"Regex": r"\p{L}+|\d{1,3}(?=x)"}, "behavior": "Isolated", "invert": False}
    content["normalizer"] = {"type": "Sequence", "normalizers": [replace, {"type": "NFC"}]}
    content["pre_tokenizer"] = {"type": "Sequence", "pretokenizers": [split, content["pre_tokenizer"]]}
    content["decoder"] = {"type": "Sequence", "decoders": [content["decoder"], replace]}
    (folder / "tokenizer.json").write_text(json.dumps(content))


def spiece_folder(folder: Path) -> None:
    """A small SentencePiece model, with bytes."""
    folder.mkdir()
    out = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(TEXTS),
        model_writer=out,
        vocab_size=300,
        pad_id=0,
        eos_id=1,
        unk_id=2,
        bos_id=-1,
        byte_fallback=True,
        normalization_rule_name="nfkc",
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
    )
    (folder / "spiece.model").write_bytes(out.getvalue())


def byte_bpe_folder(folder: Path) -> None:
    bpe_folder(folder)
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "added_tokens.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
