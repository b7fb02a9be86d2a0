"""Which tokenizer is in a folder, as its publisher left it?

- `tokenizer.json`: the format of the `tokenizers` library, taken unchanged.
- one `*.model`: SentencePiece (T5, Flan, mT5, UMT5, the 0.2B chat models), see `spiece`.
- `vocab.json` and `merges.txt`: byte-level BPE of GPT-2's kind (CodeT5), with the ids of `added_tokens.json`.
- a `tokenizer_config.json` that names ByT5: bytes, nothing else is needed (Xue et al. 2022).
"""

from __future__ import annotations

import json
from pathlib import Path

from tokenizers import AddedToken, decoders, models, pre_tokenizers, processors
from tokenizers import Tokenizer as Backend

from bounded import MOST_TABLE_BYTES, read_text
from data.text.chat_templates import special_tokens
from data.tokenizers.panics import failure_is_user_error
from data.tokenizers.spiece import load_sentencepiece
from settings.fields import UserError

FILE_NAME, VOCABULARY, MERGES = "tokenizer.json", "vocab.json", "merges.txt"
PAD, EOS, UNK = "<pad>", "</s>", "<unk>"
NUM_BYTE_SENTINELS = 125  # ByT5 fills its vocabulary up to 384


def read_backend(place: str | Path) -> tuple[Backend, Path]:
    """Read the tokenizer of a folder, or one of its files.

    Returns:
        the tokenizer, and the file that it was read from.
    Raises:
        UserError: there is none, several, or a broken one.
    """
    folder = Path(place)
    path = folder if folder.is_file() else folder / FILE_NAME
    if path.is_file() and path.suffix != ".model":
        return _read_json(path), path
    found = [path] if path.is_file() else sorted(folder.glob("*.model"))
    if len(found) == 1:
        return load_sentencepiece(found[0]), found[0]
    if (folder / VOCABULARY).is_file() and (folder / MERGES).is_file():
        return _read_byte_bpe(folder), folder / VOCABULARY
    about = folder / "tokenizer_config.json"
    if not found and about.is_file() and "byt5" in _words(about):
        return byte_backend(), about
    if not folder.exists():
        raise UserError(f"--tokenizer_dir = {folder}, no such folder; name a tokenizer's folder or file")
    hint = "holds several *.model files" if found else f"holds no {FILE_NAME} and no SentencePiece *.model"
    raise UserError(f"--tokenizer_dir = {folder}, {hint}; name a tokenizer's folder or file")


def _words(path: Path) -> str:
    try:
        return read_text(path).lower()
    except (OSError, ValueError):
        return ""


def _read_json(path: Path) -> Backend:
    try:
        text = read_text(path, MOST_TABLE_BYTES)
    except (OSError, ValueError) as error:
        raise UserError(f"{path}: is no tokenizer ({error}); fetch or train it again") from None
    with failure_is_user_error(f"{path}: is no tokenizer"):
        return Backend.from_str(text)


def _read_byte_bpe(folder: Path) -> Backend:
    """Byte-level BPE from a vocabulary and its merges."""
    try:
        vocabulary = json.loads(read_text(folder / VOCABULARY, MOST_TABLE_BYTES))
        lines = read_text(folder / MERGES, MOST_TABLE_BYTES).split("\n")
        merges = [(left, right) for left, right in (line.split(" ") for line in lines if _is_merge(line))]
        backend = Backend(models.BPE(vocabulary, merges))
        added = _added_tokens(folder)
    except Exception as error:  # what the library raises, and whatever a table that is none leads to
        raise UserError(
            f"{folder}: {VOCABULARY} and {MERGES} are no byte-level BPE ({' '.join(str(error).split())[:200]}); "
            "fetch them again"
        ) from None
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    own = [token for token in vocabulary if token.startswith("<") and token.endswith(">") and len(token) > 2]
    backend.add_special_tokens([special(token) for token in own if token in _SPECIAL])
    backend.add_special_tokens([special(token) for token in sorted(added, key=lambda token: added[token])])
    wrong = [token for token, number in added.items() if backend.token_to_id(token) != number]
    if wrong:
        raise UserError(
            f"{folder}: added_tokens.json leaves gaps between its ids, {wrong[0]} would get another; fetch it again"
        )
    end_with(backend, EOS)
    return backend


_SPECIAL = ("<s>", PAD, EOS, UNK, "<mask>")


def _is_merge(line: str) -> bool:
    return bool(line.strip()) and not line.startswith("#version")


def _added_tokens(folder: Path) -> dict[str, int]:
    path = folder / "added_tokens.json"
    return dict(json.loads(read_text(path))) if path.is_file() else {}


def token_names(folder: Path) -> dict[str, str]:
    """Names of special tokens where a folder gives them: `pad_token`, `eos_token`, `unk_token`."""
    named = special_tokens(folder)
    return {role: named[role] for role in ("pad_token", "eos_token", "unk_token") if role in named}


def special(token: str) -> AddedToken:
    """A token that no text is split into."""
    return AddedToken(token, special=True, normalized=False)


def end_with(backend: Backend, eos: str) -> None:
    """Let `AutoTokenizer` put the end of text after every text; ours does that itself."""
    number = backend.token_to_id(eos)
    if number is not None:
        backend.post_processor = processors.TemplateProcessing(
            single=f"$A {eos}", pair=f"$A {eos} $B {eos}", special_tokens=[(eos, number)]
        )


def byte_backend() -> Backend:
    """ByT5's ids: byte b is b + 3, after them 125 sentinels upwards from 259; 384 in all."""
    letters = _letter_of_byte()
    names = [PAD, EOS, UNK]
    vocabulary = {token: number for number, token in enumerate(names)}
    vocabulary |= {letters[byte]: byte + len(names) for byte in range(256)}
    backend = Backend(models.BPE(vocabulary, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    sentinels = [f"<extra_id_{i}>" for i in range(NUM_BYTE_SENTINELS)]
    backend.add_special_tokens([special(token) for token in [*names, *sentinels]])
    end_with(backend, EOS)
    return backend


def _letter_of_byte() -> list[str]:
    """The visible letter that stands for each byte in byte-level tokenizers (GPT-2's `bytes_to_unicode`)."""
    visible = {*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)}
    hidden = [byte for byte in range(256) if byte not in visible]
    return [chr(byte) if byte in visible else chr(256 + hidden.index(byte)) for byte in range(256)]
