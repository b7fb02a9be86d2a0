"""How much memory may preparing take? Little enough that a run with a small budget may prepare its own rows.

Rows are prepared in a process beside the one that will train. Under a budget that is named, or on a machine with little
memory, the tokenizer learns from fewer words and fewer processes encode. Rows come out the same whatever the number of
processes; a tokenizer that is in the cache is used whatever it had to learn from.
"""

from __future__ import annotations

import os

from config import Config
from data.tokenizers.sample import LARGE, SMALL, Room
from devices.cores import usable_cores
from memory.observe.budget import host_limits
from memory.observe.processes import usage_of
from settings.fields import AUTO
from units import GIB, MIB

BESIDE = 300 * MIB  # the process that waits, and the one that reads
LARGE_FROM = int(1.5 * GIB)  # memory from which a tokenizer learns from as many words as serve it
WORKER = 90 * MIB  # one that encodes
LEAST_IN_CHILD = 512 * MIB  # sound rows take less under any budget, and a small one must not end in their way
MOST_WORKERS = 4  # more would wait for the one that reads
SMALL_BYTES = 8 * MIB  # less text than this is encoded before a process has started


def tokenizer_room(config: Config) -> Room:
    """What training a tokenizer may hold."""
    return LARGE if _memory(config) >= LARGE_FROM else SMALL


def workers(config: Config, size: int) -> int:
    """Processes that encode files of so many bytes, beside the one that reads; 0: that one does it."""
    asked = config.prepare.prepare_workers
    if asked != AUTO:
        return int(asked)
    cores = usable_cores() if config.run.num_threads == AUTO else min(usable_cores(), int(config.run.num_threads))
    fitting = min(MOST_WORKERS, cores, (_memory(config) - BESIDE) // WORKER)
    return fitting if fitting > 1 and size >= SMALL_BYTES else 0


def most_in_child(config: Config) -> int:
    """Bytes that the processes may hold that prepare rows beside this one."""
    return max(LEAST_IN_CHILD, _memory(config) - usage_of([os.getpid()]).anon_bytes)


def _memory(config: Config) -> int:
    """Bytes that the run may have in all, its children included."""
    budget, lowest = config.memory.memory_budget, min(limit.bytes for limit in host_limits())
    return lowest if budget == AUTO else min(lowest, int(budget))
