"""Files of prompts: order, columns, resuming, and what is refused."""

from __future__ import annotations

import io
import os
import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from commands import generate as module
from commands.generate import answer_work, generate
from data.sources.prompts import Prompt
from memory.answers import AnswerBatch
from memory.monitor import Monitor
from memory.processes import ProcessTree
from model import hf_format
from model.decoding.answer_tree import AnswerTree
from serving.server import api_of
from settings.declared import Config
from settings.errors import DoesNotFit, OverBudget, UserError
from support.units import MIB
from tests.commands.small import flags_of, read_rows, write_rows
from tests.measuring import in_child
from tests.training.small_trained import SHAPE, save_trained
from training.loaded_model import load_model
from training.saved_model import find_model

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["short", "a longer prompt than that", "河水从桥下流过", "x", "two words", "the last one, of them all", "y z"]
Screen = pytest.CaptureFixture[str]
Patch = pytest.MonkeyPatch


def settings(folder: Path, **flags: Any) -> Config:
    return flags_of("generate", **{"model": folder, "max_new_tokens": 6, "mixed_precision": "no", **flags})


def answers(folder: Path, output: Path, **flags: Any) -> list[dict[str, Any]]:
    generate(settings(folder, output=output, **flags))
    return read_rows(output)


def write_prompts(path: Path, prompts: list[str] = PROMPTS) -> Path:
    return write_rows(path, ({"id": at, "prompt": text, "tags": ["a", at]} for at, text in enumerate(prompts)))


def test_answers_stand_in_order_with_their_columns(folder: Path, tmp_path: Path, capsys: Screen) -> None:
    source = write_prompts(tmp_path / "prompts.jsonl")
    rows = answers(folder, tmp_path / "out" / "answers.jsonl", input=source, generate_batch_size=2)
    assert "answers.jsonl: 7 answers" in capsys.readouterr().out
    assert [(row["id"], row["prompt"], row["tags"]) for row in rows] == [
        (at, text, ["a", at]) for at, text in enumerate(PROMPTS)
    ]
    assert len({row["response"] for row in rows}) > 2
    assert answers(folder, tmp_path / "auto.jsonl", input=source) == rows
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["answers.jsonl"]


def test_text_csv_and_parquet_give_the_same_answers(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.txt").write_text("\n".join(PROMPTS) + "\n", encoding="utf8")
    (tmp_path / "p.csv").write_text("n,prompt\n" + "".join(f'{n},"{p}"\n' for n, p in enumerate(PROMPTS)), "utf8")
    columns = {"prompt": PROMPTS, "n": list(range(7)), "v": [[1]] * 7, "none": [None, *"abcdef"], "response": PROMPTS}
    pq.write_table(pa.table(columns), tmp_path / "p.parquet")
    text, comma, table = (
        answers(folder, tmp_path / f"{ending}.jsonl", input=tmp_path / f"p.{ending}")
        for ending in ("txt", "csv", "parquet")
    )
    for rows in (comma, table):
        assert [row["response"] for row in rows] == [row["response"] for row in text]
    assert [set(row) for row in text] == [{"prompt", "response"}] * 7
    first = {"prompt": "short", "n": 0, "none": None, "reference": "short", "response": text[0]["response"]}
    assert table[0] == first


def test_an_interrupted_run_goes_on_behind_its_last_part(
    folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Screen
) -> None:
    monkeypatch.setattr(module, "WINDOW_BATCHES", 1)
    output = tmp_path / "answers.jsonl"
    flags = {"input": write_prompts(tmp_path / "prompts.jsonl"), "generate_batch_size": 2}
    whole = answers(folder, tmp_path / "whole.jsonl", **flags)
    writes = iter(range(8))

    def interrupted(handle: int) -> None:
        if next(writes) == 7:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"the same command continues after [246] rows"):
            answers(folder, output, **flags)
    assert not output.exists()
    with pytest.raises(UserError, match=r"begun with another model, input or settings.*--overwrite=True"):
        answers(folder, output, **flags, num_beams=2)
    manifest = tmp_path / "answers.jsonl.unfinished" / "parts.jsonl"
    with manifest.open("a") as file:
        file.write('{"part": 3, "torn')
    assert answers(folder, output, **flags) == whole and "already done" in capsys.readouterr().out
    assert not manifest.parent.exists()
    with pytest.raises(UserError, match=r"--output = .*is there already.*--overwrite=True"):
        answers(folder, output, **flags)
    assert len(answers(folder, output, **flags, overwrite=True, num_beams=2)) == len(PROMPTS)


