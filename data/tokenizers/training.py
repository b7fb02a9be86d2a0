"""How is a tokenizer trained in bounded memory?

On a sample of the rows: each row draws a random key, and the rows with the lowest keys that fit the byte bound are
kept, so every row has the same chance whatever the size of the corpus (reservoir sampling by priority, Efraimidis &
Spirakis 2006). Ids follow T5: padding 0, end of text 1, unknown 2, the pieces, and 100 sentinels at the end,
<extra_id_0> highest.
"""

from __future__ import annotations

import heapq
import json
from collections import Counter
from collections.abc import Iterable, Iterator

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from data.batches.order import row_keys
from data.tokenizers.published import EOS, PAD, UNK, byte_backend, end_with, special
from data.tokenizers.spiece import NUM_SENTINELS
from data.tokenizers.tokenizer import Tokenizer
from settings.fields import UserError

SPECIAL = [PAD, EOS, UNK]
ASCII = [chr(code) for code in range(33, 127)]
SMALLEST_VOCABULARY = {
    "bpe": 256 + len(SPECIAL) + NUM_SENTINELS + 1, "unigram": 640, "byte": 384, "words": len(SPECIAL) + NUM_SENTINELS + 1,
}  # fmt: skip
LETTER_COVERAGE = 0.9995  # of Unigram, as in SentencePiece
LONGEST_SAMPLE_CHARS = 64 * 1024  # of one row: one huge row should not be the sample


def train_tokenizer(
    texts: Iterable[str], kind: str, vocab_size: int, sample_bytes: int, source: str = "--train_file"
) -> Tokenizer:
    """Train a tokenizer.

    Args:
        texts: the rows of the corpus, read once; unread for "byte".
        kind: "bpe" (byte-level), "unigram" (with bytes as a last resort), "byte" (ByT5: nothing is learnt, 384 ids) or
        "words" (whatever stands between spaces is one token, such as a phone; words that the sample lacks are unknown).
        vocab_size: ids at most, special ones included; a small corpus may yield fewer.
        sample_bytes: most UTF-8 text that training sees.
        source: what messages call the texts.
    Raises:
        UserError: the vocabulary is too small, or there is no text.
    Memory:
        about 2 x sample_bytes and the library's word counts.
    """
    smallest = SMALLEST_VOCABULARY[kind]
    if vocab_size < smallest:
        raise UserError(
            f"--vocab_size = {vocab_size}, is too small for a {kind} tokenizer; allowed: {smallest} or more"
        )
    if kind == "byte":
        return byte_tokenizer()
    sample = sample_texts(texts, sample_bytes)
    if not sample:
        raise UserError(f"{source}, holds no text to train a tokenizer on; name a file with text")
    backend = _TRAINERS[kind](sample, vocab_size - NUM_SENTINELS)
    backend.add_special_tokens([special(f"<extra_id_{i}>") for i in reversed(range(NUM_SENTINELS))])
    return _with_end_of_text(backend)


def sample_texts(texts: Iterable[str], sample_bytes: int, seed: int = 0) -> list[str]:
    """Keep an even sample of rows within a byte bound, in their order.

    Memory:
        O(sample_bytes), whatever the number of rows.
    """
    kept: list[tuple[int, int, str]] = []  # a heap, highest key first
    size = 0
    for number, (key, text) in enumerate(_with_keys(texts, seed)):
        if size > sample_bytes and key > -kept[0][0]:
            continue
        text = text[:LONGEST_SAMPLE_CHARS]
        heapq.heappush(kept, (-key, number, text))
        size += len(text.encode("utf8"))
        while size > sample_bytes and len(kept) > 1:
            size -= len(heapq.heappop(kept)[2].encode("utf8"))
    return [text for _, _, text in sorted(kept, key=lambda entry: entry[1])]


def _with_keys(texts: Iterable[str], seed: int) -> Iterator[tuple[int, str]]:
    first = 0
    keys: list[int] = []
    for number, text in enumerate(texts):
        if number - first >= len(keys):
            first, keys = number, row_keys(seed, np.arange(number, number + 1024)).tolist()
        yield keys[number - first], text


def _with_end_of_text(backend: Backend) -> Tokenizer:
    end_with(backend, EOS)
    return Tokenizer(backend)


def _train_bpe(sample: list[str], vocab_size: int) -> Backend:
    backend = Backend(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[special(token) for token in SPECIAL],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    backend.train_from_iterator(sample, trainer, length=len(sample))
    return backend


def _train_words(sample: list[str], vocab_size: int) -> Backend:
    """The most frequent words, whole. Without a decoder the library joins words by spaces."""
    backend = Backend(models.WordLevel(unk_token=UNK))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    trainer = trainers.WordLevelTrainer(
        vocab_size=vocab_size, special_tokens=[special(token) for token in SPECIAL], show_progress=False
    )
    backend.train_from_iterator(sample, trainer, length=len(sample))
    return backend


def _train_unigram(sample: list[str], vocab_size: int) -> Backend:
    """Pieces by likelihood (Kudo 2018), with 256 byte pieces so that no character is unknown."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    sample = _without_rare_letters(sample, (vocab_size - len(byte_pieces) - len(ASCII)) // 2)
    backend = Backend(models.Unigram())
    # Chinese has no spaces, and runs of hundreds of letters take minutes.
    runs = pre_tokenizers.Split(Regex(r"\p{Han}{1,32}"), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="always"), runs])
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(byte_pieces), special_tokens=SPECIAL, unk_token=UNK, show_progress=False,
        initial_alphabet=ASCII,  # so that a literal <0x41> need not be read as a byte
    )  # fmt: skip
    backend.train_from_iterator(sample, trainer, length=len(sample))
    vocabulary = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    scores = dict(_unigram_scores(backend))
    never = min(scores.values()) - 100.0  # for pieces that a text must not match literally
    pieces = [(piece, never if piece in SPECIAL else scores[piece]) for piece, _ in vocabulary]
    pieces += [(piece, never) for piece in byte_pieces]
    bytewise = Backend(models.Unigram(pieces, unk_id=SPECIAL.index(UNK), byte_fallback=True))
    bytewise.add_special_tokens([special(token) for token in SPECIAL])
    _dress_unigram(bytewise)
    return bytewise


def _without_rare_letters(sample: list[str], num_letters: int) -> list[str]:
    """Blank out letters outside `LETTER_COVERAGE` of the text or beyond `num_letters`; bytes spell them later."""
    counts = Counter(letter for text in sample for letter in text)
    wanted = LETTER_COVERAGE * counts.total()
    blanks = {}
    for rank, (letter, count) in enumerate(counts.most_common()):
        if wanted <= 0 or rank >= num_letters:
            blanks[ord(letter)] = " "
        wanted -= count
    return [text.translate(blanks) for text in sample] if blanks else sample


def _unigram_scores(backend: Backend) -> list[tuple[str, float]]:
    return [(piece, score) for piece, score in json.loads(backend.to_str())["model"]["vocab"]]


def _dress_unigram(backend: Backend) -> None:
    backend.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    backend.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )


_TRAINERS = {"bpe": _train_bpe, "unigram": _train_unigram, "words": _train_words}


def byte_tokenizer() -> Tokenizer:
    """ByT5's tokenizer, which needs no training."""
    return Tokenizer(byte_backend())
