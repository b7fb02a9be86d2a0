"""The tables of tasks and of heads: what a model can be trained on, what it gives, and the class that knows how; no
torch.

A new task is an entry here and a file in `tasks/` with the class that the entry names. Nothing else compares
objectives.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any

from settings.program import full_name


@dataclass(frozen=True)
class TaskFacts:
    """What is known of a task before it is made.

    Args:
        made_by: the class, `file:Class` in `tasks/`.
        help: a few words for users.
        head: of the models that it trains, a key of `MODEL_HEADS`.
        command: that trains them.
        finetunes: whether `is_finetune` may be named with it.
    """

    made_by: str
    help: str
    head: str = "text"
    command: str = "train"
    finetunes: bool = False


@dataclass(frozen=True)
class HeadFacts:
    """What a model with a head gives.

    Args:
        task: that trains such a model where the objective is left to the data; None: there is nothing to train.
        commands: that take the model for what it does, the most usual first.
        hub_name: the Hugging Face Hub's name for what it does.
        writes_text: whether it writes answers token by token.
        has_labels: whether its outputs are labels.
        has_vectors: whether its outputs are vectors of texts, and the loss compares those of a whole step.
        needs_decoder, takes_decoder: whether there has to be a decoder, and whether there may be one.
        pools_rows: whether a row has one output, and not each of its tokens.
        is_dense: whether there is a dense layer before the outputs where `head_kind` is auto.
        over_decoder: settings of the head that have one value alone over a decoder.
    """

    task: str | None
    commands: tuple[str, ...]
    hub_name: str
    writes_text: bool = False
    has_labels: bool = False
    has_vectors: bool = False
    needs_decoder: bool = False
    takes_decoder: bool = False
    pools_rows: bool = False
    is_dense: bool = False
    over_decoder: Mapping[str, str] = field(default_factory=dict)


TASKS = {
    "span": TaskFacts("spans:SpanCorruption", "T5's span corruption of text"),
    "ul2": TaskFacts("spans:UL2", "UL2's mixture of denoisers of text"),
    "prefix": TaskFacts("spans:Prefix", "the beginning of a text is continued"),
    "denoise": TaskFacts("spans:Denoising", "single tokens of a text are masked"),
    "pairs": TaskFacts("pairs:Pairs", "a prompt and its response", finetunes=True),
    "preferences": TaskFacts(
        "preferences:Preferences", "a prompt, a better and a worse response", command="dpo", finetunes=True
    ),
    "sequence": TaskFacts(
        "sequence_labels:SequenceLabels", "a text and its label or number", head="sequence", finetunes=True
    ),
    "token": TaskFacts(
        "token_labels:TokenLabels", "a text and a label for each of its words or letters", head="token", finetunes=True
    ),
    "embedding": TaskFacts(
        "embedding:Embedding", "pairs of texts, or texts with teacher embeddings", head="embedding", finetunes=True
    ),
}


@dataclass(frozen=True)
class PreferenceLossFacts:
    """What a loss over two answers to a prompt takes of them.

    Args:
        takes_means: mean log-probabilities of a token, and not those of whole answers.
        has_reference: whether it compares with a reference model.
    """

    takes_means: bool = False
    has_reference: bool = True


# The formulas are `FORMULAS` in `engine.objectives.preference`.
PREFERENCE_LOSSES = {
    "sigmoid": PreferenceLossFacts(),
    "ipo": PreferenceLossFacts(takes_means=True),
    "orpo": PreferenceLossFacts(takes_means=True, has_reference=False),
}
MODEL_HEADS = {
    "text": HeadFacts(
        "pairs",
        ("generate", "evaluate", "chat", "serve", "embed", "search", "export", "rerank"),
        "text2text-generation",
        writes_text=True,
        needs_decoder=True,
        takes_decoder=True,
    ),
    "none": HeadFacts(None, ("embed", "search", "serve", "export"), "feature-extraction"),
    "sequence": HeadFacts(
        "sequence",
        ("generate", "evaluate", "serve", "embed", "search", "export", "rerank"),
        "text-classification",
        has_labels=True,
        takes_decoder=True,
        pools_rows=True,
        is_dense=True,
        over_decoder={"pooling": "last", "head_kind": "dense"},
    ),
    "token": HeadFacts(
        "token", ("generate", "evaluate", "serve", "embed", "search", "export"), "token-classification", has_labels=True
    ),
    "embedding": HeadFacts(
        "embedding",
        ("embed", "evaluate", "search", "serve", "export"),
        "sentence-similarity",
        has_vectors=True,
        pools_rows=True,
    ),
}
# What is minimised over the texts of a step; the formulas are in `engine.objectives.embedding`.
EMBEDDING_LOSSES = ("contrastive", "cosent", "regression", "distillation")


def is_pretraining(objective: str) -> bool:
    """Whether a model learns this from nothing but text."""
    return objective in TASKS and not TASKS[objective].finetunes


def default_objective(is_finetune: bool) -> str:
    """What is trained where neither the settings nor the data say it: the first task of the table that can be."""
    return next(name for name, facts in TASKS.items() if facts.finetunes == is_finetune)


def command_of(objective: object) -> str:
    """The command that trains on an objective; one that the data decide is learnt by `train`."""
    return TASKS[objective].command if isinstance(objective, str) and objective in TASKS else "train"


def learns_labels(objective: str) -> bool:
    """Whether an objective trains a head over labels; one that the data decide does not."""
    return objective in TASKS and MODEL_HEADS[TASKS[objective].head].has_labels


def task_named(name: str) -> Any:
    """The `tasks.base.BaseTask` of an objective; who lies below `tasks` declares as a protocol what it asks.

    Raises:
        KeyError: there is none of this name.
    """
    file, kind = TASKS[name].made_by.split(":")
    return getattr(import_module(full_name(f"tasks.{file}")), kind)(name)


def task_for(objective: str, head: str = "text") -> Any:
    """The task of an objective, or where the data decide it that of a model's head; of text the one with longer
    targets.
    """
    return task_named(objective if objective in TASKS else MODEL_HEADS[head].task or "pairs")
