"""How much memory and time does one way to run a step take, in each phase of a run?

peak = base + weights + optimizer state + what the phase holds at its highest + what malloc holds. What a step holds is
counted in `memory.cost.step_peaks`, what a block holds in `memory.cost.blocks`, what malloc holds in `memory.cost.heap`, time in
`memory.cost.speed`.
"""

from __future__ import annotations

from limits import DRAWN_ELEMENTS, FILE_CHUNK_BYTES
from memory.cost.heap import Heap
from memory.cost.homes import resident_bytes, slots_bytes
from memory.cost.precision import dtype_bytes
from memory.cost.sharing import share_out
from memory.cost.speed import predict_seconds, typical_seconds
from memory.cost.step_peaks import StepPeaks, evaluation_parts, offloaded_bytes, samples_parts
from memory.cost.work import BASE_BYTES, COMPILED_BYTES, Choice, Machine, Work, state_bytes

__all__ = [
    "BASE_BYTES", "Choice", "Machine", "Work", "offloaded_bytes", "peak_of", "predict", "predict_seconds",
    "state_bytes", "typical_seconds",
]  # fmt: skip

ROWS, CORRECTION = "rows of a step", "correction"
FIXED = ("base", "weights", "weights at work", "optimizer state", ROWS)
STEP_PHASES = ("loss", "decoder backward", "encoder backward", "block update", "last update")
LOAD_BYTES = 8 * DRAWN_ELEMENTS  # buffers while weights are filled: what is drawn, and what it is scaled to
SAVE_BYTES = FILE_CHUNK_BYTES  # while they are written
ID_BYTES = 8
ROW_BYTES = 400  # of a row beside its tokens: Python's objects, while it is read; its lengths and key


def predict(work: Work, choice: Choice, machine: Machine) -> dict[str, dict[str, int]]:
    """Predict what each phase of a run holds at its highest: phase -> component -> bytes."""
    s = dtype_bytes(choice.storage)
    fixed = {
        "base": machine.base_bytes,
        "weights": resident_bytes(work, choice) + (4 * work.trained.adapters if work.trained else 0),
        "weights at work": slots_bytes(work, choice, machine),
        "optimizer state": state_bytes(work, choice.storage),
        "libraries": libraries_bytes(choice, machine),
    }
    peaks = StepPeaks(work, choice, machine)
    fixed = {name: size for name, size in fixed.items() if size or name != "weights at work"}
    phases = {
        "load": {**fixed, "buffers": LOAD_BYTES},
        "loss": {**fixed, **peaks.loss()},
        "decoder backward": {**fixed, **peaks.decoder_backward()},
        "encoder backward": {**fixed, **peaks.encoder_backward()},
        "block update": {**fixed, **peaks.block_update()},
        "last update": {**fixed, **peaks.last_update()},
        "evaluation": {**fixed, **evaluation_parts(work, choice, machine)},
        "samples": {**fixed, **samples_parts(work, choice, machine)},
        "save": {**fixed, "buffers": SAVE_BYTES},
    }
    share_out(
        phases,
        choice.shards,
        work.counts,
        dtype_bytes(choice.compute),
        s,
        choice.saved_blocks,
        2 if choice.scores else 1,
        work.counts["embedding"] if work.model.vocab_size % choice.shards else 0,
    )
    heap = Heap(peaks)
    passing = {phase: sum(size for name, size in parts.items() if name not in fixed) for phase, parts in phases.items()}
    most = max(passing[phase] for phase in STEP_PHASES)
    for phase, parts in phases.items():
        parts["allocator slack"] = heap.slack(phase, passing[phase], most)
        if phase in STEP_PHASES:
            parts[ROWS] = rows_bytes(work, choice, machine)
        if machine.correction != 1.0:
            parts[CORRECTION] = int((machine.correction - 1.0) * changeable(parts))
    return phases


def libraries_bytes(choice: Choice, machine: Machine) -> int:
    """What libraries hold after their first use: nothing in the host's memory counts where the device has its own."""
    if not machine.base_bytes:
        return 0
    compiles = choice.compute == "bfloat16" and not machine.widens_whole  # oneDNN's products; those of fp32 are MKL's
    return machine.libraries_bytes + (COMPILED_BYTES if compiles else 0)


def rows_bytes(work: Work, choice: Choice, machine: Machine) -> int:
    """The rows of a step, padded in the batches that its data comes in, and those of a pass over the model laid end to end.

    Nothing in the host's memory counts where the device has its own.
    """
    if not machine.base_bytes:
        return 0
    shapes, rows = work.step_shapes, choice.batch_size_per_gpu
    here = shapes.together(rows, choice.micro_batches_per_pass, choice.sizes)
    ids = shapes.padded_tokens(rows) + here.source + 2 * here.target  # what the decoder reads, and what it shall write
    return ID_BYTES * ids + ROW_BYTES * work.rows


def changeable(parts: dict[str, int]) -> int:
    """The temporary memory of a phase: all but base, weights, optimizer state and rows, before any correction."""
    return sum(size for name, size in parts.items() if name not in (*FIXED, CORRECTION))


def peak_of(phases: dict[str, dict[str, int]]) -> tuple[str, int]:
    """The highest phase and its bytes."""
    totals = {phase: sum(parts.values()) for phase, parts in phases.items()}
    highest = max(totals, key=lambda phase: totals[phase])
    return highest, totals[highest]
