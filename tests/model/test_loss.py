from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from devices.sizes import loss_chunk_tokens
from model.loss import IGNORED, LossSettings, MeanLoss, loss_and_gradients, token_losses
from model.quantization import dequantize, quantize
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


def test_on_a_gpu_a_chunk_is_whole_tiles() -> None:
    assert [loss_chunk_tokens(tokens * VOCAB * 4, VOCAB, 128) for tokens in (127, 261, 384)] == [127, 256, 384]


@pytest.mark.parametrize("smoothing", [0.0, 0.2])
@pytest.mark.parametrize("chunk_tokens", [33, 1000])
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


@pytest.mark.parametrize(("smoothing", "chunk_tokens"), [(0.2, 16)])
def test_each_token_by_its_weight(smoothing: float, chunk_tokens: int) -> None:
    hidden, head, labels = inputs()
    weights = torch.randn(TOKENS, generator=torch.Generator().manual_seed(1))
    weights[5] = 0.0
    settings, grad_head = LossSettings(chunk_tokens * VOCAB * 4, smoothing), torch.zeros_like(head)
    total, grad_hidden = loss_and_gradients(hidden, head, labels, 0.25, settings, grad_head, weights)
    wide, wide_head = (x.double().requires_grad_() for x in (hidden, head))
    logits = wide @ wide_head.t()
    losses = F.cross_entropy(logits, labels, reduction="none", label_smoothing=smoothing)
    loss = (losses * weights).sum()
    expected_hidden, expected_head = torch.autograd.grad(loss, [wide, wide_head])
    assert total.item() == pytest.approx(loss.item(), rel=1e-4, abs=1e-4)
    torch.testing.assert_close(grad_hidden.double(), 0.25 * expected_hidden, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(grad_head.double(), 0.25 * expected_head, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(
        token_losses(hidden, head, labels, settings).double(), losses.detach(), rtol=1e-5, atol=1e-5
    )


def test_no_valid_label_is_no_loss() -> None:
    hidden, head, _ = inputs()
    hidden.requires_grad_()
    loss = MeanLoss.apply(hidden, head, torch.full((TOKENS,), IGNORED), LossSettings())
    loss.backward()
    assert loss.item() == 0.0 and hidden.grad is not None and not hidden.grad.any()


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


@pytest.mark.parametrize("narrow", [torch.bfloat16, torch.int8])
def test_a_narrow_head_is_widened_in_pieces(narrow: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("model.quantization.WIDENED_ELEMENTS", 44)  # 4 rows of 11: the last piece has one
    generator = torch.Generator().manual_seed(0)
    hidden, wide = (torch.randn(n, 11, generator=generator) for n in (9, 29))
    labels = torch.randint(0, 29, (9,), generator=generator)
    head = quantize(iter([wide]), 29, 11) if narrow == torch.int8 else wide.to(narrow)
    same, settings = dequantize(head, torch.float32), LossSettings(4 * 29 * 16)
    grads = None if narrow == torch.int8 else (torch.zeros(29, 11), torch.zeros(29, 11))  # int8 does not learn
    one = loss_and_gradients(hidden, head, labels, 0.5, settings, grads and grads[0])
    other = loss_and_gradients(hidden, same, labels, 0.5, settings, grads and grads[1])
    torch.testing.assert_close(one, other)
    torch.testing.assert_close(
        token_losses(hidden, head, labels, settings), token_losses(hidden, same, labels, settings)
    )
    if grads:
        torch.testing.assert_close(grads[0], grads[1])
