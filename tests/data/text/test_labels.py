"""Labels of rows: as a list, as JSON, as names or letters in a text; masks; names and numbers; which letter or word
each belongs to.
"""

from __future__ import annotations

from decimal import Decimal

import pytest

from data.text.labels import in_order, joined_words, label_of, labels_of, numbered, spans_of
from data.text.proteins import prepared


@pytest.mark.parametrize("cell", [["C", "E", "H"], "CEH", '["C", "E", "H"]', "C E H"])
def test_labels_of_tokens_are_written_in_several_ways(cell: object) -> None:
    assert labels_of(cell) == ["C", "E", "H"]
    assert labels_of(cell, "011") == labels_of(cell, [False, 1, 1.0]) == [None, "E", "H"]


@pytest.mark.parametrize(
    ("cell", "label"),
    [
        (3, "3"),
        (0.25, "0.25"),
        (2**53 + 1, "9007199254740993"),
        (1e23, "1" + "0" * 23),
        (Decimal("0." + "1" * 38), "0." + "1" * 38),
        (10**400, "1" + "0" * 400),
        ("[a]", "[a]"),
    ],
)
def test_a_label_is_a_name_or_a_number(cell: object, label: str) -> None:
    assert label_of(cell) == [label]
    assert label_of(cell, 0) == [None]


def test_labels_become_numbers_of_names_or_what_they_say() -> None:
    assert numbered(["H", None, "C"], ("C", "E", "H")) == [2, None, 0]
    assert numbered(["-0.5", "3"], ()) == [-0.5, 3.0]
    assert in_order(["10", "9", "-1"]) == ["-1", "9", "10"] and in_order(["b", "10", "9"]) == ["10", "9", "b"]


def test_labels_belong_to_letters_or_to_words() -> None:
    assert spans_of("MKV", 3) == [(0, 1), (1, 2), (2, 3)]
    assert spans_of("The  EU said", 3) == [(0, 3), (5, 7), (8, 12)]
    assert spans_of("Hello", 1) == [(0, 5)] and spans_of("M", 1) == [(0, 1)]


def test_proteins_are_prepared_as_their_models_were_trained() -> None:
    """The examples of ProtT5's and ProstT5's pages."""
    assert prepared("PRTEINO", "prott5") == ("P R T E I N X", [0, 2, 4, 6, 8, 10, 12])
    assert prepared("SEQ WENCE", "prott5")[0] == "S E Q W E N C E"
    assert prepared("PRTEINO", "prostt5") == ("<AA2fold> P R T E I N X", [10, 12, 14, 16, 18, 20, 22])
    assert prepared("strct", "prostt5")[0] == "<fold2AA> s t r c t"


@pytest.mark.parametrize("cell", ["['O', 'B-PER', None]", '["O", "B-PER", -100]', ["O", "B-PER", -100]])
def test_labels_as_pandas_and_transformers_write_them(cell: object) -> None:
    assert labels_of(cell) == ["O", "B-PER", None]
    assert joined_words("['The', 'EU']") == "The EU" and joined_words("[1] The EU") == "[1] The EU"
