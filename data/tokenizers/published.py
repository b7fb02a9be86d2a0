"""The tokenizer of a folder, as its publisher left it.

- `tokenizer.json`: run by the `tokenizers` library.
- `spiece.model`, or another `*.model` that is the only one: run by SentencePiece (T5, Flan, mT5, UMT5, MADLAD-400).
- `vocab.json` and `merges.txt`: byte-level BPE of GPT-2's kind (CodeT5), run by the `tokenizers` library.
- a `tokenizer_config.json` that names ByT5: bytes, nothing else is needed (Xue et al. 2022).

`stated_tokens` reads what the files beside them say; ids are given as by the tokenizers of transformers 4.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as LibraryTokenizer

from data.tokenizers.backends import SPIECE_FILE, TOKENIZER_FILE, LibraryBackend, failure_is_user_error
from data.tokenizers.stated_tokens import ADDED_FILE, CONFIG_FILE, SPECIAL_FILE, StatedTokens, read_object, special
from settings.errors import UserError, reason_of
from support.language import say
from support.storage import MOST_TABLE_BYTES, read_bytes, read_text

if TYPE_CHECKING:  # Its library is loaded for its files alone.
    from data.tokenizers.spiece import SentencePieceBackend

VOCABULARY = "vocab.json"
MERGES = "merges.txt"
MAIN_FILES = (TOKENIZER_FILE, SPIECE_FILE, VOCABULARY, MERGES)
COMPANIONS = (CONFIG_FILE, SPECIAL_FILE, ADDED_FILE, "chat_template.jinja")
PAD = "<pad>"
EOS = "</s>"
UNK = "<unk>"
MODEL_FILE = "config.json"  # The first published ones say there which class their tokenizer has.
NUM_SENTINELS = 100  # T5's sentinels follow the pieces of its SentencePiece model, <extra_id_0> last.
NUM_BYTE_SENTINELS = 125  # ByT5 fills its vocabulary up to 384.
# ByT5 was pretrained with masks that count down from its last byte: 258, 257, ...; transformers names 259, 260, ...
LAST_BYTE = 258
NO_TOKENIZER = "--tokenizer_dir = {folder}, {hint}; give a tokenizer's folder or file"


@dataclass
class Published:
    """A tokenizer as it was read.

    Args:
        backend: the library's tokenizer. path: the file that it was read from.
        names: of special tokens: `pad_token`, `eos_token`, ...
        files: name -> content of what lies beside it, for `Tokenizer.save`. is_in_files: whether that is all of it.
        mask_ids: of masks in pretraining; none: these are <extra_id_0>, ...
    """

    backend: LibraryBackend | SentencePieceBackend
    path: Path = Path("tokenizer")
    names: Mapping[str, str] = field(default_factory=dict)
    files: Mapping[str, bytes] = field(default_factory=dict)
    is_in_files: bool = False
    mask_ids: Sequence[int] = ()


def has_tokenizer(folder: Path) -> bool:
    """Whether a tokenizer lies there, whole or not."""
    return _main_file(folder) is not None


def read_published(path: str | Path) -> Published:
    """Read the tokenizer of a folder, or one of its files.

    Raises:
        UserError: there is none, several, or a broken one; or its files contradict each other.
    """
    main = Path(path)
    if not main.is_file():
        main = _only_main_file(main)
    stated = StatedTokens(main.parent)
    if main.suffix == ".model":
        return _read_sentencepiece(main, stated)
    if main.name == VOCABULARY:
        return _read_byte_bpe(main, stated)
    if main.name == CONFIG_FILE:
        return _read_bytes(main, stated)
    backend = _read_json(main)
    stated.add_to(backend)
    return Published(LibraryBackend(backend), main, stated.names, _files(main.parent, SPIECE_FILE))


def _main_file(folder: Path) -> Path | None:
    """The file that says which tokenizer a folder has."""
    models = sorted(folder.glob("*.model"))
    candidates = [folder / TOKENIZER_FILE, folder / SPIECE_FILE, *models, folder / VOCABULARY]
    path = next(filter(Path.is_file, candidates), None)
    if path is None and _names_byt5(folder):
        return folder / CONFIG_FILE
    return path


def _names_byt5(folder: Path) -> bool:
    stated = [read_object(folder / CONFIG_FILE), read_object(folder / MODEL_FILE).get("tokenizer_class")]
    return "byt5" in json.dumps(stated).lower()


def _only_main_file(folder: Path) -> Path:
    if not folder.exists():
        raise UserError("--tokenizer_dir = {given}, no such folder; give a tokenizer's folder or file", given=folder)
    path = _main_file(folder)
    if path is None:
        hint = say("holds no {tokenizer_file} and no SentencePiece *.model", tokenizer_file=TOKENIZER_FILE)
        raise UserError(NO_TOKENIZER, folder=folder, hint=hint)
    if path.name not in (*MAIN_FILES, CONFIG_FILE) and len(list(folder.glob("*.model"))) > 1:
        raise UserError(NO_TOKENIZER, folder=folder, hint=say("holds several *.model files"))
    return path


def _files(folder: Path, *names: str) -> dict[str, bytes]:
    """Name -> content of these files and of those beside every tokenizer, as far as they are there."""
    paths = map(folder.joinpath, (*COMPANIONS, *names))
    return {path.name: read_bytes(path, MOST_TABLE_BYTES) for path in paths if path.is_file()}


def _read_json(path: Path) -> LibraryTokenizer:
    try:
        text = read_text(path, MOST_TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(
            "{path}: is not a tokenizer ({error}); download or train it again", path=path, error=error
        ) from None
    with failure_is_user_error(say("{path}: is not a tokenizer", path=path)):
        return LibraryTokenizer.from_str(text)


def _read_sentencepiece(path: Path, stated: StatedTokens) -> Published:
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
        backend = SentencePieceBackend(model, proto, _added_to_pieces(model, stated, names), stated.is_legacy)
    return Published(backend, path, names, _files(path.parent))


def _added_to_pieces(model: Any, stated: StatedTokens, names: Mapping[str, str]) -> dict[int, AddedToken]:
    """Id -> token that a SentencePiece model gets: those with ids of their own, sentinels, and special ones.

    Args:
        names: of special tokens by their role, those of the model's own among them.
    """
    from data.tokenizers.spiece import piece_id

    last_piece = model.get_piece_size() - 1
    added = dict(stated.numbered)
    ids = {token.content: number for number, token in added.items()}
    first_sentinels = [ids.get(name, piece_id(model, name)) for name in ("<extra_id_0>", "▁<extra_id_0>")]
    if first_sentinels == [None, None]:
        is_t5 = stated.tokenizer_class.startswith(("T5", "MT5", "UMT5"))
        count = stated.num_sentinels(NUM_SENTINELS if is_t5 else 0)
        last = last_piece + (count if stated.extra_ids is None else stated.extra_ids)
        for number in range(count):
            token = AddedToken(f"<extra_id_{number}>", lstrip=True, rstrip=True, special=True, normalized=False)
            added[last - number] = token
            ids[token.content] = last - number
    for content, token in ({name: special(name) for name in names.values()} | stated.special).items():
        known_id = ids.get(content, piece_id(model, content))
        added.setdefault(max([last_piece, *added]) + 1 if known_id is None else known_id, token)
    return added


def _read_byte_bpe(path: Path, stated: StatedTokens) -> Published:
    folder = path.parent
    try:
        vocabulary = json.loads(read_text(path, MOST_TABLE_BYTES))
        lines = read_text(folder / MERGES, MOST_TABLE_BYTES).split("\n")
        # The library's own reader takes no blank line.
        merges: list[Any] = [
            tuple(line.split(" ")) for line in lines if line.strip() and not line.startswith("#version")
        ]
        backend = LibraryTokenizer(models.BPE(vocabulary, merges))
    except Exception as error:  # The library raises it, or a table that is none leads to anything.
        raise UserError(
            "{folder}: {vocabulary} and {merges} are not a byte-level BPE ({reason}); download them again",
            folder=folder,
            vocabulary=VOCABULARY,
            merges=MERGES,
            reason=" ".join(str(error).split())[:200],
        ) from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=stated.adds_space)
    backend.decoder = decoders.ByteLevel()
    own = [name for name in ("<s>", PAD, EOS, UNK, "<mask>") if name in vocabulary]
    backend.add_tokens([stated.special.get(name, special(name)) for name in own])
    stated.add_to(backend)
    begin = "<s>" if "Roberta" in stated.tokenizer_class else ""
    end_with(backend, stated.names.get("eos_token", EOS), begin)
    return Published(LibraryBackend(backend), path, stated.names, _files(folder, VOCABULARY, MERGES), is_in_files=True)


def _read_bytes(path: Path, stated: StatedTokens) -> Published:
    backend = byte_backend(stated.num_sentinels(NUM_BYTE_SENTINELS), strip=True)
    for number in range(len((PAD, EOS, UNK)), LAST_BYTE + 1):  # A byte that was added as a token keeps its id.
        stated.numbered.pop(number, None)
    stated.add_to(backend)
    masks = range(LAST_BYTE, LAST_BYTE - NUM_SENTINELS, -1)
    return Published(LibraryBackend(backend), path, stated.names, _files(path.parent), is_in_files=True, mask_ids=masks)


def end_with(backend: LibraryTokenizer, eos: str, begin: str = "") -> None:
    """Let `AutoTokenizer` put the end of text after every text, which ours does itself.

    Args:
        begin: what it puts before every text, as RoBERTa's tokenizers do, where the vocabulary has it.
    """
    eos_id = backend.token_to_id(eos)
    begin_id = backend.token_to_id(begin)
    if eos_id is None:
        return
    tokens = [(eos, eos_id)]
    template = f"$A {eos}", f"$A {eos} $B {eos}"
    if begin_id is not None:
        tokens.insert(0, (begin, begin_id))
        template = f"{begin} $A {eos}", f"{begin} $A {eos} {eos} $B {eos}"
    backend.post_processor = processors.TemplateProcessing(*template, special_tokens=tokens)


def byte_letters() -> list[str]:
    """The letters in which byte-level tokenizers write the bytes 0 to 255 (GPT-2's `bytes_to_unicode`): the visible
    ones as they are.
    """
    visible = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), 256)]
    hidden = sorted({*range(256)} - {*visible})
    letters = dict(zip([*visible, *hidden], sorted(pre_tokenizers.ByteLevel.alphabet()), strict=True))
    return [letters[byte] for byte in range(256)]


def byte_backend(num_sentinels: int = NUM_BYTE_SENTINELS, strip: bool = False) -> LibraryTokenizer:
    """ByT5's ids: byte b is b + 3; after them sentinels upwards from 259.

    Args:
        strip: whether blanks beside padding, end and unknown in a text vanish, as with ByT5 in transformers.
    """
    names = [PAD, EOS, UNK]
    tokens = [*names, *byte_letters()]
    backend = LibraryTokenizer(models.BPE({token: number for number, token in enumerate(tokens)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    roles = [AddedToken(name, special=True, normalized=False, lstrip=strip, rstrip=strip) for name in names]
    backend.add_tokens([*roles, *sentinels(num_sentinels)])
    end_with(backend, EOS)
    return backend


def sentinels(count: int) -> list[AddedToken]:
    """The masks of T5: <extra_id_0>, <extra_id_1>, ..."""
    return [special(f"<extra_id_{number}>") for number in range(count)]
