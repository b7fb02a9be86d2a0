"""How is a SentencePiece model, the file of the published T5 and mT5 tokenizers, turned into a tokenizer?

The file is a protocol buffer; the few fields that matter are read here (numbers from `sentencepiece_model.proto` of
github.com/google/sentencepiece). Unigram keeps its pieces and scores. BPE's merges are not in the file: a merge is any
pair of pieces that joins to a piece, in the order of the joined piece's score. T5's 100 sentinels are not in its file
either; they follow the pieces, <extra_id_0> highest, as in Hugging Face's `T5Tokenizer`.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path

from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bounded import MOST_TABLE_BYTES, read_bytes
from data.tokenizers.panics import failure_is_user_error
from settings.fields import UserError

NUM_SENTINELS = 100
END_OF_TEXT = "</s>"
UNIGRAM, BPE = 1, 2
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6
LONGEST_PIECE = 1024  # letters; SentencePiece makes none over 16 unless told to
Value = int | bytes


@dataclass
class SentencePieceModel:
    """What the file says: pieces in the order of their ids, each with score and type, and how text is prepared."""

    pieces: list[tuple[str, float, int]] = field(default_factory=list)
    kind: int = UNIGRAM
    byte_fallback: bool = False
    charsmap: bytes = b""
    adds_prefix: bool = True
    removes_blanks: bool = True


def load_sentencepiece(path: Path) -> Backend:
    """Read a SentencePiece model.

    Raises:
        UserError: the file is no such model, or of a type that is neither Unigram nor BPE.
    """
    try:
        model = parse(read_bytes(path, MOST_TABLE_BYTES))
    except (OSError, IndexError, ValueError, TypeError, struct.error) as error:
        raise UserError(f"{path}: is no SentencePiece model ({error}); fetch it again") from None
    if not model.pieces or model.kind not in (UNIGRAM, BPE):
        raise UserError(f"{path}: is no Unigram or BPE model of SentencePiece; name another tokenizer")
    with failure_is_user_error(f"{path}: no tokenizer can be made of it"):
        return build(model)


def parse(content: bytes) -> SentencePieceModel:
    """Read the fields of a `ModelProto`."""
    model = SentencePieceModel()
    for number, value in _fields(content):
        if number == 1:
            model.pieces.append(_piece(_bytes(value)))
        elif number == 2:
            for inner, setting in _fields(_bytes(value)):
                if inner == 3:
                    model.kind = int(setting)
                elif inner == 35:
                    model.byte_fallback = bool(setting)
        elif number == 3:
            for inner, setting in _fields(_bytes(value)):
                if inner == 2:
                    model.charsmap = _bytes(setting)
                elif inner == 3:
                    model.adds_prefix = bool(setting)
                elif inner == 4:
                    model.removes_blanks = bool(setting)
    return model


def _piece(content: bytes) -> tuple[str, float, int]:
    text, score, kind = "", 0.0, NORMAL
    for number, value in _fields(content):
        if number == 1:
            text = _bytes(value).decode("utf8")
            if len(text) > LONGEST_PIECE:
                raise ValueError(f"a piece has {len(text)} letters")
        elif number == 2:
            (score,) = struct.unpack("<f", _bytes(value))
        elif number == 3:
            kind = int(value)
    return text, score, kind


def _bytes(value: Value) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("a field has another type")
    return value


def _fields(content: bytes) -> Iterator[tuple[int, Value]]:
    """Number and value of each field of a protocol buffer message."""
    place = 0
    while place < len(content):
        key, place = _varint(content, place)
        number, wire = key >> 3, key & 7
        if wire == 0:
            value: Value
            value, place = _varint(content, place)
        elif wire in (1, 2, 5):
            size, place = _varint(content, place) if wire == 2 else ({1: 8, 5: 4}[wire], place)
            value = content[place : place + size]
            if len(value) != size:
                raise ValueError("it is cut off")
            place += size
        else:
            raise ValueError(f"a field has wire type {wire}")
        yield number, value


def _varint(content: bytes, place: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = content[place]
        place += 1
        value |= (byte & 127) << shift
        shift += 7
        if byte < 128:
            return value, place
        if shift > 63:
            raise ValueError("a number is longer than 64 bits")


def build(model: SentencePieceModel) -> Backend:
    """Make a tokenizer that gives the ids of SentencePiece."""
    pieces = [(_sentinel_name(text), score) for text, score, _ in model.pieces]
    kinds = [kind for _, _, kind in model.pieces]
    unknown = kinds.index(UNKNOWN) if UNKNOWN in kinds else None
    if model.kind == UNIGRAM:
        backend = Backend(models.Unigram(pieces, unk_id=unknown, byte_fallback=model.byte_fallback))
    else:
        vocabulary = {text: number for number, (text, _) in enumerate(pieces)}
        unk_token = None if unknown is None else pieces[unknown][0]
        merges = _merges(vocabulary, dict(pieces))
        backend = Backend(
            models.BPE(vocabulary, merges, unk_token=unk_token, fuse_unk=True, byte_fallback=model.byte_fallback)
        )
    steps: list[normalizers.Normalizer] = [normalizers.Precompiled(model.charsmap)] if model.charsmap else []
    if model.removes_blanks:
        steps += [normalizers.Strip(), normalizers.Replace(Regex(" {2,}"), " ")]
    if steps:
        backend.normalizer = normalizers.Sequence(steps)
    scheme = "always" if model.adds_prefix else "never"
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme, split=model.kind == UNIGRAM)
    backend.decoder = decoders.Sequence(
        [
            decoders.Replace("▁", " "),
            decoders.ByteFallback(),
            decoders.Fuse(),
            decoders.Strip(" ", int(model.adds_prefix), 0),
        ]
    )
    special = [text for (text, _), kind in zip(pieces, kinds, strict=True) if kind in (UNKNOWN, CONTROL)]
    special += [text for text, _ in pieces if text.startswith("<extra_id_")]
    if not any(text.startswith("<extra_id_") for text in special):
        special += [f"<extra_id_{number}>" for number in reversed(range(NUM_SENTINELS))]
    backend.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    if END_OF_TEXT in special:  # for AutoTokenizer, which puts it after every text; ours does that itself
        ending = [(END_OF_TEXT, backend.token_to_id(END_OF_TEXT))]
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {END_OF_TEXT}", pair=f"$A {END_OF_TEXT} $B {END_OF_TEXT}", special_tokens=ending
        )
    return backend


def _sentinel_name(text: str) -> str:
    """mT5 keeps its sentinels as ordinary pieces with a blank before them."""
    return text[1:] if text.startswith("▁<extra_id_") else text


def _merges(vocabulary: dict[str, int], scores: dict[str, float]) -> list[tuple[str, str]]:
    """Every pair of pieces that joins to a piece, the best first."""
    found = [
        (-scores[piece], vocabulary[piece[:cut]], vocabulary[piece[cut:]], piece[:cut], piece[cut:])
        for piece in vocabulary
        for cut in range(1, len(piece))
        if piece[:cut] in vocabulary and piece[cut:] in vocabulary
    ]
    return [(left, right) for *_, left, right in sorted(found)]
