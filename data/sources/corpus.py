"""Text that every Python installation carries, to train on when nobody names a file.

- prose: docstrings and comments of the standard library's modules, the language reference behind `help()`, the licence.
- pairs: the source of a function without its docstring -> the first line of that docstring.

Real text, no download, nothing to vendor. It differs a little between Python versions, so it is kept by version;
modules that are missing or cannot be parsed are left out.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import platform
import re
import sysconfig
import textwrap
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from importlib import import_module
from pathlib import Path
from typing import BinaryIO

from data.sources.lines import batches
from settings.errors import UserError
from support.storage import Once, make_once

FORMAT = 1  # raise it when the same installation would give other text
LEFT_OUT = {
    "test",
    "tests",
    "idlelib",
    "idle_test",
    "lib2to3",
    "site-packages",
    "dist-packages",
    "encodings",
    "turtledemo",
    "__pycache__",
    "ensurepip",
    "pydoc_data",
    "config",
    "__phello__",
    "msilib",
    "distutils",
}
DOCUMENT_CHARS = 2000  # short docstrings of one module share a document up to about this length
COMMENT_BLOCK = re.compile(r"(?m)(?:^[^\S\n]*#.*$\n?){3,}")  # Shorter ones say little.
COMMENT_MARKS = re.compile(r"(?m)^[^\S\n]*#+ ?|[^\S\n]+$")
PROMPT_CHARS = (40, 1000)
RESPONSE_CHARS = (15, 120)


@dataclass(frozen=True)
class SampleCorpus:
    """Files of the built-in corpus: `text` has column text, `pairs` has columns prompt and response, both JSONL."""

    text: Path
    pairs: Path


def build_sample_corpus(cache_dir: str | Path, once: Once = make_once) -> SampleCorpus:
    """Build the corpus under `cache_dir`, or find it there.

    Args:
        once: `make_once`, or `only_if_made`.
    Returns:
        two JSONL files, some MB of prose and some thousand pairs.
    Raises:
        UserError: this Python carries no sources, or the folder cannot be written.
    """
    folder = Path(cache_dir) / f"sample-python-{platform.python_version()}-{FORMAT}"
    once(folder, _build)
    return SampleCorpus(folder / "text.jsonl", folder / "pairs.jsonl")


def _build(folder: Path) -> None:
    folder.mkdir()
    digests: set[bytes] = set()
    documents = rows = 0
    with (folder / "text.jsonl").open("wb") as text, (folder / "pairs.jsonl").open("wb") as pairs:
        for document in _reference():
            documents += _write(text, digests, {"text": document})
        for source, tree in _modules():
            for document in _documents(_prose(source, tree)):
                documents += _write(text, digests, {"text": document})
            for prompt, response in _pairs(source, tree):
                rows += _write(pairs, digests, {"prompt": prompt, "response": response})
    if documents < 100 or rows < 100:
        raise UserError(
            "--train_file: this Python carries no sources to build the sample from; give a file of your own"
        )


def _write(file: BinaryIO, digests: set[bytes], row: dict[str, str]) -> int:
    """Write a row unless it was written before; how many were written."""
    line = json.dumps(row, ensure_ascii=False).encode("utf8", "replace")  # a docstring may hold half a surrogate pair
    digest = hashlib.blake2b(line, digest_size=8).digest()
    if digest in digests:
        return 0
    digests.add(digest)
    file.write(line + b"\n")
    return 1


def _reference() -> Iterator[str]:
    """Topics of `help()` in the order of their names, and the licence."""
    try:
        topics = sorted(import_module("pydoc_data.topics").topics.items())
    except ImportError:
        topics = []
    for _, topic in topics:
        yield from _documents([paragraph.strip("\n") for paragraph in topic.split("\n\n") if paragraph.strip()])
    licence = _library() / "LICENSE.txt"
    if licence.is_file():
        yield from _documents(licence.read_text(encoding="utf8").split("\n\n"))


def _library() -> Path:
    return Path(sysconfig.get_paths()["stdlib"])


def _modules() -> Iterator[tuple[str, ast.Module]]:
    """Source and syntax tree of each module, in the order of paths."""
    for folder, names, files in os.walk(_library()):
        names[:] = sorted(name for name in names if name not in LEFT_OUT and not name.startswith("config-"))
        for file in sorted(files):
            if not file.endswith(".py") or file.startswith("_sysconfigdata"):
                continue
            try:
                source = Path(folder, file).read_text(encoding="utf8")
                with warnings.catch_warnings():  # old escapes in the library are not the user's concern
                    warnings.simplefilter("ignore")
                    tree = ast.parse(source)
            except (OSError, ValueError, SyntaxError, RecursionError):
                continue
            yield source, tree


def _prose(source: str, tree: ast.Module) -> list[str]:
    """Docstrings and comment blocks of a module in the order of lines."""
    texts = [
        (getattr(node, "lineno", 0), ast.get_docstring(node) or "")
        for node in ast.walk(tree)
        if isinstance(node, (ast.Module, ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef))
    ]
    return [text for _, text in sorted(texts + _comments(source)) if " " in text]


def _comments(source: str) -> list[tuple[int, str]]:
    """Blocks of comment lines, each with the number of lines before it."""
    blocks = COMMENT_BLOCK.finditer(source)
    return [(source.count("\n", 0, block.start()), COMMENT_MARKS.sub("", block[0]).strip()) for block in blocks]


def _documents(paragraphs: Iterable[str]) -> Iterator[str]:
    """Join neighbouring paragraphs into documents of useful length."""
    return map("\n\n".join, batches(paragraphs, DOCUMENT_CHARS, len))


def _pairs(source: str, tree: ast.Module) -> Iterator[tuple[str, str]]:
    lines = source.splitlines()
    for node in ast.walk(tree):
        if not isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            continue
        if len(node.body) > 1 and node.body[0].lineno > node.lineno:
            response = (ast.get_docstring(node) or "").split("\n", 1)[0].strip()
            prompt = _without_docstring(lines, node)
            if _within(prompt, PROMPT_CHARS) and _within(response, RESPONSE_CHARS) and " " in response:
                yield prompt, response


def _without_docstring(lines: list[str], node: ast.FunctionDef | ast.AsyncFunctionDef) -> str:
    docstring = node.body[0]
    code = lines[node.lineno - 1 : docstring.lineno - 1] + lines[docstring.end_lineno : node.end_lineno]
    return textwrap.dedent("\n".join(line for line in code if line.strip()))


def _within(text: str, bounds: tuple[int, int]) -> bool:
    return bounds[0] <= len(text) <= bounds[1]
