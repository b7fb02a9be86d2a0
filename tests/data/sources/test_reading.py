"""Rows of every format: sound files, broken rows, broken files, and columns that are not there."""

from __future__ import annotations

import bz2
import gzip
import lzma
import os
from collections.abc import Callable
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.unread import passed_over
from data.sources import lines
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import head_of, records
from settings.errors import UserError
from settings.loading import load
from settings.tasks import task_named
from tests.data.sources.rows import Row, rows_of, write_rows

COLUMNS = ("prompt", "response")
PAIRS = [(f"prompt {number} 你好", f'response, "{number}"\nsecond line') for number in range(600)]
ROWS: list[Row] = [{"id": 1, "prompt": prompt, "response": response} for prompt, response in PAIRS]
TABLE = pa.Table.from_pylist(ROWS)


def write_arrow(path: Path, table: pa.Table, kind: str = "file", codec: str | None = None) -> Path:
    new_writer = pa.ipc.new_stream if kind == "stream" else pa.ipc.new_file
    options = pa.ipc.IpcWriteOptions(compression=codec)
    with pa.OSFile(str(path), "wb") as file, new_writer(file, table.schema, options=options) as writer:
        writer.write_table(table, max_chunksize=100)
    return path


def write_table(path: Path, table: pa.Table, kind: str) -> Path:
    """A table as Parquet, as an Arrow file or as an Arrow stream; its first bytes tell which."""
    if kind != "parquet":
        return write_arrow(path, table, kind)
    pq.write_table(table, path, row_group_size=100)
    return path


def zstd(content: bytes) -> bytes:
    return bytes(pa.compress(content, "zstd", asbytes=True))


def in_two_parts(content: bytes) -> bytes:
    return lzma.compress(content[:4000]) + lzma.compress(content[4000:])


PACKERS: dict[str, Callable[[bytes], bytes]] = {
    "gz": gzip.compress,
    "bz2": bz2.compress,
    "xz": in_two_parts,
    "zst": zstd,
}


@pytest.mark.parametrize("ending", ["jsonl", "json", "csv", "parquet", "arrow"])
def test_formats_give_the_same_rows(tmp_path: Path, ending: str) -> None:
    path = write_rows(tmp_path / f"a.{ending}", ROWS)
    assert rows_of(path, COLUMNS) == PAIRS
    assert rows_of(path, COLUMNS[::-1]) == [row[::-1] for row in PAIRS]
    assert list(head_of(find(str(path))[0]).names) == ["id", *COLUMNS]


@pytest.mark.parametrize("ending", PACKERS)
def test_packed_files_give_the_same_rows_unless_they_are_cut_off(tmp_path: Path, ending: str) -> None:
    content = b"\xef\xbb\xbf" + write_rows(tmp_path / "a.jsonl", ROWS).read_bytes()
    packed = PACKERS[ending](content)
    path = tmp_path / f"a.jsonl.{ending}"
    path.write_bytes(packed)
    assert rows_of(path, COLUMNS) == PAIRS
    path.write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=rf"a\.jsonl\.{ending}"):
        rows_of(path, COLUMNS)


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize(
    ("kind", "codec"),
    [(pa.string(), "zstd"), (pa.string_view(), None), (pa.dictionary(pa.int32(), pa.string()), "lz4")],
)
def test_arrow_gives_the_same_rows(tmp_path: Path, form: str, kind: pa.DataType, codec: str | None) -> None:
    table = pa.table({name: TABLE[name].cast(kind) for name in COLUMNS}).unify_dictionaries().combine_chunks()
    assert rows_of(write_arrow(tmp_path / "a.arrow", table, form, codec), COLUMNS) == PAIRS


def test_text_gives_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\n \nthree\n\n\n")
    assert rows_of(path, ("text",)) == [("one\ntwo",), ("three",)]


