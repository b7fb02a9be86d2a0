"""What does malloc hold beyond the tensors that are there, at each step peak?

glibc maps a tensor above a size by itself and gives it back when it is freed; smaller ones are in a heap that keeps what
comes free in its middle. "small" maps nearly all, and only rounds a few up. "fast" has the heap, which the walk trims
at the start, after each saved block, before the loss and between the ways back through decoder and
encoder (`engine.walk`): what came free before is gone by then, and what comes free after stays to the next time. "untrimmed"
has tensors below 8 MiB there and trims it in no step, so that the next one finds its pages: it stays as large as the highest place of
a step has made it, gaps included, until memory is cleaned.

The shares are fitted: to measured peaks of each place, of models of 6M and 190M weights, with and without recomputing.
"""

from __future__ import annotations

import math

from limits import HEAP_BELOW, UNTRIMMED_HEAP_BELOW
from memory.cost.precision import QUANTIZED
from memory.cost.step_peaks import StepPeaks
from units import MIB

SMALL_SHARE = 0.015  # of all temporary memory, where nearly all is mapped
# After a trim: pages that are used in part, and a share of all temporary memory.
TRIMMED_BYTES, TRIMMED_SHARE = 2 * MIB, 0.01
RECOMPUTED_SHARE = 1.2  # of a recomputed block's small tensors: pieces too small for what the next block asks for
SAVED_SHARE = 0.5  # the same of a saved block, whose tensors are no new ones
GRAPH_SHARE = 0.75  # of the small tensors of graphs that are gone
# Of the most that comes and goes: gaps of a heap that is never trimmed. 0.13 to 0.38 were measured; it grows for some 150 steps.
UNTRIMMED_SHARE = 0.33
# At least: some of the largest tensors in that heap, where a few of them are most of what comes and goes (logits of small models):
# a small tensor that stays in the gap of one lets the next one find none. Up to 3 were measured.
UNTRIMMED_BYTES = 3 * UNTRIMMED_HEAP_BELOW
AGED_SHARE = 0.2  # of those of all saved blocks: what some hundred steps of other lengths leave between them


class Heap:
    """What malloc keeps in each phase of a run, in bytes.

    Args:
        peaks: what the walk holds at its step peaks.
    """

    def __init__(self, peaks: StepPeaks) -> None:
        self.peaks, self.choice = peaks, peaks.choice

    def slack(self, phase: str, passing: int, most: int) -> int:
        """What malloc keeps in `phase`, in which `passing` bytes come and go; `most` in any phase of a step."""
        if phase == "load":
            return 0
        if self.choice.malloc == "untrimmed":
            if phase == "evaluation":  # cleaned before
                return _gaps(passing)
            return max(0, most + _gaps(most) - passing)
        if self.choice.malloc == "small":
            return int(SMALL_SHARE * passing)
        return TRIMMED_BYTES + int(TRIMMED_SHARE * passing + self._pieces(phase))

    def _pieces(self, phase: str) -> float:
        peaks = self.peaks
        if (
            phase == "loss"
        ):  # trimmed just before; beside the gradients of earlier passes, the end of forward is as high
            return self._blocks("decoder", is_saved=False) if self.choice.accumulation_passes > 1 else 0.0
        if phase == "evaluation":  # cleaned before, trimmed at the head
            return peaks.blocks.tile_bytes() + self._casts("decoder")
        decoder = self._blocks("decoder", is_saved=peaks.saved_decoder_blocks > 0)
        # the graphs of a block come free with others between them
        decoder += self._small_graphs(0, min(1, peaks.saved_decoder_blocks))
        if phase == "decoder backward":
            return decoder
        if phase == "block update":
            return max(decoder, GRAPH_SHARE * self._small_graphs(0, min(1, peaks.saved_decoder_blocks)))
        encoder = self._blocks("encoder", is_saved=peaks.saved_encoder_blocks > 0) + peaks.block_update()["one update"]
        if phase == "encoder backward":  # trimmed just before
            return encoder + AGED_SHARE * self._small_graphs(peaks.saved_encoder_blocks, peaks.saved_decoder_blocks)
        if phase == "last update":
            return encoder + GRAPH_SHARE * self._small_graphs(peaks.saved_encoder_blocks, 0)
        return (
            decoder + encoder + GRAPH_SHARE * self._small_graphs(peaks.saved_encoder_blocks, peaks.saved_decoder_blocks)
        )

    def _blocks(self, kind: str, *, is_saved: bool) -> float:
        """Pieces left by backward through the blocks of a stack: of graph, tiles, casts and gradients of weights."""
        gradients = min(self._weights(kind), self.peaks.learns[kind] * self.peaks.e)
        besides = self.peaks.blocks.tile_bytes() + gradients + self._casts(kind)
        if is_saved:
            return besides if self.choice.micro_batches_per_pass > 1 else SAVED_SHARE * besides
        blocks = self.peaks.blocks
        graph = blocks.decoder_graph(HEAP_BELOW) if kind == "decoder" else blocks.encoder_graph(HEAP_BELOW)
        return RECOMPUTED_SHARE * (graph + besides)

    def _casts(self, kind: str) -> int:
        if self.choice.storage not in QUANTIZED:
            return self._weights(kind) if self.choice.storage != self.choice.compute else 0
        cast = self.peaks.cast(kind)
        return cast if cast < HEAP_BELOW else 0

    def _weights(self, kind: str) -> int:
        """Matrices of a block that are small enough for the heap, in the compute dtype."""
        e = self.peaks.e
        return sum(size * e for size in map(math.prod, self.peaks.work.block_matrices[kind]) if size * e < HEAP_BELOW)

    def _small_graphs(self, encoder: int, decoder: int) -> int:
        """Of the graphs of so many saved blocks, of all micro-batches, the tensors in the heap."""
        return self.peaks.graphs(encoder, decoder, HEAP_BELOW)


def _gaps(passing: int) -> int:
    """Of a heap that is not trimmed, in which so many bytes come and go."""
    return max(int(UNTRIMMED_SHARE * passing), min(passing, UNTRIMMED_BYTES))
