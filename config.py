"""Every setting once: default, unit, range, one line of help, and whether it is fixed for a run.

Change a default here, or name values in a YAML or JSON file (`--config=FILE`), or as flags.
Order: defaults < preset < file < flags (`settings/precedence.py`). A default that is edited here, and not yet in
`docs/settings.schema.json`, stands over a preset that nobody has named. `load` returns a checked `Config`; nothing else builds one from
outside input, and nothing changes one: `config.changed(seed=7)` is another.
Groups only sort the settings for readers: names are unique across groups, so flags are flat.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import optimizers
from language import LANGUAGES
from settings.consistency import PREFERENCES, SCORES, check
from settings.errors import DoesNotFit, UserError
from settings.fields import AUTO, defining, setting
from settings.precedence import declared, layered

__all__ = ["COMMANDS", "PREFERENCES", "Config", "DoesNotFit", "T5ModelConfig", "TrainConfig", "UserError", "load"]

ROOT = Path(__file__).resolve().parent
DEVICES = ("cuda", "mps", "cpu")  # files of devices/, in the order of choice


@dataclass(frozen=True)
class T5ModelConfig:
    """The shape of a T5 model. Names and meaning follow the T5 paper and Hugging Face's `T5Config`."""

    vocab_size: int = defining(32128, "rows of the embedding table", kind=int, unit="tokens", low=3, high=2**31 - 1)
    d_model: int = defining(512, "width of the residual stream", kind=int, low=1)
    d_kv: int = defining(64, "width of one attention head, independent of d_model", kind=int, low=1)
    d_ff: int = defining(2048, "inner width of the feed-forward layers", kind=int, low=1)
    num_layers: int = defining(6, "encoder blocks", kind=int, low=1)
    num_decoder_layers: int = defining(6, "decoder blocks", kind=int, low=1)
    num_heads: int = defining(8, "attention heads", kind=int, low=1)
    relative_attention_num_buckets: int = defining(32, "buckets of the relative position bias", kind=int, low=4)
    relative_attention_max_distance: int = defining(128, "distance from which one bucket serves all", kind=int, low=2)
    dropout_rate: float = defining(0.0, "share of activations dropped in training", kind=float, low=0.0, high=0.95)
    layer_norm_epsilon: float = defining(1e-6, "added to the variance in RMS norms", kind=float, above=0.0)
    initializer_factor: float = defining(1.0, "factor on T5's initial standard deviations", kind=float, above=0.0)
    feed_forward_proj: str = defining("relu", "activation", kind=str, choices=("relu", "gated-gelu", "gated-silu"))
    tie_word_embeddings: bool = defining(True, "one table for embedding and output", kind=bool)
    scale_decoder_outputs: bool = defining(True, "output scaled by d_model^-0.5 (T5 1.0)", kind=bool)
    bias_in_every_layer: bool = defining(False, "a position bias table in every block (UMT5)", kind=bool)
    pad_token_id: int = defining(0, "id of padding", kind=int, low=0)
    eos_token_id: int = defining(1, "id of the end of a text", kind=int, low=0)
    decoder_start_token_id: int | None = defining(
        None, "id that the decoder starts with; none: pad_token_id", kind=int, low=0, optional=True
    )

    @property
    def start_token_id(self) -> int:
        """Id that the decoder starts with."""
        return self.pad_token_id if self.decoder_start_token_id is None else self.decoder_start_token_id


