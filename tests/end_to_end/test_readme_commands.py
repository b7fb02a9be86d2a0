"""Every command of the READMEs and of the quickstart, in their order, on small data and with a small model, in one
folder per page.
"""

from __future__ import annotations

import json
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from tests.end_to_end.running import ENVIRONMENT, ROOT, write_pairs, write_text
from tests.end_to_end.world import SHAPE
from tests.test_readme import commands_of

# After the flags of the page, so that they count. llama.cpp loads no more decoder than encoder layers.
SMALL = (*SHAPE, "--num_layers=2", "--max_seq_len=64", "--max_steps=2", "--effective_batch_size=4", "--sample_rows=1")
PROGRAMS = {
    "python": (sys.executable,),
    "accelerate": (sys.executable, "-m", "accelerate.commands.accelerate_cli"),
    "torchrun": (sys.executable, "-m", "torch.distributed.run"),
}
# they run this, take minutes, stay, or fetch; the model of the quickstart's generate is what demo has made
NOT_RUN = re.compile(r"make (test|lint|board)|pip |hf |.*(models/| demo| serve )|make train$|.* generate --input=")


def as_run_here(line: str) -> list[str]:
    """A line of a page, for this interpreter and with a small model."""
    words = shlex.split(line)
    if words[:2] == ["make", "train"]:
        words = ["python", "train_low_mem.py", "train", *shlex.split(" ".join(words[2:]).removeprefix("ARGS="))]
    place = words.index("train_low_mem.py")
    small = SMALL if words[place + 1] in ("train", "dpo") else ()
    return [*PROGRAMS[words[0]], *words[1:place], str(ROOT / "train_low_mem.py"), *words[place + 1 :], *small]


def write_data(folder: Path) -> None:
    lines = write_text(folder / "prompts.txt", 40).read_text("utf8").splitlines()
    pq.write_table(pa.table({"text": lines * 10}), folder / "my.parquet")
    write_pairs(folder / "pairs.jsonl")
    pairs = [json.loads(line) for line in (folder / "pairs.jsonl").read_text("utf8").splitlines()]
    preferences = ({"prompt": p["prompt"], "chosen": p["response"], "rejected": p["prompt"]} for p in pairs)
    text = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in preferences)
    (folder / "preferences.jsonl").write_text(text, encoding="utf8")
    (folder / "my.jsonl").write_text("".join(f'{{"text": "{line}"}}\n' for line in lines * 10), encoding="utf8")


@pytest.mark.slow
@pytest.mark.timeout(900)
@pytest.mark.parametrize("page", ["README.md", "README.zh-CN.md", "docs/quickstart.md"])
def test_the_commands_of_a_page_run_one_after_the_other(tmp_path: Path, page: str) -> None:
    write_data(tmp_path)
    lines = [line for line in commands_of(page) if not NOT_RUN.match(line)]  # demo: tests/commands/test_demo.py
    assert len(lines) >= 8
    for line in lines:
        if line.startswith("tail -f"):
            command: str | list[str] = line.replace("tail -f", "cat")
        else:
            command = as_run_here(line)
        done = subprocess.run(
            command,
            shell=isinstance(command, str),
            cwd=tmp_path,
            env=ENVIRONMENT,
            capture_output=True,
            text=True,
            input="What is a river?\n",  # to the chat
        )
        assert done.returncode == 0, f"{line}\n{done.stdout}\n{done.stderr}"
        assert done.stdout.strip() or "--output" in line, line
    if page != "README.zh-CN.md":
        assert len((tmp_path / "answers.jsonl").read_text("utf8").splitlines()) == 40
