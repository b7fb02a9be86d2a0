"""The plan checked by one or two of the largest steps in a child process, before the run begins.

The child is a fresh interpreter that makes the same parts and sees rows of the planned worst lengths; where it needs
more than the budget leaves beside the run, it ends and nothing of the run is harmed. What it measures above its own
base replaces what the plan has predicted above the run's base, phase by phase. Results are kept by configuration and
machine: a later run plans with the same figures, and does not probe again. Nothing here imports torch.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import time
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from devices import processor
from devices.cores import computing_threads
from devices.environment import prepare_environment
from memory.estimate.peaks import CORRECTION, FIXED, changeable
from memory.estimate.shapes import MicroBatchRows
from memory.estimate.workload import ExecutionPlan
from settings.declared import Config
from settings.errors import UserError, reason_of
from support.child_process import CRASHED, MEMORY, TIME, ChildDied, call
from support.language import say
from support.storage import digest, fingerprint, read_text, write_text
from support.units import MIB

ROOT = Path(__file__).resolve().parent.parent
MEASURE = "training.probing:measure"  # It imports torch.
KILLED = say("killed for its memory")
LEAST_CORRECTION = 0.3  # A probe that measures less than this of the prediction did not do its work.
# A probe sees a few steps, a run the highest of thousands. Over 51 runs of 24 to 300 steps (avx512_bf16), its figure
# alone was passed by 0.8% at the median and by 4 to 7% three times; with these three the median is the same and the
# most is under 3%.
KEPT_SHARE = 0.25  # This share of what the probe has taken off the prediction stays planned.
SCATTER_BYTES = 3 * MIB  # Runs of the same flags differ by so much.
DRIFT = 0.04  # Steps of different sizes take this share of temporary memory more.
LAUNCHER_WORDS = (
    "RANK",
    "WORLD_SIZE",
    "LOCAL_",
    "GROUP_",
    "ROLE_",
    "MASTER_",
    "TORCHELASTIC_",
    "ACCELERATE_",
    "OMPI_",
    "PMI_",
)
# Settings that do not change what a step takes. One that is missing here costs another probe, one that stood here
# wrongly a wrong plan: so they are named, and not derived from what the child reads, which reads the seed, too.
WITHOUT_EFFECT = {
    "run_name",
    "output_dir",
    "log_dir",
    "overwrite",
    "cache_dir",
    "train_file",
    "validation_file",
    "seed",
    "max_steps",
    "epochs",
    "learning_rate",
    "lr_schedule",
    "warmup_steps",
    "weight_decay",
    "eval_steps",
    "save_steps",
    "log_steps",
    "eval_rows",
    "keep_latest_n_ckp",
    "is_keep_training",
    "memory_budget",
    "probe",
    "tokenizer_dir",
    "finetune_from",
    "model_preset",
    "num_threads",
    "max_samples",
    "weights_dir",
}
# The code that decides what a step takes, with the C of the kernels, and how that is measured.
CODE = (
    "settings/optimizers.py",
    "model/**/*.py",
    "engine/**/*.py",
    "devices/**/*.py",
    "devices/**/*.[ch]",
    "memory/probe.py",
    "training/probing.py",
)


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
        computes_on: the card, or the processor. limit_bytes: of the device's own memory. host_bytes: what the child may
            hold of the host's; 0: no limit.
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
        base_bytes: before the model was made. phases: phase -> most memory in it, host or device, whichever the budget
            is about. step_seconds: of the last step.
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
        time_limit: seconds of processor time, of each thread, after which the child is ended and nothing is known. A
            busy machine does not use them up faster; where the system does not count them (Windows), seconds of the
            clock.
    Returns:
        the figures, or why there are none: the child was killed, failed, or took too long. It never raises for that.
    """
    if cache_dir is None:
        return _run(request, time_limit)
    path = cache_dir / "probes" / f"{fingerprint(facts_of(request))}.json"
    earlier = read_result(path)
    if earlier is not None:
        return replace(earlier, is_cached=True, seconds=0.0)
    result = _run(request, time_limit)
    if not result.failed:
        write_result(path, result)
    return result


