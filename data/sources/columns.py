"""The columns of a file that make a row, and how: texts, and turns that come before them."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, ClassVar

from data.sources.expressions import ANSWERS as SEVERAL_ANSWERS
from data.sources.expressions import NUMBER, TEXT, TURNS, Cell, Expression, Shapes
from data.text.conversations import ANSWERS, Examples, TextRow
from data.text.preferences import dialogue, parted
from data.text.templates import ASSISTANT, SYSTEM, USER, Turn
from settings.fields import listed
from support.language import join, say

Record = Mapping[str, Any]
RowOf = Callable[[Record], TextRow]
PLAIN = "plain"
MESSAGES = "messages"
HISTORY = "history"


def numbered_columns(names: Sequence[str], usual: Sequence[str]) -> list[str]:
    """The columns with one of the usual names, which numbers may follow, as in `negative_1`."""
    return [name for name in names if name.rstrip("_0123456789") in usual]


@dataclass(frozen=True)
class Columns:
    """The columns that make the rows of files, and how.

    Args:
        texts: columns or expressions: (text,), (prompt, response) or (prompt, chosen, rejected); none: `turns` says
            all. An empty name of a prompt: it is what the answers begin with.
        turns, system: columns with the turns before the prompt, and with rules; none: empty.
        is_spoken: whether texts may be messages or lists of them. is_known: whether the shape was recognised, so that a
            file may lack what need not be there, and a response may be a number.
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
    # How their rows become examples; None: as the task has it.
    examples_class: ClassVar[type[Examples] | None] = None

    @classmethod
    def of(cls, columns: Columns | Sequence[str]) -> Columns:
        """Names of text columns as `Columns`."""
        return columns if isinstance(columns, Columns) else cls(tuple(columns))

    @property
    def form(self) -> str:
        """Which form of `data.text.conversations.Examples` the rows have; "messages" and "history" end with a cell of
        turns.
        """
        if not self.texts:
            return MESSAGES
        if self.turns or self.system or self.is_spoken:
            return HISTORY
        return ANSWERS if self.has_answers else PLAIN

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
        before_answers = join(", ", filter(None, (self.system, self.turns, *self.texts[:1])))
        answers = self.texts[1:]
        return [before_answers or say("what {texts} begin with", texts=join(" and ", answers)), *answers]

    def cells(self) -> list[str]:
        """A name for each cell of a row."""
        texts = [text or "prompt" for text in self.texts]
        return texts if self.form in (PLAIN, ANSWERS) else [*texts, self.turns or self.system or "turns"]

    def kinds(self, names: Sequence[str]) -> dict[str, Shapes]:
        """The types of cells that each column of a file may have, of those that are read; as they were asked for if not
        there.

        Args:
            names: the file's columns.
        """
        kinds: dict[str, Shapes] = defaultdict(frozenset)
        for expression in self._expressions(names):
            for cell in expression.cells:
                kinds[cell.column] |= cell.shapes
        # A column that was recognised in one file may be missing in another; one that a setting names may not.
        may_lack_turns = self.is_known and self.texts
        if self.turns and (self.turns in names or not may_lack_turns):
            kinds[self.turns] |= TEXT | TURNS
        if self.system and self.system in names:
            kinds[self.system] |= TEXT
        return dict(kinds)

    def _expressions(self, names: Sequence[str]) -> list[Expression]:
        """The texts as a file with these columns has them; without a prompt that is what the answers begin with."""
        prompt = TEXT | TURNS if self.is_spoken else TEXT
        answer = TEXT | SEVERAL_ANSWERS if self.has_answers else prompt
        if self.is_known and len(self.texts) == 2:
            answer |= NUMBER
        shapes = [prompt, answer, answer]
        texts = zip(self.texts, shapes, strict=False)
        return [Expression.parse(text, names, self.is_known, shape) for text, shape in texts if text]

    def row_of(self, names: Sequence[str]) -> RowOf:
        """What makes a row of a record of a file: texts, and but for plain ones JSON of the turns before.

        Args:
            names: the file's columns.
        Returns:
            a function that raises ValueError, with what is wrong, for a bad record.
        """
        makers = {PLAIN: self._plain, ANSWERS: self._answers, MESSAGES: self._messages, HISTORY: self._history}
        return partial(makers[self.form], self._expressions(names))

    def check_end(self, row_of: RowOf) -> None:
        """A file has been read to its end by `row_of`: whether what stands beside its rows has ended too.

        Raises:
            UserError: it has not.
        """

    def question_of(self, names: Sequence[str]) -> Callable[[Record], list[Turn]]:
        """What gives the turns of a record up to its last question, to be answered.

        Args:
            names: the file's columns.
        Returns:
            a function that raises ValueError, with what is wrong, for a bad record.
        """
        return partial(self._question, self._expressions(names)[:1])

    def _plain(self, expressions: Sequence[Expression], record: Record) -> TextRow:
        return self._checked([expression.text(record) for expression in expressions])

    def _answers(self, expressions: Sequence[Expression], record: Record) -> TextRow:
        prompt, answers = [expression.texts(record) for expression in expressions]
        self._checked([prompt[0], answers[0]])
        return prompt[0], _json(answers)

    def _messages(self, _: Sequence[Expression], record: Record) -> TextRow:
        return (_json(self._ruled(self._before(record), record)),)

    def _history(self, expressions: Sequence[Expression], record: Record) -> TextRow:
        turns = self._before(record)
        cells = [expression.text_or_turns(record) for expression in expressions]
        if self.texts[0]:
            turns += _as_turns(USER, cells.pop(0))
        # A text under no question is a whole dialogue.
        text_turns = partial(_as_turns, ASSISTANT) if turns else _dialogue
        try:
            question, texts = parted(turns, list(map(text_turns, cells)))
        except ValueError as error:
            names = join(" and ", self.texts[1:])
            raise ValueError(say("{name} {error}", name=names, error=error)) from None
        return (*self._checked([question[-1][1], *texts]), _json(self._ruled(question[:-1], record)))

    def _question(self, expressions: Sequence[Expression], record: Record) -> list[Turn]:
        turns = self._before(record)
        for expression in expressions:
            turns += _as_turns(USER, expression.text_or_turns(record))
        while turns and turns[-1][0] != USER:
            turns.pop()
        if not turns or not turns[-1][1].strip():
            name = [*self.texts, self.turns][0]
            raise ValueError(say("{texts} is empty, there is nothing to answer", texts=name))
        return self._ruled(turns, record)

    def _checked(self, texts: list[str]) -> TextRow:
        """The same texts, unless a prompt without a response, which teaches nothing; preferences are checked as a
        whole.
        """
        stripped = list(map(str.strip, texts))
        if len(texts) == 2 and "" in stripped:
            raise ValueError(say("{value} is empty", value=self.cells()[stripped.index("")]))
        return tuple(texts)

    def _before(self, record: Record) -> list[Turn]:
        """The turns before the prompt."""
        if not self.turns or (self.texts and self.turns not in record):
            return []
        return Cell(self.turns).turns(record)

    def _ruled(self, turns: list[Turn], record: Record) -> list[Turn]:
        """With the rules of their column, unless the turns have some."""
        if not self.system or record.get(self.system) is None or SYSTEM in dict(turns):
            return turns
        (rules,) = Cell(self.system).texts(record)
        return [(SYSTEM, rules), *turns] if rules.strip() else turns


def _as_turns(role: str, cell: str | list[Turn]) -> list[Turn]:
    return [(role, cell)] if isinstance(cell, str) else cell


def _dialogue(cell: str | list[Turn]) -> list[Turn]:
    return dialogue(cell) if isinstance(cell, str) else cell


def _json(value: object) -> str:
    return json.dumps(value, ensure_ascii=False)
