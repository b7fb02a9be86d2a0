"""The interface that CUDA, MPS, the CPU and the tests' fake device fulfil, and the traits by which work is cut on each.

The rest of the program asks here and never names a backend. Memory figures speak of what this process holds from the
device, cached blocks included, because that is what other programs cannot use.

A processor works in chunks that stay in its cache. A GPU starts a kernel for each operation, which takes microseconds
whatever it computes: there the pieces are as large as memory allows, nothing is looked at from the host, and what is
small is computed on the host and copied once. The device "meta", on which nothing is computed, takes the traits it
stands for: launches and memory of a step are counted so without a GPU.
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

from common.language import say
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

# Sizes and times of the measurement: a slow dtype must end it at a tiny product, a fast one needs a large product;
# each size is repeated for a while, because other programs on the machine can only make a product slower.
FIRST_SIDE = 64
LAST_SIDE = 1024
LONG_SECONDS = 4e-3
REPEAT_SECONDS = 15e-3
UPLOAD_ALIGNMENT = 256  # Bytes that tensors which are copied together begin at.
COPIED_BYTES = 64 * 2**20  # This is far above any processor's cache.
WAITING_FACTOR = 2.0  # Twice the side is eight times the work: a rate that grows by more than this was mostly waiting.
HOST_OUT_OF_MEMORY = (
    "defaultcpuallocator: can't allocate memory",
    "not enough memory: you tried to allocate",
    "std::bad_alloc",
    "cannot allocate memory",
)


@dataclass(frozen=True)
class DeviceTraits:
    """How work is cut on one kind of device.

    Args:
        is_host: the tensors lie where the program runs: looking at a number costs nothing.
        scores: elements of attention's scores formed at a time. update: of weights updated at a time.
        summed: of tokens' gradients summed at a time.
        is_fused: torch's memory-efficient attention computes, dropout and the gradient of the bias included.
        is_multi_tensor: one kernel writes many tensors.
        is_pinned: copies from pinned memory are waited for by nobody.
        largest_inner: most terms of each sum of a product; None: any.
        tile: rows of a product that are computed together, so that a few more take as long as as many again.
        has_compiler: torch compiles pointwise kernels at run time (`devices.pointwise`).
    """

    is_host: bool
    scores: int
    update: int
    summed: int
    is_fused: bool = False
    is_multi_tensor: bool = False
    is_pinned: bool = False
    largest_inner: int | None = None
    tile: int = 1
    has_compiler: bool = False

    def terms_of_sums(self, count: int) -> int:
        """Terms of each sum of a product that would have so many: they are formed in parts where that is too many."""
        return self.largest_inner or count

    def with_scores(self, count: int) -> DeviceTraits:
        """The traits with so many scores at a time; and no more weights."""
        return replace(self, scores=count, update=update_elements(count))


HOST = DeviceTraits(True, TILE_ELEMENTS, UPDATE_ELEMENTS, SUMMED_ELEMENTS)
GPU = DeviceTraits(False, DEVICE_SCORES, DEVICE_UPDATE_ELEMENTS, DEVICE_SUMMED_ELEMENTS, tile=DEVICE_TILE)
CUDA = replace(GPU, is_fused=torch.version.hip is None, is_multi_tensor=True, is_pinned=True, has_compiler=True)
MPS = replace(GPU, largest_inner=MPS_INNER, has_compiler=True)
_traits = {"cpu": HOST, "cuda": CUDA, "mps": MPS, "meta": HOST}


def traits_of(device: torch.device) -> DeviceTraits:
    """The traits of a device; a GPU of a kind that is not known here has none of the special operations."""
    return _traits.get(device.type, GPU)


def is_host(tensor: torch.Tensor) -> bool:
    """Whether a tensor lies where the program runs."""
    return traits_of(tensor.device).is_host


def has_fused(device: torch.device) -> bool:
    """Whether torch's fused kernels compute on a device."""
    return traits_of(device).is_fused


def seed_generator(device: torch.device, seed: int) -> None:
    """Seed the generator with which torch draws on a device."""
    if device.type == "cpu":
        torch.default_generator.manual_seed(seed)  # `torch.manual_seed` would seed all devices.
    elif device.type != "meta":
        torch.get_device_module(device).manual_seed(seed)


