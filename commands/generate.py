"""`generate`: one prompt answered on the screen, or a file of them into another.

Prompts are taken by windows. Inside a window they are answered longest first, as many at once as the budget allows, and
then written in the order of the input. A run that was killed continues where its output ends: beside an unfinished output
lies a file that says what it was begun with.
"""

from __future__ import annotations

import json
import os
import secrets
import sys
from collections.abc import Iterator, Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, TextIO

from commands.answering import check_one_process, find_answering
from commands.labelling import LEAST_TEXT, Labeller, labelling_settings
from commands.new_folder import holding_output
from commands.text_reader import ROUNDED, text_columns
from data.sources.files import find, sources_fingerprint
from data.sources.lines import BadRows
from data.sources.prompts import PROMPT, Prompt, prompts_in_child
from formats import KIND_BY_SUFFIX
from language import say
from limits import ANSWERED_TOGETHER
from memory.answers import AnswerBatch
from memory.monitor import watched
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from settings.declared import Config, DataConfig
from settings.errors import UserError, reason_of, refuse
from settings.fields import AUTO, counted, is_encodable
from settings.tasks import MODEL_HEADS
from storage import fingerprint, open_plain, read_text, write_text
from training.checkpoints.runs import check_writable, only_pretrained
from training.evaluation.prompt_parts import was_cut
from training.loaded_model import WAITING_BYTES, LoadedModel, load_model
from training.report.log_files import plain
from training.report.progress import Progress
from training.saved_model import SavedModel
from training.setup.answer_list import answer_sources

WINDOW_BATCHES = 8  # batches of one window
LABELLED_ROWS = 256  # texts of one window
ANSWER, REFERENCE = "response", "reference"
ANSWERS, SCORES = "responses", "log_probabilities"  # of several answers, best first
PROMPT_COLUMNS = ("prompt_column", "text_column", "history_column", "messages_column")  # settings
STANDARD_INPUT = "-"
TYPED = "--input"  # the place of a prompt that is the flag's own text: its answer keeps its line ends on the screen
FORMAT = 4  # raise it when the same prompts would give other rows
UNFINISHED = ".unfinished"  # beside an output that is still being written


@dataclass
class Answered:
    """What a prompt got.

    Args:
        columns: for a JSON line.
        shown: lines for the screen.
        is_cut: whether the answer was ended by the longest length.
    """

    columns: dict[str, Any]
    shown: list[str]
    is_cut: bool = False


@holding_output
def generate(config: Config) -> None:
    """Answer one text on the screen, or a file of prompts as JSON lines; a head over labels answers by its labels.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold a single answer.
    """
    check_one_process("generate")
    given = config.answer.input
    if given is None:
        raise UserError(say('--input = none, a prompt is needed; give a text (--input="Hello") or a file of prompts'))
    bad_rows = BadRows(config.data.skip_bad_rows)
    model, answering = answering_model(config)
    config = answering.config
    is_of_files = check_input(given)
    output = None if config.answer.output is None else Output(config, model, given)
    if only_pretrained(model.top) and "<extra_id_" not in given:
        hint = say(
            "this model has only been pretrained: it fills gaps such as <extra_id_0>; finetune it to get answers"
        )
        Progress(1, stream=sys.stderr).note(hint)
    trained = load_model(config, model, answering.least, answering.tree, is_of_files)
    least_parts = answering.load(trained)
    max_bytes = trained.reserve_reading(least_parts) if is_of_files else 0
    prompts = prompts_of(answering.columns, given, bad_rows, max_bytes, () if output is None else None)
    if output is not None and output.rows:
        answered = counted(output.rows, "answer")
        Progress(1).note(
            say("{file} already holds {answers}; continuing after them", file=output.path, answers=answered)
        )
        next(islice(prompts, output.rows, output.rows), None)
    dtypes = trained.blockwise.model.embedding.dtype, trained.blockwise.weight_store.compute_dtype
    storage, compute = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    told = "{model}: weights in {storage}, computed in {compute}"
    Progress(1, stream=sys.stderr).note(say(told, model=trained.folder, storage=storage, compute=compute))
    written = cut = 0
    with watched(trained.monitor, "--generate_batch_size=1"):
        with nullcontext() if output is None else output:
            for prompt, answer in answering.answers(prompts):
                written, cut = written + 1, cut + answer.is_cut
                if output is not None:
                    output.write(prompt, answer.columns)
                    continue
                for line in answer.shown:
                    print(line if prompt.place == TYPED else " ".join(line.splitlines()), flush=True)
        if output is not None:
            told = "{file}: {answers}"
            Progress(1).note(say(told, file=output.path, answers=counted(output.rows, "answer")))
        if cut:  # beside the answers, which a script may read from standard output
            Progress(1, stream=sys.stderr).note(cut_note(cut, written, config))
        for note in [*answering.notes(), *_left_out(bad_rows)]:
            Progress(1, stream=sys.stdout if output else sys.stderr).note(note)


