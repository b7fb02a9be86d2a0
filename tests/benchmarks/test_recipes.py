from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parts.memory_picture import draw_memory, thinned
from benchmarks.parts.recipe_data import description, page_lines, write
from benchmarks.parts.recipe_peer import collate
from benchmarks.parts.simple_answers import first_sentence, nearest, simple_scores, words
from benchmarks.recipes import RECIPES, SHORT_RUNS, answers_table, steps_in, table, taken
from config import load

STANZA = """Package: river
Description-md5: 0
Description-en: boats on a river
 {body}
 .
 A second paragraph.
"""


def test_a_description_is_its_text_and_its_synopsis() -> None:
    body = "Small boats. " * 20
    assert description(STANZA.format(body=body)) == (f"{body.strip()}\nA second paragraph.", "boats on a river")
    assert description(STANZA.format(body="Too short.")) is None
    assert description("Package: river\n") is None


def test_a_page_shows_its_blocks_and_not_its_scripts() -> None:
    page = "<h1>Title</h1><script>x = 1</script><p>One <b>line</b>.</p><div>Two</div><nav>menu</nav>"
    assert page_lines(page) == ["Title", "One line.", "Two"]


def test_rows_are_parted_by_their_content(tmp_path: Path) -> None:
    rows = [(f"p{number}", f"r{number}") for number in range(400)]
    counts = write(iter(rows), "x", tmp_path)
    assert counts["train"] + counts["valid"] == 400 and 2 <= counts["valid"] <= 30
    held = (tmp_path / "x_valid.jsonl").read_text()
    write(iter(rows[::-1]), "y", tmp_path)
    assert sorted(held.splitlines()) == sorted((tmp_path / "y_valid.jsonl").read_text().splitlines())


@pytest.mark.parametrize("recipe", RECIPES)
def test_every_recipe_has_a_preset_that_loads(recipe: str) -> None:
    config = load("train", {"preset": f"recipe_{recipe}"})
    assert config.data.objective == "pairs" and recipe in str(config.data.train_file)
    assert config.data.source_prefix in ("auto", "summarize: ", "translate English to Chinese: ")


def test_the_peer_sees_padded_rows() -> None:
    torch = pytest.importorskip("torch")
    batch = collate([{"input_ids": [5, 1], "labels": [7]}, {"input_ids": [6], "labels": [8, 1]}], pad=0)
    assert torch.equal(batch["input_ids"], torch.tensor([[5, 1], [6, 0]]))
    assert torch.equal(batch["attention_mask"], torch.tensor([[1, 1], [1, 0]]))
    assert torch.equal(batch["labels"], torch.tensor([[7, -100], [8, 1]]))


def test_what_a_finished_run_took_is_of_all_its_starts() -> None:
    begin, end = {"event": "start"}, {"event": "end", "watched_seconds": 70.0, "measured_peak_bytes": 5}
    steps = [{"event": "step", "time": 1000.0 + 10 * n, "seconds": 10.0, "peak_bytes": 5 + n % 3} for n in range(6)]
    assert taken([begin, *steps[:1], end]) == (70.0, 5)
    assert taken([begin, *steps, begin, *({**step, "time": 9000.0} for step in steps[:2]), end]) == (130.0, 7)


SHAPE = {
    "d_model": 192,
    "num_layers": 3,
    "num_decoder_layers": 2,
    "vocab_size": 8000,
    "optimizer": "muon",
    "num_beams": 1,
}


