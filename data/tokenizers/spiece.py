"""SentencePiece models, the files of the published T5, mT5 and UMT5 tokenizers, run by the library that defines them.

Tokens that are not in the file, such as T5's sentinels, are found as in the slow tokenizers of transformers 4: a text
is split at them, and SentencePiece encodes each part between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property
from itertools import groupby
from typing import NamedTuple

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, models

from data.tokenizers.backends import SPIECE_FILE, Ids
from support.language import say

BLANK = "▁"
# The message normalizer_spec { add_dummy_prefix: false }, which is merged where it is appended:
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"


def load_model(proto: bytes, legacy: bool) -> sentencepiece.SentencePieceProcessor:
    """The model in a `*.model` file; RuntimeError or ValueError where it is none."""
    model = sentencepiece.SentencePieceProcessor(model_proto=proto if legacy else proto + NO_DUMMY_PREFIX)
    if not model.get_piece_size():
        raise ValueError(say("it holds no pieces"))
    return model


def piece_id(model: sentencepiece.SentencePieceProcessor, piece: str) -> int | None:
    """The id of a piece; None where the model lacks it, for which the library gives that of the unknown token."""
    number: int = model.piece_to_id(piece)
    return number if model.id_to_piece(number) == piece else None


class TextPart(NamedTuple):
    """A part of a text: an added token, or what lies between two of them.

    Attributes:
        token: the id of the added token; None: SentencePiece encodes the part.
        text: of the part. begin: where it begins in the whole text.
        anchor: what it is encoded behind; its tokens are left out.
    """

    token: int | None
    text: str
    begin: int
    anchor: str = ""


class SentencePieceBackend:
    """A SentencePiece model with added tokens; see `data.tokenizers.backends.LibraryBackend`.

    Args:
        model: as `load_model` returns it; proto: the content of its file.
        added: id -> token; of pieces of the model those that are special.
        legacy: False where `tokenizer_config.json` says so: no blank is put before the parts that follow an added
            token.
    """

    file_name = SPIECE_FILE
    prefix_ids = ()

    def __init__(
        self,
        model: sentencepiece.SentencePieceProcessor,
        proto: bytes,
        added: Mapping[int, AddedToken],
        legacy: bool,
    ) -> None:
        self._model = model
        self._proto = proto
        self.legacy = legacy
        self._tokens = added
        self._added = {number: token.content for number, token in added.items()}
        self._ids = {text: number for number, text in self._added.items() if text}
        self._special_ids = {number for number, token in added.items() if token.special}
        self._num_pieces: int = self._model.get_piece_size()
        self.size = max([self._num_pieces - 1, *added]) + 1
        # Without its blank, SentencePiece also drops one that a part begins with: such parts are encoded behind this.
        self._anchor = str(self._model.id_to_piece(self._model.unk_id()))
        self._anchor_tokens = {"": 0, self._anchor: len(self._model.encode(self._anchor))}
        # It finds added tokens as `tokenizer.json` would (longest first, blanks beside them); all between is token 0.
        self._splitter = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._splitter.add_tokens(sorted(added.values(), key=lambda token: not token.special))

    def added_tokens(self) -> Mapping[int, AddedToken]:
        return self._tokens

    @cached_property
    def fingerprint(self) -> str:
        about = (sorted(self._added.items()), self._splitter.to_str(), self.legacy)
        return hashlib.sha256(self._proto + repr(about).encode("utf8", "replace")).hexdigest()

    def token_to_id(self, token: str) -> int | None:
        return self._ids.get(token, piece_id(self._model, token))

    def id_to_token(self, number: int) -> str | None:
        if 0 <= number < self._num_pieces:
            return self._added.get(number, str(self._model.id_to_piece(number)))
        return self._added.get(number)

    def encode(self, texts: Sequence[str], special: bool) -> list[Ids]:
        return self._encode([self._parts(text, special, self._ids) for text in texts])

    def encode_but(self, text: str, plain: Collection[str]) -> Ids:
        ids = {name: number for name, number in self._ids.items() if name not in plain}
        return self._encode([self._parts(text, True, ids)])[0]

    def _encode(self, rows: Sequence[Sequence[TextPart]]) -> list[Ids]:
        texts = [part.anchor + part.text for row in rows for part in row if part.token is None]
        encoded = iter(self._model.encode(texts, return_type="numpy", num_threads=1))

        def ids_of(part: TextPart) -> Ids:
            if part.token is not None:
                return np.array([part.token], np.int32)
            ids: Ids = next(encoded)[self._anchor_tokens[part.anchor] :]
            return ids

        return [np.concatenate([np.zeros(0, np.int32), *map(ids_of, row)]) for row in rows]

    def encode_with_ends(self, text: str, special: bool) -> tuple[Ids, NDArray[np.int64]]:
        ids = list[int]()
        ends = list[int]()
        for part in self._parts(text, special, self._ids):
            if part.token is None:
                encoded = self._model.encode(part.anchor + part.text, return_type="offset_mapping")
                first = self._anchor_tokens[part.anchor]
                ids += encoded["ids"][first:]
                ends += [part.begin - len(part.anchor) + end for _, end in encoded["offsets"][first:]]
            else:
                ids.append(part.token)
                ends.append(part.begin + len(part.text))
        return np.array(ids, np.int32), np.array(ends, np.int64)

    def decode(self, ids: Iterable[int], skip: Collection[int]) -> str:
        spoken = (number for number in ids if number not in skip and self.id_to_token(number) is not None)
        text = ""
        for added, run in groupby(spoken, key=self._added.get):
            numbers = list(run)
            if added is not None:
                text += added * len(numbers)
                continue
            if text and self.legacy and str(self._model.id_to_piece(numbers[0])).startswith(BLANK):
                text += " "  # The library leaves out the blank that a text begins with.
            text += self._model.decode(numbers)
        return text

    def hugging_face_class(self, num_sentinels: int) -> Mapping[str, object]:
        return {"tokenizer_class": "T5Tokenizer", "extra_ids": num_sentinels}

    def serialized(self) -> bytes:
        return self._proto

    def _parts(self, text: str, special: bool, ids: Mapping[str, int]) -> list[TextPart]:
        """A text cut at its added tokens.

        Args:
            special: whether names of special tokens are these tokens. ids: name -> id of the tokens; all else is text.
        """
        if self.legacy:
            return self._cut(text, special, ids)
        parts = self._cut(BLANK + text.replace(BLANK, " "), special, ids)
        # The blank that was put before the text is none before a special token.
        if len(parts) > 1 and parts[0].text == BLANK and parts[1].token in self._special_ids:
            parts = parts[1:]
        anchors = [self._anchor if part.text.startswith((BLANK, " ")) else "" for part in parts]
        return [part._replace(begin=part.begin - 1, anchor=anchor) for part, anchor in zip(parts, anchors, strict=True)]

    def _cut(self, text: str, special: bool, ids: Mapping[str, int]) -> list[TextPart]:
        self._splitter.encode_special_tokens = not special
        split = self._splitter.encode(text, add_special_tokens=False)
        tokens = [ids.get(str(self._splitter.id_to_token(number))) for number in split.ids]
        parts = list[TextPart]()
        for token, (begin, end) in zip(tokens, split.offsets, strict=True):
            # A name that is text here is one part with the text beside it.
            if token is None and parts and parts[-1].token is None:
                begin = parts.pop().begin
            parts.append(TextPart(token, text[begin:end], begin))
        return parts
