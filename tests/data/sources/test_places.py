"""Addresses: the same rows from a service as from files here. The service is a real S3 server on this machine
(moto).
"""

from __future__ import annotations

import gzip

import pyarrow as pa
import pytest

from data.dataset import LowMemDataset
from data.sources.files import find, listing, sources_fingerprint
from data.sources.places import is_address, public, public_values
from settings.errors import UserError
from tests.conftest import S3
from tests.data.sources.rows import Row, rows_of, write_rows

ROWS: list[Row] = [{"text": f"row {number}"} for number in range(700)]
DATA_FILES = ["a.parquet", "b.arrow", "c.arrow", "e.jsonl", "f.jsonl.gz", "g.csv"]


@pytest.fixture(scope="module")
def bucket(s3: S3, tmp_path_factory: pytest.TempPathFactory) -> str:
    """Query of addresses in the bucket `bucket`."""
    folder = tmp_path_factory.mktemp("rows")
    for name in ("a.parquet", "b.arrow", "e.jsonl", "g.csv"):
        write_rows(folder / name, ROWS)
    table = pa.Table.from_pylist(ROWS)
    with pa.ipc.new_stream(str(folder / "c.arrow"), table.schema) as stream:
        stream.write_table(table, max_chunksize=64)
    (folder / "f.jsonl.gz").write_bytes(gzip.compress((folder / "e.jsonl").read_bytes()))
    for name in ("_hidden.jsonl", "readme.md"):
        (folder / name).write_bytes(b"x")
    (folder / "h.json").write_bytes(b"[{}]")
    for path in folder.iterdir():
        s3.client.put_object(Bucket="bucket", Key=f"d/{path.name}", Body=path.read_bytes())
    s3.client.put_object(Bucket="bucket", Key="empty/x.jsonl", Body=b"")
    return s3.query


@pytest.mark.parametrize("name", DATA_FILES)
def test_every_format_is_read_from_an_address(bucket: str, name: str) -> None:
    assert rows_of(f"s3://bucket/d/{name}?{bucket}", ("text",)) == [(row["text"],) for row in ROWS]


def test_folders_globs_and_lists_of_addresses(bucket: str) -> None:
    def names(pattern: str) -> list[str]:
        return [source.path.name for source in find(f"s3://bucket/{pattern}?{bucket}")]

    assert names("d") == DATA_FILES
    assert names("d/*.arrow") == ["b.arrow", "c.arrow"]
    assert names("d/[gh]*") == ["g.csv", "h.json"]
    assert [file.name for file in listing(f"s3://bucket/d?{bucket}").descriptions] == ["h.json"]
    both = find(f"s3://bucket/d/e.jsonl?{bucket},s3://bucket/d/g.csv?{bucket}")
    assert [source.part for source in both] == [0, 1]
    assert sources_fingerprint(both) != sources_fingerprint(both[:1])


def test_problems_with_addresses_are_user_errors(bucket: str) -> None:
    with pytest.raises(UserError, match=r"s3://bucket/none.*holds no data file"):
        find(f"s3://bucket/none?{bucket}")
    with pytest.raises(UserError, match="is empty"):
        find(f"s3://bucket/empty/x.jsonl?{bucket}")
    with pytest.raises(UserError, match="no rows by number"):
        LowMemDataset(f"s3://bucket/d/b.arrow?{bucket}")
    with pytest.raises(UserError, match="cannot be read"):
        find("nonsense://b/a.jsonl")


def test_secrets_are_not_shown() -> None:
    assert public("s3://key:secret@bucket/a?x=1") == "s3://bucket/a?x=1" == public("s3://bucket/a?x=1")
    assert public("s3://key:sec/ret@bucket/a@b, s3://k:s@c/d") == "s3://bucket/a@b, s3://c/d"
    assert public("s3://bucket/a@b") == "s3://bucket/a@b"
    assert public("'s3://bucket/a?secret_key=x&region=y'") == "'s3://bucket/a?&region=y'"
    assert public_values({"train_file": "s3://k:s@b/c", "seed": 1}) == {"train_file": "s3://b/c", "seed": 1}
    assert [is_address(text) for text in ("s3://b", "C:\\x", "a/b")] == [True, False, False]
