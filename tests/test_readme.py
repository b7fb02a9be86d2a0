"""Every command of the READMEs and of docs/ is one that works: it parses here, and those of the first hour are run in
tests/end_to_end.
"""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest

from benchmarks.checks import plan_table
from settings.declared import COMMANDS, ROOT
from settings.loading import load

PAGES = ("README.md", "README.zh-CN.md")
DOCS = tuple(sorted(path.relative_to(ROOT).as_posix() for path in (ROOT / "docs").glob("*.md")))


def commands_of(page: str) -> list[str]:
    """Lines of the code blocks that are unmarked or marked as bash; a line that ends in a backslash goes on."""
    text = (ROOT / page).read_text(encoding="utf8")
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", text, flags=re.DOTALL | re.MULTILINE)
    lines = (block.replace("\\\n", " ").splitlines() for language, block in blocks if language in ("", "bash"))
    return [line for block in lines for line in block if shlex.split(line, comments=True)]


OURS = [line for page in DOCS for line in commands_of(page) if re.search(r"^make |train_low_mem\.py \w", line)]


@pytest.mark.parametrize("line", dict.fromkeys([*(line for page in PAGES for line in commands_of(page)), *OURS]))
def test_the_command_is_one_that_exists(line: str) -> None:
    words = shlex.split(line.partition(" > ")[0], comments=True)
    if words[0] == "make":
        assert re.search(rf"^{words[1]}:", (ROOT / "Makefile").read_text(), re.MULTILINE), line
        words = ["train_low_mem.py", "train", *shlex.split(words[2].removeprefix("ARGS="))] if len(words) > 2 else []
    if "train_low_mem.py" in words:
        command, *flags = words[words.index("train_low_mem.py") + 1 :]
        assert command in COMMANDS
        named = [flag for flag in flags if flag.startswith("--")]  # the others: FOLDER of check, MODEL of serve
        load(command, dict(flag.removeprefix("--").split("=", 1) for flag in named))
    elif words:
        assert words[0] in ("pip", "tail"), line


@pytest.mark.parametrize("page", PAGES)
def test_every_command_is_named(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf8")
    assert all(f"`{command}`" in text for command in COMMANDS)


def test_both_languages_say_the_same() -> None:
    """The same headings in the same order, the same flags, links, code and images."""
    english, chinese = ((ROOT / page).read_text(encoding="utf8") for page in PAGES)
    assert len(re.findall(r"^## ", english, re.MULTILINE)) == len(re.findall(r"^## ", chinese, re.MULTILINE))
    named = r"--[a-z_]+|docs/[\w./-]+|^make \w+"
    missing = set(re.findall(named, english, re.MULTILINE)) - set(re.findall(named, chinese, re.MULTILINE))
    assert not missing


@pytest.mark.parametrize("page", [*PAGES, *DOCS, "CONTRIBUTING.md"])
def test_links_and_files_named_exist(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf8")
    links = re.findall(r"\]\(([^)#:]+)\)", text)
    homes = re.findall(r"`((?:engine|model|memory|data|devices|training|benchmarks|docs)/[\w/.]+)`", text)
    missing = [
        name
        for name in [*links, *homes]
        if not (ROOT / page).parent.joinpath(name).exists() and not (ROOT / name).exists()
    ]
    assert not [name for name in missing if Path(name).parts[:2] != ("data", "cache")]


@pytest.mark.slow
@pytest.mark.parametrize("page", [*PAGES, "docs/finetuning.md"])
def test_the_table_of_models_and_machines_is_current(page: str) -> None:
    text = (ROOT / page).read_text(encoding="utf8")
    assert plan_table.with_table(text) == text, "run: python -m benchmarks.checks.plan_table"
