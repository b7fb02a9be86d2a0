"""What is settled before a run's first step? Name, data and base in `ahead`; here budget and plan, then the run's folder.

Everything that can be refused is refused before anything is written. Where several processes run, the main one's word
counts, and the least of their budgets.
"""

from __future__ import annotations

import zlib
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from config import Config
from data.sources.places import public
from devices import processor
from devices.base import Device
from devices.choose import passed_over
from devices.cores import use_threads
from devices.kernels.calls import kernels, use
from language import say
from memory.budget import Budget, measure_budget, with_device
from memory.estimate.disk import bytes_below, disk_need, too_full
from memory.observe.monitor import Monitor
from memory.plan import Plan
from model.formats.headers import TensorHeaders
from model.shapes import weight_counts
from run_files import SETTINGS_FILE
from settings.consistency import writes_answers
from settings.errors import UserError
from settings.fields import AUTO, counted
from storage import atomic_file, writing
from training.ahead import Watch, kind_of, refuse, settle
from training.budget.planning import look_ahead, resolve_here
from training.checkpoints.folder import Checkpoints
from training.checkpoints.mirror import Mirror
from training.checkpoints.run_lock import RunLock
from training.checkpoints.runs import create_run, resume_run
from training.evaluation.scores import load_libraries, metric_names
from training.processes.group import Group
from training.processes.interrupts import interrupt_main_thread
from training.processes.launch import OWN_STORES, launch_marks, local_processes, meets_where_the_last_met
from training.report.heartbeat import Heartbeat
from training.report.progress import Progress
from training.start.adapted import home_of
from training.start.resolving import RunSpec
from training.start.schedules import long_run_rate
from training.start.startup import Start, start
from units import format_size

FEW_STEPS, USEFUL_STEPS = 200, 1000  # from random weights; what is proposed instead
ABOVE_BOUND = 1.05  # times the rate that weights bear: below it nothing is said
WIDE_BYTES = 3  # a weight and more: float32, where half of them would be bfloat16 or float16


@dataclass
class Opening:
    """What the run starts with.

    Args:
        start: settings, data, base and state. spec: what was decided. budget: of this rank.
        mirror: where checkpoints are copied; None: nowhere.
    """

    start: Start
    spec: RunSpec
    budget: Budget
    mirror: Mirror | None
    device: Device
    base_bytes: int
    num_processes: int

    def plan_again(self, config: Config, budget: Budget) -> Plan:
        """A plan for the same run with other settings or another budget; it need not go on as the run has gone so far.

        Raises:
            DoesNotFit: no way fits.
        """
        begin = replace(self.start, config=config, state=replace(self.start.state, choice=None))
        chosen = self.spec.plan.choice  # the weights are there, and computed with
        spec = resolve_here(
            begin, self.device, budget, self.base_bytes, self.num_processes, rows=self.spec.rows,
            precision=chosen.precision, homes=(chosen.weights_in, chosen.away_blocks), correction=self.spec.machine.correction,
        )  # fmt: skip
        return spec.plan


def headline(opening: Opening) -> str:
    """What is trained, on what, in one line."""
    config, loader, budget = opening.start.config, opening.start.loader, opening.budget
    return say(
        "{run}: {rows} ({objective}), {steps}, {device}, {processes}; {budget}",
        run=config.run.run_name, rows=counted(loader.num_rows, "row"), objective=opening.spec.rows.objective,
        steps=counted(opening.spec.counted.max_steps, "step"), device=opening.device.describe(),
        processes=counted(opening.num_processes, "process"), budget=budget.describe(),
    )  # fmt: skip


def agreed_budget(config: Config, device: Device, group: Group) -> Budget:
    """The least of all processes' budgets: they are measured at different times, and machines differ."""
    budget = measure_budget(config.memory.memory_budget, device, local_processes())
    host, on_device = group.all_reduce_min(float(budget.host_bytes), float(budget.device_bytes or 0))
    return replace(budget, host_bytes=int(host), device_bytes=None if budget.device_bytes is None else int(on_device))


