"""Sizes of tiles, chunks and slabs; the engine and its plan both read them here.

Whatever reaches the kernels of a backend comes from a small set of sizes: CPU libraries, MPS and compilers keep
something for each new one. Lengths of rows in attention are therefore rounded up on a scale that grows geometrically,
and the token sums of a run's micro-batches to a few sizes that its plan chooses. Nothing here imports torch.
"""

from __future__ import annotations

from collections.abc import Sequence

TILE_ELEMENTS = 512 * 1024  # scores of a tile: 2 MB in fp32, so that its few buffers stay in the second-level cache
DEVICE_SCORES = 1 << 25  # scores of attention formed at a time on a GPU, where the plan says nothing else
LEAST_SCORES = 1 << 20  # The plan chooses between these two.
MOST_SCORES = 1 << 28
# weights updated at a time on a GPU, a block of most models; never more than its scores
DEVICE_UPDATE_ELEMENTS = 1 << 24
DEVICE_SUMMED_ELEMENTS = 1 << 24  # elements of tokens' gradients that are summed together on a GPU
DEVICE_TILE = 128  # rows of a product that a processor of a GPU computes together
MPS_INNER = 32_000  # terms of a product's sums: from 32,767 on MPS gives wrong numbers on some chips (pytorch 195163)
LIBRARIES_BYTES = 4 << 20  # what libraries of products take at the first of them, where nothing else is known
LEAST_LENGTH = 8  # queries and keys in a tile
SQUARE_LENGTH = 128  # rows that are no longer have as many queries as keys in a tile; longer ones so many queries
KERNEL_WIDTHS = range(16, 513, 16)  # widths of a head that compiled kernels can attend with
LONGEST_SHORT = 128  # rows that compiled kernels take whole, one (row, head) after the other
LENGTH_MULTIPLE = 8  # The length of a padded row is a multiple of this.
LEAST_FILLED = 16  # tokens of a micro-batch
FILLED_PER_OCTAVE = 4  # sizes of token sums between a power of two and the next
LOSS_CHUNK_BYTES = 32 * 1024**2  # bytes of fp32 logits that are formed together, where memory suffices
COMPARED_BYTES = 8 * 1024**2  # bytes of fp32 scores of the texts of a step with each other that are formed together
DEVICE_LOSS_CHUNK_BYTES = 256 * 1024**2  # the same on a GPU, which starts some 25 kernels for each chunk
HEAD_CHUNK_TOKENS = 16  # fewest tokens whose logits are formed together
UPDATE_ELEMENTS = 512 * 1024  # elements of a weight updated at a time: the few buffers of 2 MB stay in cache
WIDENED_ELEMENTS = 512 * 1024  # elements of a narrow table widened at a time: 2 MB in fp32 stay in cache and heap
LEAST_WIDENED = 64  # rows of a matrix, however wide: with fewer what it is multiplied by would be read too often
SUMMED_ELEMENTS = 1024 * 1024  # elements of tokens' gradients that are summed together: 4 MB in fp32
DRAWN_ELEMENTS = 1024 * 1024  # initial values of a weight that are drawn at a time
PACKED_ELEMENTS = 128 * 1024  # elements of a matrix rounded to int4 at a time: its few buffers stay in cache
INT4_GROUP = 64  # weights of a row that share a scale in int4
INT4_GROUP_BYTES = 34  # bytes that they take with their scale
FILE_CHUNK_BYTES = 4 * 1024**2  # bytes, as fp32, that are read of a tensor in a file at a time
HEAP_BELOW = 4 * 1024**2  # bytes of the tensors in the heap with malloc "fast"; larger ones are mapped by themselves
UNTRIMMED_HEAP_BELOW = 8 * 1024**2  # the same with malloc "untrimmed"
MALLOCS = ("small", "fast", "untrimmed")  # tunings of malloc (`devices.malloc`), from the least memory on
# The heap may hold so much beyond the tensors in use before a step trims it: a share of what comes and goes, and at
# least so many bytes.
HEAP_EXCESS = {"fast": (0.01, 2 * 1024**2), "untrimmed": (0.33, 3 * UNTRIMMED_HEAP_BELOW)}
ENCODER_TOKENS = 4096  # tokens of prompts that pass through the encoder together; or one longer prompt
ANSWERED_TOGETHER = 64  # most rows that are answered at once; more bring little speed on a CPU
EVALUATION_ROWS = 4096  # more than any evaluation batch, where its rows are not known
SAMPLE_TOKENS = 64  # longest answer of the samples after a run


def padded_length(length: int) -> int:
    """Keys of a long row, rounded up: 128, 192, 256, 384, 512, ..., two sizes an octave."""
    size = 1 << (length - 1).bit_length()
    return size * 3 // 4 if size > SQUARE_LENGTH and length <= size * 3 // 4 else max(SQUARE_LENGTH, size)


def filled_tokens(tokens: int, sizes: Sequence[int] = ()) -> int:
    """Tokens of a micro-batch, rounded up to one of `sizes`, which ascend.

    Where none is large enough: to a multiple of 16, from 128 on four sizes an octave.
    """
    for size in sizes:
        if size >= tokens:
            return size
    step = max(LEAST_FILLED, (1 << (tokens - 1).bit_length()) // 2 // FILLED_PER_OCTAVE)
    return -(-tokens // step) * step


def update_elements(scores: int) -> int:
    """Of weights updated at a time on a GPU that forms so many scores at a time; on a CPU (0)."""
    if not scores:
        return UPDATE_ELEMENTS
    # A quarter of many scores makes few kernels on a large card.
    return max(min(DEVICE_UPDATE_ELEMENTS, scores), scores // 4)


def loss_chunk_tokens(chunk_bytes: int, vocab_size: int, tile: int = 1) -> int:
    """Tokens whose logits, in fp32, are formed together: whole tiles of a product's rows, if they are more than one."""
    tokens = max(HEAD_CHUNK_TOKENS, chunk_bytes // (4 * vocab_size))
    return tokens // tile * tile or tokens


def long_tile(num_heads: int, num_queries: int, num_keys: int) -> tuple[int, int, int, int]:
    """How compiled attention goes through a row above `LONGEST_SHORT`: padded queries and keys, and of a tile queries
    and heads.

    As many queries as products need to reach their speed come before heads, of which a tile need not have all: with 8
    queries of each of 128 heads products had a fifth of the speed that they have with 128 of 8.
    """
    keys = padded_length(num_keys)
    block = min(SQUARE_LENGTH, 1 << max(LEAST_LENGTH, TILE_ELEMENTS // keys).bit_length() - 1)
    parts = -(-num_heads // max(1, TILE_ELEMENTS // (block * keys)))
    return -(-num_queries // block) * block, keys, block, -(-num_heads // parts)


def few_places(rows: int) -> int:
    """Places for so many rows: up to 8 as many, then four sizes an octave."""
    step = max(1, (1 << (rows - 1).bit_length()) // 2 // FILLED_PER_OCTAVE)
    return -(-rows // step) * step
