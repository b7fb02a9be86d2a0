"""Pairs to train on from a row with several turns.

Three usual shapes are read: a list of objects with `role` and `content`, one with `from` and `value`, and a list of
[question, answer] pairs; each may also be JSON in a text, as in CSV files, and the content of a message may be a list of
parts of text. Reading turns the turns of a row into one JSON text, [[role, text], ...], so that rows stay rows of texts on
their way to the processes that encode. There `Examples`
makes the pairs: what was said before goes into the encoder, through the template, and the answer is the response. The
last answer of a conversation is learnt, or every one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from data.text.cells import parsed
from data.text.clean import Dropped, fault, normalise
from data.text.templates import ASSISTANT, SYSTEM, USER, Template, Turn
from language import join, say
from settings.fields import is_encodable, listed

ROLES = {
    "user": USER, "human": USER, "prompter": USER, "question": USER,
    "assistant": ASSISTANT, "gpt": ASSISTANT, "bot": ASSISTANT, "model": ASSISTANT, "chatgpt": ASSISTANT,
    "system": SYSTEM, "developer": SYSTEM,
}  # fmt: skip
ANSWERS = "answers"  # the form of pairs that may have several right answers
MESSAGES_COLUMNS = ("messages", "conversations")  # names that are recognised by themselves
_KEYS = (("role", "content"), ("from", "value"))
TextRow = tuple[str, ...]


@dataclass
class Usable:
    """Examples that are left of rows, each list in their order.

    Args:
        texts: what is encoded. turns: those that the prompt was worded of; none where there is no template.
        references: of each its right answers but for the first, which is learnt.
        places: among the rows. blank: rows that were. dropped: those that cleaning left out.
    """

    texts: list[TextRow] = field(default_factory=list)
    turns: list[list[Turn]] = field(default_factory=list)
    references: list[list[str]] = field(default_factory=list)
    places: list[int] = field(default_factory=list)
    blank: int = 0
    dropped: Dropped = field(default_factory=Dropped)


def turns_of(cell: object) -> list[Turn]:
    """The turns of a cell.

    Args:
        cell: a message, a list in one of the usual shapes, JSON or a Python literal of either, or None and blank text for no turns.
    Raises:
        ValueError: it is none of them, with what is wrong.
    """
    if isinstance(cell, str):
        try:
            cell = parsed(cell) if cell.strip() else []
        except ValueError as error:
            raise ValueError(say("holds no list of turns ({error})", error=error)) from None
    if cell is None:
        return []
    if isinstance(cell, dict):
        cell = [cell]
    if not isinstance(cell, list):
        raise ValueError(say("holds {kind}, not a list of turns", kind=type(cell).__name__))
    return [turn for number, entry in enumerate(cell, 1) for turn in _turns(entry, number)]


def _turns(entry: object, number: int) -> Iterator[Turn]:
    """The turns of one entry: one message, or a question and its answer."""
    if isinstance(entry, dict):
        for role_key, text_key in _KEYS:
            if role_key in entry:
                role = ROLES.get(str(entry[role_key]).lower())
                if role is None:
                    allowed = join(", ", ROLES)
                    raise ValueError(
                        say(
                            "turn {number} has the role {value}; allowed: {allowed}",
                            number=number,
                            value=listed([entry[role_key]]),
                            allowed=allowed,
                        )
                    )
                yield role, _text(entry.get(text_key), number)
                return
        raise ValueError(
            say(
                "turn {number} has neither role and content nor from and value; it has {entry}",
                number=number,
                entry=listed(entry),
            )
        )
    if not isinstance(entry, list) or len(entry) != 2:
        raise ValueError(say("turn {number} is neither a message nor a [question, answer] pair", number=number))
    yield USER, _text(entry[0], number)
    yield ASSISTANT, _text(entry[1], number)


def _text(content: object, number: int) -> str:
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        content = "".join(_part(part, number) for part in content)
    if not isinstance(content, str):
        raise ValueError(
            say(
                "turn {number} holds {kind}, not a text",
                number=number,
                kind="null" if content is None else type(content).__name__,
            )
        )
    if not is_encodable(content):
        raise ValueError(say("turn {number} holds half of a surrogate pair", number=number))
    return content


def _part(part: dict[str, object], number: int) -> str:
    """The text of a part of a message. In Arrow, parts of all kinds have all keys, null where they do not apply."""
    kind, text = part.get("type"), part.get("text")
    if kind not in (None, "text") or not isinstance(text, str):
        raise ValueError(
            say(
                "turn {number} holds a part of the type {value}; only text is read", number=number, value=listed([kind])
            )
        )
    return text


@dataclass(frozen=True)
class Examples:
    """Makes the texts to encode of a row as it was read, cleaning them on the way.

    Args:
        template: puts the prompt into words; None: rows are plain text.
        clean: whether texts are normalised, and rows dropped that are not worth training on.
        form: "plain" (texts alone), "messages" (one cell with all turns), "history" (prompt, answer, and a cell with the
            turns before), or "answers" (prompt, and JSON of the right answers).
        each_turn: whether every answer of a conversation is learnt, not only its last.
        prepare: how the texts of proteins are prepared, see `data.text.proteins`; none: they are not.
    """

    clean: bool = False
    template: Template | None = None
    form: str = "plain"
    each_turn: bool = False
    prepare: str = "none"

    def usable(self, rows: Sequence[TextRow]) -> Usable:
        """Make the examples of rows, and leave out the blank and the bad ones."""
        left = Usable()
        for place, row in enumerate(rows):
            references = json.loads(row[1])[1:] if self.form == ANSWERS else []
            for before, raw in self.parts(row):
                texts = tuple(map(self._cleaned, raw))
                if (unfit := self.unfit(texts)) is not None:
                    left.dropped.add(unfit, texts)
                elif not all(text and not text.isspace() for text in texts):
                    left.blank += 1
                elif self.clean and (reason := fault(texts)) is not None:
                    left.dropped.add(reason, texts)
                else:
                    turns: list[Turn] = []
                    if self.template is not None:
                        turns = [(role, self._cleaned(text)) for role, text in before]
                        turns.append((USER, texts[0]))
                        texts = (self.template.prompt(turns), *texts[1:])
                    left.texts.append(texts)
                    left.turns.append(turns)
                    left.references.append([self._cleaned(text) for text in references])
                    left.places.append(place)
        return left

    def _cleaned(self, text: str) -> str:
        return normalise(text) if self.clean else text

    def texts(self, row: TextRow) -> list[str]:
        """The texts that a row holds, for training a tokenizer."""
        if self.form == "plain":
            return list(row)
        if self.form == ANSWERS:
            return [row[0], *json.loads(row[1])]
        turns = json.loads(row[-1])
        return [*row[:-1], *(text for _, text in turns)]

    def unfit(self, texts: TextRow) -> str | None:
        """Say why an example cannot be learnt though none of its texts is blank; None: it can."""
        return None

    def parts(self, row: TextRow) -> Iterator[tuple[list[Turn], TextRow]]:
        """For each example of a row: the turns before, and the prompt with its answer or answers."""
        if self.form == "plain":
            yield [], row
            return
        if self.form == ANSWERS:
            yield [], (row[0], json.loads(row[1])[0])
            return
        turns = turns_in(row)
        if self.form == "history":
            turns += [(USER, row[0]), (ASSISTANT, row[1])]
        answers = [at for at in range(1, len(turns)) if turns[at][0] == ASSISTANT and turns[at - 1][0] == USER]
        chosen = answers if self.each_turn else answers[-1:]
        for at in chosen:
            yield turns[: at - 1], (turns[at - 1][1], turns[at][1])
        if not chosen:
            yield [], ("", "")  # A row without a question that has an answer is a blank one.


def turns_in(row: TextRow) -> list[Turn]:
    """The turns of the last cell of a row, as reading has written them."""
    return [(role, text) for role, text in json.loads(row[-1])]
