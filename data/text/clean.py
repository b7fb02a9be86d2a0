"""Cleaning of texts, and the choice of rows worth training on.

Normalising: Unicode NFC, line ends as \\n, no control or private characters, no runs of blanks or of empty lines.
A row is then dropped for the first of these reasons: too short, few letters, repetitive. Nothing here knows a
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

FEWEST_CHARS = 5  # Of a row, over its columns.
LEAST_LETTERS = 0.4  # Share of letters and digits among the characters of a row that are not blank.
MOST_REPETITION = 0.9  # Share of a text that zlib saves.
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


def fault(texts: Sequence[str]) -> str | None:
    """Why a row of normalised texts should be dropped; None: it should not."""
    if sum(map(len, texts)) < FEWEST_CHARS:
        return "too short"
    if letter_share("".join(texts)) < LEAST_LETTERS:
        return "few letters"
    if max(map(repetition, texts)) > MOST_REPETITION:
        return "repetitive"
    return None


def normalise(text: str) -> str:
    """Give the clean form of a text; it is its own clean form."""
    text = _CONTROLS.sub("", _LINE_ENDS.sub("\n", unicodedata.normalize("NFC", text)))
    text = _LINE_EDGES.sub("\n", _BLANKS.sub(" ", text))
    return unicodedata.normalize("NFC", _EMPTY_LINES.sub("\n\n", text).strip())


def letter_share(text: str) -> float:
    """Letters, digits and marks among the characters that are not blank; 1 for a blank text."""
    solid = "".join(text.split())
    letters = len(_NOT_LETTERS.sub("", solid))
    if not text.isascii():  # a regular expression knows no marks, which are up to half of Hindi, Thai or Tibetan
        signs = Counter("".join(_NOT_LETTERS.findall(solid)))
        letters += sum(count for sign, count in signs.items() if unicodedata.category(sign)[0] == "M")
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
        for reason, later in other.reasons.items():
            entry = self.reasons.setdefault(reason, {"count": 0, "samples": []})
            entry["count"] += later["count"]
            entry["samples"] = (entry["samples"] + later["samples"])[:SAMPLES]

    @property
    def count(self) -> int:
        return sum(int(entry["count"]) for entry in self.reasons.values())
