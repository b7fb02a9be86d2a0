"""What a Chinese user reads: commands, and mistakes of every kind, leave no English on the screen but names.

Names are flags, values, paths, columns, commands in backticks, and in parentheses what a library said.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

import train_low_mem
from settings.declared import COMMANDS

# These may be English: what is quoted or in parentheses, a flag, a path or a number.
NAMES = (
    *(r"`[^`]*`", r"'[^']*'", r'"[^"]*"', r"\([^()]*\)", r"（[^（）]*）"),
    *(r"--?[\w=.,/<>:|-]+", r"\S*[/=_.<>\d]\S*"),
)
PHRASE = re.compile(r"(?<![\w-])[a-z]+(?:,? [a-z]+){2,}(?![\w-])")
WORDS = re.compile(
    r"(?<![\w-])(the|is|are|was|has|have|of|with|without|not|omit|allowed|use|give|write|and|or|it|its|there|this|that|"
    r"for|from|by|here|cannot|must|needs?)(?![\w-])"
)

# A mistake a line: flags, files, columns, presets, contradictions, flags of other programs
MISTAKES = """
trian
train --is_finetun=True
train -- --interactive
generate --learning_rate=1
train extra --sed=1 --max_steps=x --seed --d_ff=0
train --train_file=missing.jsonl
train --train_file=gbk.csv --is_finetune=True
train --train_file=broken.jsonl --is_finetune=True
train --train_file=columns.jsonl --is_finetune=True
train --train_file=broken.parquet
train --train_file=chat.jsonl --is_finetune=True
train --train_file=labels.jsonl --head=sequence --num_decoder_layers=0
dpo --train_file=pairs.jsonl --beta=-1 --is_finetune=True
train --preset=nope
train --config=missing.yaml
train --config=wrong.yaml
train --bf16=True --fp16=False --tf32=True --optim=sgd --warmup_ratio=0.1
train --memory_budget=1M --train_file=pairs.jsonl
train --learning_rate=fast --seed=1.5 --epochs=-3 --dropout_rate=2 --overwrite=maybe
train --effective_batch_size=7 --batch_size_per_gpu=2 --gradient_accumulation_steps=2
train --objective=span --is_finetune=True
train --metric_for_best=bleu
train --is_keep_training=True --run_name=nope
train --is_finetune=True --train_file=pairs.jsonl --finetune_from=bert
train --is_finetune=True --train_file=pairs.jsonl --finetune_from=google/flan-t5-small
train --tokenizer_dir=gone --train_file=text.txt
train --mixture_weights=0.5 --train_file=text.txt,pairs.jsonl
generate --model=nowhere --input=hello
generate --model=shape --input=hello --num_beams=2 --temperature=1
merge
export --model=shape --format=pt
check missing
chat --model=folder
runs --delete=nope
plan --memory_budget=300M --model_preset=t5-3b
tokenizer --train_file=text.txt --vocab_size=3
doctor --model_preset=nope
""".strip().splitlines()

# Commands of the README, with a model and data that are small enough.
ROUND = """
train --train_file=texts.jsonl --max_steps=4 --max_seq_len=32 --memory_budget=2G --eval_generate_rows=0
train --is_keep_training=True --max_steps=5
train --is_finetune=True --train_file=pairs.jsonl --run_name=tuned --max_steps=2 --mixed_precision=no
evaluate --model=model_save/tuned
generate --model=model_save/tuned --input=prompts.txt --output=answers.jsonl
embed --model=model_save/tuned --input=prompts.txt --output=vectors.npz
train --is_finetune=True --train_file=pairs.jsonl --run_name=lora --max_steps=1 --lora_rank=2
merge --model=model_save/lora --output=merged
quantize --model=model_save/tuned --output=int8
convert --model=model_save/tuned --output=plain
check model_save/tuned
dpo --train_file=preferences.jsonl --finetune_from=model_save/tuned --max_steps=1 --run_name=preferred
train --train_file=labelled.jsonl --head=sequence --num_decoder_layers=0 --run_name=classes --max_steps=1
prepare --train_file=pairs.jsonl --is_finetune=True
tokenizer --train_file=texts.jsonl --vocab_size=500 --tokenizer_dir=tokenizer
runs
""".strip().splitlines()


def english_of(screen: str) -> list[str]:
    """Lines that hold English besides names."""
    lines = []
    for line in screen.splitlines():
        text = line
        for name in NAMES:
            text = re.sub(name, " ", text)
        if PHRASE.search(text) or WORDS.search(text):
            lines.append(line)
    return lines


def rows(**columns: object) -> str:
    return json.dumps(columns, ensure_ascii=False) + "\n"


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with data, good and bad."""
    folder = tmp_path_factory.mktemp("chinese")
    texts = {
        "pairs.jsonl": "".join(rows(prompt=f"{number}?", response=f"{number}.") for number in range(40)),
        "texts.jsonl": "".join(rows(text=f"第{number}行 {number * number}") for number in range(300)),
        "preferences.jsonl": "".join(rows(prompt=f"{n}?", chosen=f"{n}.", rejected=f"-{n}.") for n in range(20)),
        "labelled.jsonl": "".join(rows(text=f"{number}", label="xy"[number % 2]) for number in range(200)),
        "prompts.txt": "1?\n2?\n",
        "text.txt": "一行\n" * 50,
        "broken.jsonl": rows(prompt="a", response="b") + '{"prompt": \n',
        "columns.jsonl": rows(x="a", y="b") * 5,
        "broken.parquet": "PAR1 nothing",
        "chat.jsonl": rows(messages=[{"role": "robot", "content": "x"}]) * 5,
        "labels.jsonl": rows(text="a", label=["x", "y"]) * 5,
        "wrong.yaml": "no_such_thing: 3\nd_model: -1\n",
        "folder/readme.md": "x",
        "bert/config.json": json.dumps({"model_type": "bert"}),
        "shape/config.json": json.dumps({"model_type": "t5", "d_model": 64, "d_ff": 128, "num_layers": 2}),
    }
    for name, text in texts.items():
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).write_text(text, encoding="utf8")
    (folder / "gbk.csv").write_bytes("prompt,response\n你好,再见\n".encode("gbk") * 20)
    return folder