def test_a_refused_call_leaves_nothing_in_the_way_of_the_next(folder: Path, tmp_path: Path) -> None:
    source = write_rows(tmp_path / "p.jsonl", [{"question": "a"}])
    output = tmp_path / "out" / "z.jsonl"
    with pytest.raises(UserError, match=r"its columns: question; .*--prompt_column"):
        answers(folder, output, input=source)
    assert not output.parent.exists()
    output.parent.mkdir()
    output.write_text("mine")
    with pytest.raises(UserError, match="is there already"):
        answers(folder, output, input=source, prompt_column="question")
    assert output.read_text() == "mine"


def test_an_answer_is_one_line_on_the_screen_and_keeps_its_line_ends_in_a_file(
    folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Screen
) -> None:
    listed = write_rows(tmp_path / "answers.jsonl", [{"response": "one\n\ntwo\u2028three\r\n"}])
    how = {"answers": listed, "max_new_tokens": 60, "cache_dir": tmp_path / "cache"}
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    generate(settings(folder, input="-", **how))
    assert capsys.readouterr().out.split("\n") == ["one  two three"] * 2 + [""]
    (row,) = answers(folder, tmp_path / "a.jsonl", input="a", **how)
    assert row["response"].startswith("one\n\ntwo\u2028three")


def test_long_prompts_are_answered_in_parts(folder: Path, tmp_path: Path, capsys: Screen) -> None:
    texts = ["the king went home.", "he built a wall there.", "then all was well."]
    parts = write_prompts(tmp_path / "parts.jsonl", [*texts, "x"])
    whole = write_prompts(tmp_path / "whole.jsonl", [" ".join(texts), "x"])
    one = answers(folder, tmp_path / "one.jsonl", input=parts, source_prefix="say: ")
    split = {"split_prompts": 25, "max_seq_len": 30}
    together = answers(folder, tmp_path / "all.jsonl", input=whole, source_prefix="say: ", **split)
    *expected, short = [row["response"].strip() for row in one]
    assert [row["response"] for row in together] == [" ".join(filter(None, expected)), short]
    assert "truncated" not in capsys.readouterr().out


def test_a_bad_row_has_a_blank_answer_where_the_answers_before_it_stand(
    folder: Path, tmp_path: Path, monkeypatch: Patch, capsys: Screen
) -> None:
    monkeypatch.setattr(module, "WINDOW_BATCHES", 1)
    flags = {"input": write_prompts(tmp_path / "p.jsonl", ["a", "b", " ", "c"]), "generate_batch_size": 2}
    with pytest.raises(UserError, match=r"line 3: prompt is empty.*--skip_bad_rows=True"):
        answers(folder, tmp_path / "a.jsonl", **flags)
    rows = answers(folder, tmp_path / "a.jsonl", **flags, skip_bad_rows=True)
    assert "2 rows already done" in capsys.readouterr().out
    assert [(row["id"], bool(row["response"])) for row in rows] == [(0, True), (1, True), (2, False), (3, True)]


