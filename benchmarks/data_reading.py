"""Memory and time of random reads: `python -m benchmarks.data_reading [GIGABYTES]`.

1. 300,000 random reads of one generated file of 10 GB, in each mode of `LowMemDataset`, the order of a billion rows drawn
   at the same time: growth of the process's anonymous memory, and the time of a read.
2. Hugging Face `datasets` on a file that it saved itself, which both read: map-style with `shuffle`, and streaming with a
   shuffle buffer of 10,000 rows, beside `LowMemDataset` with `Order`: rows/s, memory, and the rows that are lost or come
   twice when a pass is stopped at a quarter and resumed.

Each measurement runs in a process of its own. Files go to the system's folder for temporary files and are removed.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from benchmarks.parts import children
from benchmarks.parts.results import markdown, write_section
from data.batches.order import Order
from data.dataset import MODES, LowMemDataset
from units import MIB

READS, SHOWN_ROWS = 300_000, 10**9
STEP_ROWS = 8
PEER_ROWS, PEER_READS, BUFFER = 400_000, 40_000, 10_000


def memory(name: str) -> float:
    """A line of /proc/self/status in MiB."""
    return children.status_bytes()[name] / MIB


def reading(path: str, mode: str) -> dict[str, Any]:
    """Random reads in one mode, in an order of a billion rows folded onto the file."""
    dataset, order = LowMemDataset(path, ["tokens"], mode=mode), Order(SHOWN_ROWS, seed=1)
    rows = len(dataset)

    def read(first: int, count: int) -> float:
        numbers = (order.rows(first + np.arange(count)) % rows).tolist()
        began = time.perf_counter()
        for number in numbers:
            dataset[number]
        return time.perf_counter() - began

    read(0, 256)
    before, seconds = memory("RssAnon"), []
    for first in range(256, 256 + READS, 500):
        seconds.append(read(first, 500) / 500)
    return {
        "mode": mode, "grown_mib": memory("RssAnon") - before, "median_us": float(np.median(seconds)) * 1e6,
        "mean_us": float(np.mean(seconds)) * 1e6, "rss_mib": memory("VmRSS"),
    }  # fmt: skip


def peer(path: str, system: str) -> dict[str, Any]:
    """Shuffled rows of one system: speed, memory, and what a resume does to a pass over the first rows."""
    make = {"ours": _ours, "ours ultra": _ours, "map": _map_style, "streaming": _streaming}[system]
    read, resumed = make(path, system)
    before, began = memory("RssAnon"), time.perf_counter()
    count = sum(1 for _ in islice(read(), PEER_READS))
    seconds = time.perf_counter() - began
    grown, rss = memory("RssAnon") - before, memory("VmHWM")
    seen = resumed()
    return {
        "system": system, "rows_per_second": count / seconds, "grown_mib": grown, "peak_rss_mib": rss,
        "lost": PEER_ROWS - len(set(seen)), "repeated": len(seen) - len(set(seen)),
    }  # fmt: skip


def _ours(path: str, system: str) -> Any:
    dataset = LowMemDataset(path, ["number", "text"], mode="reopen" if system.endswith("ultra") else "file")

    def read(first: int = 0) -> Iterator[Any]:
        order = Order(len(dataset), 1)
        while first < len(dataset):
            for row in order.rows(first + np.arange(256))[: len(dataset) - first].tolist():
                yield dataset[row]
            first += 256

    def resumed() -> list[int]:
        stop = PEER_ROWS // 4 // 256 * 256
        return [row["number"] for row in islice(read(), stop)] + [row["number"] for row in read(stop)]

    return read, resumed


def _map_style(path: str, system: str) -> Any:
    import datasets  # type: ignore[import-untyped]

    dataset = datasets.load_from_disk(path).shuffle(seed=1)

    def resumed() -> list[int]:  # as users do it: the same seed again, and the rows that were seen skipped
        stop = PEER_ROWS // 4
        again = datasets.load_from_disk(path).shuffle(seed=1)
        return list(dataset.select_columns(["number"])[:stop]["number"]) + list(
            again.select_columns(["number"])[stop:]["number"]
        )

    return lambda: iter(dataset), resumed


def _streaming(path: str, system: str) -> Any:
    import datasets  # type: ignore[import-untyped]

    def stream() -> Any:
        return datasets.load_from_disk(path).to_iterable_dataset(num_shards=4).shuffle(seed=1, buffer_size=BUFFER)

    def resumed() -> list[int]:
        first = stream()
        seen = [row["number"] for row in islice(first, PEER_ROWS // 4)]
        state = first.state_dict()
        second = stream()
        second.load_state_dict(state)
        return seen + [row["number"] for row in second]

    return lambda: iter(stream()), resumed


def generate(path: Path, gigabytes: float) -> None:
    """Write rows of 512 tokens, 128 a batch, until the file has its size."""
    tokens = np.random.default_rng(0).integers(0, 32_000, 128 * 512).astype(np.uint16)
    offsets = pa.array(np.arange(0, 128 * 512 + 1, 512, dtype=np.int32))
    batch = pa.record_batch({"tokens": pa.ListArray.from_arrays(offsets, pa.array(tokens))})
    schema = batch.schema.with_metadata({"rows_per_batch": "128"})
    with pa.OSFile(str(path), "wb") as file, pa.ipc.new_file(file, schema) as writer:
        while file.tell() < gigabytes * 10**9:
            writer.write_batch(batch.cast(schema))


SAVE = """
import sys, datasets
text = "all work and no play makes a dull row " * 16
def rows():
    for number in range(int(sys.argv[2])):
        yield {"number": number, "text": f"{number} {text}"}
