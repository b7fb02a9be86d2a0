"""What can be typed? The command table; no logic: `config.py` checks the flags, each command's module does the work.

A mistake is answered before torch is imported. Fire dispatches, and gets nothing to guess: its own reading of flags
runs a command first and finds a mistyped flag after, takes `--x=false` for a true string, and loses the first two
letters of `--noise_density` (python-fire issues 168, 222 and 461). So every argument is rewritten to `--name=value`.

Exit codes: 0 done, 2 wrong settings or data, 3 does not fit the budget, 130 interrupted, 1 unforeseen.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
import sys
import textwrap
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

from config import COMMANDS, GROUPS, Config, DoesNotFit, UserError, flags_of, load
from language import speak
from screen import guard, visible
from settings.fields import AUTO, allowed, counted, show
from settings.precedence import model_presets, run_presets

PROGRAM = "python train_low_mem.py"
ABOUT = {
    "train": "pretrain a T5; --is_finetune=True finetunes, --is_keep_training=True resumes the last run",
    "dpo": "continue from a trained model with preferences: prompt, chosen and rejected answer (DPO, IPO, ORPO)",
    "plan": "predict peak memory and speed, and show the choice, its parts and what else could be done",
    "doctor": "what this machine offers and limits, measured; with --model_preset also what a model takes; advice last",
    "tokenizer": "train a tokenizer on --train_file in bounded memory",
    "prepare": "turn text, JSONL, CSV, Parquet or Arrow into token shards",
    "evaluate": "loss, perplexity and scored answers of a trained model on --validation_file",
    "convert": "write a checkpoint of the T5 family, old or new, as a plain Hugging Face folder, and compare both",
    "export": "write a trained model for llama.cpp (GGUF), CTranslate2 or ONNX runtimes, and check it",
    "merge": "put adapters into the weights of their base: a plain model folder",
    "quantize": "write a model with int8 weights, one byte each, and tell what that changes",
    "check": "compare a folder's files with the sums they were written with: check FOLDER",
    "generate": "answer a text, or a file of prompts, with a trained model",
    "chat": "talk with a trained model in the terminal",
    "runs": "list the runs, how they stand and what they take on the disk; --delete=NAME removes one",
    "board": "a page in the browser: start runs, watch them, talk with what was trained",
    "serve": "an HTTP API over a trained model, for clients of OpenAI's: serve MODEL",
}
HELP_FLAGS = ("-h", "--help", "-help", "--h")
# The value of a flag typed without one, and the head of a word that Fire must not read as its own. No command line can
# hold a NUL, so nothing typed is mistaken for it.
NO_VALUE = "\0"


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    Args:
        arguments: what follows the program's name.
    """
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 must not end a run at the first Chinese letter
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    speak(_typed(arguments, "language", AUTO))  # until all settings are read, which may come from a file
    with guard():
        return _answered(list(arguments))