def watched(config: Config, device: Device, group: Group, ahead: Watch | None, stack: ExitStack) -> Watch:
    """What is held for the run: from before torch, or new as long as `stack` lasts."""
    if ahead is None:
        budget, seconds = agreed_budget(config, device, group), config.memory.monitor_seconds
        monitor = Monitor(budget.host_bytes, device, seconds, device_budget_bytes=budget.device_bytes)
        enter = stack.enter_context
        return Watch(budget, enter(monitor), enter(RunLock()), enter(Heartbeat(interrupt_main_thread)))
    assert group.size == 1, "several processes begin together"
    watch = replace(ahead, budget=with_device(ahead.budget, config.memory.memory_budget, device))
    for warning in watch.budget.warnings[len(ahead.budget.warnings) :]:
        Progress(1, is_quiet=config.run.quiet).note(warning)
    watch.monitor.watch_device(device, watch.budget.device_bytes)
    return watch


def agree_on_kernels(config: Config, group: Group) -> None:
    """Compiled kernels are used by all processes or by none: weights that all update alike must stay the same bits."""
    use(config.run.compiled_kernels is not False)
    use(bool(group.all_reduce_min(float(kernels() is not None))[0]))


def unlike_processors(device: Device, group: Group) -> list[str]:
    """That the processes compute in other last places, where their processors are not alike: each updates its own weights."""
    here = f"{processor.here().name} {torch.backends.cpu.get_cpu_capability()}"
    kind = float(zlib.crc32(here.encode()))
    if device.name != "cpu" or group.all_reduce_min(kind) == group.all_reduce_max(kind):
        return []
    told = (
        "the processors of this run differ, and so do the last places of what they compute: the weights of its processes part "
        "slowly, of which the first one's are saved; ATEN_CPU_CAPABILITY=avx2 on all machines lets them compute alike"
    )
    return [say(told)]


def open_run(config: Config, watch: Watch, device: Device, group: Group) -> Opening:
    """Settle everything and make the run's folder, or reopen it.

    Args:
        watch: its lock is acquired for the run, and held as long as its context lasts.
    Raises:
        UserError: settings or data are wrong, or the run is another process's, before anything is written. DoesNotFit:
            no plan fits the budget.
    """
    begun = watch.begun or settle(config, watch, group)
    budget, monitor, lock = watch.budget, watch.monitor, watch.lock
    if begun.config.train.is_keep_training:
        told = budget.warnings
        use_threads(begun.config.run.num_threads)  # as it was told when it began, and inside the same budget
        agree_on_kernels(begun.config, group)
        budget = agreed_budget(begun.config, device, group)
        monitor.watch(budget.host_bytes, budget.device_bytes)
        for warning in set(budget.warnings) - set(told):
            Progress(1, group.is_main, is_quiet=config.run.quiet).note(warning)
    begin = start(begun, budget.available_bytes)
    step = float(begin.state.step)
    if group.all_reduce_min(step) != group.all_reduce_max(step):
        raise UserError(
            f"--output_dir = {begin.config.run.output_dir}, the machines of this run hold checkpoints of different steps; "
            "name a folder that all see, or a --checkpoint_mirror"
        )
    processes = group.size
    rows = look_ahead(begin, device, budget, processes)
    if writes_answers(begin.config):
        load_libraries(metric_names(begin.config.metrics.metrics))
    base_bytes = monitor.sample().anon_bytes
    with monitor.phase("probe"):
        spec = resolve_here(begin, device, budget, base_bytes, processes, rows=rows, may_probe=True)
    spec = spec.by(group.broadcast(spec.plan))
    correction = group.broadcast(spec.machine.correction)  # the first process alone has probed
    spec = replace(spec, machine=replace(spec.machine, correction=correction))
    begin = replace(begin, config=spec.settings)
    if spec.counted.effective_batch_size < processes:
        raise UserError(
            f"--effective_batch_size = {spec.counted.effective_batch_size}, is less than one row for each of {processes} "
            "processes; raise it"
        )
    mirror = _mirror(begin, config.run.overwrite, group)
    begin.notes += warnings_of(begin, spec)
    begin.notes += group.run_on_main(lambda: _room_on_disk(begin, spec))
    group.run_on_main(lambda: _open_folder(begin, lock))
    begin.notes += [lock.warning] if lock.warning else []
    begin.notes += [*passed_over(config.run.device, device), *unlike_processors(device, group)]
    if meets_where_the_last_met():
        remark = "a restart by torchrun may wait for ever: its processes would meet where the attempt before has left its addresses; export {name}=1 first"
        begin.notes.append(say(remark, name=OWN_STORES))
    return Opening(begin, spec, budget, mirror, device, base_bytes, processes)


