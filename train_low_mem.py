"""The command table, which Fire dispatches; no logic: `settings` checks the flags, each command's module does the work.

A mistake is answered before torch is imported, and every flag is known before anything runs.

Exit codes: 0 done, 2 wrong settings or data, 3 does not fit the budget, or ended over it, 130 interrupted, 1
unforeseen.
"""

from __future__ import annotations

from support.signals import INTERRUPTED, comes_from_interrupt, leave_at_ctrl_c

if __name__ == "__main__":  # before what takes time to import
    leave_at_ctrl_c()

import errno
import os
import platform
import shutil
import sys
import time
import traceback
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from importlib import import_module
from pathlib import Path

from settings.declared import COMMANDS, Config, flags_of
from settings.errors import DoesNotFit, OverBudget, UserError, reason_of, refuse
from settings.fields import AUTO, allowed, counted, nearest
from settings.help import command_help, general_help, versions
from settings.loading import edit_notes, load
from settings.program import IS_INSTALLED, NAME, PACKAGE, full_name, missing, python
from support.language import join, say, speak
from support.screen import guard, visible
from support.terminal import paragraphs

HELP_FLAGS = ("-h", "--help", "-help", "--h")
VERSION_FLAGS = ("--version", "-version", "-V", "version")
BY_ACCELERATE = ("train", "dpo", "evaluate", "quantize")
WIDEST = 100  # columns of what is refused
# Where a command is, if not in the file of its name.
MODULES = {
    "board": ("board.server", "serve"),
    "serve": ("serving.server", "serve"),
    "runs": ("board.commands", "runs"),
}


def main(arguments: Sequence[str]) -> int:
    """Run one command line and return the exit code.

    Args:
        arguments: what follows the program's name.
    """
    for name in ("stdout", "stderr"):
        if getattr(sys, name) is None:  # closed by `>&-`
            setattr(sys, name, open(os.devnull, "w"))  # noqa: SIM115  # for as long as the process lives
    for stream in (sys.stdout, sys.stderr):  # a terminal without UTF-8 must not end a run at the first Chinese letter
        stream.reconfigure(errors="backslashreplace")  # type: ignore[union-attr]
    speak(_typed(arguments, "language", AUTO))  # until all settings are read, which may come from a file
    from training.processes.interrupts import ends_like_ctrl_c  # light

    with guard(), ends_like_ctrl_c():
        return _exit_code(list(arguments))


