from __future__ import annotations

import json
import random
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from data.prepare import duplicates
from data.prepare.duplicates import EXACT, NEAR, find_duplicates, minhash
from data.prepare.preparing import prepare
from data.shards.store import Manifest
from data.sources.files import find
from data.sources.layouts import Columns
from data.text.conversations import Examples
from data.text.templates import Template
from settings.declared import ROOT
from settings.errors import UserError

WORDS = [
    f"{a}{b}" for a in ("lo", "mi", "ra", "tu", "ke", "sno", "fi") for b in ("ba", "der", "gon", "pit", "sal", "wex")
]


def document(seed: int, words: int = 60) -> list[str]:
    return random.Random(seed).choices(WORDS, k=words)


def write(path: Path, texts: list[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts), encoding="utf8")
    return path


def doubles_of(
    path: Path | str, how: str, folder: Path, columns: Any = ("text",), examples: Examples | None = None, **more: Any
) -> list[int]:
    folder.mkdir(exist_ok=True)
    found = find_duplicates(find(str(path)), columns, how, examples or Examples(), folder, 0, **more)
    (folder / duplicates.RESULT).unlink()
    assert list(folder.iterdir()) == []
    return np.flatnonzero(found).tolist()


def test_exact_repeats_are_found_and_the_first_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(duplicates, "BUCKET_ROWS", 7)
    draw = random.Random(0)
    texts = [f"text {draw.randrange(150)}" for _ in range(400)]
    path = write(tmp_path / "a.jsonl", texts)
    expected = [place for place, text in enumerate(texts) if text in texts[:place]]
    assert doubles_of(path, EXACT, tmp_path / "work") == expected
    assert doubles_of(path, EXACT, tmp_path / "work", max_rows=50) == [place for place in expected if place < 50]


def test_near_repeats_are_found_and_other_texts_stay(tmp_path: Path) -> None:
    texts, expected = [], []
    for number in range(40):
        words = document(number)
        texts.append(" ".join(words))
        if number % 4 == 0:  # another case, other blanks, one word of sixty
            changed = [*words[:30], "zzz", *words[31:]]
            expected.append(len(texts))
            texts.append("  ".join(changed).upper())
        if number % 4 == 1:  # half of it is new: another text
            texts.append(" ".join(words[:30] + document(number + 1000, 30)))
    assert doubles_of(write(tmp_path / "a.jsonl", texts), NEAR, tmp_path / "work") == expected


def test_near_works_without_spaces_and_on_short_texts(tmp_path: Path) -> None:
    text = "预算是一份合同，速度是我们在其中赢得的东西。一次只读一行，读完就放下，所以多大的文件都可以处理，而且结果每次都一样。"
    texts = [text, text.replace("合同", "合约"), "你好", "你好", "再见", text[::-1]]
    assert doubles_of(write(tmp_path / "a.jsonl", texts), NEAR, tmp_path / "work") == [1, 3]


@pytest.mark.parametrize("how", [EXACT, NEAR])
def test_preparing_leaves_duplicates_out_and_reports_them(configure: Any, tmp_path: Path, how: str) -> None:
    texts = [" ".join(document(number)) for number in range(30)]
    path = write(tmp_path / "a.jsonl", [*texts, *texts[:10]])
    prepared = prepare(configure(train_file=path, dedup=how))
    assert prepared.counts["train_duplicate_rows"] == 10
    assert prepared.counts["train_texts"] + prepared.counts["validation_texts"] == 30
    report = Manifest.of(prepared.train_dir).content["dropped"]["duplicate"]
    assert report["count"] == 10 and report["samples"][0] == texts[0][:160]


TEMPLATE = Template.load(
    "Below is an instruction that describes a task. Write a response that appropriately completes the request.\n\n"
    "### Instruction:\n{prompt}\n\n### Response:\n",
    "Answer as well as you can: ",
)


