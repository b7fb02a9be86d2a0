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

from commands import loading
from commands.chat import NOTHING, Session, Writer, chat, converse, greeting, newest_turns, run
from commands.evaluate import evaluate
from commands.generate import generate
from config import load
from data.text.templates import USER, Template, Turn
from data.tokenizers.pieces import pieces
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import byte_tokenizer, train_tokenizer
from model import hf_format
from model.formats.peft import save_adapters
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from settings.errors import UserError
from tests.training.small_trained import save_trained
from training.checkpoints.runs import create_run
from training.start.adapters import fingerprint_of

ROOT = Path(__file__).resolve().parents[2]
LETTERS = "春天的河水从石桥下流过 the river runs under a bridge été 😀 мост "


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("model"))


class Parrot:
    """Answers with the newest question, word by word, and notes what it was asked."""

    def __init__(self) -> None:
        self.seen: list[tuple[list[Turn], str | None]] = []

    def __call__(self, turns: list[Turn], system: str | None) -> Iterator[str]:
        self.seen.append((list(turns), system))
        for place, word in enumerate(turns[-1][1].split()):
            if word == "stop":
                raise KeyboardInterrupt
            yield word if place == 0 else f" {word}"


def talk(lines: list[str], session: Session) -> str:
    out = io.StringIO()
    run(session, iter(lines), out)
    return out.getvalue()


def test_history_is_as_long_as_asked() -> None:
    parrot = Parrot()
    told = talk(["one two", "", "three", "four"], Session(parrot, "be short", history_turns=1))
    assert told == "one two\nthree\nfour\n"
    assert [system for _, system in parrot.seen] == ["be short"] * 3
    assert [turns for turns, _ in parrot.seen] == [
        [("user", "one two")],
        [("user", "one two"), ("assistant", "one two"), ("user", "three")],
        [("user", "three"), ("assistant", "three"), ("user", "four")],
    ]


def test_commands(tmp_path: Path) -> None:
    parrot, file = Parrot(), tmp_path / "saved.jsonl"
    session = Session(parrot, "规则", history_turns=9)
    assert session.command(f"/save {file}") == "there is nothing to save yet" and not file.exists()
    told = talk(["a b", f"/save {file}", "/reset", "c", "/help", "/nothing", "/save", "/exit", "never"], session)
    assert "holds this conversation, 1 question with answers" in told and "starts over" in told
    assert "/nothing is no command" in told and told.count("/reset      forget") == 2
    assert "/save needs the name of a file" in told and "never" not in told
    assert parrot.seen[1][0] == [("user", "c")]
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
    first, second = Session(Parrot()), Session(Parrot())

    def questions() -> list[list[str]]:
        lines = [json.loads(line) for line in file.read_text(encoding="utf8").splitlines()]
        assert lines.pop(0) == {"by": "others"}
        return [[turn["content"] for turn in line["messages"] if turn["role"] == "user"] for line in lines]

    talk(["河水", f"/save {file}", f"/save {file}"], first)
    assert questions() == [["河水"]]
    talk(["x", f"/save {file}"], second)
    told = talk(["b", f"/save {file}"], first)
    assert "2 questions with answers" in told and questions() == [["河水", "b"], ["x"]]
    talk(["y", f"/save {file}", "/reset", "z", f"/save {file}"], second)
    assert questions() == [["河水", "b"], ["x", "y"], ["z"]], "found although it has moved; after /reset it is another"
    file.write_text('{"by": "others"}\n', encoding="utf8")
    talk([f"/save {file}"], first)
    assert questions() == [["河水", "b"]], "somebody has emptied the file"


def test_an_interrupt_stops_the_answer_alone() -> None:
    session = Session(Parrot(), history_turns=5)
    assert talk(["one stop two", "next"], session) == "one ...\nnext\n"
    assert session.turns[1] == ("assistant", "one")


def test_an_interrupt_at_the_prompt_begins_a_new_line() -> None:
    class Lines:
        def __init__(self) -> None:
            self.left = iter(["interrupt", "hello"])

        def __iter__(self) -> Lines:
            return self

        def __next__(self) -> str:
            line = next(self.left)
            if line == "interrupt":
                raise KeyboardInterrupt
            return line

    out = io.StringIO()
    run(Session(Parrot()), Lines(), out)
    assert out.getvalue() == "\nhello\n"
    with pytest.raises(KeyboardInterrupt):
        run(Session(Parrot()), Lines(), out, is_terminal=False)


@pytest.fixture(scope="module")
def tokenizers() -> dict[str, Tokenizer]:
    texts = [LETTERS * 3, *LETTERS.split()] * 20
    made = {kind: train_tokenizer(texts, kind, 700, 10**6) for kind in ("bpe", "unigram")}
    return {**made, "byte": byte_tokenizer()}


