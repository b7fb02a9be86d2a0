"""Labels of texts: one a text (`sequence`), or one for each of its letters or words (`token`).

A label is a name or a number. Those of letters and words come as a list, as JSON or a Python literal of one, as names
with blanks between them, or as one letter each. Masked labels are not trained and do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Context, Decimal
from math import isinf, isnan
from typing import Any

from data.batches.collate import IGNORED_LABEL
from data.text.cells import NUMPY_STRINGS, kind_of, parsed
from settings.fields import counted, listed
from support.language import join, say

Span = tuple[int, int]  # where a letter or word begins, and where it ends
MOST_LABELS = 4096
EXACT = Context(prec=76)  # digits of the widest decimals of Arrow
# `_name` makes these of the cells of a mask:
MASKS: dict[str | None, bool] = {"1": True, "true": True, "True": True, "0": False, "false": False, "False": False}
LARGEST_NUMBER = 3.4028234e38  # that float32 holds, in which labels are stored


def label_of(cell: object, mask: object = None) -> list[str | None]:
    """The one label of a text, None where it is masked.

    Args:
        cell, mask: as a file has them; of the mask 1 where the label counts, None: it does.
    Raises:
        ValueError: with what is wrong.
    """
    if _is_list(cell):
        raise ValueError(say("holds a list; a text has one label (several labels per text are not supported)"))
    labels = [_name(cell)]
    if mask is not None:
        return _masked(labels, [mask])
    if labels == [None]:
        raise ValueError(say("is missing"))
    return labels


def labels_of(cell: object, mask: object = None) -> list[str | None]:
    """The labels of the letters or words of a text, None where they are masked; see `label_of`."""
    labels = [_name(entry) for entry in _entries(cell)]
    return labels if mask is None else _masked(labels, _entries(mask))


def _masked(labels: Sequence[str | None], mask: Sequence[object]) -> list[str | None]:
    counts = [_counts(entry) for entry in mask]
    if len(counts) != len(labels):
        raise ValueError(
            say("has {count:,} labels and a mask of {other_count:,}", count=len(labels), other_count=len(counts))
        )
    return [label if does_count else None for label, does_count in zip(labels, counts, strict=True)]


def numbered(labels: Sequence[str | None], names: Sequence[str]) -> list[float | None]:
    """The numbers that are learnt: of each label its place among the names, or without names what it says itself.

    Raises:
        ValueError: with what is wrong.
    """
    if not names:
        return [None if label is None else _number(label) for label in labels]
    numbers: dict[str | None, float | None] = {**dict(zip(names, range(len(names)), strict=True)), None: None}
    try:
        return [numbers[label] for label in labels]
    except KeyError as error:
        raise ValueError(
            say(
                "has the label {label!r}, which is none of {names}; name all with --labels",
                label=error.args[0][:60],
                names=listed(names),
            )
        ) from None


def in_order(names: Sequence[str]) -> list[str]:
    """Names sorted, whole numbers by their size."""
    is_numbers = all(name.removeprefix("-").isdecimal() for name in names)
    return sorted(names, key=lambda name: (int(name), name)) if is_numbers else sorted(names)


def is_fraction(name: str) -> bool:
    """Whether a label is a number that is not whole."""
    try:
        return not float(name).is_integer()
    except ValueError:
        return False


def spans_of(text: str, count: int, is_protein: bool = False) -> list[Span]:
    """Where the words of a text are if there are as many, or its letters; a single word of several letters is one.

    Args:
        is_protein: whether the text is letters alone, which are no word.
    Raises:
        ValueError: it has neither `count` letters nor words.
    """
    words = [match.span() for match in re.finditer(r"\S+", text)]
    if len(words) == count > 0 and not is_protein:
        return words
    if len(text) == count:
        return [(at, at + 1) for at in range(count)]
    sizes = [counted(len(text), "letter")]
    if len(words) > 1:
        sizes.append(counted(len(words), "word"))
    raise ValueError(say("has {count:,} labels, its text {letters}", count=count, letters=join(", ", sizes)))


def joined_words(cell: object) -> object:
    """The words of a list as one text, with a space between them; anything that is not a list as it is."""
    if isinstance(cell, str) and cell.startswith("["):
        with suppress(ValueError):  # a text may begin like a list
            return joined_words(parsed(cell))
    if not isinstance(cell, list):
        return cell
    if not all(isinstance(word, str) and len(word.split()) == 1 for word in cell):
        raise ValueError(say("holds a list in which some word is empty, has blanks or is no text"))
    return " ".join(cell)


def _unpacked(cell: object) -> object:
    """What a cell holds, also where it is the text of a list, as CSV files have it; ValueError where that is broken."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        return parsed(cell)
    return cell


def _is_list(cell: object) -> bool:
    try:
        return isinstance(_unpacked(cell), list)
    except ValueError:  # A name may begin like a list.
        return NUMPY_STRINGS.search(str(cell)) is not None


def _entries(cell: object) -> list[Any]:
    """The entries of a cell: a list, JSON or a Python literal of one, names with blanks between them, or letters."""
    try:
        entries = _unpacked(cell)
    except ValueError as error:
        raise ValueError(say("holds no list ({error})", error=error)) from None
    if isinstance(entries, str):
        words = entries.split()
        return words if len(words) > 1 else list(entries.strip())
    if not isinstance(entries, list):
        raise ValueError(say("is {kind}, not a list and not a text of letters", kind=kind_of(entries)))
    return entries


def _name(entry: object) -> str | None:
    """A label as a text: 1 and 1.0 are the same one."""
    if isinstance(entry, bool):
        return str(entry).lower()
    if isinstance(entry, (float, Decimal)):
        return _digits(entry)
    if entry in (None, IGNORED_LABEL):
        return None
    if not isinstance(entry, (int, str)):
        raise ValueError(say("holds {kind}, not a name and not a number", kind=type(entry).__name__))
    return str(entry).strip() or None


def _digits(number: float | Decimal) -> str | None:
    if isnan(number):
        return None
    if isinf(number):
        raise ValueError(say("holds {entry}, which is no label; leave it empty where there is none", entry=number))
    exact = EXACT.add(Decimal(str(number)), 0)  # By int(), 1e23 would be 99999999999999991611392.
    return format(EXACT.normalize(exact), "f")


def _number(label: str) -> float:
    try:
        number = float(label)
    except ValueError:
        raise ValueError(say("has the label {label!r}, which is no number", label=label[:60])) from None
    if not abs(number) <= LARGEST_NUMBER:
        raise ValueError(
            say(
                "has the label {label!r}, which is no number up to {largest}, the largest in 32 bits",
                label=label[:60],
                largest=f"{LARGEST_NUMBER:.2g}",
            )
        )
    return number


def _counts(entry: object) -> bool:
    try:
        return MASKS[_name(entry)]
    except (KeyError, ValueError):
        raise ValueError(say("has {entry!r} in its mask; allowed: 0 and 1", entry=str(entry)[:60])) from None
