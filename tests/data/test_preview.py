"""What a data file holds, told by its first rows."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from config import ROOT, UserError
from data.sources.preview import BARS, COUNTED_ROWS, preview


def jsonl(path: Path, *rows: object) -> str:
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return str(path)


@pytest.mark.parametrize(
    ("row", "task", "shown"),
    [
        ({"text": "a"}, "text", ["text"]),
        ({"prompt": "a", "response": "b", "n": 1}, "pairs", ["prompt", "response"]),
        ({"prompt": "a", "chosen": "b", "rejected": "c"}, "preferences", ["prompt", "chosen", "rejected"]),
        ({"messages": [{"role": "user", "content": "a"}]}, "conversations", ["messages"]),
        ({"question": "a", "n": 1}, None, ["question"]),
    ],
)
def test_what_a_file_teaches_follows_from_its_columns(
    tmp_path: Path, row: object, task: str | None, shown: list[str]
) -> None:
    found = preview(jsonl(tmp_path / "a.jsonl", row, row))
    assert (found["task"], found["shown"], found["counted"]) == (task, shown, 2)
    assert len(found["rows"]) == 2 and found["is_whole"]


def test_lengths_are_counted_and_drawn(tmp_path: Path) -> None:
    found = preview(jsonl(tmp_path / "a.jsonl", *({"text": "字" * n} for n in range(1, 102))))
    lengths = found["lengths"]["text"]
    assert (lengths["median"], lengths["longest"]) == (51, 101)
    assert len(lengths["bars"]) == BARS and sum(lengths["bars"]) == 101


def test_a_large_table_is_read_at_its_beginning_alone(tmp_path: Path) -> None:
    pq.write_table(pa.table({"text": ["a"] * (3 * COUNTED_ROWS)}), tmp_path / "a.parquet")
    found = preview(str(tmp_path / "a.parquet"))
    assert found["counted"] == COUNTED_ROWS and not found["is_whole"]


def test_broken_rows_are_counted(tmp_path: Path) -> None:
    path = jsonl(tmp_path / "a.jsonl", {"text": "a"}, {"text": 5}, {"text": "b"})
    assert preview(path)["broken"] == 1


def test_what_cannot_be_read_is_told(tmp_path: Path) -> None:
    with pytest.raises(UserError):
        preview(str(tmp_path / "none.jsonl"))
    done = subprocess.run(
        [sys.executable, "-m", "data.sources.preview", str(tmp_path / "none.jsonl")],
        cwd=ROOT,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "no such file" in json.loads(done.stdout)["problems"][0]
