"""Proteins as their models' publishers prepare them.

- prott5: letters parted by blanks, the rare U, Z, O and B as X (github.com/agemagician/ProtTrans).
- prostt5: the same after `<AA2fold>`, or `<fold2AA>` for the small letters of 3Di (github.com/mheinzinger/ProstT5).
- ankh: each letter encoded as a word of its own (github.com/agemagician/Ankh).
"""

from __future__ import annotations

PROTT5 = "prott5"
PROSTT5 = "prostt5"
ANKH = "ankh"
PREPARATIONS = (PROTT5, PROSTT5, ANKH)
PREFIXES = ("<AA2fold>", "<fold2AA>")  # of ProstT5, before amino acids and before 3Di
_RARE = str.maketrans("UZOB", "XXXX")


def example(how: str) -> tuple[str, str]:
    """A protein, and what a tokenizer gets in its place, both as Python writes them.

    Args:
        how: one of `PREPARATIONS`.
    """
    letters = "MKU"
    if how == ANKH:
        return repr(letters), repr(list(letters))
    return repr(letters), repr(prepared(letters, how)[0])


def prepared(text: str, how: str) -> tuple[str, list[int]]:
    """A protein's text for the tokenizer, and where in it each letter stands.

    Args:
        how: prott5 or prostt5.
    """
    letters = "".join(text.split())
    prefix = ""
    if how == PROSTT5:
        amino_acids, structure = PREFIXES
        prefix = f"{amino_acids if letters.isupper() else structure} "
    return prefix + " ".join(letters.translate(_RARE)), [len(prefix) + 2 * at for at in range(len(letters))]