@dataclass(frozen=True)
class DataConfig:
    """Where the text comes from and how it becomes rows."""

    train_file: str | None = defining(
        None,
        "file, folder or glob to train on, several separated by commas; none: the built-in sample",
        kind=str,
        optional=True,
    )
    validation_file: str | None = defining(
        None, "rows for evaluation, several sets by name: news=a.jsonl,law=b.jsonl; none: one row in a hundred is held out", kind=str,
        optional=True,
    )  # fmt: skip
    text_column: str = defining(
        "text", "column with the text for pretraining; where it is named, that is learnt, and no pairs beside it", kind=str
    )  # fmt: skip
    prompt_column: str = defining("prompt", "column with the prompt of a pair", kind=str)
    response_column: str = defining("response", "column with the response of a pair", kind=str)
    chosen_column: str = defining("chosen", "column with the better answer of a preference", kind=str)
    rejected_column: str = defining("rejected", "column with the worse answer of a preference", kind=str)
    messages_column: str = defining(
        AUTO, "column with whole conversations; auto: messages or conversations, where there are no prompt and response",
        kind=str, auto=True,
    )  # fmt: skip
    history_column: str | None = defining(
        None, "column with the turns before a pair, such as [[question, answer], ...]", kind=str, optional=True
    )
    expand_turns: bool = defining(False, "learn every answer of a conversation, not only the last", kind=bool)
    prompt_template: str = defining(
        AUTO, "words around a prompt: plain, chat, alpaca, question, chat_zh, chat_template (the tokenizer's own), a text with {prompt} "
        "(and {system}), or Jinja; auto: those the model was trained with, else the tokenizer's, else plain", kind="text", auto=True,
    )  # fmt: skip
    source_prefix: str | None = defining(
        AUTO, "text before every prompt, such as 'summarize: '; auto: the one the model was trained with",
        kind="text", auto=True, optional=True,
    )  # fmt: skip
    tokenizer_dir: str = setting(
        AUTO, "folder with tokenizer.json; auto: the model's own, else one is trained", kind=str, auto=True
    )
    objective: str = defining(
        AUTO, "training task; auto: span for text, pairs for prompt and response; dpo learns preferences",
        kind=str, auto=True, choices=("span", "ul2", "prefix", "pairs", PREFERENCES),
    )  # fmt: skip
    max_seq_len: int = defining(512, "longest encoder input", kind=int, unit="tokens", low=8, high=65536)
    max_target_len: int | str = defining(
        AUTO, "longest decoder input; auto: what span corruption needs, max_seq_len for pairs",
        kind=int, unit="tokens", low=4, high=65536, auto=True,
    )  # fmt: skip
    noise_density: float = defining(0.15, "share of tokens that span corruption masks", kind=float, low=0.01, high=0.9)
    mean_noise_span_length: float = defining(
        3.0, "mean length of a masked span", kind=float, unit="tokens", low=1.0, high=64.0
    )
    max_samples: int | None = defining(
        None, "use at most this many rows of the training data", kind=int, unit="rows", low=1, optional=True
    )
    group_by_length: bool = defining(True, "let rows of like length share a micro-batch (pairs)", kind=bool)
    mixture_weights: str | None = defining(
        None, "weights of the parts of train_file, such as 0.7,0.3; none: every row once per epoch", kind=str, optional=True
    )  # fmt: skip
    mixture_temperature: float = defining(1.0, "parts by size^(1/temperature); 1: each row once", kind=float, low=1.0)
    shuffle_block_rows: int | str = defining(
        AUTO, "rows that stay neighbours in the order; 0: none do; auto: 0, or 256 from 16 GiB of shards on",
        kind=int, unit="rows", low=0, high=2**20, auto=True,
    )  # fmt: skip
    batch_tokens: int = defining(0, "most tokens of a micro-batch; 0: rows alone count", kind=int, unit="tokens", low=0)
    drop_page_cache: bool = setting(False, "release file pages while reading (for limits that count them)", kind=bool)
    skip_bad_rows: bool = defining(False, "count broken rows and go on instead of stopping at the first", kind=bool)
    cache_dir: str = setting("data/cache", "folder for token shards and the built-in corpus", kind=str, is_place=True)


