"""Finetuning beside transformers and PEFT: the same rows on both sides, a fair peer, the table and its bars."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from benchmarks import finetuning
from benchmarks.finetuning import KINDS, Case, measure, of, ours_words, peer_words, table, verdicts
from benchmarks.parts import finetuning_data
from benchmarks.parts.finetuning_data import HELD_OUT, Setting
from config import load
from data.tokenizers.tokenizer import Tokenizer

MIB = 2**20


@pytest.fixture(scope="module")
def setting(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Setting]:
    """A setting whose files are made."""
    folder = tmp_path_factory.mktemp("finetuning")
    rows = [{"prompt": f"question {n} " * (1 + n % 3), "response": f"answer {n} " * (1 + n % 4)} for n in range(40)]
    finetuning_data.write_rows(folder / "pairs.jsonl", rows)
    made = Setting("tiny", str(folder / "pairs.jsonl"), rows=4, steps=2, source=32, target=32)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(finetuning_data, "ROOT", folder)
        made.make()
        yield made


def test_both_sides_learn_the_same_rows(setting: Setting) -> None:
    steps = json.loads((setting.folder / "batches.json").read_text(encoding="utf8"))
    tokenizer = Tokenizer.load(setting.folder / "base")
    told = [tokenizer.decode(row["labels"]) for step in steps for row in step]
    rows = [json.loads(line) for line in (setting.folder / "pairs.jsonl").read_text(encoding="utf8").splitlines()]
    assert sorted(text.strip() for text in told) == sorted(row["response"].strip() for row in rows)
    assert [len(step) for step in steps] == [4, 4]
    assert len((setting.folder / "pairs_valid.jsonl").read_text().splitlines()) == HELD_OUT


def test_preferences_have_the_same_prompts(setting: Setting) -> None:
    pairs, preferences = (
        [json.loads(line) for line in (setting.folder / f"{name}.jsonl").read_text().splitlines()]
        for name in ("pairs", "preferences")
    )
    assert [(row["prompt"], row["chosen"]) for row in preferences] == [tuple(row.values()) for row in pairs]
    assert all(row["chosen"] != row["rejected"] for row in preferences)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("mode", ["standard", "ultra"])
def test_our_flags_are_the_trainer_s(setting: Setting, kind: str, mode: str) -> None:
    _, command, *flags = ours_words(Case("ours", kind, mode), setting)
    config = load(command, dict(flag.removeprefix("--").split("=", 1) for flag in flags))
    assert (config.memory.memory_mode, config.model.dropout_rate, config.train.effective_batch_size) == (mode, 0.1, 4)
    assert bool(config.lora.lora_rank) == ("lora" in kind)


def test_too_few_pairs_are_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    finetuning_data.write_rows(tmp_path / "few.jsonl", [{"prompt": "a", "response": "b"}] * 50)
    monkeypatch.setattr(finetuning_data, "ROOT", tmp_path)
    with pytest.raises(SystemExit, match="has 1 different responses; 16 are needed"):
        Setting("tiny", str(tmp_path / "few.jsonl"), rows=4, steps=2, source=32, target=32).make()


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing:FutureWarning")  # PEFT calls what transformers renamed
def test_the_peer_accumulates_exactly_and_trains_what_it_says(setting: Setting, tmp_path: Path) -> None:
    torch = pytest.importorskip("torch")
    pytest.importorskip("peft")
    from benchmarks.parts.finetuning_peer import build, run_step

    rows = json.loads((setting.folder / "batches.json").read_text(encoding="utf8"))[0]
    base = shutil.copytree(setting.folder / "base", tmp_path / "base")
    facts = json.loads((base / "config.json").read_text())
    assert facts["dropout_rate"] == 0.1, "as T5 ships"
    (base / "config.json").write_text(json.dumps({**facts, "dropout_rate": 0.0}))
    gradients = []
    for batch_size, recompute in ((4, False), (1, True)):
        model = build("frozen", recompute, str(base))
        run_step(model, torch.optim.SGD(model.parameters(), lr=0.0), rows, batch_size)
        gradients.append({name: w.grad for name, w in model.named_parameters() if w.grad is not None})
    assert gradients[0].keys() == gradients[1].keys() and all(name.startswith("decoder.") for name in gradients[0])
    for name, gradient in gradients[0].items():
        torch.testing.assert_close(gradients[1][name], gradient, rtol=1e-3, atol=1e-5)
    adapted = build("lora", True, str(base))
    trained = [name for name, weight in adapted.named_parameters() if weight.requires_grad]
    assert trained and all("lora_" in name and (".q." in name or ".v." in name) for name in trained)


def run(side: str, kind: str, way: str, peak: int, speed: float) -> dict[str, Any]:
    more = {"peak_bytes": peak * MIB, "high_water_bytes": (peak + 10) * MIB, "rows_per_second": speed}
    return {"side": side, "kind": kind, "way": way, **more}


RUNS = [
    run("ours", "full", "standard", 400, 4.0), run("ours", "full", "ultra", 200, 2.0), run("ours", "full", "ultra", 210, 1.0),
    run("ours", "dpo", "ultra", 280, 1.0), run("peer", "lora", "1c", 300, 1.0), run("peer", "lora", "16", 900, 3.0),
    {"side": "peer", "kind": "full", "way": "1", "failed": "killed"},
]  # fmt: skip


def test_the_table_takes_each_side_s_best() -> None:
    _, _, ours, full, lora, dpo = table(RUNS).splitlines()
    assert (
        "| 210.0 MiB (220.0 MiB) | 2.00 | `--memory_mode=ultra` | 4.00 at 400.0 MiB | `--memory_mode=standard` |"
        in ours
    )
    assert "micro-batch 1, gradient checkpointing | 3.00 at 900.0 MiB | micro-batch 16 |" in lora
    assert "killed" in full and "DPO" in dpo
    assert [found["peak_bytes"] for found in of(RUNS, "ours", "full")] == [400 * MIB, 210 * MIB]


def test_the_bars() -> None:
    first, second = verdicts(RUNS)
    assert first.startswith("Bar, kept") and "resident: 220.0 MiB to 310.0 MiB, 0.71 of it" in first
    assert "Anonymous memory alone: 210.0 MiB to 300.0 MiB, 0.70 of it" in first
    # a frozen weight that stays mapped in its file is no anonymous memory, but the process's all the same
    assert verdicts([*RUNS, {**run("peer", "lora", "1", 100, 1.0), "high_water_bytes": 500 * MIB}])[0].startswith(
        "Bar, kept"
    )
    assert second.startswith("Bar, **missed**") and second.endswith("1.33.")
    assert verdicts(RUNS[3:4]) == []


@pytest.mark.slow
@pytest.mark.parametrize(
    "case", [Case("ours", "full", "ultra"), Case("ours", "dpo-lora", "standard"), Case("peer", "lora", "1c")]
)
def test_a_system_runs(setting: Setting, case: Case) -> None:
    found = measure(case, setting)
    assert "failed" not in found and len(found["losses"]) == 2 and found["rows_per_second"] > 0
    assert found["peak_bytes"] > 100 * MIB
    assert peer_words(case, setting)[2] == case.kind and finetuning.least([found]) == found
