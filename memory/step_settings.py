"""What the settings fix of how a step is done, read once from the whole `Config`."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from memory.estimate.precision import BFLOAT16, FLOAT16, FLOAT32, INT4, INT8, Precision
from memory.weights_in import weights_folder
from settings.declared import Config
from settings.errors import UserError
from settings.fields import AUTO

# How a user may cut a step; an execution plan has fields of the same names.
EVALUATION_BATCH = "eval_batch_size_per_gpu"
MICRO_BATCHES = ("batch_size_per_gpu", EVALUATION_BATCH, "gradient_accumulation_steps")


@dataclass(frozen=True)
class StepSettings:
    """What the user fixed of a step. A value that is auto is left to the plan; the names are those of the settings.

    Args:
        requires_fp16: whether fp16 is asked for by a flag; one of a preset, a file or `config.py` is auto where fp16 is
            slow.
        lora_base: dtype of the frozen weights; None: there are no adapters.
        weights_folder: for the file of offloaded weights.
        is_optimizer_open: whether weights are random, and nobody has named an optimizer.
    """

    effective_batch_size: int | str
    batch_size_per_gpu: int | str
    gradient_accumulation_steps: int | str
    eval_batch_size_per_gpu: int | str
    memory_mode: str
    gradient_checkpointing: bool | str
    mixed_precision: str
    requires_fp16: bool
    lora_base: str | None
    weights_in: str
    weights_folder: Path
    compile: bool | str
    compiled_kernels: bool | str
    is_optimizer_open: bool

    @classmethod
    def of(cls, config: Config) -> StepSettings:
        """Read them."""
        train = config.train
        memory = config.memory
        is_random = not train.is_finetune and train.finetune_from in (AUTO, None) and not train.is_keep_training
        is_named = config.origin("optimizer") is not None or config.task.needs_base or config.lora.lora_rank > 0
        return cls(
            effective_batch_size=train.effective_batch_size,
            batch_size_per_gpu=train.batch_size_per_gpu,
            gradient_accumulation_steps=train.gradient_accumulation_steps,
            eval_batch_size_per_gpu=train.eval_batch_size_per_gpu,
            memory_mode=memory.memory_mode,
            gradient_checkpointing=memory.gradient_checkpointing,
            mixed_precision=memory.mixed_precision,
            requires_fp16=config.origin("mixed_precision") in (None, "flag"),
            lora_base=config.lora.lora_base if config.lora.lora_rank else None,
            weights_in=memory.weights_in,
            weights_folder=weights_folder(memory, config.run),
            compile=train.compile,
            compiled_kernels=config.run.compiled_kernels,
            is_optimizer_open=is_random and not is_named,
        )

    def of_cut(self) -> dict[str, Any]:
        """How this start asks for its steps to be cut and to save memory, by setting: kept beside the plan that was
        made for it.
        """
        return {
            **{name: getattr(self, name) for name in MICRO_BATCHES},
            "memory_mode": self.memory_mode,
            "gradient_checkpointing": self.gradient_checkpointing,
        }

    def changed_since(self, before: Mapping[str, Any]) -> frozenset[str]:
        """Which of the step's settings this start gives another value than the one that the run's plan was made for.

        A value that is repeated, as by a restart, is none of them: the run may have had to take less since.

        Args:
            before: `of_cut` of then.
        """
        return frozenset(name for name, value in self.of_cut().items() if before.get(name, value) != value)

    def requested_precision(self, multiplies_fast: Callable[[str], bool]) -> str:
        """The value of `mixed_precision`; fp16 that is not required is auto where fp16 products are not fast.

        Raises:
            UserError: fp16 is asked for by a flag, and is not faster there.
        """
        if self.mixed_precision != "fp16" or multiplies_fast(FLOAT16):
            return self.mixed_precision
        if not self.requires_fp16:
            return AUTO
        raise UserError(
            "--mixed_precision = fp16, products in fp16 are not faster on this device; allowed here: auto, no, bf16 "
            "(bf16 halves the weights and computes in what is fast)"
        )

    def precisions(self, multiplies_fast: Callable[[str], bool]) -> list[Precision]:
        """The dtypes that the settings allow, those to be preferred first.

        Args:
            multiplies_fast: whether products in a dtype of 16 bits pay on the machine.
        Raises:
            UserError: what is asked for is not faster there.
        """
        requested = self.requested_precision(multiplies_fast)
        fast = BFLOAT16 if multiplies_fast(BFLOAT16) else FLOAT32
        compute = fast
        if requested == "fp16" or (requested == AUTO and fast == FLOAT32 and multiplies_fast(FLOAT16)):
            compute = FLOAT16
        wide = Precision.of(FLOAT32, FLOAT32)
        narrow = Precision.of(BFLOAT16, compute)
        exact = [wide, narrow]
        if requested == "no":
            exact = [wide]
        elif requested == "bf16" or compute != FLOAT32 or self.memory_mode == "ultra":
            exact = [narrow]
        # Products of int8 would leave the range of fp16 before their scales are applied.
        quantized = Precision.of(INT8, fast)
        bases = {
            None: exact,
            AUTO: [*exact, quantized],
            "fp32": [wide],
            "bf16": [narrow],
            "int8": [quantized],
            "int4": [Precision.of(INT4, fast)],
        }
        return bases[self.lora_base]
