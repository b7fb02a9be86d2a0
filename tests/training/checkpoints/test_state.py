"""What resuming needs is all there, or the file that lacks it is named; nothing in it is run."""

from __future__ import annotations

import json
import os
import pickle
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from config import GenerateConfig
from data.tokenizers.training import byte_tokenizer
from engine.optimizers import OPTIMIZERS, Optimizer, Step
from engine.optimizers.rounding import ROUNDINGS
from engine.scaling import LossScaling
from engine.sharing.sharding import part_of
from memory.cost.work import Choice, choice_fields
from model.formats.answering import answers_by
from model.t5 import T5
from settings.errors import UserError
from tests.training.small_trained import SHAPE
from training.checkpoints.pieces import INDEX, Pieces, write_index, write_rows
from training.checkpoints.sharded_state import has_pieces, load_optimizer_share
from training.checkpoints.state import (
    LATER_FIELDS,
    TrainingState,
    load_optimizer,
    read_training_state,
    write_checkpoint,
)
from training.evaluation.stopping import BestMetric

CPU = torch.device("cpu")
STATE = TrainingState(
    step=3, tokens=100, best_eval_loss=2.5, choice=Choice(2, 1, 1, 0, 2, "float32", "float32", 2**20).as_dict(),
    loss_scaling=LossScaling().as_dict(), best_metric=BestMetric("loss", 0, 2.5, 3).state(), first_eval_loss=3.0,
)  # fmt: skip


def trained(name: str = "adafactor", dtype: torch.dtype = torch.float32) -> tuple[T5, Optimizer]:
    """A model after one update with drawn gradients."""
    model = T5(SHAPE, dtype=dtype).initialise(1)
    optimizer = OPTIMIZERS[name](dict(model.named_parameters()), ROUNDINGS["stochastic"]())
    draw = torch.Generator().manual_seed(5)
    for weight in model.parameters():
        weight.grad = torch.randn(weight.shape, generator=draw, dtype=torch.float32).to(weight.dtype)
        optimizer.update(weight, Step(1, 1e-3))
        weight.grad = None
    return model, optimizer


def test_how_the_model_shall_answer_is_in_its_folder(tmp_path: Path) -> None:
    model, optimizer = trained("adafactor", torch.float32)
    (tmp_path / "c").mkdir()
    write_checkpoint(
        tmp_path / "c", model, byte_tokenizer(), optimizer, STATE, answers=GenerateConfig(num_beams=2, max_new_tokens=9)
    )
    assert answers_by(tmp_path / "c") == ({"num_beams": 2, "max_new_tokens": 9}, [])


def saved(folder: Path, name: str = "adafactor", dtype: torch.dtype = torch.float32) -> Optimizer:
    model, optimizer = trained(name, dtype)
    folder.mkdir()
    write_checkpoint(folder, model, byte_tokenizer(), optimizer, STATE)
    return optimizer


def empty(name: str = "adafactor", dtype: torch.dtype = torch.float32) -> Optimizer:
    return OPTIMIZERS[name](dict(T5(SHAPE, dtype=dtype).named_parameters()), ROUNDINGS["stochastic"]())


def without(content: dict[str, Any], path: tuple[str, ...]) -> dict[str, Any]:
    if len(path) == 1:
        return {name: value for name, value in content.items() if name != path[0]}
    return {**content, path[0]: without(content[path[0]], path[1:])}


def fields(content: dict[str, Any]) -> list[tuple[str, ...]]:
    inner = [(name, *path) for name, value in content.items() if isinstance(value, dict) for path in fields(value)]
    return [*((name,) for name in content if name not in LATER_FIELDS), *inner]


@pytest.mark.parametrize("path", fields(asdict(STATE)), ids=".".join)
def test_a_field_that_is_missing_or_foreign_is_told(tmp_path: Path, path: tuple[str, ...]) -> None:
    saved(tmp_path / "c")
    file = tmp_path / "c" / "state" / "training.json"
    content = json.loads(file.read_text())
    assert read_training_state(tmp_path / "c") == STATE
    file.write_text(json.dumps(without(content, path)))
    with pytest.raises(UserError, match=r"training\.json cannot be used .* lacks") as caught:
        read_training_state(tmp_path / "c")
    assert path[-1] in str(caught.value)
    inner = content
    for name in path[:-1]:
        inner = inner[name]
    for foreign in ([1], "load", -7.5j):
        inner[path[-1]] = str(foreign) if isinstance(foreign, complex) else foreign
        if isinstance(inner[path[-1]], str) and path[-1] == "metric":
            continue
        file.write_text(json.dumps(content))
        with pytest.raises(UserError, match="which no run writes"):
            read_training_state(tmp_path / "c")


