"""Loss and scores of a model on rows that the user names, against the same worked out by hand."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from commands.evaluate import evaluate, evaluation_rows
from data.prepare.preparing import prepare
from data.text.templates import USER, Template
from data.tokenizers.tokenizer import Tokenizer
from data.tokenizers.training import train_tokenizer
from memory.answers import AnswerBatch, HeldModel, rows_to_measure
from memory.processes import ProcessTree
from model import hf_format
from model.formats.peft import save_adapters
from model.formats.shape_file import read_config
from model.lora.adapter import add_adapters
from model.lora.form import LoraSettings
from settings.declared import Config, GenerateConfig
from settings.errors import DoesNotFit, UserError
from settings.loading import load
from tests.commands.small import flags_of, read_rows, write_rows
from tests.data.loaders import loader_of
from tests.training.small_trained import save_trained
from training.evaluation.answers import AnswerWriter
from training.evaluation.samples import AnsweredRow, generate_metrics
from training.evaluation.scores import AnswerScores, metric_names
from training.loaded_model import load_model
from training.processes.group import Group
from training.saved_model import SavedModel, find_model
from training.setup.adapters import fingerprint_of

pytestmark = pytest.mark.usefixtures("one_thread")
PROMPTS = ["hello", "河水", "two words", "a b c d", "last"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model, and rows whose right answers begin as the model's own: random weights would score nothing."""
    folder = save_trained(tmp_path_factory.mktemp("model"))
    texts = [text.strip() for text in answers_of(flags_of("generate", model=folder, max_new_tokens=12), PROMPTS)]
    rows = [
        {"prompt": prompt, "response": text[: 4 + index] + " 河水 more"[:index] + "."}
        for index, (prompt, text) in enumerate(zip(PROMPTS, texts, strict=True))
    ]
    write_rows(folder / "pairs.jsonl", rows)
    return folder


def answers_of(config: Config, prompts: list[str]) -> list[str]:
    """The answers of a model to prompts, each alone."""
    trained = load_model(config, find_model(config))
    inputs = [[*ids.tolist(), 1] for ids in trained.tokenizer.encode_batch(prompts)]
    return [trained.tokenizer.decode_with_unknown(trained.writer(config).answers([ids])[0]) for ids in inputs]


def settings(folder: Path, tmp_path: Path, **flags: Any) -> Config:
    folders = {"output_dir": tmp_path / "runs", "log_dir": tmp_path / "logs", "cache_dir": folder / "cache"}
    defaults = {"model": folder, "validation_file": folder / "pairs.jsonl", "mixed_precision": "no", **folders}
    return flags_of("evaluate", **{**defaults, **flags})


