"""Files of rows in any format, as tests write them, and what is read and learnt of them."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from data.prepare.training_data import TrainingData, find_training_data
from data.sources.columns import Columns
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.text.conversations import TextRow, Usable
from settings.declared import Config
from settings.loading import load

Row = dict[str, Any]


def write_rows(path: Path, rows: list[Row]) -> Path:
    """Write rows in the format of the file's ending."""
    match path.suffix:
        case ".parquet":
            pq.write_table(pa.Table.from_pylist(rows), path)
        case ".arrow":
            table = pa.Table.from_pylist(rows)
            with pa.ipc.new_file(str(path), table.schema) as file:
                file.write_table(table)
        case ".csv":
            with path.open("w", newline="", encoding="utf8") as file:
                writer = csv.DictWriter(file, list(rows[0]))
                writer.writeheader()
                writer.writerows(rows)
        case ".json":
            path.write_text(json.dumps(rows, ensure_ascii=False, indent=2), encoding="utf8")
        case _:
            path.write_text("".join(json.dumps(row, ensure_ascii=False) + "\n" for row in rows), encoding="utf8")
    return path


def rows_of(spec: object, columns: Columns | tuple[str, ...], bad_rows: BadRows | None = None) -> list[TextRow]:
    """All rows of the files that a user means."""
    return [row for batch in read_rows(find(str(spec)), columns, bad_rows or BadRows()) for row in batch]


def examples_of(path: Path, command: str = "train", **flags: str) -> tuple[Config, TrainingData, Usable]:
    """What a run with these flags learns of a file."""
    config = load(command, {"train_file": str(path), **flags})
    data = find_training_data(config.data, config.train.is_finetune)
    examples = data.task.examples(config.data, config.cleaning.clean, data.columns, path.parent)
    return config, data, examples.usable(rows_of(path, data.columns))
