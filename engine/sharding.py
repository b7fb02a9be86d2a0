"""Sharding (FSDP, ZeRO 3): each process holds its rows of every matrix, and of the state, of a model that no single device holds.

A block's matrices are gathered before it runs and released after it; the gradient of the block is summed and cut in one
collective (reduce-scatter), and each process updates its own rows, inside backward, as without sharding. Norms and bias
tables, a few KB, stay whole on every process. Rows are cut as `torch.chunk` cuts them. Bytes on
the wire for a matrix of n weights: 2 gathers + 1 reduce-scatter of n, 1.5 times those of the all-reduce that unsharded
processes need.

Why not `fully_shard` (FSDP2): its hooks bring and release a module once around forward and once around a backward of the
whole graph, and sum after every backward; the engine runs a block once each way for all micro-batches, sums once, needs the bare
embedding table, and keeps weights in one dtype while computing in another. Both are two collectives and a few lines;
importing FSDP2 takes 43 MB a process (600 modules), this nothing.
Source: Rajbhandari et al. 2020 (arXiv 1910.02054), stage 3; Zhao et al. 2023 (arXiv 2304.11277).
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn

from devices.base import is_host
from engine.weights import WeightStore
from model.quantization import replace_weight
from model.shapes import is_matrix
from model.t5 import T5, Parts

# the names that torch 2.13 has for what was called ..._tensor
gather_into = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
scatter_into = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


@dataclass(frozen=True)
class Part:
    """The rows of one matrix that this process holds.

    Args:
        shape: of the whole matrix. first: number of the first row held. count: rows held; step: rows of most processes.
    """

    shape: tuple[int, int]
    first: int
    count: int
    step: int


def part_of(shape: tuple[int, ...], rank: int, num_processes: int) -> Part | None:
    """What process `rank` holds of a weight; None where all hold the whole: vectors, bias tables, too few rows."""
    if len(shape) != 2 or num_processes == 1:
        return None
    step = -(-shape[0] // num_processes)
    if step * (num_processes - 1) >= shape[0]:
        return None  # the last process would hold nothing
    first = rank * step
    return Part((shape[0], shape[1]), first, min(step, shape[0] - first), step)


class Shards:
    """Which weights of a model are sharded, and the collectives that bring and sum them.

    Args:
        rank, num_processes: of the default process group. hosts: see `engine.all_reduce`.
    """

    def __init__(self, rank: int, num_processes: int, hosts: dist.ProcessGroup | None = None) -> None:
        self.rank, self.num_processes, self.hosts = rank, num_processes, hosts
        self.parts: dict[str, Part] = {}
        self._by_id: dict[int, Part] = {}

    def cut(self, model: T5, device: torch.device | str) -> Parts:
        """Give a model that has no memory yet (device "meta") its weights here: of each sharded matrix this process's rows.

        Returns:
            name -> number of the first row held and rows of the whole, of the sharded weights.
        Memory: the weights divided by the number of processes.
        """
        for name, weight in list(model.named_parameters()):
            is_cut = is_matrix(name, weight.shape)
            part = part_of(tuple(weight.shape), self.rank, self.num_processes) if is_cut else None
            shape = weight.shape if part is None else (part.count, part.shape[1])
            fresh = nn.Parameter(torch.empty(shape, device=device, dtype=weight.dtype), weight.requires_grad)
            replace_weight(model, name, fresh)
            if part is not None:
                self.parts[name], self._by_id[id(fresh)] = part, part
        return {name: (part.first, part.shape[0]) for name, part in self.parts.items()}

    def is_sharded(self, weight: nn.Parameter) -> bool:
        """Whether this process holds only a part of a weight."""
        return id(weight) in self._by_id

    def part(self, weight: nn.Parameter) -> Part:
        """What this process holds of a sharded weight."""
        return self._by_id[id(weight)]

    def begin_gather(self, weight: nn.Parameter) -> tuple[Tensor, dist.Work]:
        """The whole matrix in the storage dtype, once the collective has ended; all processes must ask at the same time.

        Memory: the matrix.
        """
        part = self.part(weight)
        whole = weight.data.new_empty(part.step * self.num_processes, part.shape[1])
        return whole[: part.shape[0]], gather_into(whole, self._padded(weight.data, part.step), async_op=True)

    def gather_rows(self, rows: Tensor, part: Part) -> Tensor:
        """The whole of a tensor of which each process has the rows of `part`: (n, ...)."""
        whole = rows.new_empty(part.step * self.num_processes, *rows.shape[1:])
        gather_into(whole, self._padded(rows, part.step))
        return whole[: part.shape[0]]

    def scatter(self, weight: nn.Parameter) -> tuple[Tensor, dist.Work]:
        """Begin to sum the whole gradient of a sharded weight over all processes; each gets its own rows of the sum."""
        part, gradient = self.part(weight), weight.grad
        assert gradient is not None
        rows = gradient.new_empty(part.step, part.shape[1])
        work = scatter_into(rows, self._padded(gradient, part.step * self.num_processes), async_op=True)
        return rows[: part.count], work

    def sum(self, tensor: Tensor) -> Tensor:
        """Sum a small tensor over all processes, in place."""
        dist.all_reduce(tensor)
        return tensor

    def sum_numbers(self, *numbers: float) -> list[float]:
        """Sum numbers that lie on the host over all processes; no GPU is waited for."""
        sums = torch.tensor(numbers, dtype=torch.float64)
        dist.all_reduce(sums, group=self.hosts)
        return sums.tolist()  # type: ignore[no-any-return]

    @staticmethod
    def _padded(rows: Tensor, count: int) -> Tensor:
        if rows.shape[0] == count:
            return rows.contiguous()
        padded = rows.new_zeros(count, *rows.shape[1:])
        padded[: rows.shape[0]] = rows
        return padded


class ShardedWeightStore(WeightStore):
    """A block's matrices are gathered before it runs, on a GPU while the block before it does.

    Memory: one block's weights, stored and in the compute dtype; on a GPU those of the next block too, as stored.

    Args:
        compute_dtype: of the gathered matrices; gathering moves the storage dtype.
        shards: where the rows are.
    """

    is_collective = True

    def __init__(self, compute_dtype: torch.dtype, shards: Shards) -> None:
        super().__init__(compute_dtype)
        self.shards = shards
        self._summed: Tensor | None = None
        self._coming: dict[int, tuple[Tensor, dist.Work]] = {}  # id of a weight -> its whole, and the gather of it

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        with self._gathered(weights, self.compute_dtype):
            yield

    @contextmanager
    def in_storage_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        with self._gathered(weights, None):
            yield

    def expect(self, weights: Sequence[nn.Parameter], upcoming: Iterable[Sequence[nn.Parameter]]) -> None:
        """Begin to gather, while the block before computes; on a CPU, which computes and copies with the same cores, not.

        Memory: the matrices, one block earlier.
        """
        for weight in weights:
            if self.shards.is_sharded(weight) and not is_host(weight):
                self._coming[id(weight)] = self.shards.begin_gather(weight)

    @contextmanager
    def _gathered(self, weights: Iterable[nn.Parameter], dtype: torch.dtype | None) -> Iterator[None]:
        with ExitStack() as stack:
            for weight in weights:
                whole = stored = weight.data
                if self.shards.is_sharded(weight):
                    if id(weight) not in self._coming:
                        self._coming[id(weight)] = self.shards.begin_gather(weight)
                    whole, work = self._coming.pop(id(weight))
                    work.wait()
                if dtype is not None and weight.dtype not in (dtype, torch.float32):
                    whole = whole.to(dtype)
                if whole is not stored:
                    stack.callback(setattr, weight, "data", stored)
                    weight.data = whole
                del whole
            yield

    def dtype_of(self, weight: nn.Parameter) -> torch.dtype:
        return weight.dtype if weight.dtype == torch.float32 else self.compute_dtype

    def open_gradient(self, weight: nn.Parameter) -> Tensor:
        """A whole buffer of zeros, beside the rows that have been summed before."""
        if not self.shards.is_sharded(weight):
            return super().open_gradient(weight)
        self._summed = weight.grad  # rows of an earlier buffer
        weight.grad = None
        self.attach_gradient(
            weight, torch.zeros(self.shards.part(weight).shape, dtype=self.dtype_of(weight), device=weight.device)
        )
        assert weight.grad is not None
        return weight.grad

    def close_gradient(self, weight: nn.Parameter) -> None:
        """Sum the buffer over the processes, and hold this process's rows alone."""
        if weight.grad is None or not self.shards.is_sharded(weight):
            return
        rows, work = self.shards.scatter(weight)
        work.wait()
        weight.grad = None
        if self._summed is not None:
            rows += self._summed
            self._summed = None
        self.attach_gradient(weight, rows)
