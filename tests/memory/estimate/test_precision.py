"""Words become dtypes and dtypes words: who asks for what a run has gets it."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from memory.estimate.precision import Precision, dtype_bytes, matrix_bytes
from memory.step_settings import StepSettings
from settings.declared import Config
from settings.errors import UserError
from settings.loading import load

FAST, SLOW, TURING = (lambda dtype: dtype == "bfloat16"), (lambda dtype: False), (lambda dtype: dtype == "float16")
LORA = {"lora_rank": "4", "is_finetune": "True"}


def allowed(config: Config, multiplies_fast: Callable[[str], bool]) -> list[Precision]:
    return StepSettings.of(config).precisions(multiplies_fast)


@pytest.mark.parametrize(("is_fast", "flags"), [(FAST, {}), (SLOW, LORA), (TURING, {}), (TURING, LORA)])
def test_asking_for_what_a_run_has_gives_it(is_fast: Callable[[str], bool], flags: dict[str, str]) -> None:
    config = load("train", {"train_file": "x", **flags})
    for precision in allowed(config, is_fast):
        asked = config.changed(mixed_precision=precision.mixed_precision)
        if flags:
            asked = asked.changed(lora_base=precision.lora_base)
        assert allowed(asked, is_fast) == [precision]


def test_fp32_products_of_narrow_weights_pass_narrow_activations() -> None:
    assert Precision.of("bfloat16", "float32").between_blocks == "bfloat16"
    assert Precision.of("int8", "float32").between_blocks == "float32"
    assert [dtype_bytes(name) for name in Precision.of("bfloat16", "float16")] == [2, 2, 4]


def test_int4_is_taken_where_it_is_named_alone() -> None:
    asked = {"train_file": "x", "lora_rank": "4", "is_finetune": "True"}
    assert "int4" not in {precision.storage for precision in allowed(load("train", asked), FAST)}
    assert allowed(load("train", {**asked, "lora_base": "int4"}), FAST) == [Precision.of("int4", "bfloat16")]
    assert matrix_bytes((10, 128), "int4") == 10 * 2 * 34 and matrix_bytes((10, 65), "int4") == 10 * 2 * 34
    assert matrix_bytes((10, 128), "int8") == 1280 == matrix_bytes((5, 128), "bfloat16")


def test_fp16_is_taken_where_it_is_fast_and_bf16_is_not() -> None:
    config = load("train", {"train_file": "x"})
    assert allowed(config, TURING) == [Precision("bfloat16", "float16", "float32")]
    assert allowed(config.changed(mixed_precision="fp16"), lambda dtype: True)[0].compute == "float16"
    words = {"mixed_precision": "bf16"}, {"mixed_precision": "no"}
    assert all(allowed(config.changed(**word), TURING)[0].compute == "float32" for word in words)
    assert allowed(load("train", {"train_file": "x", **LORA, "lora_base": "int8"}), TURING)[0].compute == "float32"


def test_fp16_where_it_is_slow_is_refused() -> None:
    with pytest.raises(UserError, match="mixed_precision = fp16"):
        allowed(load("train", {"train_file": "x", "mixed_precision": "fp16"}), SLOW)
