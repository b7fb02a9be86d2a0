"""`embed`: vectors of texts, the encoder's last hidden states. Their mean over a text, or one for each token.

Texts stream through in parts of a few MiB. Each part is on the disk before the next begins, so that an interrupted command goes on
behind the last one; the vectors depend neither on that nor on which texts share a batch of one part with them. When all are there,
the parts become one file.
"""

from __future__ import annotations

import hashlib
import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from commands.answering import check_one_process, refuse_several_adapters
from commands.generate import STANDARD_INPUT, UNFINISHED, check_input, prompts_of, read_marks
from commands.new_folder import check_output, holding_output
from commands.text_reader import ROUNDED, TextReader, text_columns, text_settings
from data.batches.collate import LabelledRow, collate_labels
from data.prepare.encode import TextEncoder, unknown_warning
from data.sources.lines import BadRows
from data.sources.prompts import Prompt
from engine.step import to_micro_batch
from language import say
from memory.answers import AnswerBatch, HeldModel
from memory.monitor import watched
from settings.declared import Config
from settings.errors import UserError
from settings.fields import counted
from storage import OtherParts, Parts, atomic_file, fingerprint, remove, writing
from training.loaded_model import LoadedModel, load_model
from training.report.progress import Progress
from training.saved_model import SavedModel, find_model
from units import MIB

FORMAT = 2  # raise it when the same texts would give other vectors
PART_ROWS = 256  # a part of texts ends with this one, or with
PART_TEXT_BYTES = 1 * MIB  # of texts, or
PART_BYTES = 4 * MIB  # of vectors
VECTOR_COPIES = 3  # of a part: as computed, joined, and as a file is made of it
LONGEST_ID = 256  # letters
LOOKED_AT = 16  # texts in which unknown tokens are counted
ID, VECTOR, VECTORS, IDS = "id", "vector", "vectors", "ids"
Vectors = NDArray[np.float32]  # (D,) of a text, or (tokens, D)
Row = tuple[str, Vectors]
Tokens = tuple[list[int], slice | NDArray[np.int64]]  # ids with end of text, and which of them are the text's own


@holding_output
def embed(config: Config) -> None:
    """Write the vectors of texts to a file, or show them.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold the longest text.
    """
    check_one_process("embed")
    given = config.answer.input
    if given is None:
        raise UserError(say('--input = none, texts are needed; give a text (--input="Hello") or a file of them'))
    model = find_model(config)
    refuse_several_adapters(model)
    bad_rows = BadRows(config.data.skip_bad_rows)
    config = config.with_saved(text_settings(model, "text_column"))
    columns = text_columns(config, model)
    is_of_files = check_input(given)
    output = None if config.answer.output is None else VectorFile(config, model, given)
    if output is not None and output.rows:
        told = "{file}: {rows} already done; continuing after them"
        Progress(1).note(say(told, file=output.path, rows=counted(output.rows, "row")))
    trained = load_model(config, model, AnswerBatch(1, config.data.max_seq_len, 1), reads_files=is_of_files)
    embedder = Embedder.of(trained, config)
    max_bytes = trained.reserve_reading(embedder.predict(ROUNDED)) if is_of_files else 0
    ids = ShortIds()
    texts = _texts(prompts_of(columns, given, bad_rows, max_bytes, (ID,)), ids)
    is_first = True
    try:
        with watched(trained.monitor, "--eval_batch_size_per_gpu=1"):
            for number, part in enumerate(_parts(texts, embedder)):
                if output is not None and number in output.parts:
                    continue
                unk_id = trained.tokenizer.unk_id
                if is_first and unk_id is not None:
                    tokens = [token for _, text in part[:LOOKED_AT] for token in embedder.tokens(text)[0]]
                    if warning := unknown_warning(tokens.count(unk_id), len(tokens)):
                        Progress(1, stream=sys.stderr).warn(warning)
                is_first = False
                rows = list(zip((name for name, _ in part), embedder(text for _, text in part), strict=True))
                if output is None:
                    for name, vectors in rows:
                        print(json.dumps({ID: name, embedder.name: vectors.tolist()}, ensure_ascii=False), flush=True)
                else:
                    output.add(number, rows)
            if output is not None:
                output.finish()
                Progress(1).note(say("{file}: vectors of {rows}", file=output.path, rows=counted(output.rows, "row")))
    except KeyboardInterrupt:
        if output is None:
            raise
        told = "interrupted; the same command continues after {rows}"
        raise KeyboardInterrupt(say(told, rows=counted(output.rows, "row"))) from None
    if ids.count:
        told = "{ids} of over {most} letters: their beginning, and a digest behind it, such as {example}"
        Progress(1, stream=sys.stderr).note(
            say(told, ids=counted(ids.count, "id"), most=LONGEST_ID, example=ids.example)
        )
    if bad_rows.count:
        told = "left out: {rows}, such as {example}"
        Progress(1, stream=sys.stderr).note(
            say(told, rows=counted(bad_rows.count, "row"), example=bad_rows.examples[0])
        )


