"""The child process of `mutations`: makes a sound file of a kind, opens mutated copies, notes what came of each."""

from __future__ import annotations

import errno
import json
import lzma
import shutil
import sys
import traceback
from collections.abc import Callable, Iterable
from contextlib import suppress
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any
from unittest import mock

import pyarrow as pa
import pyarrow.parquet as pq

from benchmarks.fuzzing import sound_runs, strange_schemas
from benchmarks.fuzzing.mutations import mutated
from benchmarks.fuzzing.sound_files import PLAIN, TABLE, delimited, jsonl, packed, saved_dataset, write_ipc, zstandard
from benchmarks.fuzzing.sound_runs import Maker, Reader, tiny_model
from benchmarks.fuzzing.sound_tokenizers import (
    bpe_folder,
    byte_bpe_folder,
    regex_folder,
    spiece_folder,
    unigram_folder,
    use_tokenizer,
)
from data.batches.loader import StepLoader
from data.dataset import MODES, LowMemDataset
from data.prepare.preparing import prepare
from data.shards.store import Manifest
from data.sources.columns import Columns
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.prompts import read_prompts
from data.sources.reading import read_rows
from data.tokenizers.training import byte_tokenizer
from settings.declared import DataConfig
from settings.errors import UserError
from settings.loading import load

# what opening a copy may take beside what its sound one has taken: of addresses (threads and allocators set some
# aside), and of memory
ADDRESS_SPACE, BUDGET = 4 * 2**30, 2**29


def rows_of(path: Path, *names: str) -> None:
    columns = Columns((), *names) if names == ("messages",) else names
    for _ in read_rows(find(str(path)), columns, BadRows()):
        pass
    for _ in read_rows(find(str(path)), columns, BadRows(skip=True)):
        pass


def prompts_of(path: Path) -> None:
    for _ in read_prompts(find(str(path)), DataConfig(), BadRows(skip=True)):
        pass


def each(works: Iterable[Callable[[], object]]) -> None:
    """Do all of it, whatever is told on the way; a UserError among them is raised at the end."""
    told = None
    for work in works:
        try:
            work()
        except UserError as error:
            told = error
    if told is not None:
        raise told


def by_number(path: Path) -> None:
    def rows(mode: str) -> None:
        dataset = LowMemDataset(path, mode=mode)
        each(partial(dataset.__getitem__, place) for place in range(min(len(dataset), 70)) for _ in "12")

    each(partial(rows, mode) for mode in MODES)


def table_file(path: Path) -> None:
    each((partial(by_number, path), partial(rows_of, path, "text"), partial(prompts_of, path)))


def rows_of_all_kinds(path: Path) -> None:
    kinds = ("text",), ("prompt", "response"), ("messages",)
    each((*(partial(rows_of, path, *columns) for columns in kinds), partial(prompts_of, path)))


def settings_yaml(path: Path) -> None:
    path.write_text("train:\n  max_steps: 10\n  learning_rate: 1e-3\ndata:\n  max_seq_len: 64\nmodel_preset: tiny\n")


def settings_json(path: Path) -> None:
    path.write_text(json.dumps({"train": {"max_steps": 10}, "memory_budget": "2G", "preset": "none", "clean": True}))


def settings_file(path: Path) -> None:
    load("train", {"config": str(path)})


def shards_folder(folder: Path, kind: str) -> None:
    text = folder.with_name(f"{folder.name}.jsonl")
    jsonl(text)
    byte_tokenizer().save(folder.with_name("byte"))
    prepare(config_for(folder, text, kind))


def config_for(folder: Path, train_file: Path, objective: str) -> Any:
    flags = {
        "train_file": train_file,
        "shards_dir": folder,
        "cache_dir": folder.with_name("cache"),
        "objective": objective,
        "tokenizer_dir": folder.with_name("byte"),
        "max_seq_len": 32,
    }
    return load("prepare", {name: str(value) for name, value in flags.items()})


def use_shards(folder: Path) -> None:
    objective = {"stream": "span"}.get(Manifest.read(folder).kind, "pairs")

    def steps(reopen: bool) -> None:
        config = load("train", {"max_seq_len": "32"})
        loader = StepLoader(folder / "train", objective, config.data, config.model, config.run.seed, reopen)
        for step in range(4):
            loader.micro_batches(step, effective_batch_size=8, batch_size=4)

    each(partial(steps, reopen) for reopen in (False, True))


def progress_folder(folder: Path) -> None:
    """What a full disk leaves of preparing, when only the manifest is missing."""
    folder.mkdir()
    jsonl(folder / "made.jsonl")
    byte_tokenizer().save(folder / "byte")
    full = OSError(errno.ENOSPC, "No space left on device")
    is_of_this = mock.patch("data.prepare.preparing.fingerprint", return_value="of this work")
    with is_of_this, mock.patch("data.prepare.preparing.sync", side_effect=full), suppress(UserError):
        prepare(config_for(folder / "made", folder / "made.jsonl", "pairs"))