@dataclass(frozen=True)
class TrainConfig:
    """What happens at each step, and how often."""

    is_finetune: bool = defining(False, "continue from a trained model, on prompt and response pairs", kind=bool)
    is_keep_training: bool | str = setting(
        False, "resume exactly where the last run of this output folder stopped; auto: where run_name exists, else start it",
        kind=bool, auto=True,
    )  # fmt: skip
    finetune_from: str | None = setting(
        AUTO, "model folder to start from, or a name on the Hugging Face hub with allow_download; auto: the newest finished pretraining "
        "run whose tokenizer suits the data, else none; none: random weights", kind=str, auto=True, optional=True,
    )  # fmt: skip
    allow_download: bool = setting(
        False,
        "fetch finetune_from from the Hugging Face hub, or the mirror that HF_ENDPOINT names, into models/",
        kind=bool,
    )
    max_steps: int | str = setting(AUTO, "steps to train; auto: from epochs", kind=int, unit="steps", low=1, auto=True)
    epochs: float | str = setting(
        AUTO, "times through the data, if max_steps is auto; auto: 1, or 3 with is_finetune",
        kind=float, unit="epochs", above=0.0, auto=True,
    )  # fmt: skip
    effective_batch_size: int | str = defining(
        AUTO, "rows of one step, over all micro-batches and processes; never changed once chosen",
        kind=int, unit="rows", low=1, auto=True,
    )  # fmt: skip
    batch_size_per_gpu: int | str = setting(
        AUTO, "micro-batch: rows of one forward", kind=int, unit="rows", low=1, auto=True
    )
    eval_batch_size_per_gpu: int | str = setting(
        AUTO, "micro-batch of evaluation", kind=int, unit="rows", low=1, auto=True
    )
    gradient_accumulation_steps: int | str = setting(
        AUTO, "micro-batches of one step on one process", kind=int, low=1, auto=True
    )
    optimizer: str = defining(
        optimizers.DEFAULT, optimizers.described(), kind=str, choices=tuple(optimizers.OPTIMIZERS)
    )
    bf16_rounding: str = defining(
        "stochastic", "how bf16 weights take small steps: stochastic, compensated (one byte a weight more) or nearest (loses them)",
        kind=str, choices=("stochastic", "compensated", "nearest"),
    )  # fmt: skip
    learning_rate: float | str = setting(
        AUTO,
        f"highest learning rate; auto: {optimizers.rates_described()}, 1e-3 for its adapters; the others from random weights up to "
        "2e-2, muon 5e-2, the more the smaller the model and, above 36,000 steps, the shorter the run, and from a trained model a tenth of that, so 1e-3 for adafactor (as the T5 paper "
        "finetunes) where it is large, below 60M weights the more the smaller, to the whole at 3M; dpo: a hundredth, with adapters a tenth",
        kind=float,
        above=0.0,
        auto=True,
    )
    lr_schedule: str = setting(
        "cosine", "course of the learning rate after the warm-up; wsd: constant, and over the last third straight to zero",
        kind=str, choices=("cosine", "inverse_sqrt", "one_cycle", "constant", "wsd"),
    )  # fmt: skip
    warmup_steps: int | str = setting(
        AUTO, "steps of linear warm-up; auto: a tenth of all, at most 10000", kind=int, low=0, auto=True
    )
    weight_decay: float = defining(
        0.0, "decoupled weight decay, times the learning rate; not of norms, position biases and DoRA's lengths",
        kind=float, low=0.0, high=1.0,
    )  # fmt: skip
    layerwise_decay: float = defining(
        1.0, "factor on the learning rate from a block to the one below it, embedding last; 1: all learn alike", kind=float, above=0.0, high=1.0
    )  # fmt: skip
    freeze: str | None = defining(
        None, "parts that do not learn, such as encoder,embedding or *.q.weight; none: all learn", kind=str, optional=True,
    )  # fmt: skip
    max_grad_norm: float = setting(
        0.0,
        "clip all gradients to this global norm; 0: off (needs all gradients at once; adafactor clips per tensor)",
        kind=float,
        low=0.0,
    )
    label_smoothing: float = defining(
        0.0, "share of the target spread over the vocabulary", kind=float, low=0.0, high=0.9
    )
    z_loss: float = defining(0.0, "weight of the squared log-partition in the loss", kind=float, low=0.0, high=1.0)
    eval_steps: int | str = setting(
        AUTO, "steps between evaluations; auto: a fifth of all, at most 1000", kind=int, low=1, auto=True
    )
    eval_rows: int = setting(
        64, "rows of the validation data that one evaluation reads at most", kind=int, unit="rows", low=1
    )
    save_steps: int | str = setting(
        AUTO, "steps between checkpoints; auto: a tenth of all, at most 1000", kind=int, low=1, auto=True
    )
    keep_latest_n_ckp: int = setting(2, "checkpoints kept beside the best one", kind=int, low=1)
    average_checkpoints: int = setting(
        0, "at the end the mean of the last so many checkpoints is evaluated, and published where it is better than the best "
        "of them; it often is with --lr_schedule=constant. 0: off", kind=int, unit="checkpoints", low=0,
    )  # fmt: skip
    detect_anomaly: bool = setting(False, "name the block in which a number first became inf or nan (slow)", kind=bool)
    log_steps: int = setting(10, "steps between two lines on a screen that is no terminal", kind=int, low=1)
    sample_rows: int = setting(3, "answers generated from validation rows at the end", kind=int, unit="rows", low=0)
    early_stopping_evals: int = setting(
        0, "stop after so many evaluations in a row without a better one; 0: never", kind=int, unit="evaluations", low=0
    )
    metric_for_best: str = setting(
        "loss", f"number of an evaluation that decides which checkpoint is the best: loss, a score of answers ({', '.join(SCORES)}) or a metric "
        "of your own in Python; of one validation set: NAME/loss", kind=str,
    )  # fmt: skip


@dataclass(frozen=True)
class PreferenceConfig:
    """How the model learns which of two answers is better."""

    preference_loss: str = defining(
        "sigmoid", "sigmoid (DPO), ipo (over mean log-probabilities) or orpo (no reference model)",
        kind=str, choices=("sigmoid", "ipo", "orpo"),
    )  # fmt: skip
    beta: float = defining(0.1, "how closely the model is held to the reference; not for orpo", kind=float, above=0.0)
    preference_label_smoothing: float = defining(
        0.0, "share of pairs taken to be labelled the wrong way round; for sigmoid", kind=float, low=0.0, high=0.49
    )
    orpo_lambda: float = defining(
        0.1, "weight of the odds ratio beside the cross-entropy; for orpo", kind=float, above=0.0
    )


