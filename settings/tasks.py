"""The table of tasks: what a model can be trained on, and the class that knows how; needs no torch.

A new task is an entry here and a file in `tasks/` with the class that the entry names. Nothing else compares objectives.
"""

from __future__ import annotations

from dataclasses import dataclass
from importlib import import_module
from typing import Any


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task before it is made.

    Args:
        made_by: the class, `file:Class` in `tasks/`.
        help: a few words for users.
        finetunes: whether `--is_finetune` can learn it.
    """

    made_by: str
    help: str
    finetunes: bool = False


TASKS = {
    "span": TaskFacts("spans:SpanCorruption", "T5's span corruption of text"),
    "ul2": TaskFacts("spans:UL2", "UL2's mixture of denoisers of text"),
    "prefix": TaskFacts("spans:Prefix", "the beginning of a text is continued"),
    "denoise": TaskFacts("spans:Denoising", "single tokens of a text are masked"),
    "pairs": TaskFacts("pairs:Pairs", "a prompt and its response", finetunes=True),
    "preferences": TaskFacts("preferences:Preferences", "a prompt, a better and a worse response", finetunes=True),
    "sequence": TaskFacts("sequence_labels:SequenceLabels", "a text and its label or number", finetunes=True),
    "token": TaskFacts(
        "token_labels:TokenLabels", "a text and a label for each of its words or letters", finetunes=True
    ),
}


def is_pretraining(objective: str) -> bool:
    """Whether a model learns this from nothing but text."""
    return objective in TASKS and not TASKS[objective].finetunes


def default_objective(is_finetune: bool) -> str:
    """What is trained where neither the settings nor the data say it: the first task of the table that can be."""
    return next(name for name, facts in TASKS.items() if facts.finetunes == is_finetune)


def task_named(name: str) -> Any:
    """The `tasks.base.Task` of an objective; who asks declares as a protocol what it asks.

    Raises:
        KeyError: there is none of this name.
    """
    file, kind = TASKS[name].made_by.split(":")
    return getattr(import_module(f"tasks.{file}"), kind)(name)
