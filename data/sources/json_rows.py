"""JSON objects one by one: a line each, or out of one array, however large the file.

An array is decoded value by value while it is read, so its size does not matter. After a syntax error in it nothing
more can be read, where a file of lines only loses the line.
"""

from __future__ import annotations

import codecs
import json
import re
from collections.abc import Iterator, Sequence
from itertools import chain, islice
from typing import Any

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
from support.language import join, say

SEVERAL_OBJECTS = "holds several objects; write one object per line"
# The columns of a file are those of its first objects, up to these bounds: one object may lack some.
SAMPLED_OBJECTS = 256
SAMPLED_CHARS = 1024**2
WRAPPER_BYTES = 4096  # Rows under a key, as in {"data": [...]}, are looked for in the first bytes of a file.
# A jq program that writes SQuAD's original files, where questions are nested in paragraphs, as rows:
SQUAD_ROWS = (
    "[.{key}[].paragraphs[] | .context as $c | .qas[] | {{question, context: $c, answers: {{text: "
    "[.answers[].text]}}}}]"
)
_WRAPPED = re.compile(r'"(data|rows|examples|train)"\s*:\s*\[\s*\{')
# What may stand before the first value, and before each later one or the closing bracket:
_OPENING = re.compile(r"([ \t\r\n]*\[)?[ \t\r\n,]*")
_SEPARATOR = re.compile(r"[ \t\r\n,]*")
BLANKS = " \t\r\n"
BY_ROW_NUMBER = -1  # `_column_shape` of a whole column that is written as {"0": cell, "1": cell, ...}


class JsonLines(Reader):
    """One object a line."""

    def head(self, source: Source) -> Head:
        first_objects = self._first_objects(source)
        sample = dict[str, Any]()
        # A column is shown by its first cell that is neither null nor an empty list.
        for value in first_objects:
            sample |= {name: outline(cell) for name, cell in value.items() if sample.get(name) in (None, [])}
        return Head(list(first_objects[0]), list(sample), sample)

    def records(
        self, source: Source, head: Head, columns: Sequence[str], bad_rows: BadRows
    ) -> Iterator[tuple[int, Record]]:
        """As `Reader.records`; holds one object at a time, at most 16 MiB of text."""
        return self._objects(source, bad_rows)

    def _values(self, source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Any]]:
        for number, line in whole_lines(source):
            if line is None:
                bad_rows.add(source, number, too_long())
            elif line.strip():
                try:
                    yield number, json.loads(line)
                except (ValueError, RecursionError) as error:
                    bad_rows.add(source, number, _not_json_problem(error))

    def _objects(self, source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Record]]:
        for number, value in self._values(source, bad_rows):
            if isinstance(value, dict):
                yield number, value
            else:
                bad_rows.add(source, number, say("is no JSON object; write one object a line, or an array of objects"))

    def _first_objects(self, source: Source) -> list[Record]:
        """The objects at the beginning of a file: at least one, at most `SAMPLED_OBJECTS` and about `SAMPLED_CHARS`.

        Raises:
            UserError: there is none, or the only one wraps the rows.
        """
        bad_rows = BadRows(skip=True)
        objects = (value for _, value in self._objects(source, bad_rows))
        first_objects = list(up_to(islice(objects, SAMPLED_OBJECTS), SAMPLED_CHARS, lambda value: len(str(value))))
        problem = "" if len(first_objects) > 1 else _no_rows_problem(source, first_objects, bad_rows)
        if problem:
            raise UserError(problem)
        return first_objects


class JsonArray(JsonLines):
    """All objects in one array."""

    def _values(self, source: Source, bad_rows: BadRows) -> Iterator[tuple[int, Any]]:
        """Each value of the array with its number. Of every block that is read, the values that end in it are decoded;
        the rest of its text waits for the next block, and the last block is empty.
        """
        decode_text = codecs.getincrementaldecoder("utf-8-sig")().decode
        decode_value = json.JSONDecoder().raw_decode
        number = 0
        text = ""  # read, but not yet decoded
        separator = _OPENING
        is_closed = False
        for block in chain(blocks(source), [b""]):
            try:
                text += decode_text(block)
            except UnicodeDecodeError as error:
                raise UserError(join(": ", [str(source.path), not_utf8(error)])) from None
            position = 0
            while not is_closed:
                match = separator.match(text, position)
                assert match is not None
                position = match.end()
                separator = _SEPARATOR
                if text.startswith("]", position):
                    is_closed = True
                    position += 1
                    break
                try:
                    value, position = decode_value(text, position)
                except (ValueError, RecursionError) as error:
                    if block and len(text) - position < LONGEST_LINE_BYTES:
                        break  # The value may go on in the next block.
                    raise UserError(
                        "{file}, row {number}: is not JSON ({error}), or the file is truncated there; fix it or "
                        "download it again",
                        file=source.path,
                        number=number + 1,
                        error=_reason(error, position),
                    ) from None
                number += 1
                yield number, value
            text = text[position:]
            if is_closed and text.strip(BLANKS):  # Two files were concatenated.
                raise UserError(
                    "{file}: unexpected content after the array, which ends with row {number}; write one array, or "
                    "one object per line",
                    file=source.path,
                    number=number,
                )

    def row_mark(self, source: Source, begin: bytes) -> bytes:
        first_name = next(iter(self._first_objects(source)[0]), "")
        return json.dumps(first_name, ensure_ascii=False).encode("utf8", "replace") + b":"


def _not_json_problem(error: Exception) -> str:
    """Why a line is not JSON."""
    match error:
        case UnicodeDecodeError():
            return not_utf8(error)
        case json.JSONDecodeError() if error.doc.startswith("{", error.pos):
            return say(SEVERAL_OBJECTS)
    return say("is not JSON ({error})", error=_reason(error, 0))


def _reason(error: Exception, start: int) -> object:
    """Why the JSON value at index `start` cannot be decoded; the position of the error is counted from there.

    Python's own message counts lines and columns from the beginning of the whole buffer.
    """
    if not isinstance(error, json.JSONDecodeError):
        return error
    return say("{msg}, at its character {pos}", msg=error.msg, pos=error.pos + 1 - start)


def outline(cell: Any, depth: int = 2) -> Any:
    """A small cell of the same type: an empty text, a list of one entry, an object of the same keys, to this depth."""
    match cell:
        case dict() if depth:
            return {key: outline(value, depth - 1) for key, value in cell.items()}
        case list() if depth:
            return [outline(entry, depth - 1) for entry in cell[:1]]
        case str() | list() | dict():
            return type(cell)()
    return cell


def _no_rows_problem(source: Source, objects: list[Record], bad_rows: BadRows) -> str:
    """Why a file that holds at most one object has no rows; empty where the object is a row."""
    example = "".join(bad_rows.examples[:1])
    if not objects and any(reason in example for reason in (say(GBK_REMEDY), too_long(), say(SEVERAL_OBJECTS))):
        return bad_rows.examples[0]
    begin = next(blocks(source), b"").lstrip()[:WRAPPER_BYTES].decode("utf8", "replace")
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
        # One column alone is a table only if its cells are numbered: a single list of texts may well be a cell.
        is_table = {*shapes} == {BY_ROW_NUMBER} or (len({*shapes}) == 1 < len(shapes) and None not in shapes)
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
    """`BY_ROW_NUMBER` of {"0": ..., "1": ...}, the length of a list of texts; None: the cell is no whole column.

    All columns of one table have the same shape.
    """
    match cell:
        case {"0": _}:
            return BY_ROW_NUMBER
        case list() if {*map(type, cell)} <= {str}:
            return len(cell)
    return None
