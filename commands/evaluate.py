"""`evaluate`: loss, perplexity and scores of a trained model on rows that the user names."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path

from accelerate import Accelerator

from commands.answering import find_answering
from commands.generate import cut_note
from commands.new_folder import check_output, holding_output
from data.batches.collate import Batch
from data.batches.loader import StepLoader
from data.prepare.encode import unknown_warning
from data.prepare.preparing import Prepared, checked_in_child, prepare_evaluation
from data.shards.store import VALIDATION
from language import say
from limits import ANSWERED_TOGETHER
from memory.answers import AnswerBatch, does_not_hold, rows_to_measure
from memory.budget import host_budget
from memory.monitor import watched
from memory.processes import ProcessTree
from settings.consistency import CLASS_SCORES, NUMBER_SCORES, RANKED, check, ranked_words
from settings.declared import HEAD_EVAL_ROWS, MOST_TOKENS, Config, places, settings_by_name
from settings.errors import UserError, refuse
from settings.fields import AUTO, counted
from settings.tasks import MODEL_HEADS, command_of, task_named
from storage import atomic_file, writing
from tasks.base import Outputs, Watch
from training.evaluation.losses import Evaluation, mean_of_sets
from training.evaluation.losses import evaluate as measure_loss
from training.evaluation.samples import SHOWN, References, Sample, generate_metrics
from training.evaluation.scores import WORD_SCORES, AnswerScores, metric_names
from training.evaluation.stopping import LOSS
from training.loaded_model import LoadedModel, load_model
from training.processes.group import Group
from training.processes.launch import local_processes, num_processes
from training.report.log_files import plain
from training.report.progress import Progress
from training.saved_model import SavedModel
from training.setup.answer_list import unlisted_note
from units import MIB, format_size

# What the run that trained a model says of how its rows were made and are measured: these groups, and single settings.
GROUPS_OF_ROWS = ("data", "tokenizer", "cleaning")
SETTINGS_OF_ROWS = ("is_finetune", "eval_rows", "eval_batch_size_per_gpu", "seed")
EVALUATION_BATCH = 4  # rows at once where eval_batch_size_per_gpu is auto
PREPARING_BYTES = 64 * MIB  # of the child that prepares rows, of which most is Python and pyarrow


@holding_output
def evaluate(config: Config) -> Evaluation:
    """Measure on `validation_file`, or on the rows that the model's run held out.

    Returns:
        loss and perplexity; its `metrics` hold the scores of the answers, in percent, or those of predicted labels.
    Raises:
        UserError: model or data are not usable. DoesNotFit: the budget does not hold the work. OverBudget: it was
            measured, and took more.
    """
    config, model, tree = find_answering(config, "evaluate", ranks=True)
    names = metric_names(config.metrics.metrics, ranked_words(config))
    config, prepared, loader = evaluation_rows(config, model)
    rows, answered = _row_counts(config, loader, prepared.objective)
    asked = config.train.eval_batch_size_per_gpu
    how = config.generate
    # before memory is measured: its libraries count to what the program takes
    signatures = AnswerScores(names).signatures if answered else {}
    trained = load_model(config, model, AnswerBatch(1, *loader.longest), tree)
    batch_size = rows_to_measure(trained.held, trained.budget.limit(), asked, EVALUATION_BATCH, loader.longest)
    batch = AnswerBatch.by(how, min(answered, ANSWERED_TOGETHER), loader.longest[0])
    flag = "eval_batch_size_per_gpu"
    at_once = trained.rows_at_once(AUTO if asked == AUTO else batch_size, batch, flag) if answered else 0
    group = Group(Accelerator(cpu=trained.device.name == "cpu"))
    counts = (prepared.counts[f"validation_{name}"] for name in ("unknown_tokens", "tokens"))
    if warning := unknown_warning(*counts):
        Progress(1, group.is_main, stream=sys.stderr).warn(warning)

    def answer(inputs: list[list[int]]) -> list[list[list[int]]]:
        ranked = trained.writer(config).ranked(inputs, config.answer.num_answers)
        return [[one.tokens for one in best] for best in ranked]

    task, confusions = task_named(prepared.objective), list[tuple[str, str]]()
    with (
        watched(trained.monitor, f"--eval_batch_size_per_gpu={max(1, batch_size // 2)}"),
        _predictions_file(config, trained, prepared) as write,
    ):
        results, samples, ended, unlisted = dict[str, Evaluation](), list[Sample](), 0, list[str]()
        right = References()
        for name, of in (loader.sets or {"": range(loader.num_rows)}).items():
            label_scores = task.new_scores(prepared.labels, write)
            batches = loader.evaluation_batches(rows, batch_size, group.rank, group.size, of)
            results[name] = measure_loss(trained.blockwise, batches, group, trained.device.torch_device, label_scores)
            confused = label_scores.table()
            confusions += [(say("set"), name)] * bool(name and confused) + confused
            if answered:
                scores, shown, cut = generate_metrics(
                    answer, loader, trained.tokenizer, how, group,
                    rows=answered, batch_size=at_once, names=names, shown=SHOWN, of=of,
                )  # fmt: skip
                results[name].metrics.update(scores)
                samples, ended = [*samples, *shown], ended + cut
                unlisted += [] if tree is None else unlisted_note(tree, loader, answered, of)
                right.add(loader, trained.tokenizer, answered, of)
        if answered and right.are_words and config.metrics.metrics == AUTO:
            names = [name for name in names if name in WORD_SCORES or RANKED.fullmatch(name)]
            for each in results.values():
                scored = {name: each.metrics[name] for name in names if name in each.metrics}
                each.metrics.clear()
                each.metrics.update(scored)
            signatures = {name: text for name, text in signatures.items() if name in names}
        result = mean_of_sets(results) if loader.sets else results[""]
        answered = sum(min(answered, len(of)) for of in loader.sets.values()) or min(answered, loader.num_rows)
        table = [*_table(result, loader, prepared, answered, right.unknown), *confusions]
        if right.counts - {1}:  # as sacreBLEU writes it
            number = "var" if len(right.counts) > 1 else max(right.counts)
            signatures = {name: text.replace("nrefs:1|", f"nrefs:{number}|") for name, text in signatures.items()}
        table += [(f"  sacreBLEU {name}", signature) for name, signature in signatures.items()]
        table += [(say("cut"), cut_note(ended, answered, config))] if ended else []
        table += [(say("unlisted"), note) for note in unlisted]
        table += prepared.unread
        if config.plan.json and group.is_main:
            told = {
                "model": str(trained.folder),
                **result.figures(),
                "answers": answered,
                "sacrebleu": signatures,
            }
            print(json.dumps(plain({**told, "peak_bytes": trained.monitor.peak_bytes}), indent=1))
        elif not config.plan.json:
            _show(trained, table, samples, trained.monitor.peak_bytes, group.is_main)
    return result


@contextmanager
def _predictions_file(config: Config, trained: LoadedModel, prepared: Prepared) -> Iterator[Watch | None]:
    """What writes predictions beside labels, a JSON line a row, in the order of rows; None where no file is asked for."""
    if config.answer.output is None:
        yield None
        return
    path, task = Path(config.answer.output), task_named(prepared.objective)
    if task.writes_text:
        raise UserError(say("--output = {path}, is for predicted labels; write answers with generate", path=path))
    if num_processes() > 1:
        raise UserError(
            say("--output = {path}, is written by one process; start it by python, without a launcher", path=path)
        )
    check_output(path, config.run.overwrite)
    with writing("output", path.parent), atomic_file(path) as temporary, temporary.open("w", encoding="utf8") as file:

        def write(batch: Batch, outputs: Outputs) -> None:
            for row in task.rows_beside_labels(batch, outputs, prepared.labels, trained.tokenizer):
                file.write(json.dumps(row, ensure_ascii=False) + "\n")

        yield write


def evaluation_rows(config: Config, model: SavedModel) -> tuple[Config, Prepared, StepLoader]:
    """The rows that a model is measured on, and the settings by which they are read.

    Raises:
        UserError: the data are not usable. DoesNotFit: the budget does not hold the child that prepares them.
    """
    config = _data_settings(config, model)
    total = host_budget(config.memory.memory_budget, local_processes()).host_bytes
    parts = {"base": ProcessTree().usage().anon_bytes, "preparation": PREPARING_BYTES}
    if sum(parts.values()) > total:
        raise does_not_hold(total, say("the preparation of the rows"), parts)
    prepared = checked_in_child(prepare_evaluation, config, (VALIDATION,))
    loader = StepLoader(
        prepared.validation_dir,
        prepared.objective,
        config.data,
        config.model,
        config.run.seed,
        config.memory.ultra_low_mem is True,
    )
    return config, prepared, loader


def _row_counts(config: Config, loader: StepLoader, objective: str) -> tuple[int, int]:
    """Rows whose loss is measured, and rows that are answered."""
    wanted = config.given("eval_rows") or not config.given("validation_file")
    rows = config.train.eval_rows if wanted else loader.num_rows
    asked = config.metrics.eval_generate_rows
    if asked != AUTO:
        return rows, int(asked)
    return rows, min(rows, task_named(objective).answered_rows)


def _table(
    result: Evaluation, loader: StepLoader, prepared: Prepared, answered: int, unknown: int
) -> list[tuple[str, str]]:
    """What is shown, line by line; `unknown`: answered rows whose reference has unknown tokens."""
    cut = prepared.counts.get("validation_cut_rows", 0)
    measured = say(
        "{rows} of {all} ({objective})",
        rows=f"{result.rows:,}", all=f"{loader.num_rows:,}", objective=prepared.objective,
    )  # fmt: skip
    rows: list[tuple[str, str]] = [
        (say("rows"), measured),
        (say("target tokens") if result.is_of_text else say("labels"), f"{result.tokens:,}"),
        (say("loss"), f"{result.loss:.4f}"),
    ]
    rows += [(say("perplexity"), result.shown_perplexity())] if result.is_of_text else []
    rows += [(say("cut"), say("{count} to the maximum length", count=counted(cut, "row")))] if cut else []
    if bad := prepared.counts.get("validation_bad_rows", 0):
        rows.append((say("left out"), say("{count} that cannot be read", count=counted(bad, "row"))))
    if answered == loader.num_rows:
        rows.append((say("answers"), say("{count}, scores in percent", count=f"{answered:,}")))
    elif answered:
        part = "{count} of {all}, scores in percent; --eval_generate_rows={rows} answers all"
        numbers = {"count": f"{answered:,}", "all": f"{loader.num_rows:,}", "rows": loader.num_rows}
        rows.append((say("answers"), say(part, **numbers)))
    told = "{count} with unknown tokens in the reference, which no answer matches"
    rows += [(say("unknown"), say(told, count=counted(unknown, "row")))] if unknown else []
    fine = (LOSS, *CLASS_SCORES, *NUMBER_SCORES)
    figures = ((name, score, 4 if name.rpartition("/")[2] in fine else 2) for name, score in result.metrics.items())
    return rows + [(f"  {name}", f"{score:.{digits}f}") for name, score, digits in figures]


def _show(trained: LoadedModel, table: list[tuple[str, str]], samples: list[Sample], peak: int, is_main: bool) -> None:
    progress = Progress(1, is_main)
    budget = format_size(trained.budget.host_bytes)
    memory = say("{peak} of {budget}", peak=format_size(peak), budget=budget)
    progress.table(say("evaluation of {folder}", folder=trained.folder), [*table, (say("peak memory"), memory)])
    for sample in samples:
        progress.sample(sample.prompt, sample.answer, sample.reference)


def _data_settings(config: Config, model: SavedModel) -> Config:
    """The settings by which rows are read: those of the run that trained the model, where the user names nothing.

    A validation file that is given is the only one that is read. A model trained on preferences is measured on the answers that
    were chosen. Where things are written is never taken from the run.
    """
    settings = settings_by_name()
    saved = {
        name: value
        for name, value in model.run_settings.items()
        if (settings[name][0] in GROUPS_OF_ROWS or name in SETTINGS_OF_ROWS) and name not in places()
    }
    if command_of(saved.get("objective")) == "dpo":
        saved["objective"] = "pairs"
        if not config.given("validation_file"):
            saved["response_column"] = saved.get("chosen_column", config.data.chosen_column)
    head = MODEL_HEADS[model.shape.head]
    if head.has_labels:
        # Where nothing else is said, nothing is cut, as in `train`.
        saved = {"max_seq_len": MOST_TOKENS, "eval_rows": HEAD_EVAL_ROWS, **saved, "objective": head.task}
    of_model = {**asdict(model.shape), "tokenizer_dir": str(model.tokenizer), "extra_tokens": None}
    config = config.with_saved(saved).changed(**of_model)
    refuse(check(config))
    if config.given("validation_file") and config.data.validation_file is None:
        raise UserError("--validation_file = none, is not a file; give one, or omit the flag")
    return config
