"""`embed`: vectors of texts, the encoder's last hidden states. Their mean over a text, or one for each token.

Texts stream through in parts of a few MiB. Each part is on the disk before the next begins, so that an interrupted command goes on
behind the last one; the vectors depend neither on that nor on which texts share a batch of one part with them. When all are there,
the parts become one file.
"""

from __future__ import annotations

import json
import sys
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import torch
from numpy.typing import NDArray

from commands.generate import STANDARD_INPUT, UNFINISHED, prompts_of, read_marks
from commands.loading import Trained, check_one_process, find_answering, load_trained, watched
from commands.new_folder import check_output
from data.batches.collate import LabelledRow, collate_labels
from data.prepare.encode import TextEncoder, unknown_warning
from data.sources.lines import BadRows
from engine.step import to_micro_batch
from language import say
from memory.estimate.generation import Writing
from settings.consistency import SEQUENCE
from settings.declared import MOST_TOKENS, Config
from settings.errors import UserError
from settings.fields import AUTO, counted, read_settings_file
from storage import atomic_file, fingerprint, make_folder, read_text, remove, write_text, writing
from training.report.progress import Progress
from training.setup.model_folders import ModelFolders

FORMAT = 1  # raise it when the same texts would give other vectors
PART_ROWS, PART_BYTES = 256, 32 * 1024**2
MOST_ROWS, MOST_AT_ONCE = 64, 16_384  # rows and tokens at once
LOOKED_AT = 16  # texts in which unknown tokens are counted
ROUNDED = 64  # tokens, to which lengths are rounded where rows are planned
IDENTITY = "identity"
ID, VECTOR, VECTORS, IDS = "id", "vector", "vectors", "ids"
Vectors = NDArray[np.float32]  # (D,) of a text, or (tokens, D)
Row = tuple[str, Vectors]
Tokens = tuple[list[int], slice | NDArray[np.int64]]  # ids with end of text, and which of them are the text's own


def embed(config: Config) -> None:
    """Write the vectors of texts to a file, or show them.

    Raises:
        UserError: model, input or output are not usable. DoesNotFit: the budget does not hold the longest text.
    """
    check_one_process("embed")
    given = config.answer.input
    if given is None:
        raise UserError(say('--input = none, texts are needed; give a text (--input="Hello") or a file of them'))
    config, models = find_answering(config, searches=False, averages=False)
    config, bad_rows = with_preparation(config, models[0]), BadRows(config.data.skip_bad_rows)
    output = None if config.answer.output is None else VectorFile(config, models[0], given)
    texts = _texts(config, given, bad_rows)
    if output is not None and output.rows:
        told = "{file}: {rows} already done; continuing after them"
        Progress(1).note(say(told, file=output.path, rows=counted(output.rows, "row")))
    texts = islice(texts, 0 if output is None else output.rows, None)
    trained = load_trained(config, models, Writing(1, 1, 1))
    embedder = Embedder.of(trained, config)
    try:
        with watched(trained.monitor, "--eval_batch_size_per_gpu=1"):
            for number, part in enumerate(_parts(texts, embedder)):
                unk_id = trained.tokenizer.unk_id
                if not number and unk_id is not None:
                    ids = [token for _, text in part[:LOOKED_AT] for token in embedder.tokens(text)[0]]
                    if warning := unknown_warning(ids.count(unk_id), len(ids)):
                        Progress(1, stream=sys.stderr).warn(warning)
                rows = list(zip((name for name, _ in part), embedder(text for _, text in part), strict=True))
                if output is None:
                    for name, vectors in rows:
                        print(json.dumps({ID: name, embedder.name: vectors.tolist()}, ensure_ascii=False), flush=True)
                else:
                    output.add(rows)
            if output is not None:
                output.finish()
                Progress(1).note(say("{file}: vectors of {rows}", file=output.path, rows=counted(output.rows, "row")))
    except KeyboardInterrupt:
        if output is None:
            raise
        told = "interrupted; the same command continues after {rows}"
        raise KeyboardInterrupt(say(told, rows=counted(output.rows, "row"))) from None
    if bad_rows.count:
        told = "left out: {rows}, such as {example}"
        Progress(1, stream=sys.stderr).note(
            say(told, rows=counted(bad_rows.count, "row"), example=bad_rows.examples[0])
        )


def with_preparation(config: Config, model: ModelFolders) -> Config:
    """The settings with the preparation of texts that the model was trained with, where none is named, and without a cut that is not."""
    if config.origin("max_seq_len") is None:
        config = config.changed(max_seq_len=MOST_TOKENS)
    if config.given("prepare_text"):
        return config
    known = {} if model.run_settings is None else read_settings_file(model.run_settings)
    return config.changed(prepare_text=str(known.get("prepare_text", config.data.prepare_text)))


