"""What must a device be able to tell and do? The interface that CUDA, MPS, the CPU and the tests' fake fulfil.

Idea: the rest of the program asks these questions and never names a backend. Memory figures speak of what this
process holds from the device, cached blocks included, because that is what other programs cannot use.
"""

from __future__ import annotations

import errno
import time
from abc import ABC, abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from devices import processor
from devices.copies import Carrier, HostCopies
from devices.processor import FAST_FACTOR
from devices.ways import way_of

# Sizes and times of the measurement: a slow dtype must end it at a tiny product, a fast one needs a large product;
# each size is repeated for a while, because other programs on the machine can only make a product slower.
FIRST_SIDE, LAST_SIDE, LONG_SECONDS, REPEAT_SECONDS = 64, 1024, 4e-3, 15e-3
COPIED_BYTES = 64 * 2**20  # far above any processor's cache
WAITING_FACTOR = 2.0  # twice the side is eight times the work: a rate that grows by more than this was mostly waiting
HOST_OUT_OF_MEMORY = (
    "defaultcpuallocator: can't allocate memory",
    "not enough memory: you tried to allocate",
    "std::bad_alloc",
    "cannot allocate memory",
)


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype in which products are computed, and why."""

    dtype: torch.dtype
    reason: str
    as_requested: bool  # False: tell the user once what is used instead


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without its library: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of such a name."""
    found: torch.dtype = getattr(torch, name)
    return found


