"""Files become shards once: every document whole and in order, counted, held out; misuse is one sentence."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from common.child_process import CRASHED, MEMORY, ChildDied
from data.dataset import LowMemDataset
from data.prepare import looking, writing
from data.prepare.preparing import find_prepared, in_child, prepare, prepare_evaluation
from data.prepare.writing import is_held_out
from data.shards.store import TRAIN, VALIDATION, Manifest
from data.sources.corpus import SampleCorpus
from data.tokenizers.backends import LibraryBackend
from data.tokenizers.published import Published, byte_backend
from data.tokenizers.tokenizer import Tokenizer
from settings.declared import ROOT, Config
from settings.errors import DoesNotFit, UserError

pytestmark = pytest.mark.children


def tokens_of(split: Path) -> list[int]:
    return np.concatenate([row["tokens"] for row in LowMemDataset(split)]).tolist()


def documents_of(split: Path, tokenizer: Tokenizer) -> list[str]:
    return tokenizer.decode(tokens_of(split), skip_special=False).split("</s>")[:-1]


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
    rows = [
        json.loads(line) for number, line in enumerate(pairs_file.read_text().splitlines()) if not is_held_out(number)
    ]
    cut_rows = cut_tokens = 0
    for row, written in zip(LowMemDataset(prepared.train_dir), rows, strict=True):
        for ids, text, longest in ((row["input_ids"], written["prompt"], 24), (row["labels"], written["response"], 4)):
            assert tokenizer.decode(ids[:-1]) == text[: longest - 1] and ids[-1] == tokenizer.eos_id
            cut_tokens += max(0, len(text) + 1 - longest)
        cut_rows += len(written["prompt"]) > 23 or len(written["response"]) > 3
    assert cut_rows > 0
    lengths = Manifest.of(prepared.train_dir).lengths("train")["input_ids"]
    assert lengths["longest"] == 24 and lengths["longest_uncut"] == max(len(row["prompt"]) for row in rows) + 1
    assert sum(count for _, count in lengths["histogram"]) == len(rows)
    assert prepared.counts["train_cut_rows"] == cut_rows and prepared.counts["train_cut_tokens"] == cut_tokens


def test_a_validation_file_is_taken_whole_and_then_nothing_is_held_out(configure: Any, text_file: Path) -> None:
    other = text_file.with_name("other.jsonl")
    other.write_text('{"text": "for validation"}\n')
    config = configure(train_file=text_file, validation_file=other)
    prepared = prepare(config)
    assert prepared.counts["train_texts"] == 300
    assert documents_of(prepared.validation_dir, Tokenizer.load(prepared.tokenizer_dir)) == ["for validation"]
    alone = prepare_evaluation(config)
    assert alone.counts["validation_texts"] == 1 and alone.train_dir == alone.validation_dir


def test_all_missing_files_are_told_at_once_by_their_flags(configure: Any) -> None:
    with pytest.raises(UserError) as caught:
        prepare(configure(train_file="none.jsonl", validation_file="none.jsonl"))
    flags = ["--train_file", "--validation_file"]
    assert [problem.split(" = ")[0] for problem in caught.value.problems] == flags
    with pytest.raises(UserError, match="--validation_file"):
        prepare_evaluation(configure(validation_file="none.jsonl"))


def test_one_row_in_each_hundred_is_held_out() -> None:
    places = [number for number in range(10_000) if is_held_out(number)]
    assert [place // 100 for place in places] == list(range(100))
    assert len({place % 100 for place in places}) > 50 and places[0] == 1, "of two rows one"


def test_the_second_time_nothing_is_made(configure: Any, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    config = configure(train_file=text_file)
    assert find_prepared(config) is None
    first = prepare(config)
    monkeypatch.setattr(writing, "read_batches", None)
    assert prepare(config) == first == find_prepared(config) == in_child(prepare, config)
    others = [prepare(configure(train_file=text_file, objective=name)) for name in ("ul2", "prefix")]
    others.append(prepare(configure(train_file=text_file, max_seq_len=128)))
    assert {one.train_dir for one in others} == {first.train_dir}, "objectives share a stream, whatever their lengths"


@pytest.mark.parametrize("change", [{"max_samples": 50}, {"skip_bad_rows": True}, {"text_column": "body"}])
def test_what_shapes_the_shards_makes_new_ones(configure: Any, tmp_path: Path, change: dict[str, Any]) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("".join(f'{{"text": "t {n}", "body": "b {n}"}}\n' for n in range(100)))
    first = prepare(configure(train_file=path))
    second = prepare(configure(train_file=path, **change))
    assert first.train_dir != second.train_dir
    assert second.counts["train_texts"] + second.counts["validation_texts"] == change.get("max_samples", 100)
    path.write_text(path.read_text() * 2)
    assert prepare(configure(train_file=path)).train_dir != first.train_dir


def test_the_child_gives_the_same_and_passes_user_errors_on(configure: Any, text_file: Path, tmp_path: Path) -> None:
    prepared = in_child(prepare, configure(train_file=text_file))
    again = prepare(configure(train_file=text_file, cache_dir=tmp_path / "other_cache"))
    assert tokens_of(prepared.train_dir) == tokens_of(again.train_dir) and prepared.counts == again.counts
    text_file.write_text(text_file.read_text() + "{broken\n")
    with pytest.raises(UserError, match=r"text\.jsonl, line 301"):
        in_child(prepare, configure(train_file=text_file))


@pytest.mark.parametrize(
    "raised, expected",
    [
        (KeyboardInterrupt(), KeyboardInterrupt),
        (ChildDied(MEMORY, ""), DoesNotFit),
        (ChildDied(CRASHED, "exit code -11"), UserError),
    ],
)
def test_how_a_child_ended_is_told(
    configure: Any, text_file: Path, monkeypatch: pytest.MonkeyPatch, raised: BaseException, expected: type[Exception]
) -> None:
    def ask(*_: object) -> None:
        raise raised

    monkeypatch.setattr(looking.Worker, "ask", ask)
    with pytest.raises(expected) as caught:
        in_child(prepare, configure(train_file=text_file))
    assert str(text_file) in str(caught.value) if isinstance(raised, ChildDied) else "continues" in str(caught.value)


def test_bad_and_blank_rows_are_counted(configure: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "one"}\n{"text": " "}\n{broken\n{"text": "two"}\n{"text": null}\n{"text": "three"}\n')
    counts = prepare(configure(train_file=path, skip_bad_rows=True)).counts
    assert (counts["train_bad_rows"], counts["train_empty_rows"]) == (2, 1)
    assert (counts["train_texts"], counts["validation_texts"]) == (2, 1)
    with pytest.raises(UserError, match="line 3"):
        prepare(configure(train_file=path))
    assert not list((tmp_path / "cache").glob("*.partial"))


@pytest.mark.parametrize(
    "content, words",
    [
        ('{"text": "only one"}\n', "no row for validation (rows with text: 1"),
        ('{"text": " "}\n{"text": ""}\n', "no row for train (rows with text: 0, blank: 2"),
        ('{"text": null}\n{"text": 7}\n', "a.jsonl, line 1: text is null, not a text"),
    ],
)
def test_too_little_text_is_a_user_error(configure: Any, tmp_path: Path, content: str, words: str) -> None:
    (tmp_path / "a.jsonl").write_text(content)
    with pytest.raises(UserError) as caught:
        prepare(configure(train_file=tmp_path / "a.jsonl", skip_bad_rows=True))
    assert words in str(caught.value)


def into(folder: Path, config: Config) -> Config:
    return dataclasses.replace(config, prepare=dataclasses.replace(config.prepare, shards_dir=str(folder)))


def test_shards_in_a_named_folder_are_used_as_they_are(configure: Any, text_file: Path, tmp_path: Path) -> None:
    folder, text = tmp_path / "shards", text_file.read_bytes()
    folder.mkdir()  # empty is fine
    made = prepare(into(folder, configure(train_file=text_file)))
    assert made.train_dir == folder / "train"
    text_file.unlink()
    for spec in (folder, folder / "train"):
        assert prepare(configure(train_file=spec, tokenizer_dir="auto")) == made
    assert prepare(configure(train_file=folder, objective="ul2")).objective == "ul2"
    text_file.write_bytes(text)
    with_file = prepare(configure(train_file=folder, validation_file=text_file, tokenizer_dir="auto"))
    assert with_file.train_dir == folder / "train" and with_file.counts["validation_texts"] == 300
    with_shards = prepare(configure(train_file=text_file, validation_file=folder))
    assert with_shards.validation_dir == folder / "validation" and with_shards.counts["train_texts"] == 300


def test_misuse_of_shards_is_a_user_error(configure: Any, text_file: Path, pairs_file: Path, tmp_path: Path) -> None:
    folder, pairs_shards = tmp_path / "shards", tmp_path / "pairs_shards"
    prepare(into(folder, configure(train_file=text_file)))
    prepare(into(folder, configure(train_file=text_file)))  # the same again is no problem
    prepare(into(pairs_shards, configure(train_file=pairs_file)))
    (tmp_path / "empty").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "empty")
    Tokenizer(Published(LibraryBackend(byte_backend(num_sentinels=100)))).save(tmp_path / "other")
    for config, words in (
        (into(folder, configure(train_file=pairs_file)), "--shards_dir"),
        (into(tmp_path, configure(train_file=pairs_file)), "--shards_dir"),
        (into(tmp_path / "link", configure(train_file=text_file)), "--shards_dir"),
        (configure(train_file=folder, is_finetune=True), "--train_file"),
        (configure(train_file=folder, max_samples=5), "--max_samples"),
        (configure(train_file=folder, tokenizer_dir=tmp_path / "other"), "another tokenizer"),
        (configure(train_file=folder, validation_file=pairs_shards), "--validation_file"),
    ):
        with pytest.raises(UserError, match=words):
            prepare(config)
    with pytest.raises(UserError) as caught:
        prepare(configure(train_file=folder, clean=True, dedup="exact"))
    assert [problem.split(",")[0] for problem in caught.value.problems] == ["--clean", "--dedup"]
    config = configure(train_file=folder)  # settings of a run that is evaluated are no flags
    assert prepare(dataclasses.replace(config, cleaning=dataclasses.replace(config.cleaning, clean=True)))
    with pytest.raises(UserError, match="--shards_dir"):
        prepare(into(folder, configure(train_file=text_file, max_samples=9)))


def test_a_named_text_column_is_learnt_beside_prompts_and_responses(configure: Any, tmp_path: Path) -> None:
    path = tmp_path / "both.jsonl"
    rows = [{"body": f"text {number}", "prompt": "p", "response": "r"} for number in range(9)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    named = prepare(configure(train_file=path, text_column="body"))
    assert named.objective == "span" and "text 3" in documents_of(named.train_dir, Tokenizer.load(named.tokenizer_dir))
    assert prepare(configure(train_file=path)).objective == "pairs"
    with pytest.raises(UserError, match="other"):
        prepare(configure(train_file=path, text_column="other"))


def test_a_tokenizer_is_trained_once_on_the_training_file(configure: Any, text_file: Path, tmp_path: Path) -> None:
    config = configure(train_file=text_file, tokenizer_dir="auto", vocab_size=400)
    prepared = prepare(config)
    tokenizer = Tokenizer.load(prepared.tokenizer_dir)
    assert tokenizer.size <= 400 and tokenizer.sentinel_ids[0] == tokenizer.size - 1
    assert prepare(dataclasses.replace(config)) == prepared
    assert len([path for path in (tmp_path / "cache").glob("tokenizer-*") if path.is_dir()]) == 1
    facts = Manifest.of(prepared.train_dir).content["tokenizer"]
    assert facts["fingerprint"] == tokenizer.fingerprint and facts["size"] == tokenizer.size


@pytest.mark.parametrize(
    "damage",
    [b"", b"evil", b'{"version": "1.0", "added', b"\xff\xfe", None],
    ids=["empty", "evil", "cut", "bytes", "gone"],
)
def test_a_damaged_tokenizer_of_the_cache_is_trained_anew(
    configure: Any, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], damage: bytes | None
) -> None:
    config = configure(train_file=text_file, tokenizer_dir="auto", vocab_size=400)
    before = prepare(config)
    (file,) = (tmp_path / "cache").glob("tokenizer-*/tokenizer.json")
    whole = file.read_bytes()
    file.unlink()
    if damage is not None:
        file.write_bytes(damage)
    capfd.readouterr()
    assert in_child(prepare, config) == before and file.read_bytes() == whole
    assert capfd.readouterr().err.count(f"{file.parent}: is damaged, it is made anew") == 1
    named = configure(train_file=text_file, tokenizer_dir=file.parent)
    file.write_bytes(b"evil")
    with pytest.raises(UserError, match="is not a tokenizer"):
        prepare(named)
    assert file.read_bytes() == b"evil", "a folder that the user has named stays as it is"


def flip(file: Path) -> None:
    content = bytearray(file.read_bytes())
    content[len(content) // 2] ^= 1
    file.write_bytes(content)
    os.utime(file, ns=(0, file.stat().st_mtime_ns + 1))


DAMAGES = {
    "manifest.json": lambda file: file.write_bytes(file.read_bytes()[:-40]),
    "train/*.arrow": flip,
    "validation/*.arrow": Path.unlink,
    "tokenizer/tokenizer.json": lambda file: file.write_bytes(b"{}"),
}


@pytest.mark.parametrize("name", DAMAGES)
def test_damaged_shards_are_made_anew_in_the_cache_and_refused_elsewhere(
    configure: Any, text_file: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str], name: str
) -> None:
    config = configure(train_file=text_file)
    splits = (TRAIN, VALIDATION)
    before = in_child(prepare, config, checked=splits)
    root = before.train_dir.parent
    whole = {file: file.read_bytes() for file in root.rglob("*") if file.is_file()}
    shutil.copytree(root, tmp_path / "named")
    DAMAGES[name](next(root.glob(name)))
    capfd.readouterr()
    assert in_child(prepare, config, checked=splits) == before
    assert capfd.readouterr().err.count(f"{root}: is damaged, it is made anew") == 1
    assert {file: file.read_bytes() for file in root.rglob("*") if file.is_file()} == whole

    DAMAGES[name](next((tmp_path / "named").glob(name)))
    in_cache = shutil.copytree(tmp_path / "named", tmp_path / "cache" / "shards-named")
    for folder, named in (
        (tmp_path / "named", into(tmp_path / "named", config)),
        (in_cache, configure(train_file=in_cache)),
    ):
        changed = {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        if "tokenizer" not in name:  # which is refused where it is read next
            with pytest.raises(UserError, match=f"{folder}"):
                in_child(prepare, named, checked=splits)
        assert {file: file.read_bytes() for file in folder.rglob("*") if file.is_file()} == changed


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


def test_settings_that_the_rows_do_not_heed_are_refused(configure: Any, text_file: Path, pairs_file: Path) -> None:
    for config, flags in (
        (
            configure(train_file=text_file, prompt_template="alpaca", history_column="h"),
            ["history_column", "prompt_template"],
        ),
        (configure(train_file=pairs_file, expand_turns=True), ["expand_turns"]),
    ):
        with pytest.raises(UserError) as caught:
            prepare(config)
        assert [problem.split(" = ")[0] for problem in caught.value.problems] == [f"--{flag}" for flag in flags]


def test_without_a_file_the_sample_is_used(configure: Any, sample: SampleCorpus) -> None:
    cache = sample.text.parent.parent
    config = configure(cache_dir=cache, max_samples=100)
    prepared = prepare(config)
    assert prepared.objective == "span" and prepared.counts["train_texts"] == 99
    pairs = prepare(configure(cache_dir=cache, is_finetune=True, max_samples=100))
    assert pairs.objective == "pairs" and pairs.counts["train_rows"] == 99