def _texts(config: Config, given: str, bad_rows: BadRows) -> Iterator[tuple[str, str]]:
    """The id of each text, or its number, and the text; blank ones are left out."""
    named = config.changed(prompt_column=config.data.text_column)
    for number, prompt in enumerate(prompts_of(named, given, bad_rows)):
        if prompt.text.strip():
            given_id = prompt.columns.get(ID)
            yield str(number if given_id in (None, "") else given_id), prompt.text


def _parts(texts: Iterator[tuple[str, str]], embedder: Embedder) -> Iterator[list[tuple[str, str]]]:
    """Texts in parts that depend on the texts alone."""
    part, size = list[tuple[str, str]](), 0
    for name, text in texts:
        part.append((name, text))
        size += 4 * embedder.width * (len(text) if embedder.per_token else 1)
        if len(part) == PART_ROWS or size >= PART_BYTES:
            yield part
            part, size = [], 0
    if part:
        yield part


@dataclass
class Embedder:
    """Vectors of texts, in batches of like length.

    Args:
        longest: most tokens of a text with end of text; longer ones are cut. per_token: one vector for each token, not one for each text.
        rows: most texts at once; None: what the budget holds.
    """

    trained: Trained
    encoder: TextEncoder
    longest: int
    per_token: bool = False
    rows: int | None = None

    @classmethod
    def of(cls, trained: Trained, config: Config) -> Embedder:
        """By the settings."""
        asked = config.train.eval_batch_size_per_gpu
        return cls(
            trained, TextEncoder(trained.tokenizer, config.data.prepare_text), config.data.max_seq_len,
            config.embed.vectors == "token", asked if isinstance(asked, int) else None,
        )  # fmt: skip

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
            ids = self.encoder.encode([text])[0][: self.longest - 1]
            return [*ids.tolist(), eos], slice(0, max(1, len(ids)))
        ids, places = self.encoder.with_places(text)
        ids = ids[: self.longest - 1]
        return [*ids.tolist(), eos], places[places < len(ids)]

    def vectors(self, rows: Sequence[Tokens]) -> list[Vectors]:
        """The vectors of rows of ids, in their order; see `tokens`."""
        order = sorted(range(len(rows)), key=lambda at: -len(rows[at][0]))
        found: list[Vectors] = [np.zeros(0, np.float32)] * len(rows)
        while order:
            count = self._at_once(len(rows[order[0]][0]), len(order))
            places, order = order[:count], order[count:]
            for place, hidden in zip(places, self._hidden([rows[place][0] for place in places]), strict=True):
                own = rows[place][1]
                kept = hidden[own if isinstance(own, slice) else torch.from_numpy(own).to(hidden.device)].float()
                found[place] = (kept if self.per_token else kept.mean(0)).cpu().numpy()
        return found

    def _hidden(self, rows: list[list[int]]) -> Sequence[torch.Tensor]:
        blockwise, device = self.trained.blockwise, self.trained.device.torch_device
        shape = replace(blockwise.model.config, head=SEQUENCE)  # whatever labels there are are not read
        unlabelled = np.zeros(1, np.int64)
        batch = collate_labels(
            [LabelledRow(np.array(ids, np.int64), unlabelled, 0) for ids in rows], shape.pad_token_id
        )
        (output,) = blockwise.encode([to_micro_batch(batch, shape, device)])
        return output.split([len(ids) for ids in rows])

    def _at_once(self, longest: int, left: int) -> int:
        """How many of the texts that are left fit, of which this is the longest."""
        longest, trained = -(-longest // ROUNDED) * ROUNDED, self.trained
        encoder = replace(trained.blockwise.model.config, num_decoder_layers=0, head="none")
        asked = AUTO if self.rows is None else min(self.rows, left)
        usual = min(left, max(1, min(MOST_ROWS, MOST_AT_ONCE // longest)))
        return trained.room.rows_of_loss(encoder, trained.first.weights, asked, (longest, 0), usual)


class VectorFile:
    """Vectors on their way to a file, in parts beside it until all are there; a second run continues behind them.

    Args:
        given: what is read.
    Raises:
        UserError: it is no file of vectors, is complete, was begun with other settings, or cannot be written.
    """

    def __init__(self, config: Config, model: ModelFolders, given: str) -> None:
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
        if config.run.overwrite:
            remove(self.folder)
        marker = self.folder / IDENTITY
        if marker.is_file() and read_text(marker).strip() != identity:
            raise UserError(
                say(
                    "--output = {path}, was begun with another model, input or settings; choose another file, or begin anew with --overwrite=True",
                    path=self.path,
                )
            )
        with writing("output", self.folder):
            make_folder(self.folder)
            if not marker.is_file():
                write_text(marker, identity + "\n")
        self._shape = (-1, model.shape.d_model) if config.embed.vectors == "token" else (-1,)
        self._parts = sorted(self.folder.glob("*.arrow"))
        self.rows = sum(batch.num_rows for batch in _batches(self._parts))

    def add(self, rows: Sequence[Row]) -> None:
        """Write a part, to the disk."""
        names, numbers = [name for name, _ in rows], [vectors.ravel() for _, vectors in rows]
        kind = pa.large_list(pa.float32())
        batch = pa.record_batch({ID: pa.array(names, pa.string()), VECTORS: pa.array(numbers, kind)})
        path = self.folder / f"{len(self._parts):08d}.arrow"
        with (
            writing("output", self.folder),
            atomic_file(path) as temporary,
            pa.ipc.new_file(str(temporary), batch.schema) as file,
        ):
            file.write_batch(batch)
        self._parts.append(path)
        self.rows += len(rows)

    def finish(self) -> None:
        """Make the file of its parts. Memory: one part."""
        if not self.rows:
            raise UserError(say("--output = {path}, there are no texts to write vectors of", path=self.path))
        assert self._write is not None
        with writing("output", self.path.parent), atomic_file(self.path) as temporary:
            self._write(temporary, self._rows)
        remove(self.folder)

    def _rows(self) -> Iterator[Row]:
        for batch in _batches(self._parts):
            for name, vectors in zip(batch.column(0).to_pylist(), batch.column(1), strict=True):
                yield name, vectors.values.to_numpy().reshape(self._shape)


def _batches(parts: Sequence[Path]) -> Iterator[pa.RecordBatch]:
    for part in parts:
        with pa.memory_map(str(part)) as source, pa.ipc.open_file(source) as file:
            for number in range(file.num_record_batches):
                yield file.get_batch(number)


Again = Callable[[], Iterator[Row]]  # all rows from the first


def _write_parquet(path: Path, rows: Again) -> None:
    """Columns `id` and `vector`, or `vectors`: a list of one for each token."""
    _, first = next(rows())
    kind = pa.list_(pa.float32()) if first.ndim == 1 else pa.list_(pa.list_(pa.float32()))
    schema = pa.schema([(ID, pa.string()), (VECTOR if first.ndim == 1 else VECTORS, kind)])
    coming = rows()
    with pq.ParquetWriter(path, schema) as file:
        while some := list(islice(coming, PART_ROWS if first.ndim == 1 else 16)):
            cells = [vectors.tolist() if vectors.ndim == 1 else list(vectors) for _, vectors in some]
            file.write_batch(pa.record_batch([[name for name, _ in some], pa.array(cells, kind)], schema=schema))


def _write_npz(path: Path, rows: Again) -> None:
    """Arrays `ids` and `vectors` (texts, D); or of tokens an array (tokens, D) for each text, named by its id."""
    _, first = next(rows())
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as file:
        if first.ndim == 2:
            for name, vectors in _named(rows()):
                _entry(file, name, vectors.shape, "<f4", iter([vectors]))
            return
        names = [name for name, _ in rows()]
        letters = f"<U{max(1, *map(len, names))}"
        _entry(file, IDS, (len(names),), letters, iter([np.array(names, letters)]))
        _entry(file, VECTORS, (len(names), len(first)), "<f4", (vectors for _, vectors in rows()))


def _entry(file: zipfile.ZipFile, name: str, shape: tuple[int, ...], kind: str, parts: Iterator[NDArray[Any]]) -> None:
    with file.open(zipfile.ZipInfo(f"{name}.npy"), "w", force_zip64=True) as entry:
        header = {"descr": kind, "fortran_order": False, "shape": shape}
        np.lib.format.write_array_header_1_0(entry, header)  # type: ignore[arg-type]
        for part in parts:
            entry.write(np.ascontiguousarray(part).tobytes())


def _write_hdf5(path: Path, rows: Again) -> None:
    """The same as in npz."""
    _, first = next(rows())
    with _hdf5().File(path, "w") as file:
        if first.ndim == 2:
            for name, vectors in _named((name.replace("/", "_"), vectors) for name, vectors in rows()):
                file.create_dataset(name, data=vectors)
            return
        names = [name for name, _ in rows()]
        file.create_dataset(IDS, data=names)
        held = file.create_dataset(VECTORS, (len(names), len(first)), "f4")
        for number, (_, vectors) in enumerate(rows()):
            held[number] = vectors


def _named(rows: Iterator[Row]) -> Iterator[Row]:
    """Rows whose ids differ: the second of the same id is called id#2."""
    seen: dict[str, int] = {}
    for name, vectors in rows:
        seen[name] = seen.get(name, 0) + 1
        yield name if seen[name] == 1 else f"{name}#{seen[name]}", vectors


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


def _identity(config: Config, model: ModelFolders, given: str) -> str:
    """Everything that shapes the vectors."""
    if given == STANDARD_INPUT:
        raise UserError(say("--input = -, standard input cannot be read again; write it to a file, or omit --output"))
    data = config.data
    settings = [data.text_column, data.max_seq_len, data.prepare_text, config.embed.vectors]
    return fingerprint([FORMAT, *read_marks([model], given), settings, config.memory.mixed_precision])
