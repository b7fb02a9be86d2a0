"""The model that a run leaves behind: the best of its checkpoints, or the mean of its last ones where that is better.

The mean takes no memory while the run trains: it is formed of the checkpoints that lie on the disk
(`model.formats.mean`), when all steps are done and the engine has made room. It is evaluated as every checkpoint was,
and is none itself: a run that goes on does so from its last checkpoint.
"""

from __future__ import annotations

from pathlib import Path

from model.formats.checksums import seal
from model.formats.mean import write_mean
from settings.errors import UserError, reason_of
from settings.fields import counted
from support.language import say
from support.storage import remove
from training.checkpoints.folder import MEAN, step_of
from training.checkpoints.runs import publish
from training.evaluating import evaluate
from training.live import LiveRun


def publish_mean(live: LiveRun) -> bool:
    """Make the mean of the last checkpoints the run's model, where it is asked for and better than the best of them.

    All processes call this.

    Returns:
        whether there was one: then the run has the weights of what is published.
    Raises:
        UserError: the disk is full or cannot be written; the checkpoints are whole, and the best is published.
    Memory: the model's again, in place of the one that has trained.
    """
    count = live.train.average_checkpoints
    checkpoints = live.group.run_on_main(lambda: live.checkpoints.last(count)) if count > 1 else []
    if len(checkpoints) < 2:
        return False
    if not live.group.all_reduce_min(float(all(path.is_dir() for path in checkpoints)))[0]:
        live.log.tell(say("checkpoints were not averaged: not all machines can read them"))
        return False
    if live.best.value is None:  # A run that is continued by another measure has nothing to compare with.
        evaluate(live)
    folder = live.checkpoints.folder / MEAN
    live.release()
    live.group.run_on_main(lambda: _write(checkpoints, folder, count))
    live.take(folder)
    live.log.tell(
        say(
            "average of the last {checkpoints}, steps {first} to {last}",
            checkpoints=counted(len(checkpoints), "checkpoint"),
            first=step_of(checkpoints[0]),
            last=step_of(checkpoints[-1]),
        )
    )
    # Without held-out rows, nothing speaks against the mean.
    is_better = evaluate(live, len(checkpoints)) or not live.run.validation.num_rows
    if is_better and live.is_main:
        publish(folder, live.run.run_dir)
    if not is_better:
        live.log.tell(say("the average is no better than the best checkpoint, which is published instead"))
        live.release()
        live.take(live.group.run_on_main(lambda: live.checkpoints.named_best() or checkpoints[-1]))
    live.group.wait()  # All have read it.
    if live.is_main:
        remove(folder)
    return True


def _write(checkpoints: list[Path], folder: Path, count: int) -> None:
    try:
        remove(folder)
        folder.mkdir()
        write_mean(checkpoints, folder)
        seal(folder)
    except (OSError, ValueError) as error:
        remove(folder)
        raise UserError(
            "--average_checkpoints = {asked}, the mean cannot be written: {reason}; the best checkpoint is "
            "published; free space and continue with --is_keep_training=True to have the mean",
            asked=count,
            reason=reason_of(error),
        ) from error
