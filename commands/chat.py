"""`chat`: questions line by line in the terminal, with answers shown as they are written.

A conversation is a list of turns, put into the encoder by the template that the model was finetuned with; where it
grows longer than the model reads, the oldest turns leave first. Lines that begin with a slash are commands. Ctrl-C
stops an answer, Ctrl-D leaves. Where standard input is no terminal, questions are read from it and answers alone are
printed.
"""

from __future__ import annotations

import contextlib
import json
import shlex
import sys
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, TextIO

from commands.answering import find_answering
from data.text.templates import ASSISTANT, SYSTEM, USER, Template, Turn
from data.tokenizers.pieces import pieces
from data.tokenizers.tokenizer import Tokenizer
from memory.answers import AnswerBatch
from memory.monitor import watched
from model.decoding.generation import stream
from settings.declared import Config
from settings.errors import DoesNotFit, UserError, reason_of
from settings.fields import AUTO, counted
from settings.program import program
from support.language import join, say
from support.storage import atomic_file
from training.checkpoints.runs import only_pretrained
from training.evaluation.answers import new_decoder
from training.loaded_model import LoadedModel
from training.report.progress import Progress
from training.setup.adapters import AdapterSet

ALL_TURNS = 1000  # The oldest leave where they do not fit.
HELP = """\
/reset      clear the conversation
/save FILE  save the conversation as one line of JSON
/adapter X  activate the adapter of that name (none: base model only)
/help       show this help
/exit       quit (also /q, /quit, exit, quit, 退出, or Ctrl-D); Ctrl-C stops an answer"""
LEAVING = ("/exit", "/q", "/quit", "/bye")
LEAVING_WORDS = ("exit", "quit", "退出", "结束", "再见")  # on a terminal; in a file they may be questions
NOTHING = "(no answer: the model ended it at once)"


def chat(config: Config) -> None:
    """Talk until the user leaves.

    Raises:
        UserError: the model is not usable. DoesNotFit: the budget does not hold the model, or the answer to a question
            that does not come from a terminal.
    """
    answering = find_answering(config, "chat")
    config = answering.config
    trained = answering.load()
    history_turns = config.chat.history_turns
    if history_turns == AUTO:
        history_turns = ALL_TURNS if trained.template.has_turns else 0
    writer = Writer(trained, config)
    session = Session(writer, config.chat.system_prompt, int(history_turns), trained.adapters, writer.remark)
    with watched(trained.monitor):
        if config.plan.json:
            writer.note = lambda text: _send(sys.stdout, {"note": text})
            converse(session, sys.stdin, sys.stdout)
            return
        is_terminal = sys.stdin.isatty()
        if is_terminal:
            with contextlib.suppress(ImportError):  # Some systems have none.
                import readline  # noqa: F401  # gives input() arrow keys, and the right width of Chinese letters
            for text in greeting(trained, config.chat.history_turns, int(history_turns)):
                Progress(1).note(text)
        # This iterator may be asked again after an interrupt, as a generator may not.
        run(session, iter(partial(_line, "> " if is_terminal else ""), None), sys.stdout, is_terminal)


def greeting(trained: LoadedModel, history_turns: int | str, turns: int) -> list[str]:
    """What is said before the first question: whose answers these are, and what is remembered."""
    notes: list[str] = [say("{folder}; /help lists commands, /q or Ctrl-D quits", folder=trained.folder)]
    if only_pretrained(trained.folder):
        command = (
            f"{program()} train --is_finetune=True --finetune_from={shlex.quote(str(trained.folder))} "
            f"--train_file=pairs.jsonl"
        )
        notes.append(
            say(
                "this model has only been pretrained: it fills gaps such as <extra_id_0> in a text but cannot answer "
                "questions; finetune it first: {command}",
                command=command,
            )
        )
    elif trained.template.has_turns and turns:
        notes.append(say("trained on conversations: it remembers earlier questions and answers; /reset clears them"))
    elif history_turns == AUTO:
        notes.append(
            say(
                "trained on single questions: each is answered without the earlier ones; --history_turns=3 includes "
                "them"
            )
        )
    return notes