def test_what_does_not_fit_is_refused_before_loading(folder: Path, tmp_path: Path, monkeypatch: Patch) -> None:
    flags = {"input": write_prompts(tmp_path / "p.jsonl"), "output": tmp_path / "a.jsonl"}
    large = {"generate_batch_size": 100000, "max_seq_len": 65536, "max_new_tokens": 65536}
    with pytest.raises(DoesNotFit, match=r"is too small for .* try .*--generate_batch_size=50000"):
        generate(settings(folder, **flags, **large))
    monkeypatch.setattr(hf_format, "load", lambda *a, **b: pytest.fail("was loaded"))
    with pytest.raises(DoesNotFit, match=r"--memory_budget = 1.0 MiB, is too small for the model's"):
        generate(settings(folder, **flags, memory_budget="1M"))


def test_who_takes_more_than_the_budget_says_so(folder: Path, monkeypatch: Patch, capsys: Screen) -> None:
    class Full(Monitor):
        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            self.peak_bytes = 2**50

    monkeypatch.setattr("training.loaded_model.Monitor", Full)
    with pytest.raises(OverBudget, match=r"was exceeded: the peak was 1,?048,?576.* GiB.*--generate_batch_size=1"):
        generate(settings(folder, input="x"))
    assert capsys.readouterr().out, "the answer is there"


def test_weights_are_rounded_where_the_budget_holds_no_others_and_no_dtype_is_named(
    tmp_path: Path, capsys: Screen
) -> None:
    """80 MiB in fp32, 40 in bf16."""
    folder = save_trained(tmp_path, shape=replace(SHAPE, vocab_size=80_000, d_model=256))
    flags = {"input": "x", "memory_budget": ProcessTree().usage().anon_bytes + 52 * MIB}
    config = settings(folder, **flags, mixed_precision="auto", max_seq_len=64)
    trained = load_model(config, find_model(config))
    assert trained.blockwise.model.embedding.dtype == torch.int8
    assert "rounded to int8" in capsys.readouterr().err
    assert trained.writer(config).answers([[5, 6, 1]])
    with pytest.raises(DoesNotFit):
        generate(settings(folder, **flags))


def test_several_processes_are_refused(folder: Path, monkeypatch: Patch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match="generate, works with one process"):
        generate(settings(folder))


def test_answers_come_from_a_list(folder: Path, tmp_path: Path, capsys: Screen) -> None:
    """Of a text file, of a data file's column, and of the model's own folder; with the best few and their
    log-probabilities.
    """
    texts = ["red", "a longer answer", "re", "blue", "蓝"]
    listed = tmp_path / "answers.txt"
    listed.write_text("\n".join([*texts, "", "red "]) + "\n", encoding="utf8")
    table = tmp_path / "answers.csv"
    table.write_text("id,color\n" + "".join(f"1,{text}\n" for text in texts), encoding="utf8")
    how = {
        "input": write_prompts(tmp_path / "prompts.jsonl"),
        "cache_dir": tmp_path / "cache",
        "max_new_tokens": 60,
        "overwrite": True,
    }
    for row in answers(folder, tmp_path / "best.jsonl", **how, num_beams=5, num_answers=3, answers=listed):
        assert len(set(row["responses"])) == 3 and set(row["responses"]) <= set(texts)
        assert row["response"] == row["responses"][0]
        assert row["log_probabilities"] == sorted(row["log_probabilities"], reverse=True)
    assert "5 of at most" in capsys.readouterr().err
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    shutil.copy(listed, own)
    first, of_table, of_model = (
        [row["response"] for row in answers(model, tmp_path / "out.jsonl", **how, **flags)]
        for model, flags in (
            (folder, {"answers": listed}),
            (folder, {"answers": table, "response_column": "color"}),
            (own, {}),
        )
    )
    assert set(first) <= set(texts)
    assert first == of_table == of_model


def test_a_link_and_a_pipe_are_written_through(folder: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "p.jsonl")
    target = tmp_path / "disk" / "answers.jsonl"
    target.parent.mkdir()
    target.touch()
    (tmp_path / "link").symlink_to(target)
    generate(settings(folder, input=source, output=tmp_path / "link"))
    assert (tmp_path / "link").is_symlink() and len(read_rows(target)) == len(PROMPTS)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    generate(settings(folder, input=source, output=pipe))
    assert os.read(reader, 2**16) == target.read_bytes() and pipe.is_fifo()
    os.close(reader)


