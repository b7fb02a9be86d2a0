"""JSON objects one by one: a line each, or out of one array, however large the file.

An array is taken apart piece by piece, so its size does not matter; what is broken in it breaks all that follows.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

from common.language import join, say
from data.sources.lines import (
    GBK_REMEDY,
    LONGEST_LINE_BYTES,
    BadRows,
    Record,
    blocks,
    not_utf8,
    too_long,
    up_to,
    whole_lines,
)
from data.sources.reader import Head, Reader
from data.sources.source import Source
from settings.errors import UserError

GLUED = "holds several objects; write one object per line"
# The first objects of a file are looked at, up to these bounds, for columns that some lack.
LOOKED_AT_OBJECTS = 256
LOOKED_AT_CHARS = 1024**2
FIRST_BYTES = 4096  # Within these the key stands under which the rows are.
# What makes rows of SQuAD's own files, whose rows are deeper:
SQUAD_ROWS = (
    "[.{key}[].paragraphs[] | .context as $c | .qas[] | {{question, context: $c, answers: {{text: "
    "[.answers[].text]}}}}]"
)
_WRAPPED = re.compile(r'"(data|rows|examples|train)"\s*:\s*\[\s*\{')
_OPENING = re.compile(r"([ \t\r\n]*\[)?[ \t\r\n,]*")
_BETWEEN = re.compile(r"[ \t\r\n,]*")
BLANKS = " \t\r\n"
INDEXED = -1  # the shape of a column that is a table of row number -> cell


class JsonLines(Reader):
    """One object a line."""

    def head(self, source: Source) -> Head:
        firsts = self._first_objects(source)
        sample = dict[str, Any]()
        for value in firsts:
            sample |= {name: outline(cell) for name, cell in value.items() if sample.get(name) in (None, [])}
        return Head(list(firsts[0]), list(sample), sample)

    def records(
        self, source: Source, head: Head, columns: Sequence[str], bad_rows: BadRows
    ) -> Iterator[tuple[int, Record]]:
        """As those of any reader. Memory: one object, at most 16 MiB of text."""
        return self._objects(source, bad_rows)

    def _values(self, source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Any]]:
        for number, line in whole_lines(source):
            if line is None:
                bad_rows.add(source, number, too_long())
            elif line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    bad_rows.add(source, number, _no_json(error))

    def _objects(self, source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Record]]:
        for number, value in self._values(source, bad_rows):
            if isinstance(value, dict):
                yield number, value
            else:
                bad_rows.add(source, number, say("is no JSON object; write one object a line, or an array of objects"))

    def _first_objects(self, source: Source) -> list[Record]:
        """The first objects of a file, at least one and about 1 Mi characters; a column may be missing in some.

        Raises:
            UserError: there is none, or they hold the rows instead of being them.
        """
        bad_rows = BadRows(skip=True)
        objects = (value for _, value in self._objects(source, bad_rows))
        firsts = list(up_to(islice(objects, LOOKED_AT_OBJECTS), LOOKED_AT_CHARS, lambda value: len(str(value))))
        problem = "" if len(firsts) > 1 else _why_no_rows(source, firsts, bad_rows)
        if problem:
            raise UserError(problem)
        return firsts


class JsonArray(JsonLines):
    """All objects in one array."""

    def _values(self, source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Any]]:
        decode_text = codecs.getincrementaldecoder("utf-8-sig")().decode
        decode_value = json.JSONDecoder().raw_decode
        number = 0
        text = ""  # It was read, and no value was made of it yet.
        between = _OPENING
        is_closed = False
        for block in chain(blocks(source), [b""]):
            try:
                text += decode_text(block)
            except UnicodeDecodeError as error:
                raise UserError(join(": ", [str(source.path), not_utf8(error)])) from None
            at = 0
            while not is_closed:
                blanks = between.match(text, at)
                assert blanks is not None
                at = blanks.end()
                between = _BETWEEN
                if text.startswith("]", at):
                    is_closed = True
                    at += 1
                    break
                try:
                    value, at = decode_value(text, at)
                except (ValueError, RecursionError) as error:
                    if block and len(text) - at < LONGEST_LINE_BYTES:
                        break  # The end of the object is still to come.
                    raise UserError(
                        "{file}, row {number}: is not JSON ({error}), or the file is truncated there; fix it or "
                        "download it again",
                        file=source.path,
                        number=number + 1,
                        error=_reason(error, at),
                    ) from None
                number += 1
                yield number, value
            text = text[at:]
            if is_closed and text.strip(BLANKS):  # two files, one behind the other
                raise UserError(
                    "{file}: unexpected content after the array, which ends with row {number}; write one array, or "
                    "one object per line",
                    file=source.path,
                    number=number,
                )

    def row_mark(self, source: Source, begin: bytes) -> bytes:
        first_name = next(iter(self._first_objects(source)[0]), "")
        return json.dumps(first_name, ensure_ascii=False).encode("utf8", "replace") + b":"


def _no_json(error: Exception) -> str:
    """What is wrong with a line that holds no JSON."""
    match error:
        case UnicodeDecodeError():
            return not_utf8(error)
        case json.JSONDecodeError() if error.doc.startswith("{", error.pos):
            return say(GLUED)
    return say("is not JSON ({error})", error=_reason(error, 0))


def _reason(error: Exception, begin: int) -> object:
    """Why text that begins there holds no JSON. Python would count lines of all that was decoded together."""
    if not isinstance(error, json.JSONDecodeError):
        return error
    return say("{msg}, at its character {pos}", msg=error.msg, pos=error.pos + 1 - begin)


def outline(cell: Any, depth: int = 2) -> Any:
    """A cell of the same type, which takes no memory: of a table its keys, of a list its first entry."""
    match cell:
        case dict() if depth:
            return {key: outline(value, depth - 1) for key, value in cell.items()}
        case list() if depth:
            return [outline(entry, depth - 1) for entry in cell[:1]]
        case str() | list() | dict():
            return type(cell)()
    return cell


def _why_no_rows(source: Source, objects: list[Record], bad_rows: BadRows) -> str:
    """Why a file of one object or none has no rows; empty where that object is one."""
    example = "".join(bad_rows.examples[:1])
    if not objects and any(reason in example for reason in (say(GBK_REMEDY), too_long(), say(GLUED))):
        return bad_rows.examples[0]
    begin = next(blocks(source), b"").lstrip()[:FIRST_BYTES].decode("utf8", "replace")
    wrapped = _WRAPPED.search(begin)
    if wrapped and '"paragraphs"' in begin:
        return say(
            "{path}: its rows are under {key}.paragraphs.qas; write them out (jq '{rows}' {path} > NEW.json)",
            path=source.path,
            key=wrapped[1],
            rows=SQUAD_ROWS.format(key=wrapped[1]),
        )
    if wrapped:
        return say(
            "{path}: its rows are under {key}; write that array alone (jq .{key} {path} > NEW.json)",
            path=source.path,
            key=wrapped[1],
        )
    if objects:
        shapes = list(map(_column_shape, objects[0].values()))
        is_table = {*shapes} == {INDEXED} or (len({*shapes}) == 1 < len(shapes) and None not in shapes)
        problem = say(
            "{path}: holds whole columns, not rows; write an array of objects, or one object a line (pandas: "
            "to_json(FILE, orient='records', lines=True))",
            path=source.path,
        )
        return problem if is_table else ""
    hint = ""
    if begin.startswith("{"):
        hint = say("; here an object spans several lines")
    elif begin.startswith("[") and source.compression:
        hint = say("; an array can only be read uncompressed: unpack the file")
    return say(
        '{path}: holds no JSON object; write one object a line, such as {{"text": "..."}}, or an array of them{hint}',
        path=source.path,
        hint=hint,
    )


def _column_shape(cell: Any) -> int | None:
    """What whole columns have alike: {"0": ..., "1": ...} its keys, a list of texts its length; None: it is no such
    column.
    """
    match cell:
        case {"0": _}:
            return INDEXED
        case list() if {*map(type, cell)} <= {str}:
            return len(cell)
    return None
