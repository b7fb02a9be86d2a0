from __future__ import annotations

import gzip
import json
import lzma
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.child import ROOT
from data.sources import lines, reading, tables
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import BATCH_ROWS, column_names, read_rows
from settings.errors import UserError

ROWS = [(f"prompt {number} 你好", f'response, "{number}"\nsecond line') for number in range(600)]
COLUMNS = ("prompt", "response")
TABLE = pa.table({"id": list(range(600)), "prompt": [p for p, _ in ROWS], "response": [r for _, r in ROWS]})


def rows_of(
    spec: object, columns: tuple[str, ...] = COLUMNS, bad_rows: BadRows | None = None, **more: Any
) -> list[Any]:
    batches = list(read_rows(find(str(spec)), columns, bad_rows or BadRows(), **more))
    assert all(1 <= len(batch) <= BATCH_ROWS for batch in batches)
    return [row for batch in batches for row in batch]


def write_arrow(path: Path, table: pa.Table, stream: bool = False, batch_rows: int = 100) -> Path:
    new = pa.ipc.new_stream if stream else pa.ipc.new_file
    with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as writer:
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
    sink = pa.BufferOutputStream()
    with pa.CompressedOutputStream(sink, "zstd") as stream:
        stream.write(content)
    return sink.getvalue().to_pybytes()


@pytest.mark.parametrize(
    "name, content",
    [
        ("a.jsonl", jsonl(ROWS)),
        ("bom.jsonl", b"\xef\xbb\xbf" + jsonl(ROWS)),
        ("a.csv", csv(ROWS)),
        ("a.jsonl.gz", gzip.compress(jsonl(ROWS))),
        ("a.csv.xz", lzma.compress(csv(ROWS))),
        ("a.jsonl.zst", zstd(jsonl(ROWS))),
    ],
)
def test_text_formats_give_the_same_rows(tmp_path: Path, name: str, content: bytes) -> None:
    (tmp_path / name).write_bytes(content)
    assert rows_of(tmp_path / name) == ROWS
    assert set(COLUMNS) < set(column_names(find(str(tmp_path / name))[0]))


@pytest.mark.parametrize("row_group_size", [7, 100, 600])
def test_parquet_gives_the_same_rows(tmp_path: Path, row_group_size: int) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet", row_group_size=row_group_size)
    assert rows_of(tmp_path / "a.parquet") == ROWS


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "kind", [pa.string(), pa.large_string(), pa.string_view(), pa.dictionary(pa.int32(), pa.string())]
)
def test_arrow_gives_the_same_rows(tmp_path: Path, stream: bool, kind: pa.DataType) -> None:
    table = pa.table({name: TABLE[name].cast(kind) for name in COLUMNS})
    table = table.unify_dictionaries().combine_chunks()
    assert rows_of(write_arrow(tmp_path / "a.arrow", table, stream, 400)) == ROWS


def test_several_files_follow_each_other(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(jsonl(ROWS[:10]))
    pq.write_table(TABLE.slice(10, 20), tmp_path / "2.parquet")
    assert rows_of(tmp_path) == ROWS[:30]


def test_text_gives_paragraphs_or_lines(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"one\r\ntwo\n\n \nthree\n\n\n")
    assert rows_of(tmp_path / "a.txt", ("text",)) == [("one\ntwo",), ("three",)]
    assert [row[0] for row in rows_of(tmp_path / "a.txt", ("text",), text_unit="line")][:2] == ["one", "two"]
    assert column_names(find(str(tmp_path / "a.txt"))[0], "body") == ["body"]


def test_a_long_paragraph_is_parted_at_a_line_and_nothing_is_lost(tmp_path: Path) -> None:
    written = [f"line {number} " + "x" * 90 for number in range(1000)]
    (tmp_path / "a.txt").write_text("\n".join(written))
    rows = [row[0] for row in rows_of(tmp_path / "a.txt", ("text",))]
    assert len(rows) > 1 and max(map(len, rows)) <= lines.PARAGRAPH_CHARS
    assert "\n".join(rows).split("\n") == written


def test_a_line_of_any_length_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "TEXT_PART_BYTES", 64)
    monkeypatch.setattr(lines, "PARAGRAPH_CHARS", 16)
    text = "é你x" * 500  # parts end inside letters
    (tmp_path / "a.txt").write_text(text, encoding="utf8")
    assert "".join(row[0] for row in rows_of(tmp_path / "a.txt", ("text",))) == text