def _exit_code(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except UserError as error:
        return _refuse(arguments, error)
    except ModuleNotFoundError as error:
        text = missing(error, arguments)
        return _refuse(arguments, UserError(text)) if text else _report_crash(error, arguments)
    except BrokenPipeError:  # The reader of our output has left, as `head` does.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except SystemExit:
        raise
    except BaseException as error:  # A panic of a library in Rust is no Exception.
        if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
            text = say(
                "{place}, cannot be written: {reason}; free some space and start again",
                place=error.filename or say("the output"),
                reason=reason_of(error),
            )
            return _refuse(arguments, UserError(text))
        if comes_from_interrupt(error):
            is_ours = isinstance(error, KeyboardInterrupt)
            _print_end("\n" + ((reason_of(error) if is_ours else "") or say("interrupted")))
            return getattr(error, "code", INTERRUPTED) if is_ours else INTERRUPTED
        return _report_crash(error, arguments)


def _dispatch(arguments: list[str]) -> int:
    name = _name_of(arguments)
    if any(word.partition("=")[0] in HELP_FLAGS for word in arguments) or arguments[:1] == ["help"]:
        everything = any(word.rpartition("=")[2] == "all" for word in arguments)
        print(command_help(name, everything) if name else general_help(), flush=True)
        return 0
    if not arguments:
        print(general_help(), file=sys.stderr)
        return 2
    if arguments[0] in VERSION_FLAGS:
        print(versions(), flush=True)
        return 0
    if not name:
        word = arguments[0]
        text = "{word}, is not a command; the first word must be one of: {commands}{hint}"
        raise UserError(say(text, word=word, commands=join(", ", COMMANDS), hint=nearest(word, COMMANDS)))
    if name in ("check", "serve") and len(arguments) > 1 and not _is_flag(arguments[1]):
        arguments[1] = f"--model={arguments[1]}"
    import fire

    # Fire is given the command alone: its own reading of flags runs a command first and finds a mistyped flag after,
    # takes `--x=false` for a true string, and loses the first two letters of `--noise_density` (python-fire issues 168,
    # 222, 461)
    table = dict.fromkeys(COMMANDS, lambda: _run(name, _load(name, arguments[1:])))
    fire.Fire(table, [name], name=NAME)
    return 0


def _name_of(arguments: Sequence[str]) -> str:
    """The command meant: the first word, or after `help` the second; empty if it is none."""
    words = [word for word in arguments[:2] if word != "help"][:1]
    return words[0] if words and words[0] in COMMANDS else ""


def _parsed(words: Sequence[str]) -> tuple[dict[str, list[str | None]], list[str]]:
    """Flags typed as `--name=value`, `--name value`, `-name=value` or, without a value (None), `--name`; and words that
    are none.
    """
    flags: dict[str, list[str | None]] = {}
    strays = list[str]()
    name = ""  # The flag may have its value in the next word.
    for word in words:
        if _is_flag(word):
            name, equals, value = word.lstrip("-").partition("=")
            name = name.replace("-", "_")
            flags.setdefault(name, []).append(value if equals else None)
            name = "" if equals else name
        elif name and word != "--":
            flags[name][-1] = word
            name = ""
        else:
            strays.append(word)
            name = ""
    return flags, strays


def _is_flag(word: str) -> bool:
    """Whether a word is a flag: `--x`, `-x`; no flag are `-`, `--` and negative numbers."""
    return word.startswith("-") and word.lstrip("-").partition("=")[0] != "" and word[1] not in "0123456789."


def _run(name: str, config: Config) -> None:
    from devices.environment import prepare_environment

    prepare_environment()  # before torch is imported
    is_compiled = "compiled_kernels" in flags_of(name) and name != "plan" and config.run.compiled_kernels
    if is_compiled and config.run.device in (AUTO, "cpu"):
        from devices.kernels.build import library_here

        library_here()  # Compiled now, while this process is small.
    is_new_finetuning = config.train.is_finetune and config.train.is_keep_training is False
    if name == "train" and is_new_finetuning and config.data.train_file is None:
        _print_note(say("no --train_file: finetuning on the built-in samples, pairs from the Python standard library"))
    for note in edit_notes(config, name):
        _print_note(note)
    if name in ("train", "dpo"):
        _train(config)
        return
    module, function = MODULES.get(name, (f"commands.{name}", name))
    try:
        command = import_module(full_name(module))
    except ModuleNotFoundError as error:
        if name not in ("board", "serve"):
            raise
        names: dict[str, object] = {"command": name, "package": error.name, "python": python()}
        if IS_INSTALLED:
            text = "{command}, needs the package {package}; install it: {python} -m pip install '{own}[board]'"
            raise UserError(text, **names, own=PACKAGE) from None
        text = (
            "{command}, needs the package {package}; `make board` installs it and shows the page, or: {python} -m "
            "pip install -r requirements-board.txt -c constraints.txt"
        )
        raise UserError(text, **names) from None
    getattr(command, function)(config)


def _train(config: Config) -> None:
    from training.processes.launch import is_alone
    from training.setup.identify import check_torch_can_load
    from training.setup.stages import prepare_run

    with ExitStack() as locks:
        run = None
        if is_alone():  # Several processes need torch to agree with each other.
            check_torch_can_load(config.run, config.memory.memory_budget)
            run = prepare_run(config, locks)  # Rows are prepared while this process is small.
        from trainer_low_mem import LowMemTrainer

        over_budget = LowMemTrainer(config, run=run).train().over_budget()
    if over_budget:
        raise OverBudget(over_budget)


def _load(name: str, words: Sequence[str]) -> Config:
    from training.processes.launch import foreign_engines, launch_problems  # light

    typed, strays = _parsed(words)
    facts_of = {flag: member.metadata for flag, (_, member) in flags_of(name).items()}
    problems = list[str]()
    raw = dict[str, str]()
    takes_path = next((flag for flag in ("train_file", "model") if flag in facts_of), "")
    for word in strays:
        if takes_path and os.path.exists(word):
            problems.append(say("{word}, is unexpected; write --{flag}={word}", word=word, flag=takes_path))
        else:
            problems.append(say("{word}, is unexpected; write settings as --name=value", word=word))
    if name in BY_ACCELERATE:
        problems += [*foreign_engines(), *launch_problems()]
    for flag, values in typed.items():
        value = values[-1]
        if len(set(values)) > 1:  # The last one counts, as scripts that add theirs at the end expect.
            text = "{name} appears {count} times; the last one, {name}={value}, applies"
            _print_note(say(text, name=f"--{flag}", count=len(values), value=value or ""))
        facts = facts_of.get(flag)
        positive = flag.removeprefix("no").lstrip("_")
        takes_empty = facts is not None and facts["kind"] == "text" and facts["optional"]
        if facts is None and positive != flag and positive in facts_of and facts_of[positive]["kind"] is bool:
            problems.append(say("--{flag}: no such flag; write --{positive}=False", flag=flag, positive=positive))
        elif facts is not None and facts["kind"] is bool and value is None:
            raw[flag] = "True"
        elif flag in ("config", "preset", "model_preset") and not value:
            problems.append(say("--{flag}, needs a value", flag=flag))
        elif facts is not None and (value is None or (value == "" and not takes_empty)):
            # An empty value is a variable of the shell that is not set, but for a text that may be empty.
            text = "--{flag}, needs a value; allowed: {allowed}"
            problems.append(say(text, flag=flag, allowed=allowed(facts)))
        else:
            raw[flag] = value or ""
    try:
        config = load(name, raw)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    refuse(problems)
    speak(config.run.language)
    return config


def _refuse(arguments: Sequence[str], error: UserError) -> int:
    """Print what is wrong; returns the exit code."""
    heading = counted(len(error.problems), "problem")
    if isinstance(error, OverBudget):
        heading = say("done, but over the memory budget")
    elif isinstance(error, DoesNotFit):
        heading = say("does not fit the memory budget")
    lines = [f"  {line}" for problem in error.problems for line in str(problem).splitlines()]
    if sys.stderr.isatty():  # Whoever else reads gets each problem as one line.
        width = min(WIDEST, shutil.get_terminal_size().columns)
        lines = [part for line in lines for part in paragraphs(line, width)]
    title = str(join(": ", [_name_of(arguments) or NAME, heading]))
    _print_end("\n".join([title, *lines]))
    return error.exit_code


def _print_note(text: str) -> None:
    """Print what all processes know, once."""
    from training.processes.launch import rank  # light

    if rank() == 0:
        _print(text)


def _print_end(text: str) -> None:
    """Print why this process ends, unless another process of its run has done so, or nobody reads it any more."""
    from training.processes.launch import is_first_to_end, num_processes, rank  # light

    if not is_first_to_end():
        return
    who = ""
    if rank():
        who = say("process {rank} of {count} on {host}: ", rank=rank(), count=num_processes(), host=platform.node())
    _print(who + text)


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # Nobody reads it; the exit code says how it ended.
        print(text, file=sys.stderr)


def _report_crash(error: BaseException, arguments: Sequence[str]) -> int:
    """Put the traceback into a file, and say where; returns the exit code."""
    text = "".join(traceback.format_exception(error))
    log_files = sys.modules.get(full_name("training.report.log_files"))
    path = log_files.log_crash(text) if log_files else None
    if path is None:
        from training.processes.launch import rank  # light

        suffix = f"_rank{rank()}" if rank() else ""
        path = Path(
            _typed(arguments, "log_dir", Config().run.log_dir), f"crash_{time.strftime('%Y%m%d_%H%M%S')}{suffix}.log"
        )
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(visible(text), encoding="utf8")
        except OSError as unwritable:
            print(f"{text}\n{path}: {unwritable}", file=sys.stderr)
            return 1
    sentence = "unexpected {error}: {summary}; the traceback is in {place}"
    _print_end(say(sentence, error=type(error).__name__, summary=reason_of(error), place=path))
    return 1


def _typed(arguments: Sequence[str], flag: str, otherwise: str) -> str:
    return (_parsed(arguments[1:])[0].get(flag) or [None])[-1] or otherwise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
