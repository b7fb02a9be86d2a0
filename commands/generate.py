"""`generate`: one prompt answered on the screen, or a file of them into another.

Inside a part, prompts are answered longest first, as many at once as the budget allows, and then written in the order
of the input.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from commands import text_rows
from commands.answering import Answering, find_answering
from commands.new_folder import holding_output
from commands.text_reader import LENGTH_MULTIPLE, Labeller, text_columns
from commands.text_rows import STANDARD_INPUT, TYPED, TextWork, UnfinishedFile, in_parts, join_files
from data.sources.files import sources_fingerprint
from data.sources.lines import BadRows
from data.sources.prompts import Prompt
from devices.sizes import ANSWERED_TOGETHER
from memory.answers import AnswerBatch
from model.decoding.beam_search import ScoredAnswer
from settings.declared import Config, DataConfig
from settings.errors import UserError
from settings.fields import AUTO, counted, is_encodable
from settings.tasks import MODEL_HEADS
from support.language import say
from training.checkpoints.runs import only_pretrained
from training.evaluation.prompt_parts import was_cut
from training.loaded_model import WAITING_BYTES, note
from training.report.log_files import plain
from training.setup.answer_list import answer_sources

WINDOW_BATCHES = 8  # A part of written answers has so many batches.
LABELLED_ROWS = 256  # A part of labels has so many texts.
LEAST_TEXT = AnswerBatch(1, 512, 1)  # The memory has to hold at least a text of so many tokens.
ANSWER = "response"
REFERENCE = "reference"
ANSWERS = "responses"  # Several answers, the best first.
SCORES = "log_probabilities"


@dataclass
class Answered:
    """What a prompt got.

    Args:
        columns: for a JSON line. lines: for the screen.
        is_cut: whether the answer was ended by the longest length.
    """

    columns: dict[str, Any]
    lines: list[str]
    is_cut: bool = False


@holding_output
def generate(config: Config) -> None:
    """Answer one text on the screen, or a file of prompts as JSON lines; a head over labels answers by its labels.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold a single answer.
    """
    work = answer_work(config)
    source = config.answer.input
    if source is None:
        raise UserError(say('--input = none, a prompt is needed; give a text (--input="Hello") or a file of prompts'))
    if only_pretrained(work.answering.model.top) and "<extra_id_" not in source:
        note(say("this model has only been pretrained: it fills gaps such as <extra_id_0>; finetune it to get answers"))
    text_rows.run(work)


def answer_work(config: Config) -> AnswerWork:
    """What answers with the model that is named, which is not loaded yet.

    Raises:
        UserError: there is none, or settings are named that are not for it.
    """
    answering = find_answering(config, "generate")
    if MODEL_HEADS[answering.model.shape.head].writes_text:
        if config.is_on_command_line("prepare_text") and config.is_changed(
            "prepare_text"
        ):  # A file may be that of the training too.
            text = "--{name} = {value}, has no effect on this run"
            note(say(text, name="prepare_text", value=config.data.prepare_text))
        return WrittenAnswers(answering, [answering.config.data, config.data])
    return Labels(answering, text_columns(answering))


class AnswerWork(TextWork[tuple[Prompt, Answered]]):
    """Answers to prompts, each a JSON line with the columns of its row."""

    part_suffix = ".jsonl"
    version = 5

    def __init__(self, answering: Answering, columns: Sequence[DataConfig]) -> None:
        super().__init__(answering, columns)
        self.keeps = () if self.config.answer.output is None else None
        self.num_cut_prompts = 0
        self.first_cut_prompt = ""

    def identity(self) -> list[Any]:
        """How bad rows and long prompts are met is not in it: changing that is how one goes on."""
        data = self.config.data
        return [
            *(data.max_seq_len, data.prompt_template, data.source_prefix, data.prompt_column, data.text_column),
            *(data.response_column, data.prepare_text, self.config.run.seed, self.config.answer.num_answers),
            vars(self.config.generate),
            sources_fingerprint(answer_sources(self.config.answer.answers, self.answering.model)),
        ]

    def parts(self, prompts: Iterator[Prompt], rows_done: int = 0) -> Iterator[list[tuple[Prompt, Answered]]]:
        """The answers to prompts, in their order; a blank prompt has a blank answer."""
        answer = self.config.answer
        # Somebody who types waits for each answer.
        most_rows = 1 if answer.input == STANDARD_INPUT and answer.output is None else self.rows_of_a_part()
        open_prompts = islice(prompts, rows_done, None)
        for part in in_parts(open_prompts, most_rows, WAITING_BYTES, Prompt.num_bytes):
            answers = iter(self.answers([prompt for prompt in part if prompt.text.strip()]))
            yield [(prompt, next(answers) if prompt.text.strip() else self.blank()) for prompt in part]

    def rows_of_a_part(self) -> int:
        """How many prompts are answered before their answers are written."""
        raise NotImplementedError

    def answers(self, prompts: Sequence[Prompt]) -> list[Answered]:
        """The answers to prompts that are not blank."""
        raise NotImplementedError

    def blank(self) -> Answered:
        """The answer to a blank prompt."""
        raise NotImplementedError

    def texts(self, texts: Sequence[str]) -> list[Answered]:
        """The answers to texts, in their order."""
        prompts = (Prompt(str(number), text, {}) for number, text in enumerate(texts))
        return [answer for part in self.parts(prompts) for _, answer in part]

    def count_cut(self, prompt: Prompt) -> None:
        """Count a prompt that is longer than the model reads."""
        self.num_cut_prompts += 1
        self.first_cut_prompt = self.first_cut_prompt or prompt.origin

    def show(self, part: list[tuple[Prompt, Answered]]) -> None:
        for prompt, answer in part:
            for line in answer.lines:
                print(line if prompt.origin == TYPED else " ".join(line.splitlines()), flush=True)

    def write(self, part: list[tuple[Prompt, Answered]], path: Path) -> None:
        path.write_text("".join(_json_line(prompt, answer) for prompt, answer in part), encoding="utf8")

    def join(self, parts: Sequence[Path], rows: int, path: Path) -> None:
        join_files(parts, path)

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        notes: list[str] = []
        if output is not None:
            notes.append(say("{file}: {answers}", file=output.path, answers=counted(output.rows, "answer")))
        if self.num_cut_prompts:
            text = "truncated to --max_seq_len={longest}: {prompts}, first {first}"
            prompts = counted(self.num_cut_prompts, "prompt")
            longest = self.config.data.max_seq_len
            notes.append(say(text, longest=longest, prompts=prompts, first=self.first_cut_prompt))
        if bad_rows.count:
            rows = counted(bad_rows.count, "row")
            notes.append(say("not answered: {rows}, such as {example}", rows=rows, example=bad_rows.examples[0]))
        return notes


class WrittenAnswers(AnswerWork):
    """Answers that a model writes token by token, of which `num_answers` are given. Of a single answer the
    log-probability is not computed.
    """

    def __init__(self, answering: Answering, columns: Sequence[DataConfig]) -> None:
        super().__init__(answering, columns)
        self.num_answers = 0
        self.num_cut_answers = 0

    def load(self, reads_files: bool = False) -> dict[str, int]:
        rows = self.config.answer.generate_batch_size
        least = AnswerBatch.by(self.config.generate, 1 if rows == AUTO else int(rows), self.config.data.max_seq_len)
        self.trained = self.answering.load(least, reads_files)
        return self.trained.predict(least)

    def rows_of_a_part(self) -> int:
        rows = self.config.answer.generate_batch_size
        if rows == AUTO:
            # The longest prompt that may come decides the part; those that do come decide what is answered at once.
            longest = AnswerBatch.by(self.config.generate, ANSWERED_TOGETHER, self.config.data.max_seq_len)
            rows = self.trained.answer_budget.most_rows(longest)
        return max(1, int(rows)) * WINDOW_BATCHES

    def answers(self, prompts: Sequence[Prompt]) -> list[Answered]:
        inputs = [self.encode(prompt) for prompt in prompts]
        ranked = self.trained.writer(self.config).ranked(inputs, self.config.answer.num_answers)
        answers = [self._answered(best) for best in ranked]
        self.num_answers += len(answers)
        self.num_cut_answers += sum(answer.is_cut for answer in answers)
        return answers

    def encode(self, prompt: Prompt) -> list[int]:
        """Token ids of the prompt in the model's template, with the end token; those that the model does not read are
        left out, unless the prompt is answered in parts.
        """
        tokenizer = self.trained.tokenizer
        template = self.trained.template
        longest = self.config.data.max_seq_len
        (encoded,) = tokenizer.encode_prompts([template.prompt(prompt.turns)], is_chat=bool(template.jinja))
        ids: list[int] = encoded.tolist()
        is_split = bool(self.config.generate.split_prompts) and not prompt.before
        if len(ids) >= longest and not is_split:
            self.count_cut(prompt)
            ids = ids[: longest - 1]
        return [*ids, tokenizer.eos_id]

    def blank(self) -> Answered:
        return self._answered([ScoredAnswer([], 0.0)])

    def _answered(self, best: list[ScoredAnswer]) -> Answered:
        tokenizer = self.trained.tokenizer
        texts = [tokenizer.decode_answer(answer.tokens) for answer in best]
        is_cut = bool(best[0].tokens) and was_cut(best[0].tokens, self.config.generate, tokenizer.eos_id)
        if self.config.answer.num_answers == 1:
            return Answered({ANSWER: texts[0]}, texts, is_cut)
        scores = [answer.log_probability for answer in best]
        columns = {ANSWER: texts[0], ANSWERS: texts, SCORES: [round(score, 6) for score in scores]}
        lines = [f"{score:.4f}\t{text}" for text, score in zip(texts, scores, strict=True)]
        return Answered(columns, lines, is_cut)

    def notes(self, output: UnfinishedFile | None, bad_rows: BadRows) -> list[str]:
        notes = super().notes(output, bad_rows)
        if self.num_cut_answers:
            notes.append(cut_note(self.num_cut_answers, self.num_answers, self.config.generate.max_new_tokens))
        return notes


class Labels(AnswerWork):
    """Answers of a head over labels: the class of a text, its number, or a label for each of its words or letters."""

    def load(self, reads_files: bool = False) -> dict[str, int]:
        self.trained = self.answering.load(LEAST_TEXT, reads_files)
        self.labeller = Labeller(self.trained, self.config.data, self.config.answer.generate_batch_size)
        return self.labeller.predicted_memory(LENGTH_MULTIPLE)

    def rows_of_a_part(self) -> int:
        return LABELLED_ROWS

    def answers(self, prompts: Sequence[Prompt]) -> list[Answered]:
        texts = [self.labeller.encode(prompt.text, self.config.data.max_seq_len, prompt.words) for prompt in prompts]
        for prompt, text in zip(prompts, texts, strict=True):
            if text.is_cut:
                self.count_cut(prompt)
        return [Answered(label.columns, [label.line]) for label in self.labeller.answers(texts)]

    def blank(self) -> Answered:
        return Answered({self.labeller.column: None}, [""])


def cut_note(cut: int, answers: int, max_new_tokens: int) -> str:
    """What is said of answers that were ended by the longest length."""
    all_answers = counted(answers, "answer")
    return say("{cut} of {answers} cut at --max_new_tokens={limit}", cut=cut, answers=all_answers, limit=max_new_tokens)


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
