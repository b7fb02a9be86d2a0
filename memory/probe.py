"""The plan checked by one or two of the largest steps in a child process, before the run begins.

The child is a fresh interpreter that makes the same parts and sees rows of the planned worst lengths; where it needs more
than the budget leaves beside the run, it ends and nothing of the run is harmed. What it measures above its own base replaces what the
plan has predicted above the run's base, phase by phase. Results are kept by configuration and machine, so that the same
run is not probed twice. Nothing here imports torch.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from childproc import CRASHED, MEMORY, TIME, ChildDied, call
from devices import processor
from devices.cores import computing_threads
from devices.environment import prepare_environment
from language import say
from memory.estimate.peaks import CORRECTION, FIXED, changeable
from memory.estimate.shapes import MicroBatchRows
from memory.estimate.workload import ExecutionPlan
from settings.declared import Config
from settings.errors import UserError, reason_of
from storage import write_text
from units import MIB

ROOT = str(Path(__file__).resolve().parent.parent)
MEASURE = "training.probing:measure"  # which imports torch
KILLED = say("killed for its memory")
LEAST_CORRECTION = 0.3  # a probe that measures less than this of the prediction did not do its work
# a probe sees a few steps, a run the highest of thousands. Over 51 runs of 24 to 300 steps (avx512_bf16), its figure alone
# was passed by 0.8% at the median and by 4 to 7% three times; with these the median is the same and the most is under 3%
KEPT_SHARE = 0.25  # of what the probe has taken off the prediction
SCATTER_BYTES = 3 * MIB  # what one run takes above another of the same flags
DRIFT = 0.04  # of temporary memory, where steps are of different sizes: what one leaves does not quite fit the next
FORMAT = 5  # raise it where the engine takes other memory for the same configuration
LAUNCHER_WORDS = (
    "RANK", "WORLD_SIZE", "LOCAL_", "GROUP_", "ROLE_", "MASTER_", "TORCHELASTIC_", "ACCELERATE_", "OMPI_", "PMI_",
)  # fmt: skip
# Settings that do not change what a step takes. One that is missing here costs another probe, one that stood here wrongly
# a wrong plan: so they are named, and not derived from what the child reads, which reads the seed, too.
WITHOUT_EFFECT = (
    "run_name", "output_dir", "log_dir", "overwrite", "cache_dir", "train_file", "validation_file", "seed", "max_steps", "epochs",
    "learning_rate", "lr_schedule", "warmup_steps", "weight_decay", "eval_steps", "save_steps", "log_steps", "eval_rows",
    "keep_latest_n_ckp", "is_keep_training", "memory_budget", "probe", "tokenizer_dir", "finetune_from", "model_preset",
    "num_threads", "max_samples", "weights_dir",
)  # fmt: skip


@dataclass(frozen=True)
class ProbeData:
    """What the run has read before its model is made. The child reads the same, for malloc keeps more or less by it.

    Args:
        objective: of the loaders. train, validation: folders of shards. tokenizer: its folder.
        reopens: whether shards are reopened for each read. answers: the folder of their list; None: any.
    """

    objective: str
    train: Path
    validation: Path
    tokenizer: Path
    reopens: bool = False
    answers: Path | None = None


@dataclass(frozen=True)
class ProbeRequest:
    """What the child shall run.

    Args:
        config: of the run. choice: of its plan.
        steps: the micro-batches of each worst step; evaluation: the largest evaluation batch.
        base: model folder to start from; None: from scratch. local_rank: which of the machine's devices is meant.
        data: of the run; None: there is none, as where a model is only tried out.
        computes_on: the card, or the processor. limit_bytes: of the device's own memory. host_bytes: what the child may hold of the
            host's; 0: no limit.
    """

    config: Config
    choice: ExecutionPlan
    steps: tuple[tuple[MicroBatchRows, ...], ...]
    evaluation: MicroBatchRows
    base: Path | None = None
    local_rank: int = 0
    data: ProbeData | None = None
    computes_on: str = ""
    limit_bytes: int = 0
    host_bytes: int = 0


@dataclass(frozen=True)
class ProbeResult:
    """What the child has measured.

    Args:
        base_bytes: before the model was made. phases: phase -> most memory in it, host or device, whichever the budget is
            about. step_seconds: of the last step.
        seconds: the whole probe took. is_cached: read from an earlier probe. failed: why there are no figures; "" where
            there are.
    """

    base_bytes: int = 0
    phases: dict[str, int] | None = None
    step_seconds: float = 0.0
    seconds: float = 0.0
    is_cached: bool = False
    failed: str = ""

    @property
    def was_killed(self) -> bool:
        """Whether the child was stopped for its memory."""
        return self.failed == KILLED


def probe(request: ProbeRequest, cache_dir: Path | None = None, time_limit: float = 600.0) -> ProbeResult:
    """Run the child, or find what an earlier one has measured.

    Args:
        cache_dir: where results are kept; None: nowhere.
        time_limit: seconds of processor time, of each thread, after which the child is ended and nothing is known. A busy
            machine does not use them up faster; where the system does not count them (Windows), seconds of the clock.
    Returns:
        the figures, or why there are none: the child was killed, failed, or took too long. It never raises for that.
    """
    place = None if cache_dir is None else Path(cache_dir) / "probes" / f"{fingerprint(request)}.json"
    found = _read(place)
    if found is not None:
        return found
    result = _run(request, time_limit)
    if place is not None and not result.failed:
        with suppress(OSError):  # a cache that is only read: measured again the next time
            place.parent.mkdir(parents=True, exist_ok=True)
            write_text(place, json.dumps(asdict(result)))
    return result


def correction_of(result: ProbeResult, phases: Mapping[str, Mapping[str, int]]) -> float:
    """Measured over predicted, of temporary memory.

    Args:
        phases: the prediction of the choice that was probed: phase -> part -> bytes.
    Returns:
        the factor with which the prediction becomes the run's base and what the probe took above its own.
    """
    assert result.phases is not None, "a probe that failed corrects nothing"
    highest = max(phases, key=lambda phase: sum(size for name, size in phases[phase].items() if name != CORRECTION))
    parts = dict(phases[highest])
    passing = changeable(parts)
    fixed = sum(parts.get(name, 0) for name in FIXED if name != "base")
    measured = max(result.phases.values()) - result.base_bytes
    return max(LEAST_CORRECTION, (measured - fixed) / max(1, passing))


def for_later_steps(correction: float, phases: Mapping[str, dict[str, int]], is_varied: bool) -> float:
    """The correction of one probe, with what a run's later steps take above its few.

    Args:
        phases: as of `correction_of`. is_varied: steps hold different numbers of tokens.
    """
    passing = max(changeable(parts) for parts in phases.values())
    return correction + KEPT_SHARE * max(0.0, 1 - correction) + DRIFT * is_varied + SCATTER_BYTES / max(1, passing)


def fingerprint(request: ProbeRequest) -> str:
    """The same for the same work on the same kind of machine with the same versions and the same code of a step."""
    import importlib.metadata

    wings = (Path(ROOT) / wing for wing in ("model", "engine", "devices"))  # the last with its kernels' C
    files = sorted(path for wing in wings for path in wing.rglob("*") if path.suffix in (".py", ".c", ".h"))
    code = [Path(ROOT) / "limits.py", Path(ROOT) / "optimizers.py", *files]  # what decides what a step takes
    settings = {name: value for name, value in request.config.as_dict().items() if name not in WITHOUT_EFFECT}
    facts = [
        FORMAT, settings, asdict(request.choice), request.steps, request.evaluation, request.base is None, request.data is None, request.computes_on,
        platform.machine(), sorted(processor.flags_of() or [platform.processor()]), processor.here().describe(), os.cpu_count(), os.environ.get("OMP_NUM_THREADS"), platform.python_version(),
        importlib.metadata.version("torch"), [hashlib.sha256(path.read_bytes()).hexdigest()[:12] for path in code],
    ]  # fmt: skip
    return hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode()).hexdigest()[:20]


def _read(place: Path | None) -> ProbeResult | None:
    if place is None or not place.is_file():
        return None
    try:
        content: dict[str, Any] = json.loads(place.read_text(encoding="utf8"))
        found = ProbeResult(**{**content, "is_cached": True, "seconds": 0.0})
    except (OSError, ValueError, TypeError, RecursionError):
        return None  # a broken entry is measured anew, and overwritten
    sizes = [found.base_bytes, *found.phases.values()] if isinstance(found.phases, dict) and found.phases else [None]
    are_known = all(type(size) is int and size >= 0 for size in sizes) and type(found.step_seconds) in (int, float)
    return found if are_known and math.isfinite(found.step_seconds) and found.failed == "" else None


def _run(request: ProbeRequest, time_limit: float) -> ProbeResult:
    began = time.perf_counter()
    # the child is one process, whatever the run is
    environment = {name: value for name, value in os.environ.items() if not name.startswith(LAUNCHER_WORDS)}
    try:
        answer: dict[str, Any] = call(
            MEASURE, request, max_cpu=time_limit * computing_threads(request.config.run.num_threads),
            environment=environment, setup=prepare_environment, is_quiet=True,
        )  # fmt: skip
    except (ChildDied, UserError) as error:
        failed = reason_of(error)
        reason = error.reason if isinstance(error, ChildDied) else ""
        if reason == TIME:
            failed = say("took longer than {time_limit:.0f} s of processor time", time_limit=time_limit)
        elif reason == MEMORY or (reason == CRASHED and request.host_bytes):  # libraries crash where they get no memory
            failed = KILLED
        return ProbeResult(seconds=time.perf_counter() - began, failed=failed)
    return ProbeResult(**answer, seconds=time.perf_counter() - began)
