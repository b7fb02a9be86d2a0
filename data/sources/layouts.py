"""The layouts of files that need no flag: which columns say what is learnt of them.

`LAYOUTS` is an ordered table; a file has the first layout that it fits. A new one is a line there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import NoneType

from data.sources.columns import Columns
from data.sources.expressions import Cell, Expression
from data.sources.reader import Head
from data.sources.relevance import JudgedLayout
from settings.declared import DataConfig
from settings.fields import AUTO

TEXT = "text"
PAIRS = "pairs"
PREFERENCES = "preferences"
CONVERSATIONS = "conversations"
PROMPTS = "prompts"
# By the number of texts of a row; conversations have none, only turns.
TEACHES = (CONVERSATIONS, TEXT, PAIRS, PREFERENCES)
# What rows are read for, and the contents of which some will do.
CONTENTS = {
    "": (TEXT, PAIRS, CONVERSATIONS, PREFERENCES),
    PAIRS: (PAIRS, CONVERSATIONS),
    PREFERENCES: (PREFERENCES,),
    PROMPTS: (PROMPTS, PAIRS, CONVERSATIONS),
}
MAY_BECOME_PAIRS = ("", PAIRS)  # Rows that are read for these may be made into pairs.
RULES = "system"  # A column of this name has the rules of a conversation.
EARLIER = "history"  # A column of this name has the turns before the prompt.
TRANSLATION = "translation"  # one column, {"en": ..., "zh": ...}
SETTING = "--"  # The names of columns that a setting names begin so.
DEFAULTS = DataConfig()


@dataclass(frozen=True)
class Layout:
    """One way in which a file holds what is learnt.

    Args:
        teaches: text, pairs, preferences or conversations.
        texts: columns, or expressions, of prompt and answers, in the words of `data.sources.expressions`; an empty
            prompt is what the answers begin with. Of a prompt that is joined, one part is needed (`JOINTS` says which),
            and the others may be missing. `--x_column` is the column that this setting names; {0} and {1} are the first
            two keys of the column `translation`.
        turns: the column of a conversation, which stands before the prompt, or says all.
    """

    teaches: str
    texts: tuple[str, ...] = ()
    turns: str = ""

    def columns(self, data: DataConfig, head: Head, count: int | None) -> Columns | None:
        """The columns of a file that has this layout; None: it has another.

        Args:
            count: of the texts that are read; None: all.
        """
        history = data.history_column or ""
        expressions = [_expression(text, data, head) for text in self.texts[:count]]
        if None in expressions or (self.turns and history) or self.turns not in ("", *head.names):
            return None
        texts = tuple(map(str, expressions))
        # Who names the prompt names what stands beside it, too.
        beside = {} if "".join(self.texts[:1]).startswith(SETTING) else head.sample
        has_answers = len(texts) == 2 and "" not in texts and _may_be_several(texts[1], head.sample)
        spoken = texts[:1] if has_answers else texts
        return Columns(
            texts,
            self.turns or history or _beside(EARLIER, list, beside),
            _beside(RULES, str, beside),
            is_spoken="" in texts or any(isinstance(head.sample.get(text), (list, dict)) for text in spoken),
            is_known=history in ("", *head.sample),
            has_answers=has_answers,
        )


BOTH_ANSWERS = ("--chosen_column", "--rejected_column")
LAYOUTS = (
    Layout(PROMPTS, ("--prompt_column",)),
    Layout(PAIRS, ("--prompt_column", "--response_column")),
    Layout(PREFERENCES, ("--prompt_column", *BOTH_ANSWERS)),
    Layout(PREFERENCES, ("", *BOTH_ANSWERS), "messages"),
    Layout(PREFERENCES, ("", *BOTH_ANSWERS), "conversations"),
    Layout(CONVERSATIONS, (), "messages"),
    Layout(CONVERSATIONS, (), "conversations"),
    Layout(TEXT, ("--text_column",)),
    Layout(PREFERENCES, ("instruction+input", *BOTH_ANSWERS)),
    Layout(PREFERENCES, ("question", *BOTH_ANSWERS)),
    Layout(PREFERENCES, ("query", *BOTH_ANSWERS)),
    Layout(PREFERENCES, ("input", *BOTH_ANSWERS)),
    Layout(PREFERENCES, ("", *BOTH_ANSWERS)),  # TRL's implicit prompts, Anthropic's HH
)
# Who names other columns does not mean these:
PAIR_LAYOUTS: tuple[Layout | JudgedLayout, ...] = (
    Layout(PAIRS, ("instruction+input+context", "output")),  # Alpaca, LLaMA-Factory
    Layout(PAIRS, ("instruction+input+context", "response")),  # Dolly has a context
    Layout(PAIRS, ("question+context", "answers.text")),  # SQuAD
    Layout(PAIRS, ("question+context", "answer")),
    Layout(PAIRS, ("query", "response")),  # ms-swift
    Layout(PAIRS, ("prefix: input_text", "target_text")),  # simpletransformers
    Layout(PAIRS, ("prompt", "completion")),  # TRL
    Layout(PAIRS, ("source", "target")),
    Layout(PAIRS, ("document", "summary")),
    Layout(PAIRS, ("article", "highlights")),
    Layout(PAIRS, ("dialogue", "summary")),
    Layout(PAIRS, ("input", "output")),
    Layout(PAIRS, ("translation.{0}", "translation.{1}")),
    JudgedLayout(PAIRS),  # monoT5
)


def recognise(data: DataConfig, head: Head, kind: str = "") -> Columns | None:
    """The columns of a file by the names of the settings, or by those of well-known layouts; None: it has neither.

    Args:
        kind: "pairs", "preferences" or "prompts", where only such rows will do.
    """
    contents: Sequence[str] = CONTENTS[kind]
    makes_pairs = kind in MAY_BECOME_PAIRS
    conversations = data.messages_column
    if conversations != AUTO and CONVERSATIONS in contents and (makes_pairs or conversations in head.names):
        return Columns((), conversations, _beside(RULES, str, head.sample), is_known=True)
    count = None
    if makes_pairs and data.response_column == data.chosen_column:
        # The better answer of preferences is the response.
        contents = (PAIRS, CONVERSATIONS, PREFERENCES)
        count = 2
    layouts: Sequence[Layout | JudgedLayout] = LAYOUTS
    if (data.prompt_column, data.response_column) == (DEFAULTS.prompt_column, DEFAULTS.response_column):
        layouts = LAYOUTS + PAIR_LAYOUTS
    matches = (layout.columns(data, head, count) for layout in layouts if layout.teaches in contents)
    return next(filter(None, matches), None)


def _expression(text: str, data: DataConfig, head: Head) -> Expression | None:
    """An expression of a layout as a file has it; None where it lacks what is needed."""
    if text.startswith(SETTING):
        setting = text.removeprefix(SETTING)
        name = getattr(data, setting)
        # Later rows alone make a file no other, but may have the column that a user names.
        names = head.names if name == getattr(DEFAULTS, setting) else head.all_names
        expression = Expression.parse(name, head.all_names)
        return expression if {cell.column for cell in expression.cells} <= {*names} else None
    first_keys = [*_keys(head.sample.get(TRANSLATION)), "", ""]
    expression = Expression.parse(text.format(*first_keys), head.all_names, may_lack=True)
    needed = expression.needed
    has_column = needed.column in ("", *head.names)
    return expression if has_column and needed.key in ("", *_keys(head.sample.get(needed.column))) else None


def _keys(cell: object) -> list[str]:
    """The keys of a table, or of the first of a list of tables."""
    table = cell[0] if isinstance(cell, list) and cell else cell
    return list(table) if isinstance(table, Mapping) else []


def _beside(name: str, kind: type, sample: Mapping[str, object]) -> str:
    """The name of a column where a file has it with cells of this type, or without cells; empty where it has not."""
    return name if name in sample and isinstance(sample[name], (kind, NoneType)) else ""


def _may_be_several(response: str, sample: Mapping[str, object]) -> bool:
    """Whether the cells of a response are lists of texts, or may have some under a key."""
    cell = Cell.parse(response, list(sample))
    match sample.get(cell.column):
        case dict() as table if cell.key:
            return not isinstance(table.get(cell.key), str)
        case [first, *_] if not cell.key:
            return not isinstance(first, (list, dict))
    return cell.key != ""
