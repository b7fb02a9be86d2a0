"""Answers are those of transformers, token by token: greedy and beam search, with penalties, for each family."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from model.decoding.generation import generate
from model.hf_format import load

GOLDEN = Path(__file__).resolve().parents[2] / "golden"
FAMILIES = ("t5", "t5_v1_1", "mt5", "umt5", "byt5")


def expected(family: str) -> dict[str, Any]:
    return json.loads((GOLDEN / family / "generation.json").read_text(encoding="utf8"))


@pytest.mark.parametrize("family", FAMILIES)
def test_answers_are_those_of_transformers(family: str) -> None:
    model, golden = load(GOLDEN / family), expected(family)
    for case in golden["ways"]:
        assert generate(model, golden["rows"], **case["settings"]) == case["answers"], case["settings"]


def test_answers_do_not_depend_on_the_batch() -> None:
    model, golden = load(GOLDEN / "t5"), expected("t5")
    for case in golden["ways"]:
        alone = [generate(model, [row], **case["settings"])[0] for row in golden["rows"]]
        assert alone == case["answers"], case["settings"]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("seed", [1, 2, 3])
def test_against_transformers(family: str, seed: int) -> None:
    transformers = pytest.importorskip("transformers")
    from tests.golden.make_generation import LIMIT, WAYS, answers_of, rows_of

    peer = transformers.AutoModelForSeq2SeqLM.from_pretrained(GOLDEN / family).eval()
    ours = load(GOLDEN / family)
    rows = rows_of(ours.config.vocab_size, 1000 + seed)
    for case in WAYS:
        assert generate(ours, rows, max_new_tokens=LIMIT, **case) == answers_of(peer, rows, case), case
