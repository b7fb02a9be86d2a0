"""The `tokenizers` library as what `Tokenizer` makes ids of texts with; `spiece` is the other."""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from itertools import groupby

import numpy as np
import tokenizers
from numpy.typing import NDArray
from tokenizers import AddedToken, decoders

from settings.errors import UserError, reason_of

# Threads of the library pay only for much text at once, and forbid forking: preparing turns them on for itself.
os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")

TOKENIZER_FILE = "tokenizer.json"
SPIECE_FILE = "spiece.model"
OF_LIBRARIES = (Exception, ValueError, TypeError, OverflowError, RuntimeError, IndexError, UnicodeDecodeError)
Ids = NDArray[np.int32]


@contextmanager
def failure_is_user_error(what: str) -> Iterator[None]:
    """Turn a failure inside of a library into one sentence.

    The `tokenizers` library raises bare `Exception`, and where its Rust code gives up, such as at a regular expression
    that never ends, pyo3's `PanicException`, which is no `Exception` at all, can be imported from nowhere, and would
    pass every handler.

    Args:
        what: the beginning of the sentence, which names the file.
    """
    try:
        yield
    except BaseException as error:
        if type(error).__name__ != "PanicException" and type(error) not in OF_LIBRARIES:
            raise
        reason = reason_of(error)
        raise UserError(
            "{what} ({reason}); choose another tokenizer, or download it again", what=what, reason=reason
        ) from None


class LibraryBackend:
    """A tokenizer of the `tokenizers` library, which decides all that `tokenizer.json` says.

    `SentencePieceBackend` has the same methods. `file_name`: of what `serialized` returns; `size`: the highest id and
    1; `prefix_ids`: what is put before a prompt or an answer, such as CodeT5's <s>.
    """

    file_name = TOKENIZER_FILE

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        backend.no_padding()
        backend.no_truncation()
        self._backend = backend

    @cached_property
    def size(self) -> int:
        return max(self._backend.get_vocab(with_added_tokens=True).values()) + 1

    @cached_property
    def fingerprint(self) -> str:
        return hashlib.sha256(self.serialized()).hexdigest()

    def added_tokens(self) -> Mapping[int, AddedToken]:
        """Id -> token that no text is split into."""
        return self._backend.get_added_tokens_decoder()

    @cached_property
    def prefix_ids(self) -> Sequence[int]:
        encoding = self._backend.encode("a")
        mask = encoding.special_tokens_mask
        return encoding.ids[: mask.index(0)] if 0 in mask else []

    @cached_property
    def _letters(self) -> Mapping[int | None, str]:
        """Added tokens that the library would decode letter by letter as bytes, such as Zürich."""
        if not isinstance(self._backend.decoder, decoders.ByteLevel):
            return {}
        return {number: token.content for number, token in self.added_tokens().items() if not token.content.isascii()}

    def token_to_id(self, token: str) -> int | None:
        return self._backend.token_to_id(token)

    def id_to_token(self, number: int) -> str | None:
        return self._backend.id_to_token(number)

    def encode(self, texts: Sequence[str], special: bool) -> list[Ids]:
        """(N,) int32 ids of each text; special: whether names of special tokens in a text are those tokens."""
        self._backend.encode_special_tokens = not special
        encodings = self._backend.encode_batch_fast(list(texts), add_special_tokens=False)
        return [np.array(encoding.ids, np.int32) for encoding in encodings]

    def encode_but(self, text: str, plain: Collection[str]) -> Ids:
        """Ids of a text in which names of special tokens are these tokens, but for the names in `plain`."""
        names = {token.content for token in self.added_tokens().values() if token.special} - {*plain}
        longest_first = sorted(map(re.escape, names), key=len, reverse=True)
        parts = re.split(f"({'|'.join(longest_first)})", text) if names else [text]
        ids = [np.zeros(0, np.int32)]
        for part in parts:
            ids += self.encode([part], special=part in names)
        return np.concatenate(ids)

    def encode_with_ends(self, text: str, special: bool) -> tuple[Ids, NDArray[np.int64]]:
        """The same of one text, and for each token the character behind its last one."""
        self._backend.encode_special_tokens = not special
        encoding = self._backend.encode(text, add_special_tokens=False)
        return np.array(encoding.ids, np.int32), np.array([end for _, end in encoding.offsets], np.int64)

    def decode(self, ids: Iterable[int], skip: Collection[int]) -> str:
        """Text of ids without those of `skip`; ids that are not known are left out."""
        text = ""
        spoken = (number for number in ids if number not in skip)
        for letters, run in groupby(spoken, key=self._letters.get):
            numbers = list(run)
            if letters is None:
                text += self._backend.decode(numbers, skip_special_tokens=False)
            else:
                text += letters * len(numbers)
        return text

    def hugging_face_class(self, num_sentinels: int) -> Mapping[str, object]:
        """What `tokenizer_config.json` says of the class that reads the file."""
        return {"tokenizer_class": "PreTrainedTokenizerFast"}

    def serialized(self) -> bytes:
        self._backend.encode_special_tokens = False
        return self._backend.to_str().encode("utf8")
