"""A tokenizer as other programs need it: its pieces by id, what kind each is, and how text is split."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from data.tokenizers.backends import LibraryBackend
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError
from settings.program import needs

Kind = Literal["normal", "unknown", "control", "named", "unused", "byte"]  # named: stands for itself in a text
UNUSED_SCORE = -10000.0
NAMED_SCORE = -1000.0
SENTENCEPIECE_KINDS: dict[int, Kind] = {2: "unknown", 3: "control", 4: "named", 5: "unused", 6: "byte"}


@dataclass(frozen=True)
class Piece:
    """What an id stands for."""

    text: str
    kind: Kind
    score: float


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, as others read it.

    Args:
        model: BPE, Unigram or another of the library's. pieces: by id, as many as the embedding has rows.
        merges: of BPE, the most frequent first. pad_id, eos_id, unk_id: of the special tokens.
        charsmap: SentencePiece's compiled normalization; empty: none. collapses_spaces, adds_space: before pieces are
            sought.
        is_bytewise: whether pieces are written in GPT-2's alphabet of bytes.
    """

    model: str
    pieces: list[Piece]
    merges: list[str]
    pad_id: int
    eos_id: int
    unk_id: int | None
    charsmap: bytes
    collapses_spaces: bool
    adds_space: bool
    is_bytewise: bool

    @property
    def texts(self) -> list[str]:
        """The pieces' texts."""
        return [piece.text for piece in self.pieces]


def read_vocabulary(tokenizer: Tokenizer, folder: Path, size: int) -> Vocabulary:
    """The pieces of a tokenizer for a model with `size` embedding rows; rows beyond it become unused pieces.

    Args:
        folder: that it was read from.
    Raises:
        UserError: it has more ids than the model has rows.
    """
    if tokenizer.size > size:
        raise UserError(
            "--model = {folder}, its tokenizer has {size} tokens and the model {other_size}: they do not match",
            folder=folder,
            size=tokenizer.size,
            other_size=size,
        )
    pieces = [Piece(f"[PAD{number}]", "unused", UNUSED_SCORE) for number in range(size)]
    if not isinstance(tokenizer.backend, LibraryBackend):
        return _of_sentencepiece(tokenizer, pieces)
    content: dict[str, Any] = json.loads(tokenizer.backend.serialized())
    model = content["model"]
    learned = model.get("vocab", {})
    if isinstance(learned, Mapping):
        scores = [(number, text, 0.0) for text, number in learned.items()]
    else:
        scores = [(number, text, score) for number, (text, score) in enumerate(learned)]
    for number, text, score in scores:
        is_byte = model.get("byte_fallback") and text.startswith("<0x")
        pieces[number] = Piece(text, "byte" if is_byte else "normal", score)
    for added in content.get("added_tokens", []):
        is_control = added.get("special") and added["id"] not in tokenizer.sentinel_ids
        pieces[added["id"]] = Piece(added["content"], "control" if is_control else "named", NAMED_SCORE)
    if tokenizer.unk_id is not None:
        pieces[tokenizer.unk_id] = replace(pieces[tokenizer.unk_id], kind="unknown")
    steps = list(_steps(content))
    by_type = {step["type"]: step for step in steps}
    charsmap = by_type.get("Precompiled", {}).get("precompiled_charsmap", "")
    # Published T5 tokenizers make one space of several, by one of two steps.
    collapses = "WhitespaceSplit" in by_type or any(" {2,}" in str(step.get("pattern")) for step in steps)
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    return Vocabulary(
        model["type"],
        pieces,
        merges,
        tokenizer.pad_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        base64.b64decode(charsmap),
        collapses,
        by_type.get("Metaspace", {"prepend_scheme": "never"}).get("prepend_scheme") != "never",
        # Without merges, as of ByT5, it does not matter how words are split.
        "ByteLevel" in by_type and (not merges or by_type["ByteLevel"].get("use_regex", True)),
    )


def _of_sentencepiece(tokenizer: Tokenizer, pieces: list[Piece]) -> Vocabulary:
    proto = needs("protobuf", "--model with spiece.model", module="sentencepiece.sentencepiece_model_pb2")
    model = proto.ModelProto.FromString(tokenizer.backend.serialized())
    for number, piece in enumerate(model.pieces):
        pieces[number] = Piece(piece.piece, SENTENCEPIECE_KINDS.get(piece.type, "normal"), piece.score)
    for number in range(len(model.pieces), tokenizer.size):
        token = tokenizer.id_to_token(number)
        if token is not None:
            pieces[number] = Piece(token, "named", NAMED_SCORE)
    normalizer = model.normalizer_spec
    return Vocabulary(
        "SentencePiece BPE" if model.trainer_spec.model_type == model.trainer_spec.BPE else "Unigram",
        pieces,
        [],
        tokenizer.pad_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        normalizer.precompiled_charsmap,
        normalizer.remove_extra_whitespaces,
        normalizer.add_dummy_prefix,
        False,
    )


def _steps(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is done to a text before pieces are sought."""
    sequences = [content.get("normalizer"), content.get("pre_tokenizer")]
    while sequences:
        step = sequences.pop(0)
        if step is not None:
            yield step
            sequences += [*step.get("normalizers", []), *step.get("pretokenizers", [])]
