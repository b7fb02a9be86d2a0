"""A small simulator of a run on 1 to 1,024 devices: its speed, and the memory of each.

    python -m benchmarks.scale --model=t5-3b --rows=8 --source=512 --target=114

Two streams, as in the program: one computes, one sends. Forward and backward pass the blocks one by one; the sum of a
block's gradients runs while the next block computes, and its update waits for it. Devices of a machine are joined by a fast link, machines by a slow one: a sum is scattered
inside the machine, summed between machines by a ring or a tree, whichever is faster, and gathered again.
What it leaves out: input, evaluation, saving, stragglers, and that two sums may share a link. Figures are what the links
and the arithmetic allow, an upper bound; `efficiency` is against one device with the same rows.
Source: the costs of collectives: Thakur et al. 2005; hierarchical all-reduce as NCCL does it.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass

from memory.estimate.peaks import peak_of, predict
from memory.estimate.time import Amount, flops_of
from memory.estimate.workload import ExecutionPlan, Machine, Workload
from model.shapes import weight_counts
from settings.declared import Config, T5ModelConfig
from settings.loading import load
from units import GIB

RANKS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Cluster:
    """What devices and links do.

    Args:
        flops: of one device that products reach, not of the data sheet. per_host: devices of a machine.
        inside, between: bytes a second of one device to the others of its machine, and of one machine to the next.
        latency_inside, latency_between: seconds of one message.
    """

    flops: float = 4e14
    per_host: int = 8
    inside: float = 300e9
    between: float = 50e9
    latency_inside: float = 5e-6
    latency_between: float = 15e-6


def ring(size: float, ranks: int, rate: float, latency: float) -> float:
    """Seconds of half an all-reduce (a gather, or a reduce-scatter) of `size` bytes around a ring."""
    return 0.0 if ranks == 1 else (ranks - 1) / ranks * size / rate + (ranks - 1) * latency


def tree(size: float, ranks: int, rate: float, latency: float) -> float:
    """Seconds of half an all-reduce up or down a double tree: full bandwidth, few messages."""
    return 0.0 if ranks == 1 else size / rate + math.ceil(math.log2(ranks)) * latency


def all_reduce(size: float, ranks: int, cluster: Cluster) -> float:
    """Seconds of a sum of `size` bytes over all ranks: scattered inside a machine, summed between machines, gathered again."""
    local = min(ranks, cluster.per_host)
    hosts = math.ceil(ranks / cluster.per_host)
    within = ring(size, local, cluster.inside, cluster.latency_inside)
    each = size if hosts > 1 else 0.0  # of all devices of a machine together, through its one link
    across = min(f(each, hosts, cluster.between, cluster.latency_between) for f in (ring, tree))
    return 2 * (within + across)


@dataclass(frozen=True)
class Step:
    """One simulated step: seconds in all, seconds computing, seconds in which computing waits for the links."""

    seconds: float
    computing: float

    @property
    def waiting(self) -> float:
        """Seconds in which nothing is computed."""
        return self.seconds - self.computing


def simulate(model: T5ModelConfig, work: Workload, ranks: int, cluster: Cluster, choice: ExecutionPlan) -> Step:
    """Go through one step.

    Args:
        work: rows of one rank. choice: saved blocks, dtypes.
    """
    counts = weight_counts(model)
    blocks, head = flops_of(model, Amount.of_rows(work.rows, work.source_tokens, work.target_tokens))
    number = model.num_layers + model.num_decoder_layers
    once = blocks / number / cluster.flops
    sizes = [counts["encoder"]] * model.num_layers + [counts["decoder"]] * model.num_decoder_layers
    computed = 2 if choice.compute == "bfloat16" else 4
    time = link = computing = 0.0

    def compute(seconds: float) -> None:
        nonlocal time, computing
        time += seconds
        computing += seconds

    def reduce(count: int) -> None:
        nonlocal link
        link = max(link, time) + all_reduce(count * computed, ranks, cluster)

    for _ in sizes:
        compute(once)
    compute(3 * head / cluster.flops)
    kept_from = number - choice.saved_blocks
    for index in reversed(range(number)):
        before = link  # the sum of the block before has to end before this one's begins its update
        compute(once * (2 if index >= kept_from else 3))
        time = max(time, before)
        reduce(sizes[index])
    reduce(counts["embedding"] + counts["head"])
    return Step(max(time, link), computing)


def table(config: Config, rows: int, source: int, target: int, cluster: Cluster) -> list[tuple[str, ...]]:
    """A line for each number of ranks: ranks, seconds, waiting, efficiency, tokens a second, GiB of a rank."""
    model, alone = config.model, 0.0
    lines: list[tuple[str, ...]] = []
    work = Workload(model, rows, source, target, False, config.train.optimizer)
    choice = ExecutionPlan(rows, 1, 1, 0, rows, "bfloat16", "bfloat16", 2**25)
    for ranks in RANKS:
        step = simulate(model, work, ranks, cluster, choice)
        alone = alone or step.seconds
        held = peak_of(predict(work, choice, Machine(2**60, 2**60, 0, num_processes=ranks, libraries_bytes=0)))[1]
        speed = ranks * rows * (source + target) / step.seconds
        lines.append(
            (f"{ranks:,}", f"{step.seconds:.3f}", f"{step.waiting / step.seconds:.0%}", f"{alone / step.seconds:.0%}",
             f"{speed:,.0f}", f"{held / GIB:.1f}")
        )  # fmt: skip
    return lines


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table."""
    cluster = Cluster()
    parser = argparse.ArgumentParser(description="Expected speed and memory of a run on many devices.")
    parser.add_argument("--model", default="t5-3b", help="a model preset")
    for name, default, text in (
        ("rows", 8, "of one device and step"), ("source", 512, "tokens of a row"), ("target", 114, "tokens of an answer"),
    ):  # fmt: skip
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    for name, text in (
        ("flops", "FLOP/s that products reach on one device"), ("per_host", "devices of a machine"),
        ("inside", "bytes/s inside a machine"), ("between", "bytes/s between machines"),
        ("latency_inside", "seconds of a message inside a machine"), ("latency_between", "seconds of one between machines"),
    ):  # fmt: skip
        default = getattr(cluster, name)
        parser.add_argument(f"--{name}", type=type(default), default=default, help=text)
    given = vars(parser.parse_args(arguments))
    cluster = Cluster(**{name: given[name] for name in cluster.__dict__})
    config = load("train", {"model_preset": given["model"], "preset": "none"})
    heads = ("devices", "s/step", "waiting", "efficiency", "tokens/s", "GiB each")
    print(f"\n{given['model']}\n")
    print("| " + " | ".join(heads) + " |\n|" + "---:|" * len(heads))
    for line in table(config, given["rows"], given["source"], given["target"], cluster):
        print("| " + " | ".join(line) + " |")
    return 0


if __name__ == "__main__":
    sys.exit(main())
