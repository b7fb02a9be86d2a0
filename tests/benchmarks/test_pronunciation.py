from __future__ import annotations

import json
from pathlib import Path

import pytest

from benchmarks.parts import pronunciation
from benchmarks.parts.pronunciation import language_of, make_rows, prompt_of, read_words, word_error_rate


def test_a_prompt_has_a_token_for_each_letter() -> None:
    assert prompt_of("가곡", "kor") == "kor: ᄀ ᅡ ᄀ ᅩ ᆨ"
    assert prompt_of("an é", "vie_hanoi") == "vie_hanoi: a n _ e \N{COMBINING ACUTE ACCENT}"


def test_a_word_counts_once_and_any_of_its_pronunciations_is_right(tmp_path: Path) -> None:
    (tmp_path / "eng_us_test.tsv").write_text("read\tɹ i d\nthe\tð ə\nread\tɹ ɛ d\na\tə\n", encoding="utf8")
    words = read_words(tmp_path / "eng_us_test.tsv")
    assert words == {"read": ["ɹ i d", "ɹ ɛ d"], "the": ["ð ə"], "a": ["ə"]}
    assert word_error_rate(words, ["ɹ ɛ d", "ð i", "ə"]) == pytest.approx(100 / 3)


def test_the_language_is_in_the_name() -> None:
    assert language_of(Path("x/vie_hanoi_test.tsv")) == "vie_hanoi" and language_of(Path("kor.tsv")) == "kor"


def test_a_line_without_phones_is_told(tmp_path: Path) -> None:
    (tmp_path / "x.tsv").write_text("a\tə\nb\n", encoding="utf8")
    with pytest.raises(SystemExit, match="line 2"):
        read_words(tmp_path / "x.tsv")


def test_rows_of_several_languages(tmp_path: Path) -> None:
    for name in ("fre", "hun"):
        for part in ("train", "dev"):
            (tmp_path / f"{name}_{part}.tsv").write_text(f"{name[0]}a\t{part[0]} a\n", encoding="utf8")
    make_rows(tmp_path, tmp_path / "out", ["fre", "hun"])
    made = [json.loads(line) for line in (tmp_path / "out" / "dev.jsonl").read_text(encoding="utf8").splitlines()]
    assert made == [{"prompt": "fre: f a", "response": "d a"}, {"prompt": "hun: h a", "response": "d a"}]
    own = (tmp_path / "out" / "train_hun.jsonl").read_text(encoding="utf8")
    assert json.loads(own) == {"prompt": "hun: h a", "response": "t a"}


def test_scores_by_language_and_their_mean(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "fre_dev.tsv").write_text("a\tx\nb\ty\n", encoding="utf8")
    (tmp_path / "hun_dev.tsv").write_text("c\tz\n", encoding="utf8")
    monkeypatch.setattr(pronunciation, "answer", lambda model, prompts, flags: ["x", "-", "z"])
    pronunciation.main(["score", "model", str(tmp_path / "fre_dev.tsv"), str(tmp_path / "hun_dev.tsv")])
    told = capsys.readouterr().out.splitlines()
    made = [
        {"prompt": "fre: a", "response": "x"},
        {"prompt": "hun: c", "response": "q"},
        {"prompt": "fre: a", "response": "-"},
    ]
    (tmp_path / "dev.jsonl").write_text("".join(json.dumps(row) + "\n" for row in made), encoding="utf8")
    assert pronunciation.read_tables([tmp_path / "dev.jsonl"]) == {
        "fre": {"fre: a": ["x", "-"]},
        "hun": {"hun: c": ["q"]},
    }
    assert told[0].split()[-1] == "50.00" and told[1].split()[-1] == "0.00" and told[2].split()[-1] == "25.00"
