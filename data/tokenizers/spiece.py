"""SentencePiece models, the files of the published T5, mT5 and UMT5 tokenizers, run by the library that defines them.

Tokens that are not in the file, such as T5's sentinels, are found as in the slow tokenizers of transformers 4: a text is
split at them, and SentencePiece encodes each part between them.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable, Mapping, Sequence
from functools import cached_property

import numpy as np
import sentencepiece
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, models

from data.tokenizers.backends import SPIECE_FILE, Ids
from language import say

BLANK = "▁"
NO_DUMMY_PREFIX = b"\x1a\x02\x18\x00"  # normalizer_spec { add_dummy_prefix: false }: appended messages are merged


def load_model(proto: bytes, legacy: bool) -> sentencepiece.SentencePieceProcessor:
    """The model in a `*.model` file; RuntimeError or ValueError where it is none."""
    model = sentencepiece.SentencePieceProcessor(model_proto=proto if legacy else proto + NO_DUMMY_PREFIX)
    if not model.get_piece_size():
        raise ValueError(say("it holds no pieces"))
    return model


class SentencePieceBackend:
    """A SentencePiece model with added tokens; see `data.tokenizers.backends.LibraryBackend`.

    Args:
        model: as `load_model` returns it; proto: the content of its file.
        added: id -> token; of pieces of the model those that are special.
        legacy: False where `tokenizer_config.json` says so: no blank is put before the parts that follow an added token.
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
        self._model, self._proto, self._legacy = model, proto, legacy
        self._tokens = added
        self._added = {number: token.content for number, token in added.items()}
        self._ids = {text: number for number, text in self._added.items()}
        self.special_ids = frozenset(number for number, token in added.items() if token.special)
        self._num_pieces: int = self._model.get_piece_size()
        # without its blank, SentencePiece also drops one that a part begins with: such parts are encoded behind this one
        self._anchor = str(self._model.id_to_piece(self._model.unk_id()))
        self._anchor_tokens = len(self._model.encode(self._anchor))
        # finds added tokens as `tokenizer.json` would (longest first, blanks beside them); all between two is one token, 0
        self._splitter = tokenizers.Tokenizer(models.WordLevel({"": 0}, unk_token=""))
        self._splitter.add_special_tokens([token for token in added.values() if token.special])
        self._splitter.add_tokens([token for token in added.values() if not token.special])

    @property
    def size(self) -> int:
        return max([self._num_pieces - 1, *self._added]) + 1

    def added_tokens(self) -> Mapping[int, AddedToken]:
        return self._tokens

    @cached_property
    def fingerprint(self) -> str:
        about = (sorted(self._added.items()), self._splitter.to_str(), self._legacy)
        return hashlib.sha256(self._proto + repr(about).encode("utf8", "replace")).hexdigest()

    def token_to_id(self, token: str) -> int | None:
        if token in self._ids:
            return self._ids[token]
        number: int = self._model.piece_to_id(token)
        return number if self._model.id_to_piece(number) == token else None  # what it lacks has the unknown token's id

    def id_to_token(self, number: int) -> str | None:
        if number in self._added:
            return self._added[number]
        return str(self._model.id_to_piece(number)) if 0 <= number < self._num_pieces else None

    def encode(self, texts: Sequence[str], special: bool) -> list[Ids]:
        return self._encode([self._parts(text, special) for text in texts])

    def encode_but(self, text: str, plain: Collection[str]) -> Ids:
        return self._encode([self._parts(text, True, plain)])[0]

    def _encode(self, rows: list[list[tuple[int | None, str, str, int]]]) -> list[Ids]:
        plain = [anchor + part for row in rows for token, anchor, part, _ in row if token is None]
        encoded = iter(self._model.encode(plain, return_type="numpy", num_threads=1))
        found = []
        for row in rows:
            pieces = [np.zeros(0, np.int32)]
            for token, anchor, _, _ in row:
                ids = next(encoded)[self._anchor_tokens * bool(anchor) :] if token is None else [token]
                pieces.append(np.asarray(ids, np.int32))
            found.append(np.concatenate(pieces))
        return found

    def encode_with_ends(self, text: str, special: bool) -> tuple[Ids, NDArray[np.int64]]:
        ids, ends = list[int](), list[int]()
        for token, anchor, part, begin in self._parts(text, special):
            if token is None:
                encoded = self._model.encode(anchor + part, return_type="offset_mapping")
                first = self._anchor_tokens * bool(anchor)
                ids += encoded["ids"][first:]
                ends += [begin - len(anchor) + end for _, end in encoded["offsets"][first:]]
            else:
                ids.append(token)
                ends.append(begin + len(part))
        return np.array(ids, np.int32), np.array(ends, np.int64)

    def decode(self, ids: Iterable[int], skip: Collection[int]) -> str:
        text, run = "", list[int]()
        for number in [*(number for number in ids if number not in skip), None]:
            if number is not None and number not in self._added:
                if 0 <= number < self._num_pieces:
                    run.append(number)
                continue
            if run:  # the library leaves out the blank that a text begins with
                blank = text and self._legacy and str(self._model.id_to_piece(run[0])).startswith(BLANK)
                text, run = text + " " * bool(blank) + self._model.decode(run), []
            text += self._added[number] if number is not None else ""
        return text

    def serialized(self) -> bytes:
        return self._proto

    def _parts(self, text: str, special: bool, plain: Collection[str] = ()) -> list[tuple[int | None, str, str, int]]:
        """The id of an added token, or None; what is encoded before the part; the part; and where it begins.

        Args:
            plain: names of tokens that are text here.
        """
        if not self._legacy:
            text = BLANK + text.replace(BLANK, " ")
        self._splitter.encode_special_tokens = not special
        split = self._splitter.encode(text, add_special_tokens=False)
        spans: list[tuple[int | None, int, int]] = []
        for number, (begin, end) in zip(split.ids, split.offsets, strict=True):
            name = str(self._splitter.id_to_token(number)) if number else None
            token = None if name is None or name in plain else self._ids[name]
            if token is None and spans and spans[-1][0] is None:
                spans[-1] = (None, spans[-1][1], end)
            else:
                spans.append((token, begin, end))
        if not self._legacy and len(spans) > 1 and text[: spans[0][2]] == BLANK and spans[1][0] in self.special_ids:
            spans = spans[1:]  # the blank before a text, not before a token
        parts = []
        for token, begin, end in spans:
            anchored = not self._legacy and token is None and text[begin] in (BLANK, " ")
            parts.append((token, self._anchor * anchored, text[begin:end], begin - (not self._legacy)))
        return parts
