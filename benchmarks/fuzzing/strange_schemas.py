"""Files that are sound and absurd: schemas nobody would write, bombs, depth, for `child` to open by number.

Nothing in them is damaged. A kind's maker writes number N, another one each.
"""

from __future__ import annotations

import gzip
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

Drawn = Callable[[random.Random, int, int], pa.Array]
NAMES = (
    "text",
    "prompt",
    "text",
    "",
    "\x1b[2Jx",
    "a.b.c",
    "x" * 5000,
    "\0",
    "response",
    "messages",
    "你好",
    "ids",
    "TEXT",
)
ROWS = (0, 1, 1, 7, 40, 300)


def _plain(draw: random.Random, rows: int, depth: int) -> pa.Array:
    kind = draw.choice(
        (
            pa.string(),
            pa.large_string(),
            pa.string_view(),
            pa.binary(),
            pa.binary_view(),
            pa.int8(),
            pa.uint64(),
            pa.float16(),
            pa.float64(),
            pa.bool_(),
            pa.null(),
            pa.date32(),
            pa.time64("ns"),
            pa.timestamp("ns", "UTC"),
            pa.duration("s"),
            pa.decimal128(38, -3),
            pa.decimal256(76, 70),
            pa.binary(0),
            pa.binary(3),
            pa.month_day_nano_interval(),
        )
    )
    if draw.randrange(4) == 0 or kind == pa.null():
        return pa.nulls(rows, kind)
    if pa.types.is_string(kind) or pa.types.is_large_string(kind) or kind == pa.string_view():
        texts = ("", "a text", "\0\x1b]0;x\x07", "\U0010ffff" * 9, "word " * 2000, None)
        return pa.array([draw.choice(texts) for _ in range(rows)], kind)
    if kind in (pa.binary(), pa.binary_view()):
        return pa.array([draw.choice((b"", b"\xff\xfe", b"a" * 999, None)) for _ in range(rows)], kind)
    if kind in (pa.int8(), pa.uint64()):
        return pa.array([draw.choice((0, 1, 127, None)) for _ in range(rows)], kind)
    if kind in (pa.float16(), pa.float64()):
        return pa.array([np.float16(draw.choice((0.0, np.nan, np.inf))) for _ in range(rows)], pa.float16()).cast(kind)
    return pa.nulls(rows, kind)


def _list(draw: random.Random, rows: int, depth: int) -> pa.Array:
    lengths = [draw.choice((0, 1, 3)) for _ in range(rows)]
    offsets = np.cumsum([0, *lengths])
    inner = strange(draw, int(offsets[-1]), depth - 1)
    if draw.randrange(3) == 0:
        return pa.LargeListArray.from_arrays(pa.array(offsets, pa.int64()), inner)
    if draw.randrange(3) == 0:
        return pa.FixedSizeListArray.from_arrays(strange(draw, 2 * rows, depth - 1), 2)
    return pa.ListArray.from_arrays(pa.array(offsets, pa.int32()), inner)


def _struct(draw: random.Random, rows: int, depth: int) -> pa.Array:
    width = draw.choice((1, 2, 5))
    names = [draw.choice(NAMES) for _ in range(width)]
    return pa.StructArray.from_arrays([strange(draw, rows, depth - 1) for _ in range(width)], names)


def _map(draw: random.Random, rows: int, depth: int) -> pa.Array:
    keys = pa.array([draw.choice(("a", "text", "")) for _ in range(rows)])
    return pa.MapArray.from_arrays(pa.array(range(rows + 1), pa.int32()), keys, strange(draw, rows, depth - 1))


def _coded(draw: random.Random, rows: int, depth: int) -> pa.Array:
    texts = pa.array(["a text", "", "another " * 50, None])
    numbers = pa.array([draw.choice((0, 1, 2, 3, None)) for _ in range(rows)], draw.choice((pa.int8(), pa.uint16())))
    return pa.DictionaryArray.from_arrays(numbers, texts)


def _runs(draw: random.Random, rows: int, depth: int) -> pa.Array:
    if not rows:
        return _plain(draw, rows, depth)
    return pa.RunEndEncodedArray.from_arrays(pa.array([rows], pa.int32()), pa.array(["a text"]))


def _union(draw: random.Random, rows: int, depth: int) -> pa.Array:
    kinds = pa.array([draw.randrange(2) for _ in range(rows)], pa.int8())
    return pa.UnionArray.from_sparse(kinds, [strange(draw, rows, depth - 1), strange(draw, rows, depth - 1)])


SHAPES: tuple[Drawn, ...] = (_plain, _plain, _plain, _list, _struct, _map, _coded, _runs, _union)


