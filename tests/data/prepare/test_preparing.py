"""Files become shards once: every document whole and in order, counted, held out; misuse is one sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.dataset import LowMemDataset
from data.prepare.preparing import find_prepared, in_child, prepare, prepare_evaluation
from data.prepare.writing import is_held_out
from data.shards.store import TRAIN, VALIDATION, Manifest
from data.tokenizers.backends import LibraryBackend
from data.tokenizers.published import Published, byte_backend
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import ROOT, Config
from settings.errors import UserError


def tokens_of(split: Path) -> list[int]:
    return np.concatenate([row["tokens"] for row in LowMemDataset(split)]).tolist()


def documents_of(split: Path, tokenizer: Tokenizer) -> list[str]:
    return tokenizer.decode(tokens_of(split), skip_special=False).split("</s>")[:-1]


def into(folder: Path, config: Config) -> Config:
    return dataclasses.replace(config, prepare=dataclasses.replace(config.prepare, shards_dir=str(folder)))


def contents(folder: Path) -> dict[Path, bytes]:
    return {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}


def test_every_document_is_in_one_split_whole_and_in_order(configure: Any, text_file: Path) -> None:
    prepared = prepare(configure(train_file=text_file))
    assert prepared.objective == "span"
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    train, held_out = (documents_of(split, tokenizer) for split in (prepared.train_dir, prepared.validation_dir))
    texts = [json.loads(line)["text"] for line in text_file.read_text().splitlines()]
    assert train == [text for number, text in enumerate(texts) if not is_held_out(number)]
    assert held_out == [text for number, text in enumerate(texts) if is_held_out(number)] and len(held_out) == 3
    assert prepared.counts["train_texts"] == 297 and prepared.counts["validation_texts"] == 3
    assert prepared.counts["train_tokens"] == sum(len(text.encode()) + 1 for text in train)
    lengths = [len(row["tokens"]) for row in LowMemDataset(prepared.train_dir)]
    assert set(lengths[:-1]) == {512} and 1 <= lengths[-1] <= 512
    assert prepared.counts["train_rows"] == len(lengths)


def test_pairs_are_found_cut_and_counted(configure: Any, pairs_file: Path, byte_dir: Path) -> None:
    prepared = prepare(configure(train_file=pairs_file, max_seq_len=24, max_target_len=4))
    assert prepared.objective == "pairs"
    tokenizer = Tokenizer.load(byte_dir)
    lines = pairs_file.read_text().splitlines()
    rows = [json.loads(line) for number, line in enumerate(lines) if not is_held_out(number)]
    cut_rows = cut_tokens = 0
    for row, pair in zip(LowMemDataset(prepared.train_dir), rows, strict=True):
        for ids, text, longest in ((row["input_ids"], pair["prompt"], 24), (row["labels"], pair["response"], 4)):
            assert tokenizer.decode(ids[:-1]) == text[: longest - 1] and ids[-1] == tokenizer.eos_id
            cut_tokens += max(0, len(text) + 1 - longest)
        cut_rows += len(pair["prompt"]) > 23 or len(pair["response"]) > 3
    lengths = Manifest.of(prepared.train_dir).lengths("train")["input_ids"]
    assert lengths["longest"] == 24 and lengths["longest_uncut"] == max(len(row["prompt"]) for row in rows) + 1
    assert sum(count for _, count in lengths["histogram"]) == len(rows)
    assert prepared.counts["train_cut_rows"] == cut_rows > 0 and prepared.counts["train_cut_tokens"] == cut_tokens


def test_a_validation_file_is_taken_whole_and_then_nothing_is_held_out(configure: Any, text_file: Path) -> None:
    validation_file = text_file.with_name("other.jsonl")
    validation_file.write_text('{"text": "for validation"}\n')
    config = configure(train_file=text_file, validation_file=validation_file)
    prepared = prepare(config)
    assert prepared.counts["train_texts"] == 300
    assert documents_of(prepared.validation_dir, Tokenizer.load(prepared.tokenizer_dir)) == ["for validation"]
    alone = prepare_evaluation(config)
    assert alone.counts["validation_texts"] == 1 and alone.train_dir == alone.validation_dir


def test_only_what_shapes_the_shards_makes_new_ones(configure: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "t {n}", "body": "b {n}"}}\n' for n in range(100)))
    config = configure(train_file=path)
    assert find_prepared(config) is None
    first = prepare(config)
    files = {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")}
    assert prepare(config) == first == find_prepared(config) == in_child(prepare, config)
    assert {file: file.stat().st_mtime_ns for file in (tmp_path / "cache").rglob("*")} == files, "nothing is made"
    for same in ({"objective": "ul2"}, {"objective": "prefix"}, {"max_seq_len": 128}):
        assert prepare(configure(train_file=path, **same)).train_dir == first.train_dir, "they share a stream"
    for change in ({"max_samples": 50}, {"skip_bad_rows": True}, {"text_column": "body"}):
        other = prepare(configure(train_file=path, **change))
        assert other.train_dir != first.train_dir
        assert other.counts["train_texts"] + other.counts["validation_texts"] == change.get("max_samples", 100)
    path.write_text(path.read_text() * 2)
    assert prepare(config).train_dir != first.train_dir


def test_shards_in_a_named_folder_are_used_as_they_are(configure: Any, text_file: Path, tmp_path: Path) -> None:
    folder, text = tmp_path / "shards", text_file.read_bytes()
    folder.mkdir()  # An empty one may be there.
    first = prepare(into(folder, configure(train_file=text_file)))
    assert first.train_dir == folder / "train"
    text_file.unlink()
    for spec in (folder, folder / "train"):
        assert prepare(configure(train_file=spec, tokenizer_dir="auto")) == first
    assert prepare(configure(train_file=folder, objective="ul2")).objective == "ul2"
    text_file.write_bytes(text)
    with_file = prepare(configure(train_file=folder, validation_file=text_file, tokenizer_dir="auto"))
    assert with_file.train_dir == folder / "train" and with_file.counts["validation_texts"] == 300
    with_shards = prepare(configure(train_file=text_file, validation_file=folder))
    assert with_shards.validation_dir == folder / "validation" and with_shards.counts["train_texts"] == 300


def test_misuse_of_shards_is_a_user_error(configure: Any, text_file: Path, pairs_file: Path, tmp_path: Path) -> None:
    folder, pairs_shards = tmp_path / "shards", tmp_path / "pairs_shards"
    for _ in range(2):  # The same again is no problem.
        prepare(into(folder, configure(train_file=text_file)))
    prepare(into(pairs_shards, configure(train_file=pairs_file)))
    Tokenizer(Published(LibraryBackend(byte_backend(num_sentinels=100)))).save(tmp_path / "other")
    for config, words in (
        (into(folder, configure(train_file=pairs_file)), "--shards_dir"),
        (into(folder, configure(train_file=text_file, max_samples=9)), "--shards_dir"),
        (configure(train_file=folder, is_finetune=True), "--train_file"),
        (configure(train_file=folder, max_samples=5), "--max_samples"),
        (configure(train_file=folder, tokenizer_dir=tmp_path / "other"), "another tokenizer"),
        (configure(train_file=folder, validation_file=pairs_shards), "--validation_file"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(config)


def test_a_tokenizer_is_trained_once_and_again_where_it_is_damaged(
    configure: Any, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configure(train_file=text_file, tokenizer_dir="auto", vocab_size=400)
    first = prepare(config)
    tokenizer = Tokenizer.load(first.tokenizer_dir)
    assert tokenizer.size <= 400 and tokenizer.sentinel_ids[0] == tokenizer.size - 1
    assert prepare(dataclasses.replace(config)) == first
    (file,) = (tmp_path / "cache").glob("tokenizer-*/tokenizer.json")
    whole = file.read_bytes()
    for damage in (b"evil", None):
        file.unlink()
        if damage is not None:
            file.write_bytes(damage)
        capfd.readouterr()
        assert in_child(prepare, config) == first and file.read_bytes() == whole
        assert capfd.readouterr().err.count(f"{file.parent}: is damaged, it is made anew") == 1
    file.write_bytes(b"evil")
    with pytest.raises(UserError, match="is not a tokenizer"):
        prepare(configure(train_file=text_file, tokenizer_dir=file.parent))
    assert file.read_bytes() == b"evil", "a folder that the user has named stays as it is"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


DAMAGES = {
    "manifest.json": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "train/*.arrow": flip,
    "tokenizer/tokenizer.json": lambda file: file.write_bytes(b"{}"),
}


def test_damaged_shards_are_made_anew_in_the_cache_and_refused_elsewhere(
    configure: Any, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    config = configure(train_file=text_file, max_samples=100)
    splits = (TRAIN, VALIDATION)
    first = in_child(prepare, config, checked=splits)
    root = first.train_dir.parent
    whole = contents(root)
    for number, (name, damage) in enumerate(DAMAGES.items()):
        elsewhere = shutil.copytree(root, tmp_path / f"named{number}")
        damage(next(root.glob(name)))
        capfd.readouterr()
        assert in_child(prepare, config, checked=splits) == first
        assert capfd.readouterr().err.count(f"{root}: is damaged, it is made anew") == 1
        assert contents(root) == whole

        damage(next(elsewhere.glob(name)))
        changed = contents(elsewhere)
        if "tokenizer" not in name:  # A damaged tokenizer is refused where it is read next.
            with pytest.raises(UserError, match=f"{elsewhere}"):
                in_child(prepare, into(elsewhere, config), checked=splits)
        assert contents(elsewhere) == changed


PEAK_OF_PREPARING = """
import sys
from config import load
from data.prepare.preparing import prepare
prepare(load("train", {"train_file": sys.argv[1], "tokenizer_dir": sys.argv[2], "cache_dir": sys.argv[3]}))
with open("/proc/self/status") as status:
    print(next(int(line.split()[1]) for line in status if line.startswith("VmHWM")) / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
def test_preparing_takes_the_same_memory_for_any_size(tmp_path: Path, byte_dir: Path) -> None:
    peaks = []
    for rows in (1_000, 16_000):
        path = tmp_path / f"{rows}.jsonl"
        path.write_text("".join(json.dumps({"text": f"row {row} " * 100}) + "\n" for row in range(rows)))
        command = [sys.executable, "-c", PEAK_OF_PREPARING, str(path), str(byte_dir), str(tmp_path / "cache")]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
        peaks.append(float(done.stdout))
    assert peaks[1] < peaks[0] + 30 and peaks[1] < 400, f"{peaks} MiB"


def test_without_a_file_the_sample_is_used(configure: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is made of the sources of a Python, here of a small one."""
    library = tmp_path / "python"
    library.mkdir()
    paths = sysconfig.get_paths()
    for module in Path(paths["stdlib"]).glob("[a-d]*.py"):
        shutil.copy(module, library)
    monkeypatch.setattr(sysconfig, "get_paths", lambda: {**paths, "stdlib": str(library)})
    prepared = prepare(configure(max_samples=100))
    assert prepared.objective == "span" and prepared.counts["train_texts"] == 99
    pairs = prepare(configure(is_finetune=True, max_samples=100))
    assert pairs.objective == "pairs" and pairs.counts["train_rows"] == 99


def test_one_row_in_each_hundred_is_held_out() -> None:
    numbers = [number for number in range(10_000) if is_held_out(number)]
    assert [number // 100 for number in numbers] == list(range(100))
    assert len({number % 100 for number in numbers}) > 50 and numbers[0] == 1, "of two rows one"
