from __future__ import annotations

import gzip
import json
import os
import struct
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from data.dataset import LowMemDataset
from data.shards.store import is_shards
from data.sources.files import find, listing, sources_fingerprint
from data.sources.lines import blocks
from settings.errors import UserError
from settings.loading import load

TABLE = pa.table({"text": ["one", "two"]})


def write(path: Path, content: bytes = b"some text\n") -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(content)
    return path


def kinds(spec: object) -> list[str]:
    return [source.kind for source in find(str(spec))]


def test_the_kind_follows_from_the_first_bytes_else_from_the_ending(tmp_path: Path) -> None:
    pq.write_table(TABLE, tmp_path / "a.data")
    for name, new in (("b.arrow", pa.ipc.new_file), ("c.arrow", pa.ipc.new_stream)):
        with new(str(tmp_path / name), TABLE.schema) as writer:
            writer.write(TABLE)
    found = kinds(f"{tmp_path}/a.data,{tmp_path}/b.arrow, {tmp_path}/c.arrow")
    assert found == ["parquet", "arrow file", "arrow stream"]
    for name, kind in {"a.txt": "text", "a": "text", "a.JSONL": "jsonl", "a.csv": "csv", "a.b.tsv": "tsv"}.items():
        assert kinds(write(tmp_path / "more" / name)) == [kind]
    source = find(str(write(tmp_path / "a.jsonl.gz", gzip.compress(b'{"text": "x"}\n'))))[0]
    assert (source.kind, source.compression) == ("jsonl", "gzip")


def test_zstd_may_begin_with_a_frame_to_skip(tmp_path: Path) -> None:
    """As pzstd writes it, one before each part."""
    skipped = struct.pack("<III", 0x184D2A5F, 4, 0)
    parts = [pa.compress(f"part {part}\n".encode() * 9, "zstd", asbytes=True) for part in range(2)]
    path = write(tmp_path / "a.txt.zst", b"".join(skipped + part for part in parts))
    (source,) = find(str(path))
    assert (source.kind, source.compression) == ("text", "zstd")
    assert b"".join(blocks(source)) == b"part 0\n" * 9 + b"part 1\n" * 9


def test_a_folder_gives_its_data_files_in_order(tmp_path: Path) -> None:
    for name in ("b.txt", "a/c.txt", "d.csv.gz", ".hidden.txt", "_tmp/e.txt", "notes.md", "state.json", "image.png"):
        write(tmp_path / name)
    assert [str(source.path.relative_to(tmp_path)) for source in find(str(tmp_path))] == [
        "a/c.txt",
        "b.txt",
        "d.csv.gz",
    ]


def names(places: Iterable[object]) -> list[str]:
    return [Path(str(place)).name for place in places]


def test_json_of_a_folder_is_rows_where_there_is_nothing_else(tmp_path: Path) -> None:
    """Beside other data it mostly describes them: it is left out, and told. What never holds rows is neither."""
    for name in ("b.json", "a/c.json.gz", "a/dataset_info.json", "config.json", "_x.json", "README.md"):
        write(tmp_path / name, b'[{"text": "x"}]')
    assert names(source.path for source in find(str(tmp_path))) == ["c.json.gz", "b.json"]
    assert listing(str(tmp_path)).descriptions == []
    write(tmp_path / "d.jsonl", b'{"text": "x"}')
    assert names(source.path for source in find(str(tmp_path))) == ["d.jsonl"]
    assert names(listing(str(tmp_path)).descriptions) == ["c.json.gz", "b.json"]
    also = f"{tmp_path},{tmp_path}/b*.json"
    assert names(source.path for source in find(also)) == ["d.jsonl", "b.json"]


def test_folders_of_programs_hold_no_rows_in_json(tmp_path: Path) -> None:
    """Neither a model, nor what stands beside the rows of a dataset on the hub."""
    for name in ("config", "tokenizer", "tokenizer_config", "special_tokens_map", "generation_config"):
        write(tmp_path / "model" / f"{name}.json", b"{}")
    with pytest.raises(UserError, match="holds no data file"):
        find(f"{tmp_path}/model")
    for name in ("dataset_infos.json", "data/train.csv", "README.md"):
        write(tmp_path / "snapshot" / name)
    assert names(source.path for source in find(f"{tmp_path}/snapshot")) == ["train.csv"]
    assert not [*listing(f"{tmp_path}/snapshot").descriptions, *listing(f"{tmp_path}/model").descriptions]


