"""Commands on encoders: what writes text refuses them, what handles folders takes them."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest

from commands.chat import chat
from commands.convert import convert
from commands.generate import generate
from model import hf_format
from model.formats.shape_file import read_config
from model.t5 import T5
from settings.declared import T5ModelConfig
from settings.errors import UserError
from settings.loading import load

SHAPE = T5ModelConfig(vocab_size=300, d_model=16, d_kv=4, d_ff=24, num_layers=2, num_decoder_layers=2, num_heads=2)
HEAD = dataclasses.replace(SHAPE, head="sequence", labels="few,many", num_decoder_layers=0)


@pytest.fixture
def whole(tmp_path: Path) -> Path:
    hf_format.save(T5(SHAPE).initialise(1), tmp_path / "whole")
    return tmp_path / "whole"


def test_convert_takes_the_encoder_of_a_whole_t5(whole: Path) -> None:
    output = whole.parent / "encoder"
    done = convert(load("convert", {"model": whole, "output": output, "head": "none"}))
    assert done is not None and done.difference == 0
    assert (read_config(output).head, read_config(output).num_decoder_layers) == ("none", 0)


def test_text_of_an_encoder_is_refused(whole: Path) -> None:
    hidden = dataclasses.replace(HEAD, head="none", labels="auto")
    for command, run, shape, flags in (
        ("generate", generate, hidden, {"input": "x"}),
        ("chat", chat, HEAD, {}),
    ):
        folder = whole.parent / command
        hf_format.save(T5(shape).initialise(1), folder)
        with pytest.raises(UserError, match=f"--head={shape.head}.*{command}"):
            run(load(command, {"model": folder, **flags}))
