"""The columns of a file that make a row, and how.

A column can be written as an expression: `instruction+input` is both texts, one below the other (the second may be missing
in a row), `prefix: input_text` both in one line, `translation.en` the text under a key of a cell that holds a table. A list of
texts in a response, or under its key, holds several right answers: the first is learnt, scores count the best. Files of well-known shapes need no flag: their columns are recognised by name, and told.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from decimal import Decimal
from math import isfinite
from typing import Any

from data.text.cells import parsed
from data.text.conversations import ANSWERS, MESSAGES_COLUMNS, turns_of
from data.text.preferences import dialogue, parted
from data.text.templates import ASSISTANT, SYSTEM, USER, Turn
from language import join, say
from settings.declared import DataConfig
from settings.fields import AUTO, listed

TRANSLATION = "translation"  # one column, {"en": ..., "zh": ...}
RULES = "system"
HISTORY = "history"
# prompt and response; of a prompt, what is behind + or before : may be missing in a file
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
TEXT, NUMBER, TURNS, TABLE = "text", "number", "turns", "table"  # what a cell may hold
RowOf = Callable[[Mapping[str, Any]], tuple[str, ...]]


@dataclass(frozen=True)
class _Text:
    """One text of a row as one file has it.

    Args:
        parts: columns, and of each a key in its tables or none. joint: what stands between several; needed: the one that a row must have.
        may_count: whether it may be a number, such as a label or a score. may_be_turns: or turns, in place of a text.
        has_answers: whether it may be a list of right answers.
    """

    parts: Sequence[tuple[str, str]]
    joint: str = ""
    needed: int = 0
    may_count: bool = False
    may_be_turns: bool = False
    has_answers: bool = False

    def answers(self, record: Mapping[str, Any]) -> list[str]:
        """The right answers of a record, each once; raises ValueError where it has none."""
        column, key = self.parts[0]
        cell: Any = record.get(column)
        entries: Any = cell
        if isinstance(cell, list) and key and all(isinstance(entry, dict) for entry in cell):
            entries = [entry.get(key) for entry in cell]
        elif key and not isinstance(cell, ValueError):
            entries = _table(column, cell).get(key)
        if not isinstance(entries, list):
            return [text_of(record, column, key, self.may_count)]
        texts = [text_of({column: entry}, column, "", self.may_count) for entry in entries]
        answers = list(dict.fromkeys(text for text in texts if text.strip()))
        if not answers:
            if key:
                raise ValueError(say("{column} has no text under {key}", column=column, key=key))
            raise ValueError(say("{column} is empty", column=column))
        return answers

    def read(self, record: Mapping[str, Any]) -> Any:
        """The text of a record, or its turns; raises ValueError where it has none."""
        if len(self.parts) == 1:
            column, key = self.parts[0]
            if self.has_answers:
                return self.answers(record)[0]
            if self.may_be_turns and not key and isinstance(record.get(column), (list, dict)):
                return _turns(record, column)
            return text_of(record, column, key, self.may_count)
        there = [part for part in self.parts if part == self.parts[self.needed] or record.get(part[0]) is not None]
        cells = [text_of(record, column, key, self.may_count) for column, key in there]
        return self.joint.join(cell for cell in cells if cell.strip())


@dataclass(frozen=True)
class Columns:
    """The columns that make the rows of files, and how.

    Args:
        texts: columns or expressions: (text,), (prompt, response) or (prompt, chosen, rejected); none: `turns` says all. An empty
            name of a prompt: it is what the answers begin with.
        turns, system: columns with the turns before the prompt, and with rules; none: empty.
        is_spoken: whether texts may be messages or lists of them. is_known: whether the shape was recognised, so that a file may
            lack what need not be there, and a response may be a number.
        has_answers: of pairs whether a response may be a list of right answers.
        names: of labels, see `LabelColumns`; None: there are no labels, or their names are not known yet.
    """

    texts: tuple[str, ...] = ()
    turns: str = ""
    system: str = ""
    is_spoken: bool = False
    is_known: bool = False
    has_answers: bool = False
    names: tuple[str, ...] | None = None

    @classmethod
    def of(cls, columns: Columns | Sequence[str]) -> Columns:
        """Names of text columns as `Columns`."""
        return columns if isinstance(columns, Columns) else cls(tuple(columns))

    @property
    def form(self) -> str:
        """Which form of `data.text.conversations.Examples` the rows have; "messages" and "history" end with a cell of turns."""
        if not self.texts:
            return "messages"
        if self.turns or self.system or self.is_spoken:
            return "history"
        return ANSWERS if self.has_answers else "plain"

    @property
    def has_turns(self) -> bool:
        """Whether turns may come before a prompt."""
        return bool(self.turns) or self.is_spoken

    def missing(self, file: object, problems: str, names: Sequence[str]) -> str:
        """What is said of a file that lacks some of these columns.

        Args:
            problems: which, in words. names: the file's columns.
        """
        return say(
            "{file}: {problems}; columns: {columns}; give yours with --text_column, or --prompt_column and "
            "--response_column (dpo: --chosen_column, --rejected_column)",
            file=file,
            problems=problems,
            columns=listed(names),
        )

    def sides(self) -> list[str]:
        """What the encoder's text is made of, and each of the decoder's, for people."""
        asked = [name for name in (self.system, self.turns, *self.texts[:1]) if name]
        return [
            ", ".join(asked) or say("what {texts} begin with", texts=join(" and ", self.texts[1:])),
            *self.texts[1:],
        ]

    def cells(self) -> list[str]:
        """A name for each cell of a row."""
        texts = [text or "prompt" for text in self.texts]
        return texts if self.form in ("plain", ANSWERS) else [*texts, self.turns or self.system or "turns"]

    def _texts(self, names: Sequence[str]) -> list[_Text]:
        """The texts as a file with these columns has them; without a prompt that is what the answers begin with."""
        is_pair = len(self.texts) == 2
        return [
            _Text(
                *_parts(text, names, self.is_known),
                may_count=self.is_known and is_pair and place == 1,
                may_be_turns=self.is_spoken,
                has_answers=self.has_answers and place == 1,
            )
            for place, text in enumerate(self.texts)
            if text
        ]

    def kinds(self, names: Sequence[str]) -> dict[str, set[str]]:
        """What the cells may hold of those columns of a file that are read, each once; as they were asked for if not there.

        Args:
            names: the file's columns.
        """
        found: dict[str, set[str]] = {}
        for text in self._texts(names):
            for column, key in text.parts:
                may = found.setdefault(column, set())
                may |= {TABLE} if key else {TEXT}
                may |= {TURNS} if text.may_be_turns and len(text.parts) == 1 and not key else set()
                may |= {NUMBER} if text.may_count else set()
                may |= {TURNS} if text.has_answers else set()
        for name, may in ((self.turns, {TURNS, TEXT}), (self.system, {TEXT})):
            if name and (name in names or not self.is_known or (name == self.turns and not self.texts)):
                found[name] = found.get(name, set()) | may
        return found

    def row_of(self, names: Sequence[str]) -> RowOf:
        """What makes a row of a record of a file, column -> cell: texts, and but for plain ones JSON of the turns before.

        Args:
            names: the file's columns.
        Returns:
            a function that raises ValueError, with what is wrong, for a bad record.
        """
        texts, is_pair, is_plain = self._texts(names), len(self.texts) == 2, self.form == "plain"

        def row(record: Mapping[str, Any]) -> tuple[str, ...]:
            if self.form == ANSWERS:
                prompt = texts[0].read(record)
                if not prompt or prompt.isspace():
                    raise ValueError(say("{column} is empty", column=self.texts[0]))
                return prompt, json.dumps(texts[1].answers(record), ensure_ascii=False)
            before, cells = self._before(record), [text.read(record) for text in texts]
            if self.is_spoken:
                before, cells = self._asked(before, cells)
            # a prompt without a response teaches nothing; preferences are checked as a whole
            for name, cell in zip(self.texts, cells, strict=True) if is_pair else ():
                if not cell or cell.isspace():
                    raise ValueError(say("{value} is empty", value=name or "prompt"))
            return tuple(cells) if is_plain else (*cells, json.dumps(self._ruled(before, record), ensure_ascii=False))

        return row

    def question(self, record: Mapping[str, Any], names: Sequence[str]) -> list[Turn]:
        """The turns of a record up to its last question, to be answered.

        Raises:
            ValueError: with what is wrong.
        """
        before = self._before(record)
        if self.texts:
            asked = self._texts(names)[0].read(record)
            before += [(USER, asked)] if isinstance(asked, str) else asked
        while before and before[-1][0] != USER:
            before.pop()
        if not before or not before[-1][1].strip():
            raise ValueError(
                say("{texts} is empty, there is nothing to answer", texts=self.texts[0] if self.texts else self.turns)
            )
        return self._ruled(before, record)

    def _before(self, record: Mapping[str, Any]) -> list[Turn]:
        if not self.turns or (self.texts and self.turns not in record):
            return []
        return _turns(record, self.turns)

    def _ruled(self, turns: list[Turn], record: Mapping[str, Any]) -> list[Turn]:
        """With the rules of their column, unless the turns have some."""
        if not self.system or record.get(self.system) is None or any(role == SYSTEM for role, _ in turns):
            return turns
        rules = text_of(record, self.system)
        return [(SYSTEM, rules), *turns] if rules.strip() else turns

    def _asked(self, before: list[Turn], cells: Sequence[str | list[Turn]]) -> tuple[list[Turn], list[str]]:
        """The turns before the question of a row whose cells may be turns; and its texts."""
        prompt, answers = (cells[0], cells[1:]) if self.texts[0] else ([], cells)
        before += [(USER, prompt)] if isinstance(prompt, str) else prompt
        try:
            said = [
                answer if isinstance(answer, list) else [(ASSISTANT, answer)] if before else dialogue(answer)
                for answer in answers
            ]
            asked, texts = parted(before, said)
        except ValueError as error:
            raise ValueError(say("{name} {error}", name=join(" and ", self.texts[1:]), error=error)) from None
        return asked[:-1], [asked[-1][1], *texts]


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
    column, key = _keyed(expression, list(sample))
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
    return all(column in names for column, _ in _parts(expression, names)[0])


def _parts(expression: str, names: Sequence[str], may_lack: bool = False) -> tuple[list[tuple[str, str]], str, int]:
    """Of an expression each part's column and a key in its tables, what stands between them, and which is needed.

    Args:
        may_lack: whether parts that a file has not are left out, but for the one that is needed.
    """
    for sign, joint, needed in (("+", "\n", 0), (": ", ": ", -1)) if expression not in names else ():
        pieces = expression.split(sign)
        there = [piece for piece in pieces if piece in names or piece.partition(".")[0] in names]
        if len(pieces) > 1 and (len(there) == len(pieces) or (may_lack and pieces[needed] in there)):
            return [_keyed(piece, names) for piece in there], joint, needed
    return [_keyed(expression, names)], "", 0


def _keyed(expression: str, names: Sequence[str]) -> tuple[str, str]:
    column, _, key = expression.partition(".")
    return (column, key) if key and expression not in names and column in names else (expression, "")


def _turns(record: Mapping[str, Any], name: str) -> list[Turn]:
    if name not in record:
        raise ValueError(say("has no {name}; it has {value}", name=name, value=listed(record) or say("nothing")))
    cell = record[name]
    try:
        if isinstance(cell, ValueError):
            raise cell
        return turns_of(cell)
    except ValueError as error:
        raise ValueError(say("{name} {error}", name=name, error=error)) from None


def text_of(record: Mapping[str, Any], name: str, key: str = "", may_count: bool = False) -> str:
    """The text of a cell, or under a key of a cell with a table."""
    if name not in record:
        raise ValueError(say("has no {name}; it has {value}", name=name, value=listed(record) or say("nothing")))
    cell = record[name]
    if isinstance(cell, str) and not key:
        return cell
    if isinstance(cell, ValueError):  # what a reader found wrong with it
        raise ValueError(say("{name} {error}", name=name, error=cell))
    if key:
        cell = _table(name, cell).get(key)
        cell = cell[0] if isinstance(cell, list) and cell else cell
    is_number = isinstance(cell, int) or (isinstance(cell, (float, Decimal)) and isfinite(cell))
    if may_count and is_number:
        return str(cell).lower() if isinstance(cell, bool) else format(Decimal(str(cell)), "f")
    if key and not isinstance(cell, str):
        raise ValueError(say("{name} has no text under {key}", name=name, key=key))
    if not isinstance(cell, str):
        raise ValueError(
            say("{name} is {kind}, not a text", name=name, kind="null" if cell is None else type(cell).__name__)
        )
    return cell


def _table(name: str, cell: object) -> Mapping[str, Any]:
    if isinstance(cell, str):
        try:
            cell = parsed(cell)
        except ValueError as error:
            raise ValueError(say("{name} holds no table ({error})", name=name, error=error)) from None
    if isinstance(cell, list) and all(isinstance(entry, tuple) and len(entry) == 2 for entry in cell):
        cell = dict(cell)  # a map of Arrow
    if not isinstance(cell, dict):
        held = "null" if cell is None else type(cell).__name__
        raise ValueError(say('{name} holds {held}, not a table such as {{"en": ...}}', name=name, held=held))
    return cell
