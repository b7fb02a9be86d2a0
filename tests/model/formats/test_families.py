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

from model.decoding.generation import generate
from model.hf_format import load, save
from settings.errors import UserError
from settings.published_keys import CONFIG, FILES, GENERATION, TOKENIZER, check_keys
from tests.golden.make_published import KEPT, PUBLISHED, SIZES, inputs, weight

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


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", PUBLISHED)
def test_families_as_version_5_writes_them(name: str, tmp_path: Path) -> None:
    """Logits, and an answer from the start token."""
    transformers = pytest.importorskip("transformers")
    family = PUBLISHED[name]["model_type"].upper()
    config = getattr(transformers, f"{family}Config").from_dict({**SIZES, **PUBLISHED[name]})
    peer = getattr(transformers, f"{family}ForConditionalGeneration")(config).eval()
    with torch.no_grad():
        for name_there, parameter in peer.named_parameters():
            parameter.copy_(weight(name_there, list(parameter.shape)))
    peer.save_pretrained(tmp_path)
    ids, labels = inputs()
    ours = load(tmp_path)
    with torch.no_grad():
        expected = peer(input_ids=ids, labels=labels).logits
        answers = peer.generate(ids, max_new_tokens=6, do_sample=False, num_beams=2, use_cache=False)[:, 1:].tolist()
    assert (ours.logits(ids, ours.shift_right(labels)) - expected).abs().max() < 1e-3
    end = ours.config.eos_token_id
    result = generate(ours, ids.tolist(), max_new_tokens=6, num_beams=2)
    assert result == [answer[: answer.index(end)] if end in answer else answer for answer in answers]


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_every_key_that_transformers_writes_is_in_the_table() -> None:
    transformers = pytest.importorskip("transformers")
    configs = (transformers.T5Config(), transformers.MT5Config(), transformers.UMT5Config())
    result = {
        CONFIG: {key for config in configs for key in config.to_dict()} | set(GOLDEN["keys"][CONFIG]),
        GENERATION: set(transformers.GenerationConfig().to_dict()) | set(GOLDEN["keys"][GENERATION]),
    }
    for name, published in PUBLISHED.items():
        assert not set(published) - set(FILES[CONFIG]), name
    for file, keys in result.items():
        assert not keys - set(FILES[file])


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


@pytest.mark.parametrize(
    "change, words",
    [
        (
            {"dense_act_fn": "gelu", "is_gated_act": True},
            "feed_forward_proj = gated-gelu (dense_act_fn and is_gated_act say gated-gelu (exact))",
        ),
        ({"eos_token_id": [1, 5]}, "eos_token_id = [1, 5]"),
    ],
)
def test_values_that_no_file_may_have_are_refused(change: dict[str, Any], words: str, tmp_path: Path) -> None:
    golden = GOLDEN["families"]["flan-t5-base"]
    write(tmp_path, {**golden["config"], **change}, golden["tensors"])
    with pytest.raises(UserError) as caught:
        load(tmp_path)
    assert words in str(caught.value)


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
