"""Raw words become values of the right type, or sentences that say what is allowed."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path
from typing import Any

import pytest

from settings.declared import COMMANDS, flags_of
from settings.errors import UserError
from settings.fields import declared, parse, read_settings_file, setting
from settings.loading import load
from settings.names import LONGEST_NAME, LONGEST_NAME_BYTES, name_problem
from settings.precedence import aliases
from settings.program import needs


def field_of(annotation: str, **facts: Any) -> dataclasses.Field[Any]:
    group = dataclasses.make_dataclass("Group", [("x", annotation, setting(None, "help", **facts))])
    return declared(dataclasses.fields(group)[0])


@pytest.mark.parametrize(
    ("facts", "word", "value"),
    [
        (dict(annotation="int"), "1e3", 1000),
        (dict(annotation="int"), "9007199254740993", 9007199254740993),  # A float cannot hold it exactly.
        (dict(annotation="Size"), "1.5GiB", 3 * 2**29),
        (dict(annotation="str", choices=("cosine",)), "Cosine", "cosine"),
        (dict(annotation="int | Auto"), " AUTO ", "auto"),
        (dict(annotation="str | None"), "", None),
    ],
)
def test_values(facts: dict[str, Any], word: object, value: object) -> None:
    parsed = parse(field_of(**facts), word)
    assert parsed == value and type(parsed) is type(value)


def test_a_size_without_its_unit_is_asked_about() -> None:
    with pytest.raises(UserError, match=r"--memory_budget.*512M"):
        load("train", {"memory_budget": "512"})


@pytest.mark.parametrize("text", ["3: 4\nnull: 5\n", f"seed: 0x{'f' * 5000}\n", "seed: [1"])
def test_a_file_of_settings_that_makes_no_sense_is_named(tmp_path: Path, text: str) -> None:
    (tmp_path / "a.yaml").write_text(text)
    with pytest.raises(UserError, match=r"--config = .*a\.yaml"):
        read_settings_file(tmp_path / "a.yaml")


def test_a_value_that_repeats_itself_is_not_printed(tmp_path: Path) -> None:
    """YAML can name one list a billion times in a few lines."""
    lines = ["a: &a [x, x, x, x, x, x, x, x, x]"]
    lines += [f"{new}: &{new} [{', '.join(['*' + old] * 9)}]" for old, new in zip("abcdefgh", "bcdefghi", strict=True)]
    (tmp_path / "a.yaml").write_text("\n".join([*lines, "max_steps: *i"]))
    with pytest.raises(UserError, match="--max_steps") as caught:
        load("train", {"config": str(tmp_path / "a.yaml")})
    assert len(str(caught.value)) < 5000


@pytest.mark.parametrize(
    ("command", "flag", "value", "advice"),
    [
        ("train", "lr", "1e-4", "--learning_rate=1e-4"),
        ("train", "model_path", "folder", "--finetune_from=folder"),
        ("chat", "model_path", "folder", "--model=folder"),
        ("train", "streaming", "True", "omit it"),
        ("merge", "lr", "1", "--help"),  # It has nothing of the kind.
        ("train", "weights_decay_rate_of_mine", "1", "--help"),  # It is like nothing there is.
    ],
)
def test_flags_of_other_programs_are_answered_with_ours(command: str, flag: str, value: str, advice: str) -> None:
    with pytest.raises(UserError, match=f"--{flag}: .*{advice}"):
        load(command, {flag: value})


@pytest.mark.parametrize("command", COMMANDS)
def test_advice_names_no_flag_that_the_command_lacks(command: str) -> None:
    flags = dict.fromkeys(aliases().keys() - flags_of(command).keys(), "1")
    with pytest.raises(UserError) as refused:
        load(command, {name: value for name, value in flags.items() if "." not in name})
    allowed = {*flags_of(command), "config", "preset", "model_preset"}
    for problem in refused.value.problems:
        _, _, advice = problem.partition(": no such flag")
        assert set(re.findall(r"--([a-z]\w+)", advice)) <= allowed | {"help"}, problem


def test_names_of_runs() -> None:
    for name in ("x" * LONGEST_NAME, "训" * (LONGEST_NAME_BYTES // 3), "v1.2"):
        assert name_problem(name) is None
    for name in ("x" * (LONGEST_NAME + 1), "训" * (LONGEST_NAME_BYTES // 3 + 1), "", "..", "a/b", "a\n", "m\udcfe"):
        assert name_problem(name)


def test_a_package_that_is_not_there_is_named_with_what_installs_it() -> None:
    with pytest.raises(UserError, match=r"--format = gguf.* -m pip install no-such-package"):
        needs("no-such-package", "--format = gguf", module="no_such_package")
