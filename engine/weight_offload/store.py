"""Weight store of blocks whose weights are offloaded: to a file on a disk, or to the RAM beside a device.

The matrices of such a block lie end to end, and are in a buffer of memory while the block runs or is updated. Otherwise
its weights show their shape and dtype, and one number that is repeated without memory: NaN, so that a use of weights
that are not loaded ends in a loss that is not finite, and never in a wrong one; bytes of int4 that are not there cannot
be unpacked. Norms, bias tables, embedding, head and adapters are always in memory: they are small, or gather gradients
from everywhere. In which dtype a block computes is the inner store's affair, as without offload. Numbers are those of
weights in memory, bit for bit.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import torch
from torch import Tensor, nn

from devices.base import Device, dtype_of
from engine.weight_offload.backends import (
    CpuBackend,
    DiskBackend,
    OffloadBackend,
    aligned,
    aligned_buffer,
)
from engine.weight_offload.prefetch import PrefetchBuffers
from engine.weights import WeightStore, weight_store_for
from memory.estimate.weight_offload import SLOTS, is_offloaded
from memory.estimate.workload import FILE, ExecutionPlan
from model.int4 import INT4, Int4Weight, empty_int4
from model.quantization import QUANTIZED, Int8Weight, empty_quantized, replace_weight
from model.shapes import is_matrix
from model.t5 import T5
from settings.errors import UserError, reason_of
from support.language import say
from support.storage import is_full, make_folder
from support.units import format_size


def offloaded_store(
    plan: ExecutionPlan, device: Device, folder: Path, num_processes: int = 1
) -> OffloadedWeightStore | None:
    """The weight store that a plan asks for, where it offloads blocks; None where all weights are in memory.

    Args:
        folder: on whose disk a file lies. num_processes: that train together: then updates come a block later.
    """
    if not plan.offloaded_blocks:
        return None
    return OffloadedWeightStore(plan, device, folder, SLOTS + (num_processes > 1))


@dataclass(frozen=True)
class _Slice:
    """The bytes of one weight in its block: of which block, from which offset on, how many; and what they are.

    Args:
        shape, dtype: of the stored tensor, which is one of bytes in int4.
    """

    block: int
    offset: int
    size: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, buffer: Tensor) -> Tensor:
        return buffer[self.offset : self.offset + self.size].view(self.dtype).view(self.shape)


class OffloadedWeightStore(WeightStore):
    """Some blocks' weights are offloaded.

    Args:
        plan: how many blocks are offloaded and where to, and the dtypes at rest and of products.
        device: that computes. folder: on whose disk a file lies.
        num_buffers: blocks that are in memory at once.
    Memory: `num_buffers` times the largest block as stored.
    """

    def __init__(self, plan: ExecutionPlan, device: Device, folder: Path, num_buffers: int) -> None:
        super().__init__(dtype_of(plan.compute))
        self.storage = dtype_of(plan.storage)
        self.plan = plan
        self.folder = folder
        self.device = device.torch_device
        self.num_buffers = num_buffers
        self._copies = device.carrier()
        # Between the device and the host; None where the device computes in the host's memory.
        is_beside = self.device.type != "cpu" or device.is_separate_memory
        self._carrier = self._copies if is_beside else None
        self._slices: dict[int, _Slice] = {}  # The keys are the ids of the weights.
        self._members: list[list[nn.Parameter]] = []  # The weights of each offloaded block.
        self._follower: list[int] = []  # For each offloaded block, the one that generation needs next.

    # --- making and filling

    def allocate(self, model: T5) -> None:
        """Give a model on "meta" its weights: those of offloaded blocks a slice of their block, all others memory. None
        is filled.
        """
        blocks = [block for stack in model.stacks.values() for block in stack.blocks]
        sizes = list[int]()
        first_of_decoder = 0
        for number, block in enumerate(blocks):
            if is_offloaded(number, len(blocks), self.plan.offloaded_blocks):
                first_of_decoder += number < len(model.encoder.blocks)
                sizes.append(self._lay_out(block, len(sizes)))
        for name, weight in list(model.named_parameters()):
            if weight.device.type == "meta":
                replace_weight(model, name, self._in_memory(name, weight))
        # Generation goes through the encoder once, and through the decoder for each token.
        self._follower = [*range(1, len(sizes)), min(first_of_decoder, len(sizes) - 1)]
        self.inner = weight_store_for(self.storage, self.compute_dtype, (model.embedding, model.output_weight))
        backend = self._make_backend(sizes)
        buffers = [self._buffer(max(sizes)) for _ in range(self.num_buffers)]
        self.buffers = PrefetchBuffers(backend, sizes, buffers, self._copies.mark)

    def _make_backend(self, sizes: Sequence[int]) -> OffloadBackend:
        if self.plan.weights_in != FILE:
            assert self._carrier is not None, "weights that compute in the RAM are stored there without offload"
            return CpuBackend(sizes, self._carrier)
        try:
            make_folder(self.folder)
            return DiskBackend(self.folder, sizes, self._carrier)
        except OSError as error:
            what = say("there is no room") if is_full(error) else reason_of(error)
            raise UserError(
                "--weights_in = file, {size} of weights cannot be put into {folder}: {what}; free space or name "
                "another --weights_dir",
                size=format_size(sum(sizes)),
                folder=self.folder,
                what=what,
            ) from error

    def _lay_out(self, block: nn.Module, number: int) -> int:
        """Give the matrices of a block their slices; returns the bytes of the block."""
        size = 0
        members = list[nn.Parameter]()
        for name, weight in list(block.named_parameters()):
            if is_matrix(name, weight.shape):
                absent = self._absent(weight)
                replace_weight(block, name, absent)
                self._slices[id(absent)] = _Slice(number, size, absent.nbytes, absent.shape, absent.dtype)
                members.append(absent)
                size += aligned(absent.nbytes)
        self._members.append(members)
        return size

    def _absent(self, weight: nn.Parameter) -> nn.Parameter:
        if self.storage == torch.int8:
            scale = torch.empty(weight.shape[0], device=self.device)
            return Int8Weight(_nothing(weight.shape, torch.int8, self.device), scale)
        if self.storage == INT4:
            rows, columns = weight.shape
            like = empty_int4(rows, columns, "meta")
            return Int4Weight(_nothing(like.shape, like.dtype, self.device), columns)
        return nn.Parameter(_nothing(weight.shape, weight.dtype, self.device), weight.requires_grad)

    def _in_memory(self, name: str, weight: nn.Parameter) -> nn.Parameter:
        if self.storage in QUANTIZED and is_matrix(name, weight.shape):
            return empty_quantized(name, weight.shape, self.storage, self.device)
        return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=self.device), weight.requires_grad)

    def _buffer(self, size: int) -> Tensor:
        if self._carrier is None:
            return aligned_buffer(size)
        return torch.empty(aligned(size), dtype=torch.uint8, device=self.device)

    @contextmanager
    def filling(self, weight: nn.Parameter) -> Iterator[None]:
        """A weight is loaded to be filled, and stored later."""
        with self.loaded([weight], is_changed=True):
            yield

    # --- using

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        used = list(weights)
        with self.loaded(used), self.inner.in_compute_dtype(used):
            yield

    @contextmanager
    def for_products(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        used = list(weights)
        with self.loaded(used), self.inner.for_products(used):
            for block in self._blocks_of(used):
                self.buffers.prefetch(self._follower[block])
            yield

    def expect(self, weights: Sequence[nn.Parameter], upcoming: Iterable[Sequence[nn.Parameter]]) -> None:
        """Begin to load the first of the blocks to come that is offloaded."""
        block = next(chain.from_iterable(map(self._blocks_of, upcoming)), None)
        if block is not None:
            self.buffers.prefetch(block)

    @contextmanager
    def loaded(self, weights: Iterable[nn.Parameter], is_changed: bool = False) -> Iterator[None]:
        with ExitStack() as stack:
            for block in self._blocks_of(weights):
                stack.enter_context(self._loaded_block(block, is_changed))
            yield

    @contextmanager
    def _loaded_block(self, block: int, is_changed: bool) -> Iterator[None]:
        """All weights of a block are in memory; contexts may stand inside each other."""
        buffer = self.buffers.acquire(block)
        members = [(weight, self._slices[id(weight)]) for weight in self._members[block]]
        for weight, part in members:
            weight.data = part.view(buffer)
        try:
            yield
        finally:
            if self.buffers.release(block, is_changed):
                for weight, part in members:
                    weight.data = _nothing(part.shape, part.dtype, self.device)

    def buffer_groups(self, weights: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        groups: dict[tuple[int, ...], list[nn.Parameter]] = {}
        for weight in weights:
            groups.setdefault(tuple(self._blocks_of([weight])), []).append(weight)
        yield from groups.values()

    def dtype_of(self, weight: nn.Parameter) -> torch.dtype:
        return self.inner.dtype_of(weight)

    def waited_seconds(self) -> float:
        return self.buffers.waited_seconds

    def close(self) -> None:
        self.buffers.close()

    def _blocks_of(self, weights: Iterable[nn.Parameter]) -> list[int]:
        return list(dict.fromkeys(self._slices[id(weight)].block for weight in weights if id(weight) in self._slices))


def _nothing(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> Tensor:
    """A tensor without memory of its own; NaN everywhere, where the dtype has it."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=device).expand(*shape)
