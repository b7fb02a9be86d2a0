"""What is minimised over the vectors of all texts of a step: contrastive, CoSENT, regression and distillation losses.

The vectors of all micro-batches, and of all processes, are there before any loss is formed, so the loss and its
gradients are those of one batch, whatever it was cut into. Pooling and the final norm are recomputed for each
micro-batch in backward (`Blockwise`), so that only (R, D) numbers are held for R texts.

Each loss is over rows of one kind, by the targets that a row has; a step may have rows of several kinds:

    contrastive:   -log p of the second text of a row, among those of all rows and all further texts, given the first;
                   and of the first among all first ones, given the second: the mean of both. p is a softmax of cosines
                   over the temperature. Texts that are known to belong together are no negatives of each other.
    cosent:        log(1 + sum of exp((cos_i - cos_j) / temperature)) over all pairs of rows of which i is less alike
    regression:    (cosine - number)^2
    distillation:  the mean squared difference of the numbers of vector and target

The first is times the rows, as the second, since a step averages over rows.

Source: van den Oord et al. 2018 (arXiv 1807.03748); Kusupati et al. 2022 (arXiv 2205.13147); sentence-transformers 6.2:
MultipleNegativesSymmetricRankingLoss, CoSENTLoss, CosineSimilarityLoss, MSELoss, MatryoshkaLoss.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.nn.functional as F
from numpy.typing import NDArray
from torch import Tensor, nn

from data.batches.collate import EmbeddingBatch
from devices.sizes import COMPARED_BYTES
from devices.threads import one_thread
from engine.all_reduce import StepFailed
from engine.blockwise import Objective
from model.loss import LossSettings
from model.micro_batch import MicroBatch
from settings.declared import TrainConfig
from settings.errors import UserError
from settings.fields import AUTO

if TYPE_CHECKING:
    from model.embedding_head import EmbeddingHead
    from model.t5 import T5

CONTRASTIVE = "contrastive"
COSENT = "cosent"
REGRESSION = "regression"
DISTILLATION = "distillation"
FAILED = -1  # In place of its number of texts a process that cannot finish the step gives this.


@dataclass(frozen=True)
class Texts:
    """The texts of rows, those of a row side by side.

    Args:
        vectors: (R, V) fp32. numbers: (R,) int64, the same for equal texts. row_texts: (B,) texts of each row.
        targets: (B, W) fp32, NaN where a row has fewer numbers or none.
    """

    vectors: Tensor
    numbers: Tensor
    row_texts: Tensor
    targets: Tensor

    @property
    def firsts(self) -> Tensor:
        """(B,) the place of the first text of each row."""
        return self.row_texts.cumsum(0) - self.row_texts


class LossAndGradient(NamedTuple):
    """A loss, summed over rows, and its gradient with respect to the vectors (R, V)."""

    loss: Tensor
    gradient: Tensor


class EmbeddingObjective(Objective):
    """Learns vectors.

    Args:
        head: of the model.
        kind: which loss rows have that are not told to belong together alone; auto: cosent for one number,
            distillation for vectors.
        temperature: of contrastive and cosent losses. sizes: to which vectors are cut, the loss is summed over them.
        device: where the vectors are.
    Memory: some copies of the vectors of all texts of a step, and a piece of the scores of all of them.
    """

    def __init__(
        self,
        head: EmbeddingHead,
        kind: str = AUTO,
        temperature: float = 0.05,
        sizes: Sequence[int] = (),
        device: torch.device | None = None,
    ) -> None:
        self.head = head
        self.device = device or torch.device("cpu")
        self.pool = head.pool
        self.kind = kind
        self.temperature = temperature
        self.sizes = sizes
        self.vectors: Tensor | None = None  # Those of the batch that was evaluated last, until `clear`.
        self._has_gathered = False

    @classmethod
    def of(cls, model: T5, train: TrainConfig) -> EmbeddingObjective:
        """The objective of these settings."""
        assert model.embedding_head is not None
        sizes = tuple(int(word) for word in (train.matryoshka_sizes or "").split(",") if word)
        return cls(
            model.embedding_head, train.embedding_loss, train.contrastive_temperature, sizes, model.embedding.device
        )

    def tables(self, model: T5) -> list[nn.Parameter]:
        """See `Objective`; none, as the outputs are vectors."""
        return []

    def losses_and_gradients(
        self,
        hidden: deque[Tensor],
        head: Tensor,
        micro_batches: Sequence[MicroBatch],
        scale: float,
        settings: LossSettings,
    ) -> tuple[Tensor, deque[Tensor]]:
        """See `Objective`; `hidden` are the pooled states (R, D), and all of them are compared.

        Raises:
            UserError: the loss that was asked for needs a score, and a row has none. Evaluation takes such rows.
        """
        sizes = [len(pooled) for pooled in hidden]
        leaf = torch.cat([hidden.popleft() for _ in micro_batches]).requires_grad_()
        with torch.enable_grad(), one_thread():
            vectors = self.head(leaf)
        own = _texts(vectors.detach(), micro_batches)
        everyone, first = self._gathered(own)
        if self.kind in (COSENT, REGRESSION) and everyone.targets[:, 0].isnan().any():
            raise UserError(
                "--embedding_loss = {kind}, and a row has no score; name its column with --label_column, or omit this "
                "setting",
                kind=self.kind,
            )
        total, gradient = self._judged(everyone)
        own_gradient = gradient[first : first + len(vectors)]
        with torch.enable_grad(), one_thread():
            (vectors * (own_gradient * scale)).sum().backward()
        assert leaf.grad is not None
        # One process tells the loss of all.
        return total * (first == 0), deque(leaf.grad.split(sizes))

    def token_losses(self, hidden: Tensor, head: Tensor, micro_batch: MicroBatch, settings: LossSettings) -> Tensor:
        """See `Objective`; `hidden` is (R, D). It keeps the vectors and returns 0 (1,): the loss is that of all rows of an
        evaluation together, see `loss_of`.
        """
        with one_thread():
            self.vectors = self.head(hidden)
        return hidden.new_zeros(1)

    def loss_of(self, texts: Texts) -> float:
        """The loss of texts, summed over rows, at all sizes of the vectors."""
        return float(self._judged(texts).loss)

    def clear(self) -> None:
        """See `Objective`; lets go of the vectors."""
        self.vectors = None
        self._has_gathered = False

    def abort(self) -> bool:
        """See `Objective`; where the others wait for the vectors of this process, they learn that there are none."""
        if self._has_gathered or _num_processes() == 1:
            return False
        _all_counts(FAILED, self.device)
        return True

    # --- The vectors of all processes

    def _gathered(self, own: Texts) -> tuple[Texts, int]:
        """The texts of all processes, and the place of the first of this one among them."""
        if _num_processes() == 1:
            return own, 0
        device = own.vectors.device
        counts = _all_counts(len(own.vectors), device)
        self._has_gathered = True
        if FAILED in counts:
            raise StepFailed("another process failed before the vectors were compared")
        rows = _all_counts(len(own.row_texts), device)
        width = max(_all_counts(own.targets.shape[1], device))
        targets = F.pad(own.targets, (0, width - own.targets.shape[1]), value=torch.nan)
        everyone = Texts(
            _all_gather(own.vectors, counts),
            _all_gather(own.numbers, counts),
            _all_gather(own.row_texts, rows),
            _all_gather(targets, rows),
        )
        return everyone, sum(counts[: dist.get_rank()])

    # --- Losses

    def _judged(self, texts: Texts) -> LossAndGradient:
        """The loss of rows of all kinds, summed over rows, at all sizes of the vectors."""
        total = texts.vectors.new_zeros(())
        gradient = torch.zeros_like(texts.vectors)
        width = texts.vectors.shape[1]
        for size in self.sizes or (width,):
            with torch.enable_grad():
                leaf = texts.vectors[:, :size].detach().requires_grad_()
                losses = [self._loss(kind, leaf, texts, rows) for kind, rows in self._rows_by_kind(texts).items()]
                loss = torch.stack(losses).sum()
                loss.backward()
            assert leaf.grad is not None
            total += loss.detach()
            gradient[:, :size] += leaf.grad
        return LossAndGradient(total, gradient)

    def _rows_by_kind(self, texts: Texts) -> dict[str, Tensor]:
        """The rows that each loss is over, (B',) numbers."""
        is_alone = texts.targets[:, 0].isnan()
        has_vector = ~texts.targets[:, 1:2].isnan().all(1) if texts.targets.shape[1] > 1 else torch.zeros_like(is_alone)
        graded = REGRESSION if self.kind == REGRESSION else COSENT
        if self.kind == CONTRASTIVE:  # A number is not looked at.
            is_alone = ~has_vector
        kinds = {CONTRASTIVE: is_alone, DISTILLATION: has_vector, graded: ~is_alone & ~has_vector}
        return {kind: rows.nonzero().flatten() for kind, rows in kinds.items() if rows.any()}

    def _loss(self, kind: str, vectors: Tensor, texts: Texts, rows: Tensor) -> Tensor:
        firsts = texts.firsts[rows]
        if kind == DISTILLATION:
            return self._distillation(vectors[firsts], texts.targets[rows])
        directions = F.normalize(vectors, dim=-1)
        if kind == CONTRASTIVE:
            is_further = torch.ones(len(vectors), dtype=torch.bool, device=vectors.device)
            is_further[texts.firsts] = False
            is_further[texts.firsts + 1] = False
            # The further texts of these rows alone are negatives.
            row_of_text = torch.repeat_interleave(texts.row_texts, output_size=len(vectors))
            further = (is_further & torch.isin(row_of_text, rows)).nonzero().flatten()
            queries = directions[firsts]
            documents = directions[torch.cat([firsts + 1, further])]
            pairs = KnownPairs(texts.numbers[firsts], texts.numbers[torch.cat([firsts + 1, further])])
            forward = InBatch.apply(queries, documents, pairs, self.temperature)
            backward = InBatch.apply(documents[: len(rows)], queries, pairs.reversed(), self.temperature)
            return (forward + backward) / 2  # type: ignore[no-any-return]
        cosines = (directions[firsts] * directions[firsts + 1]).sum(-1)
        numbers = texts.targets[rows, 0]
        if kind == REGRESSION:
            return (cosines - numbers).square().sum()
        # For each row the sum over all that are less alike: of the rows in this order, those before the first that is as
        # alike. So the pairs are never formed.
        ordered, order = numbers.sort()
        exponents = cosines / self.temperature
        sums = exponents[order].logcumsumexp(0)
        less_alike = torch.searchsorted(ordered, numbers)
        has_less_alike = less_alike > 0
        of_pairs = sums[less_alike[has_less_alike] - 1] - exponents[has_less_alike]
        return len(rows) * F.pad(of_pairs, (1, 0)).logsumexp(0)

    def _distillation(self, vectors: Tensor, targets: Tensor) -> Tensor:
        targets = targets[:, : vectors.shape[1]]
        if self.head.normalizes:  # A vector of length 1 reaches only such.
            vectors = F.normalize(vectors, dim=-1)
            targets = F.normalize(targets, dim=-1)
        return (vectors - targets).square().mean(-1).sum()


@dataclass(frozen=True)
class KnownPairs:
    """Which texts belong together: query i and document i.

    Args:
        queries: (B,) numbers of texts. documents: (M,) numbers, M at least B.
    """

    queries: Tensor
    documents: Tensor

    def reversed(self) -> KnownPairs:
        """The documents as queries; further documents are left out."""
        return KnownPairs(self.documents[: len(self.queries)], self.queries)

    def elsewhere(self, first: int, last: int) -> Tensor:
        """(last - first, M), whether a document belongs to a query, as another row or another copy of it says."""
        own = torch.arange(first, last, device=self.queries.device)
        matches = self.documents == self.documents[own][:, None]
        # Other rows with the same query tell what belongs to it, too; there are few.
        _, inverse, counts = self.queries.unique(return_inverse=True, return_counts=True)
        for row in (counts[inverse[own]] > 1).nonzero().flatten().tolist():
            same = (self.queries == self.queries[first + row]).nonzero().flatten()
            matches[row] |= torch.isin(self.documents, self.documents[same])
        matches[torch.arange(len(own), device=own.device), own] = False
        return matches


class InBatch(torch.autograd.Function):
    """-log p of document i among all documents, given query i: summed over queries; scores are formed in pieces."""

    @staticmethod
    def forward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx,
        queries: Tensor,
        documents: Tensor,
        pairs: KnownPairs,
        temperature: float,
    ) -> Tensor:
        total = queries.new_zeros(())
        grad_queries = torch.empty_like(queries)
        grad_documents = torch.zeros_like(documents)
        at_once = max(1, COMPARED_BYTES // (4 * len(documents)))
        for first in range(0, len(queries), at_once):
            rows = slice(first, min(first + at_once, len(queries)))
            scores = (queries[rows] @ documents.T).div_(temperature)
            scores.masked_fill_(pairs.elsewhere(rows.start, rows.stop), -torch.inf)
            own = scores.diagonal(first)
            normaliser = scores.logsumexp(1)
            total += (normaliser - own).sum()
            weights = scores.sub_(normaliser[:, None]).exp_()
            weights.diagonal(first).sub_(1.0)
            torch.mm(weights, documents, out=grad_queries[rows])
            grad_documents.addmm_(weights.T, queries[rows])
        ctx.save_for_backward(grad_queries.div_(temperature), grad_documents.div_(temperature))
        return total

    @staticmethod
    def backward(  # type: ignore[override]
        ctx: torch.autograd.function.FunctionCtx, grad: Tensor
    ) -> tuple[Tensor, Tensor, None, None]:
        grad_queries, grad_documents = ctx.saved_tensors  # type: ignore[attr-defined]
        return grad * grad_queries, grad * grad_documents, None, None


def _texts(vectors: Tensor, micro_batches: Sequence[MicroBatch]) -> Texts:
    """The texts of micro-batches with their vectors, in their order."""
    batches = [micro_batch.batch for micro_batch in micro_batches]
    assert all(isinstance(batch, EmbeddingBatch) for batch in batches)
    arrays = (
        np.concatenate([batch.labels[:, 0] for batch in batches]),
        np.concatenate([batch.row_texts for batch in batches]),
        pad_targets([targets for batch in batches for targets in batch.targets]),
    )
    return Texts(vectors, *(torch.from_numpy(array).to(vectors.device) for array in arrays))


def pad_targets(rows: Sequence[NDArray[np.float32]]) -> NDArray[np.float32]:
    """The targets of rows as one array (B, W), NaN where a row has fewer."""
    padded = np.full((len(rows), max(map(len, rows))), np.nan, np.float32)
    for line, targets in zip(padded, rows, strict=True):
        line[: len(targets)] = targets
    return padded


def _num_processes() -> int:
    return dist.get_world_size() if dist.is_initialized() else 1


def _all_counts(count: int, device: torch.device) -> list[int]:
    """A number of each process."""
    own = torch.tensor([count], device=device)
    counts = [torch.empty_like(own) for _ in range(_num_processes())]
    dist.all_gather(counts, own)
    return [int(each) for each in counts]


def _all_gather(rows: Tensor, counts: Sequence[int]) -> Tensor:
    """The rows of all processes, each of which has as many as `counts` says."""
    most = max(counts)
    padded = rows.new_zeros((most, *rows.shape[1:]))
    padded[: len(rows)] = rows
    parts = [torch.empty_like(padded) for _ in counts]
    dist.all_gather(parts, padded)
    return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])
