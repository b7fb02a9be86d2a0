"""The interface of all devices (CUDA, MPS, CPU and the tests' fake one), and the sizes in which each computes.

The rest of the program uses this interface and never names a backend. Memory figures are what this process has
allocated from the device, cached blocks included, because other programs cannot use those either.

A CPU computes in chunks that stay in its cache. A GPU launches a kernel for each operation, which takes microseconds
whatever it computes: there the chunks are as large as memory allows, the host never reads a value, and small tensors
are computed on the host and copied once. Tensors on the device "meta" hold no values; with the traits of a GPU
(`override_traits`) they serve to count the launches and the memory of a step without a GPU.
"""

from __future__ import annotations

import errno
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace

import torch

from devices import machine_file, processor
from devices.copies import Carrier
from devices.machine_file import Measured
from devices.processor import FAST_FACTOR
from devices.sizes import (
    DEVICE_SCORES,
    DEVICE_SUMMED_ELEMENTS,
    DEVICE_TILE,
    DEVICE_UPDATE_ELEMENTS,
    LIBRARIES_BYTES,
    MPS_INNER,
    SUMMED_ELEMENTS,
    TILE_ELEMENTS,
    UPDATE_ELEMENTS,
    update_elements,
)
from devices.threads import most_threads
from support.language import say

# `multiply_rate` measures square products of growing size, since a fast dtype reaches its rate only in large ones; for
# a slow dtype it stops early. The best of several repeats counts, because other programs only make a product slower.
FIRST_SIDE = 64
LAST_SIDE = 1024
LONG_SECONDS = 4e-3  # A product that takes longer is large enough.
REPEAT_SECONDS = 15e-3  # Each size is repeated for so long.
# Doubling the side is eight times the work. If the rate still grows by more than this factor, most of the smaller
# product's time was spent waiting for a core.
WAITING_FACTOR = 2.0
UPLOAD_ALIGNMENT = 256  # Tensors that are copied together start at multiples of this many bytes.
COPIED_BYTES = 64 * 2**20  # `copy_rate` copies so much, which is far above any processor's cache.
HOST_OUT_OF_MEMORY = (
    "defaultcpuallocator: can't allocate memory",
    "not enough memory: you tried to allocate",
    "std::bad_alloc",
    "cannot allocate memory",
)


@dataclass(frozen=True)
class DeviceTraits:
    """Chunk sizes and capabilities of one kind of device.

    Args:
        is_host: whether tensors lie in host memory, so that reading a value does not synchronize.
        score_elements: elements of attention scores that are computed at a time.
        update_elements: elements of weights that the optimizer updates at a time.
        summed_elements: elements of token gradients that are summed at a time, for the embedding.
        has_fused_attention: whether torch's memory-efficient attention is used, with dropout and a bias that learns.
        has_foreach_kernels: whether torch's `_foreach` functions run one kernel for many tensors.
        uses_pinned_memory: whether copies from pinned memory are asynchronous.
        max_inner_size: largest inner dimension of a matrix product; None: no limit.
        row_tile: rows that a product computes together; its time grows in steps of this many rows.
        has_compiler: whether torch compiles pointwise kernels at run time (`devices.pointwise`).
    """

    is_host: bool
    score_elements: int
    update_elements: int
    summed_elements: int
    has_fused_attention: bool = False
    has_foreach_kernels: bool = False
    uses_pinned_memory: bool = False
    max_inner_size: int | None = None
    row_tile: int = 1
    has_compiler: bool = False

    def inner_chunk(self, size: int) -> int:
        """Length of the chunks into which a product has to split an inner dimension of this size."""
        return self.max_inner_size or size

    def with_score_elements(self, count: int) -> DeviceTraits:
        """The same traits with `count` attention scores at a time, and updates in chunks of a fitting size."""
        return replace(self, score_elements=count, update_elements=update_elements(count))


HOST = DeviceTraits(True, TILE_ELEMENTS, UPDATE_ELEMENTS, SUMMED_ELEMENTS)
GPU = DeviceTraits(False, DEVICE_SCORES, DEVICE_UPDATE_ELEMENTS, DEVICE_SUMMED_ELEMENTS, row_tile=DEVICE_TILE)
CUDA = replace(
    GPU,
    has_fused_attention=torch.version.hip is None,
    has_foreach_kernels=True,
    uses_pinned_memory=True,
    has_compiler=True,
)
MPS = replace(GPU, max_inner_size=MPS_INNER, has_compiler=True)
_traits = {"cpu": HOST, "cuda": CUDA, "mps": MPS, "meta": HOST}


