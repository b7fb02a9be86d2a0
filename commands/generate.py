"""`generate`: one prompt answered on the screen, or a file of them into another.

Prompts are taken by windows. Inside a window they are answered longest first, as many at once as the budget allows, and
then written in the order of the input, a window a part. A run that was killed continues behind its last part.
"""

from __future__ import annotations

import json
import os
import secrets
import shutil
import sys
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import islice
from pathlib import Path, PurePath
from typing import Any, TextIO

from commands.answering import check_one_process, find_answering
from commands.labelling import LEAST_TEXT, Labeller
from commands.new_folder import holding_output
from commands.text_reader import ROUNDED, text_columns, text_settings
from commands.unfinished import UnfinishedFile, tells_how_to_continue
from common.language import say
from common.storage import fingerprint
from data.sources.files import find, sources_fingerprint
from data.sources.formats import KIND_BY_SUFFIX
from data.sources.lines import BadRows
from data.sources.prompts import PROMPT, Prompt, prompts_in_child
from devices.sizes import ANSWERED_TOGETHER
from memory.answers import AnswerBatch
from memory.monitor import watched
from model.decoding.answer_tree import AnswerTree
from model.decoding.beam_search import ScoredAnswer
from settings.declared import AnswerConfig, Config, DataConfig
from settings.errors import UserError
from settings.fields import AUTO, counted, is_encodable
from settings.tasks import MODEL_HEADS
from training.checkpoints.runs import only_pretrained
from training.evaluation.prompt_parts import was_cut
from training.loaded_model import WAITING_BYTES, LoadedModel, load_model, note
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
FORMAT = 5  # raise it when the same prompts would give other rows


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


Window = list[tuple[Prompt, Answered]]


@holding_output
def generate(config: Config) -> None:
    """Answer one text on the screen, or a file of prompts as JSON lines; a head over labels answers by its labels.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold a single answer.
    """
    check_one_process("generate")
    source = config.answer.input
    if source is None:
        raise UserError(say('--input = none, a prompt is needed; give a text (--input="Hello") or a file of prompts'))
    bad_rows = BadRows(config.data.skip_bad_rows)
    model, answering = answering_model(config)
    config = answering.config
    reads_files = check_input(source)
    output = None
    if config.answer.output is not None:
        path = Path(config.answer.output)
        refuse_to_replace_input(path, source)
        data = config.data
        settings = [
            *(data.max_seq_len, data.prompt_template, data.source_prefix, data.prompt_column, data.text_column),
            *(data.response_column, data.prepare_text, config.run.seed, config.answer.num_answers),
            vars(config.generate),
            sources_fingerprint(answer_sources(config.answer.answers, model)),
        ]
        output = UnfinishedFile(path, config.run.overwrite, _identity(model, source, settings), ".jsonl")
    if only_pretrained(model.top) and "<extra_id_" not in source:
        note(say("this model has only been pretrained: it fills gaps such as <extra_id_0>; finetune it to get answers"))
    trained = load_model(config, model, answering.least, answering.tree, reads_files)
    least_parts = answering.load(trained)
    max_bytes = trained.reserve_reading(least_parts) if reads_files else 0
    prompts = prompts_of(answering.columns, source, bad_rows, max_bytes, () if output is None else None)
    progress = Progress(1, stream=sys.stderr if output is None else sys.stdout)
    if output is not None and output.rows:
        answered = counted(output.rows, "answer")
        progress.note(say("{file} already holds {answers}; continuing after them", file=output.path, answers=answered))
        next(islice(prompts, output.rows, output.rows), None)
    dtypes = trained.blockwise.model.embedding.dtype, trained.blockwise.weight_store.compute_dtype
    storage, compute = (str(dtype).removeprefix("torch.") for dtype in dtypes)
    text = "{model}: weights in {storage}, computed in {compute}"
    note(say(text, model=trained.folder, storage=storage, compute=compute))
    written = 0
    cut = 0
    with watched(trained.monitor, "--generate_batch_size=1"):
        with tells_how_to_continue(output):
            for window in answering.windows(prompts):
                written += len(window)
                cut += sum(answer.is_cut for _, answer in window)
                if output is None:
                    _print_answers(window)
                else:
                    with output.next_part(len(window)) as path:
                        path.write_text(
                            "".join(_json_line(prompt, answer) for prompt, answer in window), encoding="utf8"
                        )
        if output is not None:
            output.finish(lambda file: _join(output.paths, file))
            progress.note(say("{file}: {answers}", file=output.path, answers=counted(output.rows, "answer")))
        if cut:  # beside the answers, which a script may read from standard output
            note(cut_note(cut, written, config.generate.max_new_tokens))
        for remark in answering.notes():
            progress.note(remark)
        if bad_rows.count:
            rows = counted(bad_rows.count, "row")
            progress.note(say("not answered: {rows}, such as {example}", rows=rows, example=bad_rows.examples[0]))


