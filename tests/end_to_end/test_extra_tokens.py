"""Tokens that a run adds to its base: trained, resumed, used, merged."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.formats.shape_file import read_config
from tests.end_to_end.conftest import World

WORK = (
    "--is_finetune=True", "--max_seq_len=64", "--effective_batch_size=4", "--sample_rows=0", "--eval_rows=4", "--save_steps=2",
    "--learning_rate=0.01", "--optimizer=adamw",
)  # fmt: skip
LORA = ("--lora_rank=2", "--lora_base=int8")


def flags_of(world: World, folder: Path) -> tuple[str, ...]:
    (folder / "tokens.txt").write_text("<a_1>\n<a_2>\nriver\n")
    rows = [{"prompt": f"the river {number}", "response": f"<a_{number % 2 + 1}>"} for number in range(40)]
    (folder / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    base = f"--finetune_from={world.place.runs / 'whole'}"
    return f"--train_file={folder / 'rows.jsonl'}", base, f"--extra_tokens={folder / 'tokens.txt'}", *WORK


def test_rows_of_new_tokens_train_beside_adapters(pretrained: World, tmp_path: Path) -> None:
    place, whole = pretrained.beside(tmp_path), pretrained.place.runs / "whole"
    place.do("train", *flags_of(pretrained, tmp_path), *LORA, "--max_steps=4", "--run_name=lora")
    adapter, base = place.runs / "lora", Tokenizer.load(whole)
    tokenizer = Tokenizer.load(adapter)
    first, count = base.size, 3 - (base.token_to_id("river") is not None)
    assert tokenizer.size == first + count and tokenizer.encode_batch(["<a_2><a_1>"])[0].tolist()[-2:] == [
        first + 1,
        first,
    ]
    place.do("merge", f"--adapter={adapter}", f"--output={tmp_path / 'merged'}")
    merged, before = hf_format.load(tmp_path / "merged"), hf_format.load(whole)
    shape = read_config(whole)
    assert merged.config.vocab_size == max(shape.vocab_size, first + count)
    assert torch.equal(merged.embedding[:first], before.embedding[:first])
    (pieces,) = base.encode_batch(["<a_1>"])
    start = before.embedding.detach()[pieces[pieces != base.unk_id]].mean(0)
    assert 0 < float((merged.embedding[first].detach() - start).norm() / start.norm()) < 1


@pytest.mark.slow
@pytest.mark.parametrize("lora", [(), LORA], ids=["all", "lora"])
def test_a_resumed_run_goes_on_exactly(pretrained: World, tmp_path: Path, lora: tuple[str, ...]) -> None:
    place, flags = (
        pretrained.beside(tmp_path),
        (*flags_of(pretrained, tmp_path), *lora, "--lr_schedule=constant", "--warmup_steps=0"),
    )
    place.do("train", *flags, "--max_steps=4", "--run_name=whole")
    place.do("train", *flags, "--max_steps=2", "--run_name=cut")
    place.do("train", "--is_keep_training=True", "--run_name=cut", "--max_steps=4")
    assert place.losses("cut") == place.losses("whole")
    name = "adapter_model.safetensors" if lora else "model.safetensors"
    ours, theirs = (load_file(place.runs / run / "checkpoints/latest" / name) for run in ("cut", "whole"))
    assert ours.keys() == theirs.keys() and all(torch.equal(ours[key], theirs[key]) for key in ours)
    place.do("evaluate", f"--model={place.runs / 'cut'}")


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_transformers_reads_the_folder(pretrained: World, tmp_path: Path) -> None:
    transformers = pytest.importorskip("transformers")
    place = pretrained.beside(tmp_path)
    place.do("train", *flags_of(pretrained, tmp_path), "--max_steps=2", "--run_name=all")
    theirs = transformers.AutoModelForSeq2SeqLM.from_pretrained(place.runs / "all", dtype=torch.float32)
    tokenizer, ours = transformers.AutoTokenizer.from_pretrained(place.runs / "all"), Tokenizer.load(place.runs / "all")
    ids = tokenizer("the river <a_1>")["input_ids"]
    assert len(tokenizer) == ours.size and ids[:-1] == ours.encode_prompts(["the river <a_1>"])[0].tolist()
    model, source, target = hf_format.load(place.runs / "all"), torch.tensor([ids]), torch.tensor([[0, ids[-2]]])
    with torch.no_grad():
        found = theirs(input_ids=source, decoder_input_ids=target).logits
        torch.testing.assert_close(found, model.logits(source, target), rtol=1e-4, atol=1e-4)