def _answered(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except UserError as error:
        _print_refusal(_name_of(arguments), error)
        return error.exit_code
    except KeyboardInterrupt as interruption:
        _print_once(f"\n{str(interruption) or 'interrupted'}")
        return 130
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        _report_crash(error, arguments)
        return 1


def _dispatch(arguments: list[str]) -> int:
    name = _name_of(arguments)
    if any(word.partition("=")[0] in HELP_FLAGS for word in arguments) or arguments[:1] == ["help"]:
        print(command_help(name) if name else general_help(), flush=True)
        return 0
    if not arguments:
        print(general_help(), file=sys.stderr)
        return 2
    if not name:
        near = difflib.get_close_matches(arguments[0], COMMANDS, n=1)
        hint = f"; did you mean {near[0]}?" if near else ""
        raise UserError(f"{arguments[0]}, is no command; the first word is one of: {', '.join(COMMANDS)}{hint}")
    if name in ("check", "serve") and len(arguments) > 1 and not _is_flag(arguments[1]):
        arguments[1] = f"--model={arguments[1]}"
    import fire

    table = {command: _fire_command(command) for command in COMMANDS}
    fire.Fire(table, [name, *_normalised(arguments[1:])], name="train_low_mem.py")
    return 0


def _name_of(arguments: Sequence[str]) -> str:
    """The command meant: the first word, or after `help` the second; empty if it is none."""
    words = [word for word in arguments[:2] if word != "help"][:1]
    return words[0] if words and words[0] in COMMANDS else ""


def _normalised(arguments: list[str]) -> list[str]:
    """Rewrite `--name value`, `-name=value` and `--name` to `--name=value`; other words stay, to be refused."""
    result: list[str] = []
    position = 0
    while position < len(arguments):
        word = arguments[position]
        position += 1
        name, equals, value = word.lstrip("-").partition("=")
        if not _is_flag(word) or not name:
            result.append(NO_VALUE + word)
            continue
        if not equals:
            has_value = position < len(arguments) and not _is_flag(arguments[position]) and arguments[position] != "--"
            value = arguments[position] if has_value else NO_VALUE
            position += has_value
        result.append(f"--{name.replace('-', '_')}={value}")
    return result


def _is_flag(word: str) -> bool:
    """Whether a word is a flag: `--x`, `-x`; no flag are `-`, `--` and negative numbers."""
    return word.startswith("-") and word.lstrip("-") != "" and not word[1:2].isdigit() and not word.startswith("-.")


def _fire_command(name: str) -> Callable[..., None]:
    from fire import decorators

    @decorators.SetParseFn(str)
    def command(*unexpected: str, **flags: str) -> None:
        _run(name, _load(name, unexpected, flags))

    command.__doc__ = ABOUT[name]
    return command


def _run(name: str, config: Config) -> None:
    from devices.environment import prepare_environment

    prepare_environment()  # before torch is imported
    if name in ("train", "dpo"):
        from trainer_low_mem import LowMemTrainer

        LowMemTrainer(config).train()
    elif name in ("board", "serve"):
        _serve(name, config)
    elif name == "runs":
        from board.commands import runs

        runs(config)
    elif name == "plan":
        from commands.plan import show

        show(config)
    else:
        getattr(import_module(f"commands.{name}"), name)(config)


def _serve(name: str, config: Config) -> None:
    """Commands that need packages of their own."""
    try:
        module = import_module("board.server" if name == "board" else "serving.server")
    except ModuleNotFoundError as error:
        raise UserError(
            f"{name}, needs the package {error.name}; install it with "
            "pip install -r requirements-board.txt -c constraints.txt, or start with make board"
        ) from None
    module.serve(config)


def _load(name: str, unexpected: Sequence[str], flags: dict[str, str]) -> Config:
    """Check everything that was typed, so that all problems are told at once."""
    problems = [f"{word.lstrip(NO_VALUE)}, is unexpected; settings are written --name=value" for word in unexpected]
    taken = {flag: member.metadata for flag, (_, member) in flags_of(name).items()}
    switches = {flag for flag, facts in taken.items() if facts["kind"] is bool}
    raw: dict[str, str] = {}
    for flag, value in flags.items():
        positive = flag.removeprefix("no").lstrip("_")
        if flag not in taken and flag.startswith("no") and positive in switches:
            problems.append(f"--{flag}: no such flag; write --{positive}=False")
        elif flag in switches and value == NO_VALUE:
            raw[flag] = "True"
        elif flag in ("config", "preset", "model_preset") and value in (NO_VALUE, ""):
            problems.append(f"--{flag}, needs a value")
        elif flag in taken and (value == NO_VALUE or (value == "" and not _may_be_empty(taken[flag]))):
            problems.append(f"--{flag}, needs a value; allowed: {allowed(taken[flag])}")
        else:
            raw[flag] = value.strip(NO_VALUE)
    try:
        config = load(name, raw)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    if problems:
        raise UserError(*problems)
    speak(config.run.language)
    return config


def _may_be_empty(facts: Mapping[str, Any]) -> bool:
    """Whether nothing is a value: where text is kept as it is. Elsewhere it is a variable of the shell that is not set."""
    return facts["kind"] == "text" and facts["optional"]


def general_help() -> str:
    """The commands, one line each."""
    lines = [f"  {name:10} {ABOUT[name]}" for name in COMMANDS]
    usage = f"usage: {PROGRAM} COMMAND [--flag=value ...]"
    return "\n".join([usage, "", "commands:", *lines, "", f"{PROGRAM} COMMAND --help lists the flags of a command."])


def command_help(name: str) -> str:
    """Every flag of one command by group: default, allowed values, unit and a line of help."""
    lines = [f"{name}: {ABOUT[name]}", "", f"usage: {PROGRAM} {name} [--flag=value ...]"]
    lines += ["order: defaults < preset < file < flags; True and False also as yes, no, 1, 0; sizes as 6G, 512M", ""]
    preset = "none; without train_file: sample" if name == "train" else "none"
    lines += _flag_help("config", "none", "YAML or JSON file of settings", "a file")
    lines += _flag_help("preset", preset, "settings by machine and goal", " | ".join(run_presets()))
    lines += _flag_help("model_preset", Config().model_preset, "shape of the model", " | ".join(model_presets()))
    group = ""
    for flag, (its_group, member) in flags_of(name).items():
        if its_group != group:
            group = its_group
            lines += ["", f"{group}: {_first_line(GROUPS[group])}"]
        default = "none" if member.default is None else show(member, member.default)
        lines += _flag_help(flag, default, member.metadata["help"], allowed(member.metadata))
    return "\n".join(lines)


def _first_line(group: object) -> str:
    assert isinstance(group, type) and dataclasses.is_dataclass(group)
    return (group.__doc__ or "").split("\n")[0]


def _flag_help(flag: str, default: str, text: str, values: str) -> list[str]:
    told = textwrap.wrap(f"{text} [{values}]", 100, break_long_words=False, break_on_hyphens=False)
    return [f"  --{flag}  (default {default})", *(f"      {line}" for line in told)]


def _print_refusal(name: str, error: UserError) -> None:
    if isinstance(error, DoesNotFit):
        heading = "does not fit the memory budget"
    else:
        heading = counted(len(error.problems), "problem")
    lines = [f"  {line}" for problem in error.problems for line in problem.splitlines()]
    _print_once("\n".join([f"{name or 'train_low_mem.py'}: {heading}", *lines]))


def _print_once(text: str) -> None:
    """Every process of a launch comes to the same end; the first one tells it."""
    if _rank() == 0:
        print(text, file=sys.stderr)


def _rank() -> int:
    from training.processes.launch import rank  # light; anything else of training/ loads torch

    return rank()


def _report_crash(error: BaseException, arguments: Sequence[str]) -> None:
    """Put the traceback where a bug report finds it, and one line on the screen."""
    text = "".join(traceback.format_exception(error))
    tracking = sys.modules.get("training.report.tracking")
    place = tracking.log_crash(text) if tracking else None
    if place is None:
        suffix = f"_rank{_rank()}" if _rank() else ""
        place = (
            Path(_typed(arguments, "log_dir", Config().run.log_dir))
            / f"crash_{time.strftime('%Y%m%d_%H%M%S')}{suffix}.log"
        )
        try:
            place.parent.mkdir(parents=True, exist_ok=True)
            place.write_text(visible(text), encoding="utf8")
        except OSError as unwritable:
            print(f"{text}\n{place}: {unwritable}", file=sys.stderr)
            return
    summary = " ".join(str(error).split())[:200]
    print(f"unforeseen {type(error).__name__}: {summary}; the traceback is in {place}", file=sys.stderr)


def _typed(arguments: Sequence[str], flag: str, otherwise: str) -> str:
    """The value of a flag as it was typed, where the settings are not read yet or have failed."""
    for word in _normalised(list(arguments[1:])):
        if word.startswith(f"--{flag}=") and NO_VALUE not in word:
            return word.partition("=")[2]
    return otherwise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
