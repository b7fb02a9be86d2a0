"""Files of vectors: parts in Arrow's format while texts are read, and npz, Parquet or HDF5 in the end."""

from __future__ import annotations

import zipfile
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
from numpy.typing import NDArray

from settings.errors import UserError
from support.language import say

ID = "id"
VECTOR = "vector"
VECTORS = "vectors"
IDS = "ids"
Vectors = NDArray[np.float32]  # (D,) of a text, or (tokens, D)
Row = tuple[str, Vectors]
Write = Callable[[Path, Sequence[Path], int], None]


def writer_for(path: Path) -> Write:
    """What makes a file of the parts that it is given and of how many rows they have; by the file's ending.

    Memory: one part; of tokens, also the ids of all texts.
    Raises:
        UserError: there is no such format, or its package is missing.
    """
    writers: dict[str, Write] = {
        ".npz": _write_npz,
        ".parquet": _write_parquet,
        ".h5": _write_hdf5,
        ".hdf5": _write_hdf5,
    }
    write = writers.get(path.suffix.lower())
    if write is None:
        raise UserError(
            say("--output = {path}, vectors are written to .npz, .parquet, .h5 or .hdf5; end it so", path=path)
        )
    if write is _write_hdf5:
        _hdf5()
    return write


def write_part(path: Path, rows: Sequence[Row]) -> None:
    """Write rows as one record batch: columns `id` and `vector`, or `vectors`: a list of one for each token."""
    first = rows[0][1]
    numbers = np.concatenate([vectors.ravel() for _, vectors in rows])
    # `pa.array` would import pandas where it is installed, which takes 30 MiB.
    values = pa.Array.from_buffers(pa.float32(), len(numbers), [None, pa.py_buffer(numbers)])
    lists = pa.ListArray.from_arrays(pa.array(range(0, len(numbers) + 1, first.shape[-1]), pa.int32()), values)
    if first.ndim == 2:
        tokens = np.cumsum([0, *(len(vectors) for _, vectors in rows)])
        lists = pa.ListArray.from_arrays(pa.array(tokens.tolist(), pa.int32()), lists)
    names = pa.array([name for name, _ in rows], pa.string())
    batch = pa.record_batch({ID: names, VECTOR if first.ndim == 1 else VECTORS: lists})
    with pa.ipc.new_file(str(path), batch.schema) as file:
        file.write_batch(batch)


def _batches(parts: Iterable[Path]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        with pa.memory_map(str(part)) as source, pa.ipc.open_file(source) as file:
            yield file.get_batch(0)


def _rows(parts: Iterable[Path]) -> Iterator[Row]:
    for batch in _batches(parts):
        is_per_token = batch.schema.names[1] == VECTORS
        for name, cell in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
            numbers: Any = np.from_dlpack(cell.values.flatten() if is_per_token else cell.values)
            yield name, numbers.reshape(len(cell), -1) if is_per_token else numbers


def _write_parquet(path: Path, parts: Sequence[Path], count: int) -> None:
    """Columns `id` and `vector`, or `vectors`: a list of one for each token."""
    schema = next(_batches(parts)).schema
    with pq.ParquetWriter(path, schema) as file:
        for batch in _batches(parts):
            file.write_batch(batch)


def _write_npz(path: Path, parts: Sequence[Path], count: int) -> None:
    """Arrays `ids` and `vectors` (texts, D); or of tokens an array (tokens, D) for each text, named by its id."""
    _, first = next(_rows(parts))
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
        if first.ndim == 2:
            for name, vectors in _named(parts):
                _entry(file, name, vectors.shape, "<f4", [vectors])
            return
        letters = f"<U{max(len(name) for name, _ in _rows(parts))}"
        _entry(file, IDS, (count,), letters, (np.array([name], letters) for name, _ in _rows(parts)))
        _entry(file, VECTORS, (count, len(first)), "<f4", (vectors for _, vectors in _rows(parts)))


def _entry(file: zipfile.ZipFile, name: str, shape: tuple[int, ...], kind: str, pieces: Iterable[NDArray[Any]]) -> None:
    with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
        header = {"descr": kind, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(entry, header)  # type: ignore[arg-type]
        for piece in pieces:
            entry.write(np.ascontiguousarray(piece).tobytes())


def _write_hdf5(path: Path, parts: Sequence[Path], count: int) -> None:
    """The same as in npz."""
    _, first = next(_rows(parts))
    h5 = _hdf5()
    with h5.File(path, "w") as file:
        if first.ndim == 2:
            for name, vectors in _named(parts, "/."):
                file.create_dataset(name, data=vectors)
            return
        ids = file.create_dataset(IDS, (count,), h5.string_dtype())
        rows = file.create_dataset(VECTORS, (count, len(first)), "f4")
        for number, (name, vectors) in enumerate(_rows(parts)):
            ids[number] = name
            rows[number] = vectors


def _named(parts: Sequence[Path], forbidden: str = "") -> Iterator[Row]:
    """Rows whose ids differ: those that repeat one are called id#2, id#3 and so on, as no other id is.

    Args:
        forbidden: letters that no name may have, which become an underscore.
    """
    allowed = str.maketrans(dict.fromkeys(forbidden, "_"))
    unused = {name.translate(allowed) for name, _ in _rows(parts)}  # No row has taken these ids yet.
    names = set[str]()
    numbers: dict[str, int] = {}
    for row_id, vectors in _rows(parts):
        plain = row_id.translate(allowed)
        name = plain
        while name in names or (name != plain and name in unused):
            numbers[plain] = numbers.get(plain, 1) + 1
            name = f"{plain}#{numbers[plain]}"
        unused.discard(name)
        names.add(name)
        yield name, vectors


def _hdf5() -> Any:
    try:
        import h5py  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise UserError(
            "--output, HDF5 needs the package h5py; install it with pip install h5py, or write .npz or .parquet"
        ) from None
    return h5py
