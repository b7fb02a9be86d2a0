"""Rows of every format: sound files, broken rows, broken files, and columns that are not there."""

from __future__ import annotations

import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources import csv_rows, json_rows, lines, plain_text, reading, tables
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import BATCH_ROWS, head_of, read_rows
from settings.errors import UserError

ROWS = [(f"prompt {number} 你好", f'response, "{number}"\nsecond line') for number in range(600)]
COLUMNS = ("prompt", "response")
TABLE = pa.table({"id": list(range(600)), "prompt": [p for p, _ in ROWS], "response": [r for _, r in ROWS]})


def rows_of(spec: object, columns: tuple[str, ...] = COLUMNS, bad_rows: BadRows | None = None) -> list[Any]:
    batches = list(read_rows(find(str(spec)), columns, bad_rows or BadRows()))
    assert all(1 <= len(batch) <= BATCH_ROWS for batch in batches)
    return [row for batch in batches for row in batch]


def write_arrow(
    path: Path, table: pa.Table, stream: bool = False, batch_rows: int = 100, codec: str | None = None
) -> Path:
    new, options = pa.ipc.new_stream if stream else pa.ipc.new_file, pa.ipc.IpcWriteOptions(compression=codec)
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=batch_rows)
    return path


def jsonl(rows: list[tuple[str, str]]) -> bytes:
    return "".join(json.dumps({"extra": 1, "prompt": p, "response": r}) + "\n" for p, r in rows).encode()


def csv(rows: list[tuple[str, str]], delimiter: str = ",") -> bytes:
    lines = [delimiter.join(("id", "prompt", "response"))]
    for number, row in enumerate(rows):
        lines.append(delimiter.join([str(number), *('"' + cell.replace('"', '""') + '"' for cell in row)]))
    return ("\r\n".join(lines) + "\r\n").encode()


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


@pytest.mark.parametrize(
    "name, content",
    [
        ("bom.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS)),
        ("a.json", json.dumps([{"prompt": p, "response": r} for p, r in ROWS]).encode()),
        ("a.csv", csv(ROWS)),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS))),
        ("a.csv.xz", lzma.compress(csv(ROWS)[:4000]) + lzma.compress(csv(ROWS)[4000:])),
        ("a.jsonl.bz2", bz2.compress(jsonl(ROWS))),
        ("a.jsonl.zst", zstd(jsonl(ROWS))),
    ],
    ids=lambda given: given if isinstance(given, str) else "",
)
def test_text_formats_give_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert rows_of(tmp_path / name) == ROWS
    assert set(COLUMNS) <= set(head_of(find(str(tmp_path / name))[0]).names)


@pytest.mark.parametrize("encoding", ["PLAIN", "DELTA_BYTE_ARRAY"])
def test_parquet_gives_the_same_rows(tmp_path: Path, encoding: str) -> None:
    """Of every encoding that pyarrow writes by default, and of Parquet's second version."""
    facts: dict[str, Any] = (
        {} if encoding == "PLAIN" else {"use_dictionary": False, "column_encoding": {"prompt": encoding}}
    )
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=100, **facts)
    assert rows_of(tmp_path / "a.parquet") == ROWS
    assert rows_of(tmp_path / "a.parquet", COLUMNS[::-1]) == [row[::-1] for row in ROWS]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        (pa.string(), None),
        (pa.string(), "zstd"),
        (pa.large_string(), None),
        (pa.string_view(), None),
        (pa.dictionary(pa.int32(), pa.string()), "lz4"),
    ],
)
def test_arrow_gives_the_same_rows(tmp_path: Path, stream: bool, kind: pa.DataType, codec: str | None) -> None:
    table = pa.table({name: TABLE[name].cast(kind) for name in COLUMNS})
    table = table.unify_dictionaries().combine_chunks()
    assert rows_of(write_arrow(tmp_path / "a.arrow", table, stream, 400, codec)) == ROWS


def test_files_without_rows_are_no_problem_among_others(tmp_path: Path) -> None:
    nothing = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(nothing, tmp_path / "a.parquet")
    write_arrow(tmp_path / "b.arrow", nothing)
    write_arrow(tmp_path / "c.arrow", nothing, stream=True)
    (tmp_path / "d.csv").write_text("text\n")
    write_arrow(tmp_path / "e.arrow", pa.table({"text": ["one", ""]}))
    assert rows_of(tmp_path, ("text",)) == [("one",), ("",)]


def test_text_gives_paragraphs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\n \nthree\n\n\n")
    assert rows_of(tmp_path / "a.txt", ("text",)) == [("one\ntwo",), ("three",)]
    written = [f"line {number} " + "x" * 90 for number in range(1000)]
    (tmp_path / "a.txt").write_text("\n".join(written))
    rows = [row[0] for row in rows_of(tmp_path / "a.txt", ("text",))]
    assert len(rows) > 1 and max(map(len, rows)) <= plain_text.PARAGRAPH_CHARS, "a long one is parted at a line"
    assert "\n".join(rows).split("\n") == written