def use_progress(folder: Path) -> None:
    # the identity names paths and times: take the attempt for one at this very copy
    job = config_for(folder / "made", folder / "made.jsonl", "pairs")
    with mock.patch("data.prepare.preparing.fingerprint", return_value="of this work"):
        prepare(job)


def model_folder(folder: Path) -> None:
    from model import hf_format

    hf_format.save(tiny_model(), folder)


def use_model(folder: Path) -> None:
    import torch

    from model import hf_format

    model = hf_format.load(folder)
    with torch.no_grad():
        model(torch.ones(1, 3, dtype=torch.long), None, torch.ones(1, 3, dtype=torch.long))


def adapter_folder(folder: Path) -> None:
    from model.formats.peft import save_adapters
    from model.lora.adapter import LoraAdapter, linears, use_adapters
    from model.lora.form import LoraSettings

    model, settings = tiny_model(), LoraSettings(2, 4.0, ("q", "v"))
    chosen = {
        path: LoraAdapter(linear.weight, settings, 0)
        for path, linear in linears(model).items()
        if path.endswith(("q", "v"))
    }
    use_adapters(model, chosen)
    save_adapters(model, settings, folder, "base", "0123")


def use_adapter(folder: Path) -> None:
    from model.formats.peft import load_adapters

    load_adapters(tiny_model(), folder)


def checkpoint_folder(folder: Path) -> None:
    from dataclasses import asdict

    import torch
    from safetensors.torch import save_file

    from engine.loss_scaling import LossScaling
    from memory.estimate.workload import ExecutionPlan
    from training.checkpoints.state import TrainingState
    from training.evaluation.stopping import BestMetric

    (folder / "state").mkdir(parents=True)
    best = BestMetric("loss", 3, 2.5, 10, 1).state()
    state = TrainingState(
        10,
        1000,
        2.5,
        asdict(ExecutionPlan(2, 1, 1, 0, 2, "float32", "float32", 2**20)),
        LossScaling().as_dict(),
        best,
        3.0,
    )
    (folder / "state" / "training.json").write_text(json.dumps(asdict(state), indent=1))
    save_file({"a/square": torch.ones(3)}, folder / "state" / "optimizer.safetensors")


def use_checkpoint(folder: Path) -> None:
    import torch

    from engine.optimizers import OPTIMIZERS
    from training.checkpoints.content import load_optimizer
    from training.checkpoints.state import read_training_state
    from training.evaluation.stopping import BestMetric

    optimizer = OPTIMIZERS["adafactor"]({"a": torch.nn.Parameter(torch.ones(3))})
    state = read_training_state(folder)
    best = BestMetric.restore("loss", 3, state.best_metric)
    best.is_best(12, {"loss": 2.0})
    _ = best.should_stop, best.remarks(12), state.step + 1, state.tokens + 1
    load_optimizer(folder, optimizer)


# kind -> what makes a sound file or folder, what reads it, and which file of the folder is mutated
KINDS: dict[str, tuple[Maker, Reader, str]] = {
    "a.jsonl": (jsonl, lambda path: rows_of(path, "prompt", "response"), ""),
    "b.jsonl": (jsonl, prompts_of, ""),
    "a.jsonl.gz": (packed(jsonl), lambda path: rows_of(path, "prompt", "response"), ""),
    "a.csv": (delimited, lambda path: rows_of(path, "prompt", "response"), ""),
    "a.tsv": (delimited, lambda path: rows_of(path, "prompt", "response"), ""),
    "a.txt": (jsonl, lambda path: rows_of(path, "text"), ""),
    "a.parquet": (lambda path: pq.write_table(TABLE, path, row_group_size=20), table_file, ""),
    "packed.parquet": (lambda path: pq.write_table(TABLE, path, compression="zstd"), table_file, ""),
    "plain.parquet": (
        lambda path: pq.write_table(TABLE, path, compression="none", use_dictionary=False),
        table_file,
        "",
    ),
    "a.arrow": (lambda path: write_ipc(path, TABLE, pa.ipc.new_file), table_file, ""),
    "packed.arrow": (lambda path: write_ipc(path, TABLE, pa.ipc.new_file, compression="lz4"), table_file, ""),
    "stream.arrow": (lambda path: write_ipc(path, PLAIN, pa.ipc.new_stream), table_file, ""),
    "packed.stream.arrow": (lambda path: write_ipc(path, PLAIN, pa.ipc.new_stream, compression="zstd"), table_file, ""),
    "a.yaml": (settings_yaml, settings_file, ""),
    "a.json": (settings_json, settings_file, ""),
    "bpe": (bpe_folder, use_tokenizer, "tokenizer.json"),
    "regex": (regex_folder, use_tokenizer, "tokenizer.json"),
    "unigram": (unigram_folder, use_tokenizer, "tokenizer.json"),
    "names": (bpe_folder, use_tokenizer, "special_tokens_map.json"),
    "template": (bpe_folder, use_tokenizer, "prompt_template.json"),
    "spiece": (spiece_folder, use_tokenizer, "spiece.model"),
    "vocabulary": (byte_bpe_folder, use_tokenizer, "vocab.json"),
    "merges": (byte_bpe_folder, use_tokenizer, "merges.txt"),
    "pairs": (lambda path: shards_folder(path, "pairs"), use_shards, "train/00000.arrow"),
    "stream": (lambda path: shards_folder(path, "span"), use_shards, "train/00000.arrow"),
    "manifest": (lambda path: shards_folder(path, "pairs"), use_shards, "manifest.json"),
    "progress": (progress_folder, use_progress, "made.partial/states/00000000.json"),
    "model": (model_folder, use_model, "model.safetensors"),
    "config": (model_folder, use_model, "config.json"),
    "adapter": (adapter_folder, use_adapter, "adapter_model.safetensors"),
    "adapter config": (adapter_folder, use_adapter, "adapter_config.json"),
    "state": (checkpoint_folder, use_checkpoint, "state/training.json"),
    "optimizer": (checkpoint_folder, use_checkpoint, "state/optimizer.safetensors"),
    "xz.jsonl.xz": (packed(jsonl, lzma.compress), lambda path: rows_of(path, "prompt", "response"), ""),
    "zst.jsonl.zst": (packed(jsonl, zstandard), lambda path: rows_of(path, "prompt", "response"), ""),
    "added tokens": (byte_bpe_folder, use_tokenizer, "added_tokens.json"),
    "saved dataset": (saved_dataset, lambda path: rows_of(path, "text"), "state.json"),
    **sound_runs.KINDS,
}
# kind -> what writes copy number N, which is sound and absurd, and what reads it
STRANGE: dict[str, tuple[Callable[[Path, int], None], Reader]] = {
    "strange.parquet": (strange_schemas.strange_parquet, table_file),
    "strange.arrow": (strange_schemas.strange_arrow, table_file),
    "strange.jsonl": (strange_schemas.strange_jsonl, rows_of_all_kinds),
    "bomb.jsonl.gz": (strange_schemas.bomb, rows_of_all_kinds),
    "bomb.csv.gz": (strange_schemas.bomb, rows_of_all_kinds),
    "bomb.txt.gz": (strange_schemas.bomb, lambda path: rows_of(path, "text")),
    "cells.parquet": (strange_schemas.wide_cells, table_file),
}


