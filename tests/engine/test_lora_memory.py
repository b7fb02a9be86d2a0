"""Adapters take what the base takes at rest and little more; full finetuning takes gradients and state on top."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.measuring import in_child

MIB = 2**20
STEPS = """
from devices.malloc import tune_malloc
tune_malloc("small")
from config import T5ModelConfig
from engine.optimizers import OPTIMIZERS, Step
from engine.weights import weight_store_for
from engine.optimizer_in_backward import OptimizerInBackward
from engine.blockwise import Blockwise
from model import hf_format
from model.lora.form import LoraSettings; from model.lora.adapter import add_adapters
from model.loss import LossSettings
from tests.engine.small_models import Rectangle

folder, base, adapts = sys.argv[1], getattr(torch, sys.argv[2]), sys.argv[3] != "full"


def steps():
    model = hf_format.load(folder, base, maps=sys.argv[3] == "mapped")
    if adapts:
        add_adapters(model, LoraSettings(8, 16.0))
    update = OptimizerInBackward(OPTIMIZERS["adamw"]({n: w for n, w in model.named_parameters() if w.requires_grad}))
    weight_store = weight_store_for(base, torch.float32, (model.embedding, model.output_weight))
    blockwise = Blockwise(model, 0, weight_store, LossSettings(chunk_bytes=1 << 22), 0.0)
    batch = Rectangle(2, 32, 16, 2048)
    for number in (1, 2):
        update.begin(Step(number, 1e-3))
        loss = blockwise.gradients(batch.micro_batches(model, [[0], [1]]), batch.num_labels, update)
        update.finish(loss)
    return model, update


torch.mm(torch.ones(64, 64), torch.ones(64, 64))
print(measure(steps))
"""


@pytest.mark.slow
def test_peak_of_adapters_over_fp32_int8_and_int4(tmp_path: Path) -> None:
    from model import hf_format
    from model.t5 import T5
    from settings.declared import T5ModelConfig

    shape = T5ModelConfig(vocab_size=2048, num_layers=3, num_decoder_layers=3)
    model = T5(shape).initialise(0)
    count = sum(w.numel() for w in model.parameters())
    head = 4 * shape.vocab_size * shape.d_model
    hf_format.save(model, tmp_path)
    del model
    cases = (("float32", "full"), ("float32", "lora"), ("int8", "lora"), ("int4", "lora"), ("float32", "mapped"))
    full, lora, small, smallest, mapped = (in_child(STEPS, tmp_path, *case)[0] for case in cases)
    assert mapped < 24 * MIB, f"{mapped / MIB:.0f} MiB beside mapped weights"
    assert lora < 4 * count + 24 * MIB, f"{lora / MIB:.0f} MiB over {4 * count / MIB:.0f} MiB of weights"
    assert small < count + head + 24 * MIB, f"{small / MIB:.0f} MiB over {count / MIB:.0f} MiB of weights"
    table = shape.vocab_size * shape.d_model
    packed = 34 / 64
    least = packed * (count - table) + table + head
    assert smallest < least + 24 * MIB, f"{smallest / MIB:.0f} MiB over {least / MIB:.0f} MiB of weights"
    assert full > 12 * count > 2.4 * lora, "weights and two moments"
