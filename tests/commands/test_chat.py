"""A conversation: what the model sees, what the user sees, commands, and leaving."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from commands.answering import find_answering
from commands.chat import Session, Writer, chat, converse, greeting, run
from commands.evaluate import evaluate
from commands.generate import generate
from data.text.templates import Template, Turn
from data.tokenizers.pieces import pieces
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer, train_tokenizer
from model import hf_format
from model.formats.peft import save_adapters
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from settings.errors import UserError
from settings.loading import load
from training.checkpoints.runs import create_run
from training.loaded_model import load_model
from training.saved_model import find_model
from training.setup.adapters import fingerprint_of

ROOT = Path(__file__).resolve().parents[2]
LETTERS = "春天的河水从石桥下流过 the river runs under a bridge été 😀 мост "


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
    session = Session(parrot, "规则", history_turns=9)
    assert session.command(f"/save {file}") == "there is nothing to save yet" and not file.exists()
    answer = talk(["a b", f"/save {file}", "/reset", "c", "/help", "/nothing", "/save", "/exit", "never"], session)
    assert "conversation saved to" in answer and "1 question with answers" in answer and "was reset" in answer
    assert "/nothing is not a command" in answer and answer.count("/reset      clear") == 2
    assert "/save needs a file name" in answer and "never" not in answer
    assert parrot.conversations[1][0] == [("user", "c")]
    messages = json.loads(file.read_text(encoding="utf8"))["messages"]
    assert messages == [
        {"role": "system", "content": "规则"},
        {"role": "user", "content": "a b"},
        {"role": "assistant", "content": "a b"},
    ]
    assert "cannot be written" in session.command(f"/save {tmp_path}")


def test_a_conversation_that_is_saved_again_stands_once(tmp_path: Path) -> None:
    file = tmp_path / "saved.jsonl"
    file.write_text('{"by": "others"}\n', encoding="utf8")
    first = Session(Parrot())
    second = Session(Parrot())

    def questions() -> list[list[str]]:
        lines = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
        assert lines.pop(0) == {"by": "others"}
        return [[turn["content"] for turn in line["messages"] if turn["role"] == "user"] for line in lines]

    talk(["河水", f"/save {file}", f"/save {file}"], first)
    assert questions() == [["河水"]]
    talk(["x", f"/save {file}"], second)
    answer = talk(["b", f"/save {file}"], first)
    assert "2 questions with answers" in answer and questions() == [["河水", "b"], ["x"]]
    talk(["y", f"/save {file}", "/reset", "z", f"/save {file}"], second)
    assert questions() == [["河水", "b"], ["x", "y"], ["z"]], "found although it has moved; after /reset it is another"
    file.write_text('{"by": "others"}\n', encoding="utf8")
    talk([f"/save {file}"], first)
    assert questions() == [["河水", "b"]], "somebody has emptied the file"


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


def test_an_interrupt_stops_the_answer_alone_and_some_words_leave() -> None:
    session = Session(Parrot(), history_turns=5)
    assert talk(["one stop two", "next"], session) == "one ...\nnext\n"
    assert session.turns[1] == ("assistant", "one")
    for word in ("/exit", "退出", "QUIT"):
        assert "later" not in talk([word, "later"], Session(Parrot()))


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    texts = [LETTERS * 3, *LETTERS.split()] * 20
    by_kind = {kind: train_tokenizer(texts, kind, 700, 10**6) for kind in ("bpe", "unigram")}
    return {**by_kind, "byte": byte_tokenizer()}


@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte"])
@settings(derandomize=True, max_examples=40)
@given(text=st.text(alphabet=LETTERS + "xyz,.\n嗨龍", max_size=30))
def test_pieces_are_the_text_and_never_half_a_letter(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode_batch([text])[0].tolist()
    output = list(pieces(tokenizer, iter(ids)))
    assert "".join(output) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in output)


def test_a_piece_comes_as_soon_as_it_is_whole(tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["byte"].encode_batch(["a河b"])[0].tolist()
    tokens: list[int] = []
    stream = pieces(tokenizers["byte"], (tokens.append(number) or number for number in ids))
    assert [(piece, len(tokens)) for piece in stream] == [("a", 1), ("河", 4), ("b", 5)]


def test_the_oldest_turns_leave_when_there_is_no_room(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load("chat", {"model": str(folder), "max_seq_len": "30", "prompt_template": "Q{prompt}A"})
    writer = Writer(load_model(config, find_model(config)), config)
    turns = [("user", "first"), ("assistant", "yes"), ("user", "second"), ("assistant", "no"), ("user", "third")]
    screen = writer.trained.tokenizer.decode(writer.fitted(turns, None))
    assert "first" not in screen and "second" in screen and "third" in screen
    assert capsys.readouterr().err == ""
    cut = writer.fitted([("user", "x" * 99)], None)
    assert "longer than --max_seq_len=30 tokens and was cut" in capsys.readouterr().err
    assert len(cut) == 30 and cut[-1] == writer.trained.tokenizer.eos_id


def test_a_program_is_told_that_a_question_was_cut(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f'{{"text": "{"x" * 99}"}}\n{{"text": "x"}}\n'))
    chat(load("chat", {"model": str(folder), "max_seq_len": "30", "max_new_tokens": "3", "json": "True"}))
    printed = capsys.readouterr()
    records = [json.loads(line) for line in printed.out.splitlines()]
    cut = {"note": "the answer was cut at --max_new_tokens=3"}
    assert [record for record in records if "note" in record] == [records[1], cut, cut] and printed.err == ""
    assert "longer than --max_seq_len=30 tokens and was cut" in records[1]["note"]


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "train_low_mem.py"), "chat", f"--model={folder}", "--max_new_tokens=5", *flags]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf8"}


def test_piped_questions_are_answered_and_nothing_else_is_printed(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(folder),
        input="hello\n河水\n/exit\n",
        capture_output=True,
        text=True,
        encoding="utf8",
        env=ENVIRONMENT,
        cwd=tmp_path,
    )
    assert done.returncode == 0 and done.stderr == "the answer was cut at --max_new_tokens=5\n" * 2
    config = load("chat", {"model": str(folder), "max_new_tokens": "5"})
    trained = load_model(config, find_model(config))
    inputs = [[*trained.tokenizer.encode_batch([text])[0].tolist(), 1] for text in ("hello", "河水")]
    expected = [trained.tokenizer.decode(ids) for ids in trained.writer(config).answers(inputs)]
    assert done.stdout == "".join(f"{text}\n" for text in expected)


@pytest.mark.slow
def test_a_terminal(folder: Path, tmp_path: Path) -> None:
    """The prompt, a command, Ctrl-C at the prompt, and Ctrl-D."""
    near, far = pytest.importorskip("pty").openpty()
    process = subprocess.Popen(
        command(folder),
        stdin=far,
        stdout=far,
        stderr=far,
        env=ENVIRONMENT,
        cwd=tmp_path,
        start_new_session=True,
        preexec_fn=_take_terminal(far),
    )
    os.close(far)
    screen = _until(near, "> ")
    assert "Ctrl-D quits" in screen
    os.write(near, "河\n".encode())
    _until(near, "> ")
    os.write(near, b"\x03")
    _until(near, "> ")
    os.write(near, b"/help\n")
    assert "/save FILE" in _until(near, "> ")
    os.write(near, b"\x04")
    assert process.wait(60) == 0
    os.close(near)


def _take_terminal(far: int) -> Callable[[], None]:
    def take() -> None:
        import fcntl
        import termios

        fcntl.ioctl(far, termios.TIOCSCTTY, 0)

    return take


def _until(near: int, end: str) -> str:
    screen, deadline = b"", time.monotonic() + 100
    while not screen.decode(errors="replace").endswith(end):
        assert time.monotonic() < deadline, screen
        screen += os.read(near, 4096)
    return screen.decode(errors="replace")


def test_a_question_put_again_is_drawn_anew(folder: Path) -> None:
    config = load("chat", {"model": str(folder), "temperature": "3", "max_new_tokens": "9"})
    trained = load_model(config, find_model(config))
    sessions = [Session(Writer(trained, config)) for _ in "ab"]
    for session in sessions:
        for _ in range(2):
            session.ask("hello", lambda piece: None)
    answers = [[text for role, text in session.turns if role == "assistant"] for session in sessions]
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]


def test_answers_come_from_a_list(folder: Path, tmp_path: Path) -> None:
    (tmp_path / "answers.txt").write_text("red\nblue\n")
    flags = {"answers": str(tmp_path / "answers.txt"), "cache_dir": str(tmp_path / "cache"), "temperature": "3"}
    answering = find_answering(load("chat", {"model": str(folder), **flags}), "chat")
    session = Session(Writer(answering.load(), answering.config))
    for _ in range(3):
        session.ask("hello", lambda piece: None)
    assert {text for role, text in session.turns if role == "assistant"} <= {"red", "blue"}


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
    for command_name, do in (("generate", generate), ("evaluate", evaluate)):
        several = load(
            command_name,
            {name: flags[name] for name in ("model", "adapter")}
            | ({"input": "x"} if command_name == "generate" else {}),
        )
        with pytest.raises(UserError, match="only one can be on here"):
            do(several)


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


@pytest.mark.parametrize(
    ("turns", "objective", "words"),
    [
        (True, "pairs", "trained on conversations"),
        (False, "pairs", "trained on single questions"),
        (False, "span", "has only been pretrained"),
    ],
)
def test_the_greeting_says_what_is_remembered(tmp_path: Path, turns: bool, objective: str, words: str) -> None:
    folder = create_run(tmp_path, "run", "finetune", objective=objective)
    trained = cast(Any, SimpleNamespace(folder=folder, template=Template(turns=turns)))
    assert words in " ".join(greeting(trained, "auto", 9 if turns else 0))