BROKEN = [
    ("json.jsonl", b'{"prompt": "a", "response": "b"}\n{"prompt": \n', "line 2", "is not JSON"),
    ("array.jsonl", b'{"prompt": "a", "response": "b"}\n\n[1]\n', "line 3", "is no JSON object"),
    ("cell.jsonl", b'{"prompt": "a", "response": "b"}\n{"prompt": 7, "response": "b"}\n', "line 2", "prompt is int"),
    (
        "null.jsonl",
        b'{"prompt": "a", "response": "b"}\n{"prompt": "a", "response": null}\n',
        "line 2",
        "response is null",
    ),
    ("key.jsonl", b'{"prompt": "a", "response": "b"}\n{"response": "b"}\n', "line 2", "has no prompt"),
    (
        "utf8.jsonl",
        b'{"prompt": "a", "response": "b"}\n{"prompt": "\xff", "response": "b"}\n',
        "line 2",
        "is not UTF-8",
    ),
    (
        "half.jsonl",
        b'{"prompt": "a", "response": "b"}\n{"prompt": "\\ud800", "response": "b"}\n',
        "line 2",
        "surrogate",
    ),
    ("cells.csv", b"prompt,response\na,b\na,b,c\n", "line 3", "has 3 cells, the header has 2"),
    ("quote.csv", b'prompt,response\na,b\n"a"x,b\n', "line 3", "is not CSV"),
    ("cells.tsv", b'prompt\tresponse\na\tb\n"a\tb\tc"\n', "line 3", "has 3 cells, the header has 2"),
    ("utf8.csv", b"prompt,response\na,b\n\xff,b\n", "line 3", "is not UTF-8"),
    ("nul.jsonl", b'{"prompt": "a", "response": "b"}\n\x00\n', "line 2", "is not JSON"),
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


def test_an_unclosed_quote_is_a_broken_row(tmp_path: Path) -> None:
    (tmp_path / "a.csv").write_bytes(b'prompt,response\na,b\n"a,b\na,b\n')
    with pytest.raises(UserError, match="is not CSV"):
        rows_of(tmp_path / "a.csv")


def test_text_that_is_not_utf8_is_named_or_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"good\n\n\xff\xfe bad\n\ngood too\n\xe4")
    with pytest.raises(UserError, match=r"a\.txt, line 3: is not UTF-8 \(byte 1"):
        rows_of(tmp_path / "a.txt", ("text",))
    bad_rows = BadRows(skip=True)
    assert rows_of(tmp_path / "a.txt", ("text",), bad_rows) == [("good",), ("good too",)]
    assert bad_rows.count == 2


def nulls_and_bytes() -> pa.Table:
    cells = pa.array([b"a", None, b"\xff", b"b"], pa.binary())
    prompts = pa.Array.from_buffers(pa.string(), 4, cells.buffers())
    return pa.table({"prompt": prompts, "response": ["r"] * 4})


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
def test_nulls_and_bytes_in_tables_are_named_or_counted(tmp_path: Path, kind: str) -> None:
    path = tmp_path / "a.table"
    if kind == "parquet":
        pq.write_table(nulls_and_bytes(), path)
    else:
        write_arrow(path, nulls_and_bytes(), stream=kind == "stream")
    with pytest.raises(UserError, match="row 2: prompt is null"):
        rows_of(path)
    bad_rows = BadRows(skip=True)
    assert rows_of(path, bad_rows=bad_rows) == [("a", "r"), ("b", "r")]
    assert bad_rows.count == 2 and "row 3: prompt is not UTF-8" in bad_rows.examples[1]


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow", "a.jsonl", "a.csv"])
def test_a_missing_column_lists_those_that_exist(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    writers = {
        "a.parquet": lambda: pq.write_table(TABLE, path), "a.arrow": lambda: write_arrow(path, TABLE),
        "a.jsonl": lambda: path.write_bytes(jsonl(ROWS)), "a.csv": lambda: path.write_bytes(csv(ROWS)),
    }  # fmt: skip
    writers[name]()
    with pytest.raises(UserError, match=r"column text is missing; columns: .*prompt, response"):
        rows_of(path, ("text",))


def test_a_column_of_numbers_is_refused(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="column id holds int64, not text"):
        rows_of(tmp_path / "a.parquet", ("id",))


def test_a_column_that_stands_twice_is_refused(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array(["b"])], names=["prompt", "prompt"])
    with pytest.raises(UserError, match="occurs twice"):
        rows_of(write_arrow(tmp_path / "a.arrow", table), ("prompt",))


