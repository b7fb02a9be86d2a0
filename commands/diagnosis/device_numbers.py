"""Whether a device computes what the CPU computes: the parts of a training step, each beside plain products in fp32.

Imports torch; runs in a child process of `doctor --check`, and under `pytest -m cuda` and `-m mps`.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn

import devices
from commands.diagnosis.device_check import Finding
from data.batches.collate import Batch, Row, collate
from devices.base import Device, name_of
from devices.kernels.calls import use
from engine.blockwise import Blockwise
from engine.loss_scaling import LossScaling
from engine.optimizer_in_backward import OptimizerInBackward
from engine.optimizers import OPTIMIZERS, Step
from engine.optimizers.rounding import rounding_key, write_rounded
from engine.step import to_micro_batch
from engine.weights import weight_store_for
from model import hf_format
from model.attention import attend
from model.decoding.generation import generate
from model.dropout import Dropout
from model.int4 import INT4
from model.layers import RMSNorm
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from model.loss import LossSettings
from model.rows import Rows
from model.t5 import T5
from settings.declared import Config, T5ModelConfig

SHAPE = T5ModelConfig(vocab_size=512, d_model=256, d_kv=32, d_ff=1024, num_layers=2, num_decoder_layers=2, num_heads=8)
GATED = replace(
    SHAPE,
    bias_in_every_layer=True,
    feed_forward_proj="gated-gelu",
    tie_word_embeddings=False,
    scale_decoder_outputs=False,
    dropout_rate=0.0,
)
SMOOTH = replace(SHAPE, feed_forward_proj="gated-gelu")
EQUAL = ((96, 24),) * 8
RAGGED = ((128, 3), (5, 30), (77, 11), (31, 31), (96, 1), (128, 30))
EXACT, UPDATED, NARROW = 1e-4, 1e-3, {torch.bfloat16: 2e-2, torch.float16: 1e-2}
KINKED = 2e-2  # where the order of a sum may turn an input of ReLU from just below zero to just above: seen up to 5e-3
DEEP = 1.5  # times that for gradients of a whole model, which a CPU reaches in bf16 too
CPU = torch.device("cpu")


def numbers(config: Config) -> list[Finding]:
    """All comparisons on the device of the settings."""
    device = devices.pick(config.run.device)
    return [measured(what, avoid, bar, run, device) for what, avoid, bar, run in comparisons(device)]


def measured(what: str, avoid: str, bar: float, run: Callable[[Device], float], device: Device) -> Finding:
    """The finding of one comparison; an error that it raises is a finding too."""
    try:
        error = run(device)
    except Exception as failure:
        words = f"{type(failure).__name__}: {(str(failure).splitlines() or [''])[0]}"
        return Finding("numbers", what, words, f"{bar:g}", False, avoid)
    finally:
        use(True)
        device.cleanup()
    told = "the same bits" if error == 0 else f"{error:.1e}"
    return Finding("numbers", what, told, "the same bits" if bar == 0 else f"{bar:g}", error <= bar, avoid)


Comparison = tuple[str, str, float, Callable[[Device], float]]


def comparisons(device: Device) -> Iterator[Comparison]:
    """What is compared, the setting that avoids it, the largest error that is right, and how it is found."""
    narrow = [dtype for dtype in device.fast_dtypes() if dtype != torch.float32]
    for rows, kind in ((EQUAL, "equal"), (RAGGED, "ragged")):
        for saved, way in ((99, "saved"), (0, "recomputed")):
            for dropout in (0.0, 0.3):
                dropped = ", dropout" if dropout else ""
                what = f"gradients, {kind} rows, blocks {way}{dropped}, fp32"
                avoid = "--dropout_rate=0" if dropout else "--device=cpu"
                yield what, avoid, EXACT, partial(gradient_error, SMOOTH, rows, saved, dropout, torch.float32)
    yield (
        "gradients, ReLU, fp32",
        "--device=cpu",
        KINKED,
        partial(gradient_error, SHAPE, RAGGED, 99, 0.0, torch.float32),
    )
    yield "gradients, gated-gelu, untied head, bias in every layer, fp32", "--device=cpu", EXACT, partial(gradient_error, GATED, RAGGED, 99, 0.0, torch.float32)  # fmt: skip
    for dtype in narrow:
        run = partial(gradient_error, SHAPE, RAGGED, 0, 0.0, dtype)
        yield f"gradients, ragged rows, {name_of(dtype)}", "--mixed_precision=no", DEEP * NARROW[dtype], run
    for dtype in (torch.float32, *narrow):
        bar, avoid = (EXACT, "--device=cpu") if dtype == torch.float32 else (NARROW[dtype], "--mixed_precision=no")
        for queries, keys, has_bias in ((512, 512, True), (114, 512, True), (112, 512, False), (24, 96, False)):
            of = "and its bias gradient" if has_bias else "without bias"
            what = f"attention {queries} x {keys} {of}, {name_of(dtype)}"
            yield what, avoid, bar, partial(attention_error, queries, keys, has_bias, dtype)
    yield "norm and its gradients, fp32", "--device=cpu", EXACT, norm_error
    yield "dropout masks", "--dropout_rate=0", 0.0, dropout_error
    for name in sorted(OPTIMIZERS):
        other = "adamw" if name == "adafactor" else "adafactor"
        yield f"four updates, {name}", f"--optimizer={other}", UPDATED, partial(update_error, name)
    yield "stochastic rounding", "--device=cpu", 0.0, rounding_error
    yield "gradients, LoRA, fp32", "--lora_rank=0", EXACT, partial(adapter_error, None)
    yield "gradients, LoRA on an int4 base, fp32", "--lora_base=bf16", EXACT, partial(adapter_error, INT4)
    yield "three steps again", "", 0.0, repeat_error
    yield "generated tokens, fp32", "--device=cpu", 0.0, token_error


def relative_error(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """The largest over all tensors of the norm of the difference over the norm of the expected."""
    pairs = zip(found, expected, strict=True)
    return max(float((a.cpu().double() - b.double()).norm() / b.double().norm().clamp(min=1e-30)) for a, b in pairs)


def batch_of(shape: T5ModelConfig, lengths: Sequence[tuple[int, int]]) -> Batch:
    """Rows of these lengths with random ids and keys."""
    return batches_of(shape, lengths, 1)[0]


def batches_of(shape: T5ModelConfig, lengths: Sequence[tuple[int, int]], count: int) -> list[Batch]:
    """The same rows in so many micro-batches."""
    draw = np.random.default_rng(0)
    rows = [
        Row(draw.integers(3, shape.vocab_size, source), draw.integers(3, shape.vocab_size, target), key)
        for key, (source, target) in enumerate(lengths, 1)
    ]
    return [collate(rows[first::count], shape.pad_token_id) for first in range(count)]


def gradients(
    model: T5, device: Device, batches: Sequence[Batch], saved: int, dropout: float, compute: torch.dtype, storage: torch.dtype = torch.float32
) -> list[Tensor]:  # fmt: skip
    """Loss and gradients of the weights that learn, fp32, on the host."""
    where = model.embedding.device
    device.set_exact_fp32(compute == torch.float32)
    scaling = LossScaling() if compute == torch.float16 else None
    store = weight_store_for(storage, compute, (model.embedding, model.output_weight))
    blockwise = Blockwise(model, saved, store, LossSettings(), dropout, scaling=scaling)
    micro_batches = [to_micro_batch(batch, model.config, where) for batch in batches]
    loss = blockwise.gradients(micro_batches, sum(batch.num_labels for batch in batches))
    scale = 1.0 if scaling is None else scaling.scale
    found = [weight.grad.float().cpu() / scale for weight in model.parameters() if weight.grad is not None]
    model.zero_grad()
    return [loss.cpu(), *found]


def gradient_error(
    shape: T5ModelConfig, lengths: Sequence[tuple[int, int]], saved: int, dropout: float, dtype: torch.dtype, device: Device
) -> float:  # fmt: skip
    """Of loss and gradients; in a narrow dtype of all gradients together."""

    storage = torch.float32 if dtype == torch.float32 else torch.bfloat16  # of weights, as in a run

    def make() -> T5:
        return T5(shape).initialise(0).to(storage)

    use(False)
    expected = gradients(make().float(), device, [batch_of(shape, lengths)], 99, dropout, torch.float32)
    use(True)
    model, batches = make().to(device.torch_device), batches_of(shape, lengths, 1 if saved else 2)
    found = gradients(model, device, batches, saved, dropout, dtype, storage)
    if dtype == torch.float32:
        return relative_error(found, expected)
    together = [torch.cat([gradient.flatten() for gradient in side[1:]]) for side in (found, expected)]
    return max(relative_error(found[:1], expected[:1]), relative_error(together[:1], together[1:]))


def attention_error(queries: int, keys: int, has_bias: bool, dtype: torch.dtype, device: Device) -> float:
    """Of the output and of the gradients of q, k, v and bias."""
    generator, rows, heads, width = torch.Generator().manual_seed(0), 4, 8, 64
    shapes = ((rows * queries, heads, width), *((rows * keys, heads, width),) * 2, (heads, 2 * max(queries, keys) - 1))
    drawn = [torch.randn(shape, generator=generator) for shape in shapes]
    drawn[0] /= width**0.5
    grad = torch.randn(shapes[0], generator=generator)

    def run(where: torch.device, kind: torch.dtype) -> list[Tensor]:
        q, k, v = (x.detach().to(where, kind).requires_grad_() for x in drawn[:3])
        bias = drawn[3].detach().to(where).requires_grad_() if has_bias else None
        sides = Rows((queries,) * rows), Rows((keys,) * rows)
        out = attend(q, k, v, bias, sides, False, Dropout(0.0, sides[0]))
        out.backward(grad.to(where, kind))
        return [out.detach(), *(x.grad for x in (q, k, v, bias) if x is not None and x.grad is not None)]

    use(False)
    expected = run(CPU, torch.float32)
    use(True)
    device.set_exact_fp32(True)
    return relative_error(run(device.torch_device, dtype), expected)


def norm_error(device: Device) -> float:
    """Of the output and of both gradients."""
    generator = torch.Generator().manual_seed(0)
    x, grad, weight = (torch.randn(shape, generator=generator) for shape in ((300, 256), (300, 256), (256,)))

    def run(where: torch.device) -> list[Tensor]:
        norm = RMSNorm(256, 1e-6)
        norm.weight.data.copy_(weight)
        norm.to(where)
        given = x.detach().to(where).requires_grad_()
        out = norm(given)
        out.backward(grad.to(where))
        assert given.grad is not None and norm.weight.grad is not None
        return [out.detach(), given.grad, norm.weight.grad]

    use(False)
    expected = run(CPU)
    use(True)
    return relative_error(run(device.torch_device), expected)


def dropout_error(device: Device) -> float:
    """Share of elements that are dropped on one side alone."""
    keys = torch.randint(2**62, (5,), generator=torch.Generator().manual_seed(0))

    def run(where: torch.device, dtype: torch.dtype) -> Tensor:
        rows = Rows((7, 130, 1, 64, 33), keys.to(where))
        return Dropout(0.3, rows, 5).dropped(torch.ones(235, 250, dtype=dtype, device=where)).cpu()

    use(False)
    expected = {dtype: run(CPU, dtype) for dtype in (torch.float32, torch.bfloat16)}
    use(True)
    return max(float((run(device.torch_device, dtype) != one).float().mean()) for dtype, one in expected.items())


def update_error(name: str, device: Device) -> float:
    """Of a matrix after four updates."""

    def run(where: torch.device) -> Tensor:
        generator = torch.Generator().manual_seed(0)
        weight = nn.Parameter(torch.randn(64, 48, generator=generator).to(where))
        optimizer = OPTIMIZERS[name]({"w": weight})
        for number in range(1, 5):
            weight.grad = torch.randn(64, 48, generator=generator).to(where)
            optimizer.update([weight], Step(number, 0.01, 0.1))
        return weight.detach().cpu()

    use(False)
    expected = run(CPU)
    use(True)
    device.set_exact_fp32(True)
    return relative_error([run(device.torch_device)], [expected])


def rounding_error(device: Device) -> float:
    """Share of weights that are rounded another way."""
    values = torch.randn(3, 64, 50, generator=torch.Generator().manual_seed(0))
    keys = [rounding_key(1, 7, number) for number in range(3)]

    def run(where: torch.device) -> Tensor:
        weight = torch.zeros(3, 64, 50, dtype=torch.bfloat16, device=where)
        write_rounded(weight, values.clone().to(where), keys, 6)
        return weight.cpu()

    use(False)
    expected = run(CPU)
    return float((run(device.torch_device) != expected).float().mean())


def adapter_error(base: torch.dtype | None, device: Device) -> float:
    """Of loss and adapters' gradients over a frozen base."""
    batches = batches_of(SHAPE, RAGGED, 2)
    with tempfile.TemporaryDirectory() as folder:
        hf_format.save(T5(SHAPE).initialise(0), folder)

        def make(where: torch.device = CPU) -> T5:
            model = hf_format.load(folder, dtype=base or torch.float32, device=where)
            for weight in model.parameters():
                weight.requires_grad_(False)
            add_adapters(model, LoraSettings(8, 16))
            generator = torch.Generator().manual_seed(3)
            for name, weight in model.named_parameters():
                if weight.requires_grad and name.endswith(".b"):  # zeros, which would leave A without a gradient
                    weight.data.copy_(torch.randn(weight.shape, generator=generator) * 0.02)
            return model

        storage = base or torch.float32
        use(False)
        expected = gradients(make(), device, batches, 99, 0.0, torch.float32, storage)
        use(True)
        found = gradients(make(device.torch_device), device, batches, 0, 0.0, torch.float32, storage)
        return relative_error(found, expected)


