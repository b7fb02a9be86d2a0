"""Lines that a user types in place of a file's name."""

from __future__ import annotations

import os
from pathlib import PurePath

from data.sources.files import parts_of
from data.sources.formats import COMPRESSED_SUFFIXES, KIND_BY_SUFFIX, TEXT
from data.sources.places import TypedLines, is_address, is_glob
from data.sources.source import Source


def typed_lines(spec: str) -> list[Source]:
    """Two or more lines separated by commas, as a source of text; none where one of them may name a file."""
    words = parts_of(spec)
    if len(words) < 2 or any(map(_may_be_file, words)):
        return []
    return [Source(TypedLines(tuple(words)), TEXT)]


def _may_be_file(word: str) -> bool:
    has_ending = PurePath(word).suffix.lower() in (*KIND_BY_SUFFIX, *COMPRESSED_SUFFIXES)
    return has_ending or os.sep in word or is_address(word) or is_glob(word) or os.path.exists(word)
