"""Files of well-known shapes: their columns are recognised by name, and need no flag."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from data.sources.expressions import Expression, keyed
from data.sources.layouts import Columns
from data.text.conversations import MESSAGES_COLUMNS
from settings.declared import DataConfig
from settings.fields import AUTO

TRANSLATION = "translation"  # one column, {"en": ..., "zh": ...}
RULES = "system"
HISTORY = "history"
# Prompt and response. Of a prompt, what is behind + or before : may be missing in a file.
PAIRS = (
    ("instruction+input+context", "output"),  # Alpaca, LLaMA-Factory
    ("instruction+input+context", "response"),  # Dolly has a context
    ("question+context", "answers.text"),  # SQuAD
    ("question+context", "answer"),
    ("query", "response"),  # ms-swift
    ("prefix: input_text", "target_text"),  # simpletransformers
    ("prompt", "completion"),  # TRL
    ("source", "target"),
    ("document", "summary"),
    ("article", "highlights"),
    ("dialogue", "summary"),
    ("input", "output"),
)
ASKED = ("instruction+input", "question", "query", "input")  # prompts of preferences


def pair_columns(data: DataConfig, first: Sequence[str], sample: Mapping[str, Any]) -> Columns | None:
    """The columns of a prompt and its response by the settings' names, or by those of well-known shapes; None: neither.

    Args:
        first: columns of the first row. sample: of all columns, the first cell that is not null, or one of its type.
    """
    if data.messages_column != AUTO:
        return _conversation(data.messages_column, sample)
    answer = data.response_column
    if named := _named(data, (answer,), first, sample):
        return named
    # Of preferences that are read as pairs, the better answers are measured.
    if answer == data.chosen_column and _is_there(answer, first):
        return _answers_alone(data, (answer,), first, sample)
    return _well_known(data, first, sample)


def preference_columns(data: DataConfig, first: Sequence[str], sample: Mapping[str, Any]) -> Columns | None:
    """The columns of a prompt with a better and a worse response; see `pair_columns`."""
    answers = data.chosen_column, data.rejected_column
    if not all(_is_there(answer, first) for answer in answers):
        return None
    return _named(data, answers, first, sample) or _answers_alone(data, answers, first, sample)


def prompt_columns(data: DataConfig, first: Sequence[str], sample: Mapping[str, Any]) -> Columns | None:
    """The columns of a prompt alone by the settings' name, or those of a pair by well-known shapes; see `pair_columns`."""
    if data.messages_column != AUTO and data.messages_column in first:
        return _conversation(data.messages_column, sample)
    return _named(data, (), first, sample) or _well_known(data, first, sample)


def _conversation(column: str, sample: Mapping[str, Any]) -> Columns:
    return Columns((), column, _rules(sample), is_known=True)


def _named(data: DataConfig, answers: Sequence[str], first: Sequence[str], sample: Mapping[str, Any]) -> Columns | None:
    """The columns that the settings name; the usual prompt has to be in the first row."""
    history = data.history_column or ""
    prompts = first if data.prompt_column == DataConfig.prompt_column else list(sample)
    if not _is_there(data.prompt_column, prompts) or not all(_is_there(answer, first) for answer in answers):
        return None
    return _spoken(Columns((data.prompt_column, *answers), history, is_known=not history or history in sample), sample)


def _messages(data: DataConfig, first: Sequence[str]) -> str:
    """A column that is usually called so; empty where there is none, or another holds the turns."""
    return next((name for name in MESSAGES_COLUMNS if name in first and not data.history_column), "")


def _turns_before(data: DataConfig, first: Sequence[str], sample: Mapping[str, Any]) -> Columns:
    """The columns of what comes before a question."""
    history = data.history_column or ""
    usual = HISTORY if isinstance(sample.get(HISTORY, ""), (list, type(None))) else ""
    turns = _messages(data, first) or history or usual
    return Columns((), turns, _rules(sample), is_known=not history or history in sample)


def _answers_alone(
    data: DataConfig, answers: Sequence[str], first: Sequence[str], sample: Mapping[str, Any]
) -> Columns:
    """Columns of answers, whose prompt has a usual name, or is what they begin with."""
    prompts = () if _messages(data, first) else ASKED
    prompt = next((_made(asked, sample) for asked in prompts if asked.split("+")[0] in first), "")
    return _spoken(replace(_turns_before(data, first, sample), texts=(prompt, *answers)), sample)


def _well_known(data: DataConfig, first: Sequence[str], sample: Mapping[str, Any]) -> Columns | None:
    """The columns of a conversation, or of a pair of a well-known shape where the settings name no columns."""
    before = _turns_before(data, first, sample)
    if _messages(data, first):
        return before
    if (data.prompt_column, data.response_column) != (DataConfig.prompt_column, DataConfig.response_column):
        return None
    for asked, answer in PAIRS:
        column, _, key = answer.partition(".")
        if {asked.split("+")[0].split(": ")[-1], column} <= {*first} and (not key or _has(key, sample[column])):
            return _spoken(replace(before, texts=(_made(asked, sample), answer)), sample)
    table = sample.get(TRANSLATION)
    if TRANSLATION in first and isinstance(table, Mapping) and len(table) > 1:
        return Columns(tuple(f"{TRANSLATION}.{key}" for key in list(table)[:2]), is_known=True)
    return None


def _spoken(columns: Columns, sample: Mapping[str, Any]) -> Columns:
    """The same, of texts that may be messages, and of responses that may be several right answers, where they are."""
    has_answers = len(columns.texts) == 2 and columns.texts[0] != "" and _holds_answers(columns.texts[1], sample)
    texts = [sample.get(text) for text in columns.texts[: 1 if has_answers else None]]
    asks = len(columns.texts) == 1 or columns.texts[0]
    is_spoken = not asks or any(isinstance(text, (list, dict)) for text in texts)
    return replace(columns, is_spoken=is_spoken, has_answers=has_answers)


def _holds_answers(expression: str, sample: Mapping[str, Any]) -> bool:
    """Whether the cells of a response are lists of texts, or may have some under a key."""
    column, key = keyed(expression, list(sample))
    cell = sample.get(column)
    if key:
        return not isinstance(cell, Mapping) or not isinstance(cell.get(key), str)
    return isinstance(cell, list) and len(cell) > 0 and not isinstance(cell[0], (list, dict))


def _rules(sample: Mapping[str, Any]) -> str:
    return RULES if RULES in sample and isinstance(sample[RULES], (str, type(None))) else ""


def _has(key: str, cell: object) -> bool:
    if isinstance(cell, list) and cell:
        cell = cell[0]
    return isinstance(cell, Mapping) and key in cell


def _made(prompt: str, names: Mapping[str, Any]) -> str:
    """An expression without those parts that a file has not."""
    sign = "+" if "+" in prompt else ": "
    return sign.join(part for part in prompt.split(sign) if part in names)


def _is_there(expression: str, names: Sequence[str]) -> bool:
    return all(column in names for column, _ in Expression.of(expression, names).parts)
