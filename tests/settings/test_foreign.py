"""Flags of other programs are answered with ours."""

from __future__ import annotations

import pytest

from config import COMMANDS, flags_of, load
from settings.errors import UserError
from settings.foreign import BY_NAME, answer

EVERY = {name for command in COMMANDS for name in flags_of(command)} | {"config", "preset", "model_preset"}


@pytest.mark.parametrize("name", BY_NAME)
def test_the_name_is_not_ours_and_leads_to_one_that_is(name: str) -> None:
    assert name not in EVERY or name == "output", "a setting of ours needs no answer"
    told = answer(name, "1", EVERY)
    assert told
    ours = [word.strip("-").partition("=")[0] for word in told.replace(",", " ").split() if word.startswith("--")]
    assert set(ours) <= EVERY, told


@pytest.mark.parametrize(
    ("flag", "value", "told"),
    [
        ("lr", "1e-4", "write --learning_rate=1e-4"),
        ("num_train_epochs", "3", "write --epochs=3"),
        ("bf16", "True", "write --mixed_precision=bf16"),
        ("bf16", "False", "write --mixed_precision=no"),
        ("per_device_train_batch_size", "8", "write --batch_size_per_gpu=8"),
        ("cutoff_len", "512", "write --max_seq_len=512"),
        ("save_total_limit", "3", "write --keep_latest_n_ckp=3"),
        ("eval_strategy", "epoch", "write --eval_steps=N"),
        ("dataloader_num_workers", "4", "leave it out"),
        ("report_to", "tensorboard", "write --log_with=tensorboard"),
        ("report_to", "none", "leave it out"),
        ("model_path", "folder", "write --finetune_from=folder"),
    ],
)
def test_answers(flag: str, value: str, told: str) -> None:
    with pytest.raises(UserError) as refused:
        load("train", {flag: value})
    assert f"--{flag}: no such flag; " in str(refused.value) and told in str(refused.value)


def test_a_model_is_used_by_other_commands() -> None:
    with pytest.raises(UserError, match="--model_path: no such flag; write --model=x"):
        load("chat", {"model_path": "x"})


def test_what_the_command_has_not_is_not_named() -> None:
    with pytest.raises(UserError, match="--lr: no such flag; see --help"):
        load("merge", {"lr": "1"})


@pytest.mark.parametrize(("given", "asked"), [("6", "6G"), ("512", "512M"), (6, "6G"), ("1.5", "1.5G")])
def test_a_size_without_its_unit_is_asked_about(given: object, asked: str) -> None:
    with pytest.raises(UserError, match=f"did you mean {asked}\\?"):
        load("train", {"memory_budget": given})


@pytest.mark.parametrize(
    ("theirs", "ours"),
    [
        ("linear", "cosine"),
        ("constant_with_warmup", "constant"),
        ("warmup_stable_decay", "wsd"),
        ("inverse_sqrt", "inverse_sqrt"),
    ],
)
def test_schedules_of_the_trainer(theirs: str, ours: str) -> None:
    with pytest.raises(UserError, match=f"write --lr_schedule={ours}"):
        load("train", {"lr_scheduler_type": theirs})