def test_a_line_of_text_of_any_length_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "TEXT_PART_BYTES", 64)
    monkeypatch.setattr(plain_text, "PARAGRAPH_CHARS", 16)
    text = "é你x" * 500  # parts end inside letters
    (tmp_path / "a.txt").write_text(text, encoding="utf8")
    assert "".join(row[0] for row in rows_of(tmp_path / "a.txt", ("text",))) == text


def test_a_lone_carriage_return_in_the_header_of_tsv_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b'prompt\tresp\ronse\nq\t"a"\n')
    with pytest.raises(UserError, match=r"a\.tsv, line 1: is not TSV"):
        rows_of(tmp_path / "a.tsv")


def test_a_quote_in_tsv_is_a_letter_and_swallows_no_row(tmp_path: Path) -> None:
    rows = [('"Stop', "he said"), ('"quoted"', 'a "" b'), ('5" wide', '"'), ("last", "row")]
    (tmp_path / "a.tsv").write_text("".join("\t".join(row) + "\n" for row in [COLUMNS, *rows]))
    assert rows_of(tmp_path / "a.tsv") == rows


@pytest.mark.parametrize("sign", [";", "\t"])
def test_csv_without_a_comma_in_its_first_line_is_parted_as_that_line_is(tmp_path: Path, sign: str) -> None:
    """As spreadsheets write it where the comma is the decimal sign."""
    rows = [("1,5 or more", "yes, indeed"), (f"a{sign}b", 'with "quotes"\nand two lines'), ("last", "row")]
    (tmp_path / "a.csv").write_bytes(csv(rows, sign))
    assert rows_of(tmp_path / "a.csv") == rows


def table_with_bad_cells() -> pa.Table:
    cells = pa.array([b"a", None, b"\xff", b"b"], pa.binary())
    prompts = pa.Array.from_buffers(pa.string(), 4, cells.buffers())
    return pa.table({"prompt": prompts, "response": ["b"] * 4})


GOOD = b'{"prompt": "a", "response": "b"}\n'
BROKEN = [
    ("json.jsonl", GOOD + b'{"prompt": \n', "line 2", "is not JSON"),
    ("array.jsonl", GOOD + b"\n[1]\n", "line 3", "is no JSON object"),
    ("cell.jsonl", GOOD + b'{"prompt": 7, "response": "b"}\n', "line 2", "prompt is int"),
    ("null.jsonl", GOOD + b'{"prompt": "a", "response": null}\n', "line 2", "response is null"),
    ("key.jsonl", GOOD + b'{"response": "b"}\n', "line 2", "has no prompt"),
    ("empty.jsonl", GOOD + b'{"prompt": "a", "response": " "}\n', "line 2", "response is empty"),
    ("deep.jsonl", GOOD + b"[" * 100_000 + b"\n", "line 2", "is not JSON"),
    ("utf8.jsonl", GOOD + b'{"prompt": "\xff", "response": "b"}\n', "line 2", "is not UTF-8"),
    ("half.jsonl", GOOD + b'{"prompt": "\\ud800", "response": "b"}\n', "line 2", "surrogate"),
    ("cells.csv", b"prompt,response\na,b\na,b,c\n", "line 3", "has 3 cells, the header has 2"),
    ("quote.csv", b'prompt,response\na,b\n"a"x,b\n', "line 3", "is not CSV"),
    ("open.csv", b'prompt,response\na,b\n"a,b\na,b\n', "open.csv, line 3", "goes on to line 4"),
    ("later.csv", b'prompt,response\na,b\n"a,b\na,b\na,"b"\n', "later.csv, line 3", "goes on to line 5"),
    ("lines.csv", b'prompt,response\na,b\n"a\nb",c,d\n', "lines.csv, line 3", "goes on to line 4"),
    ("cells.tsv", b'prompt\tresponse\na\tb\n"a\tb\tc"\n', "line 3", "has 3 cells, the header has 2"),
    ("utf8.csv", b"prompt,response\na,b\n\xff,b\n", "line 3", "is not UTF-8"),
]


