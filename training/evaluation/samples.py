"""Scores of answers to held-out rows."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from data.batches.collate import Batch
from data.batches.loader import StepLoader
from data.tokenizers.pieces import BROKEN
from data.tokenizers.tokenizer import RARE_LETTER, Tokenizer
from settings.declared import GenerateConfig
from training.evaluation.metrics import is_word
from training.evaluation.prompt_parts import was_cut
from training.evaluation.scores import AnswerScores, OwnMetric, own_scores
from training.processes.group import Group

SHOWN = 3  # An evaluation shows three of its scored answers.
READ_ROWS = 64  # So many rows are read at once, where nothing is answered.


@dataclass(frozen=True)
class AnsweredRow:
    """One answer beside what the data says."""

    prompt: str
    answer: str
    reference: str


def generate_metrics(
    answer: Callable[[list[list[int]]], list[list[list[int]]]],
    loader: StepLoader,
    tokenizer: Tokenizer,
    settings: GenerateConfig,
    group: Group,
    *,
    rows: int,
    batch_size: int,
    names: Sequence[str],
    num_samples: int = 0,
    own: Mapping[str, OwnMetric] | None = None,
    of: range | None = None,
) -> tuple[dict[str, float], list[AnsweredRow], int]:
    """Answer the first held-out rows, each process its part, and score the answers.

    Args:
        answer: token ids of prompts -> of each the token ids of its answers, best first.
        settings: by which they are written.
        rows: how many, of all processes. batch_size: given to `answer` at once.
        names: scores, see `training.evaluation.scores.metric_names`.
        num_samples: to give back, of this process.
        own: metrics of the user's own, by name. of: the rows of one validation set; None: all.
    Returns:
        score name -> percentage over all processes; the first samples; and how many answers of all were cut.
    Raises:
        UserError: a metric of the user's own failed, or gave no number.
    Memory: that of `answer`; with metrics of one's own the texts of all rows, else nothing grows
        with `rows`.
    """
    scores = AnswerScores(names)
    samples = list[AnsweredRow]()
    texts = list[tuple[str, str]]()
    cut = 0
    for batch in loader.evaluation_batches(rows, batch_size, group.rank, group.size, of):
        prompts_and_references = list(_rows_of(batch))
        answers = answer([prompt for prompt, _ in prompts_and_references])
        for (prompt, references), best in zip(prompts_and_references, answers, strict=True):
            first, *further = (tokenizer.decode_with_unknown(tokens).strip() for tokens in best)
            sample = AnsweredRow(_text(tokenizer, prompt), first, _text(tokenizer, references[0]))
            scores.add(first, [_right_answer(tokenizer, ids) for ids in references], further)
            cut += was_cut(best[0], settings, tokenizer.eos_id)
            if own:
                texts.append((sample.answer, sample.reference))
            if len(samples) < num_samples:
                samples.append(sample)
    *sums, all_cut = group.all_reduce_sum(*scores.sums, cut)
    result = scores.result(np.array(sums))
    if own:
        everyone = group.gather(texts)  # Row n is of process n % size.
        in_order = list(filter(None, itertools.chain.from_iterable(itertools.zip_longest(*everyone))))
        result |= group.run_on_main(lambda: own_scores(own, in_order))
    return result, samples, int(all_cut)


def _text(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    """A text of the data, without the halves of letters that a cut leaves at its end."""
    return tokenizer.decode_with_unknown(ids).rstrip(BROKEN).strip()


def _right_answer(tokenizer: Tokenizer, ids: Sequence[int]) -> str:
    text = _text(tokenizer, ids)
    if tokenizer.unk_id in ids:
        # Nobody knows what stood there: a letter that no answer has, as scores leave out all marks.
        text = text.replace(tokenizer.names["unk_token"], RARE_LETTER)
    return text


@dataclass
class References:
    """What is known of the right answers of rows.

    Args:
        unknown: rows whose right answers all have unknown tokens, which no answer matches. counts: how many right
            answers rows have. are_words: whether none is longer than a word.
    """

    unknown: int = 0
    counts: set[int] = field(default_factory=set)
    are_words: bool = True

    def add(self, loader: StepLoader, tokenizer: Tokenizer, rows: int, of: range | None = None) -> None:
        """Read the first `rows` held-out rows, or those of a set."""
        for batch in loader.evaluation_batches(rows, min(rows, READ_ROWS), 0, 1, of):
            for _, references in _rows_of(batch):
                self.unknown += all(tokenizer.unk_id in ids for ids in references)
                self.counts.add(len(references))
                self.are_words &= all(is_word(tokenizer.decode(ids)) for ids in references)


def _rows_of(batch: Batch) -> Iterator[tuple[list[int], list[list[int]]]]:
    """Token ids of the prompt of each row of a batch, and of its right answers."""
    further = batch.references or [()] * batch.num_rows
    for (prompt, first), references in zip(sides_of(batch), further, strict=True):
        yield prompt, [first, *(ids.tolist() for ids in references)]


def sides_of(batch: Batch) -> Iterator[tuple[list[int], list[int]]]:
    """Token ids of prompt and first right answer of each row of a batch."""
    for row in range(batch.num_rows):
        source = batch.input_ids[row, : batch.input_lengths[row]]
        target = batch.labels[row, : batch.target_lengths[row]]
        yield source.tolist(), target.tolist()