@pytest.mark.parametrize("kind", ["bpe", "unigram", "byte"])
@settings(derandomize=True, max_examples=200)
@given(text=st.text(alphabet=LETTERS + "xyz,.\n嗨龍", max_size=30))
def test_pieces_are_the_text_and_never_half_a_letter(tokenizers: dict[str, Tokenizer], kind: str, text: str) -> None:
    tokenizer = tokenizers[kind]
    ids = tokenizer.encode_batch([text])[0].tolist()
    shown = list(pieces(tokenizer, iter(ids)))
    assert "".join(shown) == tokenizer.decode(ids)
    assert not any("\N{REPLACEMENT CHARACTER}" in piece for piece in shown)


def test_a_piece_comes_as_soon_as_it_is_whole(tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["byte"].encode_batch(["a河b"])[0].tolist()
    taken: list[int] = []
    stream = pieces(tokenizers["byte"], (taken.append(number) or number for number in ids))
    assert [(piece, len(taken)) for piece in stream] == [("a", 1), ("河", 4), ("b", 5)]


def test_bytes_that_are_no_letter_hold_nothing_up(tokenizers: dict[str, Tokenizer]) -> None:
    tokenizer = tokenizers["byte"]
    whole = tokenizer.encode_batch(["河"])[0].tolist()
    ids = [whole[0]] * 8 + whole + whole
    shown = "".join(pieces(tokenizer, iter(ids)))
    assert shown.startswith("\N{REPLACEMENT CHARACTER}" * 5) and shown.endswith("河")


def test_the_oldest_turns_leave_when_there_is_no_room(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    config = load("chat", {"model": str(folder), "max_seq_len": "30", "prompt_template": "Q{prompt}A"})
    writer = Writer(loading.load_trained(config, folder, loading.writing_of(config, 1)), config)
    turns = [("user", "first"), ("assistant", "yes"), ("user", "second"), ("assistant", "no"), ("user", "third")]
    seen = writer.trained.tokenizer.decode(writer._fitted(turns, None))
    assert "first" not in seen and "second" in seen and "third" in seen
    assert capsys.readouterr().err == ""
    cut = writer._fitted([("user", "x" * 99)], None)
    assert "longer than --max_seq_len=30 tokens and was cut" in capsys.readouterr().err
    assert len(cut) == 30 and cut[-1] == writer.trained.tokenizer.eos_id


@pytest.mark.parametrize("longest", [1, 7, 30, 100, 333, 5000])
def test_the_newest_turns_that_fit_are_found_without_encoding_all(
    tokenizers: dict[str, Tokenizer], monkeypatch: pytest.MonkeyPatch, longest: int
) -> None:
    tokenizer, template = tokenizers["byte"], Template(turns=True)
    turns: list[Turn] = [turn for n in range(200) for turn in ((USER, "q" * (n % 7 + 1)), ("assistant", "a" * (n % 5)))]
    turns.append((USER, "newest"))
    sizes = []
    encode = tokenizer.encode_batch

    def counted(texts: list[str], special: bool = False) -> Any:
        sizes.append(sum(map(len, texts)))
        return encode(texts, special=special)

    monkeypatch.setattr(tokenizer, "encode_batch", counted)
    for first in (0, 2, 300, 390, 396, 398, 400):
        sizes.clear()
        found = newest_turns(tokenizer, template, turns[first:], None, longest)
        begins = [
            encode([template.prompt(turns[at:], None)], special=True)[0].tolist() for at in range(first, len(turns), 2)
        ]
        assert found == next((ids for ids in begins if len(ids) <= longest), begins[-1])
        assert sum(sizes) <= 12 * max(longest, len(begins[-1]) + 30), "the whole is thousands of letters"


def test_a_program_is_told_that_a_question_was_cut(
    folder: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO(f'{{"text": "{"x" * 99}"}}\n{{"text": "x"}}\n'))
    chat(load("chat", {"model": str(folder), "max_seq_len": "30", "max_new_tokens": "3", "json": "True"}))
    printed = capsys.readouterr()
    told = [json.loads(line) for line in printed.out.splitlines()]
    cut = {"note": "the answer was cut at --max_new_tokens=3"}
    assert [record for record in told if "note" in record] == [told[1], cut, cut] and printed.err == ""
    assert "longer than --max_seq_len=30 tokens and was cut" in told[1]["note"]


def command(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "train_low_mem.py"), "chat", f"--model={folder}", "--max_new_tokens=5", *flags]


ENVIRONMENT = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONIOENCODING": "utf8"}


def test_piped_questions_are_answered_and_nothing_else_is_printed(folder: Path, tmp_path: Path) -> None:
    done = subprocess.run(
        command(folder), input="hello\n河水\n/exit\n", capture_output=True, text=True, encoding="utf8",
        env=ENVIRONMENT, cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0 and done.stderr == "the answer was cut at --max_new_tokens=5\n" * 2
    config = load("chat", {"model": str(folder), "max_new_tokens": "5"})
    trained = loading.load_trained(config, folder, loading.writing_of(config, 1))
    inputs = [[*trained.tokenizer.encode_batch([text])[0].tolist(), 1] for text in ("hello", "河水")]
    expected = [trained.tokenizer.decode(ids) for ids in trained.answer(inputs, config)]
    assert done.stdout == "".join(f"{text}\n" for text in expected)


@pytest.mark.slow
def test_a_terminal(folder: Path, tmp_path: Path) -> None:
    """The prompt, a command, Ctrl-C at the prompt, and Ctrl-D."""
    near, far = pytest.importorskip("pty").openpty()
    process = subprocess.Popen(command(folder), stdin=far, stdout=far, stderr=far, env=ENVIRONMENT, cwd=tmp_path,
                               start_new_session=True, preexec_fn=_take_terminal(far))  # fmt: skip
    os.close(far)
    seen = _until(near, "> ")
    assert "Ctrl-D leaves" in seen
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
    seen, deadline = b"", time.monotonic() + 100
    while not seen.decode(errors="replace").endswith(end):
        assert time.monotonic() < deadline, seen
        seen += os.read(near, 4096)
    return seen.decode(errors="replace")


def test_a_question_put_again_is_drawn_anew(folder: Path) -> None:
    config = load("chat", {"model": str(folder), "temperature": "3", "max_new_tokens": "9"})
    trained = loading.load_trained(config, folder, loading.writing_of(config, 1))
    sessions = [Session(Writer(trained, config)) for _ in "ab"]
    for session in sessions:
        for _ in range(2):
            session.ask("hello", lambda piece: None)
    answers = [[text for role, text in session.turns if role == "assistant"] for session in sessions]
    assert answers[0] == answers[1] and answers[0][0] != answers[0][1]


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
    trained = loading.load_trained(config, folder, loading.writing_of(config, 1))
    session = Session(Writer(trained, config), adapters=trained.adapters)
    answers = {}
    for name in ("a", "b", "none", "a"):
        assert session.command(f"/adapter {name}") == f"{name} is on"
        session.ask("hello", lambda piece: None)
        answers.setdefault(name, set()).add(session.turns[-1][1])
    assert [len(texts) for texts in answers.values()] == [1, 1, 1] and len(set.union(*answers.values())) == 3
    assert "c, is not loaded; there are: a, b" in session.command("/adapter c")
    assert "no adapters were loaded" in Session(Parrot()).command("/adapter a")
    for command_name, do in (("generate", generate), ("evaluate", evaluate)):
        several = load(command_name, {name: flags[name] for name in ("model", "adapter")} | (
            {"input": "x"} if command_name == "generate" else {}))  # fmt: skip
        with pytest.raises(UserError, match="only one can be on here"):
            do(several)


def test_tokens_that_end_one_letter_and_begin_the_next_wait_for_it(tokenizers: dict[str, Tokenizer]) -> None:
    ids = tokenizers["bpe"].encode_batch(["石春嗨"])[0].tolist()
    assert "".join(pieces(tokenizers["bpe"], iter(ids))) == "石春嗨"


def test_a_program_talks_in_json_and_gives_no_commands(tmp_path: Path) -> None:
    out = io.StringIO()
    place = tmp_path / "saved"
    asked = [
        '{"text": "one two"}',
        "no json",
        "[1]",
        '{"text": 5}',
        json.dumps({"text": f"/save {place}"}),
        '{"reset": true}',
    ]
    session = Session(Parrot())
    converse(session, iter(asked), out)
    told = [json.loads(line) for line in out.getvalue().splitlines()]
    assert told[0] == {"ready": True} and [record for record in told if record.get("end")] == [{"end": True}] * 2
    assert "".join(record.get("piece", "") for record in told).startswith("one two")
    assert not place.exists() and session.turns == []


def test_half_a_surrogate_pair_ends_no_conversation() -> None:
    session, out = Session(Parrot()), io.StringIO()
    converse(session, iter(['{"text": "one \\ud83d two"}', '{"text": "three"}']), out)
    assert session.turns[0] == (USER, "one ? two") and session.turns[2] == (USER, "three")


@pytest.mark.parametrize("word", ["/q", "/quit", "/exit", "/bye", "退出", "exit", "QUIT"])
def test_words_that_leave(word: str) -> None:
    assert "later" not in talk([word, "later"], Session(Parrot()))


def test_a_word_in_a_file_is_a_question() -> None:
    out = io.StringIO()
    run(Session(Parrot()), iter(["exit", "more"]), out, is_terminal=False)
    assert out.getvalue().count("\n") == 2 and "more" in out.getvalue()


def test_an_empty_answer_is_told_on_a_terminal_alone() -> None:
    session = Session(lambda turns, system: iter(()))
    assert NOTHING in talk(["hello"], session)
    out = io.StringIO()
    run(session, iter(["hello"]), out, is_terminal=False)
    assert out.getvalue() == "\n"


@pytest.mark.parametrize(
    ("turns", "objective", "told"),
    [
        (True, "pairs", "it has learnt conversations"),
        (False, "pairs", "it has learnt single questions"),
        (False, "span", "has only been pretrained"),
    ],
)
def test_the_greeting_says_what_is_remembered(tmp_path: Path, turns: bool, objective: str, told: str) -> None:
    folder = create_run(tmp_path, "run", "finetune", objective=objective)
    trained = cast(Any, SimpleNamespace(folder=folder, template=Template(turns=turns)))
    assert told in " ".join(greeting(trained, "auto", 9 if turns else 0))
