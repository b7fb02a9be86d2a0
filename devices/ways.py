"""In which sizes and by which operations does work run where its tensors lie?

A processor works in chunks that stay in its cache; a GPU starts a kernel for each operation, which takes microseconds
whatever it computes, so there the pieces are as large as memory allows, nothing is looked at from the host, and what is
small is computed on the host and copied once. Model and engine ask `way_of` and never for a backend's name.

The device "meta", on which nothing is computed, takes whatever way it is told to stand for: so launches and memory of a
step are counted without a GPU. Tests let the CPU take a GPU's way.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from limits import (
    DEVICE_SCORES,
    DEVICE_SUMMED_ELEMENTS,
    DEVICE_UPDATE_ELEMENTS,
    DROPOUT_ELEMENTS,
    MPS_INNER,
    SUMMED_ELEMENTS,
    TILE_ELEMENTS,
    UPDATE_ELEMENTS,
    update_elements,
)


@dataclass(frozen=True)
class Way:
    """How work runs on one kind of device.

    Args:
        is_host: the tensors lie where the program runs: looking at a number costs nothing.
        scores: elements of attention's scores that are formed at a time. update: of weights updated at a time.
        summed: of tokens' gradients summed at a time. dropped: whose masks are drawn at a time; None: all.
        is_fused: torch's fused attention computes where nothing is dropped, the gradient of the bias included.
        is_multi_tensor: one kernel writes many tensors.
        is_pinned: copies from pinned memory are waited for by nobody.
        largest_inner: most terms of each sum of a product; None: any.
    """

    is_host: bool
    scores: int
    update: int
    summed: int
    dropped: int | None = None
    is_fused: bool = False
    is_multi_tensor: bool = False
    is_pinned: bool = False
    largest_inner: int | None = None


HOST = Way(True, TILE_ELEMENTS, UPDATE_ELEMENTS, SUMMED_ELEMENTS, DROPOUT_ELEMENTS)
CUDA = Way(
    False,
    DEVICE_SCORES,
    DEVICE_UPDATE_ELEMENTS,
    DEVICE_SUMMED_ELEMENTS,
    is_fused=torch.version.hip is None,
    is_multi_tensor=True,
    is_pinned=True,
)
MPS = Way(False, DEVICE_SCORES, DEVICE_UPDATE_ELEMENTS, DEVICE_SUMMED_ELEMENTS, largest_inner=MPS_INNER)
_ways = {"cpu": HOST, "cuda": CUDA, "mps": MPS, "meta": HOST}


def way_of(device: torch.device) -> Way:
    """The way of a device; a GPU of a kind that is not known here takes none of the special operations."""
    return _ways.get(device.type) or replace(MPS, largest_inner=None)


def is_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where the program runs."""
    return way_of(tensor.device).is_host


def form_scores(count: int) -> None:
    """From now on GPUs form so many scores of attention at a time: what a run's plan has chosen."""
    for name in ("cuda", "mps"):
        _ways[name] = of_scores(_ways[name], count or DEVICE_SCORES)


def of_scores(way: Way, count: int) -> Way:
    """The way with so many scores at a time; and no more weights."""
    return replace(way, scores=count, update=update_elements(count))


@contextmanager
def taking(name: str, way: Way) -> Iterator[None]:
    """Until the context ends, tensors on the device of this name take another way: for counting and for tests."""
    before, _ways[name] = _ways[name], way
    try:
        yield
    finally:
        _ways[name] = before
