"""The processes of a run: sums over all of them, and the main one's word for the others. One process is a group of one.

Numbers and objects go over the hosts (gloo), so that no GPU is waited for. Where a process fails, its launcher ends the
others on its machine, and the connections that break end those elsewhere.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import TYPE_CHECKING, Any, TypeVar

from settings.errors import UserError
from support.language import say

if TYPE_CHECKING:
    import torch
    import torch.distributed as dist
    from accelerate import Accelerator

Value = TypeVar("Value")
PATIENCE = timedelta(hours=12)  # longer than preparing and saving ever take
BROKEN_CONNECTION = ("gloo", "nccl", "connection", "socket", "peer", "broken pipe")


class RankFailed(UserError):
    """Another process of the run has failed, or its machine."""

    exit_code = 1


class Group:
    """All processes of a run, and the values that they exchange. Without an accelerator it is this process alone, and
    torch is not loaded.

    Attributes:
        rank: number of this process.
        size: number of processes.
        is_main: whether this process writes files and messages for all of them.
        is_first_here: whether this process is the first one on its machine.
        hosts: the process group that reduces tensors in host memory; None: the default process group.
    """

    def __init__(self, accelerator: Accelerator | None = None) -> None:
        self.rank = 0
        self.size = 1
        self.is_main = True
        self.is_first_here = True
        self.hosts: dist.ProcessGroup | None = None
        self._resume_command = ""
        if accelerator is not None and accelerator.num_processes > 1:
            import torch.distributed as dist

            self.rank = accelerator.process_index
            self.size = accelerator.num_processes
            self.is_main = accelerator.is_main_process
            self.is_first_here = accelerator.is_local_main_process
            if accelerator.device.type != "cpu":
                self.hosts = dist.new_group(timeout=PATIENCE, backend="gloo")

    def __enter__(self) -> Group:
        return self

    def set_resume_command(self, command: str) -> None:
        """Set the command that resumes the run, for the message that a process is gone."""
        self._resume_command = command

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        """Turn the error of a broken connection into a message. Its cause is reported by the process that failed, or
        by its launcher.
        """
        words = str(error).lower()
        if (
            self.size == 1
            or not isinstance(error, RuntimeError)
            or not any(sign in words for sign in BROKEN_CONNECTION)
        ):
            return
        with suppress(ValueError):  # The launcher's signal must not cut the explanation short.
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
        advice = say("start it again by the same command")
        if self._resume_command:
            advice = say("continue with\n  {command}", command=self._resume_command)
        raise RankFailed(
            "another process of this run is gone: killed, most likely for lack of memory (the kernel's log says "
            "so), or its machine is gone; {advice}",
            advice=advice,
        ) from error

    def gather(self, value: Value) -> list[Value]:
        """The value of each process, on all of them."""
        if self.size == 1:
            return [value]
        import torch.distributed as dist

        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.hosts)
        return values

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        """Each number summed over all processes, in float64: one process and two shall agree."""
        return [sum(each) for each in self._of_each(numbers)]

    def all_reduce_min(self, *numbers: float) -> list[float]:
        """The least of each number: budgets are measured at different times, and machines differ."""
        return [min(each) for each in self._of_each(numbers)]

    def all_reduce_max(self, *numbers: float) -> list[float]:
        """The largest of each number."""
        return [max(each) for each in self._of_each(numbers)]

    def _of_each(self, numbers: tuple[float, ...]) -> list[tuple[float, ...]]:
        """For each number its values on all processes. It is called several times a step, so it takes one collective,
        where `gather` takes two.
        """
        if self.size == 1:
            return [(number,) for number in numbers]
        import torch
        import torch.distributed as dist

        mine = torch.tensor(numbers, dtype=torch.float64)
        everyone = [torch.empty_like(mine) for _ in range(self.size)]
        dist.all_gather(everyone, mine, group=self.hosts)
        return list(zip(*(each.tolist() for each in everyone), strict=True))

    def all_reduce(self, tensor: torch.Tensor) -> torch.Tensor:
        """A tensor of the host, summed over all processes, in place."""
        if self.size > 1:
            import torch.distributed as dist

            dist.all_reduce(tensor, group=self.hosts)
        return tensor

    def broadcast(self, value: Value) -> Value:
        """The main process's value."""
        return self.gather(value)[0]

    def first_of(self, value: Value | None) -> Value | None:
        """The value of the first process that has one."""
        return next((each for each in self.gather(value) if each is not None), None)

    def run_on_main(self, work: Callable[[], Value]) -> Value:
        """What `work` returns on the main process, on all processes; a `UserError` of it is raised on all of them."""
        if self.size == 1:
            return work()
        value: Value | None = None
        refusal: UserError | None = None
        if self.is_main:
            try:
                value = work()
            except UserError as error:
                refusal = error
        value, refusal = self.broadcast((value, refusal))
        if refusal is not None:
            raise refusal
        return value  # type: ignore[return-value]

    @contextmanager
    def first_here(self) -> Iterator[None]:
        """A context that the first process of a machine leaves before the others enter it."""
        if not self.is_first_here:
            self.wait()
        yield
        if self.is_first_here:
            self.wait()

    def wait(self) -> None:
        """Return once all processes have come here."""
        self.gather(None)
