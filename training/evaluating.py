"""Evaluation during training, on held-out rows, in what the budget leaves free; and the samples at its end."""

from __future__ import annotations

from dataclasses import asdict, replace

import numpy as np

from data.batches.collate import IGNORED_LABEL
from data.tokenizers.pieces import BROKEN
from engine.micro_batches import to_micro_batch
from language import join, say
from limits import SAMPLE_TOKENS
from memory.answers import AnswerBatch, HeldModel
from memory.cleanup import free_failed
from settings.consistency import HEADS, PREFERENCES
from settings.fields import AUTO
from training.evaluation import losses
from training.evaluation.answers import AnswerBudget, AnswerWriter
from training.evaluation.label_scores import LabelScores, labels_in
from training.evaluation.losses import Evaluation
from training.evaluation.prompt_parts import PromptParts, was_cut
from training.evaluation.samples import SHOWN, Sample, first_rows, generate_metrics
from training.evaluation.scores import metric_names
from training.live import LiveRun
from training.recovering import give_up
from units import MIB

LEAST_FREE_BYTES = MIB
CUT = "[...]"  # behind a sample that was cut at the longest length
UNLABELLED = "-"  # in place of a label that does not count


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
        results, samples = dict[str, Evaluation](), list[Sample]()
        for name, rows in sets.items() or [("", None)]:
            loss = _loss(live, rows)
            scores, shown = _scores(live, rows)
            results[name] = replace(loss, metrics={**loss.metrics, **scores})
            samples += shown[:1] if sets else shown
        result = losses.mean_of_sets(results) if sets else results[""]
    if not result.tokens:
        return False
    asked, held_out = live.config.metrics.eval_generate_rows, live.run.validation.num_rows
    answered = {}
    if scores and asked != AUTO:
        answered["answered_rows"] = sum(min(int(asked), len(rows)) for rows in sets.values() or [range(held_out)])
    is_best = live.evaluated(result.loss, {**result.figures(), **answered}, is_mean=averaged > 0)
    means = {"averaged_checkpoints": averaged} if averaged else {}
    # of each set the loss, and what selects the best checkpoint; all else is in the event
    told = {f"{name}/loss" for name in sets} | {live.config.train.metric_for_best}
    further, of_answers = list[str](), list[str]()
    for name, value in result.metrics.items():
        if name not in told and name.partition("/")[0] in sets:
            continue
        if name.rpartition("/")[2] in scores:
            of_answers.append(f"{name} {value:.3f}")
        else:
            further.append(f", {name} {value:.3f}")
    if live.config.data.objective not in (PREFERENCES, *HEADS):
        further.insert(0, say(", perplexity {perplexity}", perplexity=result.shown_perplexity()))
    sentence = say(
        "step {step}: evaluation loss {loss}{further} ({rows} of {all} rows)",
        step=step, loss=f"{result.loss:.4f}", further=join("", further), rows=f"{result.rows:,}", all=f"{held_out:,}",
    )  # fmt: skip
    if answered:
        count = f"{answered['answered_rows']:,}"
        sentence = join("; ", [sentence, say("{scores} ({rows} rows)", scores=join(", ", of_answers), rows=count)])
    if live.best.step and not is_best:
        still = say("step {step} is still the best, and the model to be published", step=live.best.step)
        sentence = join("; ", [sentence, still])
    live.log.event("eval", sentence, step=step, **result.figures(), **answered, **means)
    for sample in samples:
        live.log.progress.sample(sample.prompt, sample.answer, sample.reference)
        live.log.event("sample", step=step, **asdict(sample))
    live.log.memory(step, "evaluation")
    return is_best


def _scores(live: LiveRun, rows: range | None) -> tuple[dict[str, float], list[Sample]]:
    """So many answers at once as what is free may hold; half as many where memory does not suffice."""
    free = live.controller.plan.budget_bytes - live.controller.budget.used()
    while True:
        try:
            return score_answers(live, free, rows)
        except Exception as error:
            if not live.device.is_out_of_memory(error):
                raise
            shortage = free_failed(error, live.device)
            if free < LEAST_FREE_BYTES:  # one row at a time by then
                live.controller.exhausted = shortage.describe("evaluation", 1, "")
                give_up(live)
            free //= 2


def score_answers(live: LiveRun, free_bytes: int, of: range | None) -> tuple[dict[str, float], list[Sample]]:
    """Score answers to the first `eval_generate_rows` held-out rows: greedy ones, or the `num_answers` best.

    Args:
        free_bytes: what may be taken now; so many rows are answered at once as fit, one at least.
        of: the rows of one validation set; None: all.
    Returns:
        score name -> percentage, empty where no rows were asked for; and a few samples.
    Memory: at most `free_bytes` where one row fits.
    """
    run, asked, blockwise = live.run, live.config.metrics.eval_generate_rows, live.engine.blockwise
    rows = 0 if asked == AUTO else min(int(asked), run.validation.num_rows)
    if not rows:
        return {}, []
    several = live.config.answer.num_answers
    # beams only for several answers, since they take several times as long
    settings = live.decoding if several > 1 else replace(live.decoding, num_beams=1)
    choices = 0 if run.tree is None else run.tree.most_choices(settings.num_beams)
    used_bytes = live.monitor.sample().anon_bytes
    model = HeldModel(blockwise.model.config, live.controller.plan.choice, 0)
    model = replace(model, base_bytes=used_bytes - model.weight_bytes)  # The model is in memory already.

    def predict(batch: AnswerBatch) -> dict[str, int]:
        return model.answering(replace(batch, choices=choices))

    budget = AnswerBudget(predict, used_bytes + free_bytes, live.monitor)
    batch_size = max(1, budget.rows(AnswerBatch.by(settings, rows, run.validation.longest[0])))

    def at_once(batch: AnswerBatch) -> int:
        rows = min(batch.rows, batch_size)  # Long prompts may be answered in parts, which are more than the rows.
        return max(1, budget.rows(replace(batch, rows=rows))) if budget.excess_bytes else rows

    parts = PromptParts.asked(run.tokenizer, run.tokenizer.template, settings)
    writer = AnswerWriter(blockwise, settings, at_once, budget=budget, tree=run.tree, parts=parts)

    def answer(inputs: list[list[int]]) -> list[list[list[int]]]:
        return [[one.tokens for one in best] for best in writer.ranked(inputs, several)]

    scores, samples, _ = generate_metrics(
        answer, run.validation, run.tokenizer, settings, live.group,
        rows=rows, batch_size=batch_size, names=metric_names(live.config), shown=SHOWN, own=run.metrics, of=of,
    )  # fmt: skip
    return scores, samples


