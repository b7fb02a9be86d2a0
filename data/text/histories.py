"""Histories: rows that are sequences of items, such as what a user bought, and the text of an item.

An item of a file of codes (semantic ids) is written by one token a code, whose name holds its level: codes 12 and 7 are
`<a_12> <b_7>`. Without such a file items are texts, joined by a separator.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from decimal import Decimal
from string import ascii_lowercase
from typing import TYPE_CHECKING

from data.text.labels import entries_of
from language import say
from settings.declared import Config, DataConfig
from settings.errors import UserError

if TYPE_CHECKING:
    from data.tokenizers.tokenizer import Tokenizer

HISTORIES = "histories"  # the form of rows of `data.text.conversations.Examples`
BETWEEN_CODES = " "
Item = str | tuple[object, ...]  # its name, or its codes


@dataclass(frozen=True)
class ItemWriting:
    """How the items of histories are written.

    Args:
        separator: between items. window: most past items in a prompt.
        texts: of items by name; none: an item is its own text. source: fingerprint of the file that they come from.
    """

    separator: str
    window: int
    texts: Mapping[str, str] | None = None
    source: str = ""

    def texts_of(self, cell: object) -> list[str]:
        """The text of each item of a history.

        Args:
            cell: a list of names, numbers or lists of codes; JSON of one; or names separated by blanks.
        Raises:
            ValueError: it is no such list, or the file of items lacks one.
        """
        found = list[str]()
        for item in items_of(cell):
            if isinstance(item, tuple):
                found.append(code_text(item))
            elif self.texts is None:
                found.append(item)
            elif item in self.texts:
                found.append(self.texts[item])
            else:
                raise ValueError(say("has the item {item!r}, which --item_file lacks", item=item[:60]))
        return found


def separator_of(data: DataConfig) -> str:
    """What stands between the items of a history."""
    return data.item_separator if data.item_file is None else BETWEEN_CODES


def items_of(cell: object) -> list[Item]:
    """The items of a cell; raises ValueError with what is wrong."""
    return [tuple(item) if isinstance(item, list) and item else item_name(item) for item in entries_of(cell)]


def codes_of(cell: object) -> list[str]:
    """The codes of an item's cell: a list, JSON of one, a text with blanks between them, or a single code."""
    cell = [cell] if isinstance(cell, int) else cell
    return [item_name(code) for code in entries_of(cell)]


def item_name(item: object) -> str:
    """The name of an item: 12, 12.0 and "12" are the same one. Raises ValueError where it has none."""
    if isinstance(item, (int, float, Decimal)) and not isinstance(item, bool) and item == int(item):
        return str(int(item))
    if not isinstance(item, str) or not item.strip():
        held = "null" if item is None else say("an empty text") if isinstance(item, str) else type(item).__name__
        raise ValueError(say("holds {held}, not an item", held=held))
    return item.strip()


def code_text(codes: Iterable[object]) -> str:
    """The tokens of an item's codes, separated by blanks; codes that are no whole numbers are tokens as they are."""
    names = map(item_name, codes)
    return BETWEEN_CODES.join(
        f"<{_level(place)}_{name}>" if name.removeprefix("-").isdecimal() else name for place, name in enumerate(names)
    )


def code_tokens(texts: Iterable[str]) -> list[str]:
    """All tokens of items that are written by codes, level by level, by number."""
    return sorted({token for text in texts for token in text.split()}, key=_place_of)


def _level(place: int) -> str:
    """a .. z, aa, ab, ..."""
    name = ""
    while place >= 0:
        name, place = ascii_lowercase[place % 26] + name, place // 26 - 1
    return name


def _place_of(token: str) -> tuple[int, str, int, str]:
    level, _, number = token.strip("<>").rpartition("_")
    is_code = number.removeprefix("-").isdecimal()
    return len(level), level, int(number) if is_code else -1, token


def check_excluding(config: Config, tokenizer: Tokenizer, has_codes: bool) -> None:
    """Refuse to leave out items of prompts where a prompt has other tokens for them than an answer.

    Args:
        has_codes: whether items are written by codes, a token each everywhere.
    Raises:
        UserError: `exclude_seen` would find the first item of a prompt alone.
    """
    separator = tokenizer.template.histories.get("item_separator")
    if not config.generate.exclude_seen or separator is None or has_codes:
        return
    item, several = (ids.tolist() for ids in tokenizer.encode_prompts(["item", f"item{separator}item"]))
    if tokenizer.unk_id not in item and several[-len(item) :] != item:
        raise UserError(
            "--exclude_seen = True, compares tokens, and behind {separator!r} this tokenizer has others for an "
            "item; train with --item_separator=, (no blank behind it) or with an --item_file, or omit it",
            separator=separator,
        )
