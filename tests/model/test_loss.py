from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from devices.sizes import loss_chunk_tokens
from model.loss import IGNORED, LossSettings, loss_and_gradients, token_losses
from tests.measuring import in_child

TOKENS, WIDTH, VOCAB = 70, 8, 23


def inputs(seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    hidden = torch.randn(TOKENS, WIDTH, generator=generator)
    head = torch.randn(VOCAB, WIDTH, generator=generator)
    labels = torch.randint(0, VOCAB, (TOKENS,), generator=generator)
    labels[[3, 40, 41, 69]] = IGNORED
    return hidden, head, labels


def oracle(hidden: Tensor, head: Tensor, labels: Tensor, smoothing: float) -> tuple[Tensor, ...]:
    """torch's cross-entropy in float64, summed; and its gradients."""
    hidden, head = (x.double().requires_grad_() for x in (hidden, head))
    logits = hidden @ head.t()
    loss = F.cross_entropy(logits, labels, reduction="sum", label_smoothing=smoothing)
    return loss.detach(), *torch.autograd.grad(loss, [hidden, head])


@pytest.mark.parametrize(("smoothing", "chunk_tokens"), [(0.0, 1000), (0.2, 33)])
def test_is_cross_entropy(smoothing: float, chunk_tokens: int) -> None:
    hidden, head, labels = inputs()
    settings = LossSettings(chunk_tokens * VOCAB * 4, smoothing)
    assert loss_chunk_tokens(settings.chunk_bytes, VOCAB) == chunk_tokens
    grad_head = torch.ones_like(head)
    total, grad_hidden = loss_and_gradients(hidden, head, labels, 0.25, settings, grad_head)
    loss, expected_hidden, expected_head = oracle(hidden, head, labels, smoothing)
    assert total.item() == pytest.approx(loss.item(), rel=1e-6)
    torch.testing.assert_close(grad_hidden.double(), 0.25 * expected_hidden, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad_head.double(), 1 + 0.25 * expected_head, rtol=1e-4, atol=1e-6)
    assert token_losses(hidden, head, labels, settings).sum().item() == pytest.approx(loss.item(), rel=1e-6)


def test_memory_is_that_of_chunks() -> None:
    wide, narrow = in_child("""
from model.loss import LossSettings, loss_and_gradients

def used(chunk_bytes, hidden, head):
    labels, grad_head = torch.randint(0, len(head), (len(hidden),)), torch.zeros(head.shape) + 1
    settings = LossSettings(chunk_bytes=chunk_bytes)
    loss_and_gradients(hidden[:16], head, labels[:16], 1.0, settings, grad_head)
    return measure(lambda: loss_and_gradients(hidden, head, labels, 1.0, settings, grad_head))

print(used(32 * 2**20, torch.randn(4096, 16), torch.randn(16384, 16)))
print(used(8 * 2**20, torch.randn(256, 512), torch.randn(32768, 512).bfloat16()))
""")
    # the logits of a chunk, and once more while their softmax is formed; all logits: 256 MiB
    assert wide < 2.4 * 32 * 2**20
    # also a piece of the narrow head in fp32: 10 to 24 MiB were seen; all of the head: 64 MiB
    assert narrow < 32 * 2**20
