"""Files of others are read in a child of this process, in memory that the system bounds: what they do to a library ends
there.

The child is kept while there is more to ask, as each costs the start of an interpreter, and takes its memory with it.
Under a budget that is named, or on a machine with little memory, the tokenizer learns from fewer words and fewer
processes encode. Rows come out the same whatever the number of processes; a tokenizer that is in the cache is used
whatever it had to learn from.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any, TypeVar

from data.prepare.training_data import named_files
from data.sources.places import public
from data.sources.reading import reading_in_child
from data.tokenizers.sample import LARGE, SMALL, TrainingLimits
from devices.cores import usable_cores
from memory.processes import usage_of
from memory.system_limits import host_limits
from settings.declared import Config, Noting
from settings.fields import AUTO, Auto
from support.child_process import ChildDied, Worker
from support.units import GIB, MIB

BESIDE = 300 * MIB  # The process that waits and the one that reads take so much.
LARGE_FROM = int(1.5 * GIB)  # A tokenizer learns from all words that serve it where there is so much memory.
WORKER = 90 * MIB  # A process that encodes takes so much.
LEAST_IN_CHILD = 512 * MIB  # Sound rows take less under any budget, and a small one must not end in their way.
MOST_WORKERS = 4  # More would wait for the one that reads.
SMALL_BYTES = 8 * MIB  # Less text than this is encoded before a process has started.
Result = TypeVar("Result")
_child: tuple[Worker, int] | None = None  # The child and the bytes that it may take, while there is one.


def look(config: Config, function: Callable[..., Result], *arguments: Any, always_in_child: bool = False) -> Result:
    """What a module's function says: asked in the child where the settings name files, here where they name shards or
    nothing.

    Args:
        function: it, its arguments and its answer are picklable; of its errors only UserError comes back.
        always_in_child: also where nothing is named, since what the function does takes memory.
    Raises:
        UserError: also where a file ends the child. DoesNotFit: it takes more than the budget leaves.
    """
    global _child
    files = list(named_files(config.data).values())
    if not files and not always_in_child:
        return function(*arguments)
    if _child is None:
        most = child_bytes(config.memory.memory_budget)
        # The tokenizers library uses its threads in the child.
        environment = {**os.environ, "TOKENIZERS_PARALLELISM": "true"}
        if config.run.num_threads != AUTO:
            environment.setdefault("RAYON_NUM_THREADS", str(config.run.num_threads))
        _child = Worker(_answering, max_bytes=most, environment=environment), most
    worker, most = _child
    result: Result
    with reading_in_child(public(" and ".join(files) or "the built-in sample"), most):
        try:
            result, reads = worker.ask((function, arguments))
        except (ChildDied, KeyboardInterrupt):
            forget()
            raise
    config.reads.update(reads)
    return result


def forget() -> None:
    """End the child."""
    global _child
    child = _child
    _child = None
    if child is not None:
        child[0].close()


def _answering() -> Callable[[tuple[Callable[..., Any], tuple[Any, ...]]], tuple[Any, set[str]]]:
    return _answer


def _answer(request: tuple[Callable[..., Any], tuple[Any, ...]]) -> tuple[Any, set[str]]:
    """What the function says, and which settings it has read."""
    function, arguments = request
    reads = set[str]()
    noting = list[Any]()
    for argument in arguments:
        if isinstance(argument, Noting):  # Of a group of settings, a copy notes what is read.
            argument = type(argument)(**vars(argument))
            argument.note_reads(reads)
        noting.append(argument)
    answer = function(*noting)
    return answer, reads.union(*(argument.reads for argument in arguments if isinstance(argument, Config)))


def child_bytes(memory_budget: int | Auto) -> int:
    """What a child that reads files may hold: what the budget leaves beside this process."""
    return max(LEAST_IN_CHILD, _memory(memory_budget) - usage_of([os.getpid()]).anon_bytes)


def tokenizer_limits(memory_budget: int | Auto) -> TrainingLimits:
    """What training a tokenizer may hold under a budget."""
    return LARGE if _memory(memory_budget) >= LARGE_FROM else SMALL


def workers(prepare_workers: int | Auto, num_threads: int | Auto, memory_budget: int | Auto, size: int) -> int:
    """Processes that encode files of so many bytes, beside the one that reads; 0: that one does it."""
    if prepare_workers != AUTO:
        return int(prepare_workers)
    cores = usable_cores() if num_threads == AUTO else min(usable_cores(), int(num_threads))
    fitting = min(MOST_WORKERS, cores, (_memory(memory_budget) - BESIDE) // WORKER)
    return fitting if fitting > 1 and size >= SMALL_BYTES else 0


def _memory(memory_budget: int | Auto) -> int:
    """Bytes that the run may have in all, its children included."""
    lowest = min(limit.bytes for limit in host_limits())
    return lowest if memory_budget == AUTO else min(lowest, int(memory_budget))