def test_fields_that_came_later_may_be_missing(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    file = tmp_path / "c" / "state" / "training.json"
    content = json.loads(file.read_text())
    content = {name: value for name, value in content.items() if name not in LATER_FIELDS}
    content["choice"] = {name: value for name, value in content["choice"].items() if name not in LATER_FIELDS}
    file.write_text(json.dumps(content))
    assert read_training_state(tmp_path / "c") == STATE
    for wrong in ([0], [1.5], "load", {"a": 1}):
        file.write_text(json.dumps({**content, "choice": {**content["choice"], "source_sizes": wrong}}))
        with pytest.raises(UserError, match="which no run writes"):
            read_training_state(tmp_path / "c")


@pytest.mark.parametrize("storage", ["float32", "bfloat16", "float16", "int8", "int4"])
@pytest.mark.parametrize("malloc", ["small", "fast"])
def test_every_choice_of_a_plan_is_read(tmp_path: Path, storage: str, malloc: str) -> None:
    saved(tmp_path / "c")
    choice = Choice(2, 3, 4, 5, 2, storage, "bfloat16", 2**20, malloc, 2, True).as_dict()
    (tmp_path / "c" / "state" / "training.json").write_text(json.dumps({**asdict(STATE), "choice": choice}))
    assert read_training_state(tmp_path / "c").choice == choice


def test_a_choice_has_its_first_names_in_files() -> None:
    choice = Choice(2, 3, 4, 5, 2, "float32", "float32", 2**20)
    written = choice.as_dict()
    assert (written["num_slices"], written["num_walks"], written["kept_blocks"]) == (3, 4, 5)
    assert Choice(**choice_fields(written)) == choice


def test_a_field_that_came_later_has_its_default(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "state" / "training.json").write_text(json.dumps(without(asdict(STATE), ("first_eval_loss",))))
    monkeypatch.setattr("training.checkpoints.state.LATER_FIELDS", ("first_eval_loss",))
    assert read_training_state(tmp_path / "c").first_eval_loss is None


@pytest.mark.parametrize("text", ["", "[]", "{", "[" * 100_000, '{"__class__": 1}'])
def test_a_broken_state_is_told(tmp_path: Path, text: str) -> None:
    saved(tmp_path / "c")
    (tmp_path / "c" / "state" / "training.json").write_text(text)
    with pytest.raises(UserError, match=r"training\.json cannot be used"):
        read_training_state(tmp_path / "c")


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_missing_tensor_of_the_optimizer_is_noticed(tmp_path: Path, name: str, dtype: torch.dtype) -> None:
    saved(tmp_path / "c", name, dtype)
    load_optimizer(tmp_path / "c", empty(name, dtype), CPU)
    file = tmp_path / "c" / "state" / "optimizer.safetensors"
    tensors = load_file(file)
    for key in sorted(tensors)[::7]:
        save_file({other: tensor for other, tensor in tensors.items() if other != key}, file)
        with pytest.raises(UserError, match="lacks tensors") as caught:
            load_optimizer(tmp_path / "c", empty(name, dtype), CPU)
        assert key.rpartition("/")[0] in str(caught.value)


def test_a_state_that_is_empty_is_noticed(tmp_path: Path) -> None:
    saved(tmp_path / "c")
    save_file({}, tmp_path / "c" / "state" / "optimizer.safetensors")
    load_optimizer(tmp_path / "c", empty(), CPU)  # with a loss scale, all steps may have been left out
    file = tmp_path / "c" / "state" / "training.json"
    file.write_text(json.dumps({**asdict(STATE), "loss_scaling": None}))
    with pytest.raises(UserError, match="all of it"):
        load_optimizer(tmp_path / "c", empty(), CPU)


# --- in pieces, one a process ---


def cut(folder: Path, optimizer: Optimizer, count: int) -> None:
    """Write a state as so many processes do."""
    written = []
    for rank in range(count):
        rows: dict[str, tuple[torch.Tensor, int]] = {}
        for key, tensor in optimizer.state.items():
            part = None if key.endswith("columns") else part_of((*tensor.shape[:1], 2), rank, count)
            if part is not None:
                rows[key] = (tensor[part.first : part.first + part.count], part.first)
            elif rank == 0:
                rows[key] = (tensor, 0)
        written.append(write_rows(folder / "state" / "shards", rank, rows))
    write_index(folder / "state" / "shards", written)


@pytest.mark.parametrize("count", [1, 2, 3])
def test_pieces_are_read_by_one_process(tmp_path: Path, count: int) -> None:
    optimizer = saved(tmp_path / "c")
    (tmp_path / "c" / "state" / "optimizer.safetensors").unlink()
    cut(tmp_path / "c", optimizer, count)
    assert has_pieces(tmp_path / "c")
    again = empty()
    load_optimizer_share(tmp_path / "c", again, CPU, None)
    assert again.state.keys() == optimizer.state.keys()
    assert all(torch.equal(tensor, optimizer.state[key]) for key, tensor in again.state.items())


def test_any_rows_are_read_from_any_pieces(tmp_path: Path) -> None:
    whole = torch.arange(22).reshape(11, 2)
    for pieces in (1, 2, 4, 11):
        folder = tmp_path / str(pieces)
        parts = whole.chunk(pieces)
        firsts = [sum(len(part) for part in parts[:rank]) for rank in range(len(parts))]
        write_index(
            folder, [write_rows(folder, rank, {"w/x": (part, firsts[rank])}) for rank, part in enumerate(parts)]
        )
        for first in range(11):
            for count in range(1, 12 - first):
                assert torch.equal(Pieces(folder).read("w/x", CPU, first, count), whole[first : first + count])
        with pytest.raises(ValueError, match="has 11 rows"):
            Pieces(folder).read("w/x", CPU, 5, 10**12)


@pytest.mark.parametrize(
    "pieces",
    [[], {}, [1], [{"file": "rank_00000.safetensors"}], [{"file": "../rank_00000.safetensors", "first": 0}],
     [{"file": "/etc/passwd", "first": 0}], [{"file": "rank_00000.safetensors", "first": "0"}],
     [{"file": "optimizer.bin", "first": 0}]],
)  # fmt: skip
def test_a_table_names_only_what_is_written_here(tmp_path: Path, pieces: object) -> None:
    optimizer = saved(tmp_path / "c")
    cut(tmp_path / "c", optimizer, 2)
    index = tmp_path / "c" / "state" / "shards" / INDEX
    content = json.loads(index.read_text())
    content["tensors"]["embedding/rows"] = pieces
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match=r"optimizer state cannot be read: .* that this program does not write"):
        load_optimizer_share(tmp_path / "c", empty(), CPU, None)


