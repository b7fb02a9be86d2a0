"""The command table, which Fire dispatches; no logic: `settings` checks the flags, each command's module does the work.

A mistake is answered before torch is imported, and every flag is known before anything runs.

Exit codes: 0 done, 2 wrong settings or data, 3 does not fit the budget, or ended over it, 130 interrupted, 1
unforeseen.
"""

from __future__ import annotations

from common.signals import INTERRUPTED, comes_from_interrupt, leave_at_ctrl_c

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

from common.language import join, say, speak
from common.screen import guard, visible
from common.terminal import paragraphs
from settings.declared import COMMANDS, Config, flags_of
from settings.errors import DoesNotFit, OverBudget, UserError, reason_of, refuse
from settings.fields import AUTO, allowed, counted, nearest
from settings.help import command_help, general_help, versions
from settings.loading import edit_notes, load
from settings.program import IS_INSTALLED, NAME, PACKAGE, full_name, missing, python

HELP_FLAGS = ("-h", "--help", "-help", "--h")
VERSION_FLAGS = ("--version", "-version", "-V", "version")
BY_ACCELERATE = ("train", "dpo", "evaluate", "quantize")
WIDEST = 100  # columns of what is refused
# command -> where it is, if not in the file of its name
PLACES = {
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
        return _answered(list(arguments))


def _answered(arguments: list[str]) -> int:
    try:
        return _dispatch(arguments)
    except UserError as error:
        _print_refusal(_name_of(arguments), error)
        return error.exit_code
    except KeyboardInterrupt as interruption:
        return _interrupted(interruption)
    except ModuleNotFoundError as error:
        told = missing(error, arguments)
        if told:
            _print_refusal(_name_of(arguments), UserError(told))
        else:
            _report_crash(error, arguments)
        return 2 if told else 1
    except BrokenPipeError:  # the reader of our output has left, as `head` does
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:
        if error.errno not in (errno.ENOSPC, errno.EDQUOT):
            _report_crash(error, arguments)
            return 1
        place = error.filename or say("the output")
        told = say(
            "{place}, cannot be written: {reason}; free some space and start again",
            place=place,
            reason=reason_of(error),
        )
        _print_refusal(_name_of(arguments), UserError(told))
        return 2
    except SystemExit:
        raise
    except BaseException as error:  # a panic of a library in Rust is no Exception
        if comes_from_interrupt(error):
            return _interrupted(KeyboardInterrupt())
        _report_crash(error, arguments)
        return 1


def _interrupted(interruption: KeyboardInterrupt) -> int:
    from training.report.endings import Interrupted  # light

    _print_end("\n" + (reason_of(interruption) or say("interrupted")))
    return interruption.code if isinstance(interruption, Interrupted) else INTERRUPTED


def _dispatch(arguments: list[str]) -> int:
    name = _name_of(arguments)
    if any(word.partition("=")[0] in HELP_FLAGS for word in arguments) or arguments[:1] == ["help"]:
        everything = any(word.rpartition("=")[2] == "all" for word in arguments)
        print(command_help(name, everything) if name else general_help(), flush=True)
        return 0
    if arguments[:1] and arguments[0] in VERSION_FLAGS:
        print(versions(), flush=True)
        return 0
    if not arguments:
        print(general_help(), file=sys.stderr)
        return 2
    if not name:
        told, word = "{word}, is not a command; the first word must be one of: {commands}{hint}", arguments[0]
        raise UserError(say(told, word=word, commands=join(", ", COMMANDS), hint=nearest(word, COMMANDS)))
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
    others, waiting = list[str](), list(reversed(words))
    while waiting:
        word = waiting.pop()
        name, equals, value = word.lstrip("-").partition("=")
        if not _is_flag(word) or not name:
            others.append(word)
            continue
        has_value = equals or (waiting and not _is_flag(waiting[-1]) and waiting[-1] != "--")
        typed = value if equals else waiting.pop() if has_value else None
        flags.setdefault(name.replace("-", "_"), []).append(typed)
    return flags, others


def _is_flag(word: str) -> bool:
    """Whether a word is a flag: `--x`, `-x`; no flag are `-`, `--` and negative numbers."""
    return word.startswith("-") and word.lstrip("-") != "" and not word[1:2].isdigit() and not word.startswith("-.")


def _run(name: str, config: Config) -> None:
    from devices.environment import prepare_environment

    prepare_environment()  # before torch is imported
    is_compiled = "compiled_kernels" in flags_of(name) and name != "plan" and config.run.compiled_kernels
    if is_compiled and config.run.device in (AUTO, "cpu"):
        from devices.kernels.build import library_here

        library_here()  # compiled now, while this process is small
    learns_pairs, data = config.train.is_finetune and config.train.is_keep_training is False, config.data.train_file
    if name == "train" and learns_pairs and data is None:
        _print_note(say("no --train_file: finetuning on the built-in samples, pairs from the Python standard library"))
    for note in edit_notes(config, name):
        _print_note(note)
    if name in ("train", "dpo"):
        from training.processes.launch import is_alone
        from training.setup.identify import check_torch_can_load
        from training.setup.stages import prepare_run

        with ExitStack() as held:
            run = None
            if is_alone():  # Several processes need torch to agree with each other.
                check_torch_can_load(config.run, config.memory.memory_budget)
                run = prepare_run(config, held)  # Rows are prepared while this process is small.
            from trainer_low_mem import LowMemTrainer

            over_budget = LowMemTrainer(config, run=run).train().over_budget()
        if over_budget:
            raise OverBudget(over_budget)
        return
    module, function = PLACES.get(name, (f"commands.{name}", name))
    try:
        found = import_module(full_name(module))
    except ModuleNotFoundError as error:
        if name not in ("board", "serve"):
            raise
        if IS_INSTALLED:
            way = "{command}, needs the package {package}; install it: {python} -m pip install '{own}[board]'"
        else:
            way = (
                "{command}, needs the package {package}; `make board` installs it and shows the page, or: {python} -m "
                "pip install -r requirements-board.txt -c constraints.txt"
            )
        facts = {"own": PACKAGE} if IS_INSTALLED else {}
        raise UserError(way, command=name, package=error.name, python=python(), **facts) from None
    getattr(found, function)(config)


def _load(name: str, words: Sequence[str]) -> Config:
    from training.processes.launch import foreign_engines, launch_problems  # light

    problems, raw = list[str](), dict[str, str]()
    typed, others = _parsed(words)
    takes = next((flag for flag in ("train_file", "model") if flag in flags_of(name)), "")
    for word in others:
        if takes and os.path.exists(word):  # a file or folder that is there; a word too long for one is not
            problems.append(say("{word}, is unexpected; write --{flag}={word}", word=word, flag=takes))
        else:
            problems.append(say("{word}, is unexpected; write settings as --name=value", word=word))
    if name in BY_ACCELERATE:
        problems += [*foreign_engines(), *launch_problems()]
    taken = {flag: member.metadata for flag, (_, member) in flags_of(name).items()}
    switches = {flag for flag, facts in taken.items() if facts["kind"] is bool}
    for flag, values in typed.items():
        value, positive = values[-1], flag.removeprefix("no").lstrip("_")
        if len(set(values)) > 1:  # the last one counts, as scripts that add theirs at the end expect
            told = "{name} is given {count} times; the last one, {name}={value}, applies"
            _print_note(say(told, name=f"--{flag}", count=len(values), value=value or ""))
        facts = taken.get(flag)
        if facts is None and flag.startswith("no") and positive in switches:
            problems.append(say("--{flag}: no such flag; write --{positive}=False", flag=flag, positive=positive))
        elif flag in switches and value is None:
            raw[flag] = "True"
        elif flag in ("config", "preset", "model_preset") and not value:
            problems.append(say("--{flag}, needs a value", flag=flag))
        # empty, but for a text that may be none: a variable of the shell that is not set
        elif facts and not value and not (value == "" and facts["kind"] == "text" and facts["optional"]):
            told = "--{flag}, needs a value; allowed: {allowed}"
            problems.append(say(told, flag=flag, allowed=allowed(facts)))
        else:
            raw[flag] = value or ""
    try:
        config = load(name, raw)
    except UserError as error:
        raise UserError(*problems, *error.problems) from None
    refuse(problems)
    speak(config.run.language)
    return config


def _print_refusal(name: str, error: UserError) -> None:
    if isinstance(error, OverBudget):
        heading = say("done, but over the memory budget")
    elif isinstance(error, DoesNotFit):
        heading = say("does not fit the memory budget")
    else:
        heading = counted(len(error.problems), "problem")
    lines = [f"  {line}" for problem in error.problems for line in str(problem).splitlines()]
    if sys.stderr.isatty():  # whoever else reads gets each problem as one line
        room = min(WIDEST, shutil.get_terminal_size().columns)
        lines = [part for line in lines for part in paragraphs(line, room)]
    told = "\n".join([str(join(": ", [name or NAME, heading])), *lines])
    _print_end(told)


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
    facts = {"rank": rank(), "count": num_processes(), "host": platform.node()}
    who = say("process {rank} of {count} on {host}: ", **facts) if rank() else ""
    _print(who + text)


def _print(text: str) -> None:
    with suppress(OSError, ValueError):  # Nobody reads it; the exit code says how it ended.
        print(text, file=sys.stderr)


def _report_crash(error: BaseException, arguments: Sequence[str]) -> None:
    text = "".join(traceback.format_exception(error))
    tracking = sys.modules.get(full_name("training.report.log_files"))
    place = tracking.log_crash(text) if tracking else None
    if place is None:
        from training.processes.launch import rank  # light

        suffix = f"_rank{rank()}" if rank() else ""
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
    summary = reason_of(error)
    told = "unexpected {error}: {summary}; the traceback is in {place}"
    _print_end(say(told, error=type(error).__name__, summary=summary, place=place))


def _typed(arguments: Sequence[str], flag: str, otherwise: str) -> str:
    return (_parsed(arguments[1:])[0].get(flag) or [None])[-1] or otherwise


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
