"""Labels of texts: one a text (`sequence`), or one for each of its letters or words (`token`).

A label is a name or a number. Those of letters and words come as a list, as JSON or a Python literal of one, as names with blanks between them, or as one
letter each. Masked labels are not trained and do not count.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from decimal import Decimal
from math import isinf, isnan
from typing import Any

from data.batches.collate import IGNORED_LABEL
from data.text.cells import NUMPY_STRINGS, parsed
from language import join, say
from settings.fields import counted, listed

Span = tuple[int, int]  # where a letter or word begins, and where it ends
MOST_LABELS = 4096
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
    labels = _masked([cell], [True if mask is None else mask])
    if mask is None and labels == [None]:
        raise ValueError(say("is missing"))
    return labels


def labels_of(cell: object, mask: object = None) -> list[str | None]:
    """The labels of the letters or words of a text, None where they are masked; see `label_of`."""
    entries = _entries(cell)
    return _masked(entries, [True] * len(entries) if mask is None else _entries(mask))


def _masked(entries: Sequence[object], mask: Sequence[object]) -> list[str | None]:
    labels = [_name(entry) for entry in entries]
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
    places = {name: place for place, name in enumerate(names)}
    if unknown := [label for label in labels if label is not None and names and label not in places]:
        raise ValueError(
            say(
                "has the label {label!r}, which is none of {names}; name all with --labels",
                label=unknown[0][:60],
                names=listed(names),
            )
        )
    number = places.__getitem__ if names else _number
    return [None if label is None else number(label) for label in labels]


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
    words = [] if is_protein else [match.span() for match in re.finditer(r"\S+", text)]
    if words and len(words) == count and (count > 1 or len(text) > 1):
        return words
    if len(text) == count:
        return [(at, at + 1) for at in range(count)]
    sizes = [counted(len(text), "letter"), *([counted(len(words), "word")] if len(words) > 1 else [])]
    raise ValueError(say("has {count:,} labels, its text {letters}", count=count, letters=join(", ", sizes)))


def words_of(cell: object) -> object:
    """A text of a list of words, parted by blanks; anything else as it is."""
    if isinstance(cell, str) and cell.startswith("["):
        with suppress(ValueError):  # a text may begin like a list
            return words_of(parsed(cell))
    if not isinstance(cell, list):
        return cell
    if not all(isinstance(word, str) and word and len(word.split()) == 1 for word in cell):
        raise ValueError(say("holds a list in which some word is empty, has blanks or is no text"))
    return " ".join(cell)


def _is_list(cell: object) -> bool:
    """Whether a cell is a list, or the text of one, as CSV files have it."""
    if not isinstance(cell, str):
        return isinstance(cell, list)
    if not cell.lstrip().startswith("["):
        return False
    with suppress(ValueError):  # a name may begin like a list
        return isinstance(parsed(cell), list)
    return NUMPY_STRINGS.search(cell) is not None


def _entries(cell: object) -> list[Any]:
    """The entries of a cell: a list, JSON or a Python literal of one, names with blanks between them, or letters."""
    if isinstance(cell, str) and cell.lstrip().startswith("["):
        try:
            cell = parsed(cell)
        except ValueError as error:
            raise ValueError(say("holds no list ({error})", error=error)) from None
    elif isinstance(cell, str):
        words = cell.split()
        return words if len(words) > 1 else list(cell.strip())
    if not isinstance(cell, list):
        kind = "null" if cell is None else type(cell).__name__
        raise ValueError(say("is {kind}, not a list and not a text of letters", kind=kind))
    return cell


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
    text = format(Decimal(str(number)), "f")  # By int(), 1e23 would be 99999999999999991611392.
    if "." in text:
        text = text.rstrip("0").rstrip(".")
    return text if number else "0"


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
    if entry in (1, True, "1", 1.0, "true", "True"):
        return True
    if entry in (0, False, "0", 0.0, "false", "False"):
        return False
    raise ValueError(say("has {entry!r} in its mask; allowed: 0 and 1", entry=str(entry)[:60]))
