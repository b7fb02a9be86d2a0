"""Answers to held-out rows: a few to look at, or many to score."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch

from config import GenerateConfig
from data.batches.collate import IGNORED_LABEL, Batch
from data.batches.histories import Pasts
from data.batches.loader import StepLoader
from data.tokenizers.pieces import BROKEN
from data.tokenizers.tokenizer import RARE_LETTER, Tokenizer
from engine.blockwise import Blockwise
from engine.step import to_micro_batch
from language import say
from limits import SAMPLE_TOKENS
from model.decoding.answer_tree import AnswerTree
from training.evaluation.answers import AnswerWriter
from training.evaluation.label_scores import labels_in
from training.evaluation.prompt_parts import PromptParts, was_cut
from training.evaluation.scores import AnswerScores, OwnMetric, own_scores
from training.processes.group import Group
from training.report.run_log import RunLog

CUT = "[...]"  # behind a sample that was cut at the longest length
SHOWN = 3  # scored answers that are shown
UNLABELLED = "-"  # in place of a label that does not count
READ_ROWS = 64  # at once, where nothing is answered
Row = tuple[list[int], list[int]]  # token ids of prompt and reference


@dataclass(frozen=True)
class Sample:
    """One answer beside what the data says."""

    prompt: str
    answer: str
    reference: str


def generate_metrics(
    answer: Callable[[list[list[int]], Pasts], list[list[list[int]]]],
    loader: StepLoader,
    tokenizer: Tokenizer,
    settings: GenerateConfig,
    group: Group,
    *,
    rows: int,
    batch_size: int,
    names: Sequence[str],
    shown: int = 0,
    own: Mapping[str, OwnMetric] | None = None,
    of: range | None = None,
) -> tuple[dict[str, float], list[Sample], int]:
    """Answer the first held-out rows, each process its part, and score the answers.

    Args:
        answer: token ids of prompts, and what lies before those of histories -> of each the token ids of its answers, best first.
        settings: by which they are written.
        rows: how many, of all processes. batch_size: given to `answer` at once.
        names: scores, see `training.evaluation.scores.metric_names`.
        shown: samples to give back, of this process.
        own: metrics of the user's own, by name. of: the rows of one validation set; None: all.
    Returns:
        score name -> percentage over all processes; the first samples; and how many answers of all were cut.
    Raises:
        UserError: a metric of the user's own failed, or gave no number.
    Memory: that of `answer`; with metrics of one's own the texts of all rows, else nothing grows
        with `rows`.
    """
    scores = AnswerScores(names)
    samples, cut, texts = list[Sample](), 0, list[tuple[str, str]]()
    for batch in loader.evaluation_batches(rows, batch_size, group.rank, group.size, of):
        pairs = list(_rows(batch))
        for (source, target), best in zip(pairs, answer([source for source, _ in pairs], batch.past), strict=True):
            texts_of = (tokenizer.decode_with_unknown(ids).rstrip(BROKEN).strip() for ids in (source, target))
            prompt, reference = texts_of  # scored with the halves of letters that they may have inside, as answers are
            first, *others = (tokenizer.decode_with_unknown(tokens).strip() for tokens in best)
            sample = Sample(prompt, first, reference)
            cut += was_cut(best[0], settings, tokenizer.eos_id)
            if own:
                texts.append((sample.answer, sample.reference))
            if tokenizer.unk_id in target:
                # nobody knows what stood there: a letter that no answer has, as scores leave out all marks
                reference = reference.replace(tokenizer.names["unk_token"], RARE_LETTER)
            scores.add(sample.answer, reference, others)
            if len(samples) < shown:
                samples.append(sample)
    *sums, all_cut = group.all_reduce_sum(*scores.sums, cut)
    found = scores.result(np.array(sums))
    if own:
        everyone = group.gather(texts)  # row n is of process n % size
        in_order = [pair for pairs in itertools.zip_longest(*everyone) for pair in pairs if pair is not None]
        found |= group.run_on_main(lambda: own_scores(own, in_order))
    return found, samples, int(all_cut)


def show_samples(
    blockwise: Blockwise,
    loader: StepLoader,
    tokenizer: Tokenizer,
    count: int,
    log: RunLog,
    decoding: GenerateConfig,
    tree: AnswerTree | None = None,
) -> str | None:
    """Answer the first `count` held-out rows greedily, on the screen and in metrics.jsonl.

    Args:
        decoding: of the published model. tree: the answers that there are; None: any.
    Returns:
        the text of the first prompt, for the next command to type; None where there are no rows.
    """
    rows = list(_first_rows(loader, max(count, 1)))
    prompts = [_whole(tokenizer.decode_with_unknown(source)) for source, _ in rows]
    if count and rows:
        settings = replace(decoding, num_beams=1, max_new_tokens=min(decoding.max_new_tokens, SAMPLE_TOKENS))
        inputs = [source for source, _ in rows]
        parts = PromptParts.asked(tokenizer, tokenizer.template, settings)
        writer = AnswerWriter([blockwise], settings, lambda writing: writing.rows, tree=tree, parts=parts)
        answers = writer.answers(inputs)
        log.progress.note(say("samples"))
        unshown = (tokenizer.pad_id, tokenizer.eos_id)  # sentinels are shown: where text is masked they are the answer
        for prompt, answer, (_, target) in zip(prompts, answers, rows, strict=True):
            text = tokenizer.decode([token for token in answer if token not in unshown], skip_special=False)
            reference = _whole(tokenizer.decode(target, skip_special=False).removesuffix(tokenizer.names["eos_token"]))
            log.progress.sample(
                prompt, f"{text} {CUT}" if was_cut(answer, settings, tokenizer.eos_id) else text, reference
            )
            log.event("sample", prompt=prompt, answer=text, reference=reference)
    return prompts[0] if prompts else None


def show_predictions(
    blockwise: Blockwise, loader: StepLoader, tokenizer: Tokenizer, names: Sequence[str], count: int, log: RunLog,
    device: torch.device,
) -> None:  # fmt: skip
    """Show what a head predicts for the first `count` held-out rows, on the screen and in metrics.jsonl.

    Args:
        names: of classes; none: labels are numbers.
    Memory: evaluation of one row.
    """
    if count and loader.num_rows:
        log.progress.note(say("samples"))
    for batch in loader.evaluation_batches(count, 1):
        (logits,) = blockwise.predict([to_micro_batch(batch, blockwise.model.config, device)])
        right, outputs = labels_in(batch), logits.float().cpu().numpy()
        is_counted = right != IGNORED_LABEL if names else ~np.isnan(right)
        sides = []
        for side in (outputs.argmax(-1) if names else outputs[:, 0], right):
            words = [(names[int(one)] if names else f"{one:.4g}") if has_label else UNLABELLED
                     for one, has_label in zip(side, is_counted, strict=True)]  # fmt: skip
            words = words[:-1] if len(words) > 1 else words  # end of text has none
            sides.append(("" if all(len(name) == 1 for name in names) and names else " ").join(words))
        answer, reference = sides
        prompt = _whole(tokenizer.decode_with_unknown(batch.input_ids[0, : batch.input_lengths[0]]))
        log.progress.sample(prompt, answer, reference, is_label=True)
        log.event("sample", prompt=prompt, answer=answer, reference=reference)


def count_unknown(loader: StepLoader, tokenizer: Tokenizer, rows: int, of: range | None = None) -> int:
    """How many of the first `rows` held-out rows, or those of a set, have a reference with unknown tokens, which no answer matches."""
    return sum(tokenizer.unk_id in target for _, target in _first_rows(loader, rows, of))


def _whole(text: str) -> str:
    """A row's text without halves of letters, which a cut or a mask inside their bytes leaves."""
    return text.replace(BROKEN, "")


def _first_rows(loader: StepLoader, count: int, of: range | None = None) -> Iterator[Row]:
    batches = loader.evaluation_batches(count, min(count, READ_ROWS), 0, 1, of)
    return itertools.islice(itertools.chain.from_iterable(map(_rows, batches)), count)


def _rows(batch: Batch) -> Iterator[Row]:
    for place in range(batch.num_rows):
        source = batch.input_ids[place, : batch.input_lengths[place]]
        target = batch.labels[place, : batch.target_lengths[place]]
        yield source.tolist(), target.tolist()
