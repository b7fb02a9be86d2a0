"""Answers from a long list: the list's time and memory, and the time of a row's beams, beside transformers.

`python -m benchmarks.generation answers` measures it. The peer is `generate(prefix_allowed_tokens_fn=...)` over a tree of
nested dicts, the usual one, with the same random weights, prompts, beams and lengths; both take turns in one process. Its
probabilities are those over the whole vocabulary, ours those over the allowed tokens: the best answers may differ, and all must
be in the list.
"""

from __future__ import annotations

import gc
import random
import re
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import torch

from benchmarks.parts.children import must_run
from benchmarks.parts.results import ROOT, markdown
from benchmarks.serving import make_model, texts
from data.tokenizers.tokenizer import Tokenizer
from model import hf_format
from model.decoding.answer_tree import AnswerTree
from model.decoding.decoder import Decoder
from model.decoding.generation import generate_best
from settings.declared import GenerateConfig
from training.setup.answer_list import TREE_FILE
from units import format_size

OPTIONS = {
    "model": "t5-small", "answers": "1000000", "beams": "20", "rows": "16", "source": "64", "threads": "2", "repeats": "3",
    "write": "True",
}  # fmt: skip
LINES = 4096  # tokenized at once
OURS, PEER = "FrugalT5", "transformers, prefix_allowed_tokens_fn"
Tree = dict[int, "Tree"]


def write_answers(count: int, path: Path) -> None:
    """Write a list of different answers: two to four words of the standard library's modules, the same at every call."""
    draw, made = random.Random(5), dict[str, None]()
    words = sorted({word for text in texts() for word in re.findall(r"[A-Za-z]{3,}", text)})
    while len(made) < count:
        made[" ".join(draw.choices(words, k=draw.randint(2, 4)))] = None
    path.write_text("\n".join(made) + "\n", encoding="utf8")


def measure(options: dict[str, str]) -> dict[str, Any]:
    """Figures of both systems."""
    count, beams, rows, source = (int(options[name]) for name in ("answers", "beams", "rows", "source"))
    torch.set_num_threads(int(options["threads"]))
    with tempfile.TemporaryDirectory() as parent:
        folder, listed = Path(parent) / "model", Path(parent) / "list.txt"
        folder.mkdir()
        make_model(options["model"], "fp32", folder)
        write_answers(count, listed)
        words = [
            str(ROOT / "train_low_mem.py"), "generate", f"--model={folder}", f"--answers={listed}", "--input=x",
            f"--cache_dir={parent}/cache", f"--num_threads={options['threads']}",
        ]  # fmt: skip
        first, later = (must_run(words, Path(parent)) for _ in range(2))
        (made,) = (Path(parent) / "cache" / "answers").glob(f"*/{TREE_FILE}")
        began = time.perf_counter()
        tree = AnswerTree.load(made)
        loaded = time.perf_counter() - began
        tokenizer, before, began = Tokenizer.load(folder), _held(), time.perf_counter()
        nested = _nested(tokenizer, listed)
        theirs = {"ready": time.perf_counter() - began, "tree_bytes": _held() - before}
        ours = {
            "ready": first.seconds - later.seconds, "later": loaded, "peak_bytes": first.peak_bytes,
            "later_peak_bytes": later.peak_bytes, "tree_bytes": tree.num_bytes, "longest": tree.longest,
        }  # fmt: skip
        systems = _systems(folder, tree, nested, beams)
    generator = torch.Generator().manual_seed(0)
    prompts = [[*torch.randint(3, 1000, (source - 1,), generator=generator).tolist(), 1] for _ in range(rows)]
    seconds: dict[str, float] = {}
    for turn in range(int(options["repeats"]) + 1):
        for name, write in systems.items():
            began = time.perf_counter()
            found = write(prompts)
            spent = time.perf_counter() - began
            assert all(_is_listed(nested, answer) for answer in found), f"{name}: an answer is not in the list"
            if turn:  # the first warms up
                seconds[name] = min(seconds.get(name, float("inf")), spent)
    return {
        OURS: {**ours, "ms_a_row": 1000 * seconds[OURS] / rows},
        PEER: {**theirs, "ms_a_row": 1000 * seconds[PEER] / rows},
    }


def _held() -> int:
    gc.collect()
    return int(psutil.Process().memory_info().rss)


def _nested(tokenizer: Tokenizer, listed: Path) -> Tree:
    root: Tree = {}
    lines = listed.read_text(encoding="utf8").splitlines()
    for start in range(0, len(lines), LINES):
        for ids in tokenizer.encode_prompts(lines[start : start + LINES]):
            node = root
            for token in [*ids.tolist(), tokenizer.eos_id]:
                node = node.setdefault(token, {})
    return root


def _systems(
    folder: Path, tree: AnswerTree, nested: Tree, beams: int
) -> dict[str, Callable[[list[list[int]]], Iterator[list[int]]]]:
    from transformers import AutoModelForSeq2SeqLM

    model, peer = hf_format.load(folder), AutoModelForSeq2SeqLM.from_pretrained(folder).eval()
    eos = model.config.eos_token_id

    def ours(prompts: list[list[int]]) -> Iterator[list[int]]:
        settings = GenerateConfig(num_beams=beams, length_penalty=0.0)
        return (
            answer.tokens
            for best in generate_best(Decoder(model, num_beams=beams), prompts, settings, tree)
            for answer in best
        )

    def allowed(_: int, ids: torch.Tensor) -> list[int]:
        node: Tree | None = nested
        for token in ids.tolist()[1:]:
            node = None if node is None else node.get(token)
        return list(node or ()) or [eos]

    def theirs(prompts: list[list[int]]) -> Iterator[list[int]]:
        ids = torch.tensor(prompts)
        found = peer.generate(
            input_ids=ids, attention_mask=torch.ones_like(ids), num_beams=beams, num_return_sequences=beams, do_sample=False,
            length_penalty=0.0, max_new_tokens=tree.longest, prefix_allowed_tokens_fn=allowed,
        )  # fmt: skip
        return (answer[1 : answer.index(eos)] if eos in answer else answer[1:] for answer in found.tolist())

    return {OURS: ours, PEER: theirs}


def _is_listed(nested: Tree, answer: list[int]) -> bool:
    node: Tree | None = nested
    for token in answer:
        node = None if node is None else node.get(token)
    return node is not None and 1 in node


def table(figures: dict[str, Any]) -> str:
    """One row a system."""
    ours, peer = figures[OURS], figures[PEER]
    once = f"{ours['ready']:.0f} s once, in processes of {format_size(ours['peak_bytes'])}; then {ours['later']:.2f} s"
    rows = [
        [OURS, once, format_size(ours["tree_bytes"]), f"{ours['ms_a_row']:.1f}", f"{peer['ms_a_row'] / ours['ms_a_row']:.1f}x"],
        [PEER, f"{peer['ready']:.0f} s at every start", format_size(peer["tree_bytes"]), f"{peer['ms_a_row']:.1f}", "1x"],
    ]  # fmt: skip
    return markdown(["system", "list tokenized, tree built", "tree in memory", "ms a row", "speed"], rows)
