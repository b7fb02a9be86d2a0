"""Evaluation during training, on held-out rows, in what the budget leaves free; and the samples at its end."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, replace

from data.batches.collate import Batch
from data.tokenizers.pieces import BROKEN
from devices.sizes import SAMPLE_TOKENS
from engine.step import to_micro_batch
from memory.answers import AnswerBatch, HeldModel
from memory.cleanup import free_failed
from settings.errors import UserError
from settings.fields import AUTO, not_known
from support.language import join, say
from support.units import MIB
from training.evaluation import losses
from training.evaluation.answers import AnswerBudget, AnswerWriter
from training.evaluation.losses import Evaluation
from training.evaluation.prompt_parts import PromptParts, was_cut
from training.evaluation.samples import SHOWN, AnsweredRow, generate_metrics, sides_of
from training.live import LiveRun
from training.recovering import give_up
from training.report.run_files import EVAL_COUNTS

LEAST_FREE_BYTES = MIB
CUT = "[...]"  # This stands behind a sample that was cut at the longest length.


def evaluate(live: LiveRun, averaged: int = 0) -> bool:
    """Measure the loss on held-out rows, and answers where asked for; returns whether it is the best so far.

    Args:
        averaged: checkpoints whose mean is measured; 0: the weights of this step.
    Raises:
        DoesNotFit: not even a single row fits. UserError: `metric_for_best` is not among the figures of these rows.
    """
    step = live.state.step
    live.controller.before("evaluation", step)
    with live.monitor.phase("evaluation"):
        sets = live.run.validation.sets
        results: dict[str, Evaluation] = {}
        samples: list[AnsweredRow] = []
        for name, rows in sets.items() or [("", None)]:
            loss = _loss(live, rows)
            scores, of_set = _scores(live, rows)
            results[name] = replace(loss, metrics={**loss.metrics, **scores})
            samples += of_set[:1] if sets else of_set
        result = losses.mean_of_sets(results) if sets else results[""]
    if not result.tokens:
        return False
    best = live.train.metric_for_best
    figures = [name for name in result.figures() if name not in EVAL_COUNTS]
    if best not in figures:  # Which scores vectors have, the rows decide.
        problem = not_known(best, figures)
        raise UserError(say("--metric_for_best = {metric_for_best}, {problem}", metric_for_best=best, problem=problem))
    held_out = live.run.validation.num_rows
    answered = {}
    if scores:
        most = int(live.metrics.eval_generate_rows)
        answered["answered_rows"] = sum(min(most, len(rows)) for rows in sets.values() or [range(held_out)])
    is_best = live.evaluated(result.loss, {**result.figures(), **answered}, is_mean=averaged > 0)
    means = {"averaged_checkpoints": averaged} if averaged else {}
    further: list[str] = []
    of_answers: list[str] = []
    if live.task.has_perplexity:
        further.append(say(", perplexity {perplexity}", perplexity=result.shown_perplexity()))
    for name, value in result.metrics.items():
        set_name, _, figure = name.rpartition("/")
        # Of each set the sentence has the loss, and what selects the best checkpoint; the event has all else.
        if set_name and figure != "loss" and name != live.train.metric_for_best:
            continue
        if figure in scores:
            of_answers.append(f"{name} {value:.3f}")
        else:
            further.append(f", {name} {value:.3f}")
    sentences: list[str] = [
        say(
            "step {step}: evaluation loss {loss}{further} ({rows} of {all} rows)",
            step=step,
            loss=f"{result.loss:.4f}",
            further=join("", further),
            rows=f"{result.rows:,}",
            all=f"{held_out:,}",
        )
    ]
    if answered:
        count = f"{answered['answered_rows']:,}"
        sentences.append(say("{scores} ({rows} rows)", scores=join(", ", of_answers), rows=count))
    if live.best.step and not is_best:
        sentences.append(say("step {step} is still the best, and the model to be published", step=live.best.step))
    live.log.event("eval", join("; ", sentences), step=step, **result.figures(), **answered, **means)
    for sample in samples:
        live.log.progress.sample(sample.prompt, sample.answer, sample.reference)
        live.log.event("sample", step=step, **asdict(sample))
    live.log.memory(step, "evaluation")
    return is_best


def _scores(live: LiveRun, rows: range | None) -> tuple[dict[str, float], list[AnsweredRow]]:
    """So many answers at once as what is free may hold; half as many where memory does not suffice."""
    free = live.controller.plan.budget_bytes - live.controller.budget.used()
    while True:
        try:
            return score_answers(live, free, rows)
        except Exception as error:
            if not live.device.is_out_of_memory(error):
                raise
            shortage = free_failed(error, live.device)
            # Below this, one row at a time has been tried.
            if free < LEAST_FREE_BYTES:
                live.controller.exhausted = shortage.describe("evaluation", 1, "")
                give_up(live)
            free //= 2


def score_answers(live: LiveRun, free_bytes: int, of: range | None) -> tuple[dict[str, float], list[AnsweredRow]]:
    """Score answers to the first `eval_generate_rows` held-out rows: greedy ones, or the `num_answers` best.

    Args:
        free_bytes: what may be taken now; so many rows are answered at once as fit, one at least.
        of: the rows of one validation set; None: all.
    Returns:
        score name -> percentage, empty where no rows were asked for; and a few samples.
    Memory: at most `free_bytes` where one row fits.
    """
    run = live.run
    most = live.metrics.eval_generate_rows
    rows = 0 if most == AUTO else min(int(most), run.validation.num_rows)
    if not rows:
        return {}, []
    # Beams take several times as long, and are for several answers alone.
    settings = live.decoding if live.num_answers > 1 else replace(live.decoding, num_beams=1)
    choices = 0 if run.tree is None else run.tree.most_choices(settings.num_beams)
    used_bytes = live.monitor.sample().anon_bytes
    model = HeldModel(live.shape, live.controller.plan.choice, 0)
    model = replace(model, base_bytes=used_bytes - model.weight_bytes)  # The model is in memory already.

    def predict(batch: AnswerBatch) -> dict[str, int]:
        return model.answering(replace(batch, choices=choices))

    budget = AnswerBudget(predict, used_bytes + free_bytes, live.monitor)
    batch_size = max(1, budget.most_rows(AnswerBatch.by(settings, rows, run.validation.longest[0])))

    def at_once(batch: AnswerBatch) -> int:
        rows = min(batch.rows, batch_size)  # Long prompts may be answered in parts, which are more than the rows.
        return max(1, budget.most_rows(replace(batch, rows=rows))) if budget.excess_bytes else rows

    parts = PromptParts.asked(run.tokenizer, run.tokenizer.template, settings)
    writer = AnswerWriter(live.engine.blockwise, settings, at_once, budget=budget, tree=run.tree, parts=parts)

    def answer(inputs: list[list[int]]) -> list[list[list[int]]]:
        return [[one.tokens for one in best] for best in writer.ranked(inputs, live.num_answers)]

    scores, samples, _ = generate_metrics(
        answer,
        run.validation,
        run.tokenizer,
        settings,
        live.group,
        rows=rows,
        batch_size=batch_size,
        names=live.score_names,
        num_samples=SHOWN,
        own=run.metrics,
        of=of,
    )
    return scores, samples


def _loss(live: LiveRun, rows: range | None) -> Evaluation:
    """Over the first `eval_rows` held-out rows, or those of a set, in smaller micro-batches where memory does not
    suffice.
    """
    group = live.group
    most = live.train.eval_rows
    while True:
        size = live.controller.plan.choice.eval_batch_size_per_gpu
        try:
            batches = live.run.validation.evaluation_batches(most, size, group.rank, group.size, rows)
            scores = live.task.new_scores(live.shape.label_names)
            return losses.evaluate(live.engine.blockwise, batches, group, live.device.torch_device, scores)
        except Exception as error:
            if not live.device.is_out_of_memory(error):
                raise
            live.controller.after_evaluation_out_of_memory(error, live.state.step)
        if live.controller.exhausted:
            give_up(live)


def show_samples(live: LiveRun) -> str | None:
    """Show what the model makes of the first `sample_rows` held-out rows, on the screen and in metrics.jsonl.

    Returns:
        the text of the first prompt, for the next command to type; None where there are no rows.
    Memory: answers of all these rows; of a head over labels evaluation of one row.
    """
    run = live.run
    count = live.train.sample_rows
    batches = list(run.validation.evaluation_batches(max(count, 1), 1))
    prompts = [_whole(run.tokenizer.decode_with_unknown(ids)) for batch in batches for ids, _ in sides_of(batch)]
    if count and batches:
        live.log.progress.note(say("samples"))
        samples = _written_samples(live, batches) if live.task.writes_text else _predicted_samples(live, batches)
        for prompt, (on_screen, answer, reference) in zip(prompts, samples, strict=True):
            live.log.progress.sample(prompt, on_screen, reference, is_label=not live.task.writes_text)
            live.log.event("sample", prompt=prompt, answer=answer, reference=reference)
    # `embed` puts the prompt before a text by itself.
    return prompts[0].removeprefix(run.config.data.query_prompt or "") if prompts else None


def _written_samples(live: LiveRun, batches: list[Batch]) -> Iterator[tuple[str, str, str]]:
    """Greedy answers: as shown on the screen, as written, and what the data says."""
    tokenizer = live.run.tokenizer
    most = min(live.decoding.max_new_tokens, SAMPLE_TOKENS)
    settings = replace(live.decoding, num_beams=1, max_new_tokens=most)
    parts = PromptParts.asked(tokenizer, tokenizer.template, settings)
    writer = AnswerWriter(
        live.engine.blockwise, settings, lambda writing: writing.rows, tree=live.run.tree, parts=parts
    )
    sides = [side for batch in batches for side in sides_of(batch)]
    # Sentinels are shown: where text is masked they are the answer.
    unshown = (tokenizer.pad_id, tokenizer.eos_id)
    for answer, (_, target) in zip(writer.answers([source for source, _ in sides]), sides, strict=True):
        text = tokenizer.decode([token for token in answer if token not in unshown], skip_special=False)
        reference = tokenizer.decode(target, skip_special=False).removesuffix(tokenizer.names["eos_token"])
        is_cut = was_cut(answer, settings, tokenizer.eos_id)
        yield f"{text} {CUT}" if is_cut else text, text, _whole(reference)


def _predicted_samples(live: LiveRun, batches: list[Batch]) -> Iterator[tuple[str, str, str]]:
    """What a head says, twice, and what the data says."""
    for batch in batches:
        micro_batch = to_micro_batch(batch, live.shape, live.device.torch_device)
        predicted, labels = live.task.predicted(
            live.engine.blockwise, batch, micro_batch, live.run.tokenizer, live.run.prepared.labels
        )
        yield predicted, predicted, labels


def _whole(text: str) -> str:
    """A row's text without halves of letters, which a cut or a mask inside their bytes leaves."""
    return text.replace(BROKEN, "")