@pytest.fixture
def chinese(data: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same folder, of a user whose system speaks Chinese."""
    for name in ("LC_ALL", "LC_MESSAGES", "LANGUAGE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("LANG", "zh_CN.UTF-8")
    monkeypatch.chdir(data)
    return data


def test_the_detector_tells_english_from_names() -> None:
    screen = "--epochs = 1：请写 --max_steps=3\ntext.txt：不是 UTF-8（unexpected end of data）\n`git lfs pull`"
    assert not english_of(screen)
    assert english_of("--epochs = 1, has no effect here") and english_of("损失：the run diverges")


@pytest.mark.parametrize("line", MISTAKES)
def test_a_mistake_is_answered_in_chinese(chinese: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_low_mem.main(line.split()) in (2, 3)
    screen = capsys.readouterr()
    assert english_of(screen.out + screen.err) == []
    assert re.search("[\u4e00-\u9fff]", screen.err)


@pytest.mark.parametrize(
    "line",
    [
        "--help",
        pytest.param("doctor", marks=pytest.mark.slow),
        "runs",
        "plan",
        *(f"{name} --help=all" for name in COMMANDS),
    ],
)
def test_a_command_speaks_chinese(chinese: Path, line: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert train_low_mem.main(line.split()) == 0
    screen = capsys.readouterr()
    assert english_of(screen.out + screen.err) == []


@pytest.mark.slow
def test_a_round_of_commands_speaks_chinese(chinese: Path, capfd: pytest.CaptureFixture[str]) -> None:
    for line in ROUND:
        assert train_low_mem.main(line.split()) == 0, line
        screen = capfd.readouterr()
        assert (line, english_of(screen.out + screen.err)) == (line, [])
    for log in chinese.glob("logs/*.log"):
        for line in log.read_text(encoding="utf8").splitlines():
            if "内存监控" not in line and "第" not in line:  # The rows of the data hold the latter.
                assert not re.search("[\u4e00-\u9fff]", line), "logs are English"