def _mirror(begin: Start, overwrite: bool, group: Group) -> Mirror | None:
    """Where checkpoints are copied; `overwrite` as this start was told, which a restart that goes on was as well."""
    run = begin.config.run
    if run.checkpoint_mirror is None:
        return None
    mirror = Mirror(run.checkpoint_mirror, run.run_name)
    if mirror.is_at(Path(run.output_dir, run.run_name)):
        raise UserError(f"{mirror.what}, is where the run itself is saved; name another disk, or a service")
    goes_on = begin.run_dir if begin.config.train.is_keep_training else None
    group.run_on_main(lambda: mirror.check(goes_on, overwrite))
    return mirror


def warnings_of(begin: Start, spec: RunSpec) -> Iterator[str]:
    """What is to be told of a run before its first step: where it goes on, and what its settings may do that nobody has asked for."""
    config, asked, steps = begin.config, spec.asked, spec.counted
    total, storage = counted(steps.max_steps, "step"), spec.plan.choice.storage
    if begin.is_resumed:
        told = "{run} continues after step {step} of {total}"
        yield say(told, run=config.run.run_name, step=f"{begin.state.step:,}", total=total)
    elif begin.base is None:
        if asked.train.max_steps == AUTO and asked.train.epochs == AUTO and steps.max_steps < FEW_STEPS:
            told = "{steps} teach random weights little; --max_steps={more} goes through the same data more often"
            yield say(told, steps=total, more=USEFUL_STEPS)
    elif config.memory.mixed_precision == AUTO and config.memory.memory_mode != "ultra" and not config.lora.lora_rank:
        stored, weights = TensorHeaders(home_of(begin.base, config)).file_bytes, weight_counts(config.model)["total"]
        if storage != "float32" and stored >= WIDE_BYTES * weights:
            told = (
                "{model} is stored in float32 ({size}); this run trains, saves and publishes it in {storage}, half of that: "
                "--mixed_precision=no keeps float32"
            )
            yield say(told, model=begin.base, size=format_size(stored), storage=storage)
    if asked.train.optimizer == "adamw" or asked.lora.lora_rank:
        return  # steps of no weight's size; matrices that begin at zero
    most = long_run_rate(steps.lr_schedule, steps.warmup_steps, steps.max_steps)
    if steps.learning_rate > ABOVE_BOUND * most:
        told = (
            "a rate of {rate} over {steps} lets weights grow out of bounds, whose steps go with their size; "
            "--learning_rate={most} is what they bear ({schedule})"
        )
        rate = f"{steps.learning_rate:.2g}"
        yield say(told, rate=rate, steps=total, most=f"{most:.2g}", schedule=steps.lr_schedule)


def _room_on_disk(begin: Start, spec: RunSpec) -> list[str]:
    config = begin.config
    if begin.state.step >= spec.counted.max_steps:
        return []  # what is left is published, which takes no room
    with writing("output_dir", config.run.output_dir):
        held = bytes_below(begin.run_dir / "checkpoints")
        need = disk_need(config, spec.plan.choice.storage, spec.plan.choice)
        problems, notes = too_full(need, config.run.output_dir, held)
    refuse(problems)
    return notes


def _open_folder(begin: Start, lock: RunLock) -> None:
    config = settings = begin.config
    if config.run.checkpoint_mirror is not None:  # without its keys: where the file is copied, each start says anew
        settings = settings.changed(checkpoint_mirror=public(config.run.checkpoint_mirror))
    if (
        begin.is_resumed
        and begin.base is not None
        and Path(config.data.tokenizer_dir).resolve() == begin.base.resolve()
    ):
        settings = settings.changed(tokenizer_dir=AUTO)  # the checkpoint that lends its own will go
    if config.train.is_keep_training:
        resume_run(begin.run_dir, launch=launch_marks())
        with writing("output_dir", config.run.output_dir):
            with atomic_file(begin.run_dir / SETTINGS_FILE) as fresh:
                settings.save(fresh)
            Checkpoints(begin.run_dir, config.train.keep_latest_n_ckp).finish_last_save()
            lock.write_owner()
        return
    refuse(lock.acquire(begin.run_dir))
    create_run(
        config.run.output_dir, config.run.run_name, kind_of(config), overwrite=config.run.overwrite,
        fill=lambda folder: settings.save(folder / SETTINGS_FILE), objective=begin.prepared.objective, launch=launch_marks(),
    )  # fmt: skip
    with writing("output_dir", config.run.output_dir):
        lock.write_owner()
