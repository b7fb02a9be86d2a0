"""`evaluate`: loss, perplexity and scores of a trained model on rows that the user names."""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from accelerate import Accelerator

from commands.answering import find_answering
from commands.generate import cut_note
from commands.new_folder import check_output, holding_output
from data.batches.collate import Batch
from data.batches.loader import StepLoader
from data.prepare.encode import unknown_warning
from data.prepare.preparing import Prepared, in_child, prepare_evaluation
from data.shards.store import VALIDATION
from data.tokenizers.tokenizer import Tokenizer
from devices.sizes import ANSWERED_TOGETHER
from memory.answers import AnswerBatch, does_not_hold, rows_to_measure
from memory.budget import host_budget
from memory.monitor import watched
from memory.processes import ProcessTree
from settings.consistency import RANKED, check
from settings.declared import HEAD_EVAL_ROWS, MOST_TOKENS, Config, places, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted
from settings.tasks import MODEL_HEADS, TASKS, command_of, task_named
from support.language import say
from support.storage import atomic_file, writing
from support.units import MIB, format_size
from tasks.base import Outputs, Watch
from training.evaluation.losses import Evaluation, mean_of_sets
from training.evaluation.losses import evaluate as measure_loss
from training.evaluation.samples import SHOWN, AnsweredRow, References, generate_metrics
from training.evaluation.scores import WORD_SCORES, AnswerScores, metric_names
from training.evaluation.stopping import LOSS
from training.processes.group import Group
from training.processes.launch import local_processes, num_processes
from training.report.log_files import plain
from training.report.progress import Progress
from training.saved_model import SavedModel
from training.setup.answer_list import unlisted_note

# What the run that trained a model says of how its rows were made and are measured: these groups, and single settings.
GROUPS_OF_ROWS = ("data", "tokenizer", "cleaning")
SETTINGS_OF_ROWS = (
    *("is_finetune", "eval_rows", "eval_batch_size_per_gpu", "seed"),
    *("embedding_loss", "contrastive_temperature", "matryoshka_sizes"),
)
EVALUATION_BATCH = 4  # rows at once where eval_batch_size_per_gpu is auto
BATCH_FLAG = "eval_batch_size_per_gpu"
PREPARING_BYTES = 64 * MIB  # of the child that prepares rows, of which most is Python and pyarrow


@dataclass
class Answers:
    """What is known of the answers to held-out rows, over all validation sets."""

    count: int = 0
    cut: int = 0
    samples: list[AnsweredRow] = field(default_factory=list)
    unlisted: list[str] = field(default_factory=list)
    references: References = field(default_factory=References)


