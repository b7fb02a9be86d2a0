"""Memory of one block at one micro-batch: what it saves for the backward pass, and what it works with beside that.

Counted in tensors as `model/` makes them, so many numbers of width D, I and F for each token, at the highest of two or
three moments: inside an attention and inside feed-forward. All figures are bytes.

Shapes: D d_model, I = H K inner width of attention, F d_ff; own tokens are those of the stack, source tokens those of
the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

import numpy as np

from devices.sizes import (
    LONGEST_SHORT,
    TILE_ELEMENTS,
    long_tile,
)
from memory.estimate.shapes import MicroBatchRows, Tokens
from model.row_groups import padded_widths, share_out, tile_sizes
from model.shapes import DECODER, Stack, inner_width, is_gated
from settings.declared import T5ModelConfig

FP32_BYTES = 4
ALIGNED = 8  # Numbers of a head that fused attention reads at a time.
STATISTIC_BYTES = 4  # Of fused attention, for each head and query.


@dataclass(frozen=True)
class Adapted:
    """What adapters change of what a block saves.

    Args:
        targets: names of the adapted matrices as Hugging Face has them; empty: there are no adapters.
        drops: whether adapters read dropped copies of their inputs.
    """

    targets: tuple[str, ...]
    drops: bool


NO_ADAPTERS = Adapted((), drops=False)


@dataclass(frozen=True)
class BlockEstimate:
    """A block of one stack at one micro-batch.

    Args:
        stack: "encoder" or "decoder".
        e: bytes of a number of the compute dtype.
        stream: bytes of a number of the residual stream.
        tokens: of the micro-batch, filled up or padded.
        rows: lengths of its rows.
        answers: decoder rows of one encoder row.
        dropout: whether training drops.
        kernels: whether compiled kernels of a CPU compute attention and dropout.
        scores: of attention that a GPU forms at a time; 0: a CPU.
        is_fused: whether torch's fused attention computes.
        compiled: whether torch compiles what lies between attentions (`model.block_parts`).
    """

    model: T5ModelConfig
    stack: Stack
    e: int
    stream: int
    tokens: Tokens
    rows: MicroBatchRows
    answers: int
    dropout: bool
    kernels: bool
    scores: int
    is_fused: bool
    adapted: Adapted
    compiled: bool

    def saved(self, tokens: Tokens) -> list[int]:
        """Sizes of the tensors that backward reads, of so many tokens, without the block's input."""
        own, source = self._own_and_source(tokens)
        attentions = 2 if self._is_decoder else 1
        if self.compiled:  # Norms, activations and dropout are computed again.
            sizes = [own * self.model.d_model * self.stream + 2 * own * self._inner] * attentions
            sizes += [2 * (source if across else own) * self._inner for across in (False, True)[:attentions]]
            sizes += [STATISTIC_BYTES * self.model.num_heads * own] * (attentions * self.is_fused)
            return sizes + self._saved_by_feed_forward(own)
        sizes = [own * self._d] * self._needs("q", "k", "v")
        sizes += [own * self.model.d_model * self.stream] * attentions
        keeps_result = self._needs("o") or (self.is_fused and not self.kernels)
        sizes += [own * self._inner] * (2 + attentions + attentions * keeps_result)
        if not self.kernels:
            sizes += [STATISTIC_BYTES * self.model.num_heads * own] * (attentions * self.is_fused)
            sizes += [own * self.model.d_model] * ((attentions + 1) * self.dropout)  # Masks of dropout.
        if self._is_decoder:
            sizes += [own * self._d] * self._needs("q")
            sizes += [source * self._inner] * 2
        for name in self.adapted.targets if self.adapted.drops else ():
            width = {"o": self._inner, "wo": self._ff}.get(name, self._d)
            sizes.append(own * width)
            if not self.kernels:
                sizes.append(own * width // self.e)
            across = {"q": own, "k": source, "v": source, "o": own}
            if self._is_decoder and name in across:
                sizes.append(across[name] * width)
        return sizes + self._saved_by_feed_forward(own)

    def _saved_by_feed_forward(self, own: int) -> list[int]:
        if self.compiled:
            return [own * self._ff] * (2 if is_gated(self.model) else 1)
        reads_output = self._needs("wo")
        inner = 3 + reads_output if is_gated(self.model) else 1 + (self.kernels and self.dropout) * reads_output
        sizes = [own * self._d] * self._needs("wi", "wi_0", "wi_1") + [own * self._ff] * inner
        if self.dropout and not self.kernels and not self._is_in_place:
            sizes.append(own * self.model.d_ff)
        return sizes

    def _needs(self, *names: str) -> int:
        """1 where the gradient of one of these matrices or its adapter needs the input, which frozen ones do not; else
        0.
        """
        targets = self.adapted.targets
        return int(not targets or any(name in targets for name in names))

    def forward(self) -> int:
        """The most that it works with outside of any graph, as in an evaluation, which does not drop."""
        own, source = self._own_and_source(self.tokens)
        stream = own * self.model.d_model * self.stream
        normed = own * self._d
        attention = normed + 3 * own * self._inner + self._attention(is_across=False, is_backward=False)
        inner = 1 if self._is_in_place else 2 + is_gated(self.model)
        feed_forward = 2 * stream + normed + inner * own * self._ff
        if not self._is_decoder:
            return max(attention, feed_forward)
        across = 2 * normed + stream + own * self._inner + 2 * source * self._inner
        return max(attention, feed_forward + normed, across + self._attention(is_across=True, is_backward=False))

    def backward(self, weight_gradients: int) -> int:
        """The most that it works with in backward, beside what it saved, which becomes free on the way.

        Args:
            weight_gradients: bytes of the gradients of the block's weights, formed here.
        """
        own, source = self._own_and_source(self.tokens)
        stream = own * self.model.d_model * self.stream
        ff = own * self._ff
        feed_forward = ff if self._is_in_place else 2 * ff
        if self.compiled:  # What `wo` reads, and the gradients of all that is F wide, at once.
            feed_forward = (4 if is_gated(self.model) else 3) * ff + 3 * stream
        feed_forward += self._needs("wo") * self.model.d_model * self._ff
        if self.dropout or stream != own * self._d:
            feed_forward += stream
        freed = sum(self._saved_by_feed_forward(own)) - weight_gradients
        attention = 2 * stream + own * self._inner
        if not self.kernels:
            # What the norm of feed-forward read is free, too; plain products do not read what attention gave.
            freed += stream + own * self._inner * (not self.is_fused)
        if not self._is_decoder:
            return max(feed_forward, attention + self._attention(is_across=False, is_backward=True) - freed)
        of_keys = 2 * source * (self._d + self._inner)
        across = attention + max(self._attention(is_across=True, is_backward=True), of_keys) - freed
        freed += 2 * (own + source) * self._inner
        return max(feed_forward, across, attention + self._attention(is_across=False, is_backward=True) - freed)

    def tile(self) -> int:
        """The most that one attention takes in backward; with compiled kernels without the gradients that it
        returns.
        """
        return max(self._tile(is_across, is_backward=True) for is_across in (False, True))

    def bias_bytes(self) -> int:
        """The position bias of a stack as a matrix, where it is one (`model.attention.PositionBias`)."""
        if self.kernels:
            return 0
        longest = max(
            group.target if self._is_decoder else group.source
            for group in dense_groups(self.rows, self.answers, not self.is_fused)
        )
        numbers = self.model.num_heads * longest**2
        return 4 * numbers if numbers <= (self.scores or TILE_ELEMENTS) else 0

    # --- Widths and tokens

    @property
    def _is_decoder(self) -> bool:
        return self.stack == DECODER

    @property
    def _is_in_place(self) -> bool:
        return self.model.feed_forward_proj == "relu" and not self.compiled

    @cached_property
    def _d(self) -> int:
        return self.model.d_model * self.e

    @cached_property
    def _inner(self) -> int:
        return inner_width(self.model) * self.e

    @cached_property
    def _ff(self) -> int:
        return self.model.d_ff * self.e

    def _own_and_source(self, tokens: Tokens) -> tuple[int, int]:
        """Tokens of this stack, and of the encoder's output as this stack sees it."""
        return (tokens.target if self._is_decoder else tokens.source), tokens.source * self.answers

    # --- Attention

    def _attention(self, is_across: bool, is_backward: bool) -> int:
        """Scores with what they are made of; in backward with the gradients of queries, keys and values."""
        result = self._tile(is_across, is_backward)
        if not self.kernels:
            return result
        own, source = self._own_and_source(self.tokens)
        if is_backward:
            own += 2 * (source if is_across else own)
        return result + own * self._inner

    def _tile(self, is_across: bool, is_backward: bool) -> int:
        if not self.kernels:
            return self._dense_tile(is_across, is_backward)
        sources, targets = zip(*self.rows, strict=True)
        queries = targets if self._is_decoder else sources
        keys = sources if is_across else queries
        return self._compiled_tile(max(queries), max(keys), is_backward)

    def _compiled_tile(self, queries: int, keys: int, is_backward: bool) -> int:
        """A tile of a long row, and its keys and values, in compiled kernels; short rows need next to nothing."""
        if max(queries, keys) <= LONGEST_SHORT:
            return 0
        _, keys, block, heads = long_tile(self.model.num_heads, queries, keys)
        width = self._inner * heads // self.model.num_heads
        scores = heads * block * keys * self.e
        if is_backward:
            return (4 * keys + 3 * block) * width + (2 + self.dropout) * scores
        return 2 * (keys + block) * width + scores

    def _dense_tile(self, is_across: bool, is_backward: bool) -> int:
        """Scores of the largest tile, and what `model.dense_attention` gives: its result, or gradients of q, k and
        v.
        """
        own, source = self._own_and_source(self.tokens)
        heads = self.model.num_heads
        scores = self.scores or TILE_ELEMENTS
        is_fused = self.is_fused and self.model.d_kv % ALIGNED == 0
        bias_bytes = 0 if is_across else self.bias_bytes()
        of_bias = 0  # Beside each score of one row, for the bias as a matrix of the queries at hand.
        if not is_across and not bias_bytes:  # Its gradient in fp32 is laid out twice.
            of_bias = self.e + 8 * is_backward
        elif not is_across and self.e < FP32_BYTES:
            of_bias = self.e
        number_bytes = self._inner * (3 if is_backward else 1)
        highest = 0
        largest_tile = 0
        count = 0
        for group in dense_groups(self.rows, self.answers, not self.is_fused):
            queries = group.target * self.answers if self._is_decoder else group.source
            keys = group.source if is_across or not self._is_decoder else group.target
            num_rows = group.rows
            if self._is_decoder and not is_across:
                queries = group.target
                num_rows *= self.answers
            rows, block = tile_sizes(num_rows, queries, keys, heads, scores)
            count += -(-num_rows // rows)
            of_tile = rows * max(queries, keys) * number_bytes
            if is_fused:
                of_score = self.e * (is_backward and not is_across)
                working = of_tile
            else:  # Weights are formed before anything else is.
                of_score = self.e * (3 if is_backward else 2)
                working = of_tile // 3
            if group.is_padded and not self._is_decoder:
                of_score += self.e
            highest = max(highest, working + heads * block * keys * (rows * of_score + of_bias))
            largest_tile = max(largest_tile, of_tile)
        if is_backward:
            own += 2 * (source if is_across else own)
        result = own * self._inner
        if count > 1:  # There is room for the results of all tiles before the first.
            highest = result + max(highest, largest_tile)
        elif is_backward and self.scores:  # The scores are gone when gradients are copied to lie beside each other.
            highest = max(highest, 2 * result)
        # The bias, its gradient, and what is added to that.
        return bias_bytes * (1 + is_backward + is_fused) + max(highest, result)


@dataclass(frozen=True)
class DenseGroup:
    """Rows that are padded to one length, and their answers to another (`model.row_groups`).

    Args:
        rows: how many there are.
        source, target: tokens of each row, and of each answer.
        is_padded: whether any source is shorter.
    """

    rows: int
    source: int
    target: int
    is_padded: bool


@lru_cache(maxsize=1024)
def dense_groups(rows: MicroBatchRows, answers: int, few_shapes: bool) -> tuple[DenseGroup, ...]:
    """The groups of a micro-batch where compiled kernels do not attend; one answer of a row may have all its tokens but
    one for each of the others, and these are padded to its length.
    """
    sources, targets = zip(*rows, strict=True)
    targets = tuple(max(1, target - answers + 1) for target in targets)
    groups = list[DenseGroup]()
    for members in share_out([sources, *[targets] * answers], few_shapes):
        longest = [max(side[row] for row in members) for side in (sources, targets)]
        source, target = padded_widths(np.array(longest)).tolist()
        groups.append(DenseGroup(len(members), source, target, any(sources[row] != source for row in members)))
    return tuple(groups)


def dense_tokens(rows: MicroBatchRows, answers: int, few_shapes: bool) -> Tokens:
    """Tokens of a micro-batch with their padding."""
    groups = dense_groups(rows, answers, few_shapes)
    return Tokens(
        sum(group.rows * group.source for group in groups), sum(group.rows * group.target * answers for group in groups)
    )
