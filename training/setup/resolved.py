"""What is decided for a run before its first step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from data.batches.loader import StepLoader
from data.prepare.preparing import Prepared
from data.tokenizers.tokenizer import Tokenizer
from memory.budget import Budget
from memory.monitor import Monitor
from model.decoding.answer_tree import AnswerTree
from settings.declared import Config
from tasks.base import BaseTask
from training.checkpoints.state import TrainingState
from training.evaluation.scores import OwnMetric
from training.processes.group import Group
from training.report.heartbeat import Heartbeat
from training.saved_model import SavedModel
from training.setup.answer_list import AnswerList
from training.setup.resolving import RunSpec

if TYPE_CHECKING:
    from devices.base import Device
    from devices.threads import Threads


@dataclass(frozen=True, kw_only=True)
class Beginning:
    """What the model in training, its optimizer and its engine are made of: see `training.setup.build`.

    Args:
        config: the settings of the run.
        group: its processes; None: this one alone.
        base: folder to load weights from; None: random weights.
        moved_base: where the base of an adapter lies now; None: where the adapter says.
        is_resumed: `base` is a checkpoint of this very run.
        state: how far the run is.
        tokenizer: None where the model sees random tokens, as in a probe.
    """

    config: Config
    device: Device
    group: Group = field(default_factory=Group)
    base: Path | None = None
    moved_base: str | None = None
    is_resumed: bool = False
    state: TrainingState = field(default_factory=TrainingState)
    tokenizer: Tokenizer | None = None

    @property
    def start(self) -> SavedModel | None:
        """What `base` says of itself."""
        return None if self.base is None else SavedModel.read(self.base, moved_base=self.moved_base)


@dataclass(frozen=True, kw_only=True)
class ResolvedRun(Beginning):
    """A run in which nothing is left to decide: what `training.setup.stages` gives.

    Nothing in `config` that counts for the whole run is auto. What the machine decides stays as it was asked for, since
    the run may go on on another.

    Args:
        run_dir: its folder under `output_dir`.
        spec: how its steps are done, and how many there are.
        loader: of the training data; validation: of the held-out rows.
        metrics: the user's own, by name.
        answers: the list that answers come from; None: any can be.
        base_bytes: what the process held before the weights.
        shown_notes: what was shown while the run was set up.
        notes: what is shown when the log is open.
    """

    run_dir: Path
    spec: RunSpec
    task: BaseTask
    tokenizer: Tokenizer
    prepared: Prepared
    loader: StepLoader
    validation: StepLoader
    metrics: Mapping[str, OwnMetric]
    answers: AnswerList | None
    budget: Budget
    monitor: Monitor
    heartbeat: Heartbeat
    threads: Threads
    base_bytes: int
    shown_notes: tuple[str, ...]
    notes: tuple[str, ...]

    @property
    def tree(self) -> AnswerTree | None:
        """The answers that there are; None: any."""
        return None if self.answers is None else self.answers.tree

    def starting_from(self, base: Path | None, state: TrainingState, is_resumed: bool) -> ResolvedRun:
        """The same run with other weights to load."""
        return replace(self, base=base, state=state, is_resumed=is_resumed)
