"""The table of optimizers and what each takes, read by settings, plan and engine; needs no torch.

A new optimizer is an entry here and a file in `engine/optimizers/` with the class that the entry names.
"""

from __future__ import annotations

from dataclasses import dataclass

STATE_BLOCK = 128  # elements of a row that share a scale, of moments in 8 bits
# What brings singular values together: a polynomial a turn, the factors of their first, third and fifth power. Values
# between 0.007 and 1 come to lie within 0.42 of 1. All but the last read them as if they were 2% smaller: a little
# above 1 they would grow without bound, and rounding can carry them there.
MUON_POLYNOMIALS = ((7.9277, -21.6958, 15.2896), (3.7290, -2.6779, 0.4983), (2.9400, -2.2000, 0.4775))


@dataclass(frozen=True)
class OptimizerFacts:
    """What is known of an optimizer before it is made.

    Args:
        made_by: the class, `file:Class` in `engine/optimizers/`. help: a few words for users.
        learning_rate: the highest, where it is left auto. small_rate: of a small model that starts from random weights.
        weight_bytes: of state for each weight.
        matrix_bytes: of state for each weight of the matrices of blocks, which then have no factors.
        factor_bytes: for each row and column of a matrix, and each number of a vector.
        update_bytes: buffers of an update for each of its elements, without those of the rounding.
        compiled_update_bytes: the same where a compiled kernel rounds as well; None: no kernel of its own.
        together_bytes: buffers of an update on a GPU for each of its elements, where many weights are updated together
            or a chunk of a large one is: fp32 copies of weights and gradients, and of these scaled, or what is rounded.
        turns: of products over a copy of the whole matrix in an update; 0: an update goes through its rows, chunk by
            chunk.
    """

    made_by: str
    help: str
    learning_rate: float
    small_rate: float = 2e-2
    weight_bytes: float = 0.0
    matrix_bytes: int = 0
    factor_bytes: int = 0
    update_bytes: int = 10
    compiled_update_bytes: int | None = None
    together_bytes: int = 12
    turns: int = 0

    def state_bytes(self, weights: int, matrices: int, factors: int, shared_factors: int) -> int:
        """Bytes of the state of so many weights.

        Args:
            matrices: weights of the matrices of blocks among them. factors: rows and columns of all matrices, and
                numbers of the vectors; shared_factors: outside of the matrices of blocks.
        """
        counted = shared_factors if self.matrix_bytes else factors
        return int(self.weight_bytes * weights) + self.matrix_bytes * matrices + self.factor_bytes * counted


OPTIMIZERS = {
    "adafactor": OptimizerFacts("adafactor:Adafactor", "T5's own", 1e-2, factor_bytes=4, compiled_update_bytes=0),
    "adamw_rms": OptimizerFacts("adamw:AdamWRMS", "AdamW scaled by each weight's RMS", 2e-2, weight_bytes=8),
    "adamw_8bit": OptimizerFacts(
        "adamw:AdamW8bit",
        "adamw_rms with 8-bit moments",
        2e-2,
        weight_bytes=2 + 8 / STATE_BLOCK,
        update_bytes=28,
        together_bytes=28,
    ),
    "adamw": OptimizerFacts("adamw:AdamW", "", 3e-4, weight_bytes=8, together_bytes=10),
    "muon": OptimizerFacts(
        "muon:Muon",
        "lowest loss per token",
        2e-2,
        small_rate=5e-2,
        matrix_bytes=2,
        factor_bytes=4,
        update_bytes=14,
        together_bytes=16,
        turns=len(MUON_POLYNOMIALS),
    ),
}
DEFAULT = "adafactor"


def described() -> str:
    """All of them, in a line: `adafactor (T5's own), ... or muon (lowest loss per token)`."""
    words = [f"{name} ({facts.help})" if facts.help else name for name, facts in OPTIMIZERS.items()]
    return f"{', '.join(words[:-1])}, or {words[-1]}"