@dataclass(frozen=True)
class LoraConfig:
    """Which few weights learn beside a frozen model."""

    lora_rank: int = defining(0, "width of the adapters; 0: none, the model itself learns", kind=int, low=0, high=4096)
    lora_alpha: float | str = defining(
        AUTO, "scaling of the adapters is alpha / rank; auto: twice the rank", kind=float, above=0.0, auto=True
    )
    lora_dropout: float = defining(0.0, "share dropped of what the adapters read", kind=float, low=0.0, high=0.95)
    lora_targets: str = defining(
        AUTO, "matrices with an adapter, of q,k,v,o,wi,wi_0,wi_1,wo, or all; auto: q,v", kind=str, auto=True
    )
    lora_scaling: str = defining(
        "standard", "alpha / rank (standard) or alpha / sqrt(rank) (rank_stabilised)",
        kind=str, choices=("standard", "rank_stabilised"),
    )  # fmt: skip
    use_dora: bool = defining(False, "learn the length of each row beside its direction (DoRA)", kind=bool)
    lora_base: str = defining(
        AUTO, "dtype of the frozen weights; auto: fp32 or bf16 by mixed_precision, int8 where neither fits; int4 only if named",
        kind=str, auto=True, choices=("fp32", "bf16", "int8", "int4"),
    )  # fmt: skip


@dataclass(frozen=True)
class MemoryConfig:
    """What the run may take, and how it keeps to it."""

    memory_budget: int | str = setting(
        AUTO, "most memory for the process tree of one rank; auto: what is free here", kind="size", auto=True
    )
    memory_mode: str = setting(
        AUTO, "standard (all graphs kept), low (least memory for 5% more time, freed memory given back), ultra (least memory: recomputes all, weights in bf16); auto: the fastest that fits with weights in memory",
        kind=str, auto=True, choices=("standard", "low", "ultra"),
    )  # fmt: skip
    probe: bool | str = setting(
        AUTO,
        "measure the worst steps in a child process before the run; auto: where the plan is near the budget",
        kind=bool,
        auto=True,
    )
    ultra_low_mem: bool | str = setting(
        AUTO, "reopen the Arrow file for every read; auto: below 13 GB available", kind=bool, auto=True
    )
    mixed_precision: str = defining(
        AUTO, "no (fp32) or bf16 weights; auto: by what this device multiplies fast and what fits",
        kind=str, auto=True, choices=("no", "fp16", "bf16"),
    )  # fmt: skip
    gradient_checkpointing: bool | str = setting(
        AUTO, "recompute blocks in backward; auto: where the plan needs it", kind=bool, auto=True
    )
    offload_boundaries: bool | str = setting(
        AUTO,
        "inputs of recomputed blocks wait in RAM (CUDA); auto: where they do not fit on the GPU",
        kind=bool,
        auto=True,
    )
    shard_weights: bool | str = setting(
        AUTO, "each process keeps a share of weights and optimizer state; auto: where whole ones do not fit", kind=bool, auto=True
    )  # fmt: skip
    weights_in: str = setting(
        AUTO, "where the weights of blocks rest that do not work: device, ram (beside a GPU) or file; auto: the first that fits, "
        "of a file only the blocks that do not", kind=str, auto=True, choices=("device", "ram", "file"),
    )  # fmt: skip
    weights_dir: str = setting(
        AUTO,
        "folder on whose disk that file lies while the run lasts; auto: output_dir",
        kind=str,
        auto=True,
        is_place=True,
    )
    light_clean_steps: int = setting(50, "steps between light cleanings", kind=int, low=1)
    full_clean_steps: int = setting(200, "steps between full cleanings", kind=int, low=1)
    monitor_seconds: float = setting(
        0.25, "time between two memory samples", kind=float, unit="seconds", low=0.01, high=60.0
    )


@dataclass(frozen=True)
class RunConfig:
    """Names, folders, and where it runs."""

    run_name: str = setting(
        AUTO, "folder under output_dir and log_dir; auto: pretrain_ or finetune_ and the time", kind=str, auto=True
    )
    output_dir: str = setting("model_save", "folder for models and checkpoints", kind=str, is_place=True)
    checkpoint_mirror: str | None = setting(
        None, "address that checkpoints are copied to and restored from, such as s3://bucket/folder", kind=str, optional=True, is_place=True
    )  # fmt: skip
    log_dir: str = setting("logs", "folder for logs and metrics", kind=str, is_place=True)
    overwrite: bool = setting(False, "replace an existing run of that name", kind=bool)
    seed: int = defining(42, "fixes initial weights, data order, masks and dropout", kind=int, low=0, high=2**63 - 1)
    device: str = setting(AUTO, "auto: CUDA, then MPS, then CPU", kind=str, auto=True, choices=DEVICES)
    num_threads: int | str = setting(AUTO, "CPU threads of one process", kind=int, low=1, auto=True)
    compiled_kernels: bool | str = setting(
        AUTO, "kernels in C, compiled once on first use; auto: on a CPU under Linux that has gcc", kind=bool, auto=True
    )
    language: str = setting(
        AUTO, "of what is shown on the screen; auto: what LC_ALL, LC_MESSAGES or LANG says, else en; the log is English",
        kind=str, auto=True, choices=LANGUAGES,
    )  # fmt: skip
    log_with: str | None = setting(
        None, "trackers that hear of a training run beside its log, separated by commas: tensorboard, wandb, trackio, mlflow, aim, "
        "comet_ml, clearml, dvclive, swanlab; none: nothing leaves this machine",
        kind=str, optional=True,
    )  # fmt: skip
    quiet: bool = setting(False, "show results, warnings and errors alone; the log is as long as ever", kind=bool)