def test_the_table_shows_both_sides() -> None:
    side = {"seconds": 90.0, "peak_bytes": 2**30, "loss": 1.5, "rouge_l": 20.0, "rouge_1": 21.0, "exact_match": 0.5}
    figures = json.loads(json.dumps({
        "steps": 10, "rows": 8, "settings": SHAPE, "planned_peak_bytes": 2**30,
        "ours": side, "peer": {**side, "rouge_l": 10.0},
    }))  # fmt: skip
    text = table("summarise", figures)
    assert "| this project | 1.00 GiB | 1.5 min | 1.500 | 20.0 | 21.0 | 0.5 |" in text
    assert "| Seq2SeqTrainer, equal rows | 1.00 GiB | 1.5 min | 1.500 | 10.0 | 21.0 | 0.5 |" in text
    assert text.startswith(
        "10 steps of 8 rows, from random weights, 192 wide, 3 + 2 blocks, 8,000 tokens, muon; planned"
    )
    del figures["peer"]
    assert "Seq2SeqTrainer" not in table("summarise", figures)


def test_equal_time_is_told_by_two_short_runs() -> None:
    few, more = SHORT_RUNS
    began, step = 10.0, 2.0
    assert steps_in(began + 400 * step, began + few * step, began + more * step) == 400
    assert steps_in(1.0, began + few * step, began + more * step) == 1


def test_the_table_has_the_peer_at_equal_time_and_word_errors() -> None:
    side = {"seconds": 90.0, "peak_bytes": 2**30, "loss": 1.5, "identical": 80.0, "wer": 20.0}
    figures = {"steps": 10, "rows": 8, "settings": SHAPE, "planned_peak_bytes": 2**30, "ours": side,
               "peer": side, "peer_equal_time": {**side, "wer": 25.0}, "peer_steps": 1234}  # fmt: skip
    text = table("g2p_ten", figures)
    assert "| trained by | peak | time | loss | identical | wer |" in text
    assert "| Seq2SeqTrainer, equal time (1,234 steps) | 1.00 GiB | 1.5 min | 1.500 | 80.0 | 25.0 |" in text


def test_the_picture_of_memory_is_drawn(tmp_path: Path) -> None:
    pytest.importorskip("matplotlib")
    side = {"peak_bytes": 300 * 2**20, "curve": [(0.0, 10 * 2**20), (60.0, 300 * 2**20)]}
    draw_memory(tmp_path / "x" / "memory.png", {"ours": side, "peer": side, "budget_bytes": 400 * 2**20})
    assert (tmp_path / "x" / "memory.png").read_bytes().startswith(b"\x89PNG")


def test_a_thinned_curve_keeps_its_peak_and_its_beginning() -> None:
    curve = [(float(second), second % 997) for second in range(5400)]
    few = thinned(curve)
    assert len(few) == 150 and few[0][0] == 0.0 and max(held for _, held in few) == 996
    assert thinned(curve[:3]) == curve[:3] and thinned([]) == []


def test_simple_methods_answer_and_are_scored(tmp_path: Path) -> None:
    pytest.importorskip("bm25s")
    assert words("A river, 河上") == ["a", "river", "河", "上"]
    assert first_sentence(" Small boats. They wait.") == "Small boats." and first_sentence("one\ntwo") == "one"
    train = [("boats on a river", "boats"), ("snow on a hill", "snow"), ("河上的桥", "桥")]
    assert nearest(train, ["a hill with snow", "桥在河上", ""])[:2] == ["snow", "桥"]
    for name, rows in (("train", train), ("valid", [("Snow fell. More of it on the hill", "snow")])):
        made = (json.dumps({"prompt": prompt, "response": right}) + "\n" for prompt, right in rows)
        (tmp_path / f"{name}.jsonl").write_text("".join(made), encoding="utf8")
    found = simple_scores("summarise", str(tmp_path / "train.jsonl"), str(tmp_path / "valid.jsonl"), "exact_match", 5)
    assert found == {"nearest neighbour (BM25)": {"exact_match": 100.0}, "the first sentence": {"exact_match": 0.0}}


def test_answers_fit_cells_of_a_table() -> None:
    told = answers_table([{"prompt": "a | b\nc", "right": "<x>", "answer": "y" * 200}]).splitlines()[-1]
    assert told == "| a \\| b c | \\<x> | " + "y" * 159 + "… |"