@holding_output
def evaluate(config: Config) -> Evaluation:
    """Measure on `validation_file`, or on the rows that the model's run held out.

    Returns:
        loss and perplexity; its `metrics` hold the scores of the answers, in percent, or those of predicted labels.
    Raises:
        UserError: model or data are not usable. DoesNotFit: the budget does not hold the work. OverBudget: it was
            measured, and took more.
    """
    answering = find_answering(config, "evaluate")
    config = answering.config
    names = metric_names(config.metrics.metrics, config.answer.num_answers)
    config, prepared, loader = evaluation_rows(config, answering.model)
    task = task_named(prepared.objective)
    rows = config.train.eval_rows
    if config.is_set("validation_file") and not config.is_set("eval_rows"):
        rows = loader.num_rows
    answered = min(rows, task.answered_rows)
    if config.metrics.eval_generate_rows != AUTO:
        answered = int(config.metrics.eval_generate_rows)
    # Before memory is measured, since the libraries of scores count to what the program takes:
    signatures = AnswerScores(names).signatures if answered else {}
    trained = replace(answering, config=config).load(AnswerBatch(1, *loader.longest))
    requested = config.train.eval_batch_size_per_gpu
    texts = min(1.0, rows / max(1, loader.num_rows)) * prepared.counts[f"{VALIDATION}_texts"]
    scores_bytes = task.scores_bytes(math.ceil(texts), config.model)
    held_model = replace(trained.held_model, base_bytes=trained.held_model.base_bytes + scores_bytes)
    batch_size = rows_to_measure(held_model, trained.budget.limit(), requested, EVALUATION_BATCH, loader.longest)
    answer_rows = 0
    if answered:
        batch = AnswerBatch.by(config.generate, min(answered, ANSWERED_TOGETHER), loader.longest[0])
        answer_rows = trained.rows_at_once(requested if requested == AUTO else batch_size, batch, BATCH_FLAG)
    group = Group(Accelerator(cpu=trained.device.name == "cpu"))
    counts = (prepared.counts[f"validation_{name}"] for name in ("unknown_tokens", "tokens"))
    if warning := unknown_warning(*counts):
        Progress(1, group.is_main, stream=sys.stderr).warn(warning)

    def answer(inputs: list[list[int]]) -> list[list[list[int]]]:
        ranked = trained.writer(config).ranked(inputs, config.answer.num_answers)
        return [[one.tokens for one in best] for best in ranked]

    results = dict[str, Evaluation]()
    confusions = list[tuple[str, str]]()
    answers = Answers()
    with (
        watched(trained.monitor, f"--{BATCH_FLAG}={max(1, batch_size // 2)}"),
        _predictions_file(config.answer.output, config.run.overwrite, prepared, trained.tokenizer) as write,
    ):
        for name, of in (loader.sets or {"": range(loader.num_rows)}).items():
            label_scores = task.new_scores(prepared.labels, write)
            batches = loader.evaluation_batches(rows, batch_size, group.rank, group.size, of)
            results[name] = measure_loss(trained.blockwise, batches, group, trained.device.torch_device, label_scores)
            confusion = label_scores.table()
            if name and confusion:
                confusions.append((say("set"), name))
            confusions += confusion
            if answered:
                scores, samples, cut = generate_metrics(
                    answer,
                    loader,
                    trained.tokenizer,
                    config.generate,
                    group,
                    rows=answered,
                    batch_size=answer_rows,
                    names=names,
                    num_samples=SHOWN,
                    of=of,
                )
                results[name].metrics.update(scores)
                answers.count += min(answered, len(of))
                answers.cut += cut
                answers.samples += samples
                answers.references.add(loader, trained.tokenizer, answered, of)
                if trained.tree is not None:
                    answers.unlisted += unlisted_note(trained.tree, loader, answered, of)
        if answered and answers.references.are_words and config.metrics.metrics == AUTO:
            of_words = {name for name in names if name in WORD_SCORES or RANKED.fullmatch(name)}
            for name in {*names} - of_words:
                signatures.pop(name, None)
                for result in results.values():
                    result.metrics.pop(name, None)
        result = mean_of_sets(results) if loader.sets else results[""]
        reference_counts = answers.references.counts
        if reference_counts - {1}:
            number = "var" if len(reference_counts) > 1 else max(reference_counts)  # This is how sacreBLEU writes it.
            signatures = {name: text.replace("nrefs:1|", f"nrefs:{number}|") for name, text in signatures.items()}
        if not group.is_main:
            return result
        peak_bytes = trained.monitor.peak_bytes
        if config.plan.json:
            facts = {"model": str(trained.folder), **result.figures(), "answers": answers.count}
            print(json.dumps(plain({**facts, "sacrebleu": signatures, "peak_bytes": peak_bytes}), indent=1))
            return result
        table = [*_table(result, loader.num_rows, prepared, answers), *confusions]
        table += [(f"  sacreBLEU {name}", signature) for name, signature in signatures.items()]
        if answers.cut:
            table.append((say("cut"), cut_note(answers.cut, answers.count, config.generate.max_new_tokens)))
        table += [(say("unlisted"), text) for text in answers.unlisted]
        budget = format_size(trained.budget.host_bytes)
        memory = say("{peak} of {budget}", peak=format_size(peak_bytes), budget=budget)
        title = say("evaluation of {folder}", folder=trained.folder)
        screen = Progress(1)
        screen.table(title, [*table, *prepared.unread, (say("peak memory"), memory)])
        for sample in answers.samples:
            screen.sample(sample.prompt, sample.answer, sample.reference)
    return result


@contextmanager
def _predictions_file(
    output: str | None, overwrite: bool, prepared: Prepared, tokenizer: Tokenizer
) -> Iterator[Watch | None]:
    """What writes predictions beside labels, or texts with their cosines, a JSON line a row, in the order of rows; None
    where no file is asked for.
    """
    if output is None:
        yield None
        return
    path = Path(output)
    task = task_named(prepared.objective)
    if task.writes_text:
        raise UserError(say("--output = {path}, is for predicted labels; write answers with generate", path=path))
    if num_processes() > 1:
        raise UserError(
            say("--output = {path}, is written by one process; start it by python, without a launcher", path=path)
        )
    check_output(path, overwrite)
    with writing("output", path.parent), atomic_file(path) as temporary, temporary.open("w", encoding="utf8") as file:

        def write(batch: Batch, outputs: Outputs) -> None:
            for row in task.prediction_rows(batch, outputs, prepared.labels, tokenizer):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

        yield write


