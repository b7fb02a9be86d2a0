"""Training a tokenizer in bounded memory.

A sample of the rows is cut into words, these are counted in a table of fixed size (`sample`), and the library's
trainers learn from the most frequent ones alone. Ids follow T5: padding 0, end of text 1, unknown 2, the pieces, and
100 sentinels at the end, <extra_id_0> highest.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import numpy as np
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Backend

from data.tokenizers.backends import LibraryBackend
from data.tokenizers.published import EOS, NUM_SENTINELS, PAD, UNK, Published, byte_backend, end_with, sentinels
from data.tokenizers.sample import LARGE, UNSPACED, TrainingLimits, Words, count_words, most_frequent, sample_texts
from data.tokenizers.stated_tokens import special
from data.tokenizers.tokenizer import Tokenizer
from settings.errors import UserError

SPECIAL = [PAD, EOS, UNK]
SPECIAL_TOKENS = list(map(special, SPECIAL))
AMINO_ACIDS = "ALGVSREDTIPKFQNYMHWCXBOUZ"  # Their order is that of ProtT5's ids.
ASCII = [chr(code) for code in range(33, 127)]
SMALLEST_VOCABULARY = {
    "bpe": 256 + len(SPECIAL) + NUM_SENTINELS + 1,
    "unigram": 640,
    "byte": 384,
    "words": len(SPECIAL) + NUM_SENTINELS + 1,
    "letters": len(SPECIAL) + len(AMINO_ACIDS) + NUM_SENTINELS,
}
LETTER_COVERAGE = 0.9995  # Unigram has pieces for that much of the letters, as in SentencePiece.
LONGEST_RUN = 16  # The most letters of a script without spaces that count as one word.
END = "\0"  # It ends a word where words are handed to a trainer.
AT_ONCE = 4096  # A word stands that often in one text for a trainer.


def train_tokenizer(
    texts: Iterable[str],
    kind: str,
    vocab_size: int,
    sample_bytes: int,
    source: str = "--train_file",
    limits: TrainingLimits = LARGE,
    folder: str | Path | None = None,
    added: Sequence[str] = (),
) -> Tokenizer:
    """Train a tokenizer.

    Args:
        texts: the rows of the corpus, read once; unread for "byte".
        kind: "bpe" (byte-level), "unigram" (with bytes as a last resort), "byte" (ByT5: nothing is learnt, 384 ids),
        "words" (whatever stands between spaces is one token, such as a phone; words that the sample lacks are unknown)
        or "letters" (each letter is one token, blanks are none; those of amino acids come first).
        vocab_size: ids at most, special ones included; a small corpus may yield fewer.
        sample_bytes: most UTF-8 text that training sees.
        source: what messages call the texts.
        limits: what it may hold. folder: where the sample waits, up to twice `sample_bytes`; None: with temporary
            files.
        added: words that are one token each wherever they stand, beyond `vocab_size`; unused for "byte".
    Raises:
        UserError: the vocabulary is too small, or there is no text.
    Memory:
        that of `limits`, whatever the texts.
    """
    check_vocabulary(kind, vocab_size)
    if kind == "byte":
        return byte_tokenizer()
    counts = count_words(sample_texts(texts, sample_bytes, folder=folder), _SPLITS[kind], limits.words)
    if not counts:
        raise UserError("{source}, holds no text to train a tokenizer on; give a file with text", source=source)
    backend = _TRAINERS[kind](counts, vocab_size - NUM_SENTINELS, limits)
    backend.add_tokens([*map(special, added), *reversed(sentinels(NUM_SENTINELS))])
    end_with(backend, EOS)
    return Tokenizer(Published(LibraryBackend(backend)))


def check_vocabulary(kind: str, vocab_size: int) -> None:
    """Refuse a vocabulary that a tokenizer of this kind cannot have.

    Raises:
        UserError: it is too small.
    """
    smallest = SMALLEST_VOCABULARY[kind]
    if vocab_size < smallest:
        raise UserError(
            "--vocab_size = {vocab_size}, is too small for a {kind} tokenizer; allowed: {smallest} or more",
            vocab_size=vocab_size,
            kind=kind,
            smallest=smallest,
        )


def _learn(backend: Backend, trainer: trainers.Trainer, words: Words, *cut: pre_tokenizers.PreTokenizer) -> None:
    """Train on words as often as they occurred; `cut` is what the model's letters need."""
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.Split(END, "removed"), *cut])
    parts = ((word + END) * min(AT_ONCE, count - done) for word, count in words for done in range(0, count, AT_ONCE))
    backend.train_from_iterator(parts, trainer)


