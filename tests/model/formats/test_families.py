"""Every family's published configuration, with random weights: logits as by the version of transformers that wrote
it.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from model.hf_format import load, save
from settings.errors import UserError
from settings.published_keys import CONFIG, FILES, GENERATION, TOKENIZER, check_keys
from tests.golden.make_published import KEPT, inputs, weight

GOLDEN: dict[str, Any] = json.loads(KEPT.read_text(encoding="utf8"))


def write(folder: Path, config: dict[str, Any], tensors: dict[str, list[int]]) -> None:
    (folder / CONFIG).write_text(json.dumps(config))
    save_file({name: weight(name, shape) for name, shape in tensors.items()}, folder / "model.safetensors")


@pytest.mark.parametrize("name", GOLDEN["families"])
def test_published_families_give_the_logits_of_the_version_that_wrote_them(name: str, tmp_path: Path) -> None:
    golden = GOLDEN["families"][name]
    write(tmp_path, golden["config"], golden["tensors"])
    ids, labels = inputs()
    for folder in (tmp_path, tmp_path / "again"):  # as published, and as it is written here
        model = load(folder)
        logits = model.logits(ids, model.shift_right(labels))
        assert (logits[:, :, :8] - torch.tensor(golden["logits"])).abs().max() < 1e-3
        save(model, tmp_path / "again")
    start = golden["config"]["decoder_start_token_id"]
    assert model.config.start_token_id == start and model.shift_right(labels)[:, 0].tolist() == [start, start]
    for file in (CONFIG, GENERATION):
        assert json.loads((tmp_path / "again" / file).read_text())["decoder_start_token_id"] == start


def test_every_key_that_transformers_writes_is_in_the_table() -> None:
    for file, keys in GOLDEN["keys"].items():
        assert not set(keys) - set(FILES[file])


@pytest.mark.parametrize(
    "file, key, value, allowed",
    [
        (CONFIG, "is_decoder", True, False),
        (CONFIG, "quantization_config", {"load_in_8bit": True}, None),
        (TOKENIZER, "sp_model_kwargs", {"enable_sampling": True}, {"enable_sampling": False}),
    ],
)
def test_values_that_ask_for_what_is_not_done_are_refused(
    file: str, key: str, value: Any, allowed: Any, tmp_path: Path
) -> None:
    (problem,) = check_keys(tmp_path / file, {key: value})
    assert f"{file}: {key} = {value}, " in problem and not check_keys(tmp_path / file, {key: allowed})
    if file == CONFIG:
        golden = GOLDEN["families"]["t5-small"]
        write(tmp_path, {**golden["config"], key: value}, golden["tensors"])
        with pytest.raises(UserError, match=f"{key} = "):
            load(tmp_path)


@pytest.mark.parametrize("version, is_own", [("4.57.1", False), ("5.23.0", True)])
def test_a_head_beside_tied_ones_counts_from_version_5_on(version: str, is_own: bool, tmp_path: Path) -> None:
    golden = GOLDEN["families"]["t5-small"]
    tensors = {**golden["tensors"], "lm_head.weight": golden["tensors"]["shared.weight"]}
    write(tmp_path, {**golden["config"], "transformers_version": version}, tensors)
    model, (ids, labels) = load(tmp_path), inputs()
    logits = model.logits(ids, model.shift_right(labels))[:, :, :8]
    assert (model.config.tie_word_embeddings, (logits - torch.tensor(golden["logits"])).abs().max() < 1e-3) == (
        not is_own,
        not is_own,
    )
