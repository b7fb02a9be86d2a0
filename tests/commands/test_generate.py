"""Files of prompts: order, columns, resuming, and what is refused."""

from __future__ import annotations

import io
import json
import os
import shutil
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import torch

from commands import generate as answering
from commands.generate import answering_model, generate
from common.units import MIB
from data.sources.prompts import Prompt
from devices.cpu import CpuDevice
from memory.answers import AnswerBatch
from memory.monitor import Monitor
from memory.processes import ProcessTree
from model import hf_format
from model.decoding.answer_tree import AnswerTree
from serving.server import api_of
from settings.declared import Config
from settings.errors import DoesNotFit, OverBudget, UserError
from settings.loading import load
from tests.measuring import in_child
from tests.training.small_trained import SHAPE, save_trained
from training.loaded_model import load_model
from training.saved_model import find_model

pytestmark = pytest.mark.usefixtures("one_thread")
ROOT = Path(__file__).resolve().parents[2]
PROMPTS = ["short", "a longer prompt than that", "河水从桥下流过", "x", "two words", "the last one, of them all", "y z"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("model"))


def settings(folder: Path, **flags: Any) -> Config:
    defaults = {"model": str(folder), "max_new_tokens": 6, "max_seq_len": 64, "mixed_precision": "no"}
    return load("generate", {name: str(value) for name, value in {**defaults, **flags}.items()})


def write_prompts(path: Path, prompts: list[str] = PROMPTS) -> Path:
    rows = [{"id": number, "prompt": text, "tags": ["a", number]} for number, text in enumerate(prompts)]
    path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return path


def read(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text(encoding="utf8").splitlines()]


