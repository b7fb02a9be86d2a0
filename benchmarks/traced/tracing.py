"""A count of every torch operation, on tensors without data (meta).

Counted are kernels: views and new memory are none, an operation on many tensors is as many as torch starts for them,
and what is known to take several kernels (sorting, the backward of fused attention) counts so. A host wait is whatever
needs a number from the device, and a copy from memory that is not pinned. Memory is what the tensors alive take at
most, without what an operation needs inside.
"""

from __future__ import annotations

import math
import sys
import weakref
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

ROOT = f"{Path(__file__).resolve().parent.parent.parent}/"
# Operations that make or describe memory and start nothing.
SILENT = {
    "empty",
    "empty_like",
    "empty_strided",
    "new_empty",
    "new_empty_strided",
    "detach",
    "detach_",
    "alias",
    "lift_fresh",
    "set_",
    "resize_",
    "requires_grad_",
    "is_pinned",
    "_pin_memory",
    "_unsafe_view",
    "_local_scalar_dense",
    "record_stream",
}
# Operations that start more than one kernel, by torch's sources for CUDA.
SEVERAL = {
    "sort": 8,
    "argsort": 8,
    "_unique2": 14,
    "nonzero": 4,
    "cumsum": 2,
    "embedding_dense_backward": 12,
    "logsumexp": 6,
    "_efficient_attention_backward": 2,
    "_scaled_dot_product_efficient_attention_backward": 2,
    "topk": 3,
}
WAITING = {"_local_scalar_dense", "nonzero", "_unique2", "equal", "masked_select", "is_nonzero"}
# torch's multi-tensor kernels: elements of a chunk, chunks a launch, tensors a launch by how many lists there are
CHUNK, CHUNKS, TENSORS = 65_536, 320, (110, 64, 48, 36, 30)


