"""A tokenizer as other programs need it: its pieces by id, what kind each is, and how text is split."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from data.tokenizers.backends import LibraryBackend
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError
from settings.program import needs

Kind = Literal["normal", "unknown", "control", "named", "unused", "byte"]  # named: stands for itself in a text
UNUSED_SCORE, NAMED_SCORE = -10000.0, -1000.0


@dataclass(frozen=True)
class Vocabulary:
    """A tokenizer, as others read it.

    Args:
        model: BPE, Unigram or another of the library's. pieces, kinds, scores: by id, as many as the embedding has
            rows.
        merges: of BPE, the most frequent first. pad_id, eos_id, unk_id: of the special tokens.
        charsmap: SentencePiece's compiled normalization; empty: none. collapses_spaces, adds_space: before pieces are
            sought.
        is_bytewise: whether pieces are written in GPT-2's alphabet of bytes.
    """

    model: str
    pieces: list[str]
    kinds: list[Kind]
    scores: list[float]
    merges: list[str]
    pad_id: int
    eos_id: int
    unk_id: int | None
    charsmap: bytes
    collapses_spaces: bool
    adds_space: bool
    is_bytewise: bool


def read_vocabulary(folder: Path, size: int) -> Vocabulary:
    """The tokenizer of a folder for a model with `size` embedding rows; rows beyond it become unused pieces.

    Raises:
        UserError: there is none, or it has more ids than the model has rows.
    """
    tokenizer = Tokenizer.load(folder)
    if tokenizer.size > size:
        raise UserError(
            "--model = {folder}, its tokenizer has {size} tokens and the model {other_size}: they do not match",
            folder=folder,
            size=tokenizer.size,
            other_size=size,
        )
    if not isinstance(tokenizer.backend, LibraryBackend):
        return _of_sentencepiece(tokenizer, size)
    written: dict[str, Any] = json.loads(tokenizer.backend.serialized())
    model = written["model"]
    pieces, scores = [f"[PAD{i}]" for i in range(size)], [UNUSED_SCORE] * size
    kinds: list[Kind] = ["unused"] * size
    for number, piece, score in _learnt(model):
        pieces[number], kinds[number], scores[number] = piece, "normal", score
        if piece.startswith("<0x") and model.get("byte_fallback"):
            kinds[number] = "byte"
    for added in written.get("added_tokens", []):
        number = added["id"]
        pieces[number], scores[number] = added["content"], NAMED_SCORE
        kinds[number] = "named" if number in tokenizer.sentinel_ids or not added.get("special") else "control"
    if tokenizer.unk_id is not None:
        kinds[tokenizer.unk_id] = "unknown"
    steps = list(_steps(written))
    charsmap = b"".join(base64.b64decode(s["precompiled_charsmap"]) for s in steps if s["type"] == "Precompiled")
    # whether runs of spaces become one, as published T5 tokenizers have it
    collapses = any(
        step["type"] == "WhitespaceSplit" or (step["type"] == "Replace" and " {2,}" in str(step.get("pattern")))
        for step in steps
    )
    merges = [merge if isinstance(merge, str) else " ".join(merge) for merge in model.get("merges", [])]
    return Vocabulary(
        model["type"],
        pieces,
        kinds,
        scores,
        merges,
        tokenizer.pad_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        charsmap,
        collapses,
        any(step["type"] == "Metaspace" and step.get("prepend_scheme", "always") != "never" for step in steps),
        # without merges, as of ByT5, it does not matter how words are split
        any(step["type"] == "ByteLevel" and (step.get("use_regex", True) or not merges) for step in steps),
    )


def _of_sentencepiece(tokenizer: Tokenizer, size: int) -> Vocabulary:
    proto = needs("protobuf", "--model with spiece.model", module="sentencepiece.sentencepiece_model_pb2")
    model = proto.ModelProto.FromString(tokenizer.backend.serialized())
    kinds_of: dict[int, Kind] = {2: "unknown", 3: "control", 4: "named", 5: "unused", 6: "byte"}
    pieces, scores = [f"[PAD{number}]" for number in range(size)], [UNUSED_SCORE] * size
    kinds: list[Kind] = ["unused"] * size
    for number, piece in enumerate(model.pieces):
        pieces[number], scores[number], kinds[number] = piece.piece, piece.score, kinds_of.get(piece.type, "normal")
    for number in range(len(model.pieces), tokenizer.size):
        if (token := tokenizer.id_to_token(number)) is not None:
            pieces[number], scores[number], kinds[number] = token, NAMED_SCORE, "named"
    normalizer, is_bpe = model.normalizer_spec, model.trainer_spec.model_type == model.trainer_spec.BPE
    return Vocabulary(
        "SentencePiece BPE" if is_bpe else "Unigram",
        pieces,
        kinds,
        scores,
        [],
        tokenizer.pad_id,
        tokenizer.eos_id,
        tokenizer.unk_id,
        normalizer.precompiled_charsmap,
        normalizer.remove_extra_whitespaces,
        normalizer.add_dummy_prefix,
        False,
    )


def _learnt(model: Mapping[str, Any]) -> Iterator[tuple[int, str, float]]:
    """Id, piece and score of what was learnt."""
    vocabulary = model.get("vocab", {})
    if isinstance(vocabulary, Mapping):
        yield from ((number, piece, 0.0) for piece, number in vocabulary.items())
    else:
        yield from ((number, piece, score) for number, (piece, score) in enumerate(vocabulary))


def _steps(written: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """What is done to a text before pieces are sought, one after the other."""
    waiting = [written.get("normalizer"), written.get("pre_tokenizer")]
    while waiting:
        step = waiting.pop(0)
        if step is not None:
            yield step
            waiting = [*step.get("normalizers", []), *step.get("pretokenizers", []), *waiting]