def _left_out(bad_rows: BadRows) -> list[str]:
    if not bad_rows.count:
        return []
    example, rows = bad_rows.examples[0], counted(bad_rows.count, "row")
    return [say("not answered: {rows}, such as {example}", rows=rows, example=example)]


def cut_note(cut: int, of: int, config: Config) -> str:
    """What is said of answers that were ended by the longest length."""
    limit, all_answers = config.generate.max_new_tokens, counted(of, "answer")
    return say("{cut} of {answers} cut at --max_new_tokens={limit}", cut=cut, answers=all_answers, limit=limit)


def answering_model(config: Config) -> tuple[SavedModel, Written | Labelled]:
    """The model that is named, and how it answers.

    Raises:
        UserError: there is none, or settings are named that are not for it.
    """
    own_columns = config.data
    config, model, tree = find_answering(config, "generate", PROMPT_COLUMNS)
    if MODEL_HEADS[model.shape.head].writes_text:
        return model, Written(config, [config.data, own_columns], tree)
    return model, Labelled(config, model)


class Written:
    """Answers that a model writes token by token, of which `num_answers` are given.

    Args:
        columns: in which prompts are looked for, first choice first.
        tree: the answers that there are; None: any.
    """

    def __init__(self, config: Config, columns: Sequence[DataConfig], tree: AnswerTree | None) -> None:
        self.config = config
        self.columns = columns
        self.tree = tree
        rows = config.answer.generate_batch_size
        self.least = AnswerBatch.by(config.generate, 1 if rows == AUTO else int(rows), config.data.max_seq_len)

    def load(self, trained: LoadedModel) -> dict[str, int]:
        """Take the model that answers; returns what the least batch takes: component -> bytes."""
        self.trained = trained
        self.encoder = Encoder(trained, self.config)
        return trained.predict(self.least)

    def answers(self, prompts: Iterator[Prompt]) -> Iterator[tuple[Prompt, Answered]]:
        """Answer prompts in windows, in their order; a blank prompt has a blank answer.

        Of a single answer the log-probability is not computed, and 0.

        Memory: one window of prompts, and one batch of answers being written.
        """
        trained, config = self.trained, self.config
        asked = config.answer.generate_batch_size
        # of the longest prompt that may come; those that do come decide what is answered at once
        longest = AnswerBatch.by(config.generate, ANSWERED_TOGETHER, config.data.max_seq_len)
        size = max(1, trained.answer_budget.rows(longest) if asked == AUTO else int(asked)) * WINDOW_BATCHES
        while window := _window(prompts, 1 if _is_waited_for(config) else size):
            inputs = [self.encoder.encode(prompt) for prompt in window if prompt.text]
            written = iter(trained.writer(config).ranked(inputs, config.answer.num_answers))
            for prompt in window:
                yield prompt, self._answered(next(written) if prompt.text else [ScoredAnswer([], 0.0)], prompt)

    def _answered(self, best: list[ScoredAnswer], prompt: Prompt) -> Answered:
        tokenizer = self.trained.tokenizer
        texts = [tokenizer.decode_answer(answer.tokens) for answer in best]
        is_cut = bool(prompt.text) and was_cut(best[0].tokens, self.config.generate, tokenizer.eos_id)
        if self.config.answer.num_answers == 1:
            return Answered({ANSWER: texts[0]}, texts, is_cut)
        scores = [answer.log_probability for answer in best]
        columns = {ANSWER: texts[0], ANSWERS: texts, SCORES: [round(score, 6) for score in scores]}
        shown = [f"{score:.4f}\t{text}" for text, score in zip(texts, scores, strict=True)]
        return Answered(columns, shown, is_cut)

    def notes(self) -> list[str]:
        """What the user should know in the end."""
        return _truncated(self.config, self.encoder.cut, self.encoder.first_cut)