@dataclass
class ShortIds:
    """Makes long ids short: an array of ids gives every one the room of the longest, and a member of an archive has no longer name.

    Args:
        count: ids that were shortened. example: the first of them, as it is now.
    """

    count: int = 0
    example: str = ""

    def of(self, name: str) -> str:
        """An id, or the beginning of a long one and a digest of all of it, which differs for ids that begin alike."""
        if len(name) <= LONGEST_ID:
            return name
        short = f"{name[: LONGEST_ID - 33]}~{hashlib.sha256(name.encode()).hexdigest()[:32]}"
        self.count += 1
        self.example = self.example or short
        return short


def _texts(prompts: Iterator[Prompt], ids: ShortIds) -> Iterator[tuple[str, str]]:
    """The id of each text, or its number, and the text; blank ones are left out."""
    for number, prompt in enumerate(prompts):
        if prompt.text.strip():
            given_id = prompt.columns.get(ID)
            yield ids.of(str(number if given_id in (None, "") else given_id)), prompt.text


def _parts(texts: Iterator[tuple[str, str]], embedder: Embedder) -> Iterator[list[tuple[str, str]]]:
    """Texts in parts that depend on the texts and the model alone: so many, or fewer of large ones."""
    part = list[tuple[str, str]]()
    text_bytes = vector_bytes = 0
    for name, text in texts:
        part.append((name, text))
        text_bytes += sys.getsizeof(text)
        vector_bytes += 4 * embedder.width * (min(len(text), embedder.longest) if embedder.per_token else 1)
        if len(part) == PART_ROWS or text_bytes >= PART_TEXT_BYTES or vector_bytes >= PART_BYTES:
            yield part
            part = []
            text_bytes = vector_bytes = 0
    if part:
        yield part


@dataclass
class Embedder(TextReader):
    """Vectors of texts.

    Args:
        per_token: one vector for each token, not one for each text.
    """

    per_token: bool = False

    @classmethod
    def of(cls, trained: LoadedModel, config: Config) -> Embedder:
        """By the settings."""
        asked = config.train.eval_batch_size_per_gpu
        return cls(
            trained,
            TextEncoder(trained.tokenizer, config.data.prepare_text),
            config.data.max_seq_len,
            rows=asked if isinstance(asked, int) else None,
            per_token=config.embed.vectors == "token",
        )

    @property
    def width(self) -> int:
        """Numbers of a vector."""
        return self.trained.blockwise.model.config.d_model

    @property
    def name(self) -> str:
        """What the vectors of a row are called."""
        return VECTORS if self.per_token else VECTOR

    def __call__(self, texts: Iterator[str]) -> list[Vectors]:
        """The vectors of texts, in their order; end of text and prefixes have none.

        Raises:
            DoesNotFit: the budget does not hold a text.
        """
        return self.vectors([self.tokens(text) for text in texts])

    def tokens(self, text: str) -> Tokens:
        """Ids of a text with end of text, and which of them are its own: those of a protein's letters, else all but the last."""
        eos = self.trained.tokenizer.eos_id
        if self.encoder.prepare == "none":
            ids = self.encoder.beginning(text, self.longest - 1)
            return [*ids.tolist(), eos], slice(0, max(1, len(ids)))
        ids, places = self.encoder.with_places(text)
        ids = ids[: self.longest - 1]
        return [*ids.tolist(), eos], places[(places >= 0) & (places < len(ids))]

    def vectors(self, rows: Sequence[Tokens]) -> list[Vectors]:
        """The vectors of rows of ids, in their order; see `tokens`."""

        def vectors(numbers: list[int]) -> Iterator[Vectors]:
            hidden = self._hidden([rows[number][0] for number in numbers])
            for number, states in zip(numbers, hidden, strict=True):
                own = rows[number][1]
                states = states[own if isinstance(own, slice) else torch.from_numpy(own).to(states.device)].float()
                yield (states if self.per_token else states.mean(0)).cpu().numpy()

        return self.in_batches([len(ids) for ids, _ in rows], vectors)

    def _hidden(self, rows: list[list[int]]) -> Sequence[torch.Tensor]:
        blockwise, device = self.trained.blockwise, self.trained.device.torch_device
        shape = blockwise.model.config
        unlabelled = np.zeros(1, np.int64)
        batch = collate_labels(
            [LabelledRow(np.array(ids, np.int64), unlabelled, 0) for ids in rows], shape.pad_token_id
        )
        (output,) = blockwise.encode([to_micro_batch(batch, shape, device)])
        return output.split([len(ids) for ids in rows])

    def _held(self, longest: int) -> HeldModel:
        """The model beside the vectors of a part, which wait until it is written, where each token has one."""
        held = super()._held(longest)
        if not self.per_token or self.trained.budget.is_on_device:
            return held
        return replace(held, base_bytes=held.base_bytes + VECTOR_COPIES * (PART_BYTES + 4 * self.width * longest))


