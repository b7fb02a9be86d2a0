"""Which model does a run leave behind? The best of its checkpoints, or the mean of its last ones where that is better.

The mean takes no memory while the run trains: it is formed of the checkpoints that lie on the disk (`model.formats.mean`), when
all steps are done and the engine has made room. It is evaluated as every checkpoint was, and is none itself: a run that goes
on does so from its last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from language import say
from model.formats.checksums import seal
from model.formats.mean import write_mean
from settings.fields import UserError, counted
from training.checkpoints.durable import remove
from training.checkpoints.folder import MEAN, step_of
from training.checkpoints.runs import publish
from training.evaluating import Evaluator
from training.live import LiveRun
from training.processes.collectives import by_main


def publish_mean(live: LiveRun, evaluator: Evaluator) -> bool:
    """Make the mean of the last checkpoints the run's model, where it is asked for and better than the best of them.

    Returns:
        whether it became that; where no rows are held out, it does.
    Raises:
        UserError: the disk is full or cannot be written; the checkpoints are whole.
    Memory: the model's again, in place of the one that has trained.
    """
    checkpoints, asked = live.checkpoints, live.config.train.average_checkpoints
    found = by_main(live.accelerator, lambda: checkpoints.newest(asked)) if asked > 1 else []
    if len(found) < 2:
        return False
    folder, step = checkpoints.folder / MEAN, live.state.step
    live.release()
    by_main(live.accelerator, lambda: _write(found, folder, live))
    live.take(folder)
    steps = counted(len(found), "checkpoint")
    live.journal.tell(
        say(
            "mean of the last {checkpoints}, of steps {first} to {last}",
            checkpoints=steps,
            first=step_of(found[0]),
            last=step,
        )
    )
    is_best = evaluator.evaluate() or not live.start.validation.num_rows  # then nothing speaks against it
    if is_best and live.is_main:
        publish(folder, live.start.run_dir)
    if not is_best:
        live.journal.tell(say("it is no better than the best checkpoint, which is published"))
    live.accelerator.wait_for_everyone()  # all have read it
    if live.is_main:
        remove(folder)
    return is_best


def _write(found: list[Path], folder: Path, live: LiveRun) -> None:
    try:
        remove(folder)
        folder.mkdir()
        write_mean(found, folder)
        seal(folder)
    except (OSError, ValueError) as error:
        remove(folder)
        raise UserError(
            f"--average_checkpoints = {live.config.train.average_checkpoints}, the mean cannot be written: {error}; free "
            "space, or --average_checkpoints=0 --is_keep_training=True publishes the best checkpoint"
        ) from error
