"""Files of well-known shapes need no flag, whatever their format; what is no data at all is named."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.prepare.training_data import find_training_data
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.prompts import read_prompts
from data.sources.reading import read_rows
from settings.declared import DataConfig
from settings.errors import UserError
from settings.loading import load

ALPACA = [
    {"instruction": "翻译", "input": "river", "output": "河"},
    {"instruction": "写一首诗", "input": "", "output": "春眠不觉晓"},
    {"instruction": "再写一首", "input": None, "output": "处处闻啼鸟"},
]
ALPACA_ROWS = [("翻译\nriver", "河"), ("写一首诗", "春眠不觉晓"), ("再写一首", "处处闻啼鸟")]
TRANSLATION = [{"translation": {"en": "river", "zh": "河"}}, {"translation": {"en": "hill", "zh": "山"}}]


def rows_of(path: Path, **flags: str) -> tuple[list[str], list[tuple[str, ...]], list[str]]:
    """Columns, rows and prompts that a run and `generate` read of a file."""
    config = load("train", {"train_file": str(path), **flags})
    data = find_training_data(config.data, config.train.is_finetune)
    assert data.objective == "pairs"
    rows = [row for batch in read_rows(data.sources, data.columns, BadRows()) for row in batch]
    prompts = read_prompts(find(str(path)), config.data, BadRows())
    return data.columns.sides(), rows, [prompt.text for prompt in prompts]


def written(path: Path, rows: list[dict[str, Any]]) -> Path:
    """Rows in the format of the file's ending."""
    if path.suffix == ".parquet":
        pq.write_table(pa.Table.from_pylist(rows), path)
    elif path.suffix == ".json":
        path.write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf8")
    else:
        path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return path


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_alpaca(tmp_path: Path, name: str) -> None:
    columns, rows, prompts = rows_of(written(tmp_path / name, ALPACA))
    assert columns == ["instruction+input", "output"]
    assert rows == ALPACA_ROWS and prompts == [prompt for prompt, _ in ALPACA_ROWS]
    if name != "a.parquet":  # a row may lack the column that another has, also the first
        lacking = {"instruction": "说一句", "output": "好"}
        for some in ([*ALPACA, lacking], [lacking, *ALPACA]):
            columns, rows, prompts = rows_of(written(tmp_path / name, some))
            assert columns == ["instruction+input", "output"] and prompts == [prompt for prompt, _ in rows]
            assert sorted(rows) == sorted([*ALPACA_ROWS, ("说一句", "好")])


@pytest.mark.parametrize("name", ["a.json", "a.jsonl", "a.parquet"])
def test_translation(tmp_path: Path, name: str) -> None:
    path = written(tmp_path / name, TRANSLATION)
    columns, rows, prompts = rows_of(path)
    assert columns == ["translation.en", "translation.zh"] and rows == [("river", "河"), ("hill", "山")]
    assert prompts == ["river", "hill"]
    other = rows_of(path, prompt_column="translation.zh", response_column="translation.en")
    assert other[1] == [("河", "river"), ("山", "hill")] and other[2] == ["河", "山"]


def test_a_row_without_a_key_is_bad(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [*TRANSLATION, {"translation": {"en": "sea"}}])
    with pytest.raises(UserError, match=r"line 3: translation has no text under zh"):
        rows_of(path)


def test_what_is_asked_for_goes_first(tmp_path: Path) -> None:
    """A text is pretrained on, whatever else stands beside it; columns that are named are taken."""
    text = written(tmp_path / "t.jsonl", [{"text": "a b", "source": "x", "target": "y"}])
    assert find_training_data(load("train", {"train_file": str(text)}).data, False).objective == "span"
    path = written(tmp_path / "a.jsonl", [{"source": "x", "target": "y", "note": "z"}])
    assert rows_of(path, prompt_column="note", response_column="target", objective="pairs")[1] == [("z", "y")]


