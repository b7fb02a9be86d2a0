"""The steps measured on a GPU, and the systems that take them; `benchmarks.checks.launches` traces the same ones."""

from __future__ import annotations

from dataclasses import replace

from benchmarks.checks import launches
from benchmarks.traced.traced_step import TracedWork, lengths_between
from memory.estimate.time import Amount
from memory.estimate.time import flops_of as forward_flops
from settings.declared import T5ModelConfig
from units import GIB

TINY = T5ModelConfig(vocab_size=320, d_model=64, d_kv=16, d_ff=128, num_layers=2, num_decoder_layers=2, num_heads=4)
ROWS = (128, 64, 32, 16, 8)
PEERS = ("eager", "fused", "compiled")  # Hugging Face T5: its own attention, torch's fused one, that and torch.compile
SYSTEMS = (*PEERS, "ours-standard", "ours-low", "ours-ultra")
# name on the page -> name among the traced works
TRACED = {
    "cuda": {"t5-base": "standard", "t5-base-dropout": "dropout", "t5-base-ragged": "ragged"},
    "mps": {"t5-small": "mps"},
}


def works(device: str, rows: int = ROWS[0]) -> dict[str, TracedWork]:
    """Name -> work, for a kind of GPU, of so many rows at most; `tiny` runs where there is none."""
    tiny = TracedWork(TINY, device, lengths_between(16, 20, 100), dropout=0.1)
    traced = {name: launches.works()[known][0] for name, known in TRACED[device].items()}
    cut = {name: replace(work, lengths=work.lengths[:rows]) for name, work in traced.items()}
    return {**cut, "tiny": tiny}


def fitting_rows(free_bytes: int) -> int:
    """The most rows of 512 + 114 tokens that Hugging Face's t5-base with fused attention trains on within 85% of a card.

    5 GiB and 0.41 GiB a row, as traced on tensors that hold nothing; its own attention takes 0.2 GiB a row more.
    """
    return next((rows for rows in ROWS if (5 + 0.41 * rows) * GIB <= 0.85 * free_bytes), ROWS[-1])


def flops_of(work: TracedWork) -> float:
    """Multiplications and additions of a step that no padding adds to and no block makes twice."""
    return 3 * sum(sum(forward_flops(work.model, Amount.of_rows(1, source, target))) for source, target in work.lengths)


def described(name: str, work: TracedWork) -> str:
    """The work as a heading."""
    sources, targets = zip(*work.lengths, strict=True)
    is_equal = len(set(work.lengths)) == 1
    size = (
        f"{sources[0]} + {targets[0]}" if is_equal else f"{min(sources)}-{max(sources)} + {min(targets)}-{max(targets)}"
    )
    dropped = f", dropout {work.dropout}" if work.dropout else ""
    return f"{name}: {len(work.lengths)} rows of {size} tokens{dropped}, one step"
