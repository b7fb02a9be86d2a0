"""The world of the end-to-end tests."""

from __future__ import annotations

import os

import pytest

from tests.end_to_end.world import World


@pytest.fixture(scope="session")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    """Data files; a run is trained when a test first asks for it, whichever worker that is in."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "world"
    folder.mkdir(exist_ok=True)
    return World.open(folder)


@pytest.fixture(scope="session")
def pretrained(world: World) -> World:
    """The same with the pretraining run `whole`, that nothing has disturbed."""
    world.path("whole")
    return world