def test_loss_and_scores(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The loss is that of the whole model under plain autograd, each row alone; scores are sacreBLEU's own."""
    from sacrebleu.metrics import BLEU, CHRF

    result = evaluate(settings(folder, tmp_path))
    screen = capsys.readouterr().out
    pairs = [(row["prompt"], row["response"]) for row in read_rows(folder / "pairs.jsonl")]
    model = hf_format.load(folder)
    tokenizer = Tokenizer.load(folder)
    losses, tokens = [], []
    for pair in pairs:
        ids, labels = (torch.tensor([[*tokenizer.encode_batch([text])[0].tolist(), 1]]) for text in pair)
        losses.append(model(ids, labels=labels).item())
        tokens.append(labels.numel())
    assert result.loss == pytest.approx(np.average(losses, weights=tokens), rel=1e-4) and result.rows == len(PROMPTS)
    answers = [text.strip() for text in answers_of(settings(folder, tmp_path), PROMPTS)]
    for name, metric in (("chrf", CHRF()), ("bleu", BLEU()), ("char_bleu", BLEU(tokenize="zh"))):
        score = metric.corpus_score(answers, [[response for _, response in pairs]]).score
        assert result.metrics[name] == pytest.approx(score), name
    assert len(result.metrics) == 12 and result.metrics["chrf"] > 0
    assert "perplexity" in screen and f"{result.metrics['chrf']:.2f}" in screen
    assert "5, scores in percent" in screen and screen.count("reference") == 3


def test_only_what_is_asked_for(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(settings(folder, tmp_path, metrics="f1,rouge_l", eval_generate_rows=2, max_new_tokens=3))
    assert list(result.metrics) == ["f1", "rouge_l"] and result.rows == 5
    words = capsys.readouterr().out
    assert "2 of 5, scores in percent" in words and "2 of 2 answers cut at --max_new_tokens=3" in words
    result = evaluate(settings(folder, tmp_path, eval_generate_rows=0, eval_rows=3))
    assert result.metrics == {} and result.rows == 3


def test_the_best_of_several_right_answers_counts(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "pairs.jsonl"
    listed = tmp_path / "colors.txt"
    listed.write_text("a red fox\n")  # The model answers nothing else.
    right = [["a red fox"], ["blue", "a red fox"], ["two red foxes", "blue"], ["green"]]
    write_rows(rows, ({"prompt": "x", "response": answers} for answers in right))
    flags = {"validation_file": rows, "answers": listed, "max_new_tokens": 60, "json": True}
    result = evaluate(settings(folder, tmp_path, **flags, metrics="exact_match,f1,identical,bleu"))
    report = json.loads(capsys.readouterr().out)
    expected = {"exact_match": 50.0, "identical": 50.0, "f1": 100 * (1 + 1 + 2 / 5 + 0) / 4}
    assert {name: result.metrics[name] for name in expected} == pytest.approx(expected)
    assert report["sacrebleu"]["bleu"].startswith("nrefs:var|") and report["answers"] == 4
    config = load("train", {"train_file": str(rows), "is_finetune": "True", "cache_dir": str(folder / "cache")})
    loader = loader_of(prepare(config).train_dir, "pairs", config)
    batch = loader.batch_of(np.arange(3))
    assert batch.references is None and (batch.labels == loader.row_settings.special.eos).sum() == batch.num_rows == 3


def test_answers_of_one_word_have_few_scores(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "words.jsonl"
    write_rows(rows, ({"prompt": "x", "response": word} for word in ("red", "正面", "B-PER")))
    flags = {"validation_file": rows, "max_new_tokens": 2}
    assert set(evaluate(settings(folder, tmp_path, **flags)).metrics) == {"exact_match", "f1", "chrf"}
    assert "bleu" not in capsys.readouterr().out
    assert set(evaluate(settings(folder, tmp_path, **flags, metrics="bleu")).metrics) == {"bleu"}


def test_json_has_all_figures_and_signatures(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    result = evaluate(settings(folder, tmp_path, metrics="geometric_mean", max_new_tokens=3, json=True))
    report = json.loads(capsys.readouterr().out)
    assert report["loss"] == result.loss and report["geometric_mean"] == result.metrics["geometric_mean"]
    assert "tok:13a" in report["sacrebleu"]["bleu"] and "nw:2" in report["sacrebleu"]["chrf++"]


def test_all_rows_of_a_file_that_is_named_are_measured_though_its_run_evaluated_fewer(
    folder: Path, tmp_path: Path
) -> None:
    run = tmp_path / "run"
    shutil.copytree(folder, run)
    load("train", {"objective": "pairs", "train_file": str(folder / "pairs.jsonl"), "eval_rows": "2"}).save(
        run / "settings.json"
    )
    assert evaluate(settings(folder, tmp_path, model=run)).rows == len(PROMPTS) > 2
    assert evaluate(settings(folder, tmp_path, model=run, eval_rows=3)).rows == 3


def test_the_loss_keeps_to_the_budget(folder: Path, tmp_path: Path) -> None:
    base = ProcessTree().usage().anon_bytes
    model_held = HeldModel.of(read_config(folder), "float32", "float32", base)

    def rows_in(budget: int, requested: int | str = "auto") -> int:
        return rows_to_measure(model_held, budget, requested, 4, (64, 64))

    needed = {rows: sum(model_held.measuring(rows, 64, 64).values()) for rows in (1, 3, 4, 8, 9)}
    assert [rows_in(needed[rows]) for rows in (9, 4, 3, 1)] == [4, 4, 3, 1]
    assert rows_in(needed[9], 9) == 9
    for requested, too_small in ((9, needed[8]), ("auto", base)):
        with pytest.raises(DoesNotFit, match=r"does not hold .* of up to 64 and 64 tokens: base .*--memory_budget="):
            rows_in(too_small, requested)
    with pytest.raises(DoesNotFit, match=r"does not hold 4,096 rows .*--eval_batch_size_per_gpu=2048"):
        evaluate(settings(folder, tmp_path, eval_batch_size_per_gpu=4096, memory_budget=base + 2**27))


def test_no_answer_is_right_where_the_reference_has_unknown_tokens(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = save_trained(tmp_path / "model")
    tokenizer = train_tokenizer(["AA BB CC"], "words", 200, 2**20)
    tokenizer.save(folder)
    rows = [{"prompt": "CC", "response": text} for text in ("AA NEVER BB SEEN", "AA BB")]
    write_rows(folder / "pairs.jsonl", rows)
    wrong, right = (tokenizer.encode_batch([text])[0].tolist() for text in ("AA <unk> BB <unk>", "AA BB"))
    monkeypatch.setattr(AnswerWriter, "answers", lambda writer, inputs: [wrong, right])
    metrics = evaluate(settings(folder, tmp_path)).metrics
    assert metrics["exact_match"] == metrics["identical"] == 50.0
    assert all(score < 100.0 for score in metrics.values()), metrics
    words = " ".join(capsys.readouterr().out.split())
    assert "unknown 1 row with unknown tokens in the reference, which no answer matches" in words
    assert "AA <unk> BB <unk>" in words, "and the reference is shown whole"


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        ({"metrics": "meteor"}, "meteor is not known"),
        ({"prepare_text": "prott5"}, "^--prepare_text = prott5, has no effect with objective pairs"),
    ],
)
def test_what_cannot_be_done_is_refused(folder: Path, tmp_path: Path, flags: dict[str, str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        evaluate(settings(folder, tmp_path, **flags))


class Rank(Group):
    """One of two processes, which remembers what it gives to sums."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank, self.size, self.sums = rank, 2, list[float]()

    def all_reduce_sum(self, *numbers: float) -> list[float]:
        self.sums = list(numbers)
        return self.sums


def test_processes_share_the_rows_and_add_up_the_scores(folder: Path, tmp_path: Path) -> None:
    config, _, loader = evaluation_rows(settings(folder, tmp_path), SavedModel.read(folder))
    trained = load_model(config, find_model(config))
    names = metric_names("auto", 1)

    def score(group: Group) -> tuple[dict[str, float], list[AnsweredRow]]:
        return generate_metrics(
            lambda inputs: [[ids] for ids in trained.writer(config.with_changes(max_new_tokens=9)).answers(inputs)],
            loader,
            trained.tokenizer,
            GenerateConfig(max_new_tokens=9),
            group,
            rows=5,
            batch_size=2,
            names=names,
            num_samples=9,
        )[:2]

    whole, samples = score(Group())
    ranks = [Rank(0), Rank(1)]
    shares = [score(rank)[1] for rank in ranks]
    assert sorted(sample.prompt for share in shares for sample in share) == sorted(sample.prompt for sample in samples)
    assert sorted(sample.prompt for sample in samples) == sorted(PROMPTS)
    both = AnswerScores(names).result(np.sum([rank.sums[:-1] for rank in ranks], axis=0))
    assert both == pytest.approx(whole, rel=1e-12)


def test_an_adapter_is_measured_as_it_has_learnt_however_it_is_named(
    folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its prefix, its lengths and its rows, and not those of its base."""
    adapted, model = tmp_path / "adapted", hf_format.load(folder)
    form = LoraSettings(rank=2, alpha=4.0)
    for adapter in add_adapters(model, form, seed=1).values():
        torch.nn.init.normal_(adapter.b, generator=torch.Generator().manual_seed(0))
    save_adapters(model, form, adapted, str(folder), fingerprint_of(folder))
    Tokenizer.load(folder).save(adapted)
    Template.load("plain", "say again: ").save(adapted)
    rows = {"train_file": str(folder / "pairs.jsonl"), "validation_file": str(folder / "pairs.jsonl")}
    saved = load("train", {**rows, "is_finetune": "True", "source_prefix": "say again: ", "max_seq_len": "64"})
    saved.save(adapted / "settings.json")
    flags = {"model": "auto", "adapter": adapted, "validation_file": folder / "pairs.jsonl"}
    by_adapter = evaluate(settings(folder, tmp_path, **flags))
    by_model = evaluate(settings(folder, tmp_path, model=adapted))
    over_base = evaluate(settings(folder, tmp_path, adapter=adapted))
    assert by_adapter.loss == by_model.loss == over_base.loss != evaluate(settings(folder, tmp_path)).loss
    assert capsys.readouterr().out.count(f"evaluation of {adapted}") == 3
    config = settings(folder, tmp_path, **flags)
    trained = load_model(config, find_model(config), AnswerBatch(1, 8, 8))
    assert trained.template.prompt([(USER, "a")]) == "say again: a"


def test_places_are_those_of_who_evaluates(folder: Path, tmp_path: Path) -> None:
    """The settings beside a model from elsewhere say how its rows were made, and not where anything is written."""
    foreign = {"cache_dir": "/theirs/cache", "log_dir": "/theirs/logs", "weights_dir": "/theirs/weights"}
    saved = load("train", {"train_file": str(folder / "pairs.jsonl"), "max_seq_len": "64", **foreign})
    run_dir = tmp_path / "run"
    run_dir.mkdir()
    for path in folder.iterdir():
        if path.is_file():
            (run_dir / path.name).symlink_to(path)
    saved.save(run_dir / "settings.json")
    merged, _, _ = evaluation_rows(settings(folder, tmp_path, model=run_dir), SavedModel.read(run_dir))
    assert merged.data.max_seq_len == 64
    assert merged.data.cache_dir == str(folder / "cache") and merged.run.log_dir == str(tmp_path / "logs")
    assert merged.memory.weights_dir == "auto"


def test_answers_come_from_a_list(folder: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    rows = tmp_path / "pairs.jsonl"
    listed = tmp_path / "colors.txt"
    write_rows(rows, ({"prompt": "x", "response": name} for name in ("red", "blue")))
    listed.write_text("red\n")
    result = evaluate(settings(folder, tmp_path, validation_file=rows, answers=listed, max_new_tokens=60))
    assert result.metrics["exact_match"] == 50.0
    assert "1 of 2 rows" in capsys.readouterr().out


def test_ranked_answers(folder: Path, tmp_path: Path) -> None:
    """The same prompt with each answer of the list: right ones stand at every rank, whatever the model."""
    rows, listed, names = tmp_path / "pairs.jsonl", tmp_path / "colors.txt", ("red", "blue", "green")
    write_rows(rows, ({"prompt": "x", "response": name} for name in names))
    listed.write_text("\n".join(names))
    flags = {"validation_file": rows, "answers": listed, "num_beams": 3, "num_answers": 3}
    result = evaluate(settings(folder, tmp_path, **flags, metrics="recall@1,recall@2,ndcg@3,mrr"))
    assert result.metrics == pytest.approx(
        {
            "recall@1": 100 / 3,
            "recall@2": 200 / 3,
            "ndcg@3": 100 * (1 + 1 / np.log2(3) + 1 / 2) / 3,
            "mrr": 100 * (1 + 1 / 2 + 1 / 3) / 3,
        }
    )
    for wrong, setting in (({"metrics": "recall@4"}, "--num_answers=4"), ({"num_answers": 4}, "--num_answers")):
        with pytest.raises(UserError, match=setting):
            evaluate(settings(folder, tmp_path, **{**flags, **wrong}))