def test_rows_that_are_missing_are_noticed(tmp_path: Path) -> None:
    optimizer = saved(tmp_path / "c")
    cut(tmp_path / "c", optimizer, 2)
    index = tmp_path / "c" / "state" / "shards" / INDEX
    content = json.loads(index.read_text())
    del content["tensors"]["embedding/rows"][0]
    index.write_text(json.dumps(content))
    with pytest.raises(UserError, match="rows 0 to 192 of embedding/rows are missing"):
        load_optimizer_share(tmp_path / "c", empty(), CPU, None)


class Bomb:
    """Leaves a file behind where it is unpickled."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return os.mkdir, (str(self.path),)


@pytest.mark.parametrize("place", [".metadata", "shards/.metadata", "optimizer.pt", "optimizer.safetensors"])
def test_no_state_is_unpickled(tmp_path: Path, place: str) -> None:
    saved(tmp_path / "c")
    file = tmp_path / "c" / "state" / place
    file.parent.mkdir(exist_ok=True)
    file.write_bytes(pickle.dumps(Bomb(tmp_path / "ran")))
    if place == "optimizer.safetensors":
        with pytest.raises(UserError, match="cannot be read"):
            load_optimizer(tmp_path / "c", empty(), CPU)
    else:
        assert not has_pieces(tmp_path / "c")
        load_optimizer(tmp_path / "c", empty(), CPU)
        load_optimizer_share(tmp_path / "c", empty(), CPU, None)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("name, step, is_whole", [("sinkgd", 3, True), ("adamw", 0, True), ("adamw", 3, False)])
def test_an_empty_state_is_whole_where_none_is_due(tmp_path: Path, name: str, step: int, is_whole: bool) -> None:
    """Adapters have none with SinkGD; and before the first step nobody has."""
    matrix = torch.nn.Parameter(torch.ones(4, 3))
    optimizer = OPTIMIZERS[name]({"encoder.blocks.0.attention.q.adapter.a": matrix})
    model, _ = trained()
    (tmp_path / "c").mkdir()
    state = replace(STATE, step=step, loss_scaling=None)
    write_checkpoint(tmp_path / "c", model, byte_tokenizer(), optimizer, state)
    if is_whole:
        load_optimizer(tmp_path / "c", optimizer, CPU)
    else:
        with pytest.raises(UserError, match=r"lacks tensors .*: all of it"):
            load_optimizer(tmp_path / "c", optimizer, CPU)
