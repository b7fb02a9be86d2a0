"""The command line, as a user meets it. Children of their own where a torch that ends the process shows that none was
imported.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import train_low_mem
from settings.declared import COMMANDS, Config, flags_of, unlisted
from settings.help import ABOUT, SHORT, command_help

ROOT = Path(__file__).resolve().parent.parent
TORCH_IMPORTED = 77
Run = subprocess.CompletedProcess[str]


def fakes(folder: Path, code: str = f"import os\nos._exit({TORCH_IMPORTED})\n") -> Path:
    """A folder whose heavy libraries do something else than a torch does."""
    folder.mkdir()
    for name in ("torch", "pyarrow", "accelerate"):
        (folder / f"{name}.py").write_text(code)
    return folder


def run(folder: Path, fakes: Path, *arguments: str, **variables: str) -> Run:
    environment = {**os.environ, "PYTHONPATH": str(fakes), **variables}
    command = [sys.executable, str(ROOT / "train_low_mem.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


def test_mistakes_are_answered_before_torch_and_nothing_is_written(tmp_path: Path) -> None:
    (tmp_path / "here").mkdir()
    fake = fakes(tmp_path / "fake")
    result = run(tmp_path / "here", fake, "train", "extra", "--seed=二", PYTHONIOENCODING="ascii", PYTHONUTF8="1")
    assert (result.returncode, result.stdout) == (2, "")
    assert "extra" in result.stderr and "\\u4e8c" in result.stderr, "as a terminal without UTF-8 can show it"
    result = run(tmp_path / "here", fake, "train", "--seed=x", RANK="1", WORLD_SIZE="2")
    assert (result.returncode, result.stderr) == (2, ""), "the first process of a launch tells"
    assert list((tmp_path / "here").iterdir()) == []
    result = run(tmp_path / "here", fake, "train", "--is_finetune=True")
    assert result.returncode == TORCH_IMPORTED and "--train_file" in result.stderr.splitlines()[0], (
        "it learns the samples"
    )


@pytest.fixture
def runs(monkeypatch: pytest.MonkeyPatch) -> list[Config]:
    """The settings that a command would have run with."""
    configs: list[Config] = []
    monkeypatch.setattr(train_low_mem, "_run", lambda name, config: configs.append(config))
    return configs


@pytest.mark.parametrize(
    ("flags", "is_finetune"),
    [
        (["--max-steps", "5", "-is_finetune=No"], False),
        (["-max_steps=9", "--max_steps=5", "--train_file=a=b c,*.jsonl"], False),
        (["--max_steps=5", "--is-finetune", "1"], True),
    ],
)
def test_ways_to_write_a_flag(runs: list[Config], flags: list[str], is_finetune: bool) -> None:
    assert train_low_mem.main(["train", *flags]) == 0
    assert runs[0].train.max_steps == 5 and runs[0].train.is_finetune is is_finetune
    assert runs[0].data.train_file == ("a=b c,*.jsonl" if "-max_steps=9" in flags else None)


def test_of_a_flag_typed_twice_the_last_counts_and_text_stays_text(
    runs: list[Config], capsys: pytest.CaptureFixture[str]
) -> None:
    words = ["--max_steps=5", "--seed=1", "--max-steps", "7", "--seed=1", "--run_name=1e5", "--text_column=[1,2]"]
    assert train_low_mem.main(["train", *words]) == 0
    assert (runs[0].train.max_steps, runs[0].run.run_name, runs[0].data.text_column) == (7, "1e5", "[1,2]")
    assert "--max_steps" in capsys.readouterr().err


def test_full_help_lists_every_flag_and_short_help_what_matters() -> None:
    assert set(ABOUT) == set(COMMANDS)
    for command in COMMANDS:
        text = command_help(command, everything=True)
        assert "--config  " in text and all(len(line) <= 120 for line in text.splitlines())
        for flag in flags_of(command):
            assert (f"--{flag}  (default " in text) == (flag not in unlisted(command)), flag
    for command, tasks in SHORT.items():
        text = command_help(command)
        assert all(f"  --{flag} " in text for flags in tasks.values() for flag in flags) and "--help=all" in text


def test_the_unforeseen_is_one_line_and_a_traceback_in_the_log(tmp_path: Path) -> None:
    fake = fakes(tmp_path / "fake", "raise ZeroDivisionError('two\\nlines')")
    result = run(tmp_path, fake, "train", "--log_dir=my_logs")
    assert result.returncode == 1
    (log,) = (tmp_path / "my_logs").iterdir()
    assert log.name.startswith("crash_") and "Traceback" in log.read_text()
    (line,) = result.stderr.splitlines()
    assert "ZeroDivisionError: two lines" in line and f"my_logs/{log.name}" in line.replace(os.sep, "/")
    unwritable = run(tmp_path, fake, "train", "--log_dir", "fake/torch.py")
    assert unwritable.returncode == 1 and "Traceback" in unwritable.stderr
