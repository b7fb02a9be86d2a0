"""The command line, as a user meets it: real child processes, and a torch that ends the process when it is imported."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import train_low_mem
from config import COMMANDS, flags_of, unlisted
from settings.help import ABOUT, SHORT, command_help
from settings.version import VERSION

ROOT = Path(__file__).resolve().parent.parent
TORCH_IMPORTED = 77
Run = subprocess.CompletedProcess[str]


@pytest.fixture(scope="session")
def fake_libraries(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of modules that tell of their import by the exit code."""
    folder = tmp_path_factory.mktemp("fake")
    for name in ("torch", "pyarrow", "accelerate"):
        (folder / f"{name}.py").write_text(f"import os\nos._exit({TORCH_IMPORTED})\n")
    return folder


def run(folder: Path, fakes: Path | None, *arguments: str, **variables: str) -> Run:
    environment = {**os.environ, "PYTHONPATH": str(fakes or ""), **variables}
    command = [sys.executable, str(ROOT / "train_low_mem.py"), *arguments]
    return subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=120)


@pytest.mark.skipif(os.name == "nt", reason="pipes")
def test_how_it_ended_is_told_where_nobody_listens(tmp_path: Path) -> None:
    read, write = os.pipe()
    os.close(read)
    command = [sys.executable, str(ROOT / "train_low_mem.py"), "train", "--max_steps=none"]
    assert subprocess.run(command, cwd=tmp_path, stderr=write, timeout=120).returncode == 2
    os.close(write)


TRAPS = {
    "mistyped flag": (["train", "--is_finetun=True"], ["--is_finetun: no such flag; did you mean --is_finetune?"]),
    "mistyped flag without a value": (["train", "--is_finetun"], ["did you mean --is_finetune?"]),
    "mistyped command": (["trian"], ["trian, is no command", "did you mean train?"]),
    "flag before the command": (["--max_steps=3", "train"], ["--max_steps=3, is no command", "first word"]),
    "stray word": (["train", "extra", "--max_steps=3"], ["extra, is unexpected"]),
    "a file without its flag": (["train", "."], ["., is unexpected; write --train_file=."]),
    "a word too long for a file": (["train", "a," * 3000], ["is unexpected"]),
    "stray word after the flags": (["train", "--max_steps", "3", "4"], ["4, is unexpected"]),
    "lone hyphen": (["train", "-"], ["-, is unexpected"]),
    "lone hyphen as a value": (["train", "--max_steps", "-"], ["--max_steps = -, is not a whole number"]),
    "Fire's own flags": (["train", "--", "--interactive"], ["--, is unexpected", "--interactive: no such flag"]),
    "nameless flag": (["train", "--=5"], ["--=5, is unexpected"]),
    "lost no": (["train", "--noise_density"], ["--noise_density, needs a value; allowed: 0.01 to 0.9"]),
    "negated switch": (["train", "--nogroup_by_length"], ["write --group_by_length=False"]),
    "negated switch with a hyphen": (["train", "--no-group-by-length"], ["write --group_by_length=False"]),
    "negated flag that does not exist": (["train", "--no-compile"], ["--no_compile: no such flag"]),
    "number without a value": (["train", "--max_steps", "--seed=3"], ["--max_steps, needs a value"]),
    "text without a value": (["train", "--train_file"], ["--train_file, needs a value"]),
    "empty value": (["train", "--output_dir="], ["--output_dir, needs a value"]),
    "empty value of a file": (["train", "--train_file="], ["--train_file, needs a value; allowed: text or none"]),
    "config without a value": (["train", "--config"], ["--config, needs a value"]),
    "missing config": (["train", "--config=missing.yaml"], ["--config = missing.yaml, no such file; name a YAML"]),
    "unknown preset": (["train", "--preset=smaple"], ["--preset = smaple, is not known"]),
    "unknown model": (["train", "--model_preset=t6"], ["--model_preset = t6, is not known"]),
    "infinite": (
        ["train", "--epochs=inf", "--learning_rate=nan"],
        ["--epochs = inf, is not a fin", "--learning_rate = nan, is not a fin"],
    ),
    "no number": (["train", "--learning_rate=fast"], ["--learning_rate = fast, is not a number"]),
    "width of 0": (["train", "--d_model=0"], ["--d_model = 0, is out of range; allowed: 1 or more"]),
    "half a switch": (["train", "--is_finetune=flase"], ["--is_finetune = flase, is neither true nor false"]),
    "half a switch that can be auto": (["train", "--is_keep_training=maybe"], ["yes, no, 1, 0, auto"]),
    "negative number": (["train", "--weight_decay", "-0.1"], ["--weight_decay = -0.1, is out of range"]),
    "flag of another command": (["generate", "--learning_rate=1"], ["--learning_rate: no such flag"]),
    "name of a group that is no flag here": (
        ["train", "--model=folder"],
        ["no such flag of train, but of doctor, evaluate"],
    ),
    "beginning of a flag that another command has": (
        ["train", "--early_stopping=3"],
        ["--early_stopping: no such flag; did you mean --early_stopping_evals?"],
    ),
    "everything at once": (
        ["train", "extra", "--sed=1", "--max_steps=x", "--seed", "--d_ff=0"],
        ["train: 5 problems", "extra", "--sed:", "--max_steps = x", "--seed, needs", "--d_ff = 0"],
    ),
}