def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a device; unknown kinds count as GPUs without special capabilities."""
    return _traits.get(device.type, GPU)


def is_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies in host memory."""
    return traits_of(tensor.device).is_host


def has_fused_attention(device: torch.device) -> bool:
    """Whether torch's fused kernels are used on a device."""
    return traits_of(device).has_fused_attention


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the generator with which torch draws on a device."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices.
    elif device.type != "meta":
        torch.get_device_module(device).manual_seed(seed)


def set_score_elements(count: int) -> None:
    """Let GPUs compute so many attention scores at a time from now on, as the run's plan says; 0: the default."""
    for name in ("cuda", "mps"):
        _traits[name] = _traits[name].with_score_elements(count or DEVICE_SCORES)


@contextmanager
def override_traits(name: str, traits: DeviceTraits) -> Iterator[None]:
    """Replace the traits of devices of a torch type, such as "meta", until the context ends; for counts and tests."""
    before = _traits[name]
    _traits[name] = traits
    try:
        yield
    finally:
        _traits[name] = before


# Values of the setting `mixed_precision`:
PRECISION_WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
REASONS = {
    torch.float32: say("fp32 matrix products: bf16 is not faster here; weights may still be stored in bf16"),
    torch.bfloat16: say("bf16 matrix products, which are fast here"),
    torch.float16: say("fp16 matrix products, which are fast here; the residual stream is fp32"),
}


@dataclass(frozen=True)
class DtypeChoice:
    """The dtype in which products are computed, and why."""

    dtype: torch.dtype
    reason: str
    as_requested: bool  # If False, the user is told once what is used instead.


def name_of(dtype: torch.dtype) -> str:
    """The name of a dtype without its library: "float32"."""
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of a name like "float32"."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class _Uploads(threading.local):
    # Pairs of an empty device tensor that `place` has returned and the host tensor that it will hold; None outside of
    # `placed_together`.
    pending: list[tuple[torch.Tensor, torch.Tensor]] | None = None


_uploads = _Uploads()


@contextmanager
def placed_together() -> Iterator[None]:
    """Collect the tensors that `place` sends to a GPU inside this context, and copy them all at once when it ends.

    Until then the tensors that `place` returned are empty and must not be read. One copy is better than many, since
    each copy to MPS waits for all kernels launched before. If contexts are nested, the inner one copies everything when
    it ends.
    """
    _uploads.pending = _uploads.pending or []
    try:
        yield
        pending = _uploads.pending
        _uploads.pending = None
        if pending:
            _upload(pending)
    finally:
        _uploads.pending = None


