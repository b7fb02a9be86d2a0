"""What do the batches of an Arrow file or stream unpack to? Each packed buffer begins with its length; nothing is unpacked.

A reader takes the memory that those lengths ask for, so they are read first: from the footer (of a file) or from one message to
the next (of a stream) to each batch's description, and from there to its buffers. Of what is not packed nothing is taken,
where the file is mapped.

Source: Arrow columnar format, "IPC Streaming Format", "IPC File Format", `Message.fbs`, `File.fbs`; FlatBuffers, "Internals".
"""

from __future__ import annotations

import io
import struct
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow as pa

from data.packed.flat_tables import Table, described_bytes, pairs_bytes, within
from data.packed.room import LEAST_ROOM, check_unpacked
from data.sources.places import Place

_HEADER_TYPE, _HEADER, _BODY_BYTES, _PAIRS = 1, 2, 3, 4  # fields of a Message
_BUFFERS, _COMPRESSION = 2, 3  # of a RecordBatch
_DICTIONARY, _DICTIONARY_DATA, _IS_MORE = 0, 1, 2  # of a DictionaryBatch
_SCHEMA, _DICTIONARIES, _BATCHES, _FOOTER_PAIRS = 1, 2, 3, 4  # of a Footer
SCHEMA, DICTIONARY, BATCH = 1, 2, 3  # types of a message
OLD_MARK = b"ARROW:experimental_compression"  # how the first versions said that a batch is packed
CONTINUED = 0xFFFFFFFF
MAGIC = b"ARROW1"
LONGEST_DESCRIPTION = 64 * 1024**2
FAR_BYTES = 64 * 1024  # of an address, read at once
TIMES = 2  # the batch before may still be there


class Message(NamedTuple):
    """One message.

    Args:
        kind: its type; -1: the end. unpacked: bytes that its buffers take. described: bytes of its description.
        end: where the next one begins. dictionary, is_more: which one it is, and whether it goes on behind what came before.
    """

    kind: int
    unpacked: int
    described: int
    end: int
    dictionary: int = 0
    is_more: bool = False


