"""Does this start continue with an earlier run? As asked, or because a launcher has started the same command again.

torchrun restarts all processes of a run when one fails or a machine joins again, with the very same command line, and a
batch system does the same a day later. So the command itself has to be able to go on: `--is_keep_training=auto`.
Under torchrun's own restarts a run that has a name continues without being asked to.
"""

from __future__ import annotations

from pathlib import Path

from config import Config
from settings.fields import AUTO
from training.checkpoints.mirror import Mirror
from training.checkpoints.runs import SETTINGS_FILE
from training.processes.launch import restarts


def goes_on(config: Config, brings: bool = True) -> bool:
    """Whether to resume; brings the copies at `checkpoint_mirror` where this machine lacks them.

    Args:
        brings: whether this process does that: one on every machine, before the others. The main process's answer counts.
    Raises:
        UserError: the mirror cannot be read.
    """
    asked, run = config.train.is_keep_training, config.run
    restarted = restarts() > 0
    if run.run_name == AUTO:
        return asked is True
    if asked is False and not restarted:
        return False
    folder = Path(run.output_dir) / run.run_name
    if brings and run.checkpoint_mirror is not None:
        Mirror(run.checkpoint_mirror, run.run_name).restore(folder, config.train.keep_latest_n_ckp)
    return asked is True or (folder / SETTINGS_FILE).is_file()
