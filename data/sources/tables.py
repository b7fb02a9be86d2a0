"""How are the text columns of Parquet and Arrow files read in small pieces, and what is wrong with a broken one?

Parquet is read without `pre_buffer`: with it, the reader keeps every row group it has seen; and in batches of about
8 MiB, whatever the row groups. Local Arrow files are mapped, so their pages can be given back at any time; each batch is
validated before it is trusted, because a corrupt offset would otherwise be followed. A text over 16 MiB is a bad row and
is never turned into a Python string.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.parquet as pq

from data.packed.arrow_buffers import PackedBatches, packed_batches
from data.packed.parquet_pages import check_footer, check_group, check_groups
from data.sources.arrow_checks import checked, unfolded_bytes
from data.sources.files import Source
from data.sources.layouts import NUMBER, TABLE, TURNS, RowOf
from data.sources.places import Place
from formats import ARROW_STREAM, PARQUET
from settings.errors import UserError
from settings.fields import listed

ReportBadRow = Callable[[Place, str, str], None]
ARROW_ERRORS = (pa.ArrowException, OSError, UnicodeDecodeError, OverflowError)
LONGEST_TEXT_BYTES = 16 * 1024**2
LARGEST_CELL_BYTES = 4 * LONGEST_TEXT_BYTES  # of one with turns or tables, as Python objects
PARQUET_BATCH_BYTES = 8 * 1024**2
BUFFER, FAR_BUFFER = (
    1024**2,
    8 * 1024**2,
)  # read of a column at a time; from an address, where each reading takes its time
DELTA_ROWS = 8  # read at a time where a text may be told as "the one before, and so much more"
MOST_REPEATED, FEW_ROWS = 4, 256  # a batch of nothing but the longest value may be so much larger than others
PART_BYTES = 1024**2  # text turned into Python strings at a time


@contextmanager
def broken_file_is_user_error(path: Place, what: str) -> Iterator[None]:
    """Turn Arrow's complaints about a file into one sentence."""
    try:
        yield
    except ARROW_ERRORS as error:
        reason = " ".join(str(error).split())[:200]
        raise UserError(f"{path}: is cut off or broken, or not {what} ({reason}); write or fetch it again") from None


@contextmanager
def open_arrow(path: Place) -> Iterator[pa.NativeFile]:
    """Map a local file; open a remote one."""
    with pa.memory_map(str(path)) if isinstance(path, Path) else path.open() as file:
        yield file


@contextmanager
def open_parquet(path: Place, **options: Any) -> Iterator[pq.ParquetFile]:
    """Open a Parquet file so that nothing that was read stays; `options` as `pq.ParquetFile` takes them."""
    if isinstance(path, Path):
        with parquet_file(path, **options) as file:
            yield file
    else:
        check_footer(path)
        with path.open() as handle, pq.ParquetFile(handle, pre_buffer=False, buffer_size=FAR_BUFFER, **options) as file:
            yield file


def parquet_file(path: Place, **options: Any) -> pq.ParquetFile:
    """A file on this machine, of which a column's bytes are read a page at a time; without a buffer, all of a row group's."""
    assert isinstance(path, Path)
    check_footer(path)
    return pq.ParquetFile(path, pre_buffer=False, buffer_size=BUFFER, **options)


def _schema(source: Source) -> pa.Schema:
    with broken_file_is_user_error(source.path, source.kind):
        if source.kind == PARQUET:
            with open_parquet(source.path) as file:
                schema = file.schema_arrow
        else:
            with open_arrow(source.path) as file, packed_batches(source.path, source.kind == ARROW_STREAM):
                schema = (pa.ipc.open_stream(file) if source.kind == ARROW_STREAM else pa.ipc.open_file(file)).schema
        _ = schema.names  # which may be no UTF-8
        return schema


def table_columns(source: Source) -> list[str]:
    """List the columns of a Parquet or Arrow file."""
    return list(_schema(source).names)


def table_sample(source: Source) -> dict[str, Any]:
    """Column -> a cell such as its type allows, with the keys of tables; None where that is no cell of a row of text."""
    return {field.name: _cell_of(field.type) for field in _schema(source)}


