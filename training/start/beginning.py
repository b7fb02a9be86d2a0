"""What does a run go on from, and with which rows? Base, tokenizer and earlier run are chosen, and the rows prepared; no torch.

Preparing rows takes memory of its own, in other processes of this run. So it comes before torch, which takes as much again.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from config import PREFERENCES, Config, UserError
from data.prepare.preparing import Prepared, in_child, prepare
from data.prepare.task import file_problems
from language import say
from model.formats.answering import HEEDED, answers_by, remarks
from model.formats.checksums import refuse_damaged
from model.formats.shape_file import read_config
from settings.fields import AUTO
from training.evaluation.scores import metric_names
from training.report.heartbeat import PREPARING_FILE
from training.start.adapted import check_trained, home_of, with_form_of
from training.start.base import MODEL_FIELDS, choose_base
from training.start.resuming import find_run_to_resume, resumed_config, unused_places

# what a new model takes over of how its base answers; of the longest answer, where that is longer than what it is trained on
TAKEN = (*HEEDED, "max_new_tokens")


@dataclass
class Begun:
    """What a run goes on from, before its rows are opened.

    Args:
        base: folder to load weights from; None: from scratch. run_dir: of the run that is resumed; None: a new one.
        notes: what is still to be told. told: what was told at once, for the log.
    """

    config: Config
    prepared: Prepared
    base: Path | None
    run_dir: Path | None
    notes: list[str]
    told: Sequence[str]


def begin(config: Config, tell: Callable[[str], object]) -> Begun:
    """Decide what a training run goes on from, and prepare its rows. Reads and caches data; creates no run folder.

    Args:
        tell: tells at once what the run starts from, where nobody has named it: data may take hours to prepare.
    """
    notes: list[str] = []
    run_dir = None
    metric_names(config.metrics.metrics)  # else unknown names are told at the first evaluation, or never
    if config.train.is_keep_training:
        run_dir = find_run_to_resume(config)
        typed, config = config, resumed_config(config, run_dir)
        notes += unused_places(typed, run_dir)
    try:
        base, told = choose_base(config, run_dir)
    except UserError as error:  # files may be missing as well, and would be told only once this is mended
        raise UserError(*error.problems, *file_problems(config.data)) from None
    for text in told:
        tell(text)
    if run_dir is None:
        _refuse_to_replace_its_start(config, base)
        learns = config.train.is_finetune or config.data.objective == PREFERENCES
        if config.train.finetune_from == AUTO and learns:
            # so that a resume before the first checkpoint chooses the same
            config = config.changed(finetune_from=None if base is None else str(base.absolute()))
    if base is not None:
        home = home_of(base, config)
        for place in dict.fromkeys((base, home) if run_dir is None else (home,)):
            refuse_damaged(place, "finetune_from")  # a checkpoint of this run was looked at before
        config = _with_shape_of(config, home)
        # where it goes on, its checkpoint alone knows how long an answer may be; what its first start has told is not repeated
        config = _with_answers_of(config, notes if run_dir is None else [], home, base)
        if config.data.tokenizer_dir == AUTO:
            config = config.changed(tokenizer_dir=str(home))
    config = with_form_of(config, base)
    if problems := check_trained(config, base):
        raise UserError(*problems)
    note = Path(config.run.log_dir, config.run.run_name, PREPARING_FILE)
    return Begun(config, in_child(prepare, config, note), base, run_dir, notes, told)


def _refuse_to_replace_its_start(config: Config, base: Path | None) -> None:
    """A new run that takes the place of another may not start from what goes with it.

    Raises:
        UserError: it would.
    """
    replaced, tokenizer = Path(config.run.output_dir, config.run.run_name).resolve(), config.data.tokenizer_dir
    read = [] if base is None else [base, home_of(base, config)]
    read += [] if tokenizer == AUTO else [Path(tokenizer)]
    for folder in read:
        if folder.resolve().is_relative_to(replaced):
            told = "--run_name = {run}, would replace {folder}, which this run starts from; name another run"
            raise UserError(say(told, run=config.run.run_name, folder=folder))


def _with_answers_of(config: Config, notes: list[str], *places: Path) -> Config:
    """The settings with what the base says of how it answers, where nobody says so now: the new model answers so too.

    Args:
        notes: gets what the new model does not take over. places: an adapter's base, and the adapter, whose word goes before.
    """
    taken: dict[str, Any] = {}
    for place in dict.fromkeys(places):
        found, problems = answers_by(place)
        taken |= {name: value for name, value in found.items() if name in TAKEN and not config.given(name)}
        notes += [say("{problem}; the new model answers without it", problem=problem) for problem in problems]
        notes += [say("{keys}: not known, passed over", keys=keys) for keys in remarks(place)]
    return config.changed(**taken)


def _with_shape_of(config: Config, base: Path) -> Config:
    """The checkpoint decides the shape; a flag that says otherwise is refused. Dropout is not part of the shape."""
    shape = read_config(base)
    problems = [
        f"--{name} = {getattr(config.model, name)}, the checkpoint {base} is of another shape ({getattr(shape, name)}); leave it out"
        for name in MODEL_FIELDS
        if config.given(name) and name != "dropout_rate" and getattr(config.model, name) != getattr(shape, name)
    ]
    if problems:
        raise UserError(*problems)
    return dataclasses.replace(config, model=dataclasses.replace(shape, dropout_rate=config.model.dropout_rate))
