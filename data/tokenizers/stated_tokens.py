"""What the files beside a tokenizer say of its tokens: `tokenizer_config.json`, `special_tokens_map.json`,
`added_tokens.json`.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from tokenizers import AddedToken
from tokenizers import Tokenizer as LibraryTokenizer

from data.text.chat_templates import special_tokens
from settings.errors import UserError, refuse
from settings.published_keys import check_keys
from support.storage import read_text

CONFIG_FILE = "tokenizer_config.json"
SPECIAL_FILE = "special_tokens_map.json"
ADDED_FILE = "added_tokens.json"
SPECIAL_LISTS = ("additional_special_tokens", "extra_special_tokens")
FLAGS = ("lstrip", "rstrip", "single_word", "normalized", "special")


class StatedTokens:
    """The tokens that a folder lists beside its tokenizer.

    Args:
        folder: of the tokenizer; each of the three files may be missing.
    Raises:
        UserError: a file cannot be read, or asks for what is not done here.

    Attributes:
        names: of special tokens by their role: `pad_token`, `eos_token`, ...
        special: content -> token, of all special tokens.
        numbered: id -> token, of those that are listed with their ids.
        described: ids of those of which is stated how they are found in texts.
        tokenizer_class: that of transformers. extra_ids: number of sentinels; None: not stated.
        is_legacy: whether SentencePiece puts a blank before the text that follows an added token.
        adds_space: whether a text begins with a space.
    """

    def __init__(self, folder: Path) -> None:
        config = read_object(folder / CONFIG_FILE)
        refuse(check_keys(folder / CONFIG_FILE, config))
        self.folder = folder
        self.names = special_tokens(folder)
        self.tokenizer_class = str(config.get("tokenizer_class", "T5Tokenizer"))
        extra_ids = config.get("extra_ids")
        self.extra_ids = extra_ids if isinstance(extra_ids, int) and extra_ids >= 0 else None
        self.is_legacy = config.get("legacy") is not False
        self.adds_space = config.get("add_prefix_space") is True

        special = [*_special_entries(config), *_special_entries(read_object(folder / SPECIAL_FILE))]
        self.special = {token.content: token for token in map(_special_token, special) if token.content}
        ids = read_object(folder / ADDED_FILE)
        self.numbered = {
            number: self.special.get(content, AddedToken(content, normalized=False))
            for content, number in ids.items()
            if isinstance(number, int)
        }
        decoder = config.get("added_tokens_decoder")
        entries = decoder if isinstance(decoder, dict) else {}
        tokens = {int(number): _token(entry) for number, entry in entries.items() if number.isdecimal()}
        self.described = {number: token for number, token in tokens.items() if token.content}
        self.numbered |= self.described
        # How a token is found in texts is better known where it has an id than where it is only named.
        self.special |= {token.content: token for token in self.described.values() if token.special}

    def num_sentinels(self, default: int) -> int:
        """How many <extra_id_N> there are: as many as are listed, else `extra_ids`."""
        listed = sum("<extra_id_" in content for content in self.special)
        if listed:
            return listed
        return default if self.extra_ids is None else self.extra_ids

    def add_to(self, backend: LibraryTokenizer) -> None:
        """Add the tokens that a tokenizer lacks, and describe those that it has as they are described here.

        Raises:
            UserError: it has a token by another id.
        """
        tokens = [
            token
            for number, token in sorted(self.numbered.items())
            if number in self.described or backend.token_to_id(token.content) is None
        ]
        backend.add_tokens(tokens)
        for number, token in sorted(self.numbered.items()):
            if backend.token_to_id(token.content) != number:
                raise UserError(
                    "{folder}: {content!r} has the id {number} in {config_file} or {added_file}, and {token_to_id} by "
                    "the other files; fetch the folder again",
                    folder=self.folder,
                    content=token.content,
                    number=number,
                    config_file=CONFIG_FILE,
                    added_file=ADDED_FILE,
                    token_to_id=backend.token_to_id(token.content),
                )
        # What only fills a role, such as that of a class token, is no token unless the vocabulary has it.
        unnamed = self.special.keys() - self.names.values()
        tokens = [token for content, token in self.special.items() if content in unnamed]
        backend.add_tokens([token for token in tokens if backend.token_to_id(token.content) is None])


def read_object(path: Path) -> dict[str, Any]:
    """The JSON object in a file; {} where there is no file, or something else in it.

    Raises:
        UserError: it cannot be read.
    """
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("{path}: cannot be read ({error}); download it again", path=path, error=error) from None
    return content if isinstance(content, dict) else {}


def special(content: str) -> AddedToken:
    """A token that no text is split into."""
    return AddedToken(content, special=True, normalized=False)


def _special_entries(content: Mapping[str, Any]) -> Iterator[Any]:
    """Whatever a file gives as a special token."""
    yield from (value for key, value in content.items() if key.endswith("_token"))
    for key in SPECIAL_LISTS:
        listed = content.get(key)
        if isinstance(listed, dict):
            listed = [*listed.values()]
        if isinstance(listed, list):
            yield from listed


def _special_token(entry: Any) -> AddedToken:
    token = _token(entry)
    token.special = True
    return token


def _token(entry: Any) -> AddedToken:
    """A token that is given by its text, or as an object with its `content`; an empty one where it is neither."""
    described: Mapping[str, Any] = entry if isinstance(entry, dict) else {"content": entry}
    content = described.get("content")
    flags = {name: described.get(name) is True for name in FLAGS}
    return AddedToken(content if isinstance(content, str) else "", **flags)
