"""The base model and rows that all systems of `benchmarks.finetuning` share, written once.

A base with random weights as a Hugging Face folder, with a tokenizer trained on the rows; pairs and preferences with
exactly the rows of all steps; and the batches of each step as token ids, for the peer. A preference sets the response
beside that of another prompt.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.page import ROOT
from benchmarks.parts.rows import write_rows
from data.batches.loader import StepLoader
from data.prepare.preparing import prepare
from data.sources.corpus import build_sample_corpus
from data.sources.files import find
from data.sources.lines import BadRows
from data.sources.reading import read_rows
from data.tokenizers.training import train_tokenizer
from settings.declared import Config, T5ModelConfig
from settings.loading import load
from settings.precedence import model_presets

DROPOUT = 0.1  # as the checkpoints of the T5 family ship
MOST_IDS = 8192  # of the tokenizer; the model's table keeps its own size
HELD_OUT = 8
Pair = tuple[str, str]


@dataclass(frozen=True)
class Setting:
    """What all systems have in common: the model, rows of one step, steps with the one that warms up, longest rows."""

    model: str
    pairs: str | None
    rows: int
    steps: int
    source: int
    target: int

    @property
    def folder(self) -> Path:
        """Where its files lie."""
        name = Path(self.pairs).stem if self.pairs else "sample"
        shape = f"{self.steps}x{self.rows}x{self.source}+{self.target}"
        return ROOT / "data" / "cache" / "finetuning" / f"{self.model}-{name}-{shape}"

    def flags(self, command: str) -> dict[str, str]:
        """Flags of the trainer that say which rows are learnt, and from which base."""
        kind = "preferences" if command == "dpo" else "pairs"
        flags = {
            "train_file": f"{self.folder / kind}.jsonl",
            "validation_file": f"{self.folder / kind}_valid.jsonl",
            "finetune_from": str(self.folder / "base"),
            "tokenizer_dir": str(self.folder / "base"),
            "cache_dir": str(self.folder / "cache"),
            "max_seq_len": str(self.source),
            "max_target_len": str(self.target),
            "effective_batch_size": str(self.rows),
            "max_steps": str(self.steps),
            "model_preset": self.model,
            "dropout_rate": str(DROPOUT),
        }
        return flags if command == "dpo" else {**flags, "is_finetune": "True"}

    def make(self) -> None:
        """Write all files, unless they are there."""
        finished = self.folder / "batches.json"
        if finished.exists():
            return
        self.folder.mkdir(parents=True, exist_ok=True)
        pairs = self._read()
        for name, rows in (("pairs", as_pairs(pairs)), ("preferences", as_preferences(pairs))):
            write_rows(self.folder / f"{name}_valid.jsonl", rows[:HELD_OUT])
            write_rows(self.folder / f"{name}.jsonl", rows[HELD_OUT:])
        self._write_base(pairs)
        for command in ("dpo", "train"):
            config = load(command, self.flags(command))
            folder = prepare(config).train_dir
        finished.write_text(json.dumps(self._batches(config, folder)), encoding="utf8")

    def _read(self) -> list[Pair]:
        """As many pairs with different responses as all steps and the evaluation need."""
        file = self.pairs or str(build_sample_corpus(ROOT / "data" / "cache").pairs)
        wanted = HELD_OUT + self.rows * self.steps
        found: dict[str, str] = {}
        for batch in read_rows(find(file, "--pairs"), ("prompt", "response"), BadRows(skip=True)):
            found.update((response, prompt) for prompt, response in batch if prompt.strip() and response.strip())
            if len(found) >= wanted:
                return [(prompt, response) for response, prompt in found.items()][:wanted]
        raise SystemExit(f"--pairs = {file}, has {len(found)} different responses; {wanted} are needed")

    def _write_base(self, pairs: Sequence[Pair]) -> None:
        from model import hf_format
        from model.t5 import T5

        shape = T5ModelConfig(**{**model_presets()[self.model], "dropout_rate": DROPOUT})
        hf_format.save(T5(shape).initialise(0), self.folder / "base")
        texts = [text for pair in pairs for text in pair]
        train_tokenizer(texts, "bpe", min(shape.vocab_size, MOST_IDS), 8 * 2**20).save(self.folder / "base")

    def _batches(self, config: Config, folder: Path) -> list[list[dict[str, list[int]]]]:
        """The rows of each step as our own loader gives them, like lengths beside each other, so that little is
        padded.
        """
        loader = StepLoader(folder, "pairs", config.data, config.model, config.run.seed)
        steps = []
        for step in range(self.steps):
            (batch,) = loader.micro_batches(step, effective_batch_size=self.rows, batch_size=self.rows)
            sizes = zip(batch.input_lengths, batch.target_lengths, strict=True)
            steps.append(
                [
                    {"input_ids": batch.input_ids[row, :source].tolist(), "labels": batch.labels[row, :target].tolist()}
                    for row, (source, target) in enumerate(sizes)
                ]
            )
        return steps


def as_pairs(pairs: Sequence[Pair]) -> list[dict[str, str]]:
    """Rows of prompt and response."""
    return [{"prompt": prompt, "response": response} for prompt, response in pairs]


def as_preferences(pairs: Sequence[Pair]) -> list[dict[str, str]]:
    """Rows of prompt, its own response, and that of the row before."""
    return [
        {"prompt": prompt, "chosen": response, "rejected": pairs[row - 1][1]}
        for row, (prompt, response) in enumerate(pairs)
    ]
