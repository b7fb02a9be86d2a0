"""How does text become token ids and back?

A tokenizer is a folder with `tokenizer.json`, the format of the `tokenizers` library, so Hugging Face folders load as
they are and ours load there; other published files are turned into one (see `published`). T5's special tokens are found by name: padding, end of text, unknown, and the sentinels
<extra_id_0>, <extra_id_1>, ... that span corruption uses. In training text these names are plain text, never ids: a
page about T5 must not end a document.
"""

from __future__ import annotations

import hashlib
import json
import os
import re
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import tokenizers
from numpy.typing import NDArray

from data.text.templates import Template
from data.tokenizers.panics import failure_is_user_error
from data.tokenizers.published import EOS, FILE_NAME, PAD, UNK, read_backend, token_names
from settings.fields import UserError

# Threads of the library pay only for much text at once, and forbid forking: preparing turns them on for itself.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

ENCODE_CHARS = 256 * 1024  # text per call of the library, which needs some hundred bytes a token
MOST_IDS = 2**24  # tables of a byte or a row an id are made; no published vocabulary has more than 2^20
PIECE_CHARS = 64 * 1024  # longer texts are encoded in pieces
RARE_LETTER = "\ua66e"  # it occurs once in one old manuscript: in no vocabulary


class Tokenizer:
    """Encodes and decodes text. Build it with `Tokenizer.load`, or train one with `data.tokenizers.training`.

    Args:
        backend: a tokenizer of the `tokenizers` library.
        names: `pad_token`, `eos_token`, `unk_token`, where they differ from T5's.
        place: where it comes from, for messages.
        template: the words around prompts that a model with this tokenizer was trained with; ids do not depend on it.
    Raises:
        UserError: a special token is missing, or ids are absurd; on use, its own rules fail at a text.
    """

    def __init__(
        self,
        backend: tokenizers.Tokenizer,
        names: dict[str, str] | None = None,
        place: str = "tokenizer",
        template: Template | None = None,
    ) -> None:
        self.template = template or Template()
        self._failing = f"{place}: fails at a text"
        self.names = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK} | (names or {})
        self._backend = backend
        backend.no_padding()
        backend.no_truncation()
        ids: dict[str, Any] = {role: backend.token_to_id(token) for role, token in self.names.items()}
        missing = [f"{place}: has no {self.names[role]} ({role})" for role, number in ids.items() if number is None]
        if missing:
            raise UserError(
                *(f"{text}; a T5 tokenizer is needed, train one or leave --tokenizer_dir auto" for text in missing)
            )
        if self.size > MOST_IDS:
            raise UserError(f"{place}: has ids up to {self.size - 1:,}; allowed: {MOST_IDS:,} ids, name another")
        self.pad_id, self.eos_id, self.unk_id = ids["pad_token"], ids["eos_token"], ids["unk_token"]
        self.sentinel_ids = tuple(self._sentinels())
        self._reserved = np.zeros(self.size, bool)
        self._reserved[[self.pad_id, self.eos_id, *self.sentinel_ids]] = True
        special = "|".join(re.escape(name[1:]) for name in self.names.values())
        self._inside_special = re.compile(rf"(?={special}|extra_id_\d+>)")  # after the first letter of a name

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a folder, or one of its files; see `published` for the formats.

        Raises:
            UserError: there is none, it is broken, or it lacks a special token.
        """
        backend, path = read_backend(folder)
        return cls(backend, token_names(path.parent), str(path), Template.read(path.parent))

    def save(self, folder: str | Path) -> None:
        """Write the files that Hugging Face's `AutoTokenizer` reads, too."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        sentinels = [f"<extra_id_{i}>" for i in range(self.num_sentinels)]
        config: dict[str, Any] = {
            **self.names,
            "additional_special_tokens": sentinels,
            "clean_up_tokenization_spaces": False,
        }
        config |= {"model_max_length": 10**30, "tokenizer_class": "PreTrainedTokenizerFast"}
        config["model_input_names"] = ["input_ids", "attention_mask"]  # before 5.0 it gave token_type_ids besides
        if (words := self.template.chat_template()) is not None:
            config["chat_template"] = words
        names: dict[str, Any] = {**self.names, "additional_special_tokens": sentinels}
        self._backend.encode_special_tokens = False
        (folder / FILE_NAME).write_text(self._backend.to_str(), encoding="utf8")
        _write_json(folder / "tokenizer_config.json", config)
        _write_json(folder / "special_tokens_map.json", names)
        self.template.save(folder)

    @cached_property
    def size(self) -> int:
        """Number of ids: the highest one and 1. A model needs at least that many embedding rows."""
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything that changes ids."""
        self._backend.encode_special_tokens = False
        return hashlib.sha256(self._backend.to_str().encode("utf8")).hexdigest()[:16]

    @property
    def num_sentinels(self) -> int:
        """How many <extra_id_N> there are."""
        return len(self.sentinel_ids)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[NDArray[np.int32]]:
        """Encode texts, without end of text.

        Args:
            texts: any length; one over 64 Ki characters is encoded in pieces that end before a space where there is
            one. special: whether names of special tokens inside the text become their ids (for prompts with sentinels).
        Returns:
            one (N,) int32 array per text.
        Memory:
            some hundred bytes per token of 256 Ki characters, whatever the number of texts.
        """
        self._backend.encode_special_tokens = not special
        pieces = ((place, piece) for place, text in enumerate(texts) for piece in _pieces(text))
        parts: list[list[NDArray[np.int32]]] = [[] for _ in texts]
        for group in _groups(pieces):
            with failure_is_user_error(self._failing):
                encodings = self._backend.encode_batch_fast([piece for _, piece in group], add_special_tokens=False)
            for (place, piece), encoding in zip(group, encodings, strict=True):
                ids = np.array(encoding.ids, np.int32)
                parts[place].append(ids if special or not self._reserved[ids].any() else self._spelt(piece))
        return [_joined(arrays) for arrays in parts]

    def encode_prompt(self, text: str) -> NDArray[np.int32]:
        """Encode what a model shall answer, without end of text. Names of sentinels in it become their ids, to be filled in, and
        those of tokens that a publisher has added; those of padding, end and unknown are text, as they are in training.

        Returns:
            (N,) int32.
        """
        if not any(name in text for name in self.names.values()):
            return self.encode_batch([text], special=True)[0]
        sentinels = [self._backend.id_to_token(number) or "" for number in self.sentinel_ids]
        parts = re.split(f"({'|'.join(map(re.escape, sentinels))})", text) if sentinels else [text]
        return _joined([self.encode_batch([part], special=part in sentinels)[0] for part in parts if part])

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Turn ids into text; ids that the tokenizer does not know are left out."""
        with failure_is_user_error(self._failing):
            return self._backend.decode([int(number) for number in ids], skip_special_tokens=skip_special)

    def decode_with_unknown(self, ids: Iterable[int]) -> str:
        """Do the same as `decode`, and keep unknown tokens by their name where they may stand for something."""
        if self._spells_all:
            return self.decode(ids)
        kept = [number for number in ids if number == self.unk_id or number not in self._special_ids]
        return self.decode(kept, skip_special=False)

    @cached_property
    def _special_ids(self) -> frozenset[int]:
        return frozenset(number for number, token in self._backend.get_added_tokens_decoder().items() if token.special)

    @cached_property
    def _spells_all(self) -> bool:
        """Whether bytes spell what is no piece or word, so that no text has unknown tokens."""
        return self.unk_id not in self.encode_batch([RARE_LETTER])[0]

    def _spelt(self, text: str) -> NDArray[np.int32]:
        """Encode a text whose special names the model itself would match, as old Unigram vocabularies do."""
        parts = self._inside_special.split(text)
        with failure_is_user_error(self._failing):
            encodings = self._backend.encode_batch_fast(parts, add_special_tokens=False)
        return np.concatenate([np.array(encoding.ids, np.int32) for encoding in encodings])

    def _sentinels(self) -> Iterator[int]:
        number = 0
        while (token_id := self._backend.token_to_id(f"<extra_id_{number}>")) is not None:
            yield token_id
            number += 1