def test_the_words_around_rows_are_not_compared(tmp_path: Path) -> None:
    """Short pairs in the same long words are other pairs; a pair that is nearly another is still found."""
    pairs = [(" ".join(document(number, 4)), " ".join(document(number + 1000, 2))) for number in range(300)]
    long = (" ".join(document(7777)), " ".join(document(8888, 9)))
    rows = [*pairs, long, (long[0].upper(), long[1]), pairs[3]]
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"prompt": prompt, "response": answer}) + "\n" for prompt, answer in rows))
    assert doubles_of(path, NEAR, tmp_path / "work", ["prompt", "response"], Examples(template=TEMPLATE)) == [301, 302]


def test_answers_of_one_conversation_are_not_compared_with_each_other(tmp_path: Path) -> None:
    """However much of a later one's prompt is the earlier one. A conversation that is nearly another is still found."""
    talks = [[[" ".join(document(talk * 10 + turn, 9))] * 2 for turn in range(4)] for talk in range(120)]
    copy = json.loads(json.dumps(talks[5]).upper())
    path = tmp_path / "a.jsonl"
    path.write_text("".join(json.dumps({"messages": turns}) + "\n" for turns in [*talks, copy]))
    columns, every = Columns((), "messages"), Examples(template=TEMPLATE, form="messages", each_turn=True)
    assert doubles_of(path, NEAR, tmp_path / "work", columns, every) == [480, 481, 482, 483]
    assert doubles_of(path, NEAR, tmp_path / "work", columns, replace(every, each_turn=False)) == [120]


MEMORY = """
import resource, sys
from pathlib import Path
import numpy as np
from data.prepare import duplicates
folder, rows = Path(sys.argv[1]), int(sys.argv[2])
draw = np.random.default_rng(0)
for name in duplicates._names(sys.argv[3]):
    with (folder / name).open("wb") as file:
        for begin in range(0, rows, 10**6):
            count = min(10**6, rows - begin)
            if name.endswith("all"):
                for _ in range(0, count, 10**5):
                    np.zeros((min(10**5, count), 128), np.uint16).tofile(file)
            else:
                draw.integers(0, rows // 2, count).astype(np.uint64).__mul__(np.uint64(0x9E3779B97F4A7C15)).tofile(file)
found = (duplicates._exact if sys.argv[3] == "exact" else duplicates._near)(folder)
print(int(found.sum()), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)
"""


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").is_file(), reason="needs /proc to measure memory")
def test_ten_million_rows_fit_in_a_gigabyte(tmp_path: Path) -> None:
    command = [sys.executable, "-c", MEMORY, str(tmp_path), str(10**7), "exact"]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    doubles, peak = done.stdout.split()
    assert 5_000_000 < int(doubles) < 6_000_000
    assert float(peak) < 1000, f"{peak} MiB"


def test_a_batch_without_a_usable_row_has_no_near_repeats(tmp_path: Path) -> None:
    """Such as the last row of a file, where it is blank."""
    write(tmp_path / "a.jsonl", [" ".join(document(1)), " ".join(document(2))])
    write(tmp_path / "b.jsonl", ["", " "])
    assert doubles_of(f"{tmp_path}/a.jsonl,{tmp_path}/b.jsonl", NEAR, tmp_path / "work") == []


def test_a_text_that_most_rows_repeat_takes_no_more_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """All its copies fall into one bucket, which is taken in slices."""
    monkeypatch.setattr(duplicates, "BUCKET_ROWS", 64)
    draw = random.Random(1)
    texts = ["[deleted]" if draw.random() < 0.8 else f"text {draw.randrange(60)}" for _ in range(1000)]
    sizes: list[int] = []
    plain = np.argsort

    def sorting(values: Any, **named: Any) -> Any:
        sizes.append(len(values))
        return plain(values, **named)

    monkeypatch.setattr(np, "argsort", sorting)
    expected = [place for place, text in enumerate(texts) if text in texts[:place]]
    assert doubles_of(write(tmp_path / "a.jsonl", texts), EXACT, tmp_path / "work") == expected
    assert max(sizes) < 4 * 64


def test_without_its_package_near_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "rensa", None)
    with pytest.raises(UserError, match="--dedup = near"):
        minhash(["a text"])