@dataclass(frozen=True)
class TokenizerConfig:
    """How a tokenizer is trained."""

    tokenizer_type: str = setting(
        "bpe",
        "bpe (byte-level), unigram, byte (ByT5, nothing to train), or words (what stands between spaces, such as phones)",
        kind=str,
        choices=("bpe", "unigram", "byte", "words"),
    )
    tokenizer_sample: int = setting(
        64 * 2**20, "most text a tokenizer is trained on, sampled over the corpus", kind="size"
    )


@dataclass(frozen=True)
class CleaningConfig:
    """Which rows are left out before training."""

    clean: bool = defining(False, "normalise text and drop rows by the four limits below", kind=bool)
    min_chars: int = defining(5, "shortest row to keep", kind=int, unit="characters", low=1)
    max_chars: int | None = defining(None, "longest row to keep", kind=int, unit="characters", low=1, optional=True)
    min_letters: float = defining(0.4, "least share of letters and digits to keep a row", kind=float, low=0.0, high=1.0)
    max_repetition: float = defining(0.9, "highest share of a text that zlib may save", kind=float, low=0.0, high=1.0)
    dedup: str = defining(
        "none", "drop rows that repeat an earlier one: exact, or near (about 80% of its runs of 5 characters)",
        kind=str, choices=("none", "exact", "near"),
    )  # fmt: skip


@dataclass(frozen=True)
class PrepareConfig:
    """How token shards are written."""

    shards_dir: str = setting(AUTO, "folder for the token shards; auto: under cache_dir", kind=str, auto=True)
    shard_rows: int = setting(65536, "rows of one shard file", kind=int, unit="rows", low=64)
    preview: int = setting(
        0, "show so many rows as the model will see them, and write no shards", kind=int, unit="rows", low=0
    )
    prepare_workers: int | str = setting(
        AUTO, "processes that encode, 0: none of their own; auto: one a core, at most 4", kind=int, low=0, high=256, auto=True
    )  # fmt: skip


@dataclass(frozen=True)
class PlanConfig:
    """What is planned for."""

    target: str = setting(
        AUTO, "machine to plan for: a name of presets/machines.yaml or a YAML file; auto: this one; with json several, parted by commas",
        kind=str, auto=True,
    )  # fmt: skip
    json: bool = setting(False, "print JSON, for programs (chat: also read it, one line a question)", kind=bool)


@dataclass(frozen=True)
class CheckpointConfig:
    """Which trained model is used."""

    model: str = setting(
        AUTO, "model folder; auto: the base of the adapter, else the newest run of output_dir", kind=str, auto=True
    )
    adapter: str | None = setting(
        None, "folders with adapters for the model, separated by commas; the first is on", kind=str, optional=True
    )


@dataclass(frozen=True)
class ConvertConfig:
    """What a converted model looks like."""

    dtype: str = setting("keep", "of the weights", kind=str, choices=("keep", "fp32", "bf16", "fp16"))
    shard_size: int | None = setting(None, "largest file of weights; none: one file", kind="size", optional=True)
    allow_pickle: bool = setting(
        False,
        "read pytorch_model.bin or adapter_model.bin where there are no safetensors (torch's weights-only loader)",
        kind=bool,
    )


@dataclass(frozen=True)
class ExportConfig:
    """Which program a model is exported for."""

    format: str | None = setting(
        None, "gguf (llama.cpp), ctranslate2, or onnx; each needs the package of its name, onnxruntime to check onnx",
        kind=str, optional=True, choices=("gguf", "ctranslate2", "onnx"),
    )  # fmt: skip