def test_globs_and_lists_join_without_repetition(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "part [1]*"  # whose name looks like a glob
    for name in ("b.txt", "a1.txt", "a2.txt", "c,d.csv"):
        write(folder / name)
    found = find(f"{folder}/a*.txt,{folder}/b.txt,{folder}/a1.txt")
    assert [source.path.name for source in found] == ["a1.txt", "a2.txt", "b.txt"]
    assert len(find(f"{folder}/c,d.csv")) == 1, "a comma in a name is not a list"
    monkeypatch.chdir(tmp_path)
    many = [str(write(Path(f"train-{number:05d}-of-00400.txt"))) for number in range(400)]
    assert not is_shards(",".join(many)) and len(find(",".join(many))) == 400, "longer than a name or a path may be"


@pytest.mark.parametrize(
    "name, content, words",
    [
        ("missing.txt", None, "no such file"),
        ("folder", b"folder", r"holds no data file.*\.parquet"),
        ("empty.jsonl", b"", "is empty"),
        ("no.parquet", b"not parquet at all", "does not begin like parquet"),
        ("locked.parquet", b"PARE" + bytes(64), "is encrypted; write it again"),
        ("no.arrow", b"not arrow at all", "does not begin like arrow"),
        ("a.parquet.gz", gzip.compress(b"x", mtime=0), "unpack it first"),
    ],
)
def test_problems_name_the_file_and_what_to_do(tmp_path: Path, name: str, content: bytes | None, words: str) -> None:
    path = tmp_path / name
    if content == b"folder":
        write(path / "a.png")
    elif content is not None:
        path.write_bytes(content)
    with pytest.raises(UserError, match=words) as caught:
        find(str(path), "--validation_file")
    assert str(path) in str(caught.value) and "--validation_file" in str(caught.value)


def test_a_file_that_is_near_is_named(tmp_path: Path) -> None:
    write(tmp_path / "pairs.json")
    with pytest.raises(UserError, match=r"no such file; .*; did you mean .*/pairs\.json"):
        find(str(tmp_path / "pair.json"))
    with pytest.raises(UserError) as caught:
        find(str(tmp_path / "else.csv"))
    assert "did you mean" not in str(caught.value)


def test_all_problems_come_at_once(tmp_path: Path) -> None:
    write(tmp_path / "empty.txt", b"")
    with pytest.raises(UserError) as caught:
        find(f"{tmp_path}/empty.txt,{tmp_path}/missing.txt,nonsense://bucket/a.parquet")
    assert len(caught.value.problems) == 3


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


def saved(folder: Path, texts: list[str], **state: object) -> Path:
    """What `Dataset.save_to_disk` writes: two streams whose names do not sort, state.json and dataset_info.json."""
    folder.mkdir(parents=True)
    half = len(texts) // 2
    for name, part in (("data-b.arrow", texts[:half]), ("data-a.arrow", texts[half:])):
        with (
            pa.OSFile(str(folder / name), "wb") as file,
            pa.ipc.new_stream(file, pa.schema([("text", pa.string())])) as out,
        ):
            out.write_table(pa.table({"text": part}))
    write(folder / "cache-1234.arrow", b"\xff\xff\xff\xffxxxx")
    files = [{"filename": "data-b.arrow"}, {"filename": "data-a.arrow"}]
    (folder / "state.json").write_text(json.dumps({"_data_files": files, **state}))
    (folder / "dataset_info.json").write_text("{}")
    return folder


def test_a_saved_dataset_gives_the_files_that_it_lists_in_their_order(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", ["1", "2", "3", "4"])
    assert not listing(str(folder)).descriptions
    assert [source.path.name for source in find(str(folder))] == ["data-b.arrow", "data-a.arrow"]
    assert [row["text"] for row in LowMemDataset(folder)] == ["1", "2", "3", "4"]
    (folder / "data-a.arrow").unlink()
    with pytest.raises(UserError, match=r"data-a\.arrow, is missing, state\.json lists it"):
        find(str(folder))


def test_a_saved_dictionary_gives_the_split_that_is_wanted(tmp_path: Path) -> None:
    for split in ("train", "test"):
        saved(tmp_path / "all" / split, [split, split])
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["train", "test"]}')
    for name, split in (("--train_file", "train"), ("--validation_file", "test")):
        assert {source.path.parent.name for source in find(str(tmp_path / "all"), name)} == {split}
    assert {file.parent.name for file in listing(str(tmp_path / "all")).test} == {"test"}, "told as not read"
    (tmp_path / "all" / "dataset_dict.json").write_text('{"splits": ["dev"]}')
    with pytest.raises(UserError, match="has the splits dev and no train"):
        find(str(tmp_path / "all"))


def test_a_saved_selection_is_refused(tmp_path: Path) -> None:
    folder = saved(tmp_path / "saved", ["1", "2"], _indices_data_files=[{"filename": "indices.arrow"}])
    with pytest.raises(UserError, match="flatten_indices"):
        find(str(folder))


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
    write(tmp_path / "data" / "lost+found" / "d.txt")  # of the system, and closed to most
    assert [Path(str(source.path)).name for source in find(str(tmp_path / "data"))] == ["a.txt", "b.txt"]


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
    write(tmp_path / "~" / "c" / "d.txt")  # earlier versions wrote there
    assert load("train", {"train_file": "x", "cache_dir": "~/c"}).data.cache_dir == "~/c"
