"""The same model trained by transformers' Seq2SeqTrainer on the same tokens: a child process of `benchmarks.recipes`.

    python -m benchmarks.parts.recipe_peer SHARDS MODEL OUTPUT STEPS ROWS OPTIMIZER LEARNING_RATE SEED MICRO_BATCH BF16

SHARDS: the split that the recipe's run was trained on, so that both read the same ids; MODEL: that run's folder, whose
shape is built anew with random weights; ROWS: of one step, in micro-batches of at most MICRO_BATCH; BF16: True or
False, the Trainer's `bf16`. Writes a model folder to OUTPUT.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import numpy as np

from data.dataset import LowMemDataset
from data.tokenizers.tokenizer import Tokenizer

IGNORED = -100


class PairRows:
    """Rows of shards as the Trainer wants them."""

    def __init__(self, folder: str) -> None:
        self.rows = LowMemDataset(folder)

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, number: int) -> dict[str, Any]:
        row = self.rows[int(number)]
        return {name: np.asarray(row[name], np.int64) for name in ("input_ids", "labels")}


def collate(rows: list[dict[str, Any]], pad: int) -> dict[str, Any]:
    """Pad rows on the right."""
    import torch

    def padded(name: str, fill: int) -> Any:
        each = [torch.from_numpy(row[name]) for row in rows]
        return torch.nn.utils.rnn.pad_sequence(each, batch_first=True, padding_value=fill)

    lengths = torch.tensor([len(row["input_ids"]) for row in rows])
    input_ids = padded("input_ids", pad)
    mask = (torch.arange(input_ids.shape[1]) < lengths[:, None]).long()
    return {"input_ids": input_ids, "attention_mask": mask, "labels": padded("labels", IGNORED)}


def main(
    shards: str,
    model: str,
    output: str,
    steps: int,
    rows: int,
    optimizer: str,
    learning_rate: float,
    seed: int,
    micro_batch: int,
    bf16: bool,
) -> None:
    """Train and save."""
    import torch
    from transformers import AutoConfig, AutoModelForSeq2SeqLM, Seq2SeqTrainer, Seq2SeqTrainingArguments, set_seed

    set_seed(seed)
    shape = AutoConfig.from_pretrained(model, dtype="float32")
    network = AutoModelForSeq2SeqLM.from_config(shape)
    batch_size = next(size for size in range(min(micro_batch, rows), 0, -1) if rows % size == 0)
    arguments = Seq2SeqTrainingArguments(
        output_dir=f"{output}.work",
        max_steps=steps,
        per_device_train_batch_size=batch_size,
        gradient_accumulation_steps=rows // batch_size,
        optim=optimizer,
        learning_rate=learning_rate,
        lr_scheduler_type="cosine",
        warmup_steps=steps // 10,
        save_strategy="no",
        report_to=[],
        seed=seed,
        disable_tqdm=True,
        logging_steps=max(1, steps // 10),
        remove_unused_columns=False,
        bf16=bf16,
        use_cpu=not torch.cuda.is_available(),  # bf16 asks for it
    )
    trainer = Seq2SeqTrainer(
        model=network,
        args=arguments,
        train_dataset=PairRows(shards),
        data_collator=lambda batch: collate(batch, shape.pad_token_id),
    )
    trainer.train()
    trainer.save_model(output)
    Tokenizer.load(model).save(Path(output))


if __name__ == "__main__":
    folders, (steps, rows, optimizer, rate, seed, micro_batch, bf16) = sys.argv[1:4], sys.argv[4:]
    numbers = int(steps), int(rows), optimizer, float(rate), int(seed), int(micro_batch)
    main(folders[0], folders[1], folders[2], *numbers, bf16 == "True")