@pytest.mark.parametrize("trap", TRAPS)
def test_mistakes_are_answered_before_torch(tmp_path: Path, fake_libraries: Path, trap: str) -> None:
    arguments, parts = TRAPS[trap]
    result = run(tmp_path, fake_libraries, *arguments)
    assert result.returncode == 2, result.stderr
    assert result.stdout == ""
    assert "Traceback" not in result.stderr and "\0" not in result.stderr
    for part in parts:
        assert part in result.stderr
    assert list(tmp_path.iterdir()) == [], "nothing is written"


ACCEPTED = [
    ["--max_steps=5", "--is_finetune=false"],
    ["--max-steps", "5", "-is_finetune=No"],
    ["--max_steps=5", "--is_finetune", "0"],
    ["-max_steps=9", "--max_steps=5", "--train_file=a=b c,*.jsonl"],
]


@pytest.mark.parametrize("flags", ACCEPTED)
def test_ways_to_write_a_flag(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    seen = []
    monkeypatch.setattr(train_low_mem, "_run", lambda name, config: seen.append(config))
    assert train_low_mem.main(["train", *flags]) == 0
    (config,) = seen
    assert config.train.max_steps == 5 and config.train.is_finetune is False
    if flags[-1].startswith("--train_file"):
        assert config.data.train_file == "a=b c,*.jsonl"


@pytest.mark.parametrize(
    "flags", [["--is_finetune"], ["--is_finetune", "--seed=3"], ["--is_finetune=YES"], ["--is-finetune", "1"]]
)
def test_ways_to_turn_a_switch_on(monkeypatch: pytest.MonkeyPatch, flags: list[str]) -> None:
    seen = []
    monkeypatch.setattr(train_low_mem, "_run", lambda name, config: seen.append(config.train.is_finetune))
    assert train_low_mem.main(["train", *flags]) == 0
    assert seen == [True]


def test_of_a_flag_typed_twice_the_last_counts(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    seen: list[object] = []
    monkeypatch.setattr(train_low_mem, "_run", lambda name, config: seen.append(config.train.max_steps))
    assert train_low_mem.main(["train", "--max_steps=5", "--seed=1", "--max-steps", "7", "--seed=1"]) == 0
    assert seen == [7] and capsys.readouterr().err == "--max_steps is typed 2 times; --max_steps=7 counts\n"


def test_text_stays_text(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fire alone would make a number of 1e5 and a list of [1,2]."""
    seen = []
    monkeypatch.setattr(
        train_low_mem, "_run", lambda name, config: seen.append((config.run.run_name, config.data.text_column))
    )
    assert train_low_mem.main(["train", "--run_name=1e5", "--text_column=[1,2]"]) == 0
    assert seen == [("1e5", "[1,2]")]


def test_an_accepted_command_reaches_the_libraries(tmp_path: Path, fake_libraries: Path) -> None:
    assert run(tmp_path, fake_libraries, "train", "--max_steps=1").returncode == TORCH_IMPORTED


@pytest.mark.parametrize("arguments", [["--help"], ["-h"], ["help"], ["trian", "--help"]])
def test_general_help(tmp_path: Path, fake_libraries: Path, arguments: list[str]) -> None:
    result = run(tmp_path, fake_libraries, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    for command in COMMANDS:
        assert f"\n  {command} " in result.stdout


@pytest.mark.parametrize(
    "arguments",
    [
        ["train", "--help"],
        ["train", "--max_steps=3", "-h"],
        ["train", "--", "--help"],
        ["train", "--help=1"],
        ["help", "train"],
    ],
)
def test_help_runs_nothing(tmp_path: Path, fake_libraries: Path, arguments: list[str]) -> None:
    result = run(tmp_path, fake_libraries, *arguments)
    assert (result.returncode, result.stderr) == (0, "")
    assert result.stdout.startswith("train: ")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("command", COMMANDS)
def test_full_help_lists_every_flag(command: str) -> None:
    text = command_help(command, everything=True)
    for flag, (_, member) in flags_of(command).items():
        assert (f"--{flag}  (default " in text) == (flag not in unlisted(command)), flag
        assert flag in unlisted(command) or member.metadata["help"].split()[0] in text
    assert "--config  " in text and all(len(line) <= 120 for line in text.splitlines())
    assert set(ABOUT) == set(COMMANDS)


@pytest.mark.parametrize("command", SHORT)
def test_short_help_shows_what_matters(command: str) -> None:
    named = [flag for flags in SHORT[command].values() for flag in flags]
    text = command_help(command)
    assert len(named) <= 30 and len(set(named)) == len(named)
    assert all(f"  --{flag} " in text for flag in named) and "--help=all" in text
    assert all(len(line) <= 120 for line in text.splitlines())


def test_the_whole_help_is_asked_for(tmp_path: Path, fake_libraries: Path) -> None:
    short, full = (run(tmp_path, fake_libraries, "train", *flag) for flag in (["--help"], ["--help=all"]))
    assert len(full.stdout) > 3 * len(short.stdout) and "--z_loss" in full.stdout and "--z_loss" not in short.stdout


def test_a_command_line_of_train_can_be_planned() -> None:
    assert set(flags_of("train")) <= set(flags_of("plan"))
    assert "run_name" in unlisted("plan") and "memory_budget" not in unlisted("plan")


@pytest.mark.parametrize("word", ["--version", "version"])
def test_the_version(tmp_path: Path, fake_libraries: Path, word: str) -> None:
    result = run(tmp_path, fake_libraries, word)
    assert result.returncode == 0 and result.stdout.startswith(f"FrugalT5 {VERSION} (Python ")
    assert f'version = "{VERSION}"' in (ROOT / "pyproject.toml").read_text("utf8")
    assert f"\n## {VERSION}" in (ROOT / "CHANGELOG.md").read_text("utf8")


def test_without_a_command(tmp_path: Path, fake_libraries: Path) -> None:
    result = run(tmp_path, fake_libraries)
    assert (result.returncode, result.stdout) == (2, "") and "commands:" in result.stderr


def test_only_the_first_process_of_a_launch_tells(tmp_path: Path, fake_libraries: Path) -> None:
    result = run(tmp_path, fake_libraries, "train", "--seed=x", RANK="1")
    assert (result.returncode, result.stderr) == (2, "")
    assert "--seed = x" in run(tmp_path, fake_libraries, "train", "--seed=x", RANK="0").stderr


def crashing(fakes: Path, tmp_path: Path, code: str) -> Path:
    """A folder whose torch raises instead of being a torch."""
    folder = tmp_path / "crash"
    folder.mkdir()
    for name in ("torch", "pyarrow", "accelerate"):
        (folder / f"{name}.py").write_text(code)
    return folder


def test_the_unforeseen_is_one_line_and_a_traceback_in_the_log(tmp_path: Path, fake_libraries: Path) -> None:
    fakes = crashing(fake_libraries, tmp_path, "raise ZeroDivisionError('two\\nlines')")
    result = run(tmp_path, fakes, "train", "--log_dir=my_logs")
    assert result.returncode == 1
    (log,) = (tmp_path / "my_logs").iterdir()
    assert log.name.startswith("crash_") and "Traceback" in log.read_text()
    (line,) = result.stderr.splitlines()
    assert "ZeroDivisionError: two lines" in line and f"my_logs/{log.name}" in line.replace(os.sep, "/")


def test_an_unwritable_log_leaves_the_traceback_on_the_screen(tmp_path: Path, fake_libraries: Path) -> None:
    (tmp_path / "file").write_text("")
    fakes = crashing(fake_libraries, tmp_path, "raise ZeroDivisionError")
    result = run(tmp_path, fakes, "train", "--log_dir", "file")
    assert result.returncode == 1 and "Traceback" in result.stderr


@pytest.mark.parametrize(
    ("code", "exit_code", "told"),
    [
        ("raise KeyboardInterrupt", 130, "interrupted"),
        ("raise KeyboardInterrupt('saved in x')", 130, "saved in x"),
        (
            "from settings import fields as settings; raise settings.DoesNotFit('needs 5 GiB', 'try --memory_mode=ultra')",
            3,
            "does not fit the memory budget",
        ),
        (
            "from settings import fields as settings; raise settings.UserError('--a = 1, is wrong')",
            2,
            "train: 1 problem\n  --a = 1, is wrong",
        ),
    ],
)
def test_exit_codes(tmp_path: Path, fake_libraries: Path, code: str, exit_code: int, told: str) -> None:
    result = run(tmp_path, crashing(fake_libraries, tmp_path, code), "train", "--log_dir=logs")
    assert result.returncode == exit_code
    assert told in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "logs").exists()


def test_a_terminal_without_unicode(tmp_path: Path, fake_libraries: Path) -> None:
    result = run(
        tmp_path, fake_libraries, "train", "--run_name=实验", "--seed=二", PYTHONIOENCODING="ascii", PYTHONUTF8="1"
    )
    assert result.returncode == 2 and "\\u4e8c" in result.stderr


def test_a_reader_that_leaves_early(tmp_path: Path, fake_libraries: Path) -> None:
    command = f'"{sys.executable}" "{ROOT / "train_low_mem.py"}" train --help | "{sys.executable}" -c ""'
    environment = {**os.environ, "PYTHONPATH": str(fake_libraries)}
    result = subprocess.run(
        command, shell=True, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=60
    )
    assert (result.returncode, result.stderr) == (0, "")


def test_a_file_of_settings_from_elsewhere(tmp_path: Path, fake_libraries: Path) -> None:
    (tmp_path / "run.json").write_text(json.dumps({"learning_rate": "fast", "max_stepz": 3}))
    result = run(tmp_path, fake_libraries, "train", "--config=run.json", "--seed=x")
    assert result.returncode == 2
    for part in ("3 problems", "--learning_rate = fast", "did you mean --max_steps?", "--seed = x"):
        assert part in result.stderr
