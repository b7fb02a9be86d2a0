"""Memory of one block at one micro-batch: what it saves for the backward pass, and what it works with beside that.

Counted in tensors as `model/` makes them, so many numbers of width D, I and F for each token, at the highest of two or
three moments: inside an attention and inside feed-forward. All figures are bytes.

Shapes: D d_model, I = H K inner width of attention, F d_ff; own tokens are those of the stack, source tokens those of
the encoder.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property, lru_cache

from limits import (
    DEVICE_DROPOUT_ELEMENTS,
    DROPOUT_ELEMENTS,
    LONGEST_SHORT,
    TILE_ELEMENTS,
    RowGroup,
    fuses_backward,
    long_tile,
    row_groups,
)
from memory.estimate.shapes import MicroBatchRows, Tokens
from model.shapes import DECODER, Stack, inner_width, is_gated
from settings.declared import T5ModelConfig

ALIGNED = 8  # Numbers of a head that fused attention reads at a time.
HASH_BYTES = 4  # Random words of dropout, for each element, while its mask is drawn.


@dataclass(frozen=True)
class Adapted:
    """What adapters change of what a block saves.

    Args:
        targets: names of the adapted matrices as Hugging Face has them; empty: there are no adapters.
        drops: whether adapters read dropped copies of their inputs.
    """

    targets: tuple[str, ...] = ()
    drops: bool = False


NO_ADAPTERS = Adapted()


@dataclass(frozen=True)
class Block:
    """A block of one stack at one micro-batch.

    Args:
        stack: "encoder" or "decoder".
        e: bytes of a number of the compute dtype.
        stream: bytes of a number of the residual stream.
        tokens: of the micro-batch, filled up.
        rows: lengths of its rows.
        answers: decoder rows of one encoder row.
        dropout: whether training drops.
        draws_masks: whether masks are drawn before they are applied, which compiled dropout on a GPU does not.
        kernels: whether compiled kernels of a CPU compute attention and dropout.
        scores: of attention that a GPU forms at a time; 0: a CPU.
        is_fused: whether torch's fused attention computes where nothing is dropped.
        processors: of a GPU; 0: not known.
    """

    model: T5ModelConfig
    stack: Stack
    e: int
    stream: int
    tokens: Tokens
    rows: MicroBatchRows
    answers: int = 1
    dropout: bool = False
    draws_masks: bool = False
    kernels: bool = False
    scores: int = 0
    is_fused: bool = False
    processors: int = 0
    adapted: Adapted = NO_ADAPTERS

    def saved(self, tokens: Tokens) -> list[int]:
        """Sizes of the tensors that backward reads, of so many tokens, without the block's input."""
        own, source = self._own_and_source(tokens)
        attentions = 2 if self._is_decoder else 1
        sizes = [own * self._d] * self._needs("q", "k", "v")
        sizes += [own * self.model.d_model * self.stream] * attentions
        sizes += [own * self._inner] * (2 + attentions + attentions * self._needs("o"))
        if self._is_decoder:
            sizes += [own * self._d] * self._needs("q")
            sizes += [source * self._inner] * 2
        for name in self.adapted.targets if self.adapted.drops else ():
            width = {"o": self._inner, "wo": self._ff}.get(name, self._d)
            sizes.append(own * width)
            across = {"q": own, "k": source, "v": source, "o": own}
            if self._is_decoder and name in across:
                sizes.append(across[name] * width)
        return sizes + self._saved_by_feed_forward(own)

    def _saved_by_feed_forward(self, own: int) -> list[int]:
        reads_output = self._needs("wo")
        inner = 3 + reads_output if is_gated(self.model) else 1 + self.draws_masks * reads_output
        return [own * self._d] * self._needs("wi", "wi_0", "wi_1") + [own * self._ff] * inner

    def _needs(self, *names: str) -> int:
        """1 where the gradient of one of these matrices or its adapter needs the input, which frozen ones do not; else
        0.
        """
        targets = self.adapted.targets
        return int(not targets or any(name in targets for name in names))

    def forward(self) -> int:
        """The most that it works with outside of any graph."""
        own, source = self._own_and_source(self.tokens)
        stream = own * self.model.d_model * self.stream
        normed = own * self._d
        attention = normed + 3 * own * self._inner + self._attention(is_across=False, is_backward=False)
        inner = 3 if is_gated(self.model) else 1 + self.dropout if self._is_in_place else 2
        feed_forward = 2 * stream + normed + inner * own * self._ff + self._random_words(own)
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
        feed_forward = ff + max(0 if self._is_in_place else ff, self._random_words(own))
        feed_forward += self._needs("wo") * self.model.d_model * self._ff
        if self.dropout or stream != own * self._d:
            feed_forward += stream
        freed = sum(self._saved_by_feed_forward(own)) - weight_gradients
        attention = 2 * stream + own * self._inner
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
        attentions = (False, True) if self._is_decoder else (False,)
        return max(self._tile(is_across, is_backward=True) for is_across in attentions)

    # --- Widths and tokens

    @property
    def _is_decoder(self) -> bool:
        return self.stack == DECODER

    @property
    def _is_in_place(self) -> bool:
        return self.model.feed_forward_proj == "relu"

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

    def _random_words(self, own: int) -> int:
        """Random words while the masks of a chunk of feed-forward's activations are drawn."""
        if self.kernels or not self.draws_masks:
            return 0
        most = DEVICE_DROPOUT_ELEMENTS if self.scores else DROPOUT_ELEMENTS
        return HASH_BYTES * min(own * self.model.d_ff, most)

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
        sources, targets = zip(*self.rows, strict=True)
        queries = targets if self._is_decoder else sources
        keys = sources if is_across else queries
        if self.kernels:
            return self._compiled_tile(max(queries), max(keys), is_backward)
        return self._padded_rows(queries, keys, is_backward, has_bias=not is_across)

    def _compiled_tile(self, queries: int, keys: int, is_backward: bool) -> int:
        """A tile of a long row, and its keys and values, in compiled kernels; short rows need next to nothing."""
        if max(queries, keys) <= LONGEST_SHORT:
            return 0
        _, keys, block, heads = long_tile(self.model.num_heads, queries, keys)
        width = self._inner * heads // self.model.num_heads
        scores = heads * block * keys * self.e
        if is_backward:
            return (4 * keys + 3 * block) * width + (2 + self.dropout) * scores
        return (2 * keys + 2 * block) * width + (1 + self.dropout) * scores

    def _padded_rows(self, queries: tuple[int, ...], keys: tuple[int, ...], is_backward: bool, has_bias: bool) -> int:
        """Padded copies of rows and the scores of a group of them (`model.padded_attention`), with the result."""
        heads = self.model.num_heads
        groups = _row_groups(queries, keys, heads, self.scores or TILE_ELEMENTS)
        largest = max(groups, key=lambda group: group.places * group.block * group.num_keys)
        num_queries = largest.places * largest.num_queries
        num_keys = largest.places * largest.num_keys
        scores = heads * largest.places * largest.block * largest.num_keys
        is_whole = {(largest.num_queries, largest.num_keys)} == set(zip(queries, keys, strict=True))
        fuses = self.is_fused and not self.dropout and self.model.d_kv % ALIGNED == 0
        if fuses and is_backward:
            fuses = fuses_backward(largest.places, heads, largest.num_queries, largest.num_keys, self.processors)
        bias_bytes = self.e * has_bias  # Fused attention reads a bias as it is, and with padding one for each row.
        if fuses and is_whole:
            bias_bytes = self.e * has_bias // largest.places
        padded_queries = sum(group.places * group.num_queries for group in groups)
        if not is_backward:
            score_bytes = bias_bytes if fuses else 2 * (self.e + self.draws_masks)
            copies = 0 if fuses and is_whole else num_queries + 2 * num_keys
            return (padded_queries + copies) * self._inner + scores * score_bytes
        padded_keys = sum(group.places * group.num_keys for group in groups)
        if fuses:
            score_bytes = bias_bytes + self.e * has_bias
            copies = num_queries if is_whole else 3 * num_queries + 2 * num_keys
        else:
            # The gradient of a bias is summed over distances in fp32, of one row at a time in three forms.
            score_bytes = max(3 * self.e + self.draws_masks, 12 // largest.places if has_bias else 0)
            copies = 2 * num_queries + 3 * num_keys
        return (padded_queries + 2 * padded_keys + copies) * self._inner + scores * score_bytes


@lru_cache(maxsize=256)
def _row_groups(queries: tuple[int, ...], keys: tuple[int, ...], heads: int, scores: int) -> tuple[RowGroup, ...]:
    return tuple(row_groups(queries, keys, heads, scores))