def test_answers_stand_in_order_with_their_columns(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source, output = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "out" / "answers.jsonl"
    generate(settings(folder, input=source, output=output, generate_batch_size=2))
    assert "answers.jsonl: 7 answers" in capsys.readouterr().out
    rows = read(output)
    assert [(row["id"], row["prompt"], row["tags"]) for row in rows] == [
        (i, p, ["a", i]) for i, p in enumerate(PROMPTS)
    ]
    assert len({row["response"] for row in rows}) > 2
    generate(settings(folder, input=source, output=tmp_path / "auto.jsonl"))
    assert read(tmp_path / "auto.jsonl") == rows
    assert sorted(path.name for path in output.parent.iterdir()) == ["answers.jsonl"]


def test_text_csv_and_parquet_give_the_same_answers(folder: Path, tmp_path: Path) -> None:
    text, table, comma = tmp_path / "p.txt", tmp_path / "p.parquet", tmp_path / "p.csv"
    text.write_text("\n".join(PROMPTS) + "\n", encoding="utf8")
    columns = {"prompt": PROMPTS, "n": list(range(7)), "v": [[1]] * 7, "none": [None, *"abcdef"], "response": PROMPTS}
    pq.write_table(pa.table(columns), table)
    comma.write_text("n,prompt\n" + "".join(f'{n},"{p}"\n' for n, p in enumerate(PROMPTS)), encoding="utf8")
    answers = {}
    for source in (text, table, comma):
        output = tmp_path / f"{source.name}.jsonl"
        generate(settings(folder, input=source, output=output))
        answers[source.name] = read(output)
    assert [row["response"] for row in answers["p.txt"]] == [row["response"] for row in answers["p.csv"]]
    assert [set(row) for row in answers["p.txt"]] == [{"prompt", "response"}] * 7
    first = answers["p.parquet"][0]
    assert first == {"prompt": "short", "n": 0, "none": None, "reference": "short", "response": first["response"]}
    assert [row["response"] for row in answers["p.parquet"]] == [row["response"] for row in answers["p.txt"]]


def test_an_interrupted_run_goes_on_behind_its_last_part(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answering, "WINDOW_BATCHES", 1)
    source, output = write_prompts(tmp_path / "prompts.jsonl"), tmp_path / "answers.jsonl"
    generate(settings(folder, input=source, output=tmp_path / "whole.jsonl", generate_batch_size=2))
    flags = {"input": source, "output": output, "generate_batch_size": 2}
    writes = []

    def interrupted(handle: int) -> None:
        writes.append(handle)
        if len(writes) == 8:
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", interrupted)
        with pytest.raises(KeyboardInterrupt, match=r"the same command continues after [246] rows"):
            generate(settings(folder, **flags))
    assert not output.exists()
    with pytest.raises(UserError, match=r"begun with another model, input or settings.*--overwrite=True"):
        generate(settings(folder, **flags, num_beams=2))
    manifest = tmp_path / "answers.jsonl.unfinished" / "parts.jsonl"
    with manifest.open("a") as file:
        file.write('{"part": 3, "torn')
    generate(settings(folder, **flags))
    assert "already holds" in capsys.readouterr().out
    assert output.read_bytes() == (tmp_path / "whole.jsonl").read_bytes()
    assert not manifest.parent.exists()
    with pytest.raises(UserError, match=r"--output = .*is there already.*--overwrite=True"):
        generate(settings(folder, **flags))
    generate(settings(folder, **flags, overwrite=True, num_beams=2))
    assert len(read(output)) == len(PROMPTS)


def test_a_link_and_a_pipe_are_written_through(folder: Path, tmp_path: Path) -> None:
    source, target, link = write_prompts(tmp_path / "p.jsonl"), tmp_path / "disk" / "answers.jsonl", tmp_path / "link"
    target.parent.mkdir()
    target.touch()
    link.symlink_to(target)
    generate(settings(folder, input=source, output=link))
    assert link.is_symlink() and len(read(target)) == len(PROMPTS)
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    reader = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    generate(settings(folder, input=source, output=pipe))
    assert os.read(reader, 2**16) == target.read_bytes() and pipe.is_fifo()
    os.close(reader)


def test_a_refused_call_leaves_nothing_in_the_way_of_the_next(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "p.jsonl").write_text(json.dumps({"question": "a"}) + "\n")
    output = tmp_path / "out" / "z.jsonl"
    with pytest.raises(UserError, match="--prompt_column"):
        generate(settings(folder, input=tmp_path / "p.jsonl", output=output))
    assert not output.parent.exists()
    output.parent.mkdir()
    output.touch()  # a file without rows, marked as begun by another command
    output.with_name("z.jsonl.unfinished").write_text("another\n")
    generate(settings(folder, input=tmp_path / "p.jsonl", output=output, prompt_column="question"))
    assert [row["question"] for row in read(output)] == ["a"]
    output.write_text("mine")  # no line end, and not ours
    with pytest.raises(UserError, match="is there already"):
        generate(settings(folder, input=tmp_path / "p.jsonl", output=output, prompt_column="question"))
    assert output.read_text() == "mine"


def test_columns_are_those_of_the_models_run_unless_a_flag_names_others(folder: Path, tmp_path: Path) -> None:
    own = Path(shutil.copytree(folder, tmp_path / "own"))
    (own / "settings.json").write_text(json.dumps({"prompt_column": "question", "text_column": "body"}))
    (tmp_path / "texts.txt").write_text("a\nc\nd\ne\n")
    best = {"num_beams": 2, "num_answers": 2}
    generate(settings(folder, input=tmp_path / "texts.txt", output=tmp_path / "texts.jsonl", **best))
    scores = {row["prompt"]: row["log_probabilities"] for row in read(tmp_path / "texts.jsonl")}
    assert len({tuple(score) for score in scores.values()}) == 4
    row = {"question": "a", "body": "b", "prompt": "c"}
    cases: list[tuple[dict[str, str], dict[str, str], str]] = [
        (row, {}, "a"),
        (row, {"prompt_column": "prompt"}, "c"),
        ({"prompt": "d"}, {}, "d"),
        ({"body": "e"}, {}, "e"),
    ]
    for number, (columns, flags, text) in enumerate(cases):
        source, output = tmp_path / f"{number}.jsonl", tmp_path / f"{number}.out"
        source.write_text(json.dumps({"n": 1, **columns}) + "\n")
        generate(settings(own, input=source, output=output, **flags, **best))
        assert read(output)[0]["log_probabilities"] == pytest.approx(scores[text], abs=1e-4)


def test_an_answer_is_one_line_on_the_screen_and_keeps_its_line_ends_in_a_file(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    answer = "one\n\ntwo\u2028three\r\n"
    listed = tmp_path / "answers.jsonl"
    listed.write_text(json.dumps({"response": answer}) + "\n")
    how = {"answers": listed, "max_new_tokens": 60, "cache_dir": tmp_path / "cache"}
    monkeypatch.setattr("sys.stdin", io.StringIO("a\nb\n"))
    generate(settings(folder, input="-", **how))
    assert capsys.readouterr().out.split("\n") == ["one  two three"] * 2 + [""]
    generate(settings(folder, input="a", **how, output=tmp_path / "a.jsonl"))
    assert json.loads((tmp_path / "a.jsonl").read_text(encoding="utf8"))["response"].startswith("one\n\ntwo\u2028three")


def test_a_preparation_of_texts_is_noted_as_without_effect_on_prompts(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    generate(settings(folder, input="x", prepare_text="prott5"))
    assert "--prepare_text = prott5, has no effect" in capsys.readouterr().err


def test_columns_beside_the_prompts_take_memory_by_their_size(folder: Path, tmp_path: Path) -> None:
    """80 rows of 600 KB, which go into the output whole."""
    (tmp_path / "rows.jsonl").write_text(
        "".join(json.dumps({"prompt": f"{at}", "z": "x" * 600_000}) + "\n" for at in range(80))
    )
    code = """
import contextlib
from commands.generate import answering_model, generate
from data.sources.prompts import Prompt
from training.loaded_model import load_model
from config import load

model, rows, output = sys.argv[1:]
how = {"model": model, "mixed_precision": "no", "max_seq_len": "32", "max_new_tokens": "2"}
with contextlib.redirect_stdout(sys.stderr):
    generate(load("generate", {**how, "input": "warm"}))
    taken = measure(lambda: generate(load("generate", {**how, "input": rows, "output": output})))
print(taken)
"""
    (taken,) = in_child(code, folder, tmp_path / "rows.jsonl", tmp_path / "out.jsonl")
    assert taken < 30 * 2**20
    assert [len(row["z"]) for row in read(tmp_path / "out.jsonl")] == [600_000] * 80


def test_long_prompts_are_answered_in_parts(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    parts = ["the king went home.", "he built a wall there.", "then all was well."]
    source, whole = (
        write_prompts(tmp_path / f"{name}.jsonl", texts)
        for name, texts in (("parts", [*parts, "x"]), ("whole", [" ".join(parts), "x"]))
    )
    for more in ({}, {"num_beams": 2}, {"source_prefix": "say: "}):
        for name, flags in (
            ("one", {"input": source}),
            ("all", {"input": whole, "split_prompts": 25, "max_seq_len": 30}),
        ):
            generate(settings(folder, output=tmp_path / f"{name}.jsonl", overwrite=True, seed=3, **more, **flags))
        *answers, short = [row["response"].strip() for row in read(tmp_path / "one.jsonl")]
        assert [row["response"] for row in read(tmp_path / "all.jsonl")] == [" ".join(filter(None, answers)), short]
    assert "truncated" not in capsys.readouterr().out
    with pytest.raises(UserError, match="--split_prompts = 25, joins one answer of each part"):
        settings(folder, split_prompts=25, num_beams=3, num_answers=2)
    with pytest.raises(UserError, match="--split_prompts = 64, is not less than max_seq_len"):
        settings(folder, split_prompts=64)
    own = Path(shutil.copytree(folder, tmp_path / "own"))  # what a folder says does not forbid several answers
    (own / "generation_config.json").write_text(json.dumps({"split_prompts": 25}))
    generate(settings(own, input="the king went home", num_beams=2, num_answers=2))
    with pytest.raises(UserError, match="--split_prompts: no such flag"):
        load("chat", {"model": str(folder), "split_prompts": "25"})


def test_prompts_that_are_too_long_are_cut_and_counted(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_prompts(tmp_path / "p.jsonl", ["short", "x" * 15, "y" * 16, "z" * 40])
    generate(settings(folder, input=source, output=tmp_path / "cut.jsonl", max_seq_len=16))
    assert "truncated to --max_seq_len=16: 2 prompts, first " in capsys.readouterr().out


def test_a_bad_row_has_a_blank_answer_where_the_answers_before_it_stand(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(answering, "WINDOW_BATCHES", 1)
    source, output = write_prompts(tmp_path / "p.jsonl", ["a", "b", " ", "c"]), tmp_path / "a.jsonl"
    flags = {"input": source, "output": output, "generate_batch_size": 2}
    with pytest.raises(UserError, match=r"line 3: prompt is empty.*--skip_bad_rows=True"):
        generate(settings(folder, **flags))
    generate(settings(folder, **flags, skip_bad_rows=True))
    assert "already holds 2 answers" in capsys.readouterr().out
    assert [(row["id"], bool(row["response"])) for row in read(output)] == [(0, True), (1, True), (2, False), (3, True)]


def test_a_missing_column_is_told_with_those_that_are_there(folder: Path, tmp_path: Path) -> None:
    source = tmp_path / "p.jsonl"
    source.write_text('{"question": "a"}\n')
    with pytest.raises(UserError, match=r"its columns: question; .*--prompt_column"):
        generate(settings(folder, input=source, output=tmp_path / "a.jsonl"))


def test_a_missing_file_is_no_text(folder: Path, tmp_path: Path) -> None:
    for name in ("nothing.jsonl", "Prompts.TXT"):
        with pytest.raises(UserError, match=r"--input = .*, no such file; give a file that exists"):
            generate(settings(folder, input=tmp_path / name))


def test_what_does_not_fit_is_refused_before_loading(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = write_prompts(tmp_path / "p.jsonl")
    with pytest.raises(DoesNotFit, match=r"does not hold .* try .*--generate_batch_size=50000"):
        generate(
            settings(
                folder,
                input=source,
                output=tmp_path / "a.jsonl",
                generate_batch_size=100000,
                max_seq_len=65536,
                max_new_tokens=65536,
            )
        )
    monkeypatch.setattr(hf_format, "load", lambda *a, **b: pytest.fail("was loaded"))
    with pytest.raises(DoesNotFit, match=r"--memory_budget = 1.0 MiB, does not hold the model's"):
        generate(settings(folder, input=source, output=tmp_path / "b.jsonl", memory_budget="1M"))


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


def test_who_takes_more_than_the_budget_says_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    class Full(Monitor):
        def __exit__(self, *error: object) -> None:
            super().__exit__(*error)
            self.peak_bytes = 2**50

    monkeypatch.setattr("training.loaded_model.Monitor", Full)
    with pytest.raises(OverBudget, match=r"was exceeded: the peak was 1,?048,?576.* GiB.*--generate_batch_size=1"):
        generate(settings(folder, input="x"))
    assert capsys.readouterr().out, "the answer is there"


@pytest.mark.parametrize(
    ("fast", "asked", "told", "storage"),
    [
        ([torch.float32], "fp16", "fp32 products: fp16 ones are not faster here", torch.float32),
        ([torch.float32], "bf16", "fp32 products: bf16 ones are not faster here", torch.bfloat16),
        ([torch.bfloat16, torch.float32], "bf16", "", torch.bfloat16),
        ([torch.float16, torch.float32], "fp16", "", torch.float16),
    ],
)
def test_products_in_another_dtype_than_asked_for_are_told_once(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    fast: list[torch.dtype],
    asked: str,
    told: str,
    storage: torch.dtype,
) -> None:
    monkeypatch.setattr(CpuDevice, "fast_dtypes", lambda self: tuple(fast))
    config = settings(folder, input="x", mixed_precision=asked)
    generate(config)
    screen = capsys.readouterr()
    lines = [line for line in screen.err.splitlines() if "mixed_precision" in line]
    assert len(lines) == bool(told) and all(line.startswith(f"--mixed_precision = {asked}, {told}") for line in lines)
    assert "mixed_precision" not in screen.out  # which holds the answer alone
    trained = load_model(config, find_model(config))
    assert trained.blockwise.model.embedding.dtype == storage
    assert trained.blockwise.weight_store.compute_dtype == (torch.float32 if asked in ("no", "auto") else fast[0])


def test_weights_are_rounded_where_the_budget_holds_no_others_and_no_dtype_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """80 MiB in fp32, 40 in bf16."""
    folder = save_trained(tmp_path, shape=replace(SHAPE, vocab_size=80_000, d_model=256))
    flags = {"input": "x", "memory_budget": ProcessTree().usage().anon_bytes + 52 * MIB}
    config = settings(folder, **flags, mixed_precision="auto")
    trained = load_model(config, find_model(config))
    assert trained.blockwise.model.embedding.dtype == torch.int8
    assert "rounded to int8" in capsys.readouterr().err
    assert trained.writer(config).answers([[5, 6, 1]])
    with pytest.raises(DoesNotFit):
        generate(settings(folder, **flags))


@pytest.mark.parametrize("command", [generate])
def test_several_processes_are_refused(command: Any, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(UserError, match=f"{command.__name__}, works with one process"):
        command(load(command.__name__, {"model": str(folder)}))


@pytest.mark.slow
def test_a_run_that_is_really_killed_goes_on(folder: Path, tmp_path: Path) -> None:
    source = write_prompts(tmp_path / "p.jsonl", [f"question {number} of many" for number in range(60)])
    output = tmp_path / "answers.jsonl"
    words = [sys.executable, str(ROOT / "train_low_mem.py"), "generate", f"--model={folder}", f"--input={source}"]
    words += ["--max_new_tokens=100", "--min_new_tokens=100", "--generate_batch_size=1", "--mixed_precision=no"]
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen([*words, f"--output={output}"], env=environment, cwd=tmp_path)
    parts = tmp_path / "answers.jsonl.unfinished"
    while not (parts / "00000000.jsonl").exists():
        assert process.poll() is None
        os.sched_yield()
    process.kill()
    process.wait()
    assert not output.exists()
    subprocess.run([*words, f"--output={output}"], env=environment, cwd=tmp_path, check=True, stdout=subprocess.PIPE)
    subprocess.run([*words, f"--output={tmp_path / 'w'}"], env=environment, cwd=tmp_path, check=True)
    assert output.read_bytes() == (tmp_path / "w").read_bytes()


def test_standard_input_is_read_line_by_line(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The same answers as one by one; what cannot be read again is not continued."""
    lines = "short\n\n河水从桥下流过\n"
    monkeypatch.setattr("sys.stdin", io.StringIO(lines))
    generate(settings(folder, input="-"))
    first, blank, second = capsys.readouterr().out.splitlines()
    assert blank == ""
    for text, together in (("short", first), ("河水从桥下流过", second)):
        generate(settings(folder, input=text))
        assert capsys.readouterr().out.rstrip("\n") == together
    for again in (False, True):
        monkeypatch.setattr("sys.stdin", io.StringIO(lines))
        if again:
            with pytest.raises(UserError, match="is there already"):
                generate(settings(folder, input="-", output=tmp_path / "out.jsonl"))
        else:
            generate(settings(folder, input="-", output=tmp_path / "out.jsonl"))
    assert [row["prompt"] for row in read(tmp_path / "out.jsonl")] == ["short", "", "河水从桥下流过"]
    writer = answering_model(settings(folder, input="-", output=tmp_path / "out.jsonl", generate_batch_size=2))[1]
    writer.load(load_model(writer.config, find_model(writer.config), writer.least))
    (window,) = writer.windows(iter([Prompt("", text, {}) for text in ("short", "", "third")]))
    assert len(window) == 3, "nobody waits for each answer"


def test_what_answers_loads_no_trainer() -> None:
    """Its memory would be missing for answers."""
    words = "import sys, training.loaded_model; sys.exit(int('accelerate' in sys.modules or 'pyarrow' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", words], cwd=ROOT).returncode == 0


def test_answers_come_from_a_list(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Of a text file, of a data file's column, and of the model's own folder; with the best few and their
    log-probabilities.
    """
    answers = ["red", "a longer answer", "re", "blue", "蓝"]
    listed, table = tmp_path / "answers.txt", tmp_path / "answers.csv"
    listed.write_text("\n".join([*answers, "", "red "]) + "\n", encoding="utf8")
    table.write_text("id,color\n" + "".join(f"1,{text}\n" for text in answers), encoding="utf8")
    source, cache = write_prompts(tmp_path / "prompts.jsonl"), {"cache_dir": tmp_path / "cache"}
    how = {"input": source, **cache, "max_new_tokens": 60}
    best = {"num_beams": 5, "num_answers": 3}
    generate(settings(folder, **how, **best, answers=listed, output=tmp_path / "best.jsonl"))
    assert "5 of at most" in capsys.readouterr().err
    for row in read(tmp_path / "best.jsonl"):
        assert len(set(row["responses"])) == 3 and set(row["responses"]) <= set(answers)
        assert row["response"] == row["responses"][0]
        assert row["log_probabilities"] == sorted(row["log_probabilities"], reverse=True)
    (made,) = (tmp_path / "cache" / "answers").glob("*/tree.npz")
    before = made.stat().st_mtime_ns
    generate(settings(folder, **how, answers=listed, output=tmp_path / "first.jsonl"))
    assert made.stat().st_mtime_ns == before
    first = [row["response"] for row in read(tmp_path / "first.jsonl")]
    assert set(first) <= set(answers)
    generate(settings(folder, **how, answers=table, response_column="color", output=tmp_path / "table.jsonl"))
    assert [row["response"] for row in read(tmp_path / "table.jsonl")] == first
    own = tmp_path / "own"
    shutil.copytree(folder, own)
    shutil.copy(listed, own)
    generate(settings(own, **how, output=tmp_path / "own.jsonl"))
    assert [row["response"] for row in read(tmp_path / "own.jsonl")] == first
    capsys.readouterr()
    generate(settings(own, **{**how, "input": "short", "max_new_tokens": 6}, answers="none"))
    assert "of at most" not in capsys.readouterr().err


def test_a_list_that_the_budget_does_not_hold(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "answers.txt").write_text("red\nblue\n")
    monkeypatch.setattr("training.setup.answer_list.child_bytes", lambda config: 2**20)
    flags = {"input": "x", "answers": tmp_path / "answers.txt", "cache_dir": tmp_path / "cache"}
    with pytest.raises(DoesNotFit, match="--memory_budget"):
        generate(settings(folder, **flags, max_new_tokens=60))


def test_the_budget_counts_the_tree(folder: Path) -> None:
    """What it holds itself, and what a step makes of the tokens that it allows."""
    config, count = settings(folder, input="x"), 2**23
    without = load_model(config, find_model(config))
    starts = np.full(count + 1, count, np.int32)
    starts[0] = 1
    tree = AnswerTree(np.ones(count, np.int32), starts, 2)  # 64 MiB: as many answers of one token
    trained = load_model(config, find_model(config), tree=tree)
    held = trained.held_model.base_bytes - without.held_model.base_bytes
    batch = AnswerBatch.by(config.generate, 1, config.data.max_seq_len)
    assert held > 0.8 * tree.num_bytes
    assert sum(trained.predict(batch).values()) - sum(without.predict(batch).values()) > held + 40 * count
    serving = load("serve", {"model": str(folder), "max_seq_len": "32"})
    capacities = [api_of(one, serving.data, serving.generate).engine.capacity for one in (without, trained)]
    assert sum(capacities[1].parts.values()) > sum(capacities[0].parts.values()) + 40 * count


@pytest.mark.parametrize(
    "flags,named",
    [
        ({"num_answers": 3}, "--num_answers"),
        ({"max_new_tokens": 2}, "--max_new_tokens"),
        ({"no_repeat_ngram_size": 2}, "--no_repeat_ngram_size"),
        ({"answers": "table.csv"}, "--response_column"),
    ],
)
def test_what_contradicts_a_list_of_answers_is_refused(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, flags: dict[str, Any], named: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("answers.txt").write_text("a longer answer\n", encoding="utf8")
    Path("table.csv").write_text("id,color\n1,red\n", encoding="utf8")
    how = {"max_new_tokens": 60, "answers": "answers.txt", "cache_dir": tmp_path / "cache"}
    with pytest.raises(UserError, match=named):
        generate(settings(folder, input="short", **{**how, **flags}))