def test_columns_beside_the_prompts_take_memory_by_their_size(folder: Path, tmp_path: Path) -> None:
    """80 rows of 600 KB, which go into the output whole."""
    rows = write_rows(tmp_path / "rows.jsonl", ({"prompt": f"{at}", "z": "x" * 600_000} for at in range(80)))
    code = """
import contextlib
from commands.generate import generate
from config import load

model, rows, output = sys.argv[1:]
how = {"model": model, "mixed_precision": "no", "max_seq_len": "32", "max_new_tokens": "2"}
with contextlib.redirect_stdout(sys.stderr):
    generate(load("generate", {**how, "input": "warm"}))
    taken = measure(lambda: generate(load("generate", {**how, "input": rows, "output": output})))
print(taken)
"""
    (used_bytes,) = in_child(code, folder, rows, tmp_path / "out.jsonl")
    assert used_bytes < 30 * 2**20
    assert [len(row["z"]) for row in read_rows(tmp_path / "out.jsonl")] == [600_000] * 80


def test_auto_answers_fewer_at_once_in_less_memory(folder: Path) -> None:
    config = settings(folder, input="x", max_seq_len=65536)
    trained = load_model(config, find_model(config))
    batch = AnswerBatch.by(config.generate, 64, 65536)
    wide = trained.rows_at_once("auto", batch)
    trained.answer_budget.budget_bytes = sum(trained.predict(replace(batch, rows=5)).values())
    assert wide == 64 and trained.rows_at_once("auto", batch) == 5
    assert trained.rows_at_once(5, batch) == 5
    with pytest.raises(DoesNotFit):
        trained.rows_at_once(6, batch)


def test_standard_input_is_read_line_by_line(folder: Path, monkeypatch: Patch, capsys: Screen, tmp_path: Path) -> None:
    """The same answers as one by one; what cannot be read again is not continued."""
    lines = "short\n\n河水从桥下流过\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    generate(settings(folder, input="-"))
    first, blank, second = capsys.readouterr().out.splitlines()
    assert blank == ""
    for text, together in (("short", first), ("河水从桥下流过", second)):
        generate(settings(folder, input=text))
        assert capsys.readouterr().out.rstrip("\n") == together
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    rows = answers(folder, tmp_path / "out.jsonl", input="-")
    assert [row["prompt"] for row in rows] == ["short", "", "河水从桥下流过"]
    with pytest.raises(UserError, match="is there already"):
        answers(folder, tmp_path / "out.jsonl", input="-")
    work = answer_work(settings(folder, input="-", output=tmp_path / "out.jsonl", generate_batch_size=2))
    work.load()
    (part,) = work.parts(iter([Prompt("", text, {}) for text in ("short", "", "third")]))
    assert len(part) == 3, "nobody waits for each answer"


def test_the_budget_counts_the_tree(folder: Path) -> None:
    """What it holds itself, and what a step makes of the tokens that it allows."""
    config = settings(folder, input="x", max_seq_len=64)
    without = load_model(config, find_model(config))
    count = 2**25
    starts = np.full(count + 1, count, np.int32)
    starts[0] = 1
    tree = AnswerTree(np.ones(count, np.int32), starts, 2)  # 256 MiB: as many answers of one token
    trained = load_model(config, find_model(config), tree=tree)
    tree_bytes = trained.held_model.base_bytes - without.held_model.base_bytes
    batch = AnswerBatch.by(config.generate, 1, config.data.max_seq_len)
    assert tree_bytes > 0.8 * tree.num_bytes
    assert sum(trained.predict(batch).values()) - sum(without.predict(batch).values()) > tree_bytes + 40 * count
    serving = flags_of("serve", model=folder, max_seq_len=32)
    less, more = (api_of(one, serving.data, serving.generate).engine.capacity for one in (without, trained))
    assert sum(more.parts.values()) > sum(less.parts.values()) + 40 * count