def _upload(pending: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Copy host tensors to the device in one buffer, and let the device tensors be views of it."""
    sizes = [-(-tensor.nbytes // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT for _, tensor in pending]
    on_host = torch.empty(sum(sizes), dtype=torch.uint8)
    for part, (_, tensor) in zip(on_host.split(sizes), pending, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    on_device = place(on_host, pending[0][0].device)
    for part, (target, tensor) in zip(on_device.split(sizes), pending, strict=True):
        target.data = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def place(tensor: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a small host tensor to a device, with CUDA asynchronously from pinned memory; see also `placed_together`.

    Source: PyTorch notes "CUDA semantics", use of pinned memory buffers; torch's host allocator keeps the pinned buffer
    until the copy is done.
    """
    if device.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(device)
    if _uploads.pending is not None and not traits_of(device).is_host:
        on_device = torch.empty(0, dtype=tensor.dtype, device=device)
        _uploads.pending.append((on_device, tensor))
        return on_device
    if not traits_of(device).uses_pinned_memory:
        return tensor.to(device)
    return tensor.pin_memory().to(device, non_blocking=True)


class Device(ABC):
    """A device that holds tensors and computes: its memory, its speed and its dtypes.

    Args:
        torch_device: the device to give to torch.
    """

    name: str  # "cpu", "cuda" or "mps"
    overlaps_copies = False  # Copies to and from the host run during the computation.
    supports_several_processes = True  # Several processes can train together on such devices.
    is_separate_memory = False  # Its tensors lie outside the machine's RAM.
    # Whether cached blocks serve tensors of other sizes, so that emptying the cache regularly only costs time.
    reuses_cache = False
    out_of_memory_words: tuple[str, ...] = ()  # Parts of the backend's error messages, in lower case.
    largest_side = LAST_SIDE  # Products up to this side are measured; GPUs reach their rate only in larger ones.

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._rates: dict[torch.dtype, float] = {}

    @abstractmethod
    def describe(self) -> str:
        """Name the hardware in a few words."""

    @classmethod
    def why_missing(cls) -> str:
        """Why this machine has no usable device of this kind; empty where it has one."""
        return ""

    @classmethod
    def count(cls) -> int | None:
        """How many such devices this machine has; None: one, which all processes share."""
        return None

    # -- memory, all in bytes; a device without memory of its own answers 0

    def memory_now_bytes(self) -> int:
        """What this process holds from the device now, cached blocks included."""
        return 0

    def memory_idle_bytes(self) -> int:
        """The part of `memory_now_bytes` that no tensor uses."""
        return 0

    def memory_peak_bytes(self) -> int:
        """The most that `memory_now_bytes` reached since `reset_peak`."""
        return 0

    def reset_peak(self) -> None:
        """Start new peaks at what is held now."""
        return None

    def memory_total_bytes(self) -> int:
        """What the device could give to one process at most."""
        return 0

    def memory_free_bytes(self) -> int:
        """What tensors of this process may still take: free memory of the device and idle cached blocks of our own."""
        return 0

    def pinned_bytes(self) -> int:
        """RAM of this process that is pinned for copies to and from the device, which systems do not count as
        anonymous.
        """
        return 0

    def limit_memory(self, limit_bytes: int) -> bool:
        """Let the backend refuse to hold more than this. Returns whether the backend can."""
        return False

    def cleanup(self) -> None:
        """Give cached blocks back to the device."""
        return None

    def synchronize(self) -> None:
        """Wait until everything started so far is done."""
        return None

    # -- speed and dtype

    @property
    def is_host(self) -> bool:
        """Whether it is the processor that the program runs on."""
        return traits_of(self.torch_device).is_host

    @property
    def speed_class(self) -> str:
        """Key of the time estimates for such hardware: the class of the CPU ("amx_bf16", ...), "cuda" or "mps"."""
        return processor.here().name

    @property
    def computes_on(self) -> str:
        """Model name of the GPU, or of the processor with its class; measured speeds are kept under it."""
        return processor.describe_here()

    @property
    def rated_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes that a run may compute in."""
        return (torch.float32, torch.bfloat16)

    @property
    def library_bytes(self) -> int:
        """Bytes that matrix libraries, such as cuBLAS, allocate on first use and never free."""
        return LIBRARIES_BYTES

    @property
    def threads(self) -> int:
        """Threads of products on a machine without other programs."""
        return most_threads()

    def nominal_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of matrix products that this class of hardware typically reaches; 0 if no run trains in this dtype.

        It comes from a table, not from a measurement, so that plans depend on it alone and are reproducible.
        """
        return processor.here().rate(name_of(dtype), self.threads)

    def warm_up(self) -> None:
        """Run some products so that the libraries are loaded before memory is measured.

        The sizes are those of `multiply_rate`, so that a process holds the same memory whether it measures speeds or
        not.

        Memory: 2 x largest_side^2 elements, freed on return.
        """
        for dtype in self.rated_dtypes:
            is_slow = FAST_FACTOR * self.nominal_rate(dtype) < self.nominal_rate(torch.float32)
            last = FIRST_SIDE if is_slow else self.largest_side
            side = FIRST_SIDE
            while side <= last:
                square = torch.full((side, side), 0.5, dtype=dtype, device=self.torch_device)
                square @ square
                side *= 2
        self.synchronize()
        self._discard_measurement()

    def multiply_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of a square matrix product, measured once, in about 0.1 s.

        Only for time estimates and for display: it is lower on a busy machine, so no choice may depend on it.
        Memory: at most 2 x largest_side^2 elements, freed on return.
        """
        if dtype not in self._rates:
            self._rates[dtype] = self._measure_rate(dtype)
            self._discard_measurement()
        return self._rates[dtype]

    def _measure_rate(self, dtype: torch.dtype) -> float:
        side = FIRST_SIDE
        best = 0.0
        is_slow = False
        while side <= self.largest_side and not is_slow:
            square = torch.full((side, side), 0.5, dtype=dtype, device=self.torch_device)
            times: list[float] = []
            while len(times) < 3 or (sum(times) < REPEAT_SECONDS and len(times) < 20):
                times.append(self._time(square.__matmul__, square))
            rate = 2 * side**3 / min(times)
            # On a busy machine the time of a small product is mostly waiting for a core, so that the rate grows with
            # the size. A dtype that is slow itself has much the same rate in all sizes.
            is_slow = min(times) >= LONG_SECONDS and side > FIRST_SIDE and rate < WAITING_FACTOR * best
            best = max(best, rate)
            side *= 2
        return best

    def _time(self, work: Callable[[torch.Tensor], object], tensor: torch.Tensor) -> float:
        self.synchronize()
        start = time.perf_counter()
        work(tensor)
        self.synchronize()
        return max(time.perf_counter() - start, 1e-9)

    def _discard_measurement(self) -> None:
        """Free what a measurement has cached, and reset the peak: both would otherwise count for the run."""
        self.cleanup()
        self.reset_peak()

    def copy_rate(self) -> float:
        """Memory bandwidth in bytes a second, read and written, which limits optimizer updates and pointwise kernels.

        Memory: 2 x 64 MiB, freed on return.
        """
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source).copy_(source)
        return 2 * COPIED_BYTES / min(self._time(target.copy_, source) for _ in range(5))

    def known_speed(self) -> Measured | None:
        """The measured speeds of this device, of this run or an earlier one; None: not measured yet."""
        return machine_file.read(self._key)

    def measure(self) -> Measured:
        """Measure the rate of each dtype that a run may compute in, in some tenths of a second, and save the rates."""
        rates = {name_of(dtype): self.multiply_rate(dtype) for dtype in self.rated_dtypes}
        return machine_file.keep(self._key, self.computes_on, self.threads, rates)

    @property
    def _key(self) -> str:
        if self.torch_device.type == "cpu":
            return machine_file.key_of("cpu", self.computes_on, self.threads)
        return machine_file.key_of(self.name, self.computes_on)

    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes worth computing in, fastest first. fp32 is always among them; fp16 only where bf16 is not."""
        if self.nominal_rate(torch.bfloat16) > FAST_FACTOR * self.nominal_rate(torch.float32):
            return (torch.bfloat16, torch.float32)
        return (torch.float32,)

    def choose_compute_dtype(self, requested: str = "auto") -> DtypeChoice:
        """Choose the dtype of matrix products. Weights may be stored in bf16 whatever it is.

        Args:
            requested: `mixed_precision`: "auto", "no", "bf16" or "fp16".
        """
        fast = self.fast_dtypes()
        choices = {
            "auto": fast,
            "no": (torch.float32,),
            "bf16": tuple(dtype for dtype in fast if dtype != torch.float16),
            "fp16": (torch.float16,) if self.multiplies_fp16() else fast,
        }
        dtype = choices[requested][0]
        word = PRECISION_WORDS[dtype]
        if requested == "no":
            return DtypeChoice(dtype, say("fp32, as requested"), True)
        if requested == "fp16" and word != requested:
            return DtypeChoice(dtype, say("{word} matrix products: fp16 is not faster here", word=word), False)
        return DtypeChoice(dtype, REASONS[dtype], requested in ("auto", word))

    def why_not_compiling(self) -> str:
        """Why torch.compile cannot be used for blocks here; empty where it can."""
        return say("torch compiles for NVIDIA GPUs and processors only")

    def multiplies_fp16(self) -> bool:
        """Whether fp16 products are fast here."""
        return False

    def set_exact_fp32(self, exact: bool) -> None:
        """Whether fp32 products are exact, or may use TF32: the same range with 10 of 23 mantissa bits, but faster."""
        return None

    def carrier(self) -> Carrier:
        """An object that copies between host and this device in a thread of its own, during the computation."""
        return Carrier(self.torch_device)

    # -- errors and placement

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error, or one of its causes, says that the device or the host is out of memory."""
        link: BaseException | None = error
        while link is not None and not self._says_out_of_memory(link):
            link = link.__cause__
        return link is not None

    def _says_out_of_memory(self, error: BaseException) -> bool:
        if isinstance(error, (torch.OutOfMemoryError, MemoryError)):
            return True
        if isinstance(error, OSError):
            return error.errno == errno.ENOMEM
        words = HOST_OUT_OF_MEMORY + self.out_of_memory_words
        return isinstance(error, RuntimeError) and any(map(str(error).lower().__contains__, words))

    def check_placement(self, tensors: Iterable[tuple[str, torch.Tensor]]) -> None:
        """Make sure that every tensor lies on this device.

        Args:
            tensors: (name, tensor), for example `model.named_parameters()` and the optimizer's states.
        Raises:
            RuntimeError: names the first tensors that lie elsewhere.
        """
        own = self.torch_device
        strays = [
            f"{name} on {tensor.device}"
            for name, tensor in tensors
            if tensor.device.type != own.type or len({tensor.device.index, own.index} - {None}) > 1
        ]
        if strays:
            raise RuntimeError(f"{len(strays)} tensors are not on {own}, such as {', '.join(strays[:3])}")
