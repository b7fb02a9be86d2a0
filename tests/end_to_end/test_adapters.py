"""Adapters and frozen parts in whole runs: what is written, resumed, refused, used, merged."""

from __future__ import annotations

import json
import signal
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from tests.end_to_end.conftest import World

STEPS = 8
WORK = (
    "--is_finetune=True", "--max_seq_len=64", f"--max_steps={STEPS}", "--save_steps=3", "--eval_steps=4", "--sample_rows=1",
    "--effective_batch_size=7", "--batch_size_per_gpu=3", "--dropout_rate=0.1", "--seed=5",
)  # fmt: skip
LORA = ("--lora_rank=4", "--lora_targets=all", "--lora_dropout=0.1")
BASES = {"int8": ("--lora_base=int8",), "int4": ("--lora_base=int4", "--weights_in=file")}


def flags_of(world: World) -> tuple[str, ...]:
    return (f"--train_file={world.pairs}", f"--finetune_from={world.place.runs / 'whole'}", *WORK)


@pytest.fixture(scope="module", params=BASES)
def base(request: pytest.FixtureRequest) -> str:
    """What the frozen weights are in."""
    return str(request.param)


@pytest.fixture(scope="module")
def adapted(pretrained: World, base: str, tmp_path_factory: pytest.TempPathFactory) -> World:
    """A finetuning run with adapters, `lora`, that nothing has disturbed."""
    world = World(pretrained.beside(tmp_path_factory.mktemp("adapters")), pretrained.text, pretrained.pairs)
    world.place.do("train", *flags_of(pretrained), *LORA, *BASES[base], "--run_name=lora")
    return world


@pytest.mark.slow
def test_a_run_leaves_its_adapter_alone(pretrained: World, adapted: World, base: str) -> None:
    folder = adapted.place.runs / "lora"
    about = json.loads((folder / "adapter_config.json").read_text())
    assert about["base_model_name_or_path"] == str((pretrained.place.runs / "whole").resolve())
    assert about["r"] == 4 and about["target_modules"] == ["q", "k", "v", "o", "wi", "wo"]
    assert (folder / "tokenizer.json").is_file() and not (folder / "model.safetensors").exists()
    checkpoint = folder / "checkpoints" / f"step_{STEPS:08}"
    state = load_file(checkpoint / "state" / "optimizer.safetensors")
    assert state and all(".adapter." in name for name in state)
    losses = adapted.place.losses("lora")
    assert losses[STEPS] < losses[1]
    plan = next(event for event in adapted.place.events("lora") if event["event"] == "plan")
    assert plan["choice"]["storage"] == base


@pytest.mark.slow
def test_a_resumed_run_goes_on_exactly(pretrained: World, adapted: World, base: str, tmp_path: Path) -> None:
    place = pretrained.beside(tmp_path)
    stopped = place.stop_at(4, signal.SIGTERM, "train", *flags_of(pretrained), *LORA, *BASES[base], "--run_name=lora")
    assert stopped.returncode == 130, stopped.stdout
    place.do("train", "--is_keep_training=True", "--run_name=lora")
    assert place.losses("lora") == adapted.place.losses("lora")
    ours, theirs = (
        load_file(p.runs / "lora" / "checkpoints" / "latest" / "adapter_model.safetensors")
        for p in (place, adapted.place)
    )
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[name], theirs[name]) for name in ours)


@pytest.mark.slow
def test_what_is_made_of_an_adapter_answers_alike(pretrained: World, adapted: World, tmp_path: Path) -> None:
    place, whole, lora = adapted.place, pretrained.place.runs / "whole", adapted.place.runs / "lora"
    place.do("merge", f"--adapter={lora}", f"--output={tmp_path / 'merged'}")
    told = place.do(
        "quantize",
        f"--model={tmp_path / 'merged'}",
        f"--output={tmp_path / 'small'}",
        f"--validation_file={adapted.pairs}",
    )
    assert "->" in told.stdout and (tmp_path / "small" / "model.int8.safetensors").is_file()
    asked = ("--input=river 是什么？", "--max_new_tokens=8")
    answers = [
        place.do("generate", *asked, *flags).stdout
        for flags in (
            [f"--model={lora}"],
            [f"--model={whole}", f"--adapter={lora}"],
            [f"--model={tmp_path / 'merged'}"],
        )
    ]
    assert answers[0] == answers[1] == answers[2]
    assert place.do("generate", *asked, f"--model={tmp_path / 'small'}").stdout
    done = place.do("evaluate", f"--model={lora}", f"--validation_file={adapted.pairs}", "--eval_generate_rows=1")
    assert "loss" in done.stdout
