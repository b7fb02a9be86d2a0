"""Proteins as their models' publishers prepare them.

- prott5: letters parted by blanks, the rare U, Z, O and B as X (github.com/agemagician/ProtTrans).
- prostt5: the same after `<AA2fold>`, or `<fold2AA>` for the small letters of 3Di (github.com/mheinzinger/ProstT5).
- ankh: each letter encoded as a word of its own (github.com/agemagician/Ankh).
"""

from __future__ import annotations

PROTT5, PROSTT5, ANKH = "prott5", "prostt5", "ankh"
PREPARATIONS = (PROTT5, PROSTT5, ANKH)
_RARE = str.maketrans("UZOB", "XXXX")


def prepared(text: str, how: str) -> tuple[str, list[int]]:
    """A protein's text for the tokenizer, and where in it each letter stands.

    Args:
        how: prott5 or prostt5.
    """
    letters = "".join(text.split())
    prefix = "" if how == PROTT5 else "<AA2fold> " if letters.isupper() else "<fold2AA> "
    return prefix + " ".join(letters.translate(_RARE)), [len(prefix) + 2 * at for at in range(len(letters))]
