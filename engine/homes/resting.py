"""Weight store of blocks whose weights rest elsewhere: in a file, or in the RAM beside a device.

The matrices of such a block lie end to end in one piece of its home, and are in a slot of memory while the block runs or is
updated. Otherwise its weights show their shape and dtype, and one number that is repeated without memory: NaN, so that a
use of weights that are not there ends in a loss that is not finite, and never in a wrong one; bytes of int4 that are
not there cannot be unpacked. Norms, bias tables,
embedding, head and adapters are always here: they are small, or gather gradients from everywhere. In which dtype a block
computes is the inner store's affair, as without a home. Numbers are those of weights in memory, bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from devices.copies import Carrier
from engine.homes.files import aligned, aligned_buffer
from engine.homes.places import Home
from engine.homes.slots import Slots
from engine.weights import WeightStore, weight_store_for
from memory.estimate.homes import SLOTS, is_away
from model.int4 import INT4, Int4Weight, empty_int4
from model.quantization import QUANTIZED, Int8Weight, empty_quantized
from model.shapes import is_matrix
from model.t5 import T5, Parts

MakeHome = Callable[[Sequence[tuple[int, int]]], Home]  # of pieces: first place and bytes of each


@dataclass(frozen=True)
class _Place:
    """Where the bytes of one weight lie: in which piece, from which place in it, and how many; and what they are.

    Args:
        shape, dtype: of the tensor at rest, which is one of bytes in int4.
    """

    piece: int
    start: int
    size: int
    shape: torch.Size
    dtype: torch.dtype

    def view(self, room: Tensor) -> Tensor:
        """Bytes that begin with those of the weight, as what it is."""
        return room[: self.size].view(self.dtype).view(self.shape)


class RestingWeightStore(WeightStore):
    """Some blocks' weights rest elsewhere.

    Args:
        storage, compute: dtypes at rest and of products.
        away_blocks: how many blocks rest elsewhere. make_home: gives their home.
        place: the device that computes. carrier: between it and the host; None: it computes in the host's memory.
        slots: pieces that are here at once; one more where updates come a block later.
    Memory: `slots` times the largest block at rest.
    """

    def __init__(
        self,
        storage: torch.dtype,
        compute: torch.dtype,
        away_blocks: int,
        make_home: MakeHome,
        place: torch.device,
        carrier: Carrier | None = None,
        slots: int = SLOTS,
    ) -> None:
        super().__init__(compute)
        self.storage, self.away_blocks, self._make_home = storage, away_blocks, make_home
        self.place, self.carrier, self._num_slots = place, carrier, slots
        self._places: dict[int, _Place] = {}  # id of a weight -> where it is
        self._members: list[list[nn.Parameter]] = []  # of each piece

    # --- making and filling

    def make(self, model: T5) -> Parts:
        """Give a model on "meta" its weights: those of away blocks a place at home, all others memory. None is filled."""
        blocks = [*model.encoder.blocks, *model.decoder.blocks]
        pieces: list[tuple[int, int]] = []
        for number, block in enumerate(blocks):
            if is_away(number, len(blocks), self.away_blocks):
                first = sum(pieces[-1]) if pieces else 0
                pieces.append((first, self._lay_out(block, len(pieces))))
        for name, weight in list(model.named_parameters()):
            if weight.device.type == "meta":
                _replace(model, name, self._here(name, weight))
        self.inner = weight_store_for(self.storage, self.compute_dtype, (model.embedding, model.output_weight))
        largest = max(size for _, size in pieces)
        rooms = [self._room(largest) for _ in range(self._num_slots)]
        mark = (Carrier(self.place) if self.carrier is None else self.carrier).mark
        self.slots = Slots(self._make_home(pieces), pieces, rooms, mark)
        return {}

    def _lay_out(self, block: nn.Module, piece: int) -> int:
        """Give the matrices of a block their places in its piece; returns the bytes of the piece."""
        size, members = 0, list[nn.Parameter]()
        for name, weight in list(block.named_parameters()):
            if is_matrix(name, weight.shape):
                made = self._absent(weight)
                _replace(block, name, made)
                self._places[id(made)] = _Place(piece, size, made.nbytes, made.shape, made.dtype)
                members.append(made)
                size += aligned(made.nbytes)
        self._members.append(members)
        return size

    def _absent(self, weight: nn.Parameter) -> nn.Parameter:
        if self.storage == torch.int8:
            scale = torch.empty(weight.shape[0], device=self.place)
            return Int8Weight(_nothing(weight.shape, torch.int8, self.place), scale)
        if self.storage == INT4:
            rows, columns = weight.shape
            like = empty_int4(rows, columns, "meta")
            return Int4Weight(_nothing(like.shape, like.dtype, self.place), columns)
        return nn.Parameter(_nothing(weight.shape, weight.dtype, self.place), weight.requires_grad)

    def _here(self, name: str, weight: nn.Parameter) -> nn.Parameter:
        if self.storage in QUANTIZED and is_matrix(name, weight.shape):
            return empty_quantized(name, weight.shape, self.storage, self.place)
        return nn.Parameter(torch.empty(weight.shape, dtype=weight.dtype, device=self.place), weight.requires_grad)

    def _room(self, size: int) -> Tensor:
        if self.carrier is None:
            return aligned_buffer(size)
        return torch.empty(aligned(size), dtype=torch.uint8, device=self.place)

    @contextmanager
    def filling(self, weight: nn.Parameter) -> Iterator[None]:
        """A weight is here to be filled, whatever it held, and goes home when the context ends."""
        place = self._places.get(id(weight))
        if place is None:
            yield
        else:
            with self.slots.putting(self.slots.pieces[place.piece][0] + place.start, aligned(place.size)) as room:
                nothing, weight.data = weight.data, place.view(room)
                try:
                    yield
                finally:
                    weight.data = nothing

    # --- using

    @contextmanager
    def in_compute_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        found = list(weights)
        with self._brought(found), self.inner.in_compute_dtype(found):
            yield

    @contextmanager
    def in_rest_dtype(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        found = list(weights)
        with self._brought(found), self.inner.in_rest_dtype(found):
            yield

    @contextmanager
    def for_products(self, weights: Iterable[nn.Parameter]) -> Iterator[None]:
        found = list(weights)
        with self._brought(found), self.inner.for_products(found):
            yield

    @contextmanager
    def held(self, weights: Iterable[nn.Parameter], is_changed: bool = False) -> Iterator[None]:
        found = list(weights)
        with self._brought(found):
            yield
            for piece in self._pieces_of(found) if is_changed else ():
                self.slots.keep(piece)

    def parted(self, weights: Iterable[nn.Parameter]) -> Iterator[list[nn.Parameter]]:
        groups: dict[int, list[nn.Parameter]] = {}
        for weight in weights:
            place = self._places.get(id(weight))
            groups.setdefault(-1 if place is None else place.piece, []).append(weight)
        yield from groups.values()

    def dtype_of(self, weight: nn.Parameter) -> torch.dtype:
        return self.inner.dtype_of(weight)

    def waited_seconds(self) -> float:
        return self.slots.waited_seconds

    def close(self) -> None:
        self.slots.close()

    @contextmanager
    def _brought(self, weights: Sequence[nn.Parameter]) -> Iterator[None]:
        with ExitStack() as stack:
            for piece in self._pieces_of(weights):
                stack.enter_context(self._piece(piece))
            yield

    @contextmanager
    def _piece(self, piece: int) -> Iterator[None]:
        """All weights of a piece are here; contexts may stand inside each other."""
        room = self.slots.use(piece)
        members = self._members[piece]
        places = [self._places[id(weight)] for weight in members]
        for place, weight in zip(places, members, strict=True):
            weight.data = place.view(room[place.start :])
        try:
            yield
        finally:
            if self.slots.release(piece):
                for place, weight in zip(places, members, strict=True):
                    weight.data = _nothing(place.shape, place.dtype, self.place)

    def _pieces_of(self, weights: Sequence[nn.Parameter]) -> list[int]:
        found = (self._places.get(id(weight)) for weight in weights)
        return list(dict.fromkeys(place.piece for place in found if place is not None))


def _nothing(shape: Sequence[int], dtype: torch.dtype, place: torch.device) -> Tensor:
    """A tensor without memory of its own; NaN everywhere, where the dtype has it."""
    value = float("nan") if dtype.is_floating_point else 0
    return torch.full((), value, dtype=dtype, device=place).expand(*shape)


def _replace(module: nn.Module, name: str, weight: nn.Parameter) -> None:
    path, _, attribute = name.rpartition(".")
    setattr(module.get_submodule(path), attribute, weight)
