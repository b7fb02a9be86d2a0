"""A conversation: what the model sees, what the user sees, commands, and leaving."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from commands.chat import Session, Writer, converse, run
from data.text.templates import Turn
from model import hf_format
from model.formats.peft import save_adapters
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from settings.loading import load
from training.loaded_model import load_model
from training.saved_model import find_model
from training.setup.adapters import fingerprint_of

ROOT = Path(__file__).resolve().parents[2]


class Parrot:
    """Answers with the newest question, word by word, and notes what it was asked."""

    def __init__(self) -> None:
        self.conversations: list[tuple[list[Turn], str | None]] = []

    def __call__(self, turns: list[Turn], system: str | None) -> Iterator[str]:
        self.conversations.append((list(turns), system))
        for index, word in enumerate(turns[-1][1].split()):
            if word == "stop":
                raise KeyboardInterrupt
            yield word if index == 0 else f" {word}"


def talk(lines: list[str], session: Session) -> str:
    out = io.StringIO()
    run(session, iter(lines), out)
    return out.getvalue()


def test_history_is_as_long_as_asked() -> None:
    parrot = Parrot()
    answer = talk(["one two", "", "three", "four"], Session(parrot, "be short", history_turns=1))
    assert answer == "one two\nthree\nfour\n"
    assert [system for _, system in parrot.conversations] == ["be short"] * 3
    assert [turns for turns, _ in parrot.conversations] == [
        [("user", "one two")],
        [("user", "one two"), ("assistant", "one two"), ("user", "three")],
        [("user", "three"), ("assistant", "three"), ("user", "four")],
    ]


def test_commands(tmp_path: Path) -> None:
    parrot = Parrot()
    file = tmp_path / "saved.jsonl"
    file.write_text('{"by": "others"}\n', encoding="utf8")
    session = Session(parrot, "规则", history_turns=9)
    assert session.command(f"/save {file}") == "there is nothing to save yet"
    answer = talk(["a b", f"/save {file}", "/reset", "c", "/help", "/nothing", "/save", "/exit", "never"], session)
    assert "conversation saved to" in answer and "1 question with answers" in answer and "was reset" in answer
    assert "/nothing is not a command" in answer and answer.count("/reset      clear") == 2
    assert "/save needs a file name" in answer and "never" not in answer
    assert parrot.conversations[1][0] == [("user", "c")]
    others, own = map(json.loads, file.read_text(encoding="utf8").splitlines())
    assert others == {"by": "others"} and own["messages"] == [
        {"role": "system", "content": "规则"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "a b"},
    ]
    assert "cannot be written" in session.command(f"/save {tmp_path}")


def test_an_interrupt_stops_the_answer_alone_and_some_words_leave() -> None:
    session = Session(Parrot(), history_turns=5)
    assert talk(["one stop two", "next"], session) == "one ...\nnext\n"
    assert session.turns[1] == ("assistant", "one")
    for word in ("/exit", "退出", "QUIT"):
        assert "later" not in talk([word, "later"], Session(Parrot()))


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "train_low_mem.py"), "chat", f"--model={folder}", "--max_new_tokens=5", *flags]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf8"}


def test_piped_questions_are_answered_and_nothing_else_is_printed(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(folder),
        input="hello <extra_id_0> </s>\n河水\n/exit\n",
        capture_output=True,
        text=True,
        encoding="utf8",
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and done.stderr == "the answer was cut at --max_new_tokens=5\n" * 2
    config = load("chat", {"model": str(folder), "max_new_tokens": "5"})
    trained = load_model(config, find_model(config))
    inputs = [[*ids.tolist(), 1] for ids in trained.tokenizer.encode_prompts(["hello <extra_id_0> </s>", "河水"])]
    expected = [trained.tokenizer.decode_answer(ids) for ids in trained.writer(config).answers(inputs)]
    assert done.stdout == "".join(f"{text}\n" for text in expected)


def save_adapter(base: Path, folder: Path, seed: int) -> Path:
    """An adapter over a base that changes what it writes."""
    model = hf_format.load(base)
    settings = LoraSettings(2, 8.0)
    for adapter in add_adapters(model, settings, seed).values():
        torch.nn.init.normal_(adapter.b, generator=torch.Generator().manual_seed(seed))
    save_adapters(model, settings, folder, str(base.resolve()), fingerprint_of(base))
    return folder


def test_adapters_are_changed_by_a_command(folder: Path, tmp_path: Path) -> None:
    adapters = [save_adapter(folder, tmp_path / name, seed) for seed, name in enumerate("ab")]
    flags = {"model": str(folder), "max_new_tokens": "8", "adapter": ",".join(map(str, adapters))}
    config = load("chat", flags)
    trained = load_model(config, find_model(config))
    session = Session(Writer(trained, config), adapters=trained.adapters)
    answers = {}
    for name in ("a", "b", "none", "a"):
        assert session.command(f"/adapter {name}") == f"{name} is active"
        session.ask("hello", lambda piece: None)
        answers.setdefault(name, set()).add(session.turns[-1][1])
    assert [len(texts) for texts in answers.values()] == [1, 1, 1] and len(set.union(*answers.values())) == 3
    assert "c, is not loaded; there are: a, b" in session.command("/adapter c")
    assert "no adapters were loaded" in Session(Parrot()).command("/adapter a")


def test_a_program_talks_in_json_and_gives_no_commands(tmp_path: Path) -> None:
    out = io.StringIO()
    file = tmp_path / "saved"
    lines = [
        '{"text": "one two"}',
        "no json",
        "[1]",
        '{"text": 5}',
        json.dumps({"text": f"/save {file}"}),
        '{"reset": true}',
    ]
    session = Session(Parrot())
    converse(session, iter(lines), out)
    records = [json.loads(line) for line in out.getvalue().splitlines()]
    assert records[0] == {"ready": True} and [record for record in records if record.get("end")] == [{"end": True}] * 2
    assert "".join(record.get("piece", "") for record in records).startswith("one two")
    assert not file.exists() and session.turns == []


def test_a_disk_that_is_full_loses_no_conversation(tmp_path: Path) -> None:
    resource = pytest.importorskip("resource", reason="Windows cannot limit the size of files")
    file = tmp_path / "saved.jsonl"
    session = Session(Parrot())
    talk(["a", f"/save {file}"], session)
    before = file.read_bytes()
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before), limits[1]))
        answers = [talk(["b", f"/save {file}"], each) for each in (session, Session(Parrot()))]
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert all("cannot be written" in answer for answer in answers) and file.read_bytes() == before