def _cell_of(kind: pa.DataType) -> Any:
    if pa.types.is_struct(kind):
        return {kind.field(place).name: _cell_of(kind.field(place).type) for place in range(kind.num_fields)}
    return (
        [] if _is_list(kind) else "" if _is_text(kind) else {} if _is_table(kind) else 0 if _is_number(kind) else None
    )


def table_rows(
    source: Source, columns: Sequence[str], row_of: RowOf, batch_rows: int, report_bad_row: ReportBadRow
) -> Iterator[list[tuple[str, ...]]]:
    """Read rows in batches.

    Args:
        source: a Parquet or Arrow file that has these columns, each once, of types that `check_types` allows.
        row_of: makes a row of a record; raises ValueError for a bad one.
        batch_rows: most rows of one batch.
        report_bad_row: called with file, place and problem for a null or a text that is not UTF-8.
    Raises:
        UserError: the file is broken.
    """
    first = 1
    with broken_file_is_user_error(source.path, source.kind):
        for batch in record_batches(source, columns, batch_rows):
            for part in parts(batch):
                cells = [_cells(column) for column in part.columns]
                rows = []
                for offset, row in enumerate(zip(*cells, strict=True)):
                    try:
                        rows.append(row_of(dict(zip(columns, row, strict=True))))
                    except ValueError as error:
                        report_bad_row(source.path, f"row {first + offset}", str(error))
                first += part.num_rows
                if rows:
                    yield rows


def parts(batch: pa.RecordBatch) -> Iterator[pa.RecordBatch]:
    """Cut a batch so that a part holds about 1 MiB of text, or one row; a text that rows share counts in each."""
    if batch.num_rows <= 1 or sum(map(unfolded_bytes, batch.columns)) <= PART_BYTES:
        yield batch
    else:
        half = batch.num_rows // 2
        yield from parts(batch.slice(0, half))
        yield from parts(batch.slice(half))


def check_types(source: Source, kinds: Mapping[str, set[str]]) -> None:
    """Refuse columns that hold something else than they may.

    Args:
        kinds: column -> what its cells may hold besides text, as `Columns.kinds` tells.
    Raises:
        UserError: all of them at once.
    """
    schema = _schema(source)
    problems = [
        f"{source.path}: column {name} holds {listed([kind])}, not text; name a text column"
        for name, may in kinds.items()
        if not _is_text(kind := schema.field(name).type)
        and not (TURNS in may and (_is_list(kind) or pa.types.is_struct(kind)))
        and not (TABLE in may and _is_table(kind))
        and not (NUMBER in may and _is_number(kind))
    ]
    if problems:
        raise UserError(*problems)


def _is_text(kind: pa.DataType) -> bool:
    if pa.types.is_dictionary(kind):
        return _is_text(kind.value_type)
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_string_view, pa.types.is_null)
    return any(test(kind) for test in tests)


def _is_list(kind: pa.DataType) -> bool:
    return bool(pa.types.is_list(kind) or pa.types.is_large_list(kind))


def _is_table(kind: pa.DataType) -> bool:
    return bool(pa.types.is_struct(kind) or pa.types.is_map(kind))


def _is_number(kind: pa.DataType) -> bool:
    tests = (pa.types.is_integer, pa.types.is_floating, pa.types.is_boolean, pa.types.is_decimal)
    return any(test(kind) for test in tests)


def record_batches(source: Source, columns: Sequence[str], batch_rows: int) -> Iterator[pa.RecordBatch]:
    """Columns of a Parquet or Arrow file as they are, in batches of at most `batch_rows`."""
    if source.kind == PARQUET:
        with open_parquet(source.path) as file:
            rows = parquet_batch_rows(source.path, file, columns, batch_rows)
            for batch in file.iter_batches(batch_size=rows, columns=list(columns), use_threads=False):
                yield batch.select(list(columns))  # in our order, not in the file's
        return
    with open_arrow(source.path) as file, packed_batches(source.path, source.kind == ARROW_STREAM) as packed:
        for batch in _ipc_batches(file, packed, source.kind):
            picked = checked(batch, columns)
            for start in range(0, picked.num_rows, batch_rows):
                yield picked.slice(start, batch_rows)


