"""One process of a run, for test_peers.py: meets the others, then does what its rank is told to do."""

from __future__ import annotations

import os
import signal
import sys
import time
from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from accelerate import Accelerator

from settings.errors import DoesNotFit, UserError
from training.processes.collectives import group_of_hosts, group_settings, least_of, most_of, sum_over
from training.processes.peers import Peers
from training.report.endings import Interrupted


def act(deed: str, accelerator: Accelerator) -> None:
    """Rank 1 does the deed; the others wait in a collective, as they would in a step."""
    if accelerator.process_index == 1:
        if deed == "refuse":
            raise UserError("--train_file = x, is torn on this machine")
        if deed == "overflow":
            raise DoesNotFit("does not fit here")
        if deed == "ctrl-c":
            raise KeyboardInterrupt
        if deed == "crash":
            raise ValueError("a bug")
        if deed == "kill":
            os.kill(os.getpid(), signal.SIGKILL)
        if deed == "hang":  # alive, but its machine does not answer: threads stopped with it
            os.kill(os.getpid(), signal.SIGSTOP)
    if deed == "all refuse":
        raise UserError("--batch = 0, is wrong everywhere")
    if deed == "interrupt":
        raise Interrupted("stopped")
    if deed == "numbers":
        mine = float(accelerator.process_index + 1)
        assert sum_over(accelerator, mine, 0.1) == [3.0, 0.2] and least_of(accelerator, mine, -mine) == [1.0, -2.0]
        assert most_of(accelerator, mine) == [2.0]
        with_gpu: Any = SimpleNamespace(num_processes=2, device=torch.device("cuda"))
        assert sum_over(with_gpu, mine, 0.1) == [3.0, 0.2], "over the hosts: no GPU is asked"
        assert group_of_hosts(with_gpu) is group_of_hosts(with_gpu) and group_of_hosts(accelerator) is None
        time.sleep(0.3 * accelerator.process_index)
        return
    dist.all_reduce(torch.ones(1))


def main() -> int:
    """Run one process; exit codes as `train_low_mem.py` gives them, whose process 0 alone prints refusals."""
    accelerator = Accelerator(cpu=True, kwargs_handlers=[group_settings()])
    try:
        with Peers(accelerator.process_index, accelerator.num_processes, beat_seconds=0.2) as peers:
            peers.resume = "train --is_keep_training=True --run_name=ours"
            act(sys.argv[1], accelerator)
    except UserError as error:
        if accelerator.process_index == 0:
            print("refused:", error, file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        print(f"unforeseen {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