def _train_bpe(counts: Counter[str], vocab_size: int, limits: TrainingLimits) -> Backend:
    backend = Backend(models.BPE())
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=SPECIAL_TOKENS,
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    words = most_frequent(counts, limits.bpe_bytes, lambda word: len(word.encode()))
    _learn(backend, trainer, words, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return backend


def _train_words(counts: Counter[str], vocab_size: int, limits: TrainingLimits) -> Backend:
    """The most frequent words, whole. Without a decoder the library joins words by spaces."""
    backend = Backend(models.WordLevel(unk_token=UNK))
    trainer = trainers.WordLevelTrainer(vocab_size=vocab_size, special_tokens=SPECIAL_TOKENS, show_progress=False)
    # A word that is called like a special token would take its place, and shift the ids of all behind it.
    for word in SPECIAL:
        counts.pop(word, None)
    _learn(backend, trainer, most_frequent(counts, limits.bpe_bytes, len))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return backend


def _train_letters(counts: Counter[str], vocab_size: int, limits: TrainingLimits) -> Backend:
    further = sorted(counts.keys() - set(AMINO_ACIDS), key=lambda letter: (-counts[letter], letter))
    pieces = [*SPECIAL, *AMINO_ACIDS, *further][:vocab_size]
    backend = Backend(models.WordLevel({piece: number for number, piece in enumerate(pieces)}, unk_token=UNK))
    backend.add_tokens(SPECIAL_TOKENS)
    each = pre_tokenizers.Split(Regex("."), "isolated")
    backend.pre_tokenizer = pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), each])
    backend.decoder = decoders.Fuse()
    return backend


def _train_unigram(counts: Counter[str], vocab_size: int, limits: TrainingLimits) -> Backend:
    """Pieces by likelihood (Kudo 2018), with 256 byte pieces so that no character is unknown."""
    byte_pieces = [f"<0x{byte:02X}>" for byte in range(256)]
    counts = _without_rare_letters(counts, (vocab_size - len(byte_pieces) - len(ASCII)) // 2)
    backend = Backend(models.Unigram())
    trainer = trainers.UnigramTrainer(
        vocab_size=vocab_size - len(byte_pieces),
        special_tokens=SPECIAL,
        unk_token=UNK,
        show_progress=False,
        initial_alphabet=ASCII,  # A literal <0x41> need not be read as a byte then.
    )
    _learn(backend, trainer, most_frequent(counts, limits.unigram_letters, len))
    scores: dict[str, float] = dict(json.loads(backend.to_str())["model"]["vocab"])
    never = min(scores.values()) - 100.0  # Pieces with this score are not matched literally.
    scores |= dict.fromkeys(SPECIAL, never)
    by_id = sorted(backend.get_vocab().items(), key=lambda entry: entry[1])
    pieces = [(piece, scores[piece]) for piece, _ in by_id] + [(piece, never) for piece in byte_pieces]
    bytewise = Backend(models.Unigram(pieces, unk_id=SPECIAL.index(UNK), byte_fallback=True))
    bytewise.add_tokens(SPECIAL_TOKENS)
    # No blank is put before a text: what is decoded is what was encoded, also where a text is encoded in parts.
    bytewise.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="never")
    bytewise.decoder = decoders.Sequence([decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()])
    return bytewise


def _without_rare_letters(counts: Counter[str], num_letters: int) -> Counter[str]:
    """Cut words at letters outside `LETTER_COVERAGE` of the text or beyond `num_letters`; bytes spell them later."""
    letters = Counter[str]()
    for word, count in counts.items():
        for letter in word:
            letters[letter] += count
    common = letters.most_common()
    covered = np.cumsum([count for _, count in common])
    num_kept = min(1 + int(np.searchsorted(covered, LETTER_COVERAGE * letters.total())), max(num_letters, 0))
    rare = {ord(letter): " " for letter, _ in common[num_kept:]}
    parts = Counter[str]()
    for word, count in counts.items():
        for part in word.translate(rare).split(" "):
            parts[part] += count
    del parts[""]
    return parts


def _isolated(letters: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Split(Regex(f"[{letters}]{{1,{LONGEST_RUN}}}"), "isolated")


# Scripts without spaces are cut into runs: as one word each, whole sentences would be learnt by heart.
_BPE = pre_tokenizers.Sequence([_isolated(UNSPACED), pre_tokenizers.ByteLevel(add_prefix_space=False)])
_UNIGRAM = pre_tokenizers.Sequence([pre_tokenizers.Metaspace(prepend_scheme="never"), _isolated(UNSPACED)])
_SPLITS: dict[str, Callable[[str], Iterable[str]]] = {
    # Words are text here, not bytes:
    "bpe": lambda text: (text[first:last] for _, (first, last) in _BPE.pre_tokenize_str(text)),
    "unigram": lambda text: (word for word, _ in _UNIGRAM.pre_tokenize_str(text)),
    "words": str.split,
    "letters": lambda text: "".join(text.split()),
}
_TRAINERS = {"bpe": _train_bpe, "unigram": _train_unigram, "words": _train_words, "letters": _train_letters}


def byte_tokenizer() -> Tokenizer:
    """ByT5's tokenizer, which needs no training."""
    return Tokenizer(Published(LibraryBackend(byte_backend())))