def _print_answers(window: Window) -> None:
    for prompt, answer in window:
        for line in answer.shown:
            print(line if prompt.origin == TYPED else " ".join(line.splitlines()), flush=True)


def _json_line(prompt: Prompt, answer: Answered) -> str:
    """The columns of a row and those of its answer; what was there under their names is the reference."""
    main = next(iter(answer.columns))
    row = dict[str, Any]()
    for name, value in prompt.columns.items():
        if name == main and REFERENCE not in prompt.columns:
            name = REFERENCE
        elif name in answer.columns:
            name = f"{name}_{REFERENCE}"
        row[name] = value
    row = {**plain(row), **answer.columns}
    line = json.dumps(row, ensure_ascii=False)
    return (line if is_encodable(line) else json.dumps(row)) + "\n"


def _join(parts: Sequence[Path], file: Path) -> None:
    with file.open("wb") as whole:
        for part in parts:
            with part.open("rb") as piece:
                shutil.copyfileobj(piece, whole)


def cut_note(cut: int, answers: int, max_new_tokens: int) -> str:
    """What is said of answers that were ended by the longest length."""
    all_answers = counted(answers, "answer")
    return say("{cut} of {answers} cut at --max_new_tokens={limit}", cut=cut, answers=all_answers, limit=max_new_tokens)


def answering_model(config: Config) -> tuple[SavedModel, Written | Labelled]:
    """The model that is named, and how it answers.

    Raises:
        UserError: there is none, or settings are named that are not for it.
    """
    named_columns = config.data
    config, model, tree = find_answering(config, "generate", PROMPT_COLUMNS)
    if MODEL_HEADS[model.shape.head].writes_text:
        if config.typed("prepare_text") and config.is_chosen("prepare_text"):  # A file may be that of the training too.
            text = "--{name} = {value}, has no effect on this run"
            note(say(text, name="prepare_text", value=config.data.prepare_text))
        return model, Written(config, [config.data, named_columns], tree)
    config = config.with_saved(text_settings(model, "text_column"))
    return model, Labelled(config, text_columns(config.data, config.given("text_column"), model))


class CutPrompts:
    """How many prompts were longer than the model reads, and the first of them."""

    def __init__(self, longest: int) -> None:
        self.longest = longest
        self.count = 0
        self.first = ""

    def add(self, place: str) -> None:
        self.count += 1
        self.first = self.first or place

    def notes(self) -> list[str]:
        """What the user should know in the end."""
        if not self.count:
            return []
        text = "truncated to --max_seq_len={longest}: {prompts}, first {first}"
        return [say(text, longest=self.longest, prompts=counted(self.count, "prompt"), first=self.first)]


