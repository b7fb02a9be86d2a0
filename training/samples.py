"""What does the model write? A few answers to held-out rows, beside what the data says."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from data.collate import Batch
from data.loader import StepLoader
from data.tokenizer import EOS, Tokenizer
from engine.walk import Walk
from model.generation import generate
from training.progress import Progress
from training.tracking import MetricsFile

SAMPLE_TOKENS = 64  # longest answer shown


def show_samples(
    walk: Walk, loader: StepLoader, tokenizer: Tokenizer, count: int, progress: Progress, metrics: MetricsFile
) -> str | None:
    """Answer the first `count` held-out rows greedily, on the screen and in metrics.jsonl.

    Returns:
        the text of the first prompt, for the next command to type; None where there are no rows.
    """
    rows = list(itertools.islice(_rows(loader, max(count, 1)), max(count, 1)))
    prompts = [tokenizer.decode(source, skip_special=False).removesuffix(EOS) for source, _ in rows]
    if count and rows:
        answers = generate(
            walk.model, [source for source, _ in rows], max_new_tokens=SAMPLE_TOKENS,
            visit=walk.residency.visit, compute_dtype=walk.residency.compute_dtype,
        )  # fmt: skip
        progress.note("samples")
        for prompt, answer, (_, target) in zip(prompts, answers, rows, strict=True):
            text = tokenizer.decode(answer, skip_special=False)
            reference = tokenizer.decode(target, skip_special=False).removesuffix(EOS)
            progress.sample(prompt, text, reference)
            metrics.write("sample", prompt=prompt, answer=text, reference=reference)
    return prompts[0] if prompts else None


def _rows(loader: StepLoader, count: int) -> Iterator[tuple[list[int], list[int]]]:
    for batch in loader.evaluation_batches(count, count, 0, 1):
        for place in range(batch.num_rows):
            yield _row(batch, place)


def _row(batch: Batch, place: int) -> tuple[list[int], list[int]]:
    source = batch.input_ids[place, : batch.input_lengths[place]]
    target = batch.labels[place, : batch.target_lengths[place]]
    return source.tolist(), target.tolist()
