"""Evaluation during training, on held-out rows, in what the budget leaves free."""

from __future__ import annotations

from dataclasses import asdict, replace

from config import PREFERENCES
from language import join, say
from memory.cleanup import free_failed
from settings.consistency import HEADS
from settings.fields import AUTO
from training.evaluation import losses
from training.evaluation.label_scores import LabelScores
from training.evaluation.losses import Evaluation
from training.evaluation.samples import Sample, score_answers
from training.live import LiveRun
from training.recovering import give_up
from units import MIB

LEAST_FREE_BYTES = MIB


def evaluate(live: LiveRun, averaged: int = 0) -> bool:
    """Measure the loss on held-out rows, and answers where asked for; returns whether it is the best so far.

    Args:
        averaged: checkpoints whose mean is measured; 0: the weights of this step.
    Raises:
        DoesNotFit: not even a single row fits.
    """
    step = live.state.step
    live.controller.before("evaluation", step)
    with live.monitor.phase("evaluation"):
        sets = live.run.validation.sets
        losses_of = {name: _loss(live, rows) for name, rows in sets.items()}
        result = losses.mean_of_sets(losses_of) if sets else _loss(live)
        scores, samples = _scores(live)
    if not result.tokens:
        return False
    asked, held_out = live.config.metrics.eval_generate_rows, live.run.validation.num_rows
    answered = {}
    if scores and asked != AUTO:
        answered["answered_rows"] = sum(min(int(asked), len(rows)) for rows in sets.values() or [range(held_out)])
    is_best = live.evaluated(result.loss, {**result.figures(), **scores, **answered}, is_mean=averaged > 0)
    means = {"averaged_checkpoints": averaged} if averaged else {}
    # of each set the loss, and what selects the best checkpoint; all else is in the event
    told = {f"{name}/loss" for name in sets} | {live.config.train.metric_for_best}
    further, of_answers = (
        [f"{name} {value:.3f}" for name, value in figures.items() if name in told or name.partition("/")[0] not in sets]
        for figures in (result.metrics, scores)
    )
    further = [f", {figure}" for figure in further]
    if live.config.data.objective not in (PREFERENCES, *HEADS):
        further.insert(0, say(", perplexity {perplexity}", perplexity=result.shown_perplexity()))
    sentence = say(
        "step {step}: evaluation loss {loss}{further} ({rows} of {all} rows)",
        step=step, loss=f"{result.loss:.4f}", further=join("", further), rows=f"{result.rows:,}", all=f"{held_out:,}",
    )  # fmt: skip
    if answered:
        rows = f"{answered['answered_rows']:,}"
        sentence = join("; ", [sentence, say("{scores} ({rows} rows)", scores=", ".join(of_answers), rows=rows)])
    if live.best.step and not is_best:
        sentence = join(
            "; ", [sentence, say("step {step} is still the best, and the model to be published", step=live.best.step)]
        )
    live.log.event("eval", sentence, step=step, **result.figures(), **scores, **answered, **means)
    for sample in samples:
        live.log.progress.sample(sample.prompt, sample.answer, sample.reference)
        live.log.event("sample", step=step, **asdict(sample))
    live.log.memory(step, "evaluation")
    return is_best


def _scores(live: LiveRun) -> tuple[dict[str, float], list[Sample]]:
    """Of answers to each validation set; where sets have names, the mean over them and those of each."""
    sets = live.run.validation.sets
    if not sets:
        return _scores_of(live)
    found = {name: _scores_of(live, rows) for name, rows in sets.items()}
    scores = [of_set for of_set, _ in found.values()]
    means = {name: sum(of_set[name] for of_set in scores) / len(scores) for name in scores[0]}
    own = {f"{name}/{score}": value for name, (of_set, _) in found.items() for score, value in of_set.items()}
    return {**means, **own}, [samples[0] for _, samples in found.values() if samples]


def _scores_of(live: LiveRun, rows: range | None = None) -> tuple[dict[str, float], list[Sample]]:
    """So many answers at once as what is free may hold; half as many where memory does not suffice."""
    run = live.run
    free = live.controller.free_bytes()
    while True:
        try:
            return score_answers(
                live.engine.blockwise, run.validation, run.tokenizer, live.config, live.group,
                live.decoding, free, live.monitor, own=live.run.metrics, of=rows, tree=run.tree,
            )  # fmt: skip
        except Exception as error:
            if live.engine.shards is not None or not live.device.is_out_of_memory(error):
                raise
            shortage = free_failed(error, live.device)
            if free < LEAST_FREE_BYTES:  # one row at a time by then
                live.controller.exhausted = shortage.describe("evaluation", 1, "")
                give_up(live)
            free //= 2


def _loss(live: LiveRun, rows: range | None = None) -> Evaluation:
    """Over the first `eval_rows` held-out rows, or those of a set, in smaller micro-batches where memory does not suffice."""
    group = live.group
    size = live.controller.plan.choice.eval_batch_size_per_gpu
    while True:
        try:
            most = live.config.train.eval_rows
            batches = live.run.validation.evaluation_batches(most, size, group.rank, group.size, rows)
            if live.config.data.objective not in HEADS:
                return losses.evaluate(live.engine.blockwise, batches, group, live.device.torch_device)
            scores = LabelScores(live.config.model.label_names)
            result = losses.evaluate(live.engine.blockwise, batches, group, live.device.torch_device, scores.add)
            scores.gather(group)
            return replace(result, metrics={**result.metrics, **scores.result()})
        except Exception as error:
            if live.engine.shards is not None or not live.device.is_out_of_memory(error):
                raise
            size = live.controller.after_evaluation_out_of_memory(error, size, live.state.step)
        if live.controller.exhausted:
            give_up(live)
