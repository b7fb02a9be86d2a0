"""Addresses: the same rows from a service as from files here. The service is a real S3 server on this machine
(moto).
"""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.sources.files import find, listing, sources_fingerprint
from data.sources.lines import BadRows
from data.sources.places import is_address, public, public_values
from data.sources.reading import read_rows
from settings.errors import UserError
from tests.conftest import S3

ROWS = [(f"row {number}",) for number in range(700)]
TABLE = pa.table({"text": [text for (text,) in ROWS]})


@pytest.fixture(scope="module")
def bucket(s3: S3) -> str:
    """Query of addresses in the bucket `bucket`, which holds `contents`."""
    for key, body in contents().items():
        s3.client.put_object(Bucket="bucket", Key=key, Body=body)
    return s3.query


def contents() -> dict[str, bytes]:
    sinks = {name: pa.BufferOutputStream() for name in ("parquet", "file", "stream")}
    pq.write_table(TABLE, sinks["parquet"], row_group_size=100)
    for name, new in (("file", pa.ipc.new_file), ("stream", pa.ipc.new_stream)):
        with new(sinks[name], TABLE.schema) as writer:
            writer.write_table(TABLE, max_chunksize=64)
    lines = b"".join(json.dumps({"text": text}).encode() + b"\n" for (text,) in ROWS)
    return {
        "d/a.parquet": sinks["parquet"].getvalue().to_pybytes(),
        "d/b.arrow": sinks["file"].getvalue().to_pybytes(),
        "d/c.arrow": sinks["stream"].getvalue().to_pybytes(),
        "d/e.jsonl": lines,
        "d/f.jsonl.gz": gzip.compress(lines),
        "d/g.csv": b"text\n" + b"".join(text.encode() + b"\n" for (text,) in ROWS),
        "d/_hidden.jsonl": b"x",
        "d/readme.md": b"x",
        "d/h.json": b"[{}]",
        "empty/x.jsonl": b"",
    }


def rows_of(spec: str) -> list[tuple[str, ...]]:
    return [row for batch in read_rows(find(spec), ["text"], BadRows()) for row in batch]


@pytest.mark.parametrize("name", ["a.parquet", "b.arrow", "c.arrow", "e.jsonl", "f.jsonl.gz", "g.csv"])
def test_every_format_is_read_from_an_address(bucket: str, name: str) -> None:
    assert rows_of(f"s3://bucket/d/{name}?{bucket}") == ROWS


def test_folders_globs_and_lists_of_addresses(bucket: str) -> None:
    assert [source.path.name for source in find(f"s3://bucket/d?{bucket}")] == [
        "a.parquet",
        "b.arrow",
        "c.arrow",
        "e.jsonl",
        "f.jsonl.gz",
        "g.csv",
    ]
    assert [source.path.name for source in find(f"s3://bucket/d/*.arrow?{bucket}")] == ["b.arrow", "c.arrow"]
    assert [file.name for file in listing(f"s3://bucket/d?{bucket}").descriptions] == ["h.json"]
    assert [source.path.name for source in find(f"s3://bucket/d/[gh]*?{bucket}")] == ["g.csv", "h.json"]
    both = find(f"s3://bucket/d/e.jsonl?{bucket},s3://bucket/d/g.csv?{bucket}")
    assert [source.part for source in both] == [0, 1]
    assert sources_fingerprint(both) != sources_fingerprint(both[:1])


def test_problems_with_addresses_are_user_errors(bucket: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"s3://bucket/none.*holds no data file"):
        find(f"s3://bucket/none?{bucket}")
    with pytest.raises(UserError, match="is empty"):
        find(f"s3://bucket/empty/x.jsonl?{bucket}")
    with pytest.raises(UserError, match="no rows by number"):
        LowMemDataset(f"s3://bucket/d/b.arrow?{bucket}")
    with pytest.raises(UserError, match="cannot be read"):
        find("nonsense://b/a.jsonl")


def test_file_addresses_are_paths(tmp_path: Path) -> None:
    (tmp_path / "with space.jsonl").write_text('{"text": "x"}\n')
    source = find((tmp_path / "with space.jsonl").as_uri())[0]
    assert source.path == tmp_path / "with space.jsonl" and rows_of(source.path.as_uri()) == [("x",)]


def test_secrets_are_not_shown() -> None:
    assert public("s3://key:secret@bucket/a?x=1") == "s3://bucket/a?x=1" == public("s3://bucket/a?x=1")
    assert public("s3://key:sec/ret@bucket/a@b, s3://k:s@c/d") == "s3://bucket/a@b, s3://c/d"
    assert public("s3://bucket/a@b") == "s3://bucket/a@b"
    assert public("'s3://bucket/a?secret_key=x&region=y'") == "'s3://bucket/a?&region=y'"
    assert public_values({"train_file": "s3://k:s@b/c", "seed": 1}) == {"train_file": "s3://b/c", "seed": 1}
    assert is_address("s3://b") and not is_address("C:\\x") and not is_address("a/b")
