"""One process of a run, for test_group.py: meets the others, then does what its rank is told to do, in place of a
command.
"""

from __future__ import annotations

import os
import signal
import sys

from accelerate import Accelerator

import train_low_mem
from settings.errors import UserError
from training.processes.group import Group


def act(words: list[str]) -> int:
    """Rank 1 does the deed; the others wait for it, as they would in a step."""
    (deed,) = words
    with Group(Accelerator(cpu=True)) as group:
        group.set_resume_command("train --is_keep_training=True --run_name=ours")
        check(group)
        if group.rank == 1 and deed == "refuse":
            raise UserError("--train_file = x, is torn on this machine")
        elif group.rank == 1 and deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        group.wait()
    return 0


def check(group: Group) -> None:
    mine = float(group.rank + 1)
    assert group.all_reduce_sum(mine, 0.1) == [3.0, 0.2]
    assert group.all_reduce_min(mine, -mine) == [1.0, -2.0] and group.all_reduce_max(mine) == [2.0]
    assert group.broadcast(mine) == 1.0 and group.first_of(mine if group.rank else None) == 2.0
    assert group.run_on_main(lambda: mine) == 1.0
    first = group.is_first_here
    with group.first_here():
        if first:
            os.environ["MADE"] = "1"
    assert first == ("MADE" in os.environ)


if __name__ == "__main__":
    train_low_mem._dispatch = act
    sys.exit(train_low_mem.main(sys.argv[1:]))
