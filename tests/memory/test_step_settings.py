"""What the settings fix of a step, and which dtypes they leave."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from memory.estimate.precision import Precision
from memory.step_settings import StepSettings
from settings.loading import load

WIDE = ("float32", "float32")
NARROW = ("bfloat16", "float32")
FAST = ("bfloat16", "bfloat16")
LORA = {"lora_rank": 4, "is_finetune": True}


def settings_of(**flags: Any) -> StepSettings:
    return StepSettings.of(load("train", {"train_file": "x", **{name: str(flags[name]) for name in flags}}))


@pytest.mark.parametrize(
    ("fast", "flags", "expected"),
    [
        ("", {}, [WIDE, NARROW]),
        ("", {"memory_mode": "ultra"}, [NARROW]),
        ("", {"mixed_precision": "bf16"}, [NARROW]),
        ("", {"mixed_precision": "no", "memory_mode": "ultra"}, [WIDE]),
        ("bfloat16", {}, [FAST]),
        ("bfloat16", {"mixed_precision": "no"}, [WIDE]),
        ("bfloat16 float16", {}, [FAST]),
        ("float16", {}, [("bfloat16", "float16")]),
        ("float16", {"mixed_precision": "no"}, [WIDE]),
        ("float16", {"mixed_precision": "bf16"}, [NARROW]),
        ("bfloat16 float16", {"mixed_precision": "fp16"}, [("bfloat16", "float16")]),
        ("bfloat16", {"preset": "guide_config_1"}, [FAST]),
        ("float16", {**LORA, "lora_base": "int8"}, [("int8", "float32")]),
        ("bfloat16", {**LORA, "lora_base": "int4"}, [("int4", "bfloat16")]),
        ("", LORA, [WIDE, NARROW, ("int8", "float32")]),
        ("bfloat16", LORA, [FAST, ("int8", "bfloat16")]),
        ("", {**LORA, "lora_base": "fp32", "memory_mode": "ultra"}, [WIDE]),
        ("", {**LORA, "lora_base": "bf16"}, [NARROW]),
    ],
)
def test_dtypes_to_be_preferred_first(fast: str, flags: dict[str, Any], expected: list[tuple[str, str]]) -> None:
    allowed = settings_of(**flags).precisions(lambda dtype: dtype in fast.split())
    assert allowed == [Precision.of(*dtypes) for dtypes in expected]


def test_an_optimizer_is_open_where_weights_are_random_and_nobody_has_named_one() -> None:
    assert settings_of().is_optimizer_open
    for flags in ({"optimizer": "adafactor"}, LORA, {"is_keep_training": True}, {"finetune_from": "x"}):
        assert not settings_of(**flags).is_optimizer_open


def test_fp16_of_a_preset_is_no_demand() -> None:
    assert settings_of(mixed_precision="fp16").requires_fp16 and settings_of().requires_fp16
    assert not settings_of(preset="guide_config_1").requires_fp16


def test_what_a_start_changes_of_the_cut_before() -> None:
    before = settings_of(batch_size_per_gpu=2).of_cut()
    assert settings_of(batch_size_per_gpu=2, mixed_precision="no").changed_since(before) == set()
    assert settings_of(memory_mode="low").changed_since(before) == {"batch_size_per_gpu", "memory_mode"}
    assert settings_of(memory_mode="low").changed_since({}) == set(), "what is not recorded is not compared"
    assert settings_of(weights_dir="there", output_dir="here").weights_folder == Path("there")
    assert settings_of(output_dir="here").weights_folder == Path("here")
