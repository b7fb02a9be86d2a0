"""Text to token ids and back.

`Tokenizer` is one thin layer over the library that defines a folder's format (see `published`): it knows T5's special
tokens (padding, end of text, unknown, and the sentinels that span corruption uses), bounds the memory that long texts
take, and writes the files that it was given, so that transformers loads the same tokenizer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from tokenizers import AddedToken

from data.text.templates import Template
from data.tokenizers.backends import TOKENIZER_FILE, Ids, failure_is_user_error
from data.tokenizers.published import EOS, MAIN_FILES, PAD, UNK, Published, read_published
from data.tokenizers.stated_tokens import CONFIG_FILE, SPECIAL_FILE
from settings.errors import UserError, refuse
from support.language import say

ENCODE_CHARS = 256 * 1024  # More text is not given to the library at once, which needs some hundred bytes a token.
OVERLAP_CHARS = 4096  # Two parts of a longer text share so many.
MOST_IDS = 2**24  # Tables of a byte or a row an id are made; no published vocabulary has more than 2^20.
BLANKS = ("▁", "Ġ")  # Tokens write a blank in one of these ways.
RARE_LETTER = "\ua66e"  # It occurs once in one old manuscript: in no vocabulary.
JINJA_FILE = "chat_template.jinja"


class Tokenizer:
    """Encodes and decodes text. Build it with `Tokenizer.load`, or train one with `data.tokenizers.training`.

    Args:
        published: as it was read, or made with T5's names.
    Raises:
        UserError: a special token is missing, or ids are absurd; on use, its own rules fail at a text.

    Attributes:
        template: the words around prompts that a model with this tokenizer was trained with; ids do not depend on it.
    """

    def __init__(self, published: Published) -> None:
        self._published = published
        self.backend = published.backend
        self.template = Template()
        self._failing = say("{place}: fails at a text", place=published.path)
        self.names = {"pad_token": PAD, "eos_token": EOS, "unk_token": UNK, **published.names}
        self.size = self.backend.size  # The highest id and 1: a model needs at least that many embedding rows.
        if self.size > MOST_IDS:
            raise UserError(
                "{place}: has ids up to {size:,}; allowed: {most_ids:,} ids, name another",
                place=published.path,
                size=self.size - 1,
                most_ids=MOST_IDS,
            )
        numbers = zip(self.names, map(self.backend.token_to_id, self.names.values()), strict=True)
        ids = {role: number for role, number in numbers if number is not None}
        self.unk_id = ids.get("unk_token")
        with failure_is_user_error(self._failing):
            self._prefix = np.array(self.backend.prefix_ids, np.int32)
            (rare,) = self.backend.encode([RARE_LETTER], special=False)
        # Whether bytes spell what is no piece or word, so that no text has unknown tokens:
        self._spells_all = len(rare) > 0 and self.unk_id not in rare
        begins_with_blank = len(rare) > 1 and self.backend.id_to_token(int(rare[0])) in BLANKS
        # The token of the blank that the tokenizer puts before every text and word; None where it puts none:
        self.blank_id = int(rare[0]) if begins_with_blank else None
        needed = ["pad_token", "eos_token"] if self._spells_all else ["pad_token", "eos_token", "unk_token"]
        problems = [
            say(
                "{place}: has no {names} ({role}); a T5 tokenizer is needed, train one or leave --tokenizer_dir auto",
                place=published.path,
                names=self.names[role],
                role=role,
            )
            for role in needed
            if role not in ids
        ]
        refuse(problems)
        self.pad_id = ids["pad_token"]
        self.eos_id = ids["eos_token"]

        # mT5's files call them ▁<extra_id_0>, ...
        self._sentinels = self._numbered("<extra_id_{}>") or self._numbered("▁<extra_id_{}>")
        sentinels = tuple(self._sentinels.values())
        self.sentinel_ids = tuple(published.mask_ids) or sentinels
        self._roles = frozenset(ids.values())
        special = {number for number, token in self.backend.added_tokens().items() if token.special}
        self._special = self._roles.union(special, sentinels)
        self._role_name = re.compile("|".join(map(re.escape, self.names.values())))
        every_id = np.arange(self.size)
        self._is_reserved = np.isin(every_id, [self.pad_id, self.eos_id, *sentinels])
        self._is_named_role = np.isin(every_id, list(self._roles - {self.unk_id}))

    @classmethod
    def load(cls, folder: str | Path) -> Tokenizer:
        """Read the tokenizer of a folder, or one of its files; see `published` for the formats.

        Raises:
            UserError: there is none, it is broken, or it lacks a special token.
        """
        tokenizer = cls(read_published(folder))
        tokenizer.template = Template.read(tokenizer._published.path.parent) or Template()
        return tokenizer

    def save(self, folder: str | Path) -> None:
        """Write the files that the tokenizer was read from, or those that Hugging Face's `AutoTokenizer` reads."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files, config = self._files()
        words = self.template.chat_template()
        published_words = files[JINJA_FILE].decode() if JINJA_FILE in files else config.get("chat_template")
        if words != published_words:  # The template that prompts were worded by counts.
            files.pop(JINJA_FILE, None)
            files.pop(CONFIG_FILE, None)
            config["chat_template"] = words
        if words is None:
            config.pop("chat_template", None)
        files.setdefault(CONFIG_FILE, _json(config))
        # Another tokenizer may have been there:
        for name in {*MAIN_FILES, JINJA_FILE} - files.keys():
            (folder / name).unlink(missing_ok=True)
        self._write(files, folder)

    def save_extended(self, tokens: Iterable[str], folder: str | Path) -> None:
        """Write the tokenizer with further tokens: as `add_tokens` of transformers, they take the next
        ids, are found anywhere in a text, and stay in answers. Tokens that it has are passed over.

        Raises:
            UserError: the library gives them other ids.
        """
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        files, config = self._files()
        new = [token for token in dict.fromkeys(tokens) if self.token_to_id(token) is None]
        added = dict(self.backend.added_tokens())
        added |= {number: AddedToken(token, normalized=False) for number, token in enumerate(new, self.size)}
        if self._published.path.name == CONFIG_FILE:
            # Of ByT5, transformers takes no further tokens beside `extra_ids`.
            config |= {"tokenizer_class": "ByT5Tokenizer", "extra_ids": 0}
            config["additional_special_tokens"] = list(self._sentinels)
        # Where it is there, transformers reads no other list of added tokens.
        config["added_tokens_decoder"] = {str(number): _described(token) for number, token in sorted(added.items())}
        self._write({**files, CONFIG_FILE: _json(config)}, folder)
        if TOKENIZER_FILE in files:  # It alone counts in other programs.
            extended = read_published(folder).backend.serialized()
            (folder / TOKENIZER_FILE).write_bytes(extended)

    def _write(self, files: Mapping[str, bytes], folder: Path) -> None:
        for name, content in files.items():
            (folder / name).write_bytes(content)
        self.template.save(folder)

    def _files(self) -> tuple[dict[str, bytes], dict[str, Any]]:
        """Name -> content of its files, but for its configuration where it has none yet; and the configuration."""
        files = dict(self._published.files)
        if not self._published.is_in_files:
            files[self.backend.file_name] = self.backend.serialized()
        if not self._published.files:
            files[SPECIAL_FILE] = _json({**self.names, "additional_special_tokens": list(self._sentinels)})
        return files, json.loads(files[CONFIG_FILE]) if CONFIG_FILE in files else self._hugging_face_config()

    def _hugging_face_config(self) -> dict[str, Any]:
        config: dict[str, Any] = {**self.names, "additional_special_tokens": list(self._sentinels)}
        config |= self.backend.hugging_face_class(self.num_sentinels)
        config |= {"clean_up_tokenization_spaces": False, "model_max_length": 10**30}
        # Before 5.0 transformers gave token_type_ids besides.
        config["model_input_names"] = ["input_ids", "attention_mask"]
        return config

    @property
    def fingerprint(self) -> str:
        """16 hex digits that change with anything that changes ids."""
        return self.backend.fingerprint[:16]

    @property
    def num_sentinels(self) -> int:
        return len(self.sentinel_ids)

    @property
    def has_own_masks(self) -> bool:
        """Whether the masks of span corruption are others than <extra_id_0>, <extra_id_1>, ..., as ByT5's are."""
        return self.sentinel_ids != tuple(self._sentinels.values())

    def token_to_id(self, token: str) -> int | None:
        return self.backend.token_to_id(token)

    def id_to_token(self, number: int) -> str | None:
        return self.backend.id_to_token(number)

    def encode_batch(self, texts: Sequence[str], special: bool = False) -> list[Ids]:
        """Encode texts, without end of text.

        Args:
            texts: any length; the ids of one over 256 Ki characters are put together from those of overlapping parts.
            special: whether names of special tokens in a text are these tokens, as `AutoTokenizer` has it. False: they
                are text, as in pretraining, where a page about T5 must not end a document.
        Returns:
            one (N,) int32 array per text.
        Memory:
            some hundred bytes per token of 256 Ki characters, whatever the number of texts.
        """
        encoded = list[Ids]()
        with failure_is_user_error(self._failing):
            for group in _groups(texts):
                if max(map(len, group), default=0) > ENCODE_CHARS:
                    encoded.append(self._parts_with_ends(group[0], special)[0])
                else:
                    encoded += self.backend.encode(group, special)
        return encoded if special else [self._spelt(ids, self._is_reserved) for ids in encoded]

    def encode_prompts(self, texts: Sequence[str], is_chat: bool = False) -> list[Ids]:
        """Encode prompts or answers, without end of text: the one way for training, evaluation and every answering
        command.

        Names of sentinels and of tokens that were added are these tokens. Those of padding, end and unknown are text,
        as `</s>` is in HTML, where an answer must not end.

        Args:
            is_chat: whether a chat template has worded the texts: it may write those too, as in transformers.
        Returns:
            one (N,) int32 array per text, begun by what the tokenizer puts before every text, such as CodeT5's `<s>`.
        """
        encoded = self.encode_batch(texts, special=True)
        for number, text in enumerate(texts):
            if not is_chat and self._role_name.search(text):
                with failure_is_user_error(self._failing):
                    ids = self.backend.encode_but(text, self.names.values())
                # A Unigram vocabulary may match the names of roles itself; those of sentinels it may.
                encoded[number] = self._spelt(ids, self._is_named_role)
        return [np.concatenate([self._prefix, ids]) for ids in encoded]

    def encode_with_ends(self, text: str) -> tuple[Ids, NDArray[np.int64]]:
        """Encode one text as `AutoTokenizer` does, without end of text: its ids, and for each the character behind its
        last one.
        """
        with failure_is_user_error(self._failing):
            ids, ends = self._parts_with_ends(text, special=True)
        return np.concatenate([self._prefix, ids]), np.concatenate([np.zeros(len(self._prefix), np.int64), ends])

    def decode(self, ids: Iterable[int], skip_special: bool = True) -> str:
        """Turn ids into text; ids that the tokenizer does not know are left out."""
        return self._decode(ids, self._special if skip_special else frozenset())

    def decode_answer(self, ids: Iterable[int]) -> str:
        """Text of an answer: without padding, end and unknown, and with the sentinels and other tokens that stand in
        it.
        """
        return self._decode(ids, self._roles)

    def decode_with_unknown(self, ids: Iterable[int]) -> str:
        """The same as `decode_answer`, with unknown tokens by their name where they may stand for something."""
        return self._decode(ids, self._roles if self._spells_all else self._roles - {self.unk_id})

    def _decode(self, ids: Iterable[int], skip: frozenset[int]) -> str:
        with failure_is_user_error(self._failing):
            return self.backend.decode(map(int, ids), skip)

    def _spelt(self, ids: Ids, is_name: NDArray[np.bool_]) -> Ids:
        """Spell special tokens whose names the model itself matches in a text, as old Unigram vocabularies do.

        Args:
            is_name: (size,) whether an id is one of these tokens.
        """
        if not is_name[ids].any():
            return ids
        spelt = list[int | None]()
        for number in ids.tolist():
            if is_name[number]:
                spelt += map(self.backend.token_to_id, str(self.backend.id_to_token(number)))
            else:
                spelt.append(number)
        return np.array([self.unk_id or 0 if number is None else number for number in spelt], np.int32)

    def _parts_with_ends(self, text: str, special: bool) -> tuple[Ids, NDArray[np.int64]]:
        """Put the ids of a long text together from parts that overlap, each cut where both have a token's end."""
        all_ids = list[Ids]()
        all_ends = list[NDArray[np.int64]]()
        begin = 0
        ids, ends = self.backend.encode_with_ends(text[:ENCODE_CHARS], special)
        while begin + ENCODE_CHARS < len(text):
            begin += ENCODE_CHARS - OVERLAP_CHARS
            more, more_ends = self.backend.encode_with_ends(text[begin : begin + ENCODE_CHARS], special)
            more_ends += begin
            middle = begin + OVERLAP_CHARS // 2
            shared = np.intersect1d(ends, more_ends)
            cut = shared[np.abs(shared - middle).argmin()] if len(shared) else middle
            before_cut = np.searchsorted(ends, cut, side="right")
            all_ids.append(ids[:before_cut])
            all_ends.append(ends[:before_cut])
            behind_cut = np.searchsorted(more_ends, cut, side="right")
            ids = more[behind_cut:]
            ends = more_ends[behind_cut:]
        return np.concatenate([*all_ids, ids]), np.concatenate([*all_ends, ends])

    def _numbered(self, name: str) -> dict[str, int]:
        """Name -> id of tokens that are named by 0, 1, ..., up to the first that there is not."""
        ids = dict[str, int]()
        while (number := self.backend.token_to_id(name.format(len(ids)))) is not None:
            ids[name.format(len(ids))] = number
        return ids


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
        return say(
            "{per_character} tokens a character ({per_token} characters a token), {share} unknown",
            per_character=f"{self.tokens / max(self.chars, 1):.3f}",
            per_token=f"{self.chars / max(self.tokens, 1):.2f}",
            share=f"{self.unknown / max(self.tokens, 1):.2%}",
        )


def quality(tokenizer: Tokenizer, texts: Iterable[str]) -> Quality:
    """Measure a tokenizer on texts. Memory: one batch of 256 texts at a time."""
    chars = tokens = unknown = 0
    texts = iter(texts)
    while batch := list(islice(texts, 256)):
        ids = np.concatenate(tokenizer.encode_batch(batch))
        chars += sum(map(len, batch))
        tokens += len(ids)
        unknown += int((ids == tokenizer.unk_id).sum())
    return Quality(chars, tokens, unknown)


def _described(token: AddedToken) -> dict[str, Any]:
    names = ("content", "lstrip", "normalized", "rstrip", "single_word", "special")
    return {name: getattr(token, name) for name in names}


def _json(content: dict[str, Any]) -> bytes:
    return (json.dumps(content, indent=1, ensure_ascii=False) + "\n").encode()


def _groups(texts: Iterable[str]) -> Iterator[list[str]]:
    """Texts in their order, as many together as have `ENCODE_CHARS`; a longer one alone. A group may be empty."""
    group: list[str] = []
    chars = 0
    for text in texts:
        if chars + len(text) > ENCODE_CHARS:
            yield group
            group = []
            chars = 0
        group.append(text)
        chars += len(text)
    yield group
