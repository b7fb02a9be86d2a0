"""Dynamic loss scaling, without which fp16 gradients vanish: the loss is multiplied by a scale, the gradients are
divided by it.

fp16 holds numbers down to 6e-8, and the gradients of a loss divided by the tokens of a batch are often smaller. The
scale is as large as the gradients allow: it is halved after a step whose gradients overflow, and doubled after many
good steps. All gradients are held until backward has ended, so that an overflow costs that step alone and leaves no
trace in weights or optimizer. They stay fp16; each becomes fp32 only while its own weight is updated.
Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2; the numbers are those of torch's GradScaler.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any

from settings.errors import UserError

FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0  # True gradients of a mean loss are far inside fp16's range.
GOOD_STEPS = 2000  # After so many good steps in a row the scale is doubled.


@dataclass
class LossScaling:
    """A dynamic loss scale.

    Args:
        scale: factor on the loss of the next step.
        good_steps: steps without an overflow since the scale was last changed.
        skipped_steps: steps of the whole run that overflowed, which the optimizer does not count.
    """

    scale: float = FIRST_SCALE
    good_steps: int = 0
    skipped_steps: int = 0

    def count(self, is_finite: bool) -> None:
        """Move the scale after a step, by whether all its gradients were finite.

        Raises:
            UserError: the gradients overflow even with a loss that is not scaled.
        """
        if is_finite:
            self.good_steps += 1
            if self.good_steps == GOOD_STEPS:
                self.scale *= 2
                self.good_steps = 0
            return
        if self.scale <= LEAST_SCALE:
            raise UserError(
                "--mixed_precision = fp16, the gradients are not finite even with a loss that is not scaled; "
                "allowed: no, bf16; "
                "start another run with --mixed_precision=bf16, from the last checkpoint's weights with --finetune_from"
            )
        self.scale /= 2
        self.good_steps = 0
        self.skipped_steps += 1

    def as_dict(self) -> dict[str, Any]:
        """Plain values, for a checkpoint; `LossScaling(**values)` continues from them."""
        return asdict(self)
