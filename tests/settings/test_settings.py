"""Raw words become values of the right type, or sentences that say what is allowed."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from settings.declared import COMMANDS, flags_of
from settings.errors import UserError
from settings.fields import read_settings_file
from settings.loading import load
from settings.names import LONGEST_NAME, LONGEST_NAME_BYTES, name_problem
from settings.precedence import aliases
from settings.program import needs


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
    with pytest.raises(UserError, match=r"-m pip install no-such-package gguf"):
        needs("no-such-package", "--format", module="no_such_package", install=("no-such-package", "gguf"))
