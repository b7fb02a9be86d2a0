"""Rows for the recipes g2p_ten and g2p_english, and their word error rate.

    python -m benchmarks.parts.pronunciation rows FOLDER OUTPUT LANGUAGE ...       FOLDER/LANGUAGE_train.tsv and
    _dev.tsv python -m benchmarks.parts.pronunciation score MODEL FILE ... [--FLAG=VALUE ...]

Files are those of the SIGMORPHON shared tasks: a word, a tab, its phones parted by spaces. `rows` writes
OUTPUT/train.jsonl and OUTPUT/dev.jsonl, and of several languages each one's train_LANGUAGE.jsonl too (to be mixed by
weight); a token for each letter and phone: letters are decomposed (Unicode NFD, so that a Korean syllable
is its two or three letters), a space is "_", and the language stands first. `score` takes the language from a file's
name (kor_test.tsv: kor), or of rows that `rows` has written from their prompts; it answers the words and tells the
percentage of words with any wrong phone (WER), a language a line, and their mean. A word with several pronunciations
counts once, as right by any of them. Flags go to `generate`; the presets let their models answer by five beams.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import unicodedata
from collections.abc import Iterable, Iterator
from itertools import zip_longest
from pathlib import Path

from benchmarks.page import ROOT
from benchmarks.parts.rows import read_rows, write_rows

SPACE = "_"  # stands for one inside a word
Pronunciations = dict[str, list[str]]  # word, or its prompt -> each as phones parted by spaces


def prompt_of(word: str, language: str) -> str:
    """The encoder's text: the language, then every letter as a word."""
    return " ".join([f"{language}:", *unicodedata.normalize("NFD", word).replace(" ", SPACE)])


def read_words(path: Path) -> Pronunciations:
    """The words of a file in their order, with every pronunciation that it has for them."""
    found: Pronunciations = {}
    for number, line in enumerate(path.read_text(encoding="utf8").splitlines(), 1):
        word, tab, phones = line.partition("\t")
        if not (word and tab and phones.strip()):
            sys.exit(f"{path}, line {number}: {line!r} is not a word, a tab and phones")
        found.setdefault(word, []).append(" ".join(phones.split()))
    return found


def language_of(path: Path) -> str:
    """kor of kor_test.tsv."""
    return path.stem.rpartition("_")[0] or path.stem


def rows(words: Pronunciations, language: str) -> Iterator[dict[str, str]]:
    """Prompt and response of every pronunciation."""
    for word, pronunciations in words.items():
        for phones in pronunciations:
            yield {"prompt": prompt_of(word, language), "response": phones}


def word_error_rate(words: Pronunciations, answers: Iterable[str]) -> float:
    """Percent of words whose answer is none of their pronunciations.

    Args:
        answers: one a word, in their order.
    """
    wrong = sum(answer not in right for right, answer in zip(words.values(), answers, strict=True))
    return 100 * wrong / len(words)


def make_rows(folder: Path, output: Path, languages: list[str]) -> None:
    """Write the rows of some languages, one of each in turn, so that the first rows are of all of them."""
    for part in ("train", "dev"):
        each = {name: list(rows(read_words(folder / f"{name}_{part}.tsv"), name)) for name in languages}
        files = {part: [row for together in zip_longest(*each.values()) for row in together if row is not None]}
        if part == "train" and len(languages) > 1:
            files |= {f"{part}_{name}": own for name, own in each.items()}
        for name, made in files.items():
            write_rows(output / f"{name}.jsonl", made)
            print(f"{output / name}.jsonl: {len(made):,} rows")


def answer(model: str, prompts: list[str], flags: list[str]) -> list[str]:
    """What `generate` writes to each prompt."""
    with tempfile.TemporaryDirectory() as folder:
        asked, told = Path(folder, "prompts.jsonl"), Path(folder, "answers.jsonl")
        write_rows(asked, [{"prompt": text} for text in prompts])
        words = [str(ROOT / "train_low_mem.py"), "generate", f"--model={model}", f"--input={asked}", f"--output={told}"]
        if code := subprocess.run([sys.executable, *words, *flags]).returncode:
            sys.exit(code)
        return [row["response"] for row in read_rows(told)]


def read_tables(files: Iterable[Path]) -> dict[str, Pronunciations]:
    """Language -> its prompts, and their pronunciations."""
    tables: dict[str, Pronunciations] = {}
    for path in files:
        for row in read_rows(path) if path.suffix == ".jsonl" else rows(read_words(path), language_of(path)):
            words = tables.setdefault(row["prompt"].partition(":")[0], {})
            words.setdefault(row["prompt"], []).append(row["response"])
    return tables


def score(model: str, files: list[Path], flags: list[str]) -> None:
    """Tell the word error rate of every language, and their mean."""
    tables = read_tables(files)
    answers = iter(answer(model, [prompt for words in tables.values() for prompt in words], flags))
    rates = {name: word_error_rate(words, [next(answers) for _ in words]) for name, words in tables.items()}
    for name, rate in rates.items():
        print(f"{name:12} {len(tables[name]):6,} words   WER {rate:6.2f}")
    print(f"{'mean':12} {sum(map(len, tables.values())):6,} words   WER {sum(rates.values()) / len(rates):6.2f}")


def main(arguments: list[str]) -> None:
    """Make rows, or score a model."""
    flags = [word for word in arguments if word.startswith("--")]
    words = [word for word in arguments if not word.startswith("--")]
    if words[:1] == ["rows"] and len(words) > 3:
        make_rows(Path(words[1]), Path(words[2]), words[3:])
    elif words[:1] == ["score"] and len(words) > 2:
        score(words[1], [Path(word) for word in words[2:]], flags)
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
