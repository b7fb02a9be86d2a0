"""How are JSON objects read one by one: a line each, or out of one array, however large the file?

An array is taken apart piece by piece, so its size does not matter; what is broken in it breaks all that follows.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from typing import Any

from data.sources.files import Source
from data.sources.lines import (
    LONGEST_LINE_BYTES,
    BadRows,
    blocks,
    crowded,
    is_crowded,
    not_utf8,
    numbered_lines,
    too_long,
)
from formats import JSON
from language import join, say
from settings.errors import UserError

Objects = Iterator[tuple[str, dict[str, Any]]]
_BLANK = " \t\r\n"
GLUED = "holds several objects; write one object a line"


def objects(source: Source, bad_rows: BadRows) -> Objects:
    """Every object of a file with its place, such as `line 7`.

    Args:
        bad_rows: told about broken rows; None of them comes.
    Raises:
        UserError: the file is broken.
    Memory: one object, at most 16 MiB of text.
    """
    values = _array(source) if source.kind == JSON else _lines(source, bad_rows)
    for place, value in values:
        if isinstance(value, dict):
            yield place, value
        else:
            bad_rows.add(source.path, place, "is no JSON object; write one object a line, or an array of objects")


def _lines(source: Source, bad_rows: BadRows) -> Iterator[tuple[str, Any]]:
    cut_line = 0
    for number, line in numbered_lines(source):
        if number == cut_line or not line.strip():
            continue
        place = say("line {number}", number=number)
        if len(line) >= LONGEST_LINE_BYTES:
            cut_line = number
            bad_rows.add(source.path, place, too_long())
            continue
        if is_crowded(line):
            bad_rows.add(source.path, place, crowded())
            continue
        try:
            value = json.loads(line)
        except UnicodeDecodeError as error:
            bad_rows.add(source.path, place, not_utf8(error))
        except (ValueError, RecursionError) as error:
            is_glued = isinstance(error, json.JSONDecodeError) and error.doc[error.pos :].startswith("{")
            told = say(GLUED) if is_glued else say("is not JSON ({error})", error=_where(error))
            bad_rows.add(source.path, place, told)
        else:
            yield place, value


def _where(error: Exception) -> str:
    """What Python says, without its count of lines inside the one line."""
    return f"{error.msg}, at its character {error.pos + 1}" if isinstance(error, json.JSONDecodeError) else str(error)


def _array(source: Source) -> Iterator[tuple[str, Any]]:
    """The members of the array that a file is."""
    decode, text, number, is_open, is_closed = json.JSONDecoder().raw_decode, "", 0, False, False
    for part, is_last in _texts(source):
        text += part
        if is_crowded(text):
            place = f"row {number + 1}"
            raise UserError(say("{file}, {place}: {problem}", file=source.path, place=place, problem=crowded()))
        at = 0 if is_closed else _skip(text, 0, _BLANK)
        if not is_open and at < len(text):
            is_open, at = True, at + 1  # behind the bracket, which is why it is read as an array
        while is_open and not is_closed:
            at = _skip(text, at, _BLANK + ",")
            if text[at : at + 1] == "]":
                is_closed, at = True, at + 1
                break
            try:
                value, at = decode(text, at)
            except (ValueError, RecursionError) as error:
                if is_last or len(text) - at >= LONGEST_LINE_BYTES:
                    raise _broken(source, number + 1, error) from None
                break  # the rest of it is still to come
            number += 1
            yield f"row {number}", value
        text = text[at:]
        if is_closed and _skip(text, 0, _BLANK) < len(text):  # two files, one behind the other
            told = "{file}: something follows the array after row {number}; write one array, or one object a line"
            raise UserError(say(told, file=source.path, number=number))


def _texts(source: Source) -> Iterator[tuple[str, bool]]:
    """The text of a file in parts, and whether one is the last."""
    decoder, before = codecs.getincrementaldecoder("utf-8-sig")(), None
    for block in blocks(source):
        try:
            now = decoder.decode(block)
        except UnicodeDecodeError as error:
            raise UserError(join(": ", [str(source.path), not_utf8(error)])) from None
        if before is not None:
            yield before, False
        before = now
    yield before or "", True


def _skip(text: str, at: int, letters: str) -> int:
    while at < len(text) and text[at] in letters:
        at += 1
    return at


def _broken(source: Source, number: int, error: Exception) -> UserError:
    return UserError(
        say(
            "{file}, row {number}: is not JSON ({error}), or the file is cut off there; repair it, or fetch it again",
            file=source.path,
            number=number,
            error=error,
        )
    )