@dataclass(frozen=True)
class GenerateConfig:
    """How the tokens of an answer are chosen."""

    max_new_tokens: int = setting(
        128, "longest answer; where it is not named, what the model's folder says: the longest that it was trained on",
        kind=int, unit="tokens", low=1, high=65536,
    )  # fmt: skip
    min_new_tokens: int = setting(0, "shortest answer", kind=int, unit="tokens", low=0, high=65536)
    temperature: float = setting(0.0, "0: greedy; above: sampling", kind=float, low=0.0, high=10.0)
    top_k: int = setting(0, "sample from this many best tokens; 0: all", kind=int, low=0)
    top_p: float = setting(
        1.0, "sample from the best tokens that hold this probability", kind=float, above=0.0, high=1.0
    )
    num_beams: int = setting(1, "beginnings that a beam search keeps; 1: none", kind=int, low=1, high=256)
    length_penalty: float = setting(
        1.0, "a beam's score is over length^this: above 0 favours long answers", kind=float, low=-10.0, high=10.0
    )
    early_stopping: str = setting(
        "False", "end a beam search when there are num_beams answers (True), when better ones are unlikely (False), or impossible (never)",
        kind=str, choices=("True", "False", "never"),
    )  # fmt: skip
    repetition_penalty: float = setting(
        1.0, "held against tokens written before; 1: none, 1.2: strong", kind=float, above=0.0, high=100.0
    )
    no_repeat_ngram_size: int = setting(
        0, "no run of so many tokens comes twice; 0: any may", kind=int, unit="tokens", low=0
    )


@dataclass(frozen=True)
class AnswerConfig:
    """What is answered, and where to."""

    input: str | None = setting(
        None,
        "a text, a file of prompts (text, JSONL, CSV, Parquet, Arrow), or - for the lines of standard input",
        kind=str,
        optional=True,
    )
    output: str | None = setting(
        None,
        "JSONL file for the answers, continued where it was interrupted; none: the screen",
        kind=str,
        optional=True,
    )
    generate_batch_size: int | str = setting(
        AUTO, "prompts answered at once; auto: what the budget allows", kind=int, unit="rows", low=1, auto=True
    )
    long_prompts: str = setting(
        "cut",
        "prompts longer than max_seq_len: cut (counted and reported) or refuse",
        kind=str,
        choices=("cut", "refuse"),
    )


@dataclass(frozen=True)
class MetricsConfig:
    """How answers are scored."""

    metrics: str = setting(
        AUTO, f"scores of answers, separated by commas: {', '.join(SCORES)}; auto: all",
        kind=str, auto=True,
    )  # fmt: skip
    eval_generate_rows: int | str = setting(
        AUTO, "rows that an evaluation answers and scores; auto: none in training, in evaluate the first 256 of pairs",
        kind=int, unit="rows", low=0, auto=True,
    )  # fmt: skip


@dataclass(frozen=True)
class ChatConfig:
    """How a conversation in the terminal is led."""

    system_prompt: str | None = setting(None, "instructions for the whole conversation", kind=str, optional=True)
    history_turns: int | str = setting(
        AUTO, "questions before the newest, with their answers, that the model sees; auto: all that fit where it learnt "
        "conversations, else none", kind=int, low=0, auto=True,
    )  # fmt: skip


@dataclass(frozen=True)
class BoardConfig:
    """Where the page or the API is, and which files the page may show."""

    host: str = setting(
        "127.0.0.1", "address to listen at; one that others can reach is served with a token alone", kind=str
    )
    port: int | str = setting(
        AUTO, "port to listen at; 0: any that is free; auto: 8300 of the page, 8400 of the API",
        kind=int, low=0, high=65535, auto=True,
    )  # fmt: skip
    token: str | None = setting(
        AUTO, "word that opens the page, key of the API; auto: none on this machine alone, else one is drawn and printed",
        kind=str, auto=True, optional=True,
    )  # fmt: skip
    data_dir: str = setting("data/files", "folder that data files are picked from and uploaded to", kind=str)
    upload_limit: int = setting(8 * 2**30, "largest file that may be uploaded", kind="size")


@dataclass(frozen=True)
class ServeConfig:
    """How many requests the API holds, and how long."""

    max_queue: int = setting(
        64, "answers that may wait to be written; a request that would be one more is told to come again", kind=int, low=0, high=4096
    )  # fmt: skip
    request_timeout: float = setting(
        600.0, "longest time of a request, waiting included", kind=float, unit="seconds", above=0.0, high=86400.0
    )
    shutdown_timeout: int = setting(
        30, "time that open requests have to be answered when the API is ended", kind=int, unit="seconds", low=0, high=3600
    )  # fmt: skip


@dataclass(frozen=True)
class ListingConfig:
    """What is done with the runs there are."""

    delete: str | None = setting(None, "name of a run to delete, with model and checkpoints", kind=str, optional=True)
    yes: bool = setting(False, "delete without a question", kind=bool)


