"""Cleaning of texts, and the choice of rows worth training on.

Normalising: Unicode NFC, line ends as \\n, no control or private characters, no runs of blanks or of empty lines.
A row is then dropped for the first of these reasons: too short, too long, few letters, repetitive. Nothing here knows a
language: letters, marks and digits are counted by Unicode category, and repetition is what zlib saves (as in the
compression-ratio filter of Whisper, Radford et al. 2022, section 4.5). Duplicates are found in `duplicates`.
"""

from __future__ import annotations

import re
import unicodedata
import zlib
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

SAMPLE_CHARS = 160
SAMPLES = 3
_LINE_ENDS = re.compile("\r\n?|[\v\f\x1c-\x1e\x85\u2028\u2029]")
_CONTROLS = re.compile(
    "[\x00-\x08\x0e-\x1f\x7f-\x9f\u00ad\u200b\u200e\u200f\u202a-\u202e\u2060-\u2064\ufeff\ufff9-\ufffb\ue000-\uf8ff]"
)
_BLANKS = re.compile("[^\\S\n]+")
_LINE_EDGES = re.compile(" ?\n ?")
_EMPTY_LINES = re.compile("\n{3,}")
_NOT_LETTERS = re.compile(r"[\W_]+")


@dataclass(frozen=True)
class Cleaning:
    """What is done to rows before they are encoded.

    Args:
        clean: normalise and filter; False: rows stay unchanged.
        min_chars, max_chars: characters of a row, over its columns; None: no limit.
        min_letters: least share of letters and digits among characters that are not blank, 0 .. 1.
        max_repetition: highest share of a text that zlib saves, 0 .. 1.
    """

    clean: bool = False
    min_chars: int = 1
    max_chars: int | None = None
    min_letters: float = 0.4
    max_repetition: float = 0.9

    def row(self, row: Sequence[str]) -> tuple[tuple[str, ...], str | None]:
        """Normalise a row and say why it should be dropped; None: it should not."""
        if not self.clean:
            return tuple(row), None
        texts = tuple(normalise(text) for text in row)
        return texts, self._fault(texts)

    def _fault(self, texts: Sequence[str]) -> str | None:
        chars = sum(map(len, texts))
        if chars < self.min_chars:
            return "too short"
        if self.max_chars is not None and chars > self.max_chars:
            return "too long"
        if letter_share("".join(texts)) < self.min_letters:
            return "few letters"
        if max(map(repetition, texts)) > self.max_repetition:
            return "repetitive"
        return None


def normalise(text: str) -> str:
    """Give the clean form of a text; it is its own clean form."""
    if not text.isascii():
        text = unicodedata.normalize("NFC", text)
    text = _CONTROLS.sub("", _LINE_ENDS.sub("\n", text))
    text = _LINE_EDGES.sub("\n", _BLANKS.sub(" ", text))
    text = _EMPTY_LINES.sub("\n\n", text).strip()
    return text if text.isascii() else unicodedata.normalize("NFC", text)


def letter_share(text: str) -> float:
    """Letters, digits and marks among the characters that are not blank; 1 for a blank text."""
    solid = "".join(text.split())
    letters = len(_NOT_LETTERS.sub("", solid))
    if not text.isascii():  # a regular expression knows no marks, which are up to half of Hindi, Thai or Tibetan
        others = Counter("".join(_NOT_LETTERS.findall(solid)))
        letters += sum(count for other, count in others.items() if unicodedata.category(other)[0] == "M")
    return letters / len(solid) if solid else 1.0


def repetition(text: str) -> float:
    """Share of the text that zlib saves: about 0.6 for prose, near 1 for one phrase over and over."""
    raw = text.encode("utf8", "replace")
    return 1 - len(zlib.compress(raw, 1)) / len(raw) if raw else 0.0


@dataclass
class Dropped:
    """Rows that were left out: how many for which reason, with the first few of each."""

    reasons: dict[str, dict[str, Any]] = field(default_factory=dict)

    def add(self, reason: str, row: Iterable[str]) -> None:
        entry = self.reasons.setdefault(reason, {"count": 0, "samples": []})
        entry["count"] += 1
        if len(entry["samples"]) < SAMPLES:
            entry["samples"].append(" | ".join(text[:SAMPLE_CHARS] for text in row))

    def merge(self, other: Dropped) -> None:
        """Add what came later in the order of rows."""
        for reason, theirs in other.reasons.items():
            entry = self.reasons.setdefault(reason, {"count": 0, "samples": []})
            entry["count"] += theirs["count"]
            entry["samples"] = (entry["samples"] + theirs["samples"])[:SAMPLES]

    @property
    def count(self) -> int:
        return sum(int(entry["count"]) for entry in self.reasons.values())
