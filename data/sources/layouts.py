"""The layouts of files that need no flag: which columns say what is learnt of them.

`LAYOUTS` is an ordered table; a file has the first layout that it fits. A new one is a line there.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import astuple, dataclass, replace

from data.sources.columns import Columns
from data.sources.expressions import Cell, Expression
from data.sources.reader import Head
from settings.declared import DataConfig
from settings.fields import AUTO

TEXT, PAIRS, PREFERENCES, CONVERSATIONS, PROMPTS = "text", "pairs", "preferences", "conversations", "prompts"
TEACHES = (CONVERSATIONS, TEXT, PAIRS, PREFERENCES)  # by the number of texts of a row; conversations have turns alone


@dataclass(frozen=True)
class Purpose:
    """What rows are read for.

    Args:
        teaches: contents of which some will do.
        makes_pairs: whether rows may become pairs: then a --messages_column is all that is read, and --response_column
            may name the better answer of preferences.
        count: texts that are read of a row; None: all.
    """

    teaches: Sequence[str]
    makes_pairs: bool = False
    count: int | None = None


PURPOSES = {
    "": Purpose((TEXT, PAIRS, CONVERSATIONS, PREFERENCES), makes_pairs=True),
    PAIRS: Purpose((PAIRS, CONVERSATIONS), makes_pairs=True),
    PREFERENCES: Purpose((PREFERENCES,)),
    PROMPTS: Purpose((PROMPTS, PAIRS, CONVERSATIONS)),
}
BETTER_ANSWERS = Purpose((PAIRS, CONVERSATIONS, PREFERENCES), makes_pairs=True, count=2)
# Columns beside the texts that are read where their cells are of these types: rules, and turns before the prompt.
RULES, RULES_TYPES = "system", (str, type(None))
EARLIER, EARLIER_TYPES = "history", (list, type(None))
TRANSLATION = "translation"  # one column, {"en": ..., "zh": ...}
SETTING = "--"  # how the names begin of those columns that a setting names
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
        earlier = data.history_column or ""
        expressions = [_expression(text, data, head) for text in self.texts[:count]]
        is_named_otherwise = self.turns and earlier
        if None in expressions or is_named_otherwise or self.turns not in ("", *head.names):
            return None
        # Who names the prompt names what stands beside it, too.
        beside = {} if "".join(self.texts[:1]).startswith(SETTING) else head.sample
        turns = self.turns or earlier or _beside(EARLIER, EARLIER_TYPES, beside)
        columns = Columns(
            tuple(map(str, expressions)),
            turns,
            _beside(RULES, RULES_TYPES, beside),
            is_known=earlier in ("", *head.sample),
        )
        return _with_shapes(columns, head.sample)


LAYOUTS = (
    Layout(PROMPTS, ("--prompt_column",)),
    Layout(PAIRS, ("--prompt_column", "--response_column")),
    Layout(PREFERENCES, ("--prompt_column", "--chosen_column", "--rejected_column")),
    Layout(PREFERENCES, ("", "--chosen_column", "--rejected_column"), "messages"),
    Layout(PREFERENCES, ("", "--chosen_column", "--rejected_column"), "conversations"),
    Layout(CONVERSATIONS, (), "messages"),
    Layout(CONVERSATIONS, (), "conversations"),
    Layout(TEXT, ("--text_column",)),
    Layout(PREFERENCES, ("instruction+input", "--chosen_column", "--rejected_column")),
    Layout(PREFERENCES, ("question", "--chosen_column", "--rejected_column")),
    Layout(PREFERENCES, ("query", "--chosen_column", "--rejected_column")),
    Layout(PREFERENCES, ("input", "--chosen_column", "--rejected_column")),
    Layout(PREFERENCES, ("", "--chosen_column", "--rejected_column")),  # TRL's implicit prompts, Anthropic's HH
)
# Those that are not meant by who names other columns.
PAIR_LAYOUTS = (
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
)


def recognise(data: DataConfig, head: Head, kind: str = "") -> Columns | None:
    """The columns of a file by the names of the settings, or by those of well-known layouts; None: it has neither.

    Args:
        kind: "pairs", "preferences" or "prompts", where only such rows will do.
    """
    purpose = PURPOSES[kind]
    conversations = data.messages_column
    is_asked_for = conversations != AUTO and CONVERSATIONS in purpose.teaches
    if is_asked_for and (purpose.makes_pairs or conversations in head.names):
        return Columns((), conversations, _beside(RULES, RULES_TYPES, head.sample), is_known=True)
    if purpose.makes_pairs and data.response_column == data.chosen_column:
        purpose = BETTER_ANSWERS
    layouts: Sequence[Layout] = LAYOUTS
    if (data.prompt_column, data.response_column) == (DEFAULTS.prompt_column, DEFAULTS.response_column):
        layouts = LAYOUTS + PAIR_LAYOUTS
    matches = (layout.columns(data, head, purpose.count) for layout in layouts if layout.teaches in purpose.teaches)
    return next(filter(None, matches), None)


def _expression(text: str, data: DataConfig, head: Head) -> Expression | None:
    """An expression of a layout as a file has it; None where it lacks what is needed."""
    if text.startswith(SETTING):
        return _of_setting(text.removeprefix(SETTING), data, head)
    first_keys = *_keys(head.sample.get(TRANSLATION)), "", ""
    expression = Expression.parse(text.format(*first_keys), head.all_names, may_lack=True)
    column, key, _ = astuple(expression.needed)
    is_there = column in ("", *head.names) and key in ("", *_keys(head.sample.get(column)))
    return expression if is_there else None


def _of_setting(setting: str, data: DataConfig, head: Head) -> Expression | None:
    name = getattr(data, setting)
    # Later rows alone make a file no other, but may have the column that a user names.
    names = head.names if name == getattr(DEFAULTS, setting) else head.all_names
    expression = Expression.parse(name, head.all_names)
    return expression if {cell.column for cell in expression.cells} <= {*names} else None


def _keys(cell: object) -> list[str]:
    """The keys of a table, or of the first of a list of tables."""
    table = cell[0] if isinstance(cell, list) and cell else cell
    return list(table) if isinstance(table, Mapping) else []


def _beside(name: str, types: tuple[type, ...], sample: Mapping[str, object]) -> str:
    """The name of a column where a file has it with cells of these types; empty where it has not."""
    return name if isinstance(sample.get(name, 0), types) else ""


def _with_shapes(columns: Columns, sample: Mapping[str, object]) -> Columns:
    """The same, of texts that may be messages, and of responses that may be several right answers, where they are."""
    texts = columns.texts
    has_answers = len(texts) == 2 and "" not in texts and _may_be_several(texts[1], sample)
    spoken = texts[:1] if has_answers else texts
    is_spoken = "" in texts or any(isinstance(sample.get(text), (list, dict)) for text in spoken)
    return replace(columns, is_spoken=is_spoken, has_answers=has_answers)


def _may_be_several(response: str, sample: Mapping[str, object]) -> bool:
    """Whether the cells of a response are lists of texts, or may have some under a key."""
    cell = Cell.parse(response, list(sample))
    match sample.get(cell.column):
        case dict() as table if cell.key:
            return not isinstance(table.get(cell.key), str)
        case [first, *_] if not cell.key:
            return not isinstance(first, (list, dict))
    return cell.key != ""