@dataclass
class Written:
    """Answers that a model writes token by token, of which `num_answers` are given.

    Args:
        columns: in which prompts are looked for, first choice first.
        tree: the answers that there are; None: any.
    """

    config: Config
    columns: Sequence[DataConfig]
    tree: AnswerTree | None

    @property
    def least(self) -> AnswerBatch:
        """What the memory has to hold at least."""
        rows = self.config.answer.generate_batch_size
        return AnswerBatch.by(self.config.generate, 1 if rows == AUTO else int(rows), self.config.data.max_seq_len)

    def load(self, trained: LoadedModel) -> dict[str, int]:
        """Take the model that answers; returns what the least batch takes: component -> bytes."""
        self.trained = trained
        self.encoder = Encoder(trained, self.config.data.max_seq_len, bool(self.config.generate.split_prompts))
        return trained.predict(self.least)

    def windows(self, prompts: Iterator[Prompt]) -> Iterator[Window]:
        """Answer prompts in windows, in their order; a blank prompt has a blank answer. Of a single answer the
        log-probability is not computed, and 0.

        Memory: one window of prompts, and one batch of answers being written.
        """
        rows = self.config.answer.generate_batch_size
        if rows == AUTO:
            # Of the longest prompt that may come; those that do come decide what is answered at once.
            longest = AnswerBatch.by(self.config.generate, ANSWERED_TOGETHER, self.config.data.max_seq_len)
            rows = self.trained.answer_budget.rows(longest)
        for window in _windows(prompts, max(1, int(rows)) * WINDOW_BATCHES, self.config.answer):
            inputs = [self.encoder.encode(prompt) for prompt in window if prompt.text]
            ranked = iter(self.trained.writer(self.config).ranked(inputs, self.config.answer.num_answers))
            blank = [ScoredAnswer([], 0.0)]
            yield [(prompt, self._answered(next(ranked) if prompt.text else blank)) for prompt in window]

    def _answered(self, best: list[ScoredAnswer]) -> Answered:
        tokenizer = self.trained.tokenizer
        texts = [tokenizer.decode_answer(answer.tokens) for answer in best]
        is_cut = bool(best[0].tokens) and was_cut(best[0].tokens, self.config.generate, tokenizer.eos_id)
        if self.config.answer.num_answers == 1:
            return Answered({ANSWER: texts[0]}, texts, is_cut)
        scores = [answer.log_probability for answer in best]
        columns = {ANSWER: texts[0], ANSWERS: texts, SCORES: [round(score, 6) for score in scores]}
        shown = [f"{score:.4f}\t{text}" for text, score in zip(texts, scores, strict=True)]
        return Answered(columns, shown, is_cut)

    def notes(self) -> list[str]:
        """What the user should know in the end."""
        return self.encoder.cut.notes()


@dataclass
class Labelled:
    """Answers of a head over labels: the class of a text, its number, or a label for each of its words or letters.

    Args:
        columns: in which texts are looked for, first choice first.
    """

    config: Config
    columns: Sequence[DataConfig]
    tree = None
    least = LEAST_TEXT

    def load(self, trained: LoadedModel) -> dict[str, int]:
        """Take the model that answers; returns what the shortest texts take: component -> bytes."""
        self.labeller = Labeller.of(trained, self.config.data, self.config.answer.generate_batch_size)
        self.cut = CutPrompts(self.config.data.max_seq_len)
        return self.labeller.predict(ROUNDED)

    def windows(self, prompts: Iterator[Prompt]) -> Iterator[Window]:
        """Label texts in windows, in their order; a blank text has no label."""
        for window in _windows(prompts, LABELLED_ROWS, self.config.answer):
            filled = [prompt for prompt in window if prompt.text.strip()]
            texts = [self.labeller.encode(prompt.text, prompt.words) for prompt in filled]
            for prompt, text in zip(filled, texts, strict=True):
                if text.is_cut:
                    self.cut.add(prompt.origin)
            labels = iter(self.labeller.answers(texts))
            answered = Window()
            for prompt in window:
                answer = Answered({self.labeller.column: None}, [""])
                if prompt.text.strip():
                    label = next(labels)
                    answer = Answered(label.columns, [label.line])
                answered.append((prompt, answer))
            yield answered

    def notes(self) -> list[str]:
        """What the user should know in the end."""
        return self.cut.notes()


def _windows(prompts: Iterable[Prompt], rows: int, answer: AnswerConfig) -> Iterator[list[Prompt]]:
    """Prompts in lists of so many, or fewer where they and their columns are large; one by one where somebody waits for
    each.
    """
    is_typed = answer.input == STANDARD_INPUT and answer.output is None
    window = list[Prompt]()
    size = 0
    for prompt in prompts:
        window.append(prompt)
        size += prompt.num_bytes()
        if len(window) == rows or size >= WAITING_BYTES or is_typed:
            yield window
            window = []
            size = 0
    if window:
        yield window


