"""Token ids compared with the library that defines the tokenizer: `python -m benchmarks.checks.tokenizer_ids
[--texts=100000]`.

Texts are drawn from the letters that Unicode assigns to thirty scripts, composed and decomposed, with indents, tabs,
line ends, emoji, direction marks and names of special tokens; every thousandth has 200,000 letters. SentencePiece is
the reference of its models, transformers of folders with `tokenizer.json`, of ByT5 and of CodeT5. Exit code 1 where any
text differs.
"""

from __future__ import annotations

import argparse
import io
import json
import random
import tempfile
import unicodedata
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.page import markdown, show_section
from data.tokenizers.tokenizer import Tokenizer

SCRIPTS = (
    "LATIN",
    "GREEK",
    "CYRILLIC",
    "ARMENIAN",
    "HEBREW",
    "ARABIC",
    "SYRIAC",
    "DEVANAGARI",
    "BENGALI",
    "GURMUKHI",
    "GUJARATI",
    "TAMIL",
    "TELUGU",
    "KANNADA",
    "MALAYALAM",
    "SINHALA",
    "THAI",
    "LAO",
    "TIBETAN",
    "MYANMAR",
    "GEORGIAN",
    "HANGUL",
    "ETHIOPIC",
    "CHEROKEE",
    "KHMER",
    "MONGOLIAN",
    "HIRAGANA",
    "KATAKANA",
    "CJK",
    "HALFWIDTH",
)
FORMS: tuple[Any, ...] = ("NFC", "NFD", "NFKC", "NFKD", "")
BETWEEN = (" ", " ", " ", "  ", "    ", "\t", "\n", "\r\n", "\u00a0", "\u3000", "\u200d", "\u200f", "\u2028", "", ", ")
ODD = (
    "😀",
    "👨\u200d👩\u200d👧",
    "🇩🇪",
    "é",
    "e\u0301",
    "ﬁ",
    "①",
    "½",
    "ａ",
    "\ufeff",
    "▁",
    "<0x41>",
    "&amp;",
    "\x00",
    "\ufffd",
)
NAMES = ("<extra_id_0>", "<extra_id_1>", "</s>", "<pad>", "<unk>", "<extra_id_99>")
LONG, LONG_LETTERS = 1000, 200_000


