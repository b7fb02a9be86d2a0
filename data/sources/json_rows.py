"""JSON objects one by one: a line each, or out of one array, however large the file.

An array is taken apart piece by piece, so its size does not matter; what is broken in it breaks all that follows.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator
from itertools import chain, islice
from typing import Any

from data.sources.files import Source
from data.sources.lines import (
    GBK_REMEDY,
    LONGEST_LINE_BYTES,
    BadRows,
    Record,
    blocks,
    not_utf8,
    numbered_lines,
    place_of,
    too_long,
)
from formats import JSON
from language import join, say
from settings.errors import UserError

GLUED = "holds several objects; write one object per line"
LOOKED_AT_OBJECTS, LOOKED_AT_CHARS = 256, 1024**2  # of a file, for columns that some lack
FIRST_BYTES = 4096  # of a file whose rows stand under a key
_WRAPPED = re.compile(r'"(data|rows|examples|train)"\s*:\s*\[\s*\{')
_BLANKS, _BETWEEN = re.compile(r"[ \t\r\n]*"), re.compile(r"[ \t\r\n,]*")


def objects(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Record]]:
    """Every object of a file with its number: of its line, or in the array.

    Args:
        bad_rows: told about broken rows; none of them comes.
    Raises:
        UserError: the file is broken.
    Memory: one object, at most 16 MiB of text.
    """
    for number, value in _array(source) if source.kind == JSON else _lines(source, bad_rows):
        if isinstance(value, dict):
            yield number, value
        else:
            told = say("is no JSON object; write one object a line, or an array of objects")
            bad_rows.add(source.path, place_of(source, number), told)


def _lines(source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Any]]:
    cut_line = 0
    for number, line in numbered_lines(source):
        if number == cut_line or not line.strip():
            continue
        try:
            if len(line) >= LONGEST_LINE_BYTES:
                cut_line = number
                bad_rows.add(source.path, place_of(source, number), too_long())
            else:
                yield number, json.loads(line)
        except UnicodeDecodeError as error:
            bad_rows.add(source.path, place_of(source, number), not_utf8(error))
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError) and error.doc[error.pos :].startswith("{"):
                told = say(GLUED)
            elif isinstance(error, json.JSONDecodeError):  # without Python's count of lines inside the one line
                told = say(
                    "is not JSON ({error})",
                    error=say("{msg}, at its character {pos}", msg=error.msg, pos=error.pos + 1),
                )
            else:
                told = say("is not JSON ({error})", error=error)
            bad_rows.add(source.path, place_of(source, number), told)


def _array(source: Source) -> Iterator[tuple[int, Any]]:
    """The members of the array that a file is."""
    decode, text, number, is_open, is_closed = json.JSONDecoder().raw_decode, "", 0, False, False
    for part, is_last in _texts(source):
        text += part
        at = 0 if is_closed else _behind(_BLANKS, text, 0)
        if not is_open and at < len(text):
            is_open, at = True, at + 1  # behind the bracket, which is why it is read as an array
        while is_open and not is_closed:
            at = _behind(_BETWEEN, text, at)
            if text[at : at + 1] == "]":
                is_closed, at = True, at + 1
                break
            try:
                value, at = decode(text, at)
            except (ValueError, RecursionError) as error:
                if is_last or len(text) - at >= LONGEST_LINE_BYTES:
                    told = "{file}, row {number}: is not JSON ({error}), or the file is truncated there; fix it or download it again"
                    raise UserError(say(told, file=source.path, number=number + 1, error=error)) from None
                break  # the rest of it is still to come
            number += 1
            yield number, value
        text = text[at:]
        if is_closed and _behind(_BLANKS, text, 0) < len(text):  # two files, one behind the other
            told = (
                "{file}: unexpected content after the array, which ends with row {number}; write one array, or one object "
                "per line"
            )
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


def _behind(letters: re.Pattern[str], text: str, at: int) -> int:
    found = letters.match(text, at)
    return found.end() if found else at


def first_objects(source: Source) -> list[Record]:
    """The first objects of a file, at least one and about 1 Mi characters; a column may be missing in some.

    Raises:
        UserError: there is none.
    """
    bad_rows = BadRows(skip=True)
    coming = (value for _, value in objects(source, bad_rows))
    firsts = list(islice(coming, 2))
    if not firsts:
        raise UserError(_why_none(source, bad_rows))
    if len(firsts) == 1:
        begin = json.dumps(firsts[0])[:FIRST_BYTES]
        if wrapped := _WRAPPED.search(begin):
            raise UserError(_not_rows(source, wrapped[1], begin))
        if _is_columns(firsts[0]):
            raise UserError(
                "{path}: holds whole columns, not rows; write an array of objects, or one object a line (pandas: "
                "to_json(FILE, orient='records', lines=True))",
                path=source.path,
            )
    found, chars = list[Record](), 0
    for value in islice(chain(firsts, coming), LOOKED_AT_OBJECTS):
        found.append(value)
        chars += sum(len(cell) for cell in value.values() if isinstance(cell, str))
        if chars > LOOKED_AT_CHARS:
            break
    return found


def _why_none(source: Source, bad_rows: BadRows) -> str:
    told = bad_rows.examples[0] if bad_rows.examples else ""
    if any(hint in told for hint in (say(GBK_REMEDY), too_long(), say(GLUED))):
        return told
    begin = next(iter(blocks(source)), b"").lstrip()[:FIRST_BYTES].decode("utf8", "replace")
    if begin.startswith("{") and (wrapped := _WRAPPED.search(begin)):
        return _not_rows(source, wrapped[1], begin)
    hint = say("; here an object spans several lines") if begin.startswith("{") else ""
    if begin.startswith("[") and source.compression:
        hint = say("; an array can only be read uncompressed: unpack the file")
    return say(
        '{path}: holds no JSON object; write one object a line, such as {{"text": "..."}}, or an array of them{hint}',
        path=source.path,
        hint=hint,
    )


def _not_rows(source: Source, key: str, begin: str) -> str:
    if '"paragraphs"' in begin:  # SQuAD's own files
        rows = f"[.{key}[].paragraphs[] | .context as $c | .qas[] | {{question, context: $c, answers: {{text: [.answers[].text]}}}}]"
        return say(
            "{path}: its rows are under {key}.paragraphs.qas; write them out (jq '{rows}' {path} > NEW.json)",
            path=source.path,
            key=key,
            rows=rows,
        )
    return say(
        "{path}: its rows are under {key}; write that array alone (jq .{key} {path} > NEW.json)",
        path=source.path,
        key=key,
    )


def _is_columns(value: Record) -> bool:
    """Whether an object holds columns, such as {"prompt": {"0": ...}, ...} or {"prompt": ["...", ...], ...}."""
    cells = list(value.values())
    if all(isinstance(cell, dict) and "0" in cell for cell in cells):
        return bool(cells)
    return len(cells) > 1 and all(
        isinstance(cell, list) and len(cell) == len(cells[0]) and all(isinstance(entry, str) for entry in cell)
        for cell in cells
    )
