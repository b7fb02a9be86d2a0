"""Dynamic loss scaling, without which fp16 gradients vanish: the loss is multiplied by a scale, the gradients are divided by it.

fp16 holds numbers down to 6e-8, and the gradients of a loss divided by the tokens of a batch are often smaller. The scale
is as large as the gradients allow: it is halved when one of them is not finite, and doubled after many good steps. A block
whose gradients are not finite is left out of the step, on the device itself, so that no gradients are held and no GPU is
waited for; the blocks below it, which they have reached, are left out with it. The next step, which waits for its loss,
learns of it, and the one after it takes another scale. A step that any block was left out of is not counted by the
optimizer, whose means would otherwise be corrected for gradients that they never saw. Where all gradients are held anyway,
for clipping their global norm, such a step is left out as a whole.
Gradients stay fp16; each becomes fp32 only while its own weight is updated.
Source: Micikevicius et al. 2018 (arXiv 1710.03740), section 3.2; the numbers are those of torch's GradScaler.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass

from settings.errors import UserError

FIRST_SCALE = 2.0**16
LEAST_SCALE = 1.0  # true gradients of a mean loss are far inside fp16's range
GOOD_STEPS = 2000  # good steps in a row before the scale is doubled


@dataclass
class LossScaling:
    """A dynamic loss scale.

    Args:
        scale: factor on the loss from the next step on. good_steps: since the scale was last changed.
        skipped_steps: of the whole run, those that a block was left out of.
        last_finite, last_scale: of the last step, which the next one counts: whether its gradients were finite, and its scale;
            None: it is counted already.
    """

    scale: float = FIRST_SCALE
    good_steps: int = 0
    skipped_steps: int = 0
    last_finite: bool | None = None
    last_scale: float = FIRST_SCALE

    def __post_init__(self) -> None:
        self.in_use = self.scale  # in the step that is made now

    def admits(self, are_finite: bool, scale: float | None = None) -> bool:
        """Whether a step counts, as all its gradients are finite or not; moves the scale by that. The same on all processes,
        because the gradients are summed over them before.

        Args:
            scale: of that step; None: the one in use.
        Raises:
            UserError: the gradients overflow whatever the scale is.
        """
        if are_finite:
            self.good_steps += 1
            if self.good_steps == GOOD_STEPS:
                self.scale, self.good_steps = 2 * self.scale, 0
            return True
        scale = self.in_use if scale is None else scale
        if scale <= LEAST_SCALE:
            raise UserError(
                "--mixed_precision = fp16, the gradients are not finite even with a loss that is not scaled; allowed: no, bf16; "
                "start another run with --mixed_precision=bf16, from the last checkpoint's weights with --finetune_from"
            )
        self.good_steps, self.skipped_steps = 0, self.skipped_steps + 1
        self.scale = min(self.scale, scale / 2)  # the step before may have lowered it already
        return False

    def as_dict(self) -> dict[str, float | bool | None]:
        """Plain values, for a checkpoint; `LossScaling(**values)` continues from them."""
        return asdict(self)
