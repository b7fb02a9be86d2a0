"""The table of tasks: each has a class that answers what `data` asks, without torch."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

from data.task import all_tasks, shard_readers

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
