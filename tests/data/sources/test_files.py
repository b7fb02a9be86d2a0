"""Which files a user means, what is in them, and what is refused at once."""

from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.prepare.training_data import held_out_sources
from data.prepare.unread import passed_over
from data.shards.store import is_shards
from data.sources.files import find, listing, sources_fingerprint
from data.sources.lines import blocks
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


def test_zstd_may_begin_with_a_frame_to_skip(tmp_path: Path) -> None:
    """As pzstd writes it, one before each part."""
    skipped = struct.pack("<III", 0x184D2A5F, 4, 0)
    parts = [pa.compress(f"part {part}\n".encode() * 9, "zstd", asbytes=True) for part in range(2)]
    (source,) = find(str(write(tmp_path / "a.txt.zst", b"".join(skipped + part for part in parts))))
    assert (source.kind, source.compression) == ("text", "zstd")
    assert b"".join(blocks(source)) == b"part 0\n" * 9 + b"part 1\n" * 9


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
    write(tmp_path / "model" / "config.json")
    with pytest.raises(UserError, match="holds no data file"):
        find(f"{tmp_path}/model")


def test_globs_and_lists_join_without_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "part [1]*"  # Its name looks like a glob.
    for name in ("b.txt", "a1.txt", "a2.txt", "c,d.csv"):
        write(folder / name)
    assert names(f"{folder}/a*.txt,{folder}/b.txt,{folder}/a1.txt") == ["a1.txt", "a2.txt", "b.txt"]
    assert names(f"{folder}/c,d.csv") == ["c,d.csv"], "a comma in a name is not a list"
    monkeypatch.chdir(tmp_path)
    many = [str(write(Path(f"train-{number:05d}-of-00400.txt"))) for number in range(400)]
    assert not is_shards(",".join(many)), "longer than a name or a path may be"
    assert len(find(",".join(many))) == 400


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("missing.txt", None, "no such file"),
        ("empty.jsonl", b"", "is empty"),
        ("no.parquet", b"not parquet at all", "does not begin like parquet"),
        ("locked.parquet", b"PARE" + bytes(64), "is encrypted; write it again"),
        ("no.arrow", b"not arrow at all", "does not begin like arrow"),
        ("a.parquet.gz", gzip.compress(b"x", mtime=0), "unpack it first"),
        ("a.parquet", b"<!DOCTYPE html>\n<html>", "is an HTML page, not parquet"),
        ("a.jsonl", b"\n <html><body>", "is an HTML page, not jsonl"),
        ("a.csv", b"PK\x03\x04 workbook", "is a zip archive"),
        ("a.pdf", b"%PDF-1.7", "is a PDF"),
        ("a.db", b"SQLite format 3\0", "is a database"),
        ("a.txt", b"name".ljust(257, b"\0") + b"ustar\x0000", "is an archive; unpack it"),
        ("a.tar.gz", b"\x1f\x8b\x08", "is an archive; unpack it"),
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


def test_a_file_that_is_near_is_named(tmp_path: Path) -> None:
    write(tmp_path / "pairs.json")
    with pytest.raises(UserError, match=r"no such file; .*; did you mean .*/pairs\.json"):
        find(str(tmp_path / "pair.json"))
    with pytest.raises(UserError) as caught:
        find(str(tmp_path / "else.csv"))
    assert "did you mean" not in str(caught.value)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    write(tmp_path / "empty.txt", b"")
    write(tmp_path / "folder" / "a.png")
    with pytest.raises(UserError) as caught:
        find(f"{tmp_path}/empty.txt,{tmp_path}/missing.txt,nonsense://bucket/a.parquet,{tmp_path}/folder")
    assert len(caught.value.problems) == 4
    assert "holds no data file; give one with files that end in .parquet" in caught.value.problems[2]


# files of a folder; those that train, those held out, and what is said of the others
SPLITS: list[tuple[list[str], list[str], list[str], dict[str, str]]] = [
    (
        ["data/train-00000-of-00001.parquet", "data/validation-00000-of-00001.parquet", "data/test-00000.parquet"],
        ["train-00000-of-00001.parquet"],
        ["validation-00000-of-00001.parquet"],
        {
            "not read": "1 file named as test data, first {}/data/test-00000.parquet",
            "held out": "1 file named as validation data, first {}/data/validation-00000-of-00001.parquet",
        },
    ),
    (
        ["Train.jsonl", "my_dev.jsonl", "more.jsonl"],
        ["Train.jsonl"],
        ["my_dev.jsonl"],
        {
            "not read": "1 file whose names mention no split, first {}/more.jsonl",
            "held out": "1 file named as validation data, first {}/my_dev.jsonl",
        },
    ),
    (
        ["training/x.jsonl", "eval/train.jsonl"],
        ["x.jsonl"],
        [],
        {"not read": "1 file named as test data, first {}/eval/train.jsonl"},
    ),
    (["a.jsonl", "contest.jsonl", "trainer.jsonl"], ["a.jsonl", "contest.jsonl", "trainer.jsonl"], [], {}),
    (
        ["a.jsonl", "test.jsonl"],
        ["a.jsonl", "test.jsonl"],
        [],
        {"read too": "1 file named as validation or test data, because none is named train, first {}/test.jsonl"},
    ),
]


@pytest.mark.parametrize(("files", "train", "validation", "notes"), SPLITS)
def test_the_names_of_files_say_their_split(
    tmp_path: Path, files: list[str], train: list[str], validation: list[str], notes: dict[str, str]
) -> None:
    for name in files:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        write_rows(tmp_path / name, [{"prompt": "p", "response": "r"}])
    config = load("train", {"train_file": str(tmp_path)})
    assert names(tmp_path) == train
    assert [source.path.name for source in held_out_sources(config.data)] == validation
    table = dict(passed_over(config.data, task_named("pairs")))
    assert table == {name: words.format(tmp_path) for name, words in notes.items()}
    chosen = load("train", {"train_file": str(tmp_path), "validation_file": str(tmp_path / files[0])})
    assert [source.path.name for source in held_out_sources(chosen.data)] == [Path(files[0]).name]
    if validation:
        assert names(tmp_path, "--validation_file") == validation
    assert len(find(str(tmp_path), "--input")) == len(files)


