"""About as many rows as there are, without reading them all."""

from __future__ import annotations

import gzip
import json
import random
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.sources.counting import BEGINNING, EVERYWHERE, WHOLE_BYTES, about_rows, about_tokens, some_rows
from data.sources.files import find

ROWS = [{"prompt": f"question {at}", "response": "an answer " * (at % 40)} for at in range(9000)]


def test_rows_of_each_format(tmp_path: Path) -> None:
    pq.write_table(pa.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    (tmp_path / "a.json").write_text(json.dumps(ROWS), encoding="utf8")
    (tmp_path / "a.jsonl").write_text("".join(json.dumps(row) + "\n" for row in ROWS), encoding="utf8")
    assert about_rows(find(str(tmp_path / "a.parquet"))) == 9000
    for name in ("a.json", "a.jsonl"):
        assert about_rows(find(str(tmp_path / name))) == pytest.approx(9000, rel=0.05)


def test_small_files_and_text(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one\n\ntwo\n\nthree", encoding="utf8")
    assert 1 <= about_rows(find(str(tmp_path / "a.txt"))) <= 3
    (tmp_path / "b.txt").write_text("word " * 4000, encoding="utf8")
    assert about_tokens(find(str(tmp_path / "b.txt"))) == 5000


def long_at_the_end(count: int) -> list[dict[str, str]]:
    """Rows of which the last half is another kind than the first."""
    return [{"prompt": f"q{at}", "response": "an answer " * (40 if at >= count // 2 else 1)} for at in range(count)]


def test_a_sample_comes_from_everywhere(tmp_path: Path) -> None:
    """What lies behind the beginning of a large file is seen where its format allows it, and told where it does not."""
    rows = long_at_the_end(24_000)
    text = "".join(json.dumps(row) + "\n" for row in rows)
    assert len(text) > WHOLE_BYTES
    (tmp_path / "a.jsonl").write_text(text, encoding="utf8")
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "groups.parquet", row_group_size=500)
    pq.write_table(pa.Table.from_pylist(rows), tmp_path / "one.parquet", compression="none", use_dictionary=False)
    with gzip.open(tmp_path / "packed.jsonl.gz", "wb") as file:
        noise = random.Random(1)
        lines = (f'{{"prompt": "{noise.randbytes(60).hex()}", "response": "r"}}\n' for _ in range(25_000))
        file.writelines(line.encode() for line in lines)
    table = pa.Table.from_pylist(rows)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), table.schema) as writer:
        writer.write_table(table, max_chunksize=500)
    for name, expected in {
        "a.jsonl": EVERYWHERE, "groups.parquet": EVERYWHERE, "a.arrow": EVERYWHERE, "one.parquet": BEGINNING,
        "packed.jsonl.gz": BEGINNING,
    }.items():  # fmt: skip
        found, place, is_all = some_rows(find(str(tmp_path / name)), ["prompt", "response"], 400)
        assert (place, is_all) == (expected, False), name
        assert 100 < len(found) <= 400, name
        if place == EVERYWHERE:
            assert 0.3 < sum(len(response) > 100 for _, response in found) / len(found) < 0.7, name
        assert all(prompt.startswith("q") or "packed" in name for prompt, _ in found), "no row is torn"


def test_small_files_are_read_whole(tmp_path: Path) -> None:
    for part in ("a", "b"):
        lines = [json.dumps({"prompt": f"{part}{at}", "response": "r"}) for at in range(300)]
        (tmp_path / f"{part}.jsonl").write_text("\n".join([*lines, "no row"]), encoding="utf8")
    sources = find(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl")
    found, place, is_all = some_rows(sources, ["prompt", "response"], 1000)
    assert (len(found), place, is_all) == (600, EVERYWHERE, True)
    found, place, is_all = some_rows(sources, ["prompt", "response"], 100)
    assert len(found) == 100 and not is_all and {prompt[0] for prompt, _ in found} == {"a", "b"}
    found, *_ = some_rows(sources, ["prompt", "response"], 100, max_rows=50)
    assert [prompt for prompt, _ in found] == [f"a{at}" for at in range(50)]
