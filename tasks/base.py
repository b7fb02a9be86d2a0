"""What the program asks of a task, and what most tasks answer."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

import numpy as np
from numpy.typing import NDArray

from data.batches.collate import Batch, Row, collate
from settings.declared import Config, DataConfig, PreferenceConfig, T5ModelConfig
from settings.fields import AUTO

if TYPE_CHECKING:
    from engine.blockwise import Objective
    from model.t5 import T5

Outputs = NDArray[np.float32]  # (R, L) of a head over labels, for each row or each token of all rows
Watch = Callable[[Batch, Outputs], None]


class Processes(Protocol):
    """The processes of a run, as far as scores are gathered over them."""

    @property
    def size(self) -> int:
        """How many there are."""
        ...

    @property
    def rank(self) -> int:
        """Which one this is."""
        ...

    def gather(self, value: Any) -> list[Any]:
        """The values of all processes, by rank."""
        ...


class Scores:
    """What an evaluation counts beside its loss. A loss over text has nothing to count: its answers are scored apart."""

    def watch(self, batch: Batch, objective: Objective) -> None:
        """Count what an objective has seen of a batch."""

    def gather(self, processes: Processes) -> None:
        """Count what all processes have seen."""

    def result(self) -> dict[str, float]:
        """Score name -> value; empty where nothing was counted."""
        return {}

    def table(self) -> list[tuple[str, str]]:
        """Further rows for a table of scores."""
        return []


@dataclass(frozen=True)
class Task:
    """A kind of work: which rows it reads, what is learnt from them, and how well that is done.

    Args:
        name: of the objective, a key of `settings.tasks.TASKS`.
    """

    name: str

    # From a file to a batch: what `data` asks.

    # From a batch to a score: what training, evaluation and answers ask.

    answers_per_row: ClassVar[int] = 1
    # Rows that `evaluate` answers where nobody says how many:
    answered_rows: ClassVar[int] = 0
    # Names of what evaluations of the loss count beside it:
    scores: ClassVar[tuple[str, ...]] = ()
    has_perplexity: ClassVar[bool] = True
    writes_text: ClassVar[bool] = True
    # Whether a run has to start from a trained model:
    needs_base: ClassVar[bool] = False

    def run_kind(self, is_finetune: bool) -> str:
        """What kind of run learns it: one of `training.checkpoints.runs.KINDS`."""
        return "finetune" if is_finetune else "pretrain"

    def leads_to_finetuning(self, is_finetune: bool) -> bool:
        """Whether the model of such a run is there to be finetuned next."""
        return not is_finetune

    def origin(self, is_new: bool) -> str:
        """How a model came to be, for its card.

        Args:
            is_new: whether it began with random weights.
        """
        return "pretrained from scratch" if is_new else "trained further"

    def longest_target(self, data: DataConfig, source_tokens: int, has_decoder: bool) -> int:
        """Decoder tokens of the longest row that the settings allow, all its answers together."""
        if data.max_target_len != AUTO:
            return self.answers_per_row * int(data.max_target_len)
        return self.answers_per_row * math.ceil(source_tokens * self.target_share(data))

    def target_share(self, data: DataConfig) -> float:
        """Target tokens for each source token where no longest target is named."""
        return 1.0

    def rate_share(self, has_adapters: bool) -> float | None:
        """The part of an optimizer's learning rate that suits it whatever the model; None: that depends on the model."""
        return None

    def has_reference(self, preference: PreferenceConfig) -> bool:
        """Whether a reference model sees the rows too."""
        return False

    def stores_reference(self, config: Config) -> bool:
        """Whether what the reference model says of the rows is computed before the run; `finetune_from` is resolved."""
        return False

    def objective(self, model: T5, config: Config) -> Objective:
        """What a step minimises: here the cross-entropy of each target token.

        Args:
            model: with its adapters on, if there are any.
        """
        from engine.blockwise import Objective

        return Objective()

    def random_batch(
        self, lengths: Sequence[tuple[int, int]], model: T5ModelConfig, random: np.random.Generator, has_reference: bool
    ) -> Batch:
        """A batch of random ids, to measure what a step takes.

        Args:
            lengths: source and target tokens of each row. has_reference: whether rows bring what a reference model says.
        """
        keys = random_keys(random, len(lengths))
        rows = [
            Row(random_ids(random, model, source), random_ids(random, model, target), key)
            for (source, target), key in zip(lengths, keys, strict=True)
        ]
        return collate(rows, model.pad_token_id)

    def new_scores(self, names: Sequence[str], write: Watch | None = None) -> Scores:
        """What counts scores while the loss is measured.

        Args:
            names: of the labels, in the order of the outputs; none: labels are numbers.
            write: gets each batch and the head's outputs as well.
        """
        return Scores()


def random_ids(random: np.random.Generator, model: T5ModelConfig, count: int) -> NDArray[np.int64]:
    """So many ids of a vocabulary, neither padding nor end of text in the usual ones."""
    return random.integers(2, max(3, model.vocab_size), count)


def random_keys(random: np.random.Generator, count: int) -> list[int]:
    """Keys of so many rows."""
    keys: list[int] = random.integers(2**62, size=count).tolist()
    return keys
