"""Labels that a model predicts for rows of a file: scores, confusions, and predictions beside labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from commands.evaluate import evaluate
from settings.errors import UserError
from tests.commands.small import encoder, flags_of, read_rows, write_rows

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("rows")
    texts = ["MKVL", "ACDEFG", "WW", "YTSRQPN"]
    of_tokens = [{"text": text, "label": "CEH" * 3, "mask": "0" + "1" * (len(text) - 1)} for text in texts]
    for row in of_tokens:
        row["label"] = row["label"][: len(row["text"])]
    return write_rows(folder / "tokens.jsonl", of_tokens)


def run(model: Path, rows: Path, output: Path, **flags: Any) -> tuple[dict[str, float], list[dict[str, Any]]]:
    arguments = {
        "model": model,
        "validation_file": rows,
        "output": output,
        "mixed_precision": "no",
        "eval_batch_size_per_gpu": 3,
        "cache_dir": output.parent / "cache",
        **flags,
    }
    result = evaluate(flags_of("evaluate", **arguments))
    return result.metrics, read_rows(output)


def test_token_labels_are_scored_under_their_mask(
    rows: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    model = encoder(tmp_path, head="token", labels="C,E,H")
    metrics, rows_written = run(model, rows, tmp_path / "out.jsonl")
    words = capsys.readouterr().out
    pairs = [pair for row in rows_written for pair in zip(row["labels"], row["predictions"], strict=True) if pair[0]]
    assert len(pairs) == 15 and rows_written[0]["labels"] == [None, "E", "H", "C", None]
    assert metrics["accuracy"] == pytest.approx(np.mean([label == predicted for label, predicted in pairs]))
    assert "accuracy" in words and "perplexity" not in words and "--prepare_text" not in words
    counts = [
        line.split()[-3:] for line in words.splitlines() if line.strip()[:1] in "CEH" and line.split()[0] in "CEH"
    ]
    expected = [[sum(pair == (label, guess) for pair in pairs) for guess in "CEH"] for label in "CEH"]
    assert [[int(cell) for cell in row] for row in counts] == expected
    with pytest.raises(UserError, match="--overwrite"):
        run(model, rows, tmp_path / "out.jsonl")
