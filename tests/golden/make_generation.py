"""Makes the golden answers: the golden models of each family, asked by transformers (5.23) in many ways.

    python tests/golden/make_generation.py

Writes `generation.json` beside each model: for each way the settings by our names, and the answers without start and
end token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

HERE = Path(__file__).resolve().parent
FAMILIES = ("t5", "t5_v1_1", "mt5", "umt5", "byt5")
LENGTHS = (33, 5, 12, 20)
LIMIT = 14
WAYS: tuple[dict[str, Any], ...] = (
    {},
    {"repetition_penalty": 1.3},
    {"no_repeat_ngram_size": 2},
    {"no_repeat_ngram_size": 1, "min_new_tokens": 6},
    {"num_beams": 2},
    {"num_beams": 4, "length_penalty": 0.0},
    {"num_beams": 4, "length_penalty": 2.0},
    {"num_beams": 4, "length_penalty": -1.0, "early_stopping": "never"},
    {"num_beams": 3, "length_penalty": 2.0, "early_stopping": "never"},
    {"num_beams": 3, "early_stopping": "True"},
    {"num_beams": 3, "early_stopping": "True", "length_penalty": 2.0, "min_new_tokens": 3},
    {"num_beams": 4, "repetition_penalty": 1.5},
    {"num_beams": 4, "no_repeat_ngram_size": 2, "repetition_penalty": 0.8},
)


def rows_of(vocab_size: int, seed: int = 0) -> list[list[int]]:
    """Prompts of unequal length that end with the end token."""
    import torch

    generator = torch.Generator().manual_seed(seed)
    return [[*torch.randint(2, vocab_size, (length - 1,), generator=generator).tolist(), 1] for length in LENGTHS]


def answers_of(model: Any, rows: list[list[int]], way: dict[str, Any]) -> list[list[int]]:
    """What transformers writes."""
    import torch

    longest = max(map(len, rows))
    ids = torch.tensor([row + [0] * (longest - len(row)) for row in rows])
    mask = torch.tensor([[1] * len(row) + [0] * (longest - len(row)) for row in rows])
    theirs = dict(way)
    if "early_stopping" in theirs:
        theirs["early_stopping"] = {"True": True, "False": False, "never": "never"}[theirs["early_stopping"]]
    written = model.generate(
        input_ids=ids, attention_mask=mask, max_new_tokens=LIMIT, do_sample=False, **{"num_beams": 1, **theirs}
    )
    answers = [row[1:] for row in written.tolist()]
    return [row[: row.index(1)] if 1 in row else row[:LIMIT] for row in answers]


def lively_rows(model: Any) -> list[list[int]]:
    """Prompts with answers worth comparing: of several lengths, and not the same whatever the way."""

    def liveliness(rows: list[list[int]]) -> tuple[int, int]:
        greedy, beams = answers_of(model, rows, {}), answers_of(model, rows, {"num_beams": 4})
        changed = sum(a != b for a, b in zip(greedy, beams, strict=True))
        return len({len(row) for row in beams}) + changed, sum(len(row) for row in beams)

    return max((rows_of(model.config.vocab_size, seed) for seed in range(60)), key=liveliness)


def main() -> None:
    """Write the answers of every family."""
    from transformers import AutoModelForSeq2SeqLM

    for family in FAMILIES:
        model = AutoModelForSeq2SeqLM.from_pretrained(HERE / family).eval()
        rows = lively_rows(model)
        ways = [{"settings": {"max_new_tokens": LIMIT, **way}, "answers": answers_of(model, rows, way)} for way in WAYS]
        content = json.dumps({"rows": rows, "ways": ways}, separators=(",", ":"))
        (HERE / family / "generation.json").write_text(content.replace('{"settings"', '\n{"settings"') + "\n")


if __name__ == "__main__":
    main()