class VectorFile:
    """Vectors on their way to a file, in parts beside it until all are there; a second run continues behind them.

    Args:
        given: what is read.
    Raises:
        UserError: it is no file of vectors, is complete, was begun with other settings, or cannot be written.
    """

    def __init__(self, config: Config, model: SavedModel, given: str) -> None:
        self.path = Path(str(config.answer.output))
        self.folder = self.path.with_name(self.path.name + UNFINISHED)
        self._write = _WRITERS.get(self.path.suffix.lower())
        if self._write is None:
            raise UserError(
                say("--output = {path}, vectors are written to .npz, .parquet, .h5 or .hdf5; end it so", path=self.path)
            )
        if self._write is _write_hdf5:
            _hdf5()
        check_output(self.path, config.run.overwrite)
        identity = _identity(config, model, given)
        with writing("output", self.folder):
            if config.run.overwrite:
                remove(self.folder)
            try:
                self.parts = Parts(self.folder, identity, ".arrow")
            except OtherParts:
                told = "--output = {path}, was begun with another model, input or settings; choose another file, or begin anew with --overwrite=True"
                raise UserError(say(told, path=self.path)) from None
        self._shape = (-1, model.shape.d_model) if config.embed.vectors == "token" else (-1,)

    @property
    def rows(self) -> int:
        """Texts whose vectors are on the disk."""
        return sum(self.parts.facts(part) for part in self.parts)

    def add(self, part: int, rows: Sequence[Row]) -> None:
        """Write a part, to the disk."""
        offsets = np.cumsum([0, *(vectors.size for _, vectors in rows)])
        numbers = _as_arrow(np.concatenate([vectors.ravel() for _, vectors in rows]))
        lists = pa.LargeListArray.from_arrays(pa.array(offsets.tolist(), pa.int64()), numbers)
        batch = pa.record_batch({ID: pa.array([name for name, _ in rows], pa.string()), VECTORS: lists})
        with (
            writing("output", self.folder),
            self.parts.write(part, len(rows)) as path,
            pa.ipc.new_file(str(path), batch.schema) as file,
        ):
            file.write_batch(batch)

    def finish(self) -> None:
        """Make the file of its parts. Memory: one part; of tokens, also the ids of all texts."""
        if not self.rows:
            raise UserError(say("--output = {path}, there are no texts to write vectors of", path=self.path))
        assert self._write is not None
        with writing("output", self.path.parent), atomic_file(self.path) as temporary:
            self._write(temporary, self._rows)
        self.parts.remove()

    def _rows(self) -> Iterator[Row]:
        for part in self.parts:
            yield from self._rows_of(part)

    def _rows_of(self, part: int) -> Iterator[Row]:
        with pa.memory_map(str(self.parts.path(part))) as source, pa.ipc.open_file(source) as file:
            for number in range(file.num_record_batches):
                batch = file.get_batch(number)
                for name, vectors in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
                    numbers: Any = np.from_dlpack(vectors.values)
                    yield name, numbers.reshape(self._shape)


def _as_arrow(numbers: Vectors) -> pa.Array:
    """An arrow array of numbers in a row. `pa.array` would import pandas where it is installed: 30 MiB."""
    return pa.Array.from_buffers(pa.float32(), len(numbers), [None, pa.py_buffer(numbers)])


Again = Callable[[], Iterator[Row]]  # all rows from the first