def test_an_array_that_is_broken_names_the_row(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text(json.dumps([{"prompt": "a", "response": "b"}] * 5)[:-20], encoding="utf8")
    with pytest.raises(UserError, match=r"a\.json, row 5: is not JSON .* truncated there"):
        rows_of(path)


def test_an_array_is_read_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Objects and letters that two parts share come whole."""
    monkeypatch.setattr("data.sources.lines.TEXT_PART_BYTES", 7)
    columns, rows, _ = rows_of(written(tmp_path / "a.json", ALPACA))
    assert rows == ALPACA_ROWS and len(columns) == 2


def test_members_that_are_no_objects_are_bad_rows(tmp_path: Path) -> None:
    path = tmp_path / "a.json"
    path.write_text('[{"prompt": "a", "response": "b"}, 7, {"prompt": "c", "response": "d"}]', encoding="utf8")
    bad = BadRows(skip=True)
    rows = [row for batch in read_rows(find(str(path)), ["prompt", "response"], bad) for row in batch]
    assert rows == [("a", "b"), ("c", "d")] and bad.count == 1 and "row 2: is no JSON object" in bad.examples[0]


@pytest.mark.parametrize("name", ["a.txt", "a.csv", "a.jsonl", "a.json"])
def test_gbk_is_told_apart(tmp_path: Path, name: str) -> None:
    rows = [{"prompt": "长江有多长？", "response": "六千三百公里。"}] * 3
    text = {
        "a.txt": "长江是亚洲第一长河。\n",
        "a.csv": "prompt,response\n长江有多长？,六千三百公里。\n",
        "a.jsonl": "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows),
        "a.json": json.dumps(rows, ensure_ascii=False),
    }[name]
    (tmp_path / name).write_bytes(text.encode("gb18030"))
    with pytest.raises(UserError, match="convert the whole file to UTF-8") as refused:
        data = find_training_data(load("train", {"train_file": str(tmp_path / name)}).data, False)
        list(read_rows(data.sources, data.columns, BadRows()))
    assert "skip_bad_rows" not in str(refused.value)


def test_a_stray_byte_is_not_gbk(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes("caf\xe9 au lait\n".encode("latin1"))
    with pytest.raises(UserError, match="is not UTF-8") as refused:
        list(read_rows(find(str(tmp_path / "a.txt")), ["text"], BadRows()))
    assert "GBK" not in str(refused.value) and "skip_bad_rows" in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "told"),
    [
        ("a.parquet", b"<!DOCTYPE html>\n<html>", "is an HTML page, not parquet"),
        ("a.jsonl", b"\n <html><body>", "is an HTML page, not jsonl"),
        ("a.csv", b"PK\x03\x04 workbook", "is a zip archive"),
        ("a.pdf", b"%PDF-1.7", "is a PDF"),
        ("a.db", b"SQLite format 3\0", "is a database"),
        ("a.txt", b"name".ljust(257, b"\0") + b"ustar\x0000", "is an archive; unpack it"),
        ("a.tar.gz", b"\x1f\x8b\x08", "is an archive; unpack it"),
        ("a.bin", b"words\0" * 9, "holds many NUL bytes"),
        ("a.parquet", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a git-lfs pointer"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n", "is a git-lfs pointer"),
        ("a.csv", "prompt,response\n".encode("utf16"), "is UTF-16; save it as UTF-8"),
    ],
)
def test_what_is_no_data_is_named(tmp_path: Path, name: str, content: bytes, told: str) -> None:
    (tmp_path / name).write_bytes(content)
    with pytest.raises(UserError, match=told):
        find(str(tmp_path / name))


def test_a_page_may_be_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_bytes(b"<!DOCTYPE html>\n<html>")
    assert len(find(str(tmp_path / "a.txt"))) == 1


@pytest.mark.parametrize(
    "text", ['[{"text": "a"}]\n[{"text": "b"}]\n', '[{"text": "a"}] {"text": "b"}', '[{"text": "a"}]]']
)
def test_what_follows_an_array_is_not_lost(tmp_path: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two files, one behind the other."""
    monkeypatch.setattr("data.sources.lines.TEXT_PART_BYTES", 15)  # the first array is a part of its own
    path = tmp_path / "a.json"
    path.write_text(text)
    with pytest.raises(
        UserError, match=r"a\.json: unexpected content after the array, which ends with row 1; write one array"
    ):
        list(read_rows(find(str(path)), ["text"], BadRows()))
    path.write_text('[{"text": "a"}]' + "\n " * 20)
    assert list(read_rows(find(str(path)), ["text"], BadRows())) == [[("a",)]]


@pytest.mark.parametrize("name", ["a.jsonl", "a.json", "a.parquet", "a.csv"])
def test_a_text_made_of_two_columns_may_lack_the_second(tmp_path: Path, name: str) -> None:
    path = tmp_path / name
    rows = [{"title": "x", "body": "y"}, {"title": "z", "body": None}]
    if name == "a.csv":
        path.write_text("title,body\nx,y\nz,\n")
    else:
        written(path, rows)
    assert list(read_rows(find(str(path)), ["title+body"], BadRows())) == [[("x\ny",), ("z",)]]


def test_what_only_later_rows_have_makes_the_file_no_other(tmp_path: Path) -> None:
    pair = {"question": "a", "answer": "b"}
    others = [{**pair, "text": "c", "messages": []}, pair]
    assert rows_of(written(tmp_path / "a.jsonl", [pair, *others]))[1:] == ([("a", "b")] * 3, ["a"] * 3)


def test_a_header_that_is_not_utf8_names_its_columns_with_marks(tmp_path: Path) -> None:
    """As Excel writes it on Windows; the other columns are read all the same."""
    path = tmp_path / "a.csv"
    path.write_bytes("prompt,cat\u00e9gorie\na,b\n".encode("cp1252"))
    (prompt,) = read_prompts(find(str(path)), DataConfig(), BadRows())
    assert prompt.text == "a" and list(prompt.columns.values()) == ["a", "b"]
    path.write_text("prompt,,\na,b,c\n")  # as spreadsheets write empty columns
    assert [prompt.text for prompt in read_prompts(find(str(path)), DataConfig(), BadRows())] == ["a"]
    path.write_text("prompt,x,x\na,b,c\n")
    with pytest.raises(UserError, match="several columns are called x; give each a name of its own"):
        list(read_prompts(find(str(path)), DataConfig(), BadRows()))


def test_a_named_prompt_may_be_missing_in_the_first_row(tmp_path: Path) -> None:
    path = written(tmp_path / "a.jsonl", [{"text": "t"}, {"text": "u", "body": "b"}])
    bad = BadRows(skip=True)
    found = read_prompts(find(str(path)), DataConfig(prompt_column="body"), bad)
    assert [prompt.text for prompt in found] == ["", "b"] and bad.count == 1
    assert [prompt.text for prompt in read_prompts(find(str(path)), DataConfig(), BadRows())] == ["t", "u"]
