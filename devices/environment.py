"""Environment variables that must be set before torch and pyarrow are imported, since both read them only once.

A value that the user has set is kept. Nothing here imports torch.
Source: PyTorch notes "MPS environment variables" and "CUDA memory management"; pyarrow `default_memory_pool`.
"""

from __future__ import annotations

import os
import re
import shutil
import sys
from collections.abc import Mapping, MutableMapping
from importlib import metadata
from pathlib import Path

HIGH = "PYTORCH_MPS_HIGH_WATERMARK_RATIO"
LOW = "PYTORCH_MPS_LOW_WATERMARK_RATIO"
# Compiled products that oneDNN, and torch above it, keep by shape: 1,024 each where nothing is said, 0.3 MiB a shape
# and place. To compile one takes 0.3 ms. Steps of 256 short rows are 15% faster at 32 than at 16, and not faster at
# 128.
PRODUCT_CACHES = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "32", "LRU_CACHE_CAPACITY": "32"}
ALLOCATOR_SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")
# torch 2.9 knows the first name and does not heed it on CUDA (pytorch 183387); it works in 2.11.
FIRST_WITH_NEW_NAME = (2, 11)
# torch's own 1.7 and 1.4 of the recommended working set can exceed the RAM: the machine swaps where an error would help
HIGH_DEFAULT = 0.8
LOW_SHARE = 0.75


def prepare_environment(
    environ: MutableMapping[str, str] = os.environ,
    platform: str = sys.platform,
    root: Path = Path("/"),
    torch_version: str | None = None,
) -> dict[str, str]:
    """Set what is missing. Call before torch and pyarrow are imported.

    Args:
        environ, platform, root, torch_version: those of this process unless a test says otherwise.
    Returns:
        the variables that were set here.
    """
    # Arrow's own pool keeps freed memory out of malloc_trim's reach.
    defaults = {"ARROW_DEFAULT_MEMORY_POOL": "system", **PRODUCT_CACHES}
    if platform == "darwin":
        defaults |= {"PYTORCH_ENABLE_MPS_FALLBACK": "1", **_watermarks(environ)}
    # NVIDIA's driver, or under WSL2 that of Windows.
    has_driver = _is_any_there(root, "nvidiactl", "dxg")
    if platform == "linux" and has_driver and not any(name in environ for name in ALLOCATOR_SETTINGS):
        # Blocks of any length share one range: no fragments.
        defaults[_allocator_settings(torch_version)] = "expandable_segments:True"
    new = {name: value for name, value in defaults.items() if name not in environ}
    environ.update(new)
    return new


def may_have_gpu() -> bool:
    """Whether a GPU may be here: a driver's file, or a Mac's own chip. Torch alone knows; it takes seconds to ask."""
    if os.environ.get("CUDA_VISIBLE_DEVICES") in ("", "-1"):
        return False
    if sys.platform == "linux":
        return _is_any_there(Path("/"), "nvidiactl", "dxg", "kfd")
    return sys.platform == "darwin" or shutil.which("nvidia-smi") is not None


def _is_any_there(root: Path, *names: str) -> bool:
    return any((root / "dev" / name).exists() for name in names)


def _allocator_settings(torch_version: str | None) -> str:
    """The variable that torch's allocator on CUDA reads; torch itself is not imported to learn its version."""
    try:
        numbers = re.findall(r"\d+", torch_version or metadata.version("torch"))
    except metadata.PackageNotFoundError:  # torch may not have been installed as a package.
        return ALLOCATOR_SETTINGS[0]
    is_new = (int(numbers[0]), int(numbers[1])) >= FIRST_WITH_NEW_NAME
    return ALLOCATOR_SETTINGS[0] if is_new else ALLOCATOR_SETTINGS[1]


def _watermarks(environ: MutableMapping[str, str]) -> dict[str, str]:
    """Ratios of the recommended working set. torch refuses low above high, unless high is 0 (no limit)."""
    low = _ratio(environ, LOW, 0.0)
    high = _ratio(environ, HIGH, max(HIGH_DEFAULT, low))
    return {HIGH: f"{high:g}", LOW: f"{LOW_SHARE * (high or HIGH_DEFAULT):g}"}


def _ratio(environ: Mapping[str, str], name: str, default: float) -> float:
    try:
        return float(environ.get(name, ""))
    except ValueError:
        return default  # What is no number, torch itself will refuse in its own words.
