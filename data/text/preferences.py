"""Prompts of preference pairs, and pairs that can be trained on: both answers say something, and not the same.

Answers that are turns themselves may begin with the conversation before them, as in TRL's implicit prompts and HH's
texts.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from data.text.clean import Dropped
from data.text.templates import ASSISTANT, USER, Turn
from settings.errors import refuse
from settings.fields import counted
from support.language import say

EQUAL = "equal answers"
EMPTY = "empty answer"
_SHOWN_CHARS = 60  # The beginning of its prompt names a row.
_SPOKEN = re.compile(r"(?:^|\n\n)(Human|Assistant):")


def dialogue(text: str) -> list[Turn]:
    """The turns of a text as in Anthropic's HH: "\\n\\nHuman: ...\\n\\nAssistant: ...".

    Raises:
        ValueError: it is no such text.
    """
    begin, *parts = _SPOKEN.split(text)
    if begin.strip() or not parts:
        raise ValueError(
            say("has no turns, such as Human: and Assistant:, that say where its prompt ends; give the prompt's column")
        )
    roles = {"Human": USER, "Assistant": ASSISTANT}
    return [(roles[role], said.strip()) for role, said in zip(parts[::2], parts[1::2], strict=True)]


def parted(before: list[Turn], answers: Sequence[list[Turn]]) -> tuple[list[Turn], list[str]]:
    """Part the turns of answers into those that all share and the last of each.

    Args:
        before: the prompt's turns; answers may begin with them.
    Returns:
        the turns up to the question, and the texts of the answers.
    Raises:
        ValueError: answers differ in other turns than their last, or no question comes before them.
    """
    begin = next(iter(answers), [])[:-1]
    if any(turns[:-1] != begin or ASSISTANT not in dict(turns[-1:]) for turns in answers):
        problem = say("do not end with one answer each, after the same turns")
        raise ValueError(problem if len(answers) > 1 else say("ends with no answer"))
    question = begin or before
    if begin and not _spoken(before) <= _spoken(begin):
        if (before[-1][0], begin[0][0]) == (USER, USER):
            raise ValueError(say("begin with another question than the prompt"))
        question = before + begin
    if USER not in dict(question[-1:]):
        raise ValueError(say("stand under no question"))
    return question, [turns[-1][1] for turns in answers]


def _spoken(turns: Sequence[Turn]) -> set[Turn]:
    return {(role, text.strip()) for role, text in turns}


def answers_fault(texts: Sequence[str]) -> str | None:
    """Say why a row of prompt, chosen and rejected cannot be learnt; None: it can."""
    _, chosen, rejected = map(str.strip, texts)
    if "" in (chosen, rejected):
        return EMPTY
    return EQUAL if chosen == rejected else None


def check_answers(dropped: Dropped, sources: str) -> None:
    """Refuse data with such rows, counting and naming them.

    Args:
        dropped: what was left out of these sources.
    Raises:
        UserError: there are any.
    """
    words = {
        EQUAL: say("with equal answers, chosen and rejected, which cannot be trained on"),
        EMPTY: say("with an empty chosen or rejected answer"),
    }
    problems = []
    for fault, what in words.items():
        if entry := dropped.reasons.get(fault):
            prompts = dict.fromkeys(repr(text.partition(" | ")[0][:_SHOWN_CHARS]) for text in entry["samples"])
            problems.append(
                say(
                    "--train_file: {sources}: {rows} {what}, such as at the prompt {named}; fix the data, or use "
                    "--skip_bad_rows=True to skip such rows",
                    sources=sources,
                    rows=counted(entry["count"], "row"),
                    what=what,
                    named=", ".join(prompts),
                )
            )
    refuse(problems)