def some_batches(source: Source, columns: Sequence[str], count: int, rows: int) -> Iterator[pa.RecordBatch]:
    """The first rows of row groups or batches that are evenly spread over a Parquet or Arrow file, of all where there are few.

    Args:
        count: groups or batches at most. rows: of each at most.
    Raises:
        UserError: the file is broken.
    """
    with broken_file_is_user_error(source.path, source.kind):
        if source.kind == PARQUET:
            with open_parquet(source.path) as file:
                for number in _spread(file.metadata.num_row_groups, count):
                    most = parquet_batch_rows(source.path, file, columns, rows, group=number)
                    wanted = {"row_groups": [number], "columns": list(columns), "use_threads": False}
                    yield from (batch.select(list(columns)) for batch in islice(file.iter_batches(most, **wanted), 1))
            return
        with open_arrow(source.path) as handle, packed_batches(source.path, is_stream=False) as packed:
            reader = pa.ipc.open_file(handle)
            for number in _spread(reader.num_record_batches, count):
                packed.check(number)
                yield checked(reader.get_batch(number), columns).slice(0, rows)


def _spread(total: int, count: int) -> list[int]:
    return sorted({at * total // count for at in range(count)}) if total else []


def parquet_batch_rows(
    path: Place, file: pq.ParquetFile, columns: Sequence[str], enough: int, most_bytes: int | None = None,
    group: int | None = None,
) -> int:  # fmt: skip
    """How many rows of the wanted columns, `enough` at most, make about `most_bytes`, or 8 MiB.

    Args:
        path: of the file. group: whose rows are meant; None: the group with the longest rows decides.
    Raises:
        OSError: the file is broken.
    """
    most, widest = most_bytes or PARQUET_BATCH_BYTES, 1.0
    if group is None and not isinstance(path, Path):
        check_groups(path, file, columns)
    for number in range(file.metadata.num_row_groups) if group is None else [group]:
        pages = check_group(path, file, number, columns).values()
        rows = max(1, min([file.metadata.row_group(number).num_rows, *(each.values for each in pages)]))
        size = sum(max(each.unpacked[0], each.in_lists) for each in pages)
        if size * min(enough, rows) > most:  # else every row may have all of it
            widest = max(widest, size / rows, sum(each.widest for each in pages))
            if most_bytes is None:
                widest = max(widest, _longest_repeated(path, file, number, columns) / MOST_REPEATED)
                widest = max(widest, most / DELTA_ROWS) if any(each.in_delta for each in pages) else widest
    return max(1, min(enough, int(most / widest)))


def unpacks_to(path: Place, file: pq.ParquetFile, number: int, columns: Sequence[str], most: int) -> bool:
    """Whether a group's texts, each in its row, make at most `most` bytes. Memory: the group's dictionaries."""
    size = 0
    if _in_delta(path, file, number, columns):
        for batch in file.iter_batches(
            batch_size=DELTA_ROWS, row_groups=[number], columns=list(columns), use_threads=False
        ):
            size += batch.nbytes
            if size > most:
                return False
        return True
    if file.metadata.row_group(number).num_rows * _longest_repeated(path, file, number, columns) <= most:
        return True
    for batch in _coded(path, file, number, columns):
        for array in (array for column in batch.columns for array in _dictionaries(column)):
            lengths = pc.binary_length(array.dictionary).fill_null(0)
            size += pc.sum(pc.take(lengths, array.indices)).as_py() or 0
        if size > most:
            return False
    return True


def _in_delta(path: Place, file: pq.ParquetFile, number: int, columns: Sequence[str]) -> list[str]:
    """The leaves of some columns of a group in which a text begins with what the one before has told, in a few bytes; and
    those whose lengths alone lie so. pyarrow knows no codes for either."""
    return [leaf for leaf, pages in check_group(path, file, number, columns).items() if pages.in_delta]


def _longest_repeated(path: Place, file: pq.ParquetFile, number: int, columns: Sequence[str]) -> int:
    """Bytes of the longest value that a group holds once and may have in any number of rows: a few hundred bytes of file
    can ask for any amount of memory. Memory: the group's dictionaries, as they lie in the file."""
    batch = next(_coded(path, file, number, columns), None)
    arrays = [] if batch is None else [array for column in batch.columns for array in _dictionaries(column)]
    return max((pc.max(pc.binary_length(array.dictionary)).as_py() or 0 for array in arrays), default=0)


def _coded(path: Place, file: pq.ParquetFile, number: int, columns: Sequence[str]) -> Iterator[pa.RecordBatch]:
    """Rows of a group, texts as codes where they lie so."""
    leaves = [file.metadata.schema.column(place) for place in range(len(file.metadata.schema))]
    delta = _in_delta(path, file, number, columns)
    wanted_leaves = [leaf for leaf in leaves if leaf.path.split(".")[0] in columns and leaf.path not in delta]
    texts = [leaf.path for leaf in wanted_leaves if leaf.physical_type == "BYTE_ARRAY"]
    with open_parquet(path, metadata=file.metadata, read_dictionary=texts) as coded:
        wanted = {"row_groups": [number], "columns": list(columns), "use_threads": False}
        yield from coded.iter_batches(batch_size=DELTA_ROWS if delta else FEW_ROWS, **wanted)


def _dictionaries(array: pa.Array) -> Iterator[pa.DictionaryArray]:
    """The texts in an array, at any depth, that lie in it as codes."""
    if pa.types.is_dictionary(array.type):
        if pa.types.is_string(array.dictionary.type) or pa.types.is_binary(array.dictionary.type):
            yield array
    elif pa.types.is_struct(array.type):
        for field in array.flatten():
            yield from _dictionaries(field)
    elif pa.types.is_list(array.type) or pa.types.is_large_list(array.type):
        yield from _dictionaries(array.flatten())


def _ipc_batches(file: pa.NativeFile, packed: PackedBatches, kind: str) -> Iterator[pa.RecordBatch]:
    if kind == ARROW_STREAM:
        packed.check_next()
        for batch in pa.ipc.open_stream(file):
            yield batch
            packed.check_next()
        return
    reader = pa.ipc.open_file(file)
    for number in range(reader.num_record_batches):
        packed.check(number)
        yield reader.get_batch(number)


Cell = object  # what a reader found wrong with one stands in its place, a ValueError


def _too_long() -> ValueError:
    return ValueError(f"is longer than {LONGEST_TEXT_BYTES // 1024**2} MiB")


def _cells(column: pa.Array) -> Sequence[Cell]:
    """Cells as Python knows them."""
    kind = column.type
    if _is_text(kind):
        return _texts(column)
    if pa.types.is_floating(kind):  # 3.8 stays 3.8, however few bits it has
        return list(column.cast(pa.string()).cast(pa.float64()).to_pylist())
    if _is_number(kind):
        return list(column.to_pylist())
    return [_nested(column.slice(place, 1)) for place in range(len(column))]


def _nested(column: pa.Array) -> Cell:
    """The one cell of a column with turns or tables."""
    try:
        return _too_long() if unfolded_bytes(column) > LARGEST_CELL_BYTES else column[0].as_py()
    except ValueError as error:
        return error


def _texts(column: pa.Array) -> Sequence[Cell]:
    """Cells as strings; None for a null."""
    if column.nbytes > LONGEST_TEXT_BYTES:
        if len(column) > 1:
            return [cell for place in range(len(column)) for cell in _texts(column.slice(place, 1))]
        values = column.dictionary_decode() if pa.types.is_dictionary(column.type) else column
        if (pc.binary_length(values.cast(pa.large_binary()))[0].as_py() or 0) > LONGEST_TEXT_BYTES:
            return [_too_long()]
    try:
        return list(column.to_pylist())
    except UnicodeDecodeError:
        if pa.types.is_dictionary(column.type):
            column = column.dictionary_decode()
        return [_decoded(cell) for cell in column.cast(pa.large_binary()).to_pylist()]


def _decoded(cell: bytes | None) -> Cell:
    try:
        return None if cell is None else cell.decode("utf8")
    except UnicodeDecodeError:
        return ValueError("is not UTF-8")
