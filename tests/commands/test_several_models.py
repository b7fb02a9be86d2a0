"""Ensembles and candidates: what commands write with them, and what is refused."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from commands import loading
from commands.evaluate import evaluate
from commands.generate import generate
from data.tokenizers.training import train_tokenizer
from memory.estimate.generation import Writing
from memory.observe.processes import ProcessTree
from model.decoding.sampling import Row
from serving.server import api_of
from settings.declared import Config
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from tests.training.small_trained import SHAPE, save_trained
from training.evaluation import answers as answering
from training.evaluation.answers import decoder_of, weighted
from training.evaluation.minimum_bayes_risk import similarities

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["short", "a longer prompt than that", "河水从桥下流过", "x", "two words"]
SEARCHED, DRAWN = 2, 5


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """Two models of different shapes with the same tokenizer, and pairs to measure them on."""
    wide = dataclasses.replace(SHAPE, num_decoder_layers=3)
    made = tmp_path_factory.mktemp("models")
    folders = [save_trained(made / "a", 3), save_trained(made / "b", 7, shape=wide)]
    rows = [{"prompt": prompt, "response": f"answer {prompt}"} for prompt in PROMPTS]
    (made / "pairs.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows), encoding="utf8")
    return folders


def settings(command: str, model: str, **flags: Any) -> Config:
    defaults = {"model": model, "max_new_tokens": 8, "max_seq_len": 64, "mixed_precision": "no"}
    return load(command, {name: str(value) for name, value in {**defaults, **flags}.items()})


def named(folders: list[Path]) -> str:
    return ",".join(map(str, folders))


def loaded(config: Config) -> loading.Trained:
    return loading.load_trained(config, loading.find_models(config), loading.writing_of(config, 1))


def encoded(trained: loading.Trained) -> list[list[int]]:
    return [[*ids.tolist(), 1] for ids in trained.tokenizer.encode_batch(PROMPTS)]


def test_generate_writes_what_the_ensemble_answers(folders: list[Path], tmp_path: Path) -> None:
    source, output = tmp_path / "prompts.txt", tmp_path / "answers.jsonl"
    source.write_text("\n".join(PROMPTS) + "\n", encoding="utf8")
    both = settings("generate", named(folders), input=source, output=output)
    generate(both)
    written = [json.loads(line)["response"] for line in output.read_text(encoding="utf8").splitlines()]
    trained = loaded(both)
    rows = [Row(ids, both.generate) for ids in encoded(trained)]
    by_hand = answering.write(decoder_of(trained.models), rows)
    assert written == [trained.tokenizer.decode_answer(ids) for ids in by_hand]
    single = settings("generate", str(folders[0]))
    assert by_hand != loaded(single).answer(encoded(trained), single)
    with pytest.raises(UserError, match="holds answers already"):
        generate(both)


@pytest.mark.parametrize("by", ["chrf", "bleu"])
def test_the_candidate_that_agrees_most_is_chosen(folders: list[Path], by: str) -> None:
    """Of both models: of each the answers of a search and drawn ones."""
    config = settings(
        "generate", named(folders), candidates=2 * (SEARCHED + DRAWN) - 1, choose_by=by, num_beams=SEARCHED
    )
    trained = loaded(config)
    inputs, expected = encoded(trained), list[str]()
    for ids in inputs:
        candidates = list[tuple[list[int], float]]()
        for number, model in enumerate(trained.models):
            best = answering.generate_best(decoder_of([model], SEARCHED), [ids], config.generate)[0]
            drawn = list[list[int]]()
            for draw in range(DRAWN - number):  # the second model's share is one less
                how = config.changed(num_beams=1, temperature=(0.6, 0.8, 1.0)[draw % 3]).generate
                drawn += answering.write(decoder_of([model]), [Row(ids, how, config.run.seed + number * 13 + draw)])
            assert len(best) + len(drawn) == 7 - number
            candidates += weighted(best, drawn)
        texts = [trained.tokenizer.decode_answer(tokens) for tokens, _ in candidates]
        weights = [weight for _, weight in candidates]
        found = similarities(texts, by)
        expected.append(texts[((found + found.T) @ weights).argmax()])
    chosen = trained.answer(inputs, config)
    assert [trained.tokenizer.decode_answer(tokens) for tokens in chosen] == expected


def test_evaluate_measures_an_ensemble(folders: list[Path], tmp_path: Path) -> None:
    places = {"output_dir": tmp_path / "runs", "log_dir": tmp_path / "logs", "cache_dir": tmp_path / "cache"}
    rows = {"validation_file": folders[0].parent / "pairs.jsonl", **places}
    each = [evaluate(settings("evaluate", str(folder), **rows)) for folder in folders]
    both = evaluate(settings("evaluate", named(folders), **rows))
    assert both.loss == pytest.approx(sum(one.loss for one in each) / 2)
    assert both.metrics["chrf"] not in [one.metrics["chrf"] for one in each]
    pooled = evaluate(settings("evaluate", named(folders), candidates=6, **rows))
    assert pooled.loss == both.loss and pooled.metrics["chrf"] not in [one.metrics["chrf"] for one in (*each, both)]


def test_where_not_all_fit_blocks_are_read_from_the_file(folders: list[Path], tmp_path: Path) -> None:
    shape = dataclasses.replace(SHAPE, d_model=128, d_ff=2048, num_layers=6, num_decoder_layers=6)
    large = [save_trained(tmp_path / name, seed, shape=shape) for seed, name in enumerate("ab")]
    config = settings("generate", named(large), weights_dir=tmp_path / "weights")
    whole = loaded(config)
    total = sum(weights.bytes for _, weights in whole.shapes)
    inputs = encoded(whole)
    answers = whole.answer(inputs, config)
    needed = sum(whole.predict(loading.writing_of(config, 1)).values()) - whole.room.base_bytes
    budget = ProcessTree().usage().anon_bytes + needed - total // 2
    small = loaded(config.changed(memory_budget=budget))
    assert sum(weights.bytes for _, weights in small.shapes) < total
    assert small.answer(inputs, config) == answers
    for blockwise in small.models:
        blockwise.weight_store.close()


def test_an_ensemble_needs_more_memory_than_its_models_in_turn(folders: list[Path]) -> None:
    together = loaded(settings("generate", named(folders)))
    in_turn = loaded(settings("generate", named(folders), candidates=4))
    writing = Writing(8, 64, 64)
    alone, both = in_turn.predict(writing), together.predict(writing)
    assert both["weights"] == alone["weights"] and both["keys and values"] > alone["keys and values"]


def test_an_ensemble_is_served(folders: list[Path]) -> None:
    config = load("serve", {"model": named(folders), "max_seq_len": "64", "mixed_precision": "no"})
    api = api_of(loaded(config), config)
    assert api.name == "a+b" and api.engine.decoder is not None and len(api.engine.decoder.others) == 1
    single = api_of(loaded(config.changed(model=str(folders[0]))), config)
    assert api.engine.capacity.parts["weights"] > 2 * single.engine.capacity.parts["weights"]


def test_what_cannot_be_joined_is_refused(folders: list[Path], tmp_path: Path) -> None:
    odd = save_trained(tmp_path / "odd", 5)
    train_tokenizer(["other words"], "words", 200, 2**20).save(odd)
    for flags, told in (
        ({"model": named([folders[0], odd])}, "tokenizer"),
        ({"model": named([*folders, tmp_path / "none"])}, "no such folder"),
        ({"candidates": 4, "num_answers": 2, "num_beams": 2}, "--num_answers"),
    ):
        with pytest.raises(UserError, match=told):
            generate(settings("generate", **{"model": str(folders[0]), "input": "x", **flags}))
    with pytest.raises(UserError, match="several models"):
        loading.find_model(settings("generate", named(folders)))
    with pytest.raises(DoesNotFit, match="models'"):
        generate(settings("generate", named(folders), input="x", memory_budget="1M"))
