"""Requests a second of the API: `python -m benchmarks.serving [--model=t5-small] [--clients=8] [--requests=32]`.

The server is the one that users start, in a process of its own; clients are OpenAI's package over the loopback. The
same requests, prompts of mixed lengths and 64 to 128 new tokens each, go one after the other and from all clients at
once, in turns, and every answer must be the one given alone. Beside it stands the peer with the same weights,
`generate()` of transformers a request at a time behind the same HTTP layer, as its own server cannot answer with
encoder-decoders (`parts/serving_peer.py`).
"""

from __future__ import annotations

import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.page import ROOT, markdown, show_section
from benchmarks.parts.children import options_of

OPTIONS = {
    "model": "t5-small",
    "clients": "8",
    "requests": "32",
    "turns": "2",
    "dtype": "fp32",
    "budget": "3G",
    "peer": "True",
    "write": "True",
}
SHORTEST, LONGEST, FEWEST, MOST = 8, 400, 64, 128  # tokens of prompts, about, and of answers
START_SECONDS = 300.0


@dataclass(frozen=True)
class Asked:
    """One request: a text, and how many tokens are wanted."""

    prompt: str
    tokens: int


Answering = Callable[[Asked], str]


def make_model(name: str, dtype: str, folder: Path) -> None:
    """A model of random weights that writes varied text, with a tokenizer of its size."""
    import torch

    from data.tokenizers.training import train_tokenizer
    from model import hf_format
    from model.t5 import T5
    from settings.declared import T5ModelConfig
    from settings.precedence import model_presets

    config = T5ModelConfig(**model_presets()[name])
    model = T5(config).initialise(0)
    with torch.no_grad():
        for path, weight in model.named_parameters():
            if "norm" not in path and path != "embedding":
                weight.mul_(2.0)
    hf_format.save(model.to({"fp32": torch.float32, "bf16": torch.bfloat16}[dtype]), folder)
    train_tokenizer(texts(), "bpe", config.vocab_size - 128, 8 * 2**20).save(folder)


def texts() -> Iterator[str]:
    """Text that every installation has: modules of the standard library."""
    for path in sorted(Path(os.__file__).parent.glob("*.py")):
        yield from path.read_text(encoding="utf8", errors="replace").split("\n\n")


def requests_of(count: int) -> list[Asked]:
    """Requests of mixed lengths, the same at every call."""
    draw = random.Random(3)
    words = re.findall(r"\w+", (ROOT / "README.md").read_text(encoding="utf8"))
    made = []
    for _ in range(count):
        length = round(SHORTEST * (LONGEST / SHORTEST) ** draw.random() / 1.5)
        made.append(Asked(" ".join(draw.choices(words, k=length)), draw.randint(FEWEST, MOST)))
    return made


@contextmanager
def server(words: list[str], folder: Path) -> Iterator[str]:
    """Run a server until the end of the block; its address, as it prints it."""
    environment = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1", "PYTHONUNBUFFERED": "1"}
    log = folder / "server.log"
    with log.open("w") as out:
        process = subprocess.Popen([sys.executable, *words], cwd=folder, env=environment, stdout=out, stderr=out)
    try:
        began = time.monotonic()
        while True:
            found = "".join(re.findall(r"http://\S+(?=/v1)", log.read_text())[:1])
            if found and _is_up(found):
                break
            if process.poll() is not None or time.monotonic() - began > START_SECONDS:
                sys.exit(f"the server did not start:\n{log.read_text()[-3000:]}")
            time.sleep(0.2)
        yield found
    finally:
        process.terminate()
        process.wait(60)


def _is_up(url: str) -> bool:
    try:
        with urllib.request.urlopen(f"{url}/health", timeout=5) as answer:
            return bool(answer.status == 200)
    except OSError:
        return False


def over_http(url: str, model: str) -> Answering:
    """Ask by OpenAI's client."""
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0, timeout=1200)

    def ask(asked: Asked) -> str:
        answer = client.completions.create(
            model=model, prompt=asked.prompt, max_tokens=asked.tokens, temperature=0, seed=1
        )
        return answer.choices[0].text

    return ask


