"""Pairs to train on from a row with several turns.

Three usual shapes are read: a list of objects with `role` and `content`, one with `from` and `value`, and a list of
[question, answer] pairs; each may also be JSON in a text, as in CSV files, and the content of a message may be a list
of parts of text. Reading turns the turns of a row into one JSON text, [[role, text], ...], so that rows stay rows of
texts on their way to the processes that encode. There `Examples`
makes the pairs: what was said before goes into the encoder, through the template, and the answer is the response. The
last answer of a conversation is learnt, or every one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import ClassVar

from data.text.cells import kind_of, parsed
from data.text.clean import Dropped, fault, normalise
from data.text.templates import ASSISTANT, SYSTEM, USER, Template, Turn
from settings.fields import is_encodable, listed
from support.language import join, say

ROLES = {
    "user": USER,
    "human": USER,
    "prompter": USER,
    "question": USER,
    "assistant": ASSISTANT,
    "gpt": ASSISTANT,
    "bot": ASSISTANT,
    "model": ASSISTANT,
    "chatgpt": ASSISTANT,
    "system": SYSTEM,
    "developer": SYSTEM,
}
ANSWERS = "answers"  # the form of pairs that may have several right answers
MESSAGES_COLUMNS = ("messages", "conversations")  # names that are recognised by themselves
TextRow = tuple[str, ...]


@dataclass
class Usable:
    """Examples that are left of rows, each list in their order.

    Args:
        texts: what is encoded. turns: those that the prompt was worded of; none where there is no template.
        references: of each its right answers but for the first, which is learnt.
        row_numbers: of each the row that it is of. blank: rows that were. dropped: those that cleaning left out.
    """

    texts: list[TextRow] = field(default_factory=list)
    turns: list[list[Turn]] = field(default_factory=list)
    references: list[list[str]] = field(default_factory=list)
    row_numbers: list[int] = field(default_factory=list)
    blank: int = 0
    dropped: Dropped = field(default_factory=Dropped)


def turns_of(cell: object) -> list[Turn]:
    """The turns of a cell.

    Args:
        cell: a message, a list in one of the usual shapes, JSON or a Python literal of either, or None and blank text
            for no turns.
    Raises:
        ValueError: it is none of them, with what is wrong.
    """
    if isinstance(cell, str):
        try:
            cell = parsed(cell) if cell.strip() else None
        except ValueError as error:
            raise ValueError(say("holds no list of turns ({error})", error=error)) from None
    entries: list[object]
    match cell:
        case None:
            entries = []
        case dict():
            entries = [cell]
        case list():
            entries = cell
        case _:
            raise ValueError(say("holds {kind}, not a list of turns", kind=kind_of(cell)))
    return [turn for number, entry in enumerate(entries, 1) for turn in _turns(entry, number)]


def _turns(entry: object, number: int) -> list[Turn]:
    """The turns of one entry: one message, or a question and its answer."""
    match entry:
        case {"role": role, "content": content} | {"from": role, "value": content}:
            return [(_role(role, number), _text(content, number))]
        case {"role": role}:
            return [(_role(role, number), _text(None, number))]
        case [question, answer]:
            return [(USER, _text(question, number)), (ASSISTANT, _text(answer, number))]
        case dict():
            raise ValueError(
                say(
                    "turn {number} has neither role and content nor from and value; it has {entry}",
                    number=number,
                    entry=listed(entry),
                )
            )
    raise ValueError(say("turn {number} is neither a message nor a [question, answer] pair", number=number))


def _role(name: object, number: int) -> str:
    try:
        return ROLES[str(name).lower()]
    except KeyError:
        message = "turn {number} has the role {value}; allowed: {allowed}"
        raise ValueError(say(message, number=number, value=listed([name]), allowed=join(", ", ROLES))) from None


def _text(content: object, number: int) -> str:
    if isinstance(content, list):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        raise ValueError(say("turn {number} holds {kind}, not a text", number=number, kind=kind_of(content)))
    if not is_encodable(content):
        raise ValueError(say("turn {number} holds half of a surrogate pair", number=number))
    return content


def _part(part: object, number: int) -> str:
    """The text of a part of a message. In Arrow, parts of all kinds have all keys, null where they do not apply."""
    match part:
        case {"type": kind} if kind not in (None, "text"):
            message = "turn {number} holds a part of the type {value}; only text is read"
            raise ValueError(say(message, number=number, value=listed([kind])))
        case {"text": str(text)}:
            return text
    raise ValueError(say("turn {number} holds {kind}, not a text", number=number, kind="list"))


@dataclass(frozen=True)
class Examples:
    """Makes the texts to encode of a row as it was read, cleaning them on the way.

    Args:
        template: puts the prompt into words; None: rows are plain text.
        clean: whether texts are normalised, and rows dropped that are not worth training on.
        form: "plain" (texts alone), "messages" (one cell with all turns), "history" (prompt, answer, and a cell with
            the turns before), or "answers" (prompt, and JSON of the right answers).
        each_turn: whether every answer of a conversation is learnt, not only its last.
        prepare: how the texts of proteins are prepared, see `data.text.proteins`; none: they are not.
    """

    clean: bool = False
    template: Template | None = None
    form: str = "plain"
    each_turn: bool = False
    prepare: str = "none"
    # The end of every prompt, which stays where a prompt is cut:
    ending: ClassVar[str] = ""

    def usable(self, rows: Sequence[TextRow]) -> Usable:
        """Make the examples of rows, and leave out the blank and the bad ones."""
        usable = Usable()
        for number, row in enumerate(rows):
            for before, raw in self.parts(row):
                texts = tuple(map(self._cleaned, raw))
                reason = self.unfit(texts)
                is_blank = not all(map(str.strip, texts))
                if self.clean and not is_blank and reason is None:
                    reason = fault(texts)
                if reason is not None:
                    usable.dropped.add(reason, texts)
                elif is_blank:
                    usable.blank += 1
                else:
                    turns = list[Turn]()
                    if self.template is not None:
                        turns = [(role, self._cleaned(text)) for role, text in before]
                        turns.append((USER, texts[0]))
                        texts = (self.template.prompt(turns), *texts[1:])
                    usable.texts.append(texts)
                    usable.turns.append(turns)
                    usable.references.append([self._cleaned(text) for text in self._other_answers(row)])
                    usable.row_numbers.append(number)
        return usable

    def _cleaned(self, text: str) -> str:
        return normalise(text) if self.clean else text

    def _other_answers(self, row: TextRow) -> list[str]:
        return json.loads(row[1])[1:] if self.form == ANSWERS else []

    def texts(self, row: TextRow) -> list[str]:
        """The texts that a row holds, for training a tokenizer."""
        match self.form:
            case "plain":
                return list(row)
            case "answers":
                return [row[0], *json.loads(row[1])]
        return [*row[:-1], *(text for _, text in turns_in(row))]

    def unfit(self, texts: TextRow) -> str | None:
        """Say why an example cannot be learnt though none of its texts is blank; None: it can."""
        return None

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        """For each example of a row: the turns before, and the prompt with its answer or answers."""
        match self.form:
            case "plain":
                yield [], row
                return
            case "answers":
                yield [], (row[0], json.loads(row[1])[0])
                return
            case "history":
                turns = [*turns_in(row), (USER, row[0]), (ASSISTANT, row[1])]
            case _:
                turns = turns_in(row)
        roles = [role for role, _ in turns]
        questions = [at for at, two_roles in enumerate(pairwise(roles)) if two_roles == (USER, ASSISTANT)]
        if not questions:
            yield [], ("", "")  # A row without a question that has an answer is a blank one.
        for at in questions if self.each_turn else questions[-1:]:
            yield turns[:at], (turns[at][1], turns[at + 1][1])


def turns_in(row: TextRow) -> list[Turn]:
    """The turns of the last cell of a row, as reading has written them."""
    return [(role, text) for role, text in json.loads(row[-1])]