@pytest.mark.parametrize("name, content, place, problem", BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_row_is_named_or_counted(tmp_path: Path, name: str, content: bytes, place: str, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        rows_of(path)
    for words in (str(path), place, problem, "--skip_bad_rows=True"):
        assert words in str(caught.value)
    bad_rows = BadRows(skip=True)
    assert rows_of(path, bad_rows=bad_rows) == [("a", "b")]
    assert bad_rows.count == 1 and problem in bad_rows.examples[0]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_a_broken_row_of_a_table_is_named_or_counted(tmp_path: Path, kind: str) -> None:
    path, table = tmp_path / "a.table", table_with_bad_cells()
    pq.write_table(table, path) if kind == "parquet" else write_arrow(path, table, stream=kind == "stream")
    with pytest.raises(UserError, match="row 2: prompt is null"):
        rows_of(path)
    bad_rows = BadRows(skip=True)
    assert rows_of(path, bad_rows=bad_rows) == [("a", "b"), ("b", "b")]
    assert bad_rows.count == 2 and "row 3: prompt is not UTF-8" in bad_rows.examples[1]


def test_text_that_is_not_utf8_is_named_or_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\n\n\xff\xfe bad\n\ngood too\n\xe4")
    with pytest.raises(UserError, match=r"a\.txt, line 3: is not UTF-8 \(byte 1"):
        rows_of(tmp_path / "a.txt", ("text",))
    bad_rows = BadRows(skip=True)
    assert rows_of(tmp_path / "a.txt", ("text",), bad_rows) == [("good",), ("good too",)]
    assert bad_rows.count == 2


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "file", "stream", "dictionary"])
def test_a_huge_text_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for module in (lines, json_rows, csv_rows, tables):
        monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr(lines.numbered_lines, "__defaults__", (1000,))
    texts = [f"row {number}" * (1 + number % 30) for number in range(100)]
    texts[40] = texts[77] = "x" * 3001
    table = pa.table({"text": pa.array(texts).dictionary_encode() if kind == "dictionary" else texts})
    path = tmp_path / f"a.{kind}"
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    elif kind == "csv":
        path.write_text("text\n" + "".join(f'"{text}"\n' for text in texts))
    elif kind == "parquet":
        pq.write_table(table, path)
    else:
        write_arrow(path, table, kind == "stream")
    with pytest.raises(UserError, match=r"(row|line) 4[12].* is longer than 0 MiB"):
        rows_of(path, ("text",))
    bad_rows = BadRows(skip=True)
    assert rows_of(path, ("text",), bad_rows) == [(text,) for text in texts if len(text) <= 1000]
    assert bad_rows.count == 2


def test_a_file_of_nothing_but_huge_rows_says_so(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_rows, "LONGEST_LINE_BYTES", 64)
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": "x" * 64}) + "\n")
    with pytest.raises(UserError, match=r"line 1.* is longer than"):
        rows_of(tmp_path / "a.jsonl", ("text",))


def test_batches_of_long_rows_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BATCH_CHARS", 1000)
    texts = ["x" * 300 for _ in range(40)]
    write_arrow(tmp_path / "a.arrow", pa.table({"text": texts}))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = [len(batch) for batch in read_rows(find(str(tmp_path)), ["text"], BadRows())]
    assert max(sizes) <= 4 and sum(sizes) == 80


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
@pytest.mark.parametrize("damage", ["cut in half", "tail gone", "middle overwritten", "footer overwritten"])
def test_broken_tables_are_user_errors(tmp_path: Path, kind: str, damage: str) -> None:
    path = tmp_path / "a.table"
    if kind == "parquet":
        pq.write_table(TABLE, path, row_group_size=100)
    else:
        write_arrow(path, TABLE, stream=kind == "stream")
    content = bytearray(path.read_bytes())
    half = len(content) // 2
    if damage == "cut in half":
        content = content[:half]
    elif damage == "tail gone":
        content = content[:-13]
    elif damage == "middle overwritten":
        content[half : half + 4000] = b"\xff" * 4000
    else:
        content[-200:-20] = b"\xff" * 180
    path.write_bytes(content)
    try:
        rows = rows_of(path)
    except UserError as error:
        assert str(path) in str(error)
    else:  # the damage hit nothing that is read
        assert kind == "stream" and damage in ("tail gone", "footer overwritten") and len(rows) <= len(ROWS)


@pytest.mark.parametrize(
    ("ending", "pack"), [("gz", gzip.compress), ("bz2", bz2.compress), ("xz", lzma.compress), ("zst", zstd)]
)
def test_packed_files_that_are_cut_off_are_user_errors(
    tmp_path: Path, ending: str, pack: Callable[[bytes], bytes]
) -> None:
    path, packed = tmp_path / f"a.jsonl.{ending}", pack(jsonl(ROWS))
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=rf"a\.jsonl\.{ending}"):
        rows_of(path)


def test_columns_are_looked_at_before_the_first_file_is_read(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"text": "good"}\n')
    write_arrow(tmp_path / "b.arrow", pa.table({"text": [1, 2]}))
    pq.write_table(pa.table({"text": [["x"]]}), tmp_path / "c.parquet")
    (tmp_path / "d.csv").write_text("other\nx\n")
    write_arrow(tmp_path / "e.arrow", pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]))
    names = [f"{place}{'x' * 5000}" for place in range(200)]
    pq.write_table(pa.Table.from_arrays([pa.array(["a"])] * 200, names=names), tmp_path / "f.parquet")
    with pytest.raises(UserError) as caught:
        next(read_rows(find(str(tmp_path)), ["text"], BadRows()))
    told = caught.value.problems
    for problem, words in zip(
        told,
        [
            "b.arrow: column text holds int64",
            "c.parquet: column text holds list",
            "d.csv: column text is missing; columns: other",
            "e.arrow: column text occurs twice",
            "f.parquet: column text is missing",
        ],
        strict=True,
    ):
        assert words in problem and len(problem) < 3000
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="plain text has no columns prompt, response"):
        rows_of(tmp_path / "a.txt")


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="is not an ordinary file"):
        find(str(tmp_path / "a.jsonl"))