def letters_of_scripts() -> dict[str, str]:
    """Script -> up to 400 of its letters, by the names that Unicode gives them."""
    found: dict[str, list[str]] = {script: [] for script in SCRIPTS}
    for code in range(0x20, 0x10000):
        script = unicodedata.name(chr(code), "").partition(" ")[0]
        if script in found and unicodedata.category(chr(code))[0] in "LMN":
            found[script].append(chr(code))
    return {script: "".join(letters[:: max(1, len(letters) // 400)]) for script, letters in found.items()}


def texts(count: int, seed: int, names: Sequence[str] = (), long_letters: int = LONG_LETTERS) -> Iterator[str]:
    """Texts of all scripts in turn; `names`: of special tokens that some of them hold."""
    draw, letters = random.Random(seed), letters_of_scripts()
    for number in range(count):
        alphabet = letters[SCRIPTS[number % len(SCRIPTS)]] + letters["LATIN"][:80]
        if number % LONG == LONG - 1:
            yield "".join(draw.choices(alphabet, k=long_letters))
            continue
        parts = []
        for _ in range(draw.randrange(1, 9)):
            word = "".join(draw.choices(alphabet, k=draw.randrange(1, 7)))
            odd = (
                draw.choice(ODD) if draw.random() < 0.1 else draw.choice(names) if names and draw.random() < 0.1 else ""
            )
            parts += [word, odd, draw.choice(BETWEEN)]
        text = draw.choice(("", "", " ", "    ", "\n")) + "".join(parts)
        form = draw.choice(FORMS)
        yield unicodedata.normalize(form, text) if form else text


def sentencepiece_folder(folder: Path, **options: Any) -> Callable[[str], list[int]]:
    """A model that SentencePiece trains on such texts, and how it encodes."""
    import sentencepiece

    out = io.BytesIO()
    given = {"model_type": "unigram", "vocab_size": 8000, "pad_id": 0, "eos_id": 1, "unk_id": 2, "bos_id": -1}
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=texts(3000, 1, long_letters=100),
        model_writer=out,
        hard_vocab_limit=False,
        num_threads=1,
        minloglevel=2,
        character_coverage=0.99,
        **{**given, **options},
    )
    folder.mkdir()
    (folder / "spiece.model").write_bytes(out.getvalue())
    return sentencepiece.SentencePieceProcessor(model_proto=out.getvalue()).encode


def transformers_folder(folder: Path, kind: str) -> Callable[[str], list[int]]:
    """A tokenizer's folder as transformers has it, and how it encodes."""
    import transformers
    from tokenizers import ByteLevelBPETokenizer

    about = {"eos_token": "</s>", "unk_token": "<unk>", "pad_token": "<pad>", "tokenizer_class": f"{kind}Tokenizer"}
    if kind == "T5":
        spiece = folder.with_name("spiece")
        sentencepiece_folder(spiece)
        transformers.T5Tokenizer.from_pretrained(spiece).save_pretrained(folder)
    else:
        folder.mkdir()
        if kind == "Roberta":
            library = ByteLevelBPETokenizer()
            special = ["<pad>", "<s>", "</s>", "<unk>", "<mask>"]
            sample = texts(3000, 1, long_letters=100)
            library.train_from_iterator(sample, vocab_size=4000, special_tokens=special, show_progress=False)
            library.save_model(str(folder))
            size = library.get_vocab_size()
            (folder / "added_tokens.json").write_text(
                json.dumps({f"<extra_id_{n}>": size + 99 - n for n in range(100)})
            )
            about |= {"bos_token": "<s>", "mask_token": "<mask>"}
        (folder / "tokenizer_config.json").write_text(json.dumps(about))
    theirs = getattr(transformers, f"{kind}Tokenizer").from_pretrained(folder)
    return lambda text: list(theirs(text, add_special_tokens=False).input_ids)


# kind -> whether names of special tokens are in its texts, and what makes a folder and the reference
KINDS: dict[str, tuple[bool, Callable[[Path], Callable[[str], list[int]]]]] = {
    "SentencePiece unigram, nmt_nfkc": (False, sentencepiece_folder),
    "SentencePiece BPE, bytes, own symbols": (
        False,
        lambda folder: sentencepiece_folder(
            folder, model_type="bpe", byte_fallback=True, user_defined_symbols=["\n", "<n>", "a b"]
        ),
    ),
    "SentencePiece unigram, blanks kept": (
        False,
        lambda folder: sentencepiece_folder(folder, remove_extra_whitespaces=False, normalization_rule_name="identity"),
    ),
    "SentencePiece unigram, blank as suffix": (
        False,
        lambda folder: sentencepiece_folder(folder, treat_whitespace_as_suffix=True),
    ),
    "tokenizer.json of T5": (True, lambda folder: transformers_folder(folder, "T5")),
    "ByT5": (True, lambda folder: transformers_folder(folder, "ByT5")),
    "CodeT5": (True, lambda folder: transformers_folder(folder, "Roberta")),
}


def differing(kind: str, folder: Path, count: int, long_letters: int = LONG_LETTERS) -> list[str]:
    """The texts to which a kind of tokenizer gives other ids than its reference."""
    with_names, make = KINDS[kind]
    reference, ours = make(folder), Tokenizer.load(folder)
    return [
        text
        for text in texts(count, 2, NAMES if with_names else (), long_letters)
        if ours.encode_batch([text], special=with_names)[0].tolist() != reference(text)
    ]


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--texts", type=int, default=100_000)
    count, rows, wrong = parser.parse_args().texts, [], 0
    for kind in KINDS:
        with tempfile.TemporaryDirectory() as place:
            found = differing(kind, Path(place) / "tokenizer", count)
        print(f"{kind}: {len(found):,} of {count:,} differ", *map(ascii, found[:3]), flush=True)
        rows.append((kind, f"{count:,}", f"{len(found):,}"))
        wrong += len(found)
    body = markdown(("tokenizer", "texts in 30 scripts", "ids that differ from its library's"), rows)
    show_section("tokenizer-ids", "Ids of published tokenizers", body, rows)
    raise SystemExit(wrong > 0)


if __name__ == "__main__":
    main()
