"""The API as a process: what it says at the start, what a signal does to open requests, and what is refused."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys
import threading
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import warm
from tests.end_to_end.running import ENVIRONMENT, ROOT
from tests.training.small_trained import save_trained


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return save_trained(tmp_path_factory.mktemp("model"))


def words(folder: Path, *flags: str) -> list[str]:
    return [sys.executable, str(ROOT / "train_low_mem.py"), "serve", str(folder), "--port=0", *flags]


class Server:
    """A process that serves."""

    def __init__(self, folder: Path, *flags: str) -> None:
        self.process = subprocess.Popen(
            words(folder, "--max_seq_len=64", *flags), cwd=folder, env=ENVIRONMENT, stdout=subprocess.PIPE, text=True
        )
        assert self.process.stdout is not None
        self.greeting = [self.process.stdout.readline() for _ in range(3)]
        self.address = re.findall(r"http://\S+(?=/v1)", self.greeting[0])[0]

    def ask(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self.address + path, json.dumps(body).encode(), headers)
        with urllib.request.urlopen(request, timeout=120) as answer:
            return dict(json.loads(answer.read()))

    def figure(self, name: str) -> int:
        with urllib.request.urlopen(f"{self.address}/metrics", timeout=60) as answer:
            return int((re.findall(rf"^frugalt5_{name} (\d+)", answer.read().decode(), re.MULTILINE) or ["0"])[0])

    def end(self) -> tuple[int, str]:
        self.process.send_signal(signal.SIGTERM)
        said, _ = self.process.communicate(timeout=120)
        return self.process.returncode, said


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[Server]:
    made = Server(folder, "--max_new_tokens=600", "--memory_budget=1G")
    yield made
    if made.process.poll() is None:
        made.process.kill()
        made.process.communicate()


def test_it_says_what_fits_keeps_to_it_and_answers_what_is_open_before_it_ends(server: Server, folder: Path) -> None:
    assert re.search(r"capacity: \d+ concurrent answers, [\d,]+ tokens .*64 \+ 600.*; queue of 64", server.greeting[1])
    assert "of 1.00 GiB" in server.greeting[2]
    answers: list[str] = []

    def ask() -> None:
        answers.append(str(server.ask("/api/chat", {"input_txt": "hello"})["response"]))

    open_requests = [threading.Thread(target=ask) for _ in range(3)]
    for thread in open_requests:
        thread.start()
    while server.figure("running_rows") < 3:  # each look is a request that the server has to answer
        assert not answers, "they are still open"
    assert server.figure("memory_peak_bytes") <= server.figure("memory_budget_bytes") == 2**30
    code, said = server.end()
    for thread in open_requests:
        thread.join(120)
    assert code == 0 and said.startswith("stopped; peak memory")
    assert len(answers) == 3 and len(set(answers)) == 1
    flags = (f"--model={folder}", "--input=hello", "--max_seq_len=64", "--max_new_tokens=600")
    done = warm.run(ROOT / "train_low_mem.py", ["generate", *flags], ENVIRONMENT, folder)
    assert done.stdout.rstrip("\n") == answers[0].rstrip("\n"), done.stderr


def test_a_budget_that_holds_no_answer_is_refused(folder: Path, tmp_path: Path) -> None:
    _, program, *rest = words(folder, "--memory_budget=64M")
    done = warm.run(Path(program), rest, ENVIRONMENT, tmp_path)
    assert done.returncode == 3 and "--memory_budget = 64.0 MiB, is too small" in done.stderr, done.stderr
