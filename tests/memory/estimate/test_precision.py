"""Words become dtypes and dtypes words: who asks for what a run has gets it."""

from __future__ import annotations

import pytest

from memory.estimate.precision import Precision, dtype_bytes, matrix_bytes
from memory.step_settings import StepSettings
from settings.errors import UserError
from settings.loading import load

LORA = {"lora_rank": "4", "is_finetune": "True"}
BF16 = ("bfloat16",)
FP16 = ("float16",)


def allowed(fast: tuple[str, ...], **flags: str) -> list[Precision]:
    """The dtypes that are allowed on a machine with these fast ones."""
    settings = StepSettings.of(load("train", {"train_file": "x", **flags}))
    return settings.precisions(lambda dtype: dtype in fast)


@pytest.mark.parametrize(("fast", "flags"), [(BF16, {}), ((), LORA), (FP16, {}), (FP16, LORA)])
def test_asking_for_what_a_run_has_gives_it(fast: tuple[str, ...], flags: dict[str, str]) -> None:
    for precision in allowed(fast, **flags):
        words = {"mixed_precision": precision.mixed_precision}
        if flags:
            words["lora_base"] = precision.lora_base
        assert allowed(fast, **flags, **words) == [precision]


def test_bytes_of_dtypes() -> None:
    assert Precision.of("bfloat16", "float32").between_blocks == "bfloat16"
    assert Precision.of("int8", "float32").between_blocks == "float32"
    assert [dtype_bytes(name) for name in Precision.of("bfloat16", "float16")] == [2, 2, 4]
    assert matrix_bytes((10, 128), "int4") == 10 * 2 * 34 and matrix_bytes((10, 65), "int4") == 10 * 2 * 34
    assert matrix_bytes((10, 128), "int8") == 1280 == matrix_bytes((5, 128), "bfloat16")


def test_fp16_that_is_named_where_it_is_not_fast_is_refused() -> None:
    with pytest.raises(UserError, match="mixed_precision = fp16"):
        allowed((), mixed_precision="fp16")