def test_the_fingerprint_changes_with_name_size_and_time(tmp_path: Path) -> None:
    path = write(tmp_path / "a.txt")
    first = sources_fingerprint(find(str(path)))
    assert sources_fingerprint(find(str(path))) == first
    os.utime(path, ns=(1, 1))
    second = sources_fingerprint(find(str(path)))
    write(path, b"longer text than before\n")
    os.utime(path, ns=(1, 1))
    third = sources_fingerprint(find(str(path)))
    path.rename(tmp_path / "b.txt")
    fourth = sources_fingerprint(find(str(tmp_path / "b.txt")))
    assert len({first, second, third, fourth}) == 4


def saved(folder: Path, **state: Any) -> Path:
    """What `Dataset.save_to_disk` writes: two streams whose names do not sort, state.json and dataset_info.json."""
    folder.mkdir(parents=True)
    for name, texts in (("data-b.arrow", ["1", "2"]), ("data-a.arrow", ["3", "4"])):
        with pa.ipc.new_stream(str(folder / name), TABLE.schema) as stream:
            stream.write_table(pa.table({"text": texts}))
    write(folder / "cache-1234.arrow", b"\xff\xff\xff\xffxxxx")
    files = [{"filename": "data-b.arrow"}, {"filename": "data-a.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, **state}))
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


@pytest.mark.parametrize(
    ("state", "words"),
    [
        ({"_indices_data_files": [{"filename": "indices.arrow"}]}, "flatten_indices"),
        ({"_data_files": []}, "is a saved dataset without rows"),
        ({"_data_files": [3]}, r"state\.json, names no files"),
        ({"_data_files": [{}]}, r"state\.json, names no files"),
        ({"_data_files": [{"filename": 3}]}, r"state\.json, names no files"),
    ],
)
def test_a_saved_dataset_that_cannot_be_read_whole_is_refused(tmp_path: Path, state: Any, words: str) -> None:
    with pytest.raises(UserError, match=words):
        find(str(saved(tmp_path / "saved", **state)))


def test_a_saved_dictionary_gives_the_split_that_is_wanted(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / "all" / split)
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name, split in (("--train_file", "train"), ("--validation_file", "test")):
        assert {source.path.parent.name for source in find(str(tmp_path / "all"), name)} == {split}
    assert {file.parent.name for file in listing(str(tmp_path / "all")).test} == {"test"}, "noted as not read"
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["dev"]}')
    with pytest.raises(UserError, match="has the splits dev and no train"):
        find(str(tmp_path / "all"))


@pytest.mark.slow
def test_what_datasets_saves_is_read(tmp_path: Path) -> None:
    script = (
        "import sys, datasets\n"
        "data = datasets.Dataset.from_dict({'text': [str(n) for n in range(50)]})\n"
        "data.shuffle(seed=1).save_to_disk(sys.argv[1] + '/one', num_shards=3)\n"
        "datasets.DatasetDict({'train': data, 'test': data}).save_to_disk(sys.argv[1] + '/all')\n"
    )
    pytest.importorskip("datasets")
    subprocess.run([sys.executable, "-c", script, str(tmp_path)], check=True, capture_output=True)
    assert sorted(int(row["text"]) for row in LowMemDataset(tmp_path / "one")) == list(range(50))
    assert [row["text"] for row in LowMemDataset(find(str(tmp_path / "all"))[0].path)] == [str(n) for n in range(50)]


def test_a_folder_that_cannot_be_read_is_no_silence(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "data" / "a.txt")
    write(tmp_path / "data" / "closed" / "b.txt")
    plain = os.scandir

    def scandir(folder: str) -> object:
        if str(folder).endswith("closed"):
            raise PermissionError(13, "Permission denied", str(folder))
        return plain(folder)

    monkeypatch.setattr(os, "scandir", scandir)
    with pytest.raises(UserError, match=r"closed cannot be read: .*give a folder that can be read whole"):
        find(str(tmp_path / "data"))


@pytest.mark.skipif(os.name == "nt", reason="links need rights there")
def test_linked_folders_are_read_once(tmp_path: Path) -> None:
    write(tmp_path / "data" / "a.txt")
    write(tmp_path / "disk" / "b.txt")
    (tmp_path / "data" / "part2").symlink_to(tmp_path / "disk")
    (tmp_path / "disk" / "round").symlink_to(tmp_path / "data")
    write(tmp_path / "data" / ".git" / "c.txt")
    write(tmp_path / "data" / "lost+found" / "d.txt")  # Disks have such a folder, which is closed to most.
    assert names(tmp_path / "data") == ["a.txt", "b.txt"]


def test_a_name_may_begin_with_a_tilde(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    write(tmp_path / "home" / "a.txt")
    write(tmp_path / "~notes.txt")
    assert kinds("~notes.txt") == ["text"]
    with pytest.raises(UserError, match="no such file"):
        find("~nosuchuser/a.txt")
    if os.name != "nt":
        assert kinds("~/a.txt") == ["text"]
        assert load("train", {"train_file": "x", "cache_dir": "~/c"}).data.cache_dir == str(tmp_path / "home" / "c")
    write(tmp_path / "~" / "c" / "d.txt")  # Earlier versions wrote there.
    assert load("train", {"train_file": "x", "cache_dir": "~/c"}).data.cache_dir == "~/c"
