from __future__ import annotations

from pathlib import Path

import pytest

from tests.training.small_trained import save_trained


@pytest.fixture(scope="session")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A small model that writes text; whoever changes it copies it."""
    return save_trained(tmp_path_factory.mktemp("model"))
