"""What is decided for a run before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from data.batches.loader import StepLoader
from data.prepare.preparing import Prepared
from data.tokenizers.tokenizer import Tokenizer
from memory.budget import Budget
from memory.monitor import Monitor
from model.decoding.answer_tree import AnswerTree
from settings.declared import Config
from tasks.base import Task
from training.checkpoints.run_lock import RunLock
from training.checkpoints.state import TrainingState
from training.evaluation.scores import OwnMetric
from training.processes.group import Group
from training.report.heartbeat import Heartbeat
from training.saved_model import SavedModel
from training.setup.resolving import RunSpec

if TYPE_CHECKING:
    from devices.base import Device
    from devices.threads import Threads


@dataclass
class ResolvedRun:
    """A run as far as it is decided; after the last stage nothing in `config` that counts for the whole run is auto.

    Args:
        config: the settings of the run, with what was decided in them; what the machine decides stays as it was asked for, since
            the run may go on on another.
        group: the processes of the run.
        notes: warnings, shown when the log is open. told: what is shown before, since preparing data may take hours.
        resumed_dir: folder of the run that goes on; None: a new run.
        base: folder to load weights from; None: random weights. is_resumed: it is a checkpoint of this very run.
        state: how far the run is.
        metrics: the user's own, by name.
        tree: the answers that there are; None: any. listed_in: the folder with their list, under `cache_dir`.
        base_bytes: what the process held before the weights.
    """

    config: Config
    group: Group = field(default_factory=Group)
    notes: list[str] = field(default_factory=list)
    told: list[str] = field(default_factory=list)
    resumed_dir: Path | None = None
    base: Path | None = None
    is_resumed: bool = False
    state: TrainingState = field(default_factory=TrainingState)
    metrics: Mapping[str, OwnMetric] = field(default_factory=dict)
    tree: AnswerTree | None = None
    listed_in: Path | None = None
    # each is set by its stage, and read by later ones alone
    budget: Budget = field(init=False)
    monitor: Monitor = field(init=False)
    lock: RunLock = field(init=False)
    task: Task = field(init=False)
    heartbeat: Heartbeat = field(init=False)
    prepared: Prepared = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    loader: StepLoader = field(init=False)
    validation: StepLoader = field(init=False)
    device: Device = field(init=False)
    threads: Threads = field(init=False)
    base_bytes: int = field(init=False)
    spec: RunSpec = field(init=False)

    @property
    def run_dir(self) -> Path:
        """Folder of this run under `output_dir`."""
        return Path(self.config.run.output_dir) / self.config.run.run_name

    @property
    def start(self) -> SavedModel | None:
        """What `base` says of itself; where the base of an adapter lies now, a flag `finetune_from` says."""
        if self.base is None:
            return None
        named = self.config.train.finetune_from if self.config.origin("finetune_from") == "flag" else None
        return SavedModel.read(self.base, moved_base=named)

    def starting_from(self, base: Path | None, state: TrainingState, is_resumed: bool) -> ResolvedRun:
        """The same run with other weights to load."""
        other = copy(self)
        other.base = base
        other.state = state
        other.is_resumed = is_resumed
        return other
