"""The dtypes of weights, products and activations between blocks, named in one place.

A user asks for a precision by `mixed_precision`, and for that of the frozen weights under adapters by `lora_base`; the
device says which products are fast. Here the words become dtype names, and these become words again, in which a run
that goes on asks for what it has. `devices.base.dtype_of` makes torch's dtypes of the names.
"""

from __future__ import annotations

from typing import NamedTuple

from devices.sizes import INT4_GROUP, INT4_GROUP_BYTES

FLOAT32 = "float32"
BFLOAT16 = "bfloat16"
FLOAT16 = "float16"
INT8 = "int8"
INT4 = "int4"
COMPUTE_DTYPES = (FLOAT32, BFLOAT16, FLOAT16)
QUANTIZED = (INT8, INT4)
STORAGE_DTYPES = (*COMPUTE_DTYPES, *QUANTIZED)
WORDS = {FLOAT32: "fp32", BFLOAT16: "bf16", FLOAT16: "fp16", INT8: "int8", INT4: "int4"}  # Users write these.
NUMBER_BYTES = {FLOAT32: 4, BFLOAT16: 2, FLOAT16: 2, INT8: 1, INT4: 1}


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
        """What passes between blocks is as narrow as the stored weights, and fp32 with fp16 products, whose range is
        too small.
        """
        between_blocks = compute
        if (storage, compute) == (BFLOAT16, FLOAT32):
            between_blocks = BFLOAT16
        elif compute == FLOAT16:
            between_blocks = FLOAT32
        return cls(storage, compute, between_blocks)

    @property
    def mixed_precision(self) -> str:
        """The value of `mixed_precision` that asks for this one."""
        if self.compute == FLOAT16:
            return "fp16"
        return "no" if self.storage == FLOAT32 else "bf16"

    @property
    def lora_base(self) -> str:
        """The value of `lora_base` that asks for this one under adapters."""
        return WORDS[self.storage]


def dtype_bytes(name: str) -> int:
    """Bytes of one number. Tables of an int4 model are stored in int8; `matrix_bytes` has its packed matrices."""
    return NUMBER_BYTES[name]


def matrix_bytes(shape: tuple[int, ...], name: str) -> int:
    """Bytes of a matrix of a block at rest."""
    rows, columns = shape
    if name == INT4:
        return rows * -(-columns // INT4_GROUP) * INT4_GROUP_BYTES
    return rows * columns * dtype_bytes(name)