@dataclass(frozen=True)
class Quality:
    """How well a tokenizer fits a text.

    Args:
        chars, tokens: of the text; unknown: tokens that stand for what the vocabulary cannot spell.
    """

    chars: int
    tokens: int
    unknown: int

    def __str__(self) -> str:
        per_char, per_token = self.tokens / max(self.chars, 1), self.chars / max(self.tokens, 1)
        share = self.unknown / max(self.tokens, 1)
        return f"{per_char:.3f} tokens a character ({per_token:.2f} characters a token), {share:.2%} unknown"


def quality(tokenizer: Tokenizer, texts: Iterable[str]) -> Quality:
    """Measure a tokenizer on texts. Memory: one batch of 256 texts at a time."""
    chars = tokens = unknown = 0
    texts = iter(texts)
    while batch := list(islice(texts, 256)):
        encoded = tokenizer.encode_batch(batch)
        chars += sum(map(len, batch))
        tokens += sum(map(len, encoded))
        unknown += sum(int((ids == tokenizer.unk_id).sum()) for ids in encoded)
    return Quality(chars, tokens, unknown)


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


def _pieces(text: str) -> Iterator[str]:
    start = 0
    while len(text) - start > PIECE_CHARS:
        end = text.rfind(" ", start + PIECE_CHARS // 2, start + PIECE_CHARS)
        end = end if end > 0 else start + PIECE_CHARS
        yield text[start:end]
        start = end
    yield text[start:]


def _groups(pieces: Iterable[tuple[int, str]]) -> Iterator[list[tuple[int, str]]]:
    group: list[tuple[int, str]] = []
    chars = 0
    for piece in pieces:
        if group and chars + len(piece[1]) > ENCODE_CHARS:
            yield group
            group, chars = [], 0
        group.append(piece)
        chars += len(piece[1])
    if group:
        yield group


def _joined(arrays: list[NDArray[np.int32]]) -> NDArray[np.int32]:
    return arrays[0] if len(arrays) == 1 else np.concatenate(arrays)