datasets.Dataset.from_generator(rows, cache_dir=sys.argv[1] + "/hf").save_to_disk(sys.argv[1] + "/saved")
"""


def measure(name: str, *arguments: str) -> dict[str, Any]:
    """Run a function of this file in a child process."""
    code = f"import json; from benchmarks.data_reading import {name}; print(json.dumps({name}(*{arguments!r})))"
    child = children.must_run(["-c", code])
    print(child.output.strip(), flush=True)
    return child.figures


def t5_small_step() -> float:
    """Seconds of the fastest step of t5-small here, 8 rows of 512 + 114 tokens."""
    words = ["ours-standard", "t5-small", str(STEP_ROWS), "512", "114", "1"]
    return float(min(children.must_run(["-m", "benchmarks.parts.one_system", *words]).figures["seconds"]))


def main(gigabytes: float) -> None:
    """Measure everything and write both tables."""
    with tempfile.TemporaryDirectory() as place:
        path = Path(place) / "rows.arrow"
        generate(path, gigabytes)
        modes = [measure("reading", str(path), mode) for mode in MODES]
        step_seconds = t5_small_step()
        path.unlink()
        subprocess.run([sys.executable, "-c", SAVE, place, str(PEER_ROWS)], check=True, stderr=subprocess.DEVNULL)
        peers = [measure("peer", f"{place}/saved", name) for name in ("ours", "ours ultra", "map", "streaming")]
    body = markdown(
        ["mode", "growth of anonymous memory", "a read, median", "mean", "RSS at the end"],
        [[run["mode"], f"{run['grown_mib']:.1f} MiB", f"{run['median_us']:.0f} us", f"{run['mean_us']:.0f} us", f"{run['rss_mib']:.0f} MiB"] for run in modes],
    )  # fmt: skip
    reads = STEP_ROWS * (1 + 567 / 512)  # a window of 568 tokens spans two rows of 512, or in three
    cost = reads * modes[-1]["mean_us"] / 1e6
    body += (
        f"\n\nA step of t5-small over {STEP_ROWS} rows takes {step_seconds:.2f} s here; its reads in the last mode take "
        f"{cost * 1e3:.1f} ms, {cost / step_seconds:.2%} of that."
    )
    body += "\n\nThe same rows in shuffled order, read with Hugging Face datasets and here:\n\n"
    names = {
        "ours": "LowMemDataset + Order", "ours ultra": "the same, file reopened for every row",
        "map": "datasets, map-style, `shuffle`", "streaming": f"datasets, streaming, buffer of {BUFFER:,}",
    }  # fmt: skip
    body += markdown(
        ["system", "rows/s", "growth of anonymous memory", "peak RSS", "lost on resume", "repeated on resume"],
        [
            [names[run["system"]], f"{run['rows_per_second']:,.0f}", f"{run['grown_mib']:.0f} MiB", f"{run['peak_rss_mib']:.0f} MiB", f"{run['lost']:,}", f"{run['repeated']:,}"]
            for run in peers
        ],
    )  # fmt: skip
    body += f"\n\nA pass over {PEER_ROWS:,} rows is interrupted at a quarter and resumed; speed and memory over {PEER_READS:,} rows."
    print(body)
    heading = f"{READS:,} random reads of a file of {gigabytes:g} GB, in the order of {SHOWN_ROWS:,} rows"
    write_section("data-reading", heading, body, {"modes": modes, "peers": peers})


if __name__ == "__main__":
    main(float(sys.argv[1]) if len(sys.argv) > 1 else 10)
