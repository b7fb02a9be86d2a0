"""The dtypes of weights, products and activations between blocks, named in one place.

A user asks for a precision by `mixed_precision`, and for that of the frozen weights under adapters by `lora_base`; the device says
which products are fast. Here the words become dtype names, and these become words again, in which a run that goes on asks
for what it has. `devices.base.dtype_of` makes torch's dtypes of the names.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

from limits import INT4_GROUP, INT4_GROUP_BYTES
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO

FLOAT32, BFLOAT16, FLOAT16, INT8, INT4 = "float32", "bfloat16", "float16", "int8", "int4"
COMPUTE_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
STORAGE_DTYPES = (*COMPUTE_DTYPES, INT8, INT4)
QUANTIZED = (INT8, INT4)
WORDS = {FLOAT32: "fp32", BFLOAT16: "bf16", FLOAT16: "fp16", INT8: "int8", INT4: "int4"}  # as users write them


class Precision(NamedTuple):
    """Dtype names of a run.

    Args:
        storage: of the weights between their uses. compute: of products.
        between_blocks: of what passes from block to block.
    """

    storage: str
    compute: str
    between_blocks: str

    @classmethod
    def of(cls, storage: str, compute: str) -> Precision:
        """What passes between blocks is as narrow as the stored weights, so that fp32 products cost less; with fp16 ones it is
        fp32, for their range is too small for it."""
        narrow = BFLOAT16 if (storage, compute) == (BFLOAT16, FLOAT32) else compute
        return cls(storage, compute, FLOAT32 if compute == FLOAT16 else narrow)

    @property
    def mixed_precision(self) -> str:
        """The word that asks for this one."""
        return "fp16" if self.compute == FLOAT16 else "no" if self.storage == FLOAT32 else "bf16"

    @property
    def lora_base(self) -> str:
        """The word that asks for this one under adapters."""
        return WORDS[self.storage]


def dtype_bytes(name: str) -> int:
    """Bytes of one number; with int4 of a table, which is in int8 there."""
    return {FLOAT32: 4, INT8: 1, INT4: 1}.get(name, 2)


def matrix_bytes(shape: tuple[int, ...], name: str) -> int:
    """Bytes of a matrix of a block at rest."""
    rows, columns = shape
    return rows * (-(-columns // INT4_GROUP) * INT4_GROUP_BYTES if name == INT4 else columns * dtype_bytes(name))


def asked_precision(config: Config, multiplies_fast: Callable[[str], bool]) -> str:
    """The word that is asked for; fp16 of a preset, a file or `config.py` is meant for GPUs, and is auto where such products are not fast.

    Raises:
        UserError: fp16 is asked for by a flag, and is not faster there.
    """
    asked = config.memory.mixed_precision
    if asked != "fp16" or multiplies_fast(FLOAT16):
        return asked
    if config.origin("mixed_precision") in ("preset", "file", "edited"):
        return AUTO
    raise UserError(
        "--mixed_precision = fp16, products in fp16 are not faster on this device; allowed here: auto, no, bf16 "
        "(bf16 halves the weights and computes in what is fast)"
    )


def precisions(config: Config, multiplies_fast: Callable[[str], bool]) -> list[Precision]:
    """Those that the settings allow, the one to be preferred first.

    Args:
        multiplies_fast: whether products in a dtype of 16 bits pay on the machine.
    Raises:
        UserError: what is asked for is not faster there.
    """
    asked, fast = asked_precision(config, multiplies_fast), BFLOAT16 if multiplies_fast(BFLOAT16) else FLOAT32
    compute = FLOAT16 if asked == "fp16" else fast
    if asked == AUTO and fast == FLOAT32 and multiplies_fast(FLOAT16):
        compute = FLOAT16
    # int8's products would leave fp16's range before their scales are applied
    wide, narrow, int8, int4 = (
        Precision.of(storage, dtype)
        for storage, dtype in ((FLOAT32, FLOAT32), (BFLOAT16, compute), (INT8, fast), (INT4, fast))
    )
    is_narrow = asked == "bf16" or compute != FLOAT32 or config.memory.memory_mode == "ultra"
    ways = [wide] if asked == "no" else [narrow] if is_narrow else [wide, narrow]
    base = config.lora.lora_base
    if not config.lora.lora_rank:
        return ways
    return [*ways, int8] if base == AUTO else [{"fp32": wide, "bf16": narrow, "int8": int8, "int4": int4}[base]]