def run(session: Session, lines: Iterator[str], out: TextIO, is_terminal: bool = True) -> None:
    """Answer each line until there are no more, or one says /exit.

    Args:
        lines: raises KeyboardInterrupt where the user interrupts; on a terminal that begins a new line.
    """
    leaving = (*LEAVING, *LEAVING_WORDS) if is_terminal else LEAVING
    while True:
        try:
            text = next(lines, LEAVING[0]).strip()
        except KeyboardInterrupt:
            if not is_terminal:
                raise
            print(file=out, flush=True)
            continue
        if text.lower() in leaving:
            return
        if text.startswith("/"):
            print(session.command(text), file=out, flush=True)
        elif text:
            try:
                answer = session.ask(text, lambda piece: print(piece, end="", file=out, flush=True))
            except DoesNotFit as error:
                if not is_terminal:
                    raise
                print(error, file=out, flush=True)
                continue
            print(say(NOTHING) if is_terminal and not answer.strip() else "", file=out, flush=True)
            if remark := session.remark():
                _note(remark)


def converse(session: Session, lines: Iterable[str], out: TextIO) -> None:
    """Talk with a program: one JSON object a line, both ways. Lines with a slash are no commands here.

    Args:
        lines: `{"text": question}`, or `{"reset": true}` to begin anew; others are passed over.
        out: `{"ready": true}` first; of each question what is to be known of it, `{"note": text}`, the pieces of its
            answer, `{"piece": text}`, what is to be known of that, and `{"end": true}`.
    """
    send = partial(_send, out)
    send({"ready": True})
    for line in lines:
        request: Any = None
        with contextlib.suppress(ValueError):
            request = json.loads(line)
        if not isinstance(request, dict):
            continue
        if request.get("reset"):
            session.command("/reset")
        elif isinstance(request.get("text"), str):
            try:
                session.ask(request["text"], lambda piece: send({"piece": piece}))
                remark = session.remark()
            except DoesNotFit as error:
                remark = reason_of(error)
            if remark:
                send({"note": remark})
            send({"end": True})


def _send(out: TextIO, record: dict[str, object]) -> None:
    print(json.dumps(record, ensure_ascii=False), file=out, flush=True)


