"""What is exported: a model with its tokenizer, and how it shall be written; and how that compares with the model."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from commands.exporting.vocabulary import Vocabulary
from data.text.templates import Template
from model.t5 import T5

if TYPE_CHECKING:
    from commands.exporting.held_out import HeldOut  # It needs onnxruntime.


@dataclass(frozen=True)
class Exported:
    """A model on its way into another program's format.

    Args:
        model: on a CPU; its weights may lie mapped in their file, so they are read and never changed.
        vocabulary: of its tokenizer. name: of the model, for readers.
        quantize: precision of the matrices: none, fp16, int8 or q4.
        js: a copy of transformers.js for a page; None: its public address.
        prepare_text: how texts were prepared for it, the setting of that name.
        template: by which questions are worded.
        labels_of: the folder that publishes the names of the labels; None: the model has them.
        query_prompt, document_prompt: what stands before texts whose vectors are compared.
        held_out: rows whose answers are compared in each precision; None: there are none.
    """

    model: T5
    vocabulary: Vocabulary
    name: str
    quantize: str = "none"
    js: str | None = None
    prepare_text: str = "none"
    template: Template = field(default_factory=Template)
    labels_of: Path | None = None
    query_prompt: str | None = None
    document_prompt: str | None = None
    held_out: HeldOut | None = None


@dataclass(frozen=True)
class Comparison:
    """What another program computes beside what the model computes, on the same fixed ids.

    Args:
        precision: of what was run, such as fp32. difference: the largest of an output, as a share of the largest.
        is_rounded: whether it was written in less precision than the model has.
        equal_answers: how many greedy answers are the same, token by token; None: none were compared. answers: of how
            many.
        graph_bytes: of the files of that precision; 0: there is one precision alone.
        identical: share of held-out rows that are answered right, in percent; None: none were answered.
    """

    precision: str
    difference: float
    is_rounded: bool = False
    equal_answers: int | None = None
    answers: int = 0
    graph_bytes: int = 0
    identical: float | None = None