def form_scores(count: int) -> None:
    """From now on GPUs form so many scores of attention at a time: what a run's plan has chosen."""
    for name in ("cuda", "mps"):
        _traits[name] = _traits[name].with_scores(count or DEVICE_SCORES)


@contextmanager
def override_traits(name: str, traits: DeviceTraits) -> Iterator[None]:
    """Other traits for tensors on the device of this name until the context ends: for counting and for tests."""
    before = _traits[name]
    _traits[name] = traits
    try:
        yield
    finally:
        _traits[name] = before


# The words of the setting `mixed_precision`.
WORDS = {torch.float32: "fp32", torch.bfloat16: "bf16", torch.float16: "fp16"}
REASONS = {
    torch.float32: say("fp32 products: bf16 ones are not faster here; weights may still be stored in bf16"),
    torch.bfloat16: say("bf16 products: fast here"),
    torch.float16: say("fp16 products: fast here; the residual stream is fp32"),
}


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
    """The dtype of a name without its library."""
    dtype: torch.dtype = getattr(torch, name)
    return dtype


class _Uploads(threading.local):
    waiting: list[tuple[torch.Tensor, torch.Tensor]] | None = None  # What `place` has returned, and what it will hold.


_uploads = _Uploads()


@contextmanager
def placed_together() -> Iterator[None]:
    """What `place` brings to a GPU until the context ends goes there in one copy, as it ends; nothing may read it
    before.

    Each copy to MPS waits for all that has been started there. Of contexts inside each other the first that ends sends
    all.
    """
    _uploads.waiting = _uploads.waiting or []
    try:
        yield
        waiting = _uploads.waiting
        _uploads.waiting = None
        if waiting:
            _send(waiting)
    finally:
        _uploads.waiting = None


