"""Which files a user means, what is in them, and what is refused at once."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.prepare.training_data import held_out_sources
from data.prepare.unread import passed_over
from data.sources.files import find, listing
from settings.errors import UserError
from settings.loading import load
from settings.tasks import task_named
from tests.data.sources.rows import write_rows

TABLE = pa.table({"text": ["one", "two"]})


def write(path: Path, content: bytes = b"some text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def kinds(spec: object) -> list[str]:
    return [source.kind for source in find(str(spec))]


def names(spec: object, setting: str = "--train_file") -> list[str]:
    """The names of the files that a user means."""
    return [source.path.name for source in find(str(spec), setting)]


def descriptions(spec: object) -> list[str]:
    return [file.name for file in listing(str(spec)).descriptions]


def test_the_kind_follows_from_the_first_bytes_else_from_the_ending(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.data")
    for name, new in (("b.arrow", pa.ipc.new_file), ("c.arrow", pa.ipc.new_stream)):
        with new(str(tmp_path / name), TABLE.schema) as writer:
            writer.write(TABLE)
    spec = f"{tmp_path}/a.data,{tmp_path}/b.arrow, {tmp_path}/c.arrow"
    assert kinds(spec) == ["parquet", "arrow file", "arrow stream"]
    for name, kind in {"a.txt": "text", "a": "text", "a.JSONL": "jsonl", "a.csv": "csv", "a.b.tsv": "tsv"}.items():
        assert kinds(write(tmp_path / "more" / name)) == [kind]
    source = find(str(write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "x"}\n'))))[0]
    assert (source.kind, source.compression) == ("jsonl", "gzip")
    assert kinds(write(tmp_path / "page.txt", b"<!DOCTYPE html>\n<html>")) == ["text"], "a page may be text"


def test_a_folder_gives_its_data_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "d.csv.gz", ".hidden.txt", "_tmp/e.txt", "notes.md", "state.json", "image.png"):
        write(tmp_path / name)
    assert names(tmp_path) == ["c.txt", "b.txt", "d.csv.gz"]


def test_json_of_a_folder_is_rows_where_there_is_nothing_else(tmp_path: Path) -> None:
    """Beside other data it mostly describes them: it is left out, and told. What never holds rows is neither."""
    for name in ("b.json", "a/c.json.gz", "a/dataset_infos.json", "config.json", "tokenizer.json", "_x.json"):
        write(tmp_path / name, b'[{"text": "x"}]')
    assert names(tmp_path) == ["c.json.gz", "b.json"]
    assert descriptions(tmp_path) == []
    write(tmp_path / "d.jsonl", b'{"text": "x"}')
    assert names(tmp_path) == ["d.jsonl"]
    assert descriptions(tmp_path) == ["c.json.gz", "b.json"]
    assert names(f"{tmp_path},{tmp_path}/b*.json") == ["d.jsonl", "b.json"]


def test_globs_and_lists_join_without_repetition(tmp_path: Path) -> None:
    folder = tmp_path / "part [1]*"  # Its name looks like a glob.
    for name in ("b.txt", "a1.txt", "a2.txt", "c,d.csv"):
        write(folder / name)
    assert names(f"{folder}/a*.txt,{folder}/b.txt,{folder}/a1.txt") == ["a1.txt", "a2.txt", "b.txt"]
    assert names(f"{folder}/c,d.csv") == ["c,d.csv"], "a comma in a name is not a list"


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.jsonl", b"", "is empty"),
        ("no.parquet", b"not parquet at all", "does not begin like parquet"),
        ("locked.parquet", b"PARE" + bytes(64), "is encrypted; write it again"),
        ("a.parquet.gz", gzip.compress(b"x", mtime=0), "unpack it first"),
        ("a.parquet", b"<!DOCTYPE html>\n<html>", "is an HTML page, not parquet"),
        ("a.csv", b"PK\x03\x04 workbook", "is a zip archive"),
        ("a.txt", b"name".ljust(257, b"\0") + b"ustar\x0000", "is an archive; unpack it"),
        ("a.bin", b"words\0" * 9, "holds many NUL bytes"),
        ("a.txt", b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a git-lfs pointer"),
        ("a.csv", "prompt,response\n".encode("utf16"), "is UTF-16; save it as UTF-8"),
    ],
)
def test_problems_name_the_file_and_what_to_do(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    if content is not None:
        write(path, content)
    with pytest.raises(UserError, match=words) as caught:
        find(str(path), "--validation_file")
    assert f"--validation_file = {path}" in str(caught.value)


# files of a folder; those that train, those held out, and which notes there are of the others
SPLITS: list[tuple[str, str, str, set[str]]] = [
    ("data/train-0.jsonl data/test-0.jsonl", "train-0.jsonl", "", {"not read"}),
    ("Train.jsonl my_dev.jsonl more.jsonl", "Train.jsonl", "my_dev.jsonl", {"not read", "held out"}),
    ("a.jsonl contest.jsonl trainer.jsonl", "a.jsonl contest.jsonl trainer.jsonl", "", set()),
    ("a.jsonl test.jsonl", "a.jsonl test.jsonl", "", {"also read"}),
]


@pytest.mark.parametrize(("files", "train", "validation", "notes"), SPLITS)
def test_the_names_of_files_say_their_split(
    tmp_path: Path, files: str, train: str, validation: str, notes: set[str]
) -> None:
    for name in files.split():
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, [{"prompt": "p", "response": "r"}])
    config = load("train", {"train_file": str(tmp_path)})
    assert names(tmp_path) == train.split()
    assert [source.path.name for source in held_out_sources(config.data)] == validation.split()
    assert dict(passed_over(config.data, task_named("pairs"))).keys() == notes
    assert len(find(str(tmp_path), "--input")) == len(files.split())


def saved(folder: Path) -> Path:
    """What `Dataset.save_to_disk` writes: two streams whose names do not sort, state.json and dataset_info.json."""
    folder.mkdir(parents=True)
    for name, texts in (("data-b.arrow", ["1", "2"]), ("data-a.arrow", ["3", "4"])):
        with pa.ipc.new_stream(str(folder / name), TABLE.schema) as stream:
            stream.write_table(pa.table({"text": texts}))
    write(folder / "cache-1234.arrow", b"\xff\xff\xff\xffxxxx")
    files = [{"filename": "data-b.arrow"}, {"filename": "data-a.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_gives_the_files_that_it_lists_in_their_order(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved")
    assert descriptions(folder) == []
    assert names(folder) == ["data-b.arrow", "data-a.arrow"]
    assert [row["text"] for row in LowMemDataset(folder)] == ["1", "2", "3", "4"]
    (folder / "data-a.arrow").unlink()
    with pytest.raises(UserError, match=r"data-a\.arrow, is missing, state\.json lists it"):
        find(str(folder))


def test_a_saved_dictionary_gives_the_split_that_is_wanted(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / "all" / split)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name, split in (("--train_file", "train"), ("--validation_file", "test")):
        assert {source.path.parent.name for source in find(str(tmp_path / "all"), name)} == {split}
    assert {file.parent.name for file in listing(str(tmp_path / "all")).test} == {"test"}, "noted as not read"
