"""Sound tokenizers of every kind that is read, for `mutated_child` to damage."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np

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
    """A small SentencePiece model, written by hand."""
    folder.mkdir()
    letters = "abcdefghijklmnopqrstuvwxyz"
    pieces = [("<pad>", 0.0, 3), ("</s>", 0.0, 3), ("<unk>", 0.0, 2), ("▁", -2.0, 1)]
    pieces += [(letter, -3.0 - place / 10, 1) for place, letter in enumerate(letters)]
    pieces += [("▁so", -4.0, 1), ("me", -4.1, 1), ("wo", -4.2, 1), ("wor", -4.5, 1)]
    pieces += [(f"<0x{byte:02X}>", -9.0, 6) for byte in range(256)]
    content = b"".join(field_of(1, piece_of(*piece)) for piece in pieces)
    content += field_of(2, bytes([3 << 3, 1]) + varint(35 << 3) + b"\1")
    content += field_of(3, field_of(2, charsmap()) + bytes([3 << 3, 1, 4 << 3, 1]))
    (folder / "spiece.model").write_bytes(content)


def charsmap() -> bytes:
    """An empty double array with no replacements."""
    return (1024).to_bytes(4, "little") + bytes(1024) + b"\0"


def varint(number: int) -> bytes:
    written = b""
    while number >= 128:
        written += bytes([number & 127 | 128])
        number >>= 7
    return written + bytes([number])


def field_of(number: int, content: bytes) -> bytes:
    return varint(number << 3 | 2) + varint(len(content)) + content


def piece_of(text: str, score: float, kind: int) -> bytes:
    return field_of(1, text.encode()) + bytes([2 << 3 | 5]) + np.float32(score).tobytes() + bytes([3 << 3, kind])


def byte_bpe_folder(folder: Path) -> None:
    bpe_folder(folder)
    content = json.loads((folder / "tokenizer.json").read_text())["model"]
    (folder / "vocab.json").write_text(json.dumps(content["vocab"]))
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in content["merges"]]
    (folder / "merges.txt").write_text("#version: 0.2\n" + "\n".join(merges) + "\n")
    (folder / "added_tokens.json").write_text("{}")
    (folder / "tokenizer.json").unlink()