def _send(waiting: list[tuple[torch.Tensor, torch.Tensor]]) -> None:
    sizes = [-(-tensor.nbytes // UPLOAD_ALIGNMENT) * UPLOAD_ALIGNMENT for _, tensor in waiting]
    on_host = torch.empty(sum(sizes), dtype=torch.uint8)
    for part, (_, tensor) in zip(on_host.split(sizes), waiting, strict=True):
        part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape).copy_(tensor)
    on_device = place(on_host, waiting[0][0].device)
    for part, (target, tensor) in zip(on_device.split(sizes), waiting, strict=True):
        target.data = part[: tensor.nbytes].view(tensor.dtype).view(tensor.shape)


def place(tensor: torch.Tensor, where: torch.device) -> torch.Tensor:
    """Bring a small tensor of the host to a device. A GPU gets it from pinned memory, so that nothing waits for the
    copy.

    Source: PyTorch notes "CUDA semantics", use of pinned memory buffers; its host allocator keeps the buffer until
    then.
    """
    if where.type == "cpu" or tensor.device.type != "cpu":
        return tensor.to(where)
    if _uploads.waiting is not None and not traits_of(where).is_host:
        _uploads.waiting.append((torch.empty(0, dtype=tensor.dtype, device=where), tensor))
        return _uploads.waiting[-1][0]
    if not traits_of(where).is_pinned:
        return tensor.to(where)
    return tensor.pin_memory().to(where, non_blocking=True)


class Device(ABC):
    """One place where tensors live and products run.

    Args:
        torch_device: the device to give to torch.
    """

    name: str  # "cpu", "cuda" or "mps"
    copies_beside = False  # Copies to and from the host run beside the computation.
    serves_several = True  # Several processes can train on such devices together.
    is_separate_memory = False  # Its tensors lie outside the machine's RAM.
    reuses_cache = False  # Cached blocks serve tensors of other sizes: emptying the cache by schedule only costs time.
    out_of_memory_words: tuple[str, ...] = ()  # Words of the backend's own messages, in lower case.
    largest_side = LAST_SIDE  # Products up to this side are measured: a device with more units needs more work.

    def __init__(self, torch_device: torch.device) -> None:
        self.torch_device = torch_device
        self._rates: dict[torch.dtype, float] = {}

    @abstractmethod
    def describe(self) -> str:
        """Name the hardware in a few words."""

    @classmethod
    def why_missing(cls) -> str:
        """Why none can be used here; empty where one can."""
        return ""

    @classmethod
    def count(cls) -> int | None:
        """How many there are here; None: one, which all processes share."""
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
        """What tensors of this process may still take: free blocks of the device and idle ones of our own."""
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
    def library_bytes(self) -> int:
        """What its libraries of products keep from their first use."""
        return LIBRARIES_BYTES

    @property
    def threads(self) -> int:
        """Threads of products on a machine without other programs."""
        return most_threads()

    def nominal_rate(self, dtype: torch.dtype) -> float:
        """FLOP/s of products that such a device reaches: a fact of its class, which decides; 0 where nothing trains in
        it.
        """
        return processor.here().rate(name_of(dtype), self.threads)

    def warm_up(self) -> None:
        """Run the first products, whose libraries stay: what is measured after this includes them.

        In the sizes of `multiply_rate`, so that a process holds the same whether or not speeds were measured in it.

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
        self._forget_products()

    def multiply_rate(self, dtype: torch.dtype) -> float:
        """Multiplications and additions a second of a square matrix product, measured once, in about 0.1 s.

        For estimates of time and for people: a busy machine makes it less, so that nothing may be decided by it.
        Memory: at most 2 x largest_side^2 elements, freed on return.
        """
        if dtype not in self._rates:
            self._rates[dtype] = self._measure_rate(dtype)
            self._forget_products()
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
            # On a busy machine a small product takes as long as its threads wait for a core, so that a large one is
            # faster by its size; a dtype that is slow by itself is not.
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

    def _forget_products(self) -> None:
        """Neither the products that were measured nor their peak belong to a run."""
        self.cleanup()
        self.reset_peak()

    def copy_rate(self) -> float:
        """Bytes a second that one copy reads and writes: the bandwidth that updates and pointwise work live on.

        Memory: 2 x 64 MiB, freed on return.
        """
        source = torch.zeros(COPIED_BYTES, dtype=torch.uint8, device=self.torch_device)
        target = torch.empty_like(source).copy_(source)
        return 2 * COPIED_BYTES / min(self._time(target.copy_, source) for _ in range(5))  # Others only make it slower.

    def known_speed(self) -> Measured | None:
        """What was measured of this device, here or in an earlier run; None: nothing yet."""
        return machine_file.read(self._key)

    def measure(self) -> Measured:
        """Measure the dtypes that a run may compute in, in some tenths of a second, and keep it in `machine_file`."""
        rates = {name_of(dtype): self.multiply_rate(dtype) for dtype in self.rated_dtypes}
        return machine_file.keep(self._key, self.computes_on, self.threads, rates)

    @property
    def _key(self) -> str:
        if self.torch_device.type == "cpu":
            return machine_file.key_of("cpu", self.computes_on, self.threads)
        return machine_file.key_of(self.name, self.computes_on)

    def fast_dtypes(self) -> tuple[torch.dtype, ...]:
        """Dtypes whose products pay here, fastest first. fp32 is always among them; fp16 only where bf16 is not."""
        if self.nominal_rate(torch.bfloat16) > FAST_FACTOR * self.nominal_rate(torch.float32):
            return (torch.bfloat16, torch.float32)
        return (torch.float32,)

    def choose_compute_dtype(self, requested: str = "auto") -> DtypeChoice:
        """Choose the dtype of products. Weights may be stored in bf16 in either case.

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
        word = WORDS[dtype]
        if requested == "no":
            return DtypeChoice(dtype, say("fp32, as asked for"), True)
        if requested == "fp16" and word != requested:
            return DtypeChoice(dtype, say("{word} products: fp16 ones are not faster here", word=word), False)
        return DtypeChoice(dtype, REASONS[dtype], requested in ("auto", word))

    def why_not_compiling(self) -> str:
        """Why torch compiles no blocks here; empty where it can."""
        return say("torch compiles for NVIDIA GPUs and processors only")

    def multiplies_fp16(self) -> bool:
        """Whether fp16 products are fast here."""
        return False

    def set_exact_fp32(self, exact: bool) -> None:
        """Whether fp32 products keep all their bits, or may take a faster way that keeps the range and 10 of 23
        bits.
        """
        return None

    def carrier(self) -> Carrier:
        """Copies of bytes between the host and this device by a thread beside the computation."""
        return Carrier(self.torch_device)

    # -- errors and placement

    def is_out_of_memory(self, error: BaseException) -> bool:
        """Whether an error says that memory, of the device or of the host, was refused. Looks at its causes too."""
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
