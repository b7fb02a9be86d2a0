"""The tokenizer of a folder, as its publisher left it.

- `tokenizer.json`: run by the `tokenizers` library.
- `spiece.model`, or another `*.model` that is the only one: run by SentencePiece (T5, Flan, mT5, UMT5, MADLAD-400).
- `vocab.json` and `merges.txt`: byte-level BPE of GPT-2's kind (CodeT5), run by the `tokenizers` library.
- a `tokenizer_config.json` that names ByT5: bytes, nothing else is needed (Xue et al. 2022).

Beside them `tokenizer_config.json`, `special_tokens_map.json` and `added_tokens.json` say which tokens are added, and what
padding, end and unknown are called; ids are given as by the tokenizers of transformers 4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from data.text.chat_templates import special_tokens
from data.tokenizers.backends import SPIECE_FILE, TOKENIZER_FILE, LibraryBackend, failure_is_user_error
from language import say
from settings.errors import UserError, reason_of, refuse
from settings.published_keys import check_keys
from storage import MOST_TABLE_BYTES, read_bytes, read_text

if TYPE_CHECKING:  # its library is loaded for its files alone
    from data.tokenizers.spiece import SentencePieceBackend

VOCABULARY, MERGES = "vocab.json", "merges.txt"
CONFIG_FILE, SPECIAL_FILE, ADDED_FILE = "tokenizer_config.json", "special_tokens_map.json", "added_tokens.json"
MAIN_FILES = (TOKENIZER_FILE, SPIECE_FILE, VOCABULARY, MERGES)
COMPANIONS = (CONFIG_FILE, SPECIAL_FILE, ADDED_FILE, "chat_template.jinja")
PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
MODEL_FILE = "config.json"  # the first published ones say there which class their tokenizer has
NUM_SENTINELS = 100  # of T5, which follow the pieces of its SentencePiece model, <extra_id_0> last
NUM_BYTE_SENTINELS = 125  # ByT5 fills its vocabulary up to 384
# ByT5 was pretrained with masks that count down from its last byte: 258, 257, ...; transformers names 259, 260, ...
LAST_BYTE = 258


@dataclass
class Published:
    """A tokenizer as it was read.

    Args:
        backend: the library's tokenizer. path: the file that it was read from.
        names: of special tokens: `pad_token`, `eos_token`, ...
        files: name -> content of what lies beside it, for `Tokenizer.save`. is_in_files: whether that is all of it.
        sentinel_ids: of masks in pretraining, where these are not <extra_id_0>, ...
    """

    backend: LibraryBackend | SentencePieceBackend
    path: Path
    names: dict[str, str]
    files: dict[str, bytes] = field(default_factory=dict)
    is_in_files: bool = False
    sentinel_ids: Sequence[int] | None = None


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies there, whole or not."""
    return any(any(folder.glob(name)) for name in (TOKENIZER_FILE, "*.model", VOCABULARY)) or _names_byt5(folder)


def read_published(place: str | Path) -> Published:
    """Read the tokenizer of a folder, or one of its files.

    Raises:
        UserError: there is none, several, or a broken one; or its files contradict each other.
    """
    given = Path(place)
    folder = given.parent if given.is_file() else given
    if not folder.exists():
        raise UserError("--tokenizer_dir = {given}, no such folder; give a tokenizer's folder or file", given=given)
    spieces = [folder / SPIECE_FILE] if (folder / SPIECE_FILE).is_file() else sorted(folder.glob("*.model"))
    stated = _Stated(folder)
    files = {name: read_bytes(folder / name) for name in COMPANIONS if (folder / name).is_file()}
    library_file = given if given.is_file() else folder / TOKENIZER_FILE
    if given.is_file() and given.suffix == ".model":
        return _read_sentencepiece(given, stated, files)
    if library_file.is_file():
        if (folder / SPIECE_FILE).is_file():
            files[SPIECE_FILE] = read_bytes(folder / SPIECE_FILE, MOST_TABLE_BYTES)
        backend = _read_json(library_file)
        stated.add_to(backend)
        return Published(LibraryBackend(backend), library_file, stated.names, files)
    if len(spieces) == 1:
        return _read_sentencepiece(spieces[0], stated, files)
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        files |= {name: read_bytes(folder / name, MOST_TABLE_BYTES) for name in (VOCABULARY, MERGES)}
        backend = _read_byte_bpe(folder, stated)
        return Published(LibraryBackend(backend), folder / VOCABULARY, stated.names, files, is_in_files=True)
    if not spieces and _names_byt5(folder):
        backend = byte_backend(stated.num_sentinels(NUM_BYTE_SENTINELS), strip=True)
        for number in range(len((PAD, EOS, UNK)), LAST_BYTE + 1):  # a byte that was added as a token keeps its id
            stated.by_id.pop(number, None)
        stated.add_to(backend)
        masks = range(LAST_BYTE, LAST_BYTE - NUM_SENTINELS, -1)
        return Published(LibraryBackend(backend), folder / CONFIG_FILE, stated.names, files, True, masks)
    hint = (
        say("holds several *.model files")
        if spieces
        else say("holds no {tokenizer_file} and no SentencePiece *.model", tokenizer_file=TOKENIZER_FILE)
    )
    raise UserError("--tokenizer_dir = {folder}, {hint}; give a tokenizer's folder or file", folder=folder, hint=hint)


