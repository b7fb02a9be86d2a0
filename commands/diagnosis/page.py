"""How does the report of `doctor` look? Tables that fit a terminal of 80 columns."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import Any

from rich.console import Console
from rich.table import Table
from rich.text import Text

from commands.diagnosis.trials import trial_name
from language import join, say
from memory.cost.precision import COMPUTE_DTYPES, WORDS
from screen import raw
from settings.fields import counted
from units import format_size

PREFIXES = ((1e12, "T"), (1e9, "G"), (1e6, "M"))


def print_report(report: dict[str, Any], console: Console | None = None) -> None:
    """Print everything for people."""
    print_machine(report, console)
    print_findings(report, console)


def print_machine(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what is known before a model is tried, which may take minutes."""
    console = console or _screen()
    console.print(_table(say("this machine"), list(machine_rows(report))))
    if report["devices"]:
        console.print(_device_table(report["devices"]))


def print_findings(report: dict[str, Any], console: Console | None = None) -> None:
    """Print what a model takes here, and the advice."""
    console = console or _screen()
    if report["trials"]:
        console.print(_trial_table(report))
    advice = report["advice"] or [say("nothing stands out: this machine does what it can")]
    console.print(_table(say("advice"), [("-", sentence) for sentence in advice]))


def _screen() -> Console:
    return Console(highlight=False, file=raw(sys.stdout))


def machine_rows(report: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """The machine as two columns."""
    machine = report["machine"]
    system, memory, disk = machine["system"], machine["memory"], machine["disk"]
    quota = [] if system["core_quota"] is None else [say("a quota of {cores}", cores=f"{system['core_quota']:g}")]
    load = [] if system["load"] is None else [say("load {load}", load=f"{system['load']:g}")]
    yield say("system"), f"{system['platform']}, Python {system['python']}"
    yield say("processor"), join(", ", [system["processor"], counted(system["cores"], "core"), *quota, *load])
    yield "", say("class: {name} ({instructions})", name=system["class"], instructions=system["instructions"])
    yield say("compiled kernels"), system["kernels"]
    total, available = format_size(memory["total_bytes"]), format_size(memory["available_bytes"])
    yield "RAM", say("{total}, {available} available", total=total, available=available)
    swap = {name: format_size(memory[f"swap_{name}_bytes"]) for name in ("used", "total")}
    yield say("swap"), say("{used} of {total} in use", **swap) if memory["swap_total_bytes"] else say("none")
    for limit in memory["limits"]:
        told = join(": ", [say(limit["what"]), format_size(limit["bytes"])])
        yield say("limit"), say("{limit} (binds)", limit=told) if limit["what"] == memory["binding"] else told
    budget, margin = format_size(memory["budget_bytes"]), format_size(memory["margin_bytes"])
    yield say("a run may take"), say("{budget}, {margin} left free", budget=budget, margin=margin)
    for other in machine["others"]:
        size = format_size(other["bytes"])
        yield (
            say("held by others"),
            say("{size} by {name} ({number})", size=size, name=other["name"], number=other["pid"]),
        )
    free = say("{folder}: {size} free", folder=disk["folder"], size=format_size(disk["free_bytes"]))
    yield say("disk"), join(", ", [free, *_disk_speeds(disk)])
    yield say("allocator"), machine["malloc"]["library"]
    if report["torch"]:
        yield "torch", _torch_words(report["torch"])
    packages = machine["packages"].items()
    yield say("packages"), ", ".join(f"{name} {version}" for name, version in packages if name != "torch")
    for name, value in machine["environment"].items():
        yield say("variable"), f"{name}={value}"


def _device_table(devices: list[dict[str, Any]]) -> Table:
    table = Table(title=say("devices, measured"), title_justify="left", title_style="bold", box=None, pad_edge=False)
    speeds = [f"{WORDS[dtype]} FLOP/s" for dtype in COMPUTE_DTYPES]
    for name in (say("device"), *speeds, say("copy B/s"), say("computes in")):
        table.add_column(name, overflow="fold")
    for device in devices:
        if device["missing"]:
            continue
        rates = [_metric(device["rates"][dtype]) for dtype in COMPUTE_DTYPES]
        table.add_row(_device_words(device), *rates, _metric(device["copy_rate"]), WORDS[device["compute"]])
    missing = [device for device in devices if device["missing"]]
    table.caption = "\n".join(say("{device} is missing: {why}", device=d["name"], why=d["missing"]) for d in missing)
    table.caption_justify = "left"
    return table


def _device_words(device: dict[str, Any]) -> str:
    if not device["total_bytes"]:
        return str(device["about"])
    free, total = format_size(device["free_bytes"]), format_size(device["total_bytes"])
    return say("{device}, {free} of {total} free", device=device["about"], free=free, total=total)


def _trial_table(report: dict[str, Any]) -> Table:
    told = "{model}, each in a process of its own, budget {budget}"
    title = say(told, model=report["model"], budget=format_size(report["budget_bytes"]))
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    table.add_column(say("what"), no_wrap=True)
    for name in (say("predicted"), say("measured"), say("off"), say("s/step"), say("tokens/s")):
        table.add_column(name, justify="right", no_wrap=True)
    table.add_column("", overflow="fold")
    kind = ""
    for trial in report["trials"]:
        if trial["kind"] != kind and kind:
            table.add_row()
        kind = trial["kind"]
        seconds = f"{trial['seconds']:.2f}" if trial["seconds"] else ""
        table.add_row(
            trial_name(kind, trial["label"]), _size(trial["predicted_bytes"]), _size(trial["measured_bytes"]), _deviation(trial),
            seconds, _speed(trial).partition(" ")[0], Text(trial["outcome"], "red"),
        )  # fmt: skip
    return table


def _table(title: str, rows: list[tuple[str, str]]) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, show_header=False, pad_edge=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    for name, words in rows:
        table.add_row(name, Text(words))
    return table


def _torch_words(torch: dict[str, Any]) -> str:
    parts = [f"CUDA {torch['cuda']}" if torch["cuda"] else "", f"ROCm {torch['hip']}" if torch["hip"] else ""]
    parts += [torch["cpu_capability"], *(name for name in ("mkl", "onednn") if torch[name])]
    return join(", ", [torch["version"], *(part for part in parts if part), counted(torch["threads"], "thread")])


def _disk_speeds(disk: dict[str, Any]) -> Iterator[str]:
    if disk["write_rate"] is not None:
        yield say("writes {rate}B/s", rate=_metric(disk["write_rate"]))
    if disk["read_rate"] is not None:
        yield say("reads {rate}B/s", rate=_metric(disk["read_rate"]))


def _metric(rate: float) -> str:
    """A rate with the prefix that people read: `95 G`."""
    for factor, prefix in PREFIXES:
        if rate >= factor:
            return f"{rate / factor:.3g} {prefix}"
    return f"{rate:.3g} "


def _size(size_bytes: int | None) -> str:
    return "" if size_bytes is None else format_size(size_bytes)


def _deviation(trial: dict[str, Any]) -> str:
    measured, predicted = trial["measured_bytes"], trial["predicted_bytes"]
    return f"{measured / predicted - 1:+.0%}" if measured and predicted else ""


def _speed(trial: dict[str, Any]) -> str:
    return f"{trial['tokens'] / trial['seconds']:,.0f} tokens/s" if trial["seconds"] else ""