class Labelled:
    """Answers of a head over labels: the class of a text, its number, or a label for each of its words or letters.

    Raises:
        UserError: settings are named that are for text.
    """

    tree = None
    least = LEAST_TEXT

    def __init__(self, config: Config, model: SavedModel) -> None:
        self.config = labelling_settings(config, model)
        self.columns = text_columns(self.config, model)
        self.cut = 0
        self.first_cut = ""

    def load(self, trained: LoadedModel) -> dict[str, int]:
        """Take the model that answers; returns what the shortest texts take: component -> bytes."""
        self.labeller = Labeller.of(trained, self.config)
        return self.labeller.predict(ROUNDED)

    def answers(self, prompts: Iterator[Prompt]) -> Iterator[tuple[Prompt, Answered]]:
        """Label texts in windows, in their order; a blank text has no label."""
        while window := _window(prompts, 1 if _is_waited_for(self.config) else LABELLED_ROWS):
            texts = [self.labeller.encode(prompt.text) for prompt in window if prompt.text.strip()]
            answers = iter(self.labeller.answers(texts))
            encoded = iter(texts)
            for prompt in window:
                if not prompt.text.strip():
                    yield prompt, Answered({self.labeller.column: None}, [""])
                    continue
                if next(encoded).is_cut:
                    self.cut, self.first_cut = self.cut + 1, self.first_cut or prompt.place
                answer = next(answers)
                yield prompt, Answered(answer.columns, [answer.shown])

    def notes(self) -> list[str]:
        """What the user should know in the end."""
        return _truncated(self.config, self.cut, self.first_cut)


def _is_waited_for(config: Config) -> bool:
    """Whether somebody who writes to standard input waits for each answer."""
    return config.answer.input == STANDARD_INPUT and config.answer.output is None


def _truncated(config: Config, count: int, first: str) -> list[str]:
    if not count:
        return []
    return [
        say(
            "truncated to --max_seq_len={longest}: {prompts}, first {first}",
            longest=config.data.max_seq_len,
            prompts=counted(count, "prompt"),
            first=first,
        )
    ]


def _window(prompts: Iterator[Prompt], rows: int) -> list[Prompt]:
    """The next prompts: so many, or fewer where they and their columns are large."""
    window, size = list[Prompt](), 0
    for prompt in prompts:
        window.append(prompt)
        size += prompt.num_bytes()
        if len(window) == rows or size >= WAITING_BYTES:
            break
    return window


@dataclass
class Encoder:
    """Turns prompts into the model's input, and counts those that are too long."""

    trained: LoadedModel
    config: Config
    cut: int = 0
    first_cut: str = field(default="")

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt in the model's template, with the end token; those behind `max_seq_len` are left out."""
        longest = self.config.data.max_seq_len
        template = self.trained.template
        text = template.prompt(prompt.turns)
        (encoded,) = self.trained.tokenizer.encode_prompts([text], is_chat=bool(template.jinja))
        ids = encoded.tolist()
        if self.config.generate.split_prompts and len(prompt.turns) == 1:
            return [*ids, self.trained.tokenizer.eos_id]  # its parts are short enough
        if len(ids) >= longest:
            self.cut, self.first_cut = self.cut + 1, self.first_cut or prompt.place
        return [*ids[: longest - 1], self.trained.tokenizer.eos_id]


def check_input(given: str) -> bool:
    """Whether the input names files; else it is a text or stands for standard input.

    Raises:
        UserError: it can only be meant as a file, and there is none.
    """
    if given == STANDARD_INPUT:
        return False
    if is_file(given):
        return bool(find(given, "--input"))
    # one word with the ending of a file can only be meant as one
    if len(given.split()) == 1 and PurePath(given.strip()).suffix.lower() in KIND_BY_SUFFIX:
        raise UserError(
            say('--input = {given}, no such file; give a file that exists, or a text (--input="Hello")', given=given)
        )
    return False


def prompts_of(
    data: Sequence[DataConfig], given: str, bad_rows: BadRows, max_bytes: int, keeps: Sequence[str] | None
) -> Iterator[Prompt]:
    """The prompts of a file, the lines of standard input, or the text itself where no such file exists.

    Args:
        given: which `check_input` has let pass. max_bytes: as of `prompts_in_child`. data, keeps: as of `read_prompts`.
    """
    if given == STANDARD_INPUT:
        return _typed(sys.stdin, bad_rows)
    if not is_file(given):
        return iter([Prompt(TYPED, given, {PROMPT: given})])
    return prompts_in_child(find(given, "--input"), data, bad_rows, max_bytes, keeps)


def _typed(lines: TextIO, bad_rows: BadRows) -> Iterator[Prompt]:
    """A prompt a line, as they come."""
    try:
        for number, line in enumerate(lines, 1):
            line.encode("utf8")  # in the locale C, bytes that are not UTF-8 come as halves of surrogate pairs
            text, place = line.strip(), say("line {number}", number=number)
            if not text:
                bad_rows.note(say("standard input"), place, say("is empty"))
            yield Prompt(say("standard input, {place}", place=place), text, {PROMPT: text})
    except UnicodeError:
        raise UserError(say("standard input, is not UTF-8; convert it, or set LANG to a UTF-8 locale")) from None


def is_file(given: str) -> bool:
    """Whether the input names a file or folder; a long text names none."""
    with suppress(OSError, ValueError):
        return os.path.exists(given)
    return False