def outcome_of(read: Reader, path: Path) -> str:
    """Read one mutated copy."""
    try:
        read(path)
    except UserError as error:
        named = all(isinstance(problem, str) and problem.strip() for problem in error.problems) and error.problems
        return "told" if named else f"a UserError without a word: {error!r}"
    except KeyboardInterrupt:
        raise
    except BaseException as error:
        frames = traceback.extract_tb(error.__traceback__)
        ours = [
            frame for frame in frames if "/benchmarks/" not in frame.filename and "site-packages" not in frame.filename
        ]
        where = f"{Path(ours[-1].filename).name}:{ours[-1].lineno}" if ours else "?"
        return f"{type(error).__name__} at {where}: {str(error)[:150]}"
    return "read"


def peak_bytes() -> int:
    """The most memory that this process had so far."""
    import resource

    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024


def limit_addresses() -> None:
    import resource

    taken = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (taken + ADDRESS_SPACE,) * 2)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))


def writer_of(kind: str, folder: Path) -> tuple[Path, Callable[[int], object], Reader]:
    """Where copies of a kind lie, what puts number N there, and what reads it."""
    if kind in STRANGE:
        write, read = STRANGE[kind]
        return folder / kind, lambda number: write(folder / kind, number), read
    make, read, inner = KINDS[kind]
    sound = folder / f"sound {kind}" if inner else folder / f"sound.{kind}"
    if not sound.exists():
        make(sound)
    copy = folder / "mutated" if inner else folder / kind
    content = (sound / inner if inner else sound).read_bytes()

    def put(number: int) -> None:
        if inner:
            shutil.rmtree(copy, ignore_errors=True)
            shutil.copytree(sound, copy)
            for beside in islice(folder.glob("mutated.*"), 9):
                beside.unlink() if beside.is_file() else shutil.rmtree(beside)
        (copy / inner if inner else copy).write_bytes(mutated(content, inner or kind, number))

    return copy, put, read


def main() -> None:
    kind, folder, first, last = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3]), int(sys.argv[4])
    copy, put, read = writer_of(kind, folder)
    put(0)
    outcome_of(read, copy)  # imports what reading needs
    most = None
    if sys.platform == "linux":
        limit_addresses()
        most = peak_bytes() + BUDGET
    with (folder / "notes.jsonl").open("a", encoding="utf8", buffering=1) as notes:
        for number in range(first, last):
            notes.write(json.dumps([number, "begun"]) + "\n")
            put(number)
            what = outcome_of(read, copy)
            if most is not None and (peak := peak_bytes()) > most:
                what, most = f"took {(peak - most + BUDGET) >> 20} MiB", peak
            well = number or kind in STRANGE or what == "read"
            notes.write(json.dumps([number, what if well else f"the sound one is {what}"]) + "\n")


if __name__ == "__main__":
    main()