def _loss(live: LiveRun, rows: range | None) -> Evaluation:
    """Over the first `eval_rows` held-out rows, or those of a set, in smaller micro-batches where memory does not suffice."""
    group = live.group
    most = live.config.train.eval_rows
    while True:
        size = live.controller.plan.choice.eval_batch_size_per_gpu
        try:
            batches = live.run.validation.evaluation_batches(most, size, group.rank, group.size, rows)
            if live.config.data.objective not in HEADS:
                return losses.evaluate(live.engine.blockwise, batches, group, live.device.torch_device)
            scores = LabelScores(live.config.model.label_names)
            result = losses.evaluate(live.engine.blockwise, batches, group, live.device.torch_device, scores.add)
            scores.gather(group)
            return replace(result, metrics={**result.metrics, **scores.result()})
        except Exception as error:
            if not live.device.is_out_of_memory(error):
                raise
            live.controller.after_evaluation_out_of_memory(error, live.state.step)
        if live.controller.exhausted:
            give_up(live)


def show_samples(live: LiveRun) -> str | None:
    """Answer the first `sample_rows` held-out rows greedily, on the screen and in metrics.jsonl.

    Returns:
        the text of the first prompt, for the next command to type; None where there are no rows.
    """
    run, count, tokenizer = live.run, live.config.train.sample_rows, live.run.tokenizer
    rows = list(first_rows(run.validation, max(count, 1)))
    prompts = [_whole(tokenizer.decode_with_unknown(source)) for source, _ in rows]
    if count and rows:
        decoding = live.decoding
        settings = replace(decoding, num_beams=1, max_new_tokens=min(decoding.max_new_tokens, SAMPLE_TOKENS))
        parts, blockwise = PromptParts.asked(tokenizer, tokenizer.template, settings), live.engine.blockwise
        writer = AnswerWriter(blockwise, settings, lambda writing: writing.rows, tree=run.tree, parts=parts)
        answers = writer.answers([source for source, _ in rows])
        live.log.progress.note(say("samples"))
        unshown = (tokenizer.pad_id, tokenizer.eos_id)  # sentinels are shown: where text is masked they are the answer
        for prompt, answer, (_, target) in zip(prompts, answers, rows, strict=True):
            text = tokenizer.decode([token for token in answer if token not in unshown], skip_special=False)
            reference = _whole(tokenizer.decode(target, skip_special=False).removesuffix(tokenizer.names["eos_token"]))
            is_cut = was_cut(answer, settings, tokenizer.eos_id)
            live.log.progress.sample(prompt, f"{text} {CUT}" if is_cut else text, reference)
            live.log.event("sample", prompt=prompt, answer=text, reference=reference)
    return prompts[0] if prompts else None


def show_predictions(live: LiveRun) -> None:
    """Show what a head predicts for the first `sample_rows` held-out rows, on the screen and in metrics.jsonl.

    Memory: evaluation of one row.
    """
    run, count, blockwise = live.run, live.config.train.sample_rows, live.engine.blockwise
    names = run.prepared.labels  # of classes; none: labels are numbers
    if count and run.validation.num_rows:
        live.log.progress.note(say("samples"))
    for batch in run.validation.evaluation_batches(count, 1):
        (logits,) = blockwise.predict([to_micro_batch(batch, blockwise.model.config, live.device.torch_device)])
        right, outputs = labels_in(batch), logits.float().cpu().numpy()
        is_counted = right != IGNORED_LABEL if names else ~np.isnan(right)
        sides = []
        for side in (outputs.argmax(-1) if names else outputs[:, 0], right):
            words = [(names[int(one)] if names else f"{one:.4g}") if has_label else UNLABELLED
                     for one, has_label in zip(side, is_counted, strict=True)]  # fmt: skip
            words = words[:-1] if len(words) > 1 else words  # end of text has none
            sides.append(("" if all(len(name) == 1 for name in names) and names else " ").join(words))
        answer, reference = sides
        prompt = _whole(run.tokenizer.decode_with_unknown(batch.input_ids[0, : batch.input_lengths[0]]))
        live.log.progress.sample(prompt, answer, reference, is_label=True)
        live.log.event("sample", prompt=prompt, answer=answer, reference=reference)


def _whole(text: str) -> str:
    """A row's text without halves of letters, which a cut or a mask inside their bytes leaves."""
    return text.replace(BROKEN, "")
