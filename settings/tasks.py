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
    """

    made_by: str
    help: str


TASKS = {
    "span": TaskFacts("spans:Spans", "T5's span corruption of text"),
    "ul2": TaskFacts("spans:Spans", "UL2's mixture of denoisers of text"),
    "prefix": TaskFacts("spans:Spans", "the beginning of a text is continued"),
    "denoise": TaskFacts("spans:Spans", "single tokens of a text are masked"),
    "pairs": TaskFacts("pairs:Pairs", "a prompt and its response"),
    "preferences": TaskFacts("preferences:Preferences", "a prompt, a better and a worse response"),
    "sequence": TaskFacts("sequence_labels:SequenceLabels", "a text and its label or number"),
    "token": TaskFacts("token_labels:TokenLabels", "a text and a label for each of its words or letters"),
}


def task_named(name: str) -> Any:
    """The `tasks.base.Task` of an objective; who asks declares as a protocol what it asks.

    Raises:
        KeyError: there is none of this name.
    """
    file, kind = TASKS[name].made_by.split(":")
    return getattr(import_module(f"tasks.{file}"), kind)(name)
