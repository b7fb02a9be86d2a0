"""Files of text and pairs whose shards the tests of batches share: the second to ask finds them in the cache."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from data.batches.loader import StepLoader
from data.prepare.preparing import prepare
from tests.data.loaders import loader_of, small_config, write_rows

MakeLoader = Callable[..., StepLoader]


@pytest.fixture(scope="session")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("rows")
    texts = [f"document {number}: " + "all work and no play " * (1 + number % 7) for number in range(300)]
    pairs = [{"prompt": f"p{number} " + "x" * (number % 37), "response": f"r{number}"} for number in range(250)]
    return {
        "text": write_rows(folder / "text.jsonl", ({"text": text} for text in texts)),
        "pairs": write_rows(folder / "pairs.jsonl", pairs),
    }


@pytest.fixture(scope="session")
def make_loader(files: dict[str, Path]) -> MakeLoader:
    """Give the loader of the training rows of a file, by its objective and further flags."""

    def make(objective: str, ultra_low_mem: bool = False, **flags: Any) -> StepLoader:
        file = files["pairs" if objective == "pairs" else "text"]
        config = small_config(file.parent, **{"train_file": file, "objective": objective, **flags})
        return loader_of(prepare(config).train_dir, objective, config, ultra_low_mem)

    return make