def facts_of(request: ProbeRequest) -> list[Any]:
    """What decides the result: the work, the kind of machine, the versions, and the code of a step."""
    settings = {name: value for name, value in request.config.as_dict().items() if name not in WITHOUT_EFFECT}
    code = sorted(path for pattern in CODE for path in ROOT.glob(pattern))
    return [
        settings,
        asdict(request.choice),
        request.steps,
        request.evaluation,
        request.base is None,
        request.data is None,
        request.computes_on,
        processor.describe_here(),
        os.cpu_count(),
        os.environ.get("OMP_NUM_THREADS"),
        platform.python_version(),
        importlib.metadata.version("torch"),
        [digest(path) for path in code],
    ]


def write_result(path: Path, result: ProbeResult) -> None:
    """Keep a result, with a fingerprint of its figures; where the cache cannot be written, the next run measures
    again.
    """
    figures = asdict(result)
    with suppress(OSError):
        path.parent.mkdir(parents=True, exist_ok=True)
        write_text(path, json.dumps({"figures": figures, "fingerprint": fingerprint(figures)}))


def read_result(path: Path) -> ProbeResult | None:
    """A result that was kept; None where there is none, or the file is not as it was written."""
    try:
        content = json.loads(read_text(path))
        is_whole = content["fingerprint"] == fingerprint(content["figures"])
    except (OSError, ValueError, TypeError, KeyError, RecursionError):
        return None
    return ProbeResult(**content["figures"]) if is_whole else None


def _run(request: ProbeRequest, time_limit: float) -> ProbeResult:
    start = time.perf_counter()
    figures: dict[str, Any] = {}
    failed = ""
    try:
        figures = call(
            MEASURE,
            request,
            max_cpu=time_limit * computing_threads(request.config.run.num_threads),
            # The child is one process, whatever the run is.
            environment={name: os.environ[name] for name in os.environ if not name.startswith(LAUNCHER_WORDS)},
            setup=prepare_environment,
            is_quiet=True,
        )
    except UserError as error:
        failed = reason_of(error)
    except ChildDied as died:
        failed = reason_of(died)
        if died.reason == TIME:
            failed = say("took longer than {time_limit:.0f} s of processor time", time_limit=time_limit)
        elif died.reason == MEMORY or (died.reason == CRASHED and request.host_bytes):
            failed = KILLED  # Libraries crash where they get no memory.
    return ProbeResult(**figures, seconds=time.perf_counter() - start, failed=failed)


def correction_of(result: ProbeResult, phases: Mapping[str, Mapping[str, int]]) -> float:
    """Measured over predicted, of temporary memory.

    Args:
        phases: the prediction of the choice that was probed: phase -> part -> bytes.
    Returns:
        the factor with which the prediction becomes the run's base and what the probe took above its own.
    """
    assert result.phases is not None, "a probe that failed corrects nothing"
    highest = max(phases.values(), key=lambda parts: sum(parts.values()) - parts.get(CORRECTION, 0))
    fixed = sum(highest.get(name, 0) for name in FIXED if name != "base")
    measured = max(result.phases.values()) - result.base_bytes
    return max(LEAST_CORRECTION, (measured - fixed) / max(1, changeable(dict(highest))))


def for_later_steps(correction: float, phases: Mapping[str, dict[str, int]], is_varied: bool) -> float:
    """The correction of one probe, with what a run's later steps take above its few.

    Args:
        phases: as of `correction_of`. is_varied: steps hold different numbers of tokens.
    """
    temporary = max(changeable(parts) for parts in phases.values())
    reserve = KEPT_SHARE * max(0.0, 1 - correction)
    return correction + reserve + DRIFT * is_varied + SCATTER_BYTES / max(1, temporary)