class Tracer(TorchDispatchMode):
    """Counts what happens on the meta device while it is on.

    Args:
        is_mps: no operation takes many tensors at once.
    """

    def __init__(self, is_mps: bool = False) -> None:
        super().__init__()
        self.is_mps = is_mps
        self.kernels, self.waits, self.uploads = Counter[str](), Counter[str](), Counter[str]()
        self.seen: set[tuple[str, tuple[str, ...]]] = set()  # operations with the dtypes that they were given
        self.calls: list[tuple[Any, Any, Any, Any]] = []
        self.keeps_calls = False
        self.moved_bytes = self.uploaded_bytes = self.live_bytes = self.peak_bytes = 0
        self._known: set[int] = set()

    @property
    def launches(self) -> int:
        """Kernels started."""
        return self.kernels.total()

    def restart(self) -> None:
        """Count anew; what is alive stays counted."""
        for counter in (self.kernels, self.waits, self.uploads):
            counter.clear()
        self.seen.clear()
        self.calls.clear()
        self.moved_bytes = self.uploaded_bytes = 0
        self.peak_bytes = self.live_bytes

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name = func._schema.name.removeprefix("aten::")
        given = [leaf for leaf in tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]
        is_on_device = any(leaf.is_meta for leaf in given)
        if not is_on_device and name in ("is_pinned", "_pin_memory"):
            return False if name == "is_pinned" else args[0]
        if is_on_device and (answered := self._answer(name, args, kwargs)) is not None:
            self._wait(name)
            return answered[0]
        if name == "_efficient_attention_backward":
            result: Any = _fused_gradients(args, kwargs)
        elif name == "c10d::allreduce_coalesced_":  # torch has nothing for meta; the sum of each does the same
            result = torch.ops.c10d.allreduce_(*args[:3], None)[1]
        else:
            result = func(*args, **kwargs)
        made = [leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor) and leaf.is_meta]
        if made or is_on_device:
            self._count(func, name, given, made, kwargs)
            if self.keeps_calls:
                self.calls.append((func, args, kwargs, result))
        for tensor in made:
            self._hold(tensor.untyped_storage())
        if name == "_softmax_backward_data" and not self.is_mps:  # CUDA's forms the product of its arguments besides
            self.peak_bytes = max(self.peak_bytes, self.live_bytes + result.nbytes)
        return result

    def _answer(self, name: str, args: Any, kwargs: Any) -> tuple[Any] | None:
        """A made-up result of an operation whose result the host looks at."""
        x = args[0]
        if name == "_local_scalar_dense":
            return (True if x.dtype == torch.bool else 0.0 if x.is_floating_point() else 1,)
        if name in ("equal", "is_nonzero"):
            return (True,)
        if name == "_unique2":
            self.kernels[name] += SEVERAL[name]
            return ((torch.empty_like(x.flatten()), torch.empty_like(x), torch.empty_like(x.flatten())),)
        if name == "nonzero":
            self.kernels[name] += SEVERAL[name]
            return (x.new_empty(x.numel(), x.dim(), dtype=torch.int64),)
        where = kwargs.get("device")
        if name == "_to_copy" and where is not None and torch.device(where).type == "cpu":
            return (torch.ones(x.shape, dtype=kwargs.get("dtype") or x.dtype),)
        return None

    def _count(self, func: Any, name: str, given: list[Tensor], made: list[Tensor], kwargs: Any) -> None:
        from_host = [x for x in given if x.device.type == "cpu" and x.dim()]
        if name in ("_to_copy", "copy_") and from_host and made:
            is_free = kwargs.get("non_blocking") or (name == "copy_" and len(given) > 2)
            return self._upload(name, from_host[0].nbytes, bool(is_free))
        if name == "lift_fresh":
            return self._upload("torch.tensor", sum(x.nbytes for x in made), False)
        if name == "copy_" and not any(x.is_meta for x in given[:1]):
            return self._wait(name)
        if _looks_at_a_mask(name, given):
            self._wait(name)
        count = self._launches(func, name, given, made)
        if count:
            self.kernels[name] += count
            self.seen.add((name, tuple(str(x.dtype).removeprefix("torch.") for x in given if x.is_meta)))
            self.moved_bytes += sum(x.numel() * x.element_size() for x in (*given, *made) if x.is_meta)

    def _launches(self, func: Any, name: str, given: list[Tensor], made: list[Tensor]) -> int:
        if name in SILENT or _is_view(func) or (made and not any(x.numel() for x in made)):
            return 0
        if name.startswith("_foreach_"):
            return self._multi_tensor(func, given) * (2 if "norm" in name else 1)
        return SEVERAL.get(name, 1)

    def _multi_tensor(self, func: Any, given: list[Tensor]) -> int:
        lists = sum(str(argument.type) == "List[Tensor]" for argument in func._schema.arguments) or 1
        each = given[: len(given) // lists]
        if self.is_mps:
            return len(each)
        chunks = sum(math.ceil(x.numel() / CHUNK) for x in each)
        return max(math.ceil(chunks / CHUNKS), math.ceil(len(each) / TENSORS[min(lists, 5) - 1]))

    def _wait(self, name: str) -> None:
        self.waits[f"{name} at {_place()}"] += 1

    def _upload(self, name: str, size: int, is_free: bool) -> None:
        self.uploads[f"{name} at {_place()}"] += 1
        self.uploaded_bytes += size
        if not is_free:
            self._wait(f"{name} from the host")

    def _hold(self, storage: torch.UntypedStorage) -> None:
        key = storage._cdata
        if key not in self._known and storage.nbytes():
            self._known.add(key)
            self.live_bytes += storage.nbytes()
            self.peak_bytes = max(self.peak_bytes, self.live_bytes)
            weakref.finalize(storage, self._forget, key, storage.nbytes())

    def _forget(self, key: int, size: int) -> None:
        self._known.discard(key)
        self.live_bytes -= size


def _fused_gradients(args: Any, kwargs: Any) -> tuple[Tensor, ...]:
    """What the backward of fused attention gives: torch's own function for meta does not take all of its arguments."""
    q, k, v = args[1:4]
    has_dbias = args[-1]
    dbias = q.new_empty(len(q), q.shape[2], q.shape[1], k.shape[1]) if has_dbias else q.new_empty(0)
    if kwargs.get("shared_storage_dqdkdv"):
        return *q.new_empty(*q.shape[:2], 3, *q.shape[2:]).unbind(2), dbias
    return *(torch.empty(x.shape, dtype=x.dtype, device=x.device) for x in (q, k, v)), dbias


def _is_view(func: Any) -> bool:
    """Whether the result is another look at an argument."""
    found = [value.alias_info for value in func._schema.returns]
    return bool(found) and all(info is not None and not info.is_write for info in found)


def _looks_at_a_mask(name: str, given: list[Tensor]) -> bool:
    """Whether it takes the places where a mask is set, whose number the host has to know."""
    return name in ("index", "index_put_", "index_put") and any(x.dtype == torch.bool for x in given[1:] if x.is_meta)


def _place() -> str:
    """The line of the project that asked."""
    frame = sys._getframe(2)
    while frame is not None:
        name = frame.f_code.co_filename
        if name.startswith(ROOT) and not name.endswith("tracing.py") and "site-packages" not in name:
            return f"{name.removeprefix(ROOT)}:{frame.f_lineno}"
        frame = frame.f_back  # type: ignore[assignment]
    return "backward"
