"""The columns of a file that make a row, and how: texts, and turns that come before them."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from data.sources.expressions import NUMBER, TABLE, TEXT, TURNS, Expression, text_of, turns_in_cell
from data.text.conversations import ANSWERS
from data.text.preferences import dialogue, parted
from data.text.templates import ASSISTANT, SYSTEM, USER, Turn
from language import join, say
from settings.fields import listed

RowOf = Callable[[Mapping[str, Any]], tuple[str, ...]]


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

    def _expressions(self, names: Sequence[str]) -> list[Expression]:
        """The texts as a file with these columns has them; without a prompt that is what the answers begin with."""
        expressions = []
        for place, text in enumerate(self.texts):
            also = {TURNS} if self.is_spoken else set()
            if place == 1 and len(self.texts) == 2:  # a response
                also |= {TURNS} if self.has_answers else set()
                also |= {NUMBER} if self.is_known else set()
            if text:
                expressions.append(Expression.of(text, names, self.is_known, frozenset(also)))
        return expressions

    def kinds(self, names: Sequence[str]) -> dict[str, set[str]]:
        """What the cells may hold of those columns of a file that are read, each once; as they were asked for if not there.

        Args:
            names: the file's columns.
        """
        kinds: dict[str, set[str]] = {}
        for expression in self._expressions(names):
            for column, key in expression.parts:
                kinds.setdefault(column, set()).update(expression.also, {TABLE if key else TEXT})
        if self.turns and (self.turns in names or not self.is_known or not self.texts):
            kinds.setdefault(self.turns, set()).update({TURNS, TEXT})
        if self.system and (self.system in names or not self.is_known):
            kinds.setdefault(self.system, set()).add(TEXT)
        return kinds

    def row_of(self, names: Sequence[str]) -> RowOf:
        """What makes a row of a record of a file, column -> cell: texts, and but for plain ones JSON of the turns before.

        Args:
            names: the file's columns.
        Returns:
            a function that raises ValueError, with what is wrong, for a bad record.
        """
        rows = {"plain": self._plain_row, ANSWERS: self._row_with_answers}
        return partial(rows.get(self.form, self._row_with_turns), self._expressions(names))

    def _plain_row(self, expressions: Sequence[Expression], record: Mapping[str, Any]) -> tuple[str, ...]:
        return self._filled([expression.read(record) for expression in expressions])

    def _row_with_answers(self, expressions: Sequence[Expression], record: Mapping[str, Any]) -> tuple[str, ...]:
        prompt, response = expressions
        answers = response.answers(record)
        text, _ = self._filled([prompt.read(record), answers[0]])
        return text, json.dumps(answers, ensure_ascii=False)

    def _row_with_turns(self, expressions: Sequence[Expression], record: Mapping[str, Any]) -> tuple[str, ...]:
        before = self._before(record)
        cells: Sequence[Any] = [
            expression.answers(record)[0] if self.has_answers and place == 1 else expression.read(record)
            for place, expression in enumerate(expressions)
        ]
        if self.is_spoken:
            before, cells = self._asked(before, cells)
        return *self._filled(cells), json.dumps(self._ruled(before, record), ensure_ascii=False)

    def _filled(self, cells: Sequence[Any]) -> tuple[str, ...]:
        """The texts of a row; of a prompt and its response, neither may be blank. Preferences are checked as a whole."""
        if len(self.texts) == 2:
            for name, cell in zip(self.texts, cells, strict=True):
                if not cell or cell.isspace():
                    raise ValueError(say("{value} is empty", value=name or "prompt"))
        return tuple(cells)

    def question(self, record: Mapping[str, Any], names: Sequence[str]) -> list[Turn]:
        """The turns of a record up to its last question, to be answered.

        Raises:
            ValueError: with what is wrong.
        """
        before = self._before(record)
        if self.texts:
            asked = self._expressions(names)[0].read(record)
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
        return turns_in_cell(record, self.turns)

    def _ruled(self, turns: list[Turn], record: Mapping[str, Any]) -> list[Turn]:
        """With the rules of their column, unless the turns have some."""
        if not self.system or record.get(self.system) is None or any(role == SYSTEM for role, _ in turns):
            return turns
        rules = text_of(record, self.system)
        return [(SYSTEM, rules), *turns] if rules.strip() else turns

    def _asked(self, before: list[Turn], cells: Sequence[Any]) -> tuple[list[Turn], list[str]]:
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
