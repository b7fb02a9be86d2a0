"""Rows of every format: sound files, broken rows, broken files, and columns that are not there."""

from __future__ import annotations

import base64
import bz2
import gzip
import json
import lzma
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import pandas
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.unread import passed_over
from data.sources import csv_rows, json_rows, lines, plain_text, reading, tables
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import BATCH_ROWS, head_of, read_rows, records
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


def test_parquet_of_the_second_version_is_read(tmp_path: Path) -> None:
    encoding = {"prompt": "DELTA_BYTE_ARRAY"}
    pq.write_table(TABLE, tmp_path / "a.parquet", use_dictionary=False, column_encoding=encoding)
    assert rows_of(tmp_path / "a.parquet", COLUMNS) == PAIRS


@pytest.mark.parametrize("form", ["file", "stream"])
@pytest.mark.parametrize(
    ("kind", "codec"),
    [
        (pa.string(), "zstd"),
        (pa.large_string(), None),
        (pa.string_view(), None),
        (pa.dictionary(pa.int32(), pa.string()), "lz4"),
    ],
)
def test_arrow_gives_the_same_rows(tmp_path: Path, form: str, kind: pa.DataType, codec: str | None) -> None:
    table = pa.table({name: TABLE[name].cast(kind) for name in COLUMNS}).unify_dictionaries().combine_chunks()
    assert rows_of(write_arrow(tmp_path / "a.arrow", table, form, codec), COLUMNS) == PAIRS


def test_files_without_rows_are_no_problem_among_others(tmp_path: Path) -> None:
    for kind in ("parquet", "file", "stream"):
        write_table(tmp_path / f"{kind}.arrow", pa.table({"text": pa.array([], pa.string())}), kind)
    (tmp_path / "d.csv").write_text("text\n")
    write_rows(tmp_path / "z.arrow", [{"text": "one"}, {"text": ""}])
    assert rows_of(tmp_path, ("text",)) == [("one",), ("",)]


def test_text_gives_paragraphs(tmp_path: Path) -> None:
    path = tmp_path / "a.txt"
    path.write_bytes(b"one\r\ntwo\n\n \nthree\n\n\n")
    assert rows_of(path, ("text",)) == [("one\ntwo",), ("three",)]
    long = [f"line {number} " + "x" * 90 for number in range(1000)]
    path.write_text("\n".join(long))
    paragraphs = [text for (text,) in rows_of(path, ("text",))]
    assert len(paragraphs) > 1
    assert max(map(len, paragraphs)) <= plain_text.PARAGRAPH_CHARS, "a long one is parted at a line"
    assert "\n".join(paragraphs).split("\n") == long


def test_a_line_of_text_of_any_length_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(lines, "TEXT_PART_BYTES", 64)
    monkeypatch.setattr(plain_text, "PARAGRAPH_CHARS", 16)
    text = "é你x" * 500  # Parts end inside letters.
    (tmp_path / "a.txt").write_text(text, encoding="utf8")
    assert "".join(part for (part,) in rows_of(tmp_path / "a.txt", ("text",))) == text


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
        (HEADER + "a\tb\n" * 1000 + 'a\t"b ""c"""\n', True),
        ('"prompt"\t"response"\n"a"\t"b"\n', True),
        (HEADER + '5" pipe\tb\na\tsaid "b"\n', False),
        (HEADER + '"a"\tb\n"Stop!" he said\t"\n', False),
        (HEADER + '"Stop\tb\na\tb\n', False),
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
    ("null.jsonl", GOOD + b'{"prompt": "a", "response": null}\n', "line 2", "response is null"),
    ("key.jsonl", GOOD + b'{"response": "b"}\n', "line 2", "has no prompt"),
    ("empty.jsonl", GOOD + b'{"prompt": "a", "response": " "}\n', "line 2", "response is empty"),
    ("deep.jsonl", GOOD + b"[" * 100_000 + b"\n", "line 2", "is not JSON"),
    ("utf8.jsonl", GOOD + b'{"prompt": "\xff", "response": "b"}\n', "line 2", "is not UTF-8"),
    ("half.jsonl", GOOD + b'{"prompt": "\\ud800", "response": "b"}\n', "line 2", "surrogate"),
    ("cells.csv", CSV + b"a,b,c\n", "line 3", "has 3 cells, the header has 2"),
    ("quote.csv", CSV + b'"a"x,b\n', "line 3", "is not CSV"),
    ("open.csv", CSV + b'"a,b\na,b\n', "open.csv, line 3", "goes on to line 4"),
    ("later.csv", CSV + b'"a,b\na,b\na,"b"\n', "later.csv, line 3", "goes on to line 5"),
    ("lines.csv", CSV + b'"a\nb",c,d\n', "lines.csv, line 3", "goes on to line 4"),
    ("cells.tsv", b'prompt\tresponse\na\tb\n"a\tb\tc"\n', "line 3", "has 3 cells, the header has 2"),
    ("utf8.csv", CSV + b"\xff,b\n", "line 3", "is not UTF-8"),
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
        ("a.fasta", b"MKV\n>P1\nMK\n", "line 1", ["MK"], 1),
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