class Output:
    """A JSONL file of answers that a second run can continue with; a context while it is written.

    Args:
        model: it, input and settings must be those that the output was begun with.
    Raises:
        UserError: it exists and is complete, belongs to other settings, is what is read, or cannot be written.
    """

    def __init__(self, config: Config, model: SavedModel, given: str) -> None:
        self.path = Path(str(config.answer.output))
        self.marker = self.path.with_name(self.path.name + UNFINISHED)
        self._identity = _identity(config, model, given)
        self.rows = 0
        self._file: TextIO | None = None
        sources = [source.path for source in find(given, "--input")] if is_file(given) else []
        if self.path.exists() and any(isinstance(path, Path) and path.samefile(self.path) for path in sources):
            raise UserError(say("--output = {path}, is a file that is read; choose another one", path=self.path))
        refuse(check_writable("output", self.path.parent))
        if self.path.exists() and not config.run.overwrite:
            self._take_up()

    def __enter__(self) -> Output:
        return self

    def __exit__(self, kind: object, *error: object) -> None:
        if kind is None:
            self._open()  # it is there, also without rows
        if self._file is not None:
            self._file.close()
        if kind is KeyboardInterrupt:
            told = "interrupted; the same command continues after {rows}"
            raise KeyboardInterrupt(say(told, rows=counted(self.rows, "row"))) from None
        if kind is None:  # nothing is missing
            self.marker.unlink(missing_ok=True)

    def _open(self) -> TextIO:
        """The file to append to, which is made with its first row: a command that fails before leaves none behind."""
        if self._file is None:
            try:
                if not self.rows:
                    write_text(self.marker, self._identity + "\n")
                self._file = self.path.open("a" if self.rows else "w", encoding="utf8")
            except OSError as error:
                told = "--output = {path}, cannot be written: {reason}; choose another file"
                raise UserError(say(told, path=self.path, reason=reason_of(error))) from None
        return self._file

    def _take_up(self) -> None:
        """Cut a torn last line off, and count the others; a file without rows is begun anew."""
        marked = self.marker.is_file()
        rows, end = _whole_lines(self.path) if marked else (0, 0)
        if (marked and not rows) or not self.path.stat().st_size:
            return
        if not marked or read_text(self.marker).strip() != self._identity:
            told = "--output = {path}, was begun with another model, input or settings; choose another file, or begin anew with --overwrite=True"
            if not marked:
                told = (
                    "--output = {path}, holds answers already; choose another file, or replace it with --overwrite=True"
                )
            raise UserError(say(told, path=self.path))
        os.truncate(self.path, end)
        self.rows = rows

    def write(self, prompt: Prompt, answer: dict[str, Any]) -> None:
        """Append one row: its columns, and those of the answer; what was there under their names is the reference."""
        main, row = next(iter(answer)), dict[str, Any]()
        for name, value in prompt.columns.items():
            if name in answer:
                name = REFERENCE if name == main and REFERENCE not in prompt.columns else f"{name}_{REFERENCE}"
            row[name] = value
        row = {**plain(row), **answer}
        line = json.dumps(row, ensure_ascii=False)
        file = self._open()
        file.write((line if is_encodable(line) else json.dumps(row)) + "\n")
        file.flush()
        self.rows += 1


def _whole_lines(path: Path) -> tuple[int, int]:
    """The lines of a file that have their end, and the bytes of these."""
    count = end = 0
    with open_plain(path) as file:
        for line in file:
            if not line.endswith(b"\n"):
                break
            count += 1
            end += len(line)
    return count, end


def read_marks(model: SavedModel, given: str) -> list[Any]:
    """Marks of the weights, and of what is read, by which another model or input is noticed."""
    files = [path for folder in model.folders for path in sorted(folder.glob("*.safetensors"))]
    weights = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return [weights, sources_fingerprint(find(given, "--input")) if is_file(given) else given]


def _identity(config: Config, model: SavedModel, given: str) -> str:
    """Everything that shapes the answers. How bad rows and long prompts are met is not in it: changing that is how one goes on."""
    # nobody can read standard input again: such an output is never continued
    read = read_marks(model, secrets.token_hex(8) if given == STANDARD_INPUT else given)
    data = config.data
    settings = [config.generate.__dict__, config.run.seed, data.max_seq_len, data.prompt_template, data.source_prefix]
    listed = answer_sources(config.answer.answers, model)
    answers: list[Any] = [sources_fingerprint(listed), data.response_column] if listed else []
    answers += [config.answer.num_answers] if config.answer.num_answers > 1 else []
    answers += [data.prepare_text] if data.prepare_text != "none" else []
    return fingerprint([FORMAT, *read, settings, [data.prompt_column, data.text_column], *answers])