def test_plain_text_has_no_pairs(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="plain text has no columns prompt, response"):
        rows_of(tmp_path / "a.txt")


def test_a_later_file_is_checked_before_the_first_is_read(tmp_path: Path) -> None:
    (tmp_path / "1.jsonl").write_bytes(jsonl(ROWS))
    (tmp_path / "2.jsonl").write_bytes(b'{"text": "x"}\n')
    with pytest.raises(UserError, match=r"2\.jsonl: columns prompt, response are missing; .*--prompt_column") as caught:
        next(read_rows(find(str(tmp_path)), COLUMNS, BadRows()))
    assert len(caught.value.problems) == 1, "told once"


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
    "name, pack", [("a.jsonl.gz", gzip.compress), ("a.jsonl.xz", lzma.compress), ("a.jsonl.zst", zstd)]
)
def test_packed_files_that_are_cut_off_are_user_errors(tmp_path: Path, name: str, pack: Any) -> None:
    packed = pack(jsonl(ROWS))
    (tmp_path / name).write_bytes(packed[: len(packed) // 2])
    with pytest.raises(UserError, match=name.replace(".", r"\.")):
        rows_of(tmp_path / name)


@pytest.mark.parametrize(
    "column",
    [pa.array([["a"], ["b"]]), pa.array([{"a": "b"}] * 2), pa.array([b"a", b"b"]), pa.array([1.5, 2.5])],
    ids=["list", "struct", "bytes", "numbers"],
)
def test_what_is_not_text_is_refused_by_its_type(tmp_path: Path, column: pa.Array) -> None:
    pq.write_table(pa.table({"text": column}), tmp_path / "a.parquet")
    with pytest.raises(UserError, match=r"a\.parquet: column text holds (list|struct|binary|double)"):
        rows_of(tmp_path / "a.parquet", ("text",))


def test_files_of_other_schemas_are_refused_before_the_first_is_read(tmp_path: Path) -> None:
    write_arrow(tmp_path / "a.arrow", pa.table({"text": ["good"]}))
    write_arrow(tmp_path / "b.arrow", pa.table({"text": [1, 2]}))
    pq.write_table(pa.table({"other": ["x"]}), tmp_path / "c.parquet")
    with pytest.raises(UserError) as caught:
        next(read_rows(find(str(tmp_path)), ["text"], BadRows()))
    assert len(caught.value.problems) == 2
    assert "b.arrow: column text holds int64" in caught.value.problems[0]
    assert "c.parquet: column text is missing; columns: other" in caught.value.problems[1]


def test_columns_come_in_the_order_that_is_wanted(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.parquet")
    write_arrow(tmp_path / "b.arrow", TABLE)
    assert rows_of(tmp_path, ("response", "prompt"))[:1] == [ROWS[0][::-1]]
    assert rows_of(tmp_path, ("response", "prompt"))[600:601] == [ROWS[0][::-1]]


def test_empty_shards_hold_no_rows_and_are_no_problem(tmp_path: Path) -> None:
    nothing = pa.table({"text": pa.array([], pa.string())})
    pq.write_table(nothing, tmp_path / "a.parquet")
    write_arrow(tmp_path / "b.arrow", nothing)
    write_arrow(tmp_path / "c.arrow", nothing, stream=True)
    (tmp_path / "d.csv").write_text("text\n")
    write_arrow(tmp_path / "e.arrow", pa.table({"text": ["one", ""]}))
    assert rows_of(tmp_path, ("text",)) == [("one",), ("",)]


@pytest.mark.parametrize("kind", ["parquet", "file", "stream", "dictionary"])
def test_a_huge_text_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    monkeypatch.setattr(tables, "LONGEST_TEXT_BYTES", 1000)
    monkeypatch.setattr(tables, "PARQUET_BATCH_BYTES", 3000)
    texts = [f"row {number}" * (1 + number % 30) for number in range(100)]
    texts[40] = texts[77] = "x" * 1001
    table = pa.table({"text": pa.array(texts).dictionary_encode() if kind == "dictionary" else texts})
    if kind == "parquet":
        pq.write_table(table, tmp_path / "a")
    else:
        write_arrow(tmp_path / "a", table, kind == "stream")
    with pytest.raises(UserError, match="row 41: text is longer than 0 MiB"):
        rows_of(tmp_path / "a", ("text",))
    bad_rows = BadRows(skip=True)
    expected = [(text,) for text in texts if len(text) <= 1000]
    assert rows_of(tmp_path / "a", ("text",), bad_rows) == expected and bad_rows.count == 2


def test_a_huge_csv_line_is_a_bad_row_and_the_next_ones_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(lines.numbered_lines, "__defaults__", (64,))
    monkeypatch.setattr(reading, "LONGEST_LINE_BYTES", 64)
    (tmp_path / "a.csv").write_text('text\none\n"' + "x" * 300 + '"\ntwo\n')
    with pytest.raises(UserError, match="line 3: is longer than"):
        rows_of(tmp_path / "a.csv", ("text",))
    bad_rows = BadRows(skip=True)
    assert rows_of(tmp_path / "a.csv", ("text",), bad_rows) == [("one",), ("two",)] and bad_rows.count == 1


def test_batches_of_long_rows_are_small(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(reading, "BATCH_CHARS", 1000)
    monkeypatch.setattr(tables, "PART_BYTES", 1000)
    texts = ["x" * 300 for _ in range(40)]
    write_arrow(tmp_path / "a.arrow", pa.table({"text": texts}))
    (tmp_path / "b.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    sizes = [len(batch) for batch in read_rows(find(str(tmp_path)), ["text"], BadRows())]
    assert max(sizes) <= 4 and sum(sizes) == 80


READ = """
import sys
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.sources.files import find
def peak():
    with open("/proc/self/status") as status:
        return next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024
sources, before, bad_rows = find(sys.argv[1]), peak(), BadRows(skip=True)
assert sum(map(len, read_rows(sources, ["text"], bad_rows))) == 2 and bad_rows.count == 1
print(peak() - before)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
@pytest.mark.parametrize("name, allowed", [("a.jsonl", 60), ("a.csv", 60), ("a.parquet", 660)])
def test_a_row_of_200_mb_is_reported_and_not_kept_twice(tmp_path: Path, name: str, allowed: int) -> None:
    texts = ["one", "y" * 200 * 10**6, "two"]
    if name == "a.parquet":  # Arrow holds its page, its dictionary and the column; nothing is added
        pq.write_table(pa.table({"text": texts}), tmp_path / name)
    elif name == "a.csv":
        (tmp_path / name).write_text("text\n" + "\n".join(texts) + "\n")
    else:
        (tmp_path / name).write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    done = subprocess.run(
        [sys.executable, "-c", READ, str(tmp_path / name)], cwd=ROOT, capture_output=True, text=True, check=True
    )
    assert float(done.stdout) < allowed, f"{done.stdout} MiB"


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet"])
def test_a_pair_without_a_response_is_a_bad_row(tmp_path: Path, kind: str) -> None:
    path, rows = tmp_path / f"pairs.{kind}", [("a", "A"), ("b", " "), ("", "C")]
    if kind == "jsonl":
        path.write_text("".join(json.dumps({"prompt": p, "response": r}) + "\n" for p, r in rows))
    elif kind == "csv":
        path.write_text("prompt,response\n" + "".join(f'"{p}","{r}"\n' for p, r in rows))
    else:
        pq.write_table(pa.table({"prompt": [p for p, _ in rows], "response": [r for _, r in rows]}), path)
    columns = ["prompt", "response"]
    with pytest.raises(UserError, match=r"(line|row) \d: response is empty"):
        list(read_rows(find(str(path)), columns, BadRows()))
    bad_rows = BadRows(skip=True)
    assert [row for batch in read_rows(find(str(path)), columns, bad_rows) for row in batch] == [("a", "A")]
    assert bad_rows.count == 2