class PackedBatches:
    """The batches of one Arrow file or stream, looked at before they are read.

    Args:
        file: opened for reading, by nobody else. is_stream: whether it is one. is_mapped: whether what is not packed takes nothing.
    Raises:
        pa.ArrowInvalid: it is broken.
    Memory: the description of one batch.
    """

    def __init__(self, path: Place, file: Any, is_stream: bool, is_mapped: bool = True) -> None:
        self.path, self._file, self._is_mapped = path, file, is_mapped
        self._size = int(path.stat().st_size)
        self._dictionaries: dict[int, int] = {}  # -> bytes
        self._batches: tuple[int, int] = (0, 0)
        self._at, self._number = 0, 0
        with _broken():
            if is_stream:
                self._message(0)
            else:
                self._read_footer()

    def _read(self, at: int, size: int) -> bytes:
        if not 0 <= at <= at + size <= self._size:
            raise pa.ArrowInvalid("a message points outside of the file")
        self._file.seek(at)
        return bytes(self._file.read(size))

    def _read_footer(self) -> None:
        end = self._size - 4 - len(MAGIC)
        length = struct.unpack("<I", self._read(end, 4))[0]
        if length > LONGEST_DESCRIPTION:
            raise pa.ArrowInvalid(f"the footer has {length:,} bytes")
        footer, begin = Table.root(within(self._read(end - length, length))), end - length
        if (schema := footer.table(_SCHEMA)) is not None:
            self._check_described(described_bytes(schema))
        self._check_described(pairs_bytes(footer, _FOOTER_PAIRS))
        at, count = footer.vector(_BATCHES)
        self._batches = begin + at, count
        at, count = footer.vector(_DICTIONARIES)
        for place in range(count):
            self._take(self._block(begin + at + 24 * place))

    def _check_described(self, sizes: Iterable[int]) -> None:
        """See that there is room for what a reader makes of a description: many fields may share one name."""
        total, told = 0, LEAST_ROOM
        for size in sizes:
            total += size
            if total > told:
                check_unpacked(self.path, "its schema", total, total)
                told = 2 * total

    def _block(self, at: int) -> Message:
        """The message that a footer names, if it is as long as the footer says."""
        offset, described, _ = struct.unpack("<qi4xq", self._read(at, 24))
        message = self._message(offset)
        if message.described != described:
            raise pa.ArrowInvalid("a message is not as long as the footer says")
        return message

    def check(self, number: int) -> None:
        """See that a batch of a file can be read in the room there is.

        Raises:
            UserError: it cannot. pa.ArrowInvalid: the file is broken.
        """
        with _broken():
            if not 0 <= number < self._batches[1]:
                raise pa.ArrowInvalid("the footer names no such batch")
            self._number = number
            self._take(self._block(self._batches[0] + 24 * number))

    def check_next(self) -> None:
        """The same for the next batch of a stream, and for what stands before it."""
        with _broken():
            while self._at < self._size:
                message = self._message(self._at)
                self._at = message.end
                if message.kind < 0:  # the end, though more may follow
                    return
                self._take(message)
                if message.kind == BATCH:
                    self._number += 1
                    return

    def _take(self, message: Message) -> None:
        if message.kind == DICTIONARY:
            before = self._dictionaries.get(message.dictionary, 0) if message.is_more else 0
            self._dictionaries[message.dictionary] = before + message.unpacked
        kept = sum(self._dictionaries.values())
        if message.kind == DICTIONARY:
            check_unpacked(self.path, "its dictionaries", kept, kept)
        else:
            check_unpacked(self.path, f"batch {self._number + 1}", message.unpacked, kept + TIMES * message.unpacked)

    def _message(self, at: int) -> Message:
        length, head = struct.unpack("<I", self._read(at, 4))[0], 4
        if length == CONTINUED:
            length, head = struct.unpack("<I", self._read(at + 4, 4))[0], 8
        if length == 0:
            return Message(-1, 0, head, at + head)
        if length > LONGEST_DESCRIPTION:
            raise pa.ArrowInvalid(f"a batch is described in {length:,} bytes")
        raw = self._read(at + head, length)
        message = Table.root(within(raw))
        body, size = at + head + length, message.value(_BODY_BYTES, "q")
        kind, described = message.value(_HEADER_TYPE, "B"), message.table(_HEADER)
        dictionary, is_more = 0, False
        self._check_described(pairs_bytes(message, _PAIRS))
        if kind == SCHEMA and described is not None:
            self._check_described(described_bytes(described))
        if kind == DICTIONARY and described is not None:
            dictionary, is_more = described.value(_DICTIONARY, "q"), described.value(_IS_MORE, "B") != 0
            described = described.table(_DICTIONARY_DATA)
        taken = 0 if self._is_mapped else max(0, size)
        if kind in (DICTIONARY, BATCH) and described is not None:
            is_packed = described.field(_COMPRESSION) or OLD_MARK in raw
            taken += sum(self._lengths(described, body)) if is_packed else 0
        return Message(kind, taken, head + length, body + max(0, size), dictionary, is_more)

    def _lengths(self, batch: Table, body: int) -> Iterator[int]:
        """What each buffer of a packed batch unpacks to; -1 before it stands for one that is not packed."""
        at, count = batch.vector(_BUFFERS)
        for place in range(count):
            offset, size = batch.number(at + 16 * place, "q"), batch.number(at + 16 * place + 8, "q")
            if size > 0:
                yield max(0, struct.unpack("<q", self._read(body + offset, 8))[0])


@contextmanager
def packed_batches(path: Place, is_stream: bool) -> Iterator[PackedBatches]:
    """The batches of an Arrow file or stream; raises as `PackedBatches`."""
    if isinstance(path, Path):
        with open(path, "rb", buffering=0) as file:
            yield PackedBatches(path, file, is_stream)
    else:
        with path.open() as far, io.BufferedReader(far, FAR_BYTES) as near:
            yield PackedBatches(path, near, is_stream, is_mapped=False)


@contextmanager
def _broken() -> Iterator[None]:
    """Says of what is no FlatBuffer that the file is broken."""
    try:
        yield
    except (struct.error, OverflowError) as error:
        raise pa.ArrowInvalid(f"a description is broken ({error})") from None