def strange(draw: random.Random, rows: int, depth: int) -> pa.Array:
    """An array of a type that was drawn; plain ones only at depth 0."""
    return (draw.choice(SHAPES) if depth > 0 else _plain)(draw, rows, depth)


def strange_table(number: int) -> pa.Table:
    """Table number `number`."""
    draw = random.Random(f"table {number}")
    rows, width = draw.choice(ROWS), draw.choice((0, 1, 2, 3, 8, 40, 2000))
    depth = draw.choice((0, 1, 2, 4)) if width <= 40 else 0
    columns = [strange(draw, min(rows, 40) if width > 40 else rows, depth) for _ in range(width)]
    names = [draw.choice(NAMES) if draw.randrange(3) else f"c{place}" for place in range(width)]
    table = pa.Table.from_arrays(columns, names=names)
    return table.replace_schema_metadata({"huggingface": draw.choice(("{", "[" * 9999, "\xff", "x" * 10**6, "{}"))})


def _written(path: Path, number: int, write: Callable[[pa.Table], object]) -> None:
    """Without the columns that the format has no form for."""
    table = strange_table(number)
    try:
        write(table)
    except (pa.ArrowException, OSError):
        kept = []
        for place in range(table.num_columns):
            try:
                write(table.select([place]))
                kept.append(place)
            except (pa.ArrowException, OSError):
                continue
        try:
            write(table.select(kept))
        except (pa.ArrowException, OSError):  # columns of one name
            write(pa.table({"text": ["a text"]}))


def strange_parquet(path: Path, number: int) -> None:
    _written(path, number, lambda table: pq.write_table(table, path, row_group_size=16))


def strange_arrow(path: Path, number: int) -> None:
    new = pa.ipc.new_stream if number % 2 else pa.ipc.new_file

    def write(table: pa.Table) -> None:
        with pa.OSFile(str(path), "wb") as file, new(file, table.schema) as out:
            out.write_table(table, max_chunksize=16)

    _written(path, number, write)


def strange_value(draw: random.Random, depth: int) -> Any:
    """What JSON can say."""
    if depth and draw.randrange(2):
        if draw.randrange(2):
            return [strange_value(draw, depth - 1) for _ in range(draw.randrange(4))]
        return {draw.choice(NAMES): strange_value(draw, depth - 1) for _ in range(draw.randrange(4))}
    return draw.choice(
        (
            None,
            True,
            0,
            -1,
            2**70,
            1e308,
            float("nan"),
            float("inf"),
            "",
            "a text",
            "\ud800",
            "\x1b[2J",
            "x" * 9999,
            "user",
            "assistant",
            "system",
            "user\n\nassistant",
            "[[[",
        )
    )


def strange_jsonl(path: Path, number: int) -> None:
    draw = random.Random(f"rows {number}")
    with path.open("w", encoding="utf8") as file:
        for _ in range(30):
            how = draw.randrange(12)
            if how == 0:
                file.write(draw.choice(("[", '{"text":')) * draw.choice((10, 10**5)) + "\n")
            elif how == 1:
                file.write('{"text": ' + draw.choice(("9" * 10**5, "1e999", "-0", '"\\u0000"', '"\\ud800"')) + "}\n")
            elif how == 2:
                row = {"messages": [[{"role": strange_value(draw, 1), "content": strange_value(draw, 1)}]]}
                file.write(json.dumps(row) + "\n")
            elif how < 6:
                turns = [{"role": draw.choice(("user", "assistant", "system")), "content": "words"} for _ in range(4)]
                file.write(json.dumps({"text": "a text", "prompt": "a", "response": "b", "messages": turns}) + "\n")
            else:
                row = {name: strange_value(draw, 3) for name in ("text", "prompt", "response", "messages")}
                file.write(json.dumps(row) + "\n")


def bomb(path: Path, number: int) -> None:
    """Some hundred kB that unpack to a GiB where that is one line, and to 4 MiB of short lines."""
    draw = random.Random(f"bomb {number}")
    unit = draw.choice((b"a", b"\0", b"[", b'"', b"\xff", b'{"text": "a"}\n', b"\n", b"a,b\n"))
    with gzip.open(path, "wb", 1) as file:
        file.write(draw.choice((b"", b'{"text": "', b'{"prompt": "a", "response": "b", "text": "c"}\n')))
        for _ in range(4 if b"\n" in unit else 1024):
            file.write(unit * (2**20 // len(unit)))


def wide_cells(path: Path, number: int) -> None:
    """A small Parquet file of cells that unpack to a lot: the same long text in every row."""
    draw = random.Random(f"cells {number}")
    long = draw.choice(("a", "word ", "你")) * draw.choice((10**5, 4 * 10**6))
    rows = draw.choice((3, 12))
    pq.write_table(pa.table({"text": [long] * rows, "prompt": ["a"] * rows}), path, compression="zstd")