def test_an_array_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects and letters that two parts share come whole; what follows the array is refused."""
    monkeypatch.setattr(lines, "TEXT_PART_BYTES", 7)
    path = write_rows(tmp_path / "a.json", ROWS[:3])
    assert rows_of(path, COLUMNS) == PAIRS[:3]
    path.write_text('[{"text": "a"}]' + "\n " * 20)
    assert rows_of(path, ("text",)) == [("a",)]
    for text in ('[{"text": "a"}]\n[{"text": "b"}]\n', '[{"text": "a"}] {"text": "b"}', '[{"text": "a"}]]'):
        path.write_text(text)
        with pytest.raises(UserError, match=r"a\.json: unexpected content after the array, which ends with row 1"):
            rows_of(path, ("text",))


@pytest.mark.parametrize("sign", [";", "\t", ","])
def test_what_parts_the_cells_of_csv_follows_from_its_first_line(tmp_path: Path, sign: str) -> None:
    """As spreadsheets write it where the comma is the decimal sign, or as Excel names it."""
    rows = [("1,5 or more", "yes, indeed"), (f"a{sign}b", 'with "quotes"\nand two lines'), ("last", "row")]
    path = tmp_path / "a.csv"
    pandas.DataFrame(rows, columns=COLUMNS).to_csv(path, sep=sign, index=False)
    assert rows_of(path, COLUMNS) == rows
    path.write_bytes(f"sep={sign}\r\nprompt{sign}response\r\na{sign}b\r\n".encode("utf-8-sig"))
    assert rows_of(path, COLUMNS) == [("a", "b")]


CELLS = [('he said "no"', "plain"), ("x", '"yes", she said'), ("two\nlines", "a\ttab"), ("say", "nothing")]
HEADER = "prompt\tresponse\n"


@pytest.mark.parametrize(
    ("text", "is_quoted"),
    [
        (pandas.DataFrame(CELLS, columns=COLUMNS).to_csv(sep="\t", index=False), True),
        (HEADER + '5" pipe\tb\na\tsaid "b"\n', False),
        (HEADER + '"a"\tb\n"Stop!" he said\t"\n', False),
    ],
)
def test_cells_of_tsv_are_quoted_where_all_that_begin_so_are(tmp_path: Path, text: str, is_quoted: bool) -> None:
    path = tmp_path / "a.tsv"
    path.write_text(text)
    expected = pandas.read_csv(path, sep="\t", quoting=0 if is_quoted else 3)
    assert rows_of(path, COLUMNS) == list(expected.itertuples(index=False, name=None))
    notes = dict(passed_over(load("train", {"train_file": str(path)}).data, task_named("pairs")))
    assert ("quotes" in notes) == is_quoted


def test_fasta_is_read_whatever_its_lines(tmp_path: Path) -> None:
    path = tmp_path / "a.fasta"
    path.write_text(">P1 some protein\nMKV\n LL\n; a comment\n\n>P2\r\nacd\r\n>P3\n")
    cells = [record for _, record in records(find(str(path))[0], ["id", "text"], BadRows())]
    assert [(record["id"], record["text"]) for record in cells] == [("P1", "MKVLL"), ("P2", "acd"), ("P3", "")]


GOOD = b'{"prompt": "a", "response": "b"}\n'
CSV = b"prompt,response\na,b\n"
BROKEN = [
    ("json.jsonl", GOOD + b'{"prompt": \n', "line 2", "is not JSON"),
    ("array.jsonl", GOOD + b"\n[1]\n", "line 3", "is no JSON object"),
    ("member.json", b"[" + GOOD + b", 7]", "row 2", "is no JSON object"),
    ("cell.jsonl", GOOD + b'{"prompt": 7, "response": "b"}\n', "line 2", "prompt is int"),
    ("empty.jsonl", GOOD + b'{"prompt": "a", "response": " "}\n', "line 2", "response is empty"),
    ("utf8.jsonl", GOOD + b'{"prompt": "\xff", "response": "b"}\n', "line 2", "is not UTF-8"),
    ("half.jsonl", GOOD + b'{"prompt": "\\ud800", "response": "b"}\n', "line 2", "surrogate"),
    ("cells.csv", CSV + b"a,b,c\n", "line 3", "has 3 cells, the header has 2"),
    ("quote.csv", CSV + b'"a"x,b\n', "line 3", "is not CSV"),
    ("open.csv", CSV + b'"a,b\na,b\n', "open.csv, line 3", "to line 4"),
    ("lines.csv", CSV + b'"a\nb",c,d\n', "lines.csv, line 3", "to line 4"),
    ("cells.tsv", b'prompt\tresponse\na\tb\n"a\tb\tc"\n', "line 3", "has 3 cells, the header has 2"),
]


@pytest.mark.parametrize(("name", "content", "row", "problem"), BROKEN, ids=[case[0] for case in BROKEN])
def test_a_broken_row_is_named_or_counted(tmp_path: Path, name: str, content: bytes, row: str, problem: str) -> None:
    path = tmp_path / name
    path.write_bytes(content)
    with pytest.raises(UserError) as caught:
        rows_of(path, COLUMNS)
    for words in (str(path), row, problem, "--skip_bad_rows=True"):
        assert words in str(caught.value)
    bad_rows = BadRows(skip=True)
    assert rows_of(path, COLUMNS, bad_rows) == [("a", "b")]
    assert bad_rows.count == 1
    assert problem in bad_rows.examples[0]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_a_broken_row_of_a_table_is_named_or_counted(tmp_path: Path, kind: str) -> None:
    cells = pa.array([b"a", None, b"\xff", b"b"], pa.binary())
    prompts = pa.Array.from_buffers(pa.string(), 4, cells.buffers())
    path = write_table(tmp_path / "a.table", pa.table({"prompt": prompts, "response": ["b"] * 4}), kind)
    with pytest.raises(UserError, match="row 2: prompt is null"):
        rows_of(path, COLUMNS)
    bad_rows = BadRows(skip=True)
    assert rows_of(path, COLUMNS, bad_rows) == [("a", "b"), ("b", "b")]
    assert bad_rows.count == 2
    assert "row 3: prompt is not UTF-8" in bad_rows.examples[1]


@pytest.mark.parametrize(
    ("name", "content", "row", "rows", "count"),
    [
        ("a.txt", b"good\n\n\xff\xfe bad\n\ngood too\n\xe4", r"line 3: is not UTF-8 \(byte 1", ["good", "good too"], 2),
        ("a.fasta", b">P1\nMK\n>P2\n\xff\n", "line 3", ["MK"], 1),
    ],
)
def test_a_broken_text_is_named_or_counted(
    tmp_path: Path, name: str, content: bytes, row: str, rows: list[str], count: int
) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=row):
        rows_of(tmp_path / name, ("text",))
    bad_rows = BadRows(skip=True)
    assert rows_of(tmp_path / name, ("text",), bad_rows) == [(text,) for text in rows]
    assert bad_rows.count == count


@pytest.mark.parametrize("ending", ["csv", "jsonl", "json"])
def test_gbk_is_recognised_and_the_whole_file_is_to_be_converted(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    write_rows(path, [{"text": "长江有多长？六千三百公里。"}] * 3)
    path.write_bytes(path.read_text(encoding="utf8").encode("gb18030"))
    with pytest.raises(UserError, match="convert the whole file to UTF-8") as caught:
        rows_of(path, ("text",))
    assert "skip_bad_rows" not in str(caught.value)
    assert "整个文件" in caught.value.problems[0].in_language("zh")  # type: ignore[attr-defined]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_a_table_that_is_cut_off_is_a_user_error(tmp_path: Path, kind: str) -> None:
    path = write_table(tmp_path / "a.table", TABLE, kind)
    os.truncate(path, path.stat().st_size // 2)
    with pytest.raises(UserError, match=r"a\.table"):
        rows_of(path, COLUMNS)


def test_columns_are_looked_at_before_the_first_file_is_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "good"}])
    write_rows(tmp_path / "b.arrow", [{"text": 1}])
    write_rows(tmp_path / "c.parquet", [{"text": ["x"]}])
    write_rows(tmp_path / "d.csv", [{"other": "x"}])
    write_arrow(tmp_path / "e.arrow", pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]))
    with pytest.raises(UserError) as caught:
        rows_of(tmp_path, ("text",))
    expected = [
        "b.arrow: column text holds int64",
        "c.parquet: column text holds list",
        "d.csv: column text is missing; columns: other",
        "e.arrow: column text occurs twice",
    ]
    for problem, words in zip(caught.value.problems, expected, strict=True):
        assert words in problem