def _names_byt5(folder: Path) -> bool:
    config, model = (_read_object(folder / name) for name in (CONFIG_FILE, MODEL_FILE))
    return "byt5" in json.dumps([config, model.get("tokenizer_class")]).lower()


class _Stated:
    """What the files beside a tokenizer say of its tokens."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        config, special = (_read_object(folder / name) for name in (CONFIG_FILE, SPECIAL_FILE))
        refuse(check_keys(folder / CONFIG_FILE, config))
        self.config = config
        self.is_legacy = config.get("legacy") is not False
        self.names = special_tokens(folder)
        self.special: dict[str, AddedToken] = {}
        for content in (config, special):
            entries = [value for key, value in content.items() if key.endswith("_token")]
            for key in ("additional_special_tokens", "extra_special_tokens"):
                listed = content.get(key) or []
                entries += listed.values() if isinstance(listed, dict) else listed
            for token in (_token(entry, special=True) for entry in entries):
                if token is not None:
                    self.special[token.content] = token
        self.by_id: dict[int, AddedToken] = {}
        for text, number in _read_object(folder / ADDED_FILE).items():
            if isinstance(number, int):
                self.by_id[number] = self.special.get(text) or AddedToken(text, special=False, normalized=False)
        self.described: set[int] = set()  # of these it is known how they are found in texts, beside their names
        decoder = config.get("added_tokens_decoder")
        for number, entry in decoder.items() if isinstance(decoder, dict) else ():
            if str(number).isdecimal() and (token := _token(entry, special=False)) is not None:
                self.by_id[int(number)] = token
                self.described.add(int(number))
                if token.special:  # where a text has it, this says more than a list of names
                    self.special[token.content] = token

    def num_sentinels(self, default: int) -> int:
        """How many <extra_id_N> there are: as many as are listed, else `extra_ids`."""
        listed = sum("<extra_id_" in text for text in self.special)
        asked = self.config.get("extra_ids")
        return listed or (asked if isinstance(asked, int) and asked >= 0 else default)

    def add_to(self, backend: LibraryTokenizer) -> None:
        """Add tokens that `tokenizer.json` does not have, and give those that it has the attributes stated here."""
        ordered, known_tokens = sorted(self.by_id.items()), backend.get_added_tokens_decoder()
        changed = []
        for number, token in ordered:
            known = backend.token_to_id(token.content)
            has_own_flags = number in self.described and known_tokens.get(number) != token
            if known is None or (number == known and has_own_flags):
                changed.append(token)
        # together, as each call takes time by all tokens
        for is_special, tokens in groupby(changed, key=lambda token: token.special):
            (backend.add_special_tokens if is_special else backend.add_tokens)(list(tokens))
        for number, token in ordered:
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
        for text, token in self.special.items():
            if backend.token_to_id(text) is None and text not in self.names.values():
                _add(backend, token)

    def added_to(self, model: Any, roles: Mapping[str, str]) -> dict[int, AddedToken]:
        """Id -> token that a SentencePiece model gets: those with ids of their own, sentinels, and special ones.

        Args:
            roles: what special tokens are called by default.
        """
        size = model.get_piece_size()
        added = dict(self.by_id)

        def number_of(text: str) -> int | None:
            found = next((number for number, token in added.items() if token.content == text), None)
            piece: int = model.piece_to_id(text)
            return piece if found is None and model.id_to_piece(piece) == text else found

        if number_of("<extra_id_0>") is None and number_of("▁<extra_id_0>") is None:
            is_t5 = str(self.config.get("tokenizer_class", "T5Tokenizer")).startswith(("T5", "MT5", "UMT5"))
            count = self.num_sentinels(NUM_SENTINELS if is_t5 else 0)
            asked = self.config.get("extra_ids")
            last = size - 1 + (asked if isinstance(asked, int) else count)
            for number in range(count):
                token = AddedToken(f"<extra_id_{number}>", lstrip=True, rstrip=True, special=True, normalized=False)
                added[last - number] = token
        for text in dict.fromkeys([*roles.values(), *self.special]):
            known = number_of(text)
            if known is None and text in self.special:
                known = max([size - 1, *added]) + 1
            if known is not None and known not in added:
                added[known] = self.special.get(text) or special(text)
        return added


def _token(entry: Any, special: bool) -> AddedToken | None:
    """A token as a string, or as an object with `content` and how it is found in texts."""
    if isinstance(entry, str):
        return AddedToken(entry, special=special, normalized=False)
    if not isinstance(entry, dict) or not isinstance(entry.get("content"), str):
        return None
    flags = {name: entry.get(name) is True for name in ("lstrip", "rstrip", "single_word", "normalized")}
    return AddedToken(entry["content"], special=special or entry.get("special") is True, **flags)


def _add(backend: LibraryTokenizer, token: AddedToken) -> None:
    (backend.add_special_tokens if token.special else backend.add_tokens)([token])


def _read_object(path: Path) -> dict[str, Any]:
    try:
        content = json.loads(read_text(path))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UserError("{path}: cannot be read ({error}); download it again", path=path, error=error) from None
    return content if isinstance(content, dict) else {}


def _read_json(path: Path) -> LibraryTokenizer:
    try:
        text = read_text(path, MOST_TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(
            "{path}: is not a tokenizer ({error}); download or train it again", path=path, error=error
        ) from None
    with failure_is_user_error(say("{path}: is not a tokenizer", path=path)):
        return LibraryTokenizer.from_str(text)


def _read_sentencepiece(path: Path, stated: _Stated, files: dict[str, bytes]) -> Published:
    from data.tokenizers.spiece import SentencePieceBackend, load_model

    try:
        proto = read_bytes(path, MOST_TABLE_BYTES)
        model = load_model(proto, stated.is_legacy)
    except (OSError, RuntimeError, ValueError, TypeError) as error:
        reason = reason_of(error)
        raise UserError(
            "{path}: is no SentencePiece model ({reason}); download it again", path=path, reason=reason
        ) from None
    own = {"pad_token": model.pad_id(), "eos_token": model.eos_id(), "unk_token": model.unk_id()}
    names = {role: str(model.id_to_piece(number)) for role, number in own.items() if number >= 0} | stated.names
    with failure_is_user_error(say("{path}: no tokenizer can be made of it", path=path)):
        backend = SentencePieceBackend(model, proto, stated.added_to(model, names), stated.is_legacy)
    return Published(backend, path, names, files)


def _read_byte_bpe(folder: Path, stated: _Stated) -> LibraryTokenizer:
    try:
        vocabulary = json.loads(read_text(folder / VOCABULARY, MOST_TABLE_BYTES))
        lines = read_text(folder / MERGES, MOST_TABLE_BYTES).split("\n")  # the library's own reader takes no blank line
        pairs = [line.split(" ") for line in lines if line.strip() and not line.startswith("#version")]
        backend = LibraryTokenizer(models.BPE(vocabulary, [(left, right) for left, right in pairs]))
    except Exception as error:  # what the library raises, and whatever a table that is none leads to
        raise UserError(
            "{folder}: {vocabulary} and {merges} are not a byte-level BPE ({reason}); download them again",
            folder=folder,
            vocabulary=VOCABULARY,
            merges=MERGES,
            reason=" ".join(str(error).split())[:200],
        ) from None
    prefix = stated.config.get("add_prefix_space") is True
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=prefix)
    backend.decoder = decoders.ByteLevel()
    for text in ("<s>", PAD, EOS, UNK, "<mask>"):
        if text in vocabulary:
            _add(backend, stated.special.get(text) or special(text))
    stated.add_to(backend)
    is_roberta = "Roberta" in str(stated.config.get("tokenizer_class")) and "<s>" in vocabulary
    end_with(backend, stated.names.get("eos_token", EOS), "<s>" if is_roberta else "")
    return backend


def special(token: str) -> AddedToken:
    """A token that no text is split into."""
    return AddedToken(token, special=True, normalized=False)


def end_with(backend: LibraryTokenizer, eos: str, begin: str = "") -> None:
    """Let `AutoTokenizer` put the end of text after every text, which ours does itself; and `begin` before it."""
    if backend.token_to_id(eos) is None:
        return
    first, between = (f"{begin} ", f" {eos}") if begin else ("", "")
    backend.post_processor = processors.TemplateProcessing(
        single=f"{first}$A {eos}",
        pair=f"{first}$A {eos}{between} $B {eos}",
        special_tokens=[(token, backend.token_to_id(token)) for token in (begin, eos) if token],
    )


def byte_backend(num_sentinels: int = NUM_BYTE_SENTINELS, strip: bool = False) -> LibraryTokenizer:
    """ByT5's ids: byte b is b + 3; after them sentinels upwards from 259.

    Args:
        strip: whether blanks beside padding, end and unknown in a text vanish, as with ByT5 in transformers.
    """
    # the visible letter that stands for each byte in byte-level tokenizers (GPT-2's `bytes_to_unicode`)
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = iter(range(256, 512))
    letters = [chr(byte) if byte in visible else chr(next(hidden)) for byte in range(256)]
    names = [PAD, EOS, UNK]
    vocabulary = {token: number for number, token in enumerate([*names, *letters])}
    backend = LibraryTokenizer(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(
        [AddedToken(name, special=True, normalized=False, lstrip=strip, rstrip=strip) for name in names]
    )
    backend.add_special_tokens([special(f"<extra_id_{number}>") for number in range(num_sentinels)])
    end_with(backend, EOS)
    return backend