def evaluation_rows(config: Config, model: SavedModel) -> tuple[Config, Prepared, StepLoader]:
    """The rows that a model is measured on, and the settings by which they are read: those of the run that trained the
    model, where the user names nothing.

    A validation file that is given is the only one that is read. A model trained on preferences is measured on the
    answers that were chosen. Where things are written is never taken from the run.

    Raises:
        UserError: the data are not usable. DoesNotFit: the budget does not hold the child that prepares them.
    """
    if config.is_set("validation_file") and config.data.validation_file is None:
        raise UserError("--validation_file = none, is not a file; give one, or omit the flag")
    settings = settings_by_name()
    saved = {
        name: value
        for name, value in model.run_settings.items()
        if (settings[name][0] in GROUPS_OF_ROWS or name in SETTINGS_OF_ROWS) and name not in places()
    }
    if command_of(saved.get("objective")) == "dpo":
        saved["objective"] = "pairs"
        if not config.is_set("validation_file"):
            saved["response_column"] = saved.get("chosen_column", config.data.chosen_column)
    head = MODEL_HEADS[model.shape.head]
    if head.has_vectors:
        saved = {"eval_rows": HEAD_EVAL_ROWS, **saved, "objective": head.task}
    if head.has_labels:
        # Where nothing else is said, nothing is cut, as in `train`.
        saved = {"max_seq_len": MOST_TOKENS, "eval_rows": HEAD_EVAL_ROWS, **saved, "objective": head.task}
    config = config.with_saved(saved).with_changes(
        **vars(model.shape), tokenizer_dir=str(model.tokenizer), extra_tokens=None
    )
    refuse(check(config))
    total = host_budget(config.memory.memory_budget, local_processes()).host_bytes
    parts = {"base": ProcessTree().usage().anon_bytes, "preparation": PREPARING_BYTES}
    if sum(parts.values()) > total:
        raise does_not_hold(total, say("the preparation of the rows"), parts)
    prepared = in_child(prepare_evaluation, config, checked=(VALIDATION,))
    loader = StepLoader(
        prepared.validation_dir,
        prepared.objective,
        config.data,
        config.model,
        config.run.seed,
        config.memory.ultra_low_mem is True,
    )
    return config, prepared, loader


def _table(result: Evaluation, num_rows: int, prepared: Prepared, answers: Answers) -> list[tuple[str, str]]:
    """What is shown, line by line.

    Args:
        num_rows: that are held out.
    """
    measured = say(
        "{rows} of {all} ({objective})", rows=f"{result.rows:,}", all=f"{num_rows:,}", objective=prepared.objective
    )
    rows: list[tuple[str, str]] = [
        (say("rows"), measured),
        (say("target tokens") if result.is_of_text else say("labels"), f"{result.tokens:,}"),
        (say("loss"), f"{result.loss:.4f}"),
    ]
    if MODEL_HEADS[TASKS[prepared.objective].head].has_vectors:
        del rows[1]  # The loss is over rows.
    if result.is_of_text:
        rows.append((say("perplexity"), result.shown_perplexity()))
    if cut := prepared.counts.get("validation_cut_rows", 0):
        rows.append((say("cut"), say("{count} to the maximum length", count=counted(cut, "row"))))
    if bad := prepared.counts.get("validation_bad_rows", 0):
        rows.append((say("left out"), say("{count} that cannot be read", count=counted(bad, "row"))))
    if answers.count:
        text = "{count} of {all}, scores in percent; --eval_generate_rows={rows} answers all"
        if answers.count == num_rows:
            text = "{count}, scores in percent"
        numbers = {"count": f"{answers.count:,}", "all": f"{num_rows:,}", "rows": num_rows}
        rows.append((say("answers"), say(text, **numbers)))
    if unknown := answers.references.unknown:
        text = "{count} with unknown tokens in the reference, so that no answer can match it"
        rows.append((say("unknown"), say(text, count=counted(unknown, "row"))))
    for name, score in result.metrics.items():
        digits = 4 if name.rpartition("/")[2] in (LOSS, *prepared.task.scores) else 2
        rows.append((f"  {name}", f"{score:.{digits}f}"))
    return rows