class Encoder:
    """Turns prompts into the model's input, and counts those that are too long.

    Args:
        longest: most tokens of a prompt, with end of text.
        splits: whether a prompt is answered in parts, each of which is short enough.
    """

    def __init__(self, trained: LoadedModel, longest: int, splits: bool) -> None:
        self.trained = trained
        self.splits = splits
        self.cut = CutPrompts(longest)

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt in the model's template, with the end token; those behind `longest` are left out."""
        template = self.trained.template
        text = template.prompt(prompt.turns)
        (encoded,) = self.trained.tokenizer.encode_prompts([text], is_chat=bool(template.jinja))
        ids: list[int] = encoded.tolist()
        if len(ids) >= self.cut.longest and not (self.splits and len(prompt.turns) == 1):
            self.cut.add(prompt.origin)
            ids = ids[: self.cut.longest - 1]
        return [*ids, self.trained.tokenizer.eos_id]


def check_input(source: str) -> bool:
    """Whether the input names files; else it is a text or stands for standard input.

    Raises:
        UserError: it can only be meant as a file, and there is none.
    """
    if is_file(source):
        return bool(find(source, "--input"))
    # One word with the ending of a file can only be meant as one.
    if len(source.split()) == 1 and PurePath(source.strip()).suffix.lower() in KIND_BY_SUFFIX:
        raise UserError(
            say('--input = {given}, no such file; give a file that exists, or a text (--input="Hello")', given=source)
        )
    return False


def prompts_of(
    data: Sequence[DataConfig], source: str, bad_rows: BadRows, max_bytes: int, keeps: Sequence[str] | None
) -> Iterator[Prompt]:
    """The prompts of a file, the lines of standard input, or the text itself where no such file exists.

    Args:
        source: which `check_input` has let pass. max_bytes: as of `prompts_in_child`. data, keeps: as of
            `read_prompts`.
    """
    if source == STANDARD_INPUT:
        return _typed(sys.stdin, bad_rows)
    if not is_file(source):
        return iter([Prompt(TYPED, source, {PROMPT: source})])
    return prompts_in_child(find(source, "--input"), data, bad_rows, max_bytes, keeps)


def _typed(lines: TextIO, bad_rows: BadRows) -> Iterator[Prompt]:
    """A prompt a line, as they come."""
    try:
        for number, line in enumerate(lines, 1):
            line.encode("utf8")  # In the locale C, bytes that are not UTF-8 come as halves of surrogate pairs.
            text = line.strip()
            place = say("line {number}", number=number)
            if not text:
                bad_rows.note(say("standard input"), place, say("is empty"))
            yield Prompt(say("standard input, {place}", place=place), text, {PROMPT: text})
    except UnicodeError:
        raise UserError(say("standard input, is not UTF-8; convert it, or set LANG to a UTF-8 locale")) from None


def is_file(source: str) -> bool:
    """Whether the input names a file or folder; a long text names none."""
    with suppress(OSError, ValueError):
        return source != STANDARD_INPUT and os.path.exists(source)
    return False


def refuse_to_replace_input(output: Path, source: str) -> None:
    """Refuse an output that is one of the files that are read."""
    files = [found.path for found in find(source, "--input")] if is_file(source) else []
    if output.exists() and any(isinstance(path, Path) and path.samefile(output) for path in files):
        raise UserError(say("--output = {path}, is a file that is read; choose another one", path=output))


def read_marks(model: SavedModel, source: str) -> list[Any]:
    """Marks of the weights, and of what is read, by which another model or input is noticed."""
    files = [path for folder in model.folders for path in sorted(folder.glob("*.safetensors"))]
    weights = [(str(path.resolve()), path.stat().st_size, path.stat().st_mtime_ns) for path in files]
    return [weights, sources_fingerprint(find(source, "--input")) if is_file(source) else source]


def _identity(model: SavedModel, source: str, settings: Sequence[Any]) -> str:
    """Everything that shapes the answers. How bad rows and long prompts are met is not in it: changing that is how one
    goes on.
    """
    # Nobody can read standard input again: such an output is never continued.
    marks = read_marks(model, secrets.token_hex(8) if source == STANDARD_INPUT else source)
    return fingerprint([FORMAT, *marks, *settings])
