"""Files are read in a child of the process: it gives the same, and how it ends is one sentence."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from common.child_process import CRASHED, MEMORY, ChildDied
from data.prepare import looking
from data.prepare.preparing import in_child, prepare
from settings.errors import DoesNotFit, UserError

pytestmark = pytest.mark.children


def test_the_child_gives_the_same_and_passes_user_errors_on(configure: Any, text_file: Path, tmp_path: Path) -> None:
    prepared = in_child(prepare, configure(train_file=text_file))
    again = prepare(configure(train_file=text_file, cache_dir=tmp_path / "other_cache"))
    shards = [next(split.glob("*.arrow")).read_bytes() for split in (prepared.train_dir, again.train_dir)]
    assert shards[0] == shards[1] and prepared.counts == again.counts
    text_file.write_text(text_file.read_text() + "{broken\n")
    with pytest.raises(UserError, match=r"text\.jsonl, line 301"):
        in_child(prepare, configure(train_file=text_file))


class DyingWorker:
    """A child that ends in the way that the test says."""

    end: BaseException = KeyboardInterrupt()

    def __init__(self, *_: object, **__: object) -> None:
        pass

    def ask(self, _: object) -> None:
        raise self.end

    def close(self) -> None:
        pass


def test_how_a_child_ended_is_one_sentence(configure: Any, text_file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(looking, "Worker", DyingWorker)
    ends: list[tuple[BaseException, type[BaseException], str]] = [
        (KeyboardInterrupt(), KeyboardInterrupt, "continues"),
        (ChildDied(MEMORY, ""), DoesNotFit, str(text_file)),
        (ChildDied(CRASHED, "exit code -11"), UserError, str(text_file)),
    ]
    for end, expected, words in ends:
        monkeypatch.setattr(DyingWorker, "end", end)
        with pytest.raises(expected, match=words):
            in_child(prepare, configure(train_file=text_file))