def _write_parquet(path: Path, rows: Again) -> None:
    """Columns `id` and `vector`, or `vectors`: a list of one for each token."""
    _, first = next(rows())
    kind = pa.list_(pa.float32()) if first.ndim == 1 else pa.list_(pa.list_(pa.float32()))
    schema = pa.schema([(ID, pa.string()), (VECTOR if first.ndim == 1 else VECTORS, kind)])
    with pq.ParquetWriter(path, schema) as file:
        for group in _groups(rows()):
            flat = np.concatenate([vectors.ravel() for _, vectors in group])
            begins = pa.array(range(0, len(flat) + 1, first.shape[-1]), pa.int32())
            lists = pa.ListArray.from_arrays(begins, _as_arrow(flat))
            if first.ndim == 2:
                tokens = np.cumsum([0, *(len(vectors) for _, vectors in group)])
                lists = pa.ListArray.from_arrays(pa.array(tokens.tolist(), pa.int32()), lists)
            file.write_batch(pa.record_batch([pa.array([name for name, _ in group]), lists], schema=schema))


def _groups(rows: Iterator[Row]) -> Iterator[list[Row]]:
    """Rows that are written together: as many as a part of the work has at most."""
    group, size = list[Row](), 0
    for name, vectors in rows:
        group.append((name, vectors))
        size += vectors.nbytes
        if len(group) == PART_ROWS or size >= PART_BYTES:
            yield group
            group, size = [], 0
    if group:
        yield group


def _write_npz(path: Path, rows: Again) -> None:
    """Arrays `ids` and `vectors` (texts, D); or of tokens an array (tokens, D) for each text, named by its id."""
    _, first = next(rows())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
        if first.ndim == 2:
            for name, vectors in _named(rows):
                _entry(file, name, vectors.shape, "<f4", iter([vectors]))
            return
        count, longest = 0, 1
        for name, _ in rows():
            count += 1
            longest = max(longest, len(name))
        letters = f"<U{longest}"
        _entry(file, IDS, (count,), letters, (np.array([name], letters) for name, _ in rows()))
        _entry(file, VECTORS, (count, len(first)), "<f4", (vectors for _, vectors in rows()))


def _entry(file: zipfile.ZipFile, name: str, shape: tuple[int, ...], kind: str, parts: Iterator[NDArray[Any]]) -> None:
    with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
        header = {"descr": kind, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(entry, header)  # type: ignore[arg-type]
        for part in parts:
            entry.write(np.ascontiguousarray(part).tobytes())


def _write_hdf5(path: Path, rows: Again) -> None:
    """The same as in npz."""
    _, first = next(rows())
    h5 = _hdf5()
    with h5.File(path, "w") as file:
        if first.ndim == 2:
            for name, vectors in _named(rows, "/."):
                file.create_dataset(name, data=vectors)
            return
        count = sum(1 for _ in rows())
        ids = file.create_dataset(IDS, (count,), h5.string_dtype())
        held = file.create_dataset(VECTORS, (count, len(first)), "f4")
        for number, (name, vectors) in enumerate(rows()):
            ids[number] = name
            held[number] = vectors


def _named(rows: Again, forbidden: str = "") -> Iterator[Row]:
    """Rows whose ids differ: those that repeat one are called id#2, id#3 and so on, as no other id is.

    Args:
        forbidden: letters that no name may have, which become an underscore.
    """
    allowed = str.maketrans(dict.fromkeys(forbidden, "_"))
    free = {name.translate(allowed) for name, _ in rows()}  # of ids that no row has taken yet
    taken = set[str]()
    numbers: dict[str, int] = {}
    for given, vectors in rows():
        name = given.translate(allowed)
        if name in free:
            free.remove(name)
            taken.add(name)
        else:
            number = numbers.get(name, 1) + 1
            while (numbered := f"{name}#{number}") in taken or numbered in free:
                number += 1
            numbers[name] = number
            taken.add(numbered)
            name = numbered
        yield name, vectors


def _hdf5() -> Any:
    try:
        import h5py  # type: ignore[import-not-found, import-untyped, unused-ignore]
    except ImportError:
        raise UserError(
            "--output, HDF5 needs the package h5py; install it with pip install h5py, or write .npz or .parquet"
        ) from None
    return h5py


_WRITERS: dict[str, Callable[[Path, Again], None]] = {
    ".npz": _write_npz, ".parquet": _write_parquet, ".h5": _write_hdf5, ".hdf5": _write_hdf5,
}  # fmt: skip


def _identity(config: Config, model: SavedModel, given: str) -> str:
    """Everything that shapes the vectors."""
    if given == STANDARD_INPUT:
        raise UserError(say("--input = -, standard input cannot be read again; write it to a file, or omit --output"))
    data = config.data
    settings = [data.text_column, data.max_seq_len, data.prepare_text, config.embed.vectors]
    return fingerprint([FORMAT, *read_marks(model, given), settings, config.memory.mixed_precision])