def _note(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _line(prompt: str) -> str | None:
    """What the user types, or the next line of standard input; None at the end."""
    try:
        return input(prompt)
    except EOFError:
        if prompt:
            print()
        return None
    except UnicodeDecodeError:
        raise UserError("standard input, is not UTF-8; convert it, or set LANG to a UTF-8 locale") from None


@dataclass
class Session:
    """A conversation.

    Args:
        write: gives the pieces of the answer to turns; it may be stopped by KeyboardInterrupt at any piece.
        history_turns: earlier questions with their answers that are shown to the model.
        adapters: those that were loaded.
        remark: what is to be known of the last answer; empty: nothing.
    """

    write: Callable[[list[Turn], str | None], Iterator[str]]
    system: str | None = None
    history_turns: int = 0
    adapters: AdapterSet | None = None
    remark: Callable[[], str] = str
    turns: list[Turn] = field(default_factory=list)
    _saved: dict[Path, bytes] = field(default_factory=dict)  # file -> the line in it that is this conversation

    def ask(self, text: str, show: Callable[[str], None]) -> str:
        """Answer a question piece by piece, and remember both. An answer that is stopped is remembered as far as it
        went.
        """
        text = text.encode("utf8", "replace").decode("utf8")  # No tokens can be made of half a surrogate pair.
        earlier = self.turns[max(0, len(self.turns) - 2 * self.history_turns) :]
        answer = ""
        try:
            for piece in self.write([*earlier, (USER, text)], self.system):
                answer += piece
                show(piece)
        except KeyboardInterrupt:
            show(" ...")
        self.turns += [(USER, text), (ASSISTANT, answer)]
        return answer

    def command(self, line: str) -> str:
        """Do what a line with a slash says; returns what to tell the user."""
        commands = {
            "/reset": self._reset,
            "/save": self._save,
            "/adapter": self._change_adapter,
            "/help": lambda _: say(HELP),
        }
        name, _, argument = line.partition(" ")
        if name not in commands:
            return say("{line} is not a command\n{help}", line=line, help=say(HELP))
        return commands[name](argument.strip())

    def _reset(self, _: str) -> str:
        self.turns.clear()
        self._saved.clear()
        return say("the conversation was reset")

    def _change_adapter(self, name: str) -> str:
        if self.adapters is None:
            return say("no adapters were loaded; name them with --adapter")
        if not name:
            return say("/adapter needs a name: {names}, or none", names=join(", ", self.adapters.by_name))
        try:
            self.adapters.set_adapter(None if name == "none" else name)
        except UserError as error:
            return reason_of(error)
        return say("{name} is active", name=name)

    def _save(self, name: str) -> str:
        if not name:
            return say("/save needs a file name")
        if not self.turns:
            return say("there is nothing to save yet")
        spoken = ([(SYSTEM, self.system)] if self.system else []) + self.turns
        line = json.dumps({"messages": [{"role": role, "content": text} for role, text in spoken]}, ensure_ascii=False)
        try:
            self._write(Path(name).expanduser().resolve(), f"{line}\n".encode())
        except OSError as error:
            return say("{file} cannot be written: {reason}", file=name, reason=reason_of(error))
        questions = counted(len(self.turns) // 2, "question")
        return say("conversation saved to {file}: {questions} with answers", file=name, questions=questions)

    def _write(self, path: Path, line: bytes) -> None:
        """Put a line in the place of the one that this conversation has in the file; where it has none, after all
        others.

        Memory: the file, the second time.
        """
        earlier = self._saved.get(path)
        lines = [] if earlier is None or not path.is_file() else path.read_bytes().splitlines(keepends=True)
        if earlier in lines:
            lines[lines.index(earlier)] = line
            with atomic_file(path) as whole:
                whole.write_bytes(b"".join(lines))
        else:
            with path.open("ab") as file:
                file.write(line)
        self._saved[path] = line


@dataclass
class Writer:
    """Writes answers with a trained model.

    Args:
        note: tells the user what is to be known of a question.
    """

    trained: LoadedModel
    config: Config
    note: Callable[[str], None] = _note
    num_questions: int = 0
    num_tokens: int = 0  # The last answer has so many.

    def __call__(self, turns: list[Turn], system: str | None) -> Iterator[str]:
        """The pieces of the answer to the newest turn; where tokens are drawn, a question put again is answered
        anew.
        """
        seed = self.config.run.seed + self.num_questions
        self.num_questions += 1
        ids = self.fitted(turns, system)
        self.trained.rows_at_once(1, AnswerBatch.by(self.config.generate, 1, len(ids)))
        decoder = new_decoder(self.trained.blockwise, self.config.generate.num_beams)
        tokens = stream(decoder, ids, self.config.generate, seed=seed, tree=self.trained.tree)
        return pieces(self.trained.tokenizer, self._counted(tokens))

    def _counted(self, tokens: Iterator[int]) -> Iterator[int]:
        self.num_tokens = 0
        for token in tokens:
            self.num_tokens += 1
            yield token

    def remark(self) -> str:
        """What is to be known of the last answer once it stands; empty: nothing."""
        limit = self.config.generate.max_new_tokens
        if self.num_tokens < limit:
            return ""
        return say("the answer was cut at --max_new_tokens={limit}", limit=limit)

    def fitted(self, turns: list[Turn], system: str | None) -> list[int]:
        """The turns as token ids; the oldest leave until the others fit, and a question alone is cut."""
        tokenizer = self.trained.tokenizer
        longest = self.config.data.max_seq_len - 1
        ids = newest_turns(tokenizer, self.trained.template, turns, system, longest)
        if len(ids) > longest:
            self.note(
                say("the question is longer than --max_seq_len={longest} tokens and was cut", longest=longest + 1)
            )
        return [*ids[:longest], tokenizer.eos_id]


def newest_turns(
    tokenizer: Tokenizer, template: Template, turns: list[Turn], system: str | None, longest: int
) -> list[int]:
    """As many of the newest turns as have at most `longest` tokens, beginning with a question; at least the newest
    question.

    Args:
        turns: the last is the user's; no instructions among them.
    """

    def encoded(first: int) -> list[int]:
        text = template.prompt(turns[first:], system)
        ids: list[int] = tokenizer.encode_prompts([text], is_chat=bool(template.jinja))[0].tolist()
        return ids

    questions = [index for index, (role, _) in enumerate(turns) if role == USER]
    questions[0] = 0  # An assistant's words before the first question belong to it.
    # The later the first question, the fewer tokens, so that a long conversation is encoded a few times.
    first = bisect_left(questions[:-1], True, key=lambda index: len(encoded(index)) <= longest)
    return encoded(questions[first])