@dataclass(frozen=True)
class Config:
    """All settings of one run, by group."""

    model: T5ModelConfig = field(default_factory=T5ModelConfig)
    data: DataConfig = field(default_factory=DataConfig)
    train: TrainConfig = field(default_factory=TrainConfig)
    preference: PreferenceConfig = field(default_factory=PreferenceConfig)
    lora: LoraConfig = field(default_factory=LoraConfig)
    memory: MemoryConfig = field(default_factory=MemoryConfig)
    run: RunConfig = field(default_factory=RunConfig)
    tokenizer: TokenizerConfig = field(default_factory=TokenizerConfig)
    cleaning: CleaningConfig = field(default_factory=CleaningConfig)
    prepare: PrepareConfig = field(default_factory=PrepareConfig)
    plan: PlanConfig = field(default_factory=PlanConfig)
    checkpoint: CheckpointConfig = field(default_factory=CheckpointConfig)
    convert: ConvertConfig = field(default_factory=ConvertConfig)
    export: ExportConfig = field(default_factory=ExportConfig)
    generate: GenerateConfig = field(default_factory=GenerateConfig)
    answer: AnswerConfig = field(default_factory=AnswerConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    board: BoardConfig = field(default_factory=BoardConfig)
    serve: ServeConfig = field(default_factory=ServeConfig)
    listing: ListingConfig = field(default_factory=ListingConfig)
    model_preset: str = "tiny"
    origins: tuple[tuple[str, str], ...] = ()  # setting -> "flag", "file", "edited" or "preset"; defaults are absent

    def origin(self, name: str) -> str | None:
        """Where the value of a setting came from: "flag", "file", "edited" in this file, or "preset"; None: the default."""
        return dict(self.origins).get(name)

    def given(self, name: str) -> bool:
        """Whether the user named this setting, by flag or by file."""
        return self.origin(name) in ("flag", "file")

    def changed(self, **values: Any) -> Config:
        """The same settings with other values, by flat name; where each came from stays."""
        groups: dict[str, dict[str, Any]] = {}
        for name, value in values.items():
            groups.setdefault(settings_by_name()[name][0], {})[name] = value
        changes: dict[str, Any] = {
            group: dataclasses.replace(getattr(self, group), **members) for group, members in groups.items()
        }
        return dataclasses.replace(self, **changes)

    def as_dict(self) -> dict[str, Any]:
        """Flat name -> value of every setting, the form in which a configuration is saved and loaded again."""
        values = {name: getattr(getattr(self, group), name) for name, (group, _) in settings_by_name().items()}
        return {"model_preset": self.model_preset, **values}

    def save(self, path: Path) -> None:
        """Write all settings as JSON; `load(command, {"config": path})` reads it back."""
        path.write_text(json.dumps(self.as_dict(), indent=1, ensure_ascii=False) + "\n", encoding="utf8")


GROUPS = {f.name: f.default_factory for f in dataclasses.fields(Config) if f.name not in ("model_preset", "origins")}
# which rows are read, and how they become text
ROWS = (
    "train_file", "validation_file", "text_column", "prompt_column", "response_column", "chosen_column", "rejected_column",
    "messages_column", "history_column", "expand_turns", "prompt_template", "source_prefix", "tokenizer_dir", "objective",
    "max_seq_len", "max_target_len", "max_samples", "skip_bad_rows", "cache_dir",
)  # fmt: skip
SHARED = ("output_dir", "log_dir", "language")
# where a trained model is used, and what it may take
USE = ("memory_budget", "weights_in", "weights_dir", "mixed_precision", "device", "num_threads", "compiled_kernels", "seed",
       *SHARED)  # fmt: skip
TRAIN = ("data", "model", "train", "metrics", "lora", "memory", "tokenizer", "cleaning", "prepare_workers", "run",
         "num_beams", "length_penalty", "repetition_penalty", "no_repeat_ngram_size")  # fmt: skip
# command -> its groups and single settings: those that it uses, and no other
COMMANDS: dict[str, tuple[str, ...]] = {
    "train": TRAIN,
    "plan": ("plan", *TRAIN),
    "doctor": (
        "json", "model", "checkpoint.model", "max_seq_len", "max_target_len", "objective", "effective_batch_size",
        "batch_size_per_gpu", "eval_batch_size_per_gpu", "gradient_accumulation_steps", "optimizer", "bf16_rounding",
        "max_grad_norm", "lora", "memory", "run",
    ),
    "tokenizer": (
        *(name for name in ROWS if name not in ("validation_file", "max_seq_len", "max_target_len", "prompt_template", "source_prefix")),
        "is_finetune", "vocab_size", "tokenizer", "overwrite", *SHARED,
    ),
    "prepare": (
        *ROWS, "vocab_size", "is_finetune", "tokenizer", "cleaning", "prepare", "num_threads", *SHARED,
    ),
    "evaluate": (
        "checkpoint", "metrics", "generate", *ROWS, "noise_density", "mean_noise_span_length", "drop_page_cache", "eval_rows",
        "eval_batch_size_per_gpu", "ultra_low_mem", "monitor_seconds", *USE,
    ),
    "generate": (
        "checkpoint", "answer", "generate", "prompt_column", "text_column", "prompt_template", "source_prefix",
        "skip_bad_rows", "max_seq_len", "overwrite", *USE,
    ),
    "board": ("board", *SHARED),
    "demo": (
        "cache_dir", "memory_budget", "output_dir", "log_dir", "seed", "device", "num_threads", "compiled_kernels",
        "language",
    ),
    "serve": (
        "checkpoint", "host", "port", "token", "serve", "generate_batch_size", "max_new_tokens", "temperature", "top_k", "top_p",
        "repetition_penalty", "no_repeat_ngram_size", "system_prompt", "prompt_template", "source_prefix", "max_seq_len", *USE,
    ),
    "runs": ("listing", "json", *SHARED),
    "chat": ("checkpoint", "json", "chat", "generate", "prompt_template", "source_prefix", "max_seq_len", *USE),
}  # fmt: skip
COMMANDS["merge"] = ("checkpoint", "output", "overwrite", "memory_budget", *SHARED)
COMMANDS["check"] = ("checkpoint", *SHARED)
COMMANDS["convert"] = ("checkpoint.model", "output", "convert", "overwrite", *SHARED)
COMMANDS["export"] = ("export", "checkpoint", "output", "dtype", "overwrite", "memory_budget", *SHARED)
COMMANDS["quantize"] = (
    "checkpoint", "output", *ROWS, "eval_rows", "eval_batch_size_per_gpu", "ultra_low_mem", "overwrite", "memory_budget",
    "num_threads", "seed", *SHARED,
)  # fmt: skip
COMMANDS["dpo"] = ("preference", *TRAIN)


@cache
def settings_by_name() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Every setting: name -> (group, field)."""
    table: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for group, cls in GROUPS.items():
        for member in dataclasses.fields(cls):  # type: ignore[arg-type]
            assert member.name not in table, f"{member.name} is in two groups"
            table[member.name] = (group, declared(member))
    return table


def places() -> tuple[str, ...]:
    """The settings that say where a start reads and writes."""
    return tuple(name for name, (_, member) in settings_by_name().items() if member.metadata["is_place"])


@cache
def flags_of(command: str) -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """The settings that a command takes as flags, in the order of its groups."""
    found: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for word in COMMANDS[command]:
        for name, (group, member) in settings_by_name().items():
            # "model" is a group and a setting: in a command's list it is the group
            if word == group or word == f"{group}.{name}" or (word == name and word not in GROUPS):
                found[name] = group, member
    return found


def unlisted(command: str) -> frozenset[str]:
    """Settings that a command takes and does not show: `plan` takes a whole command line of `train` as it is."""
    if command != "plan":
        return frozenset()
    groups = ("metrics", "generate", "cleaning")
    names = ("prepare_workers", "seed", "log_dir", "overwrite", "checkpoint_mirror", "run_name")
    return frozenset(name for name, (group, _) in flags_of(command).items() if group in groups or name in names)


def load(command: str, flags: Mapping[str, Any] | None = None) -> Config:
    """Build the checked configuration of one command from raw flags.

    Args:
        command: a key of `COMMANDS`.
        flags: name -> raw value, as typed; may hold `config` (a file), `preset` and `model_preset`.
    Raises:
        UserError: all problems at once.
    """
    taken = {name: frozenset(flags_of(name)) for name in COMMANDS}
    defaults = Config()
    given = layered(command, flags or {}, defaults.as_dict(), settings_by_name(), taken)
    config, problems = defaults.changed(**given.values), given.problems
    config = dataclasses.replace(config, model_preset=given.model_preset, origins=tuple(given.origins.items()))
    asked = config.data.objective
    if command == "train" and asked == PREFERENCES:
        problems.append(f"--objective = {PREFERENCES}, is learnt by another command; use dpo instead of train")
    if command == "dpo" and asked not in (AUTO, PREFERENCES):
        problems.append(f"--objective = {asked}, dpo learns {PREFERENCES} alone; leave it out")
    if command == "dpo":
        config = config.changed(objective=PREFERENCES)
    # a run's saved settings name every column, and its objective beside it
    names_text = config.given("text_column") and config.origin("objective") != "file" and "objective" in taken[command]
    if names_text and config.data.objective == AUTO and not config.train.is_finetune:
        config = config.changed(objective="span")  # whatever else the rows have
    if config.lora.lora_rank and config.origin("optimizer") is None:
        # adapters begin at zero, where steps scaled by a weight's size stand still
        config = config.changed(optimizer="adamw")
    # flags of a run that goes on stand over its saved settings, which are not read yet: `resumed_config` names their file
    if not problems and ("config" in (flags or {}) or config.train.is_keep_training is not True):
        problems += check(config)
    if problems:
        raise UserError(*problems)
    return config


def training_command(saved: Mapping[str, Any]) -> str:
    """The command that a run with these saved settings was started with."""
    return "dpo" if saved.get("objective") == PREFERENCES else "train"
