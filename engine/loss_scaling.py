"""How do fp16 gradients keep from vanishing? The loss is multiplied by a scale, and the gradients are divided by it again.

fp16 holds numbers down to 6e-8, and the gradients of a loss divided by the tokens of a batch are often smaller. The
scale is as large as the gradients allow: it is halved when one of them is not finite, and that step is left out; it is
doubled after many good steps. Whether a step is left out is only known when all gradients are there, so they are held,
as for clipping the global norm; they stay fp16, and each becomes fp32 only when its own weight is updated. Steps left
out are not counted by the optimizer, whose means would otherwise be corrected for gradients that they never saw.
Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2; the numbers are those of torch's GradScaler.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from settings.errors import UserError

FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0  # true gradients of a mean loss are far inside fp16's range: here it is the forward that overflows
GOOD_STEPS = 2000  # good steps in a row before the scale is doubled


@dataclass
class LossScaling:
    """A dynamic loss scale.

    Args:
        scale: factor on the loss now. good_steps: since the scale was last changed. skipped_steps: of the whole run.
    """

    scale: float = FIRST_SCALE
    good_steps: int = 0
    skipped_steps: int = 0

    def admits(self, are_finite: bool) -> bool:
        """Whether a step is made, as all its gradients are finite or not; moves the scale by that. The same on all processes,
        because the gradients are summed over them before.

        Raises:
            UserError: the gradients overflow whatever the scale is.
        """
        if are_finite:
            self.good_steps += 1
            if self.good_steps == GOOD_STEPS:
                self.scale, self.good_steps = 2 * self.scale, 0
            return True
        if self.scale <= LEAST_SCALE:
            raise UserError(
                "--mixed_precision = fp16, the step is not finite even with a loss that is not scaled: T5's activations "
                "have left fp16's range; allowed: no, bf16; start another run with --mixed_precision=bf16, from the last checkpoint's "
                "weights with --finetune_from"
            )
        self.scale, self.good_steps, self.skipped_steps = self.scale / 2, 0, self.skipped_steps + 1
        return False

    def as_dict(self) -> dict[str, float]:
        """Plain values, for a checkpoint; `LossScaling(**values)` continues from them."""
        return asdict(self)
