"""Files that are sound and absurd: a sentence of bounded length says what is wrong, and nobody waits for a pipe."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config import DataConfig
from data.dataset import LowMemDataset
from data.sources.files import find
from data.sources.lines import LONGEST_LINE_BYTES, BadRows
from data.sources.prompts import read_prompts
from data.sources.reading import check_columns, column_names, read_rows
from data.sources.tables import open_parquet, parquet_batch_rows, unpacks_to
from settings.errors import UserError
from settings.fields import listed

LONG = "x" * 5000


def test_columns_without_number_are_told_in_a_short_message(tmp_path: Path) -> None:
    names = [f"{place % 999}{LONG}" for place in range(2000)]
    table = pa.Table.from_arrays([pa.array(["a"])] * len(names), names=names)
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="occurs twice") as caught:
        LowMemDataset(tmp_path / "a.parquet")
    assert len(str(caught.value)) < 200_000 and "and 1,980 more" in str(caught.value)
    with pytest.raises(UserError, match="column text is missing; columns: 0x") as caught:
        check_columns(find(str(tmp_path / "a.parquet")), ["text"])
    assert len(str(caught.value)) < 3000


def test_names_are_listed_up_to_a_number_and_a_length() -> None:
    assert listed(["a", "b"]) == "a, b" and listed([]) == ""
    assert listed(range(5), most=3) == "0, 1, 2 and 2 more"
    assert listed([LONG]) == "x" * 60 + "..."


def test_two_columns_of_one_name_are_told_before_a_prompt_is_read(tmp_path: Path) -> None:
    table = pa.Table.from_arrays([pa.array(["a"]), pa.array([1]), pa.array([2])], names=["prompt", "ids", "ids"])
    pq.write_table(table, tmp_path / "a.parquet")
    with pytest.raises(UserError, match="several columns are called ids; give each a name of its own"):
        list(read_prompts(find(str(tmp_path / "a.parquet")), DataConfig(), BadRows(skip=True)))


def test_prompts_that_are_none_are_bad_rows_with_their_line(tmp_path: Path) -> None:
    lines = ['{"prompt": "a"}', "", "{", "[1]", '{"prompt": 3}', '{"prompt": " "}', "[" * 100_000, '{"prompt": "b"}']
    (tmp_path / "a.jsonl").write_text("\n".join(lines) + "\n")
    bad = BadRows(skip=True)
    found = [prompt.text for prompt in read_prompts(find(str(tmp_path / "a.jsonl")), DataConfig(), bad)]
    assert found == ["a", *[""] * 5, "b"] and bad.count == 5
    told = " ".join(bad.examples)
    assert "line 3" in told and "is not JSON" in told and "line 4" in told and "is no JSON object" in told


def test_a_line_without_end_is_a_bad_row(tmp_path: Path) -> None:
    row = json.dumps({"text": "a"})
    with (tmp_path / "a.jsonl").open("w") as file:
        file.write(f'{row}\n{{"text": "')
        for _ in range(2 * LONGEST_LINE_BYTES // 2**20):
            file.write("a" * 2**20)
        file.write(f'"}}\n{row}\n')
    bad = BadRows(skip=True)
    rows = [row for batch in read_rows(find(str(tmp_path / "a.jsonl")), ["text"], bad) for row in batch]
    assert rows == [("a",), ("a",)] and bad.count == 1
    assert "line 2" in bad.examples[0] and "is longer than 16 MiB" in bad.examples[0]


@pytest.mark.skipif(not hasattr(os, "mkfifo"), reason="no pipes with names here")
def test_a_pipe_is_refused_instead_of_waited_for(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "a.jsonl")
    with pytest.raises(UserError, match="is no ordinary file; write what it gives into one"):
        find(str(tmp_path / "a.jsonl"))


def test_what_cannot_be_read_is_named_with_the_reason(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "in").mkdir()
    (tmp_path / "a.jsonl").write_text("{}\n")
    refused = PermissionError(13, "Permission denied", str(tmp_path / "in" / "deep"))

    def refuse(*arguments: object, **named: object) -> object:
        raise refused

    monkeypatch.setattr(os, "scandir", refuse)
    monkeypatch.setattr(Path, "open", refuse)
    with pytest.raises(UserError) as caught:
        find(f"{tmp_path / 'in'},{tmp_path / 'a.jsonl'}")
    folder, file = caught.value.problems
    assert "deep cannot be read: Permission denied; name a folder" in folder
    assert "a.jsonl, cannot be read: Permission denied" in file


def repeated(path: Path, rows: int, texts: list[str], nested: bool = False) -> Path:
    """A file that holds each text once, and the rows as their numbers."""
    codes = pa.array([row % len(texts) for row in range(rows)], pa.int32())
    cells: pa.Array = pa.DictionaryArray.from_arrays(codes, pa.array(texts))
    if nested:
        cells = pa.ListArray.from_arrays(pa.array(range(rows + 1), pa.int32()), cells)
    pq.write_table(pa.table({"text": cells}), path, compression="zstd", store_schema=False)
    return path


@pytest.mark.parametrize("nested", [False, True], ids=["text", "list of texts"])
def test_few_bytes_that_unpack_to_gigabytes_are_read_row_by_row(tmp_path: Path, nested: bool) -> None:
    long, rows = "a" * 2**22, 5000  # 20 GiB
    path = repeated(tmp_path / "a.parquet", rows, [long], nested)
    assert path.stat().st_size < 10_000
    with open_parquet(path) as file:
        assert parquet_batch_rows(path, file, ["text"], 1024) * len(long) <= 2**26
        assert not unpacks_to(path, file, 0, ["text"], 2**26)
    cell = LowMemDataset(path, mode="file")[1]["text"]
    assert cell == ([long] if nested else long)


def test_a_group_of_mostly_short_texts_stays_one(tmp_path: Path) -> None:
    path = repeated(tmp_path / "a.parquet", 3000, ["a" * 2**16, *(f"{row} short" for row in range(2999))])
    with open_parquet(path) as file:
        assert unpacks_to(path, file, 0, ["text"], 2**20), "counted, not only bounded"
        assert parquet_batch_rows(path, file, ["text"], 256) == 256
    dataset = LowMemDataset(path, mode="file")
    assert [len(dataset[row]["text"]) for row in (2999, 0, 1)] == [10, 2**16, 7]


@pytest.mark.parametrize("encoding", ["DELTA_BYTE_ARRAY", "DELTA_LENGTH_BYTE_ARRAY"])
@pytest.mark.parametrize("dictionary", [False, ["of"]], ids=["all", "beside codes"])
def test_texts_that_are_told_by_the_one_before_are_read(tmp_path: Path, encoding: str, dictionary: object) -> None:
    """As Parquet's second version writes them; they were called broken."""
    texts = [f"row {row} of some text that is long enough" for row in range(5000)]
    path, table = tmp_path / "a.parquet", pa.table({"text": texts, "of": ["a", "b"] * 2500})
    pq.write_table(table, path, use_dictionary=dictionary, column_encoding={"text": encoding})
    columns = ["of", "text"]
    rows = [row for batch in read_rows(find(str(path)), columns, BadRows()) for row in batch]
    assert rows == list(zip(["a", "b"] * 2500, texts, strict=True))
    with open_parquet(path) as file:
        assert unpacks_to(path, file, 0, ["text"], 2**20) and not unpacks_to(path, file, 0, ["text"], 2**17)
    dataset = LowMemDataset(path, mode="file")
    assert [dataset[row]["text"] for row in (4999, 0)] == [texts[4999], texts[0]]


def test_few_bytes_that_tell_gigabytes_by_the_one_before_are_read_row_by_row(tmp_path: Path) -> None:
    long = "a" * 2**20
    path, table = tmp_path / "a.parquet", pa.table({"text": [long] * 100})  # 100 MiB in some hundred bytes
    pq.write_table(table, path, use_dictionary=False, column_encoding={"text": "DELTA_BYTE_ARRAY"}, compression="zstd")
    assert path.stat().st_size < 10_000
    with open_parquet(path) as file:
        assert parquet_batch_rows(path, file, ["text"], 256) * len(long) <= 2**23
        assert not unpacks_to(path, file, 0, ["text"], 2**26)
    assert LowMemDataset(path, mode="file")[1]["text"] == long


def test_a_file_whose_rows_are_all_too_long_says_so(tmp_path: Path) -> None:
    path = tmp_path / "huge.jsonl"
    path.write_text(json.dumps({"text": "x" * LONGEST_LINE_BYTES}) + "\n")
    with pytest.raises(UserError, match=r"line 1.* is longer than 16 MiB"):
        column_names(find(str(path))[0])
