"""Memory of one block: its graph, and its working memory forward and backward.

Counted line by line from `model/`: the tensors alive at the two highest places, inside attention and inside
feed-forward. Everything is in bytes, for one micro-batch; e is the bytes of the compute dtype. What the pass holds
between blocks (checkpointed activations, gradients) is `memory.estimate.peaks`'s.

Shapes: n encoder and m decoder tokens of a micro-batch, D d_model, I = H K inner width of attention, F d_ff.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from limits import DEVICE_DROPOUT_ELEMENTS, DROPOUT_ELEMENTS, HEAP_BELOW, LONGEST_SHORT, TILE_ELEMENTS, long_tile
from memory.estimate.attention import HASH_BYTES, Padded
from memory.estimate.shapes import MicroBatchRows, Tokens
from model.shapes import inner_width, is_gated
from settings.declared import T5ModelConfig

ATTENTIONS = ((False, False), (True, False), (True, True))  # of the encoder; of a decoder its own, and across
KEY_BYTES = 8 * 8  # of dropout's keys on a GPU, for each token: of 8 sites, in copies while they are hashed
ALIGNED = 8  # numbers of a head that fused attention reads at a time


@dataclass(frozen=True)
class Adapted:
    """What adapters make a graph hold beside what their products hold anyway.

    Args:
        targets: names of the adapted matrices as Hugging Face has them.
        drops: whether adapters read dropped copies of their inputs.
    """

    targets: tuple[str, ...] = ()
    drops: bool = False


NO_ADAPTERS = Adapted()


@dataclass(frozen=True)
class Blocks:
    """The blocks of one model at one micro-batch.

    Args:
        model: its shape. e: bytes of the compute dtype. dropout: whether training drops.
        tokens: of the micro-batch. scores: of attention that a GPU forms at a time; 0: a CPU. is_fused: torch's fused kernels
            compute where nothing is dropped.
        kernels: compiled ones compute attention and dropout. compiles_dropout: one kernel of a GPU draws and drops.
        processors: of a GPU; 0: not known.
        rows: lengths of the micro-batch with the most tokens. answers: decoder rows of one encoder row, see `model.micro_batch`.
        adapted: by adapters. residual: bytes of a number of the residual stream; 0: e.
    """

    model: T5ModelConfig
    e: int
    dropout: bool
    tokens: Tokens
    rows: MicroBatchRows
    scores: int = 0
    is_fused: bool = False
    answers: int = 1
    kernels: bool = False
    adapted: Adapted = NO_ADAPTERS
    compiles_dropout: bool = False
    processors: int = 0
    residual: int = 0

    @property
    def _encoder_output(self) -> int:
        """Tokens of the encoder output as the decoder sees it."""
        return self.tokens.source * self.answers

    @cached_property
    def _widths(self) -> tuple[int, int, int]:
        """Bytes of a token of width D, I and F."""
        c = self.model
        return c.d_model * self.e, inner_width(c) * self.e, c.d_ff * self.e

    @property
    def _stream(self) -> int:
        """Bytes of a token of the residual stream."""
        return self.model.d_model * (self.residual or self.e)

    @property
    def _attentions(self) -> tuple[tuple[bool, bool], ...]:
        return ATTENTIONS if self.model.num_decoder_layers else ATTENTIONS[:1]

    # --- what a graph holds from forward to backward, its input (a checkpointed activation) not counted

    def _feed_forward_graph(self) -> int:
        """A token's bytes in feed-forward: the normed input, and what the activation and the products save."""
        return sum(count * width for count, width in self._feed_forward_tensors())

    def _keeps_input(self, *names: str) -> bool:
        """Whether the gradient of one of these matrices or of its adapter needs their input: frozen ones without adapters need none."""
        return not self.adapted.targets or any(name in self.adapted.targets for name in names)

    def _feed_forward_tensors(self) -> list[tuple[int, int]]:
        d, _, f = self._widths
        read_by_wo = self._keeps_input("wo")
        return [
            (int(self._keeps_input("wi", "wi_0", "wi_1")), d),
            (3 + read_by_wo if is_gated(self.model) else 1 + (self._draws_masks and read_by_wo), f),
            *self._adapter_tensors("wi", "wi_0", "wi_1", "wo"),
        ]

    def _adapter_tensors(self, *names: str) -> list[tuple[int, int]]:
        """A token's bytes of the dropped copies that the adapters of these matrices read."""
        if not self.adapted.drops:
            return []
        d, i, f = self._widths
        inputs = {"o": i, "wo": f}
        return [(1, inputs.get(name, d)) for name in names if name in self.adapted.targets]

    def encoder_graph(self, below: int | None = None) -> int:
        """The graph of an encoder block; of its tensors smaller than `below` bytes alone, where that is given."""
        d, i, _ = self._widths
        attention = [
            (int(self._keeps_input("q", "k", "v")), d),
            (1, self._stream),
            (3 + self._keeps_input("o"), i),
            *self._adapter_tensors("q", "k", "v", "o"),
        ]
        return _sum([*attention, *self._feed_forward_tensors()], self.tokens.source, below)

    def decoder_graph(self, below: int | None = None) -> int:
        """The graph of a decoder block, as `encoder_graph`."""
        return sum(self.decoder_graph_of(below))

    def decoder_graph_of(self, below: int | None = None) -> tuple[int, int]:
        """What the graph of a decoder block holds of the target, and of the source: keys and values of its cross-attention."""
        d, i, _ = self._widths
        attention = [
            (self._keeps_input("q", "k", "v") + self._keeps_input("q"), d),
            (2, self._stream),
            (4 + 2 * self._keeps_input("o"), i),
            *self._adapter_tensors("q", "k", "v", "o"),
            *self._adapter_tensors("q", "o"),
        ]
        own = _sum([*attention, *self._feed_forward_tensors()], self.tokens.target, below)
        return own, _sum([(2, i), *self._adapter_tensors("k", "v")], self._encoder_output, below)

    # --- working memory at its highest, without a saved graph

    def encoder_forward(self) -> int:
        """Forward outside of any graph."""
        d, i, _ = self._widths
        n = self.tokens.source
        attention = n * (d + 3 * i) + self._scores(False, False)
        return max(attention, n * (d + 2 * self._stream) + self._inner(n))

    def encoder_answering(self) -> int:
        """The same where the heap is not trimmed on the way: its small tensors at their most, beside the large ones at theirs."""
        d, i, _ = self._widths
        n = self.tokens.source
        tile, attended = self._tile(False, False, is_backward=False), [n * i] if self.kernels else []
        stages = [[n * d] * 2 + [n * i] * 3 + attended, [n * d] * 3 + [self._inner(n)]]
        small, large = (
            [sum(size for size in stage if (size < HEAP_BELOW) == is_small) for stage in stages]
            for is_small in (True, False)
        )
        return max(small[0] + tile, small[1]) + max(large)

    def decoder_forward(self) -> int:
        """The same for a decoder block."""
        d, i, _ = self._widths
        n, m = self._encoder_output, self.tokens.target
        attention = m * (d + 3 * i) + self._scores(True, False)
        cross = m * (2 * d + self._stream + i) + n * 2 * i + self._scores(True, True)
        return max(attention, cross, m * (2 * d + 2 * self._stream) + self._inner(m))

    def _inner(self, tokens: int) -> int:
        """Activations of width F at their most, in forward."""
        f = self._widths[2]
        count = 3 if is_gated(self.model) else 1 + self.dropout if self._is_in_place else 2
        return tokens * count * f + self._hashing(tokens)

    def _hashing(self, tokens: int) -> int:
        """Random words while the masks of a chunk of feed-forward's activations are drawn, where no kernel draws and drops."""
        if self.kernels or not self._draws_masks:
            return 0
        return HASH_BYTES * min(tokens * self.model.d_ff, DEVICE_DROPOUT_ELEMENTS if self.scores else DROPOUT_ELEMENTS)

    def encoder_backward(self, weights: int) -> int:
        """Backward through a block whose graph is there: what comes on top of it.

        Args:
            weights: bytes of the block's gradients.
        """
        i = self._widths[1]
        n = self.tokens.source
        in_feed_forward = self._feed_forward_gradients(n)
        # the graph of feed-forward is gone by then
        in_attention = (
            n * (2 * self._stream + i - self._feed_forward_graph()) + self._score_gradients(False, False) + weights
        )
        return max(in_feed_forward, in_attention)

    def decoder_backward(self, weights: int) -> int:
        """The same for a decoder block."""
        d, i, _ = self._widths
        n, m = self._encoder_output, self.tokens.target
        gone = m * self._feed_forward_graph()
        in_feed_forward = self._feed_forward_gradients(m)
        in_cross = m * (2 * self._stream + i) + max(self._score_gradients(True, True), n * 2 * (d + i)) + weights - gone
        in_attention = (
            m * (2 * self._stream + i) + self._score_gradients(True, False) + weights - gone - m * 2 * i - n * 2 * i
        )
        return max(in_feed_forward, in_cross, in_attention)

    def _feed_forward_gradients(self, tokens: int) -> int:
        """On top of the graph: those of width F, that of `wo`, and with dropout one of the output beside the residual stream's.

        Of width F there are two, or one and the random words of its mask; one where it is formed in place.
        """
        d, _, f = self._widths
        dropped = tokens * self._stream if self.dropout or self._stream != d else 0
        second = 0 if self._is_in_place else tokens * f  # what dropout copies takes the place of what the graph held
        of_wo = self.model.d_model * f if self._keeps_input("wo") else 0
        return dropped + tokens * f + max(second, self._hashing(tokens)) + of_wo

    @property
    def _draws_masks(self) -> bool:
        return self.dropout and not self.compiles_dropout

    @property
    def _is_in_place(self) -> bool:
        return self.model.feed_forward_proj == "relu"

    # --- attention

    def _lengths(self, is_decoder: bool, is_cross: bool) -> tuple[tuple[int, ...], tuple[int, ...]]:
        sources, targets = zip(*self.rows, strict=True)
        return targets if is_decoder else sources, sources if is_cross or not is_decoder else targets

    def _compiled_tile(self, queries: tuple[int, ...], keys: tuple[int, ...], is_backward: bool) -> int:
        """The same with compiled kernels (`model.compiled_attention`): keys and values of the longest row, and a tile of it.

        Short rows need next to nothing.
        """
        long = {pair for pair in zip(queries, keys, strict=True) if max(pair) > LONGEST_SHORT}
        return max((self._long_row(*pair, is_backward) for pair in long), default=0)

    def _long_row(self, queries: int, keys: int, is_backward: bool) -> int:
        _, keys, block, heads = long_tile(self.model.num_heads, queries, keys)
        width, scores = self._widths[1] * heads // self.model.num_heads, heads * block * keys * self.e
        gathered, tiles, buffers = (4, 3, 2) if is_backward else (2, 2, 1)
        return (gathered * keys + tiles * block) * width + (buffers + self.dropout) * scores

    def _padded(self, is_decoder: bool, is_cross: bool) -> Padded:
        fused = self.is_fused and not self.dropout and self.model.d_kv % ALIGNED == 0
        lengths = self._lengths(is_decoder, is_cross)
        c, width = self.model, self._widths[1]
        scores = self.scores or TILE_ELEMENTS
        return Padded(
            c.num_heads, width, self.e, self._draws_masks, fused, not is_cross, *lengths, scores, self.processors
        )

    def step_indices(self) -> int:
        """On a GPU: what is made once a step for all layers: indices of rows, keys of dropout."""
        if not self.scores:
            return 0
        copies = 0 if not self.dropout else 2 if self.compiles_dropout else 3
        keys = copies * KEY_BYTES * (self.tokens.source + self.tokens.target)
        return keys + sum(self._padded(*which).indices() for which in self._attentions)

    def tile_bytes(self) -> int:
        """The most that one attention takes in backward; with compiled kernels without the gradients themselves."""
        return max(self._tile(*which, is_backward=True) for which in self._attentions)

    def _tile(self, is_decoder: bool, is_cross: bool, is_backward: bool) -> int:
        if self.kernels:
            return self._compiled_tile(*self._lengths(is_decoder, is_cross), is_backward)
        padded = self._padded(is_decoder, is_cross)
        return padded.backward() if is_backward else padded.forward()

    def _scores(self, is_decoder: bool, is_cross: bool) -> int:
        """In forward: scores, and the output."""
        n, i = self.tokens.target if is_decoder else self.tokens.source, self._widths[1]
        return self._tile(is_decoder, is_cross, is_backward=False) + (n * i if self.kernels else 0)

    def _score_gradients(self, is_decoder: bool, is_cross: bool) -> int:
        """In backward: scores, and the gradients of q, k and v."""
        n, i = self.tokens.target if is_decoder else self.tokens.source, self._widths[1]
        gradients = (n + 2 * (self._encoder_output if is_cross else n)) * i
        return self._tile(is_decoder, is_cross, is_backward=True) + (gradients if self.kernels else 0)


def _sum(tensors: list[tuple[int, int]], tokens: int, below: int | None) -> int:
    """Bytes of tensors of these counts and bytes a token; of those smaller than `below` alone, where that is given."""
    return sum(count * width * tokens for count, width in tensors if below is None or width * tokens < below)