def repeat_error(device: Device) -> float:
    """Of the weights after three steps with dropout, twice."""

    def run() -> list[Tensor]:
        model = T5(SHAPE, dtype=torch.bfloat16).initialise(0).to(device.torch_device)
        batch = batch_of(SHAPE, RAGGED)
        update = OptimizerInBackward(OPTIMIZERS["adafactor"](dict(model.named_parameters())))
        blockwise = Blockwise(model, 0, weight_store_for(torch.bfloat16, device.fast_dtypes()[0]), LossSettings(), 0.2)
        for number in range(1, 4):
            update.begin(Step(number, 0.01))
            blockwise.gradients([to_micro_batch(batch, SHAPE, device.torch_device)], batch.num_labels, update)
            update.finish()
        return [weight.detach().cpu() for weight in model.parameters()]

    return relative_error(run(), run())


def token_error(device: Device) -> float:
    """Share of answers that differ."""
    model = T5(SHAPE).initialise(0)
    batch = batch_of(SHAPE, RAGGED)
    rows = [ids[:length].tolist() for ids, length in zip(batch.input_ids, batch.input_lengths, strict=True)]
    use(False)
    expected = generate(model, rows, max_new_tokens=12)
    use(True)
    device.set_exact_fp32(True)
    found = generate(model.to(device.torch_device), rows, max_new_tokens=12)
    return sum(a != b for a, b in zip(found, expected, strict=True)) / len(rows)
