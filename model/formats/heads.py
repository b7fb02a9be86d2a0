"""The classes of transformers that a T5 can be, one for each head, and the labels that a `config.json` names; no torch.

transformers has no class for a sequence head over an encoder, nor for a dense token head: such a folder says
`T5EncoderModel`, has the head's tensors beside, and names the head by keys of our own.

Source: transformers 5.23 and 4.57, models t5 and umt5; PEFT 0.17-0.21, `TaskType`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from settings.consistency import REGRESSION, SEQUENCE, TEXT, TOKEN, are_numbers
from settings.declared import T5ModelConfig
from settings.fields import AUTO
from settings.tasks import MODEL_HEADS

EMBEDDING = "shared.weight"
HEAD = "lm_head.weight"
# The names of the tensors of heads begin with these.
LABEL_HEADS = ("classifier.", "classification_head.", "embedding_head.")
# Keys of our own in config.json, of a model with another head than one over the vocabulary.
HEAD_FIELDS = ("head", "pooling", "head_kind", "embedding_size", "normalize")
# Settings in which an encoder may differ from the checkpoint that it is taken from.
ENCODER_FIELDS = (
    *HEAD_FIELDS,
    "labels",
    "num_decoder_layers",
    "tie_word_embeddings",
    "scale_decoder_outputs",
    "decoder_start_token_id",
)
# Values that mean nothing without a head over the vocabulary.
_UNTIED = {"tie_word_embeddings": True, "scale_decoder_outputs": True}


@dataclass(frozen=True)
class HeadClass:
    """One class of transformers, whose name is the family's and `ending`.

    Args:
        task: what PEFT calls its work.
        head: the setting. is_dense: whether a head over labels has a dense layer. has_decoder: whether a decoder reads
            too.
        prefix: before the names of all tensors but the head's.
        output: the module that gives the labels; empty: none.
        modules_to_save: what PEFT has to save beside adapters, because it is transformers' own.
        left_out: how the names of tensors begin that a folder may have beside those of the model.
        fixed: settings that have no other value here.
        free: settings in which it may differ from the checkpoint that it is taken from.
        unwritten: keys of our own that its config.json does not have.
    """

    ending: str
    task: str
    head: str
    is_dense: bool = False
    has_decoder: bool = False
    prefix: str = ""
    output: str = ""
    modules_to_save: tuple[str, ...] = ()
    left_out: tuple[str, ...] = ()
    fixed: Mapping[str, Any] = field(default_factory=dict)
    free: tuple[str, ...] = ENCODER_FIELDS
    unwritten: tuple[str, ...] = ()

    @property
    def writes_text(self) -> bool:
        """Whether its head is over the vocabulary."""
        return MODEL_HEADS[self.head].writes_text


TEXT_CLASS = HeadClass(
    "ForConditionalGeneration", "SEQ_2_SEQ_LM", TEXT, has_decoder=True, free=(), unwritten=HEAD_FIELDS
)
SEQUENCE_CLASS = HeadClass(
    "ForSequenceClassification",
    "SEQ_CLS",
    SEQUENCE,
    is_dense=True,
    has_decoder=True,
    prefix="transformer.",
    output="classification_head.out_proj",
    modules_to_save=("classification_head",),
    left_out=LABEL_HEADS,
    fixed=_UNTIED,
)
ENCODER_CLASS = HeadClass(
    "EncoderModel",
    "FEATURE_EXTRACTION",
    "none",
    left_out=(*LABEL_HEADS, "decoder."),
    fixed={**_UNTIED, "num_decoder_layers": 0},
)
TOKEN_CLASS = replace(
    ENCODER_CLASS,
    ending="ForTokenClassification",
    task="TOKEN_CLS",
    head=TOKEN,
    prefix="transformer.",
    output="classifier",
    modules_to_save=("classifier",),
)
CLASSES = (TEXT_CLASS, SEQUENCE_CLASS, TOKEN_CLASS, ENCODER_CLASS)
_BY_HEAD = {**dict(zip((TEXT, SEQUENCE, TOKEN, "none"), CLASSES, strict=True)), "embedding": ENCODER_CLASS}
HEAD_KINDS = ("linear", "dense")  # The index is `is_dense`.


def class_of(config: T5ModelConfig) -> HeadClass:
    """The class that a model is written as: that of its head, or an encoder if transformers has it in another form
    alone.
    """
    by_head = _BY_HEAD[config.head]
    form = (config.has_dense_head, config.num_decoder_layers > 0)
    return ENCODER_CLASS if config.num_labels and form != (by_head.is_dense, by_head.has_decoder) else by_head


def class_named(raw: Mapping[str, Any]) -> HeadClass:
    """The class that a `config.json` is of, by its `architectures`; a T5 that writes text where they name none of
    these.
    """
    name = architecture(raw)
    return next((each for each in CLASSES if name.endswith(each.ending)), TEXT_CLASS)


def architecture(raw: Mapping[str, Any]) -> str:
    """The first of the `architectures` of a `config.json`; empty where there is none."""
    names = raw.get("architectures")
    return str(names[0]) if isinstance(names, list) and names else ""


def head_of(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of the head that a `config.json` names, and those that follow from it: by keys of our own, or by its
    class.
    """
    published = class_named(raw)
    head = raw.get("head", published.head)
    # A word that is no head is refused with all other settings.
    facts = MODEL_HEADS.get(str(head), MODEL_HEADS["none"])
    if facts.writes_text:
        return {"head": head}
    fixed = published.fixed or ENCODER_CLASS.fixed
    labels = labels_of(raw) if facts.has_labels else AUTO
    return {**fixed, "head": head, "labels": labels}


def labels_of(raw: Mapping[str, Any]) -> str:
    """The setting `labels`: names of classes as far as they can be told apart, else their number."""
    names = label_names(raw)
    count = len(names) or raw.get("num_labels") or 2
    if _predicts_numbers(raw) or count == 1:
        return REGRESSION
    is_unnamed = [name.removeprefix("LABEL_") for name in names] == list(map(str, range(len(names))))
    text = ",".join(names)
    is_readable = len(set(names)) == len(names) and T5ModelConfig(labels=text).label_names == tuple(names)
    return text if is_readable and not is_unnamed else str(count)


def label_names(raw: Mapping[str, Any]) -> list[str]:
    """The values of `id2label` in the order of their ids, which is not that of the file."""
    names = raw.get("id2label")
    if not isinstance(names, dict):
        return []
    return [str(names[number]) for number in sorted(names, key=lambda number: (len(number), number))]


def num_regressions(raw: Mapping[str, Any]) -> int:
    """How many numbers a head predicts for each text; 0 for one over classes."""
    return len(label_names(raw)) if _predicts_numbers(raw) else 0


def _predicts_numbers(raw: Mapping[str, Any]) -> bool:
    return are_numbers(str(raw.get("problem_type")))


def labels_in_config(config: T5ModelConfig) -> dict[str, Any]:
    """What a `config.json` says of a head over labels: keys of transformers and our own."""
    names = config.label_names or ("LABEL_0",)
    return {
        "pooling": config.head_pooling if config.pools_rows else AUTO,
        "head_kind": HEAD_KINDS[config.has_dense_head],
        "id2label": dict(enumerate(names)),
        "label2id": {name: number for number, name in enumerate(names)},
        "problem_type": "single_label_classification" if config.label_names else REGRESSION,
        "classifier_dropout": config.dropout_rate,
    }
