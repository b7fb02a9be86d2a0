"""The table of tasks: each has a class that answers what `data` asks, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from data.task import all_tasks, shard_readers
from settings.declared import DataConfig
from settings.tasks import TASKS, default_objective, is_pretraining, task_named

ROOT = Path(__file__).resolve().parents[2]


def test_tasks_need_no_torch() -> None:
    code = "import sys; from data.task import all_tasks; all_tasks(); sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", code], cwd=ROOT, check=False).returncode == 0


def test_each_kind_of_shards_is_read_by_the_first_task_that_can() -> None:
    tasks = all_tasks()
    readers = shard_readers()
    assert readers.keys() == {task.shards.kind for task in tasks}
    for kind, reader in readers.items():
        assert reader.name == next(task.name for task in tasks if task.shards.kind == kind)


def test_finetuning_and_pretraining_are_of_different_tasks() -> None:
    assert all(is_pretraining(name) != facts.finetunes for name, facts in TASKS.items())
    assert is_pretraining(default_objective(is_finetune=False))
    assert not is_pretraining(default_objective(is_finetune=True))
    assert not is_pretraining("") and not is_pretraining("None")


@pytest.mark.parametrize("task", all_tasks(), ids=lambda task: task.name)
def test_each_stored_column_has_a_limit(task: object) -> None:
    columns = task.shards.columns  # type: ignore[attr-defined]
    assert len(task.limits(DataConfig())) == len(columns)  # type: ignore[attr-defined]


def test_a_task_that_does_not_exist_is_no_task() -> None:
    with pytest.raises(KeyError):
        task_named("auto")