def place(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Bring a small tensor of the host to a device. A GPU gets it from pinned memory, so that nothing waits for the copy.

    Source: PyTorch notes "CUDA semantics", use of pinned memory buffers; its host allocator keeps the buffer until then.
    """
    if where.type == "cpu" or tensor.device.type != "cpu" or not way_of(where).is_pinned:
        return tensor.to(where)
    return tensor.pin_memory().to(where, non_blocking=True)


class Device(ABC):
    """One place where tensors live and products run.

    Args:
        torch_device: the device to give to torch.
    """

    name: str  # "cpu", "cuda" or "mps"
    copies_beside = False  # whether copies to and from the host run beside the computation
    is_separate_memory = False  # whether its tensors lie outside the machine's RAM
    out_of_memory_words: tuple[str, ...] = ()  # lower case; the backend's own messages
    largest_side = LAST_SIDE  # of the products that are measured: a device with more units needs more work to show them

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._rates: dict[torch.dtype, float] = {}

    @abstractmethod
    def describe(self) -> str:
        """Name the hardware in a few words."""

    # -- memory, all in bytes; a device without memory of its own answers 0

    @abstractmethod
    def memory_now_bytes(self) -> int:
        """What this process holds from the device now, cached blocks included."""

    @abstractmethod
    def memory_idle_bytes(self) -> int:
        """The part of `memory_now_bytes` that no tensor uses."""

    @abstractmethod
    def memory_peak_bytes(self) -> int:
        """The most that `memory_now_bytes` reached since `reset_peak`."""

    def tensors_peak_bytes(self) -> int:
        """The most that tensors took since `reset_peak`, where the device can tell; else `memory_peak_bytes`."""
        return self.memory_peak_bytes()

    @abstractmethod
    def reset_peak(self) -> None:
        """Start new peaks at what is held now."""

    @abstractmethod
    def memory_total_bytes(self) -> int:
        """What the device could give to one process at most."""

    @abstractmethod
    def memory_free_bytes(self) -> int:
        """What tensors of this process may still take: free blocks of the device and idle ones of our own."""

    @abstractmethod
    def limit_memory(self, limit_bytes: int) -> bool:
        """Let the backend refuse to hold more than this. Returns whether the backend can."""

    @abstractmethod
    def cleanup(self) -> None:
        """Give cached blocks back to the device."""

    @abstractmethod
    def synchronize(self) -> None:
        """Wait until everything started so far is done."""

    # -- speed and dtype

    @property
    def speed_class(self) -> str:
        """The class of what computes: of the processor, or "cuda" or "mps"."""
        return processor.here().name

    @property
    def computes_on(self) -> str:
        """What computes, by name and class: whose measured speeds are whose."""
        return processor.describe_here()

    @property
    def rated_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that a run may compute in."""
        return (torch.float32, torch.bfloat16)

    @property
    def threads(self) -> int:
        """Threads that products use."""
        return torch.get_num_threads()

    def nominal_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of products that such a device reaches: a fact of its class, which decides; 0 where nothing trains in it."""
        return processor.here().rate(name_of(dtype), self.threads)

    def warm_up(self) -> None:
        """Run the first products, whose libraries stay: what is measured after this includes them.

        In the sizes of `multiply_rate`, so that a process holds the same whether or not speeds were measured in it.

        Memory: 2 x largest_side^2 elements, freed on return.
        """
        for dtype in self.rated_dtypes:
            is_slow = FAST_FACTOR * self.nominal_rate(dtype) < self.nominal_rate(torch.float32)
            side, last = FIRST_SIDE, FIRST_SIDE if is_slow else self.largest_side
            while side <= last:
                square = torch.full((side, side), 0.5, dtype=dtype, device=self.torch_device)
                square @ square
                side *= 2
        self.synchronize()

    def multiply_rate(self, dtype: torch.dtype) -> float:
        """Multiplications and additions a second of a square matrix product, measured once, in about 0.1 s.

        For estimates of time and for people: a busy machine makes it less, so that nothing may be decided by it.
        Memory: at most 2 x largest_side^2 elements, freed on return.
        """
        if dtype not in self._rates:
            self._rates[dtype] = self._measure_rate(dtype)
        return self._rates[dtype]

    def _measure_rate(self, dtype: torch.dtype) -> float:
        side, best = FIRST_SIDE, 0.0
        while True:
            square = torch.full((side, side), 0.5, dtype=dtype, device=self.torch_device)
            times = [self._time_product(square) for _ in range(3)]
            while sum(times) < REPEAT_SECONDS and len(times) < 20:
                times.append(self._time_product(square))
            rate = 2 * side**3 / min(times)
            # On a busy machine a small product takes as long as its threads wait for a core, so that a large one is
            # faster by its size; a dtype that is slow by itself is not.
            is_slow = min(times) >= LONG_SECONDS and side > FIRST_SIDE and rate < WAITING_FACTOR * best
            best = max(best, rate)
            if side >= self.largest_side or is_slow:
                return best
            side *= 2

    def _time_product(self, square: torch.Tensor) -> float:
        self.synchronize()
        start = time.perf_counter()
        square @ square
        self.synchronize()
        return max(time.perf_counter() - start, 1e-9)

    def copy_rate(self) -> float:
        """Bytes a second that one copy reads and writes: the bandwidth that updates and pointwise work live on.

        Memory: 2 x 64 MiB, freed on return.
        """
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source).copy_(source)
        times = []
        for _ in range(5):  # other programs can only make a copy slower
            self.synchronize()
            start = time.perf_counter()
            target.copy_(source)
            self.synchronize()
            times.append(max(time.perf_counter() - start, 1e-9))
        return 2 * COPIED_BYTES / min(times)

    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes whose products pay here, fastest first. fp32 is always among them; fp16 never, T5 overflows in it."""
        if self.nominal_rate(torch.bfloat16) > FAST_FACTOR * self.nominal_rate(torch.float32):
            return (torch.bfloat16, torch.float32)
        return (torch.float32,)

    def choose_compute_dtype(self, requested: str = "auto") -> DtypeChoice:
        """Choose the dtype of products. Weights may be stored in bf16 in either case.

        Args:
            requested: `mixed_precision`: "auto", "no", "bf16" or "fp16".
        """
        if requested == "no":
            return DtypeChoice(torch.float32, "fp32, as asked for", True)
        best = self.fast_dtypes()[0]
        word = "bf16" if best == torch.bfloat16 else "fp32"
        if requested == "fp16":
            return DtypeChoice(best, f"{word} products: T5 overflows in fp16", False)
        if best == torch.bfloat16:
            return DtypeChoice(best, "bf16 products: fast here", True)
        reason = "fp32 products: bf16 ones are not faster here; weights may still be stored in bf16"
        return DtypeChoice(best, reason, requested == "auto")

    def multiplies_fp16(self) -> bool:
        """Whether fp16 products are fast here; T5 needs a loss scale for them, and overflows in fp16 without one."""
        return False

    def set_exact_fp32(self, exact: bool) -> None:
        """Whether fp32 products keep all their bits, or may take a faster way that keeps the range and 10 of 23 bits."""
        return None

    def host_copies(self) -> HostCopies:
        """Copies of tensors to the host's memory and back, beside the computation where the device can."""
        return HostCopies(self.torch_device)

    def carrier(self) -> Carrier:
        """Copies of bytes between the host and this device by a thread beside the computation."""
        return Carrier(self.torch_device)

    # -- errors and placement

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that memory, of the device or of the host, was refused. Looks at its causes too."""
        seen: set[int] = set()
        link: BaseException | None = error
        while link is not None and id(link) not in seen:
            if self._says_out_of_memory(link):
                return True
            seen.add(id(link))
            link = link.__cause__
        return False

    def _says_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, OSError) and error.errno == errno.ENOMEM:
            return True
        text = str(error).lower()
        return isinstance(error, RuntimeError) and any(w in text for w in HOST_OUT_OF_MEMORY + self.out_of_memory_words)

    def check_placement(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make sure that every tensor lies on this device.

        Args:
            tensors: (name, tensor), for example `model.named_parameters()` and the optimizer's states.
        Raises:
            RuntimeError: names the first tensors that lie elsewhere.
        """
        strays = [f"{name} on {tensor.device}" for name, tensor in tensors if not self._holds(tensor)]
        if strays:
            more = f" and {len(strays) - 3} more" if len(strays) > 3 else ""
            raise RuntimeError(f"these tensors are not on {self.torch_device}: {', '.join(strays[:3])}{more}")

    def _holds(self, tensor: torch.Tensor) -> bool:
        where, own = tensor.device, self.torch_device
        return where.type == own.type and (own.index is None or where.index in (None, own.index))