def measure(ask: Answering, asked: list[Asked], clients: int, turns: int) -> dict[str, Any]:
    """Seconds of all requests, one after the other and at once, the best of some turns; and whether answers are the
    same.
    """
    alone: list[float] = []
    together: list[float] = []
    for one in asked[:2]:
        ask(one)  # warms up
    first: list[str] = []
    different = 0
    for _ in range(turns):
        began = time.perf_counter()
        answers = [ask(one) for one in asked]
        alone.append(time.perf_counter() - began)
        first = first or answers
        began = time.perf_counter()
        with ThreadPoolExecutor(clients) as pool:
            at_once = list(pool.map(ask, asked))
        together.append(time.perf_counter() - began)
        different += sum(
            one != other for answer in (answers, at_once) for one, other in zip(answer, first, strict=True)
        )
    return {
        "alone": min(alone),
        "together": min(together),
        "different": different,
        "answers": first,
        "all": [alone, together],
    }


def peak_of(url: str) -> float:
    """The server's most memory, in MiB, and None where it does not tell."""
    with urllib.request.urlopen(f"{url}/metrics", timeout=5) as answer:
        found = re.search(r"^frugalt5_memory_peak_bytes (\d+)", answer.read().decode(), re.MULTILINE)
    assert found is not None
    return int(found.group(1)) / 2**20


def table(runs: dict[str, dict[str, Any]], count: int, clients: int) -> str:
    """One row a system: requests a second one after the other and at once, and what is equal."""
    rows = [
        [
            name,
            f"{count / run['alone']:.2f}",
            f"{count / run['together']:.2f}",
            f"{run['alone'] / run['together']:.2f}x",
            "all" if not run["different"] else f"all but {run['different']}",
        ]
        for name, run in runs.items()
    ]
    header = ["server", "sequential, requests/s", f"{clients} concurrent clients, requests/s", "ratio", "answers equal"]
    return markdown(header, rows)


def main(arguments: list[str]) -> None:
    """Measure all systems; all flags are --name=value."""
    _, options = options_of(arguments, OPTIONS, __doc__ or "")
    count, clients, turns = (int(options[name]) for name in ("requests", "clients", "turns"))
    asked, runs = requests_of(count), {}
    with tempfile.TemporaryDirectory() as parent:
        folder = Path(parent) / "model"
        folder.mkdir()
        make_model(options["model"], options["dtype"], folder)
        flags = [f"--memory_budget={options['budget']}", "--port=0", f"--max_new_tokens={MOST}", "--max_seq_len=512"]
        with server([str(ROOT / "train_low_mem.py"), "serve", str(folder), *flags], Path(parent)) as url:
            runs["serve"] = measure(over_http(url, "model"), asked, clients, turns)
            runs["serve"]["peak_mib"] = peak_of(url)
            print((Path(parent) / "server.log").read_text(), flush=True)
        if options["peer"] == "True":
            theirs = ["-m", "benchmarks.parts.serving_peer", str(folder), str(MOST)]
            with server(theirs, Path(parent)) as url:
                runs["generate() of transformers"] = measure(over_http(url, "model"), asked, clients, 1)
            pairs = zip(*(run["answers"] for run in runs.values()), strict=True)
            print(f"{sum(one == other for one, other in pairs)} of {count} answers are the peer's", flush=True)
    figures = {name: {key: value for key, value in run.items() if key != "answers"} for name, run in runs.items()}
    for name, one in figures.items():
        print(json.dumps({"system": name, **one}), flush=True)
    heading = f"Serving {options['model']} ({options['dtype']}): {count} requests of {FEWEST} to {MOST} tokens"
    text = (
        table(runs, count, clients)
        + f"\n\nPeak of `serve`: {runs['serve']['peak_mib']:.0f} MiB of {options['budget']}."
    )
    section = f"serving-{options['model']}-{options['dtype']}"
    show_section(section, heading, text, figures, is_written=options["write"] == "True")


if __name__ == "__main__":
    main(sys.argv[1:])
