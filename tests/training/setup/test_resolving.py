"""What was left auto is decided once, alike for a run, for one that goes on, and for the plan."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from data.prepare.preparing import prepare
from memory.estimate.workload import Machine
from settings.declared import Config
from settings.fields import AUTO
from settings.loading import load
from support.units import GIB
from tests.data.loaders import loader_of
from training.setup.resolving import RunRows, resolve

MACHINE = Machine(2 * GIB, 16 * GIB)
SMALL = {"d_model": 32, "d_kv": 16, "d_ff": 64, "num_heads": 2, "num_layers": 1, "num_decoder_layers": 1}


@pytest.fixture
def config(tmp_path: Path) -> Config:
    lines = [json.dumps({"prompt": "p" * (5 + n % 40), "response": "r" * 9}) for n in range(200)]
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    flags = {
        "train_file": tmp_path / "rows.jsonl",
        "tokenizer_type": "byte",
        "max_seq_len": 64,
        "cache_dir": tmp_path / "cache",
        "prepare_workers": 0,
        **SMALL,
    }
    return load("train", {name: str(value) for name, value in flags.items()})


def values_of(thing: Any) -> list[Any]:
    if dataclasses.is_dataclass(thing):
        return [value for member in dataclasses.fields(thing) for value in values_of(getattr(thing, member.name))]
    if isinstance(thing, dict):
        return [value for one in thing.values() for value in values_of(one)]
    return [value for one in thing for value in values_of(one)] if isinstance(thing, (list, tuple)) else [thing]


def test_nothing_decided_is_auto(config: Config) -> None:
    prepare(config)
    spec = resolve(config, MACHINE, RunRows.find(config, MACHINE))
    parts = [getattr(spec, member.name) for member in dataclasses.fields(spec) if member.name != "config"]
    assert not [value for value in values_of(parts) if isinstance(value, str) and value == AUTO]
    decided = spec.config_with_steps.train
    assert AUTO not in (decided.max_steps, decided.learning_rate, decided.warmup_steps, decided.eval_steps)
    assert spec.config_with_steps.memory == config.memory, "a machine that comes later decides these anew"


def test_the_plan_of_prepared_data_is_that_of_its_run(config: Config) -> None:
    """What the command plan looks up by itself is what a run has in its hands."""
    assert resolve(config, MACHINE, RunRows.find(config, MACHINE)).rows.sample is not None
    prepared = prepare(config)
    train, validation = (
        loader_of(split, prepared.objective, config) for split in (prepared.train_dir, prepared.validation_dir)
    )
    planned = resolve(config, MACHINE, RunRows.find(config, MACHINE))
    batch = planned.run_steps.effective_batch_size
    steps = range(planned.run_steps.max_steps)
    eval_rows = config.train.eval_rows
    ahead = RunRows.of_prepared(prepared, train, validation, steps, effective_batch_size=batch, eval_rows=eval_rows)
    run = resolve(config, MACHINE, ahead)
    assert (planned.plan, planned.steps) == (run.plan, run.steps)
    assert (
        planned.rows.sample is None and planned.rows.count == train.num_rows and planned.plan.seconds_total is not None
    )


def test_a_run_that_goes_on_has_as_many_steps(config: Config) -> None:
    prepare(config)
    first = resolve(config, MACHINE, RunRows.find(config, MACHINE))
    machine = dataclasses.replace(MACHINE, budget_bytes=GIB)
    later = resolve(first.config_with_steps, machine, first.rows, done=3, earlier=first.plan.choice)
    assert later.steps == first.steps and later.plan.choice == first.plan.choice
    assert (later.plan.seconds_total or 0) < (first.plan.seconds_total or 0)


def test_rows_that_are_not_prepared_are_like_a_sample_of_them(config: Config) -> None:
    """With a margin where the sample may miss something; here it is all there is."""
    sampled = resolve(config, MACHINE, RunRows.find(config, MACHINE))
    prepare(config)
    of_run = resolve(config, MACHINE, RunRows.find(config, MACHINE))
    assert (sampled.rows.source_tokens, sampled.rows.target_tokens) == (45, 10)
    assert (sampled.rows.held_out, of_run.rows.held_out) == (1, 2)
    assert of_run.rows.count is not None and sampled.rows.count == pytest.approx(of_run.rows.count, rel=0.05)
    assert 0 <= sampled.plan.peak_bytes - of_run.plan.peak_bytes < of_run.plan.peak_bytes / 50
    assert sampled.steps == of_run.steps