@pytest.mark.parametrize("ending", ["txt", "csv", "jsonl", "json"])
def test_gbk_is_recognised_and_the_whole_file_is_to_be_converted(tmp_path: Path, ending: str) -> None:
    path = tmp_path / f"a.{ending}"
    if ending == "txt":
        path.write_text("长江是亚洲第一长河。\n", encoding="utf8")
    else:
        write_rows(path, [{"text": "长江有多长？六千三百公里。"}] * 3)
    path.write_bytes(path.read_text(encoding="utf8").encode("gb18030"))
    with pytest.raises(UserError, match="convert the whole file to UTF-8") as caught:
        rows_of(path, ("text",))
    assert "skip_bad_rows" not in str(caught.value)
    assert "整个文件" in caught.value.problems[0].in_language("zh")  # type: ignore[attr-defined]
    (tmp_path / "stray.txt").write_bytes("caf\xe9 au lait\n".encode("latin1"))
    with pytest.raises(UserError, match="skip_bad_rows") as caught:
        rows_of(tmp_path / "stray.txt", ("text",))
    assert "GBK" not in str(caught.value)


@pytest.mark.parametrize("kind", ["jsonl", "csv", "parquet", "file", "stream", "dictionary"])
def test_a_huge_text_is_a_bad_row(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    for module in (lines, json_rows, csv_rows, tables):
        monkeypatch.setattr(module, "LONGEST_LINE_BYTES", 1000)
    monkeypatch.setattr(lines.numbered_lines, "__defaults__", (1000,))
    texts = [f"row {number}" * (1 + number % 30) for number in range(100)]
    texts[40] = texts[77] = "x" * 3001
    path = tmp_path / f"a.{kind}"
    if kind in ("jsonl", "csv"):
        write_rows(path, [{"text": text} for text in texts])
    else:
        write_table(
            path, pa.table({"text": pa.array(texts).dictionary_encode() if kind == "dictionary" else texts}), kind
        )
    with pytest.raises(UserError, match=r"(row|line) 4[12].* is longer than 0 MiB"):
        rows_of(path, ("text",))
    bad_rows = BadRows(skip=True)
    assert rows_of(path, ("text",), bad_rows) == [(text,) for text in texts if len(text) <= 1000]
    assert bad_rows.count == 2
    if kind == "jsonl":
        path.write_text(json.dumps({"text": "x" * 1000}) + "\n")
        with pytest.raises(UserError, match=r"line 1.* is longer than"):
            rows_of(path, ("text",))


def test_batches_have_bounds(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_rows(tmp_path / "a.arrow", ROWS)
    assert [len(batch) for batch in read_rows(find(str(path)), COLUMNS, BadRows())] == [BATCH_ROWS, BATCH_ROWS, 88]
    monkeypatch.setattr(reading, "BATCH_CHARS", 1000)
    write_rows(tmp_path / "a.arrow", [{"text": "x" * 300}] * 40)
    write_rows(tmp_path / "b.jsonl", [{"text": "x" * 300}] * 40)
    assert {len(batch) for batch in read_rows(find(str(tmp_path)), ["text"], BadRows())} == {4}


@pytest.mark.parametrize("kind", ["parquet", "file", "stream"])
@pytest.mark.parametrize("damage", ["cut in half", "tail gone", "middle overwritten", "footer overwritten"])
def test_broken_tables_are_user_errors(tmp_path: Path, kind: str, damage: str) -> None:
    path = write_table(tmp_path / "a.table", TABLE, kind)
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
    hits_footer = damage in ("tail gone", "footer overwritten")
    if kind == "stream" and hits_footer:  # The damage may hit nothing that is read.
        with suppress(UserError):
            assert len(rows_of(path, COLUMNS)) <= len(PAIRS)
    else:
        with pytest.raises(UserError, match=r"a\.table"):
            rows_of(path, COLUMNS)


@pytest.mark.parametrize("hides_footer", [True, False])
def test_encrypted_parquet_is_named_as_such(tmp_path: Path, hides_footer: bool) -> None:
    encryption = pytest.importorskip("pyarrow.parquet.encryption")

    class Keys(encryption.KmsClient):  # type: ignore[misc,name-defined]
        def wrap_key(self, key: bytes, _: str) -> bytes:
            return base64.b64encode(key)

    configuration = encryption.EncryptionConfiguration(
        "footer", column_keys={"own": ["prompt"]}, plaintext_footer=not hides_footer
    )
    factory = encryption.CryptoFactory(lambda _: Keys())
    properties = factory.file_encryption_properties(encryption.KmsConnectionConfig(), configuration)
    pq.write_table(pa.table({"prompt": ["a"] * 9}), tmp_path / "a.parquet", encryption_properties=properties)
    with pytest.raises(UserError, match=r"a\.parquet.* is encrypted; write it again without encryption"):
        rows_of(tmp_path, ("prompt",))


def test_columns_are_looked_at_before_the_first_file_is_read(tmp_path: Path) -> None:
    write_rows(tmp_path / "a.jsonl", [{"text": "good"}])
    write_rows(tmp_path / "b.arrow", [{"text": 1}])
    write_rows(tmp_path / "c.parquet", [{"text": ["x"]}])
    write_rows(tmp_path / "d.csv", [{"other": "x"}])
    write_arrow(tmp_path / "e.arrow", pa.Table.from_arrays([pa.array(["a"])] * 2, names=["text", "text"]))
    write_rows(tmp_path / "f.parquet", [{f"{number}{'x' * 5000}": "a" for number in range(200)}])
    with pytest.raises(UserError) as caught:
        rows_of(tmp_path, ("text",))
    expected = [
        "b.arrow: column text holds int64",
        "c.parquet: column text holds list",
        "d.csv: column text is missing; columns: other",
        "e.arrow: column text occurs twice",
        "f.parquet: column text is missing",
    ]
    for problem, words in zip(caught.value.problems, expected, strict=True):
        assert words in problem
        assert len(problem) < 3000
    (tmp_path / "a.txt").write_text("x")
    with pytest.raises(UserError, match="plain text has no columns prompt, response"):
        rows_of(tmp_path / "a.txt", COLUMNS)


def test_a_lone_carriage_return_in_the_header_of_tsv_is_named(tmp_path: Path) -> None:
    (tmp_path / "a.tsv").write_bytes(b'prompt\tresp\ronse\nq\t"a"\n')
    with pytest.raises(UserError, match=r"a\.tsv, line 1: is not TSV"):
        rows_of(tmp_path / "a.tsv", COLUMNS)


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="is not an ordinary file"):
        find(str(tmp_path / "a.jsonl"))
