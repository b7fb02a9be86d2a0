"""Every setting once: default, kind, unit, range, one line of help, and whether it is fixed for a run.

Users change a default in `config.py`, which shows the same classes with plain values (`settings/edits.py` reads it),
name values in a YAML or JSON file (`--config=FILE`), or give them as flags; `settings/precedence.py` has the order.
`settings.loading.load` returns a checked `Config`; nothing else builds one from outside input, and nothing changes one:
`config.with_changes(seed=7)` is another. Groups only sort the settings for readers: names are unique across groups, so
flags are flat.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from settings import optimizers
from settings.consistency import CLASS_SCORES, EMBEDDING_SCORES, NUMBER_SCORES, RANKED_SHOWN, SCORES, are_numbers
from settings.fields import AUTO, Auto, Derived, Size, Text, declared, defining, setting
from settings.precedence import BY_USER, SAVED, model_presets, strength
from settings.tasks import EMBEDDING_LOSSES, MODEL_HEADS, PREFERENCE_LOSSES, TASKS, task_for
from support.language import LANGUAGES

ROOT = Path(__file__).resolve().parent.parent
MOST_TOKENS = 65536  # An encoder reads no more.
HEAD_EVAL_ROWS = 4096
ON_TEXT = "objective=span|ul2|prefix|denoise|sequence|token|embedding"
ON_LABELS = "objective=sequence|token|embedding"
DEVICES = ("cuda", "mps", "cpu")  # files of devices/, in the order of choice


def _objective(s: Any) -> str:
    of_command = [name for name, facts in TASKS.items() if facts.command == s.command != "train"]
    if of_command:
        return of_command[0]
    head = MODEL_HEADS[s.head]
    if head.has_labels or head.has_vectors:
        return str(head.task)
    # In what a run has saved, all columns are named.
    names_text = s.is_set("text_column") and s.origin("objective") != "file" and not s.is_finetune
    return "span" if names_text and "objective" in flags_of(s.command) else str(s.objective)


def _longest_input(s: Any) -> int:
    has_data = s.train_file is not None or s.validation_file is not None
    return MOST_TOKENS if MODEL_HEADS[s.head].has_labels and has_data else int(s.max_seq_len)


def _optimizer(s: Any) -> str:
    # Adapters begin at zero, where steps scaled by a weight's size stand still.
    return "adamw" if s.lora_rank and s.origin("optimizer") is None else str(s.optimizer)


class Noting:
    """A group that notes which of its settings are read, once it is part of a `Config`.

    The groups of the model and of decoding do not, for they are read at every step.
    """

    __slots__ = ("_reads",)  # Like this, `vars` gives settings alone.

    def note_reads(self, names: set[str]) -> None:
        """Add the name of each setting that is read from now on to `names`."""
        object.__setattr__(self, "_reads", names)

    def __getattribute__(self, name: str) -> Any:
        settings: dict[str, Any] = object.__getattribute__(self, "__dict__")
        if name in settings and hasattr(self, "_reads"):
            self._reads.add(name)
        return object.__getattribute__(self, name)

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


@dataclass(frozen=True)
class T5ModelConfig:
    """The shape of a T5 model. Names and meaning follow the T5 paper and Hugging Face's `T5Config`."""

    vocab_size: int = defining(32128, "vocabulary size", unit="tokens", low=3, high=2**31 - 1)
    d_model: int = defining(512, "hidden size", low=1)
    d_kv: int = defining(64, "size of one attention head, independent of d_model", low=1)
    d_ff: int = defining(2048, "inner size of the feed-forward layers", low=1)
    num_layers: int = defining(
        6, "encoder blocks; set alone, it also sets num_decoder_layers if both stacks of the preset are equal", low=1
    )
    num_decoder_layers: int = defining(
        6,
        "decoder blocks; 0: encoder only, which needs --head",
        low=0,
        derived=Derived("0 with a head", lambda s: s.num_decoder_layers * MODEL_HEADS[s.head].needs_decoder),
    )
    num_heads: int = defining(8, "attention heads", low=1)
    relative_attention_num_buckets: int = defining(32, "buckets of the relative position bias", low=4)
    relative_attention_max_distance: int = defining(128, "distance beyond which positions share one bucket", low=2)
    dropout_rate: float = defining(0.0, "dropout probability in training", low=0.0, high=0.95)
    layer_norm_epsilon: float = defining(1e-6, "epsilon of the RMS norms", above=0.0)
    initializer_factor: float = defining(1.0, "factor on T5's initial standard deviations", above=0.0)
    feed_forward_proj: str = defining("relu", "activation function", choices=("relu", "gated-gelu", "gated-silu"))
    tie_word_embeddings: bool = defining(
        True,
        "share one table between embedding and output",
        needs="head=text",
        derived=Derived(
            "True with a head, even if the preset has False",
            lambda s: s.tie_word_embeddings or not MODEL_HEADS[s.head].writes_text,
        ),
    )
    scale_decoder_outputs: bool = defining(
        True,
        "scale the output by d_model^-0.5 (T5 1.0)",
        needs="head=text",
        derived=Derived(
            "True with a head, even if the preset has False",
            lambda s: s.scale_decoder_outputs or not MODEL_HEADS[s.head].writes_text,
        ),
    )
    bias_in_every_layer: bool = defining(False, "one position bias table per block (UMT5)")
    pad_token_id: int = defining(0, "id of the padding token", low=0)
    eos_token_id: int = defining(1, "id of the end-of-sequence token", low=0)
    decoder_start_token_id: int | None = defining(None, "id of the first decoder token; none: pad_token_id", low=0)
    head: str = defining(
        "text",
        "output of the model: text, sequence (a label per row), token (a label per token), embedding (one per text) or "
        "none (the encoder's hidden states)",
        choices=tuple(MODEL_HEADS),
    )
    labels: str | Auto = defining(
        AUTO,
        "labels of the head: regression, the number of classes, or the names of the classes separated by "
        "commas; auto: from the data",
        needs="head=sequence|token",
    )
    pooling: str | Auto = defining(
        AUTO,
        "what a sequence or embedding head reads: the mean over all tokens, the first token or the last one; auto: "
        "last with a decoder, else mean",
        choices=("mean", "first", "last"),
        needs="head=sequence|embedding",
    )
    head_kind: str | Auto = defining(
        AUTO,
        "layers of the head: dense (dropout, dense, tanh, dropout, out) or linear (dropout, out); auto: dense for "
        "sequence, linear for token",
        choices=("dense", "linear"),
        needs="head=sequence|token",
    )
    embedding_size: int = defining(
        0,
        "dimension of the embeddings, by a dense layer after the pooling; 0: d_model, no dense layer",
        low=0,
        high=65536,
        needs="head=embedding",
    )
    normalize: bool = defining(True, "normalise embeddings to length 1", needs="head=embedding")

    @property
    def is_text(self) -> bool:
        """Whether it writes text: encoder, decoder and a head over the vocabulary."""
        return MODEL_HEADS[self.head].writes_text

    @property
    def output_vocabulary(self) -> int:
        """Tokens that its outputs score: all where it writes text, else none."""
        return self.vocab_size * self.is_text

    @property
    def scales_outputs(self) -> bool:
        """Whether the decoder's hidden states are multiplied by d_model^-0.5 before they score tokens."""
        return self.output_vocabulary > 0 and self.scale_decoder_outputs

    @property
    def has_own_table(self) -> bool:
        """Whether its outputs are scores of tokens by a table that is not the embedding."""
        return self.output_vocabulary > 0 and not self.tie_word_embeddings

    @property
    def output_weights(self) -> str:
        """Which weights make the outputs: the embedding, or a head's own."""
        return "embedding" if self.output_vocabulary and self.tie_word_embeddings else "head"

    @property
    def pools_rows(self) -> bool:
        """Whether a row has one output, and not each of its tokens."""
        return MODEL_HEADS[self.head].pools_rows

    @property
    def gives_vectors(self) -> bool:
        """Whether its outputs are vectors of texts."""
        return MODEL_HEADS[self.head].has_vectors

    @property
    def vector_size(self) -> int:
        """Width of the vectors of texts."""
        return self.embedding_size or self.d_model

    @property
    def label_names(self) -> tuple[str, ...]:
        """Names of the classes of a head over labels, in the order of its outputs; (): regression, or not known yet."""
        if self.labels == AUTO or are_numbers(self.labels):
            return ()
        if self.labels.isdecimal():
            return tuple(map(str, range(int(self.labels))))
        return tuple(name.strip() for name in self.labels.split(","))

    @property
    def num_labels(self) -> int:
        """Outputs of a head over labels: one per class, one of a regression, 2 while the labels are not known; 0
        without such a head.
        """
        if not MODEL_HEADS[self.head].has_labels:
            return 0
        return 1 if are_numbers(self.labels) else len(self.label_names) or 2

    def has_labels_of(self, other: T5ModelConfig) -> bool:
        """Whether the head of `other` gives these labels, as far as it names them."""
        is_unnamed = other.labels == AUTO or other.labels.isdecimal()
        return self.num_labels == other.num_labels and (is_unnamed or self.label_names == other.label_names)

    @property
    def head_pooling(self) -> str:
        """`pooling` with auto resolved."""
        if self.pooling != AUTO:
            return self.pooling
        return "last" if self.num_decoder_layers else "mean"

    @property
    def has_dense_head(self) -> bool:
        """Whether its head over labels has a dense layer before the output; `head_kind` with auto resolved."""
        layers = {AUTO: MODEL_HEADS[self.head].is_dense, "dense": True, "linear": False}
        return layers[self.head_kind]

    @property
    def start_token_id(self) -> int:
        """Id that the decoder starts with."""
        return self.pad_token_id if self.decoder_start_token_id is None else self.decoder_start_token_id


@dataclass(frozen=True)
class DataConfig(Noting):
    """The data, and how it becomes training examples."""

    train_file: str | None = defining(
        None,
        "file, folder, glob or address (s3://, hf://OWNER/NAME) to train on, or several separated by commas; none: "
        "the built-in sample",
    )
    validation_file: str | None = defining(
        None, "evaluation data, several sets by name: news=a.jsonl,law=b.jsonl; none: one row in a hundred is held out"
    )
    text_column: str = defining(
        "text",
        "text column for pretraining; if set, the run trains on this text even if the file has prompts and responses; "
        "for --head=embedding the columns of the texts, separated by commas",
        needs=ON_TEXT,
    )
    label_column: str = defining(
        "label",
        "label column for --head: one label per text, a list or string with one label per token, or for embedding the "
        "similarity of two texts",
        needs=ON_LABELS,
    )
    query_prompt: Text | None = defining(
        None, "prompt before the first text of each row, the query", needs="head=embedding"
    )
    document_prompt: Text | None = defining(
        None, "prompt before the other texts of each row, the documents", needs="head=embedding"
    )
    teacher_vectors: str | None = defining(
        None,
        "teacher embeddings to distil, one for each row of train_file: .npy, or .parquet with a column vector, as "
        "embed writes it",
        needs="head=embedding",
    )
    prepare_text: str = defining(
        "none",
        "preparation of protein sequences: prott5 (letters separated by spaces; U, Z, O and B become X), "
        "prostt5 (also <AA2fold> in front) or ankh (each letter encoded separately)",
        choices=("none", "prott5", "prostt5", "ankh"),
        needs=ON_TEXT,
    )
    prompt_column: str = defining("prompt", "prompt column of pairs", needs="objective=pairs|preferences")
    response_column: str = defining("response", "response column of pairs", needs="objective=pairs")
    chosen_column: str = defining(
        "chosen", "column with the better answer of a preference", needs="objective=preferences"
    )
    rejected_column: str = defining(
        "rejected", "column with the worse answer of a preference", needs="objective=preferences"
    )
    messages_column: str | Auto = defining(
        AUTO,
        "column with whole conversations; auto: messages or conversations, if there are no prompt and response columns",
        needs="objective=pairs",
    )
    history_column: str | None = defining(
        None,
        "column with earlier turns of a pair, such as [[question, answer], ...]",
        needs="objective=pairs",
    )
    expand_turns: bool = defining(
        False, "train on every answer of a conversation instead of only the last", needs="objective=pairs"
    )
    prompt_template: Text | Auto = defining(
        AUTO,
        "prompt format: plain, chat, alpaca, question, chat_zh, chat_template (the tokenizer's own), a text with "
        "{prompt} (and {system}), or Jinja; auto: the one the model was trained with, else the tokenizer's, else plain",
        needs="objective=pairs|preferences",
    )
    source_prefix: Text | Auto | None = defining(
        AUTO,
        "text before every prompt, such as 'summarize: '; auto: the one the model was trained with",
        needs="objective=pairs|preferences",
    )
    tokenizer_dir: str | Auto = setting(
        AUTO, "folder with tokenizer.json; auto: the model's own, else a new one is trained"
    )
    extra_tokens: str | None = defining(
        None,
        "file of tokens, one per line, that are added to the tokenizer and to the model's embedding; none: no tokens",
    )
    objective: str | Auto = defining(
        AUTO,
        "training objective; for text: span, ul2, prefix or denoise (single tokens masked, whole text as "
        "target, as in ProtT5); auto: span for text, pairs for prompt and response",
        derived=Derived(
            "preferences for dpo, sequence or token with such a head, span if text_column is set", _objective
        ),
        choices=tuple(TASKS),
    )
    max_seq_len: int = defining(
        512,
        "maximum encoder input",
        unit="tokens",
        low=8,
        high=MOST_TOKENS,
        derived=Derived("65536 with a head, so that nothing is cut", _longest_input),
    )
    max_target_len: int | Auto = defining(
        AUTO,
        "maximum decoder input; auto: what span corruption needs, or max_seq_len for pairs",
        unit="tokens",
        low=4,
        high=65536,
        needs="head=text",
    )
    noise_density: float = defining(
        0.15,
        "fraction of tokens that span corruption and denoise mask",
        low=0.01,
        high=0.9,
        needs="objective=span|denoise",
    )
    mean_noise_span_length: float = defining(
        3.0, "mean length of a masked span", unit="tokens", low=1.0, high=64.0, needs="objective=span"
    )
    max_samples: int | None = defining(None, "maximum rows of the training data to use", unit="rows", low=1)
    group_by_length: bool = defining(True, "put rows of similar length into the same micro-batch (pairs)")
    mixture_weights: str | None = defining(
        None, "sampling weights of the parts of train_file, such as 0.7,0.3; none: every row once per epoch"
    )
    batch_tokens: int = defining(0, "maximum tokens in a micro-batch; 0: no limit", unit="tokens", low=0)
    skip_bad_rows: bool = defining(False, "skip and count broken rows instead of stopping at the first")
    cache_dir: str = setting("data/cache", "folder for token shards and the built-in corpus", is_place=True)


@dataclass(frozen=True)
class TrainConfig(Noting):
    """Steps, batch size, optimizer, learning rate, evaluation and checkpoints."""

    is_finetune: bool = defining(False, "finetune a trained model on prompt and response pairs")
    is_keep_training: bool | Auto = setting(
        False,
        "resume the last run of this output folder exactly where it stopped; auto: resume run_name if it exists, else "
        "start it",
    )
    finetune_from: str | Auto | None = setting(
        AUTO,
        "model folder to start from, hf://OWNER/NAME, or with allow_download a Hugging Face hub name; auto: the "
        "newest finished pretraining run whose tokenizer suits the data, else none; none: random weights",
    )
    allow_download: bool = setting(
        False, "download finetune_from from the Hugging Face hub, or the mirror in HF_ENDPOINT, into models/"
    )
    max_steps: int | Auto = setting(AUTO, "training steps; auto: from epochs", unit="steps", low=1)
    epochs: float | Auto = setting(
        AUTO,
        "passes over the data, if max_steps is auto; auto: 1, or 3 with is_finetune",
        unit="epochs",
        above=0.0,
        needs="max_steps=auto",
    )
    effective_batch_size: int | Auto = defining(
        AUTO,
        "rows per step over all micro-batches and processes; auto: 32, or 8 on a machine with less than 13 "
        "GB of RAM; an explicit number is never changed",
        unit="rows",
        low=1,
    )
    batch_size_per_gpu: int | Auto = setting(AUTO, "micro-batch size: rows per forward pass", unit="rows", low=1)
    eval_batch_size_per_gpu: int | Auto = setting(AUTO, "micro-batch size in evaluation", unit="rows", low=1)
    gradient_accumulation_steps: int | Auto = setting(AUTO, "micro-batches per step and process", low=1)
    compile: bool | Auto = setting(
        AUTO,
        "compile blocks with torch at the first steps, which takes about a minute; auto: on NVIDIA GPUs, for runs of "
        "500 steps or more",
    )
    optimizer: str = defining(
        optimizers.DEFAULT,
        optimizers.described(),
        choices=tuple(optimizers.OPTIMIZERS),
        derived=Derived("adamw with adapters", _optimizer),
    )
    learning_rate: float | Auto = setting(
        AUTO,
        "peak learning rate; auto: depends on optimizer, model size, steps and starting point (docs/finetuning.md)",
        above=0.0,
    )
    lr_schedule: str = setting(
        "cosine",
        "learning rate schedule after the warmup; wsd: constant, then linear to zero over the last third",
        choices=("cosine", "inverse_sqrt", "one_cycle", "constant", "wsd"),
    )
    warmup_steps: int | Auto = setting(AUTO, "steps of linear warmup; auto: a tenth of all, at most 10000", low=0)
    weight_decay: float = defining(
        0.0,
        "decoupled weight decay, multiplied by the learning rate; norms and position biases are exempt",
        low=0.0,
        high=1.0,
    )
    freeze: str | None = defining(
        None, "parameters to freeze, such as encoder,embedding or *.q.weight; none: all are trained"
    )
    max_grad_norm: float = setting(
        0.0, "clip the global gradient norm; 0: off (needs all gradients at once; adafactor clips per tensor)", low=0.0
    )
    label_smoothing: float = defining(
        0.0, "label smoothing", low=0.0, high=0.9, needs="objective=span|ul2|prefix|denoise|pairs|sequence|token"
    )
    class_weights: str | None = defining(
        None,
        "weight of each class in the loss of a head: numbers separated by commas, in the order of the labels, or "
        "balanced (inverse to their frequency); none: 1 each",
        needs="head=sequence|token",
    )
    embedding_loss: str | Auto = defining(
        AUTO,
        "contrastive (all other texts of the step are negatives), cosent or regression (graded similarity), or "
        "distillation (teacher_vectors); auto: by the columns of the rows",
        choices=EMBEDDING_LOSSES,
        needs="head=embedding",
    )
    contrastive_temperature: float = defining(
        0.05, "temperature of the contrastive and cosent losses", above=0.0, needs="head=embedding"
    )
    matryoshka_sizes: str | None = defining(
        None,
        "Matryoshka dimensions, such as 256,128,64: the loss is summed over embeddings truncated to each; none: the "
        "full dimension alone",
        needs="head=embedding",
    )
    eval_steps: int | Auto = setting(AUTO, "steps between evaluations; auto: a fifth of all, at most 1000", low=1)
    eval_rows: int = setting(
        64,
        "maximum validation rows per evaluation",
        unit="rows",
        low=1,
        derived=Derived(
            "4096 with a head", lambda s: s.eval_rows if MODEL_HEADS[s.head].writes_text else HEAD_EVAL_ROWS
        ),
    )
    save_steps: int | Auto = setting(AUTO, "steps between checkpoints; auto: a tenth of all, at most 1000", low=1)
    keep_latest_n_ckp: int = setting(2, "recent checkpoints to keep besides the best", low=1)
    average_checkpoints: int = setting(
        0,
        "average this many of the last checkpoints at the end, and publish the average if it scores better "
        "than the best of them, as it often does with --lr_schedule=constant; 0: off",
        unit="checkpoints",
        low=0,
    )
    log_steps: int = setting(10, "steps between lines of output if it does not go to a terminal", low=1)
    sample_rows: int = setting(3, "validation rows whose answers are shown as samples at the end", unit="rows", low=0)
    early_stopping_evals: int = setting(
        0, "stop after this many evaluations in a row without improvement; 0: never", unit="evaluations", low=0
    )
    metric_for_best: str = setting(
        "loss",
        f"metric that selects the best checkpoint: loss, a score of answers ({', '.join((*SCORES, *RANKED_SHOWN))}), "
        f"of labels ({', '.join((*CLASS_SCORES, *NUMBER_SCORES))}), of vectors ({', '.join(EMBEDDING_SCORES)}) or a "
        f"metric of your own in Python; NAME/loss for one of several validation sets",
    )


@dataclass(frozen=True)
class PreferenceConfig(Noting):
    """Preference training: DPO, IPO, ORPO."""

    preference_loss: str = defining(
        "sigmoid",
        "sigmoid (DPO), ipo (mean log-probabilities) or orpo (no reference model)",
        choices=tuple(PREFERENCE_LOSSES),
    )
    beta: float = defining(
        0.1,
        "how strongly the model is held to the reference model; with orpo the weight of the odds-ratio loss",
        above=0.0,
    )


@dataclass(frozen=True)
class LoraConfig(Noting):
    """Adapters trained on top of frozen weights: LoRA."""

    lora_rank: int = defining(0, "LoRA rank; 0: no adapters, all weights are trained", low=0, high=4096)
    lora_alpha: float | Auto = defining(
        AUTO, "adapters are scaled by alpha / rank; auto: twice the rank", above=0.0, needs="lora_rank"
    )
    lora_dropout: float = defining(0.0, "dropout on the input of the adapters", low=0.0, high=0.95, needs="lora_rank")
    lora_targets: str | Auto = defining(
        AUTO,
        "matrices that get adapters: any of q,k,v,o,wi,wi_0,wi_1,wo, or all; auto: q,v",
        needs="lora_rank",
    )
    lora_tokens: str | Auto | None = defining(
        AUTO,
        "ids of tokens whose embeddings are trained together with the adapters, such as 32100-32227; auto: "
        "the ids that extra_tokens adds",
        needs="lora_rank",
    )
    lora_base: str | Auto = defining(
        AUTO,
        "dtype of the frozen weights; auto: fp32 or bf16 by mixed_precision, int8 if neither fits; int4 only on "
        "request",
        choices=("fp32", "bf16", "int8", "int4"),
        needs="lora_rank",
    )


@dataclass(frozen=True)
class MemoryConfig(Noting):
    """The memory budget, and the techniques that keep to it."""

    memory_budget: Size | Auto = setting(
        AUTO,
        "maximum memory of the process tree of one rank; on a GPU the same amount again of GPU memory; "
        "auto: what is free on this machine",
    )
    memory_mode: str | Auto = setting(
        AUTO,
        "standard (keeps all activations, fastest), low (much less memory; up to 5% slower, up to 20% for narrow "
        "models), "
        "ultra (least memory: recomputes all blocks, bf16 weights); auto: the fastest that fits with weights in memory",
        choices=("standard", "low", "ultra"),
    )
    probe: bool | Auto = setting(
        AUTO,
        "measure the memory of the largest steps in a child process before the run; auto: if the plan is "
        "near the budget",
    )
    ultra_low_mem: bool | Auto = setting(
        AUTO, "reopen the Arrow file for every read; auto: if less than 13 GB are available"
    )
    mixed_precision: str | Auto = defining(
        AUTO,
        "no (fp32), bf16, or fp16 (fp16 matrix products, bf16 weights); auto: what is fast on this device and fits",
        choices=("no", "fp16", "bf16"),
    )
    gradient_checkpointing: bool | Auto = setting(AUTO, "recompute activations in backward; auto: if the plan needs it")
    weights_in: str | Auto = setting(
        AUTO,
        "where the weights of blocks are kept while not in use: device, or offloaded to ram (GPUs only) or "
        "to a file; auto: the first that fits unless a later one is clearly faster, and in a file only the "
        "blocks that do not fit elsewhere",
        choices=("device", "ram", "file"),
    )
    weights_dir: str | Auto = setting(
        AUTO,
        "folder of the file with offloaded weights during the run; auto: output_dir",
        is_place=True,
        needs="weights_in=file",
    )


@dataclass(frozen=True)
class RunConfig(Noting):
    """Names, folders, device and output."""

    run_name: str | Auto = setting(
        AUTO, "folder under output_dir and log_dir; auto: pretrain_ or finetune_ plus the time"
    )
    output_dir: str = setting("model_save", "folder for models and checkpoints", is_place=True)
    log_dir: str = setting("logs", "folder for logs and metrics", is_place=True)
    overwrite: bool = setting(False, "replace an existing run of that name")
    seed: int = defining(42, "seed of initial weights, data order, masks and dropout", low=0, high=2**63 - 1)
    device: str | Auto = setting(AUTO, "device to compute on; auto: CUDA, then MPS, then CPU", choices=DEVICES)
    num_threads: int | Auto = setting(
        AUTO, "CPU threads per process; auto: one per core, fewer while other programs work", low=1
    )
    compiled_kernels: bool | Auto = setting(AUTO, "C kernels, compiled on first use; auto: on Linux CPUs with gcc")
    language: str | Auto = setting(
        AUTO,
        "language of the messages on the screen; auto: from LC_ALL, LC_MESSAGES or LANG, else en; the log "
        "is in English except for its memory lines",
        choices=LANGUAGES,
    )
    log_with: str | None = setting(
        None,
        "experiment trackers to report to, separated by commas: tensorboard, wandb, trackio, mlflow, aim, comet_ml, "
        "clearml, dvclive, swanlab; none: nothing leaves this machine",
    )
    push_to_hub: str | None = setting(
        None,
        "Hugging Face Hub repository to upload the finished model and its card to, OWNER/NAME or NAME; needs a login "
        "(hf auth login or HF_TOKEN); none: nothing is uploaded",
    )
    quiet: bool = setting(False, "print only results, warnings and errors; the log stays complete")


@dataclass(frozen=True)
class TokenizerConfig(Noting):
    """How a tokenizer is trained."""

    tokenizer_type: str | Auto = setting(
        AUTO,
        "bpe (byte-level), unigram, byte (ByT5, needs no training), words (split at spaces, for phonemes "
        "and the like), or letters (one token per letter); auto: letters for proteins, else bpe",
        choices=("bpe", "unigram", "byte", "words", "letters"),
    )


@dataclass(frozen=True)
class CleaningConfig(Noting):
    """Which rows are dropped before training."""

    clean: bool = defining(
        False, "normalise text and drop rows that are too short, have few letters or repeat themselves"
    )
    dedup: str = defining(
        "none",
        "drop rows whose texts equal those of an earlier row (exact); none: keep all rows",
        choices=("none", "exact"),
    )


@dataclass(frozen=True)
class PrepareConfig(Noting):
    """How token shards are written."""

    shards_dir: str | Auto = setting(AUTO, "folder for the token shards; auto: under cache_dir")
    preview: int = setting(
        0, "show this many examples exactly as the model receives them, without writing shards", unit="rows", low=0
    )
    prepare_workers: int | Auto = setting(
        AUTO, "encoding processes; 0: none; auto: one per core, at most 4", low=0, high=256
    )


@dataclass(frozen=True)
class PlanConfig(Noting):
    """The machine to plan for, and the form of the output."""

    target: str | Auto = setting(
        AUTO,
        "machine to plan for: a name from presets/machines.yaml or a YAML file; auto: this one; with json, several "
        "separated by commas",
    )
    json: bool = setting(False, "print JSON for other programs; chat also reads it, one line per question")


@dataclass(frozen=True)
class CheckpointConfig(Noting):
    """The trained model to use."""

    model: str | Auto = setting(
        AUTO,
        "model folder; auto: the base of the adapter, else the newest run in output_dir",
    )
    adapter: str | None = setting(None, "adapter folders for the model, separated by commas; the first is active")


@dataclass(frozen=True)
class ConvertConfig(Noting):
    """What a converted model looks like."""

    dtype: str = setting("keep", "dtype of the weights", choices=("keep", "fp32", "bf16", "fp16"))
    allow_pickle: bool = setting(
        False,
        "read pytorch_model.bin or adapter_model.bin where there is no safetensors file (torch's weights-only loader)",
    )


@dataclass(frozen=True)
class ExportConfig(Noting):
    """The format to export to."""

    format: str | None = setting(
        None,
        "gguf (llama.cpp), ctranslate2, onnx (transformers.js, Optimum, onnxruntime) or web (onnx, and a page that "
        "answers in the browser); each needs the package of its name, onnx and web also onnxruntime",
        choices=("gguf", "ctranslate2", "onnx", "web"),
    )
    quantize: str = setting(
        "none",
        "smaller numbers for the matrices; onnx keeps the fp32 files and gets files with this suffix beside them",
        choices=("none", "fp16", "int8", "q4"),
    )
    js: str | None = setting(
        None,
        "folder of a copy of transformers.js that the page loads (node_modules/@huggingface/transformers/dist); none: "
        "its public address",
        needs="format=web",
    )


@dataclass(frozen=True)
class GenerateConfig:
    """How answers are decoded."""

    max_new_tokens: int = setting(
        128,
        "maximum answer; unless set, the value in the model's folder, which is the longest answer it was trained on",
        unit="tokens",
        low=1,
        high=65536,
    )
    min_new_tokens: int = setting(0, "minimum answer", unit="tokens", low=0, high=65536, needs="answers=none")
    temperature: float = setting(0.0, "0: greedy decoding; above 0: sampling", low=0.0, high=10.0)
    top_k: int = setting(0, "sample from the k most likely tokens; 0: all", low=0, needs="temperature")
    top_p: float = setting(
        1.0, "sample from the most likely tokens with this total probability", above=0.0, high=1.0, needs="temperature"
    )
    num_beams: int = setting(1, "number of beams; 1: no beam search", low=1, high=256, needs="head=text")
    length_penalty: float = setting(
        1.0,
        "a beam's score is divided by length^this: above 0 favours long answers",
        low=-10.0,
        high=10.0,
        needs="num_beams",
    )
    early_stopping: str = setting(
        "False",
        "end a beam search when there are num_beams answers (True), when better ones are unlikely (False), or "
        "impossible (never)",
        choices=("True", "False", "never"),
        needs="num_beams",
    )
    repetition_penalty: float = setting(
        1.0,
        "penalty on tokens that were already generated; 1: none, 1.2: strong",
        above=0.0,
        high=100.0,
        needs="answers=none",
    )
    no_repeat_ngram_size: int = setting(
        0,
        "forbid repeating any sequence of this many tokens; 0: off",
        unit="tokens",
        low=0,
        needs="answers=none",
    )
    split_prompts: int = setting(
        0,
        "answer longer prompts in parts of about equal length, cut at the ends of sentences or at spaces, "
        "and join the answers; 0: off",
        unit="tokens",
        low=0,
        needs="answers=none",
    )


@dataclass(frozen=True)
class AnswerConfig(Noting):
    """Prompts, and where the answers go."""

    input: str | None = setting(
        None, "a text, a file of prompts (text, JSONL, CSV, Parquet, Arrow, FASTA), or - for lines of standard input"
    )
    output: str | None = setting(
        None,
        "JSONL file for answers or predicted labels, .npz, .parquet or .h5 for vectors, or folder for a new model; "
        "interrupted files are continued; none: the screen",
    )
    generate_batch_size: int | Auto = setting(
        AUTO, "prompts answered at once; auto: what the budget allows", unit="rows", low=1
    )
    answers: str | Auto | None = defining(
        AUTO,
        "all answers that are allowed: a file with one per line or a response_column, or two or more separated by "
        "commas; auto: answers.txt in the model's folder, if it exists (in training: none); none: any answer",
        needs="head=text",
    )
    num_answers: int = defining(
        1,
        "best answers per prompt, written with log-probabilities or scored by rank; needs num_beams to be "
        "at least as large",
        low=1,
        high=256,
        needs=("head=text", "eval_generate_rows"),
    )


@dataclass(frozen=True)
class EmbedConfig(Noting):
    """Which vectors of texts are written."""

    vectors: str | Auto = setting(
        AUTO,
        "auto: one vector per text, by the model's embedding head, or without one as mean; mean: hidden states averaged "
        "over the text's tokens; token: one vector per token",
        choices=("mean", "token"),
    )
    prompt_name: str = setting(
        "document",
        "which prompt of the model is put before each text: query (its query_prompt), document (its document_prompt) or "
        "none",
        choices=("query", "document", "none"),
        needs=("head=embedding", "vectors=auto"),
    )
    truncate_dim: int | None = setting(
        None,
        "numbers to which each vector is cut, and scaled to length 1 again; for models trained with matryoshka_sizes; "
        "none: all",
        low=1,
        needs=("head=embedding", "vectors=auto"),
    )


@dataclass(frozen=True)
class SearchConfig(Noting):
    """What is searched, and what is written of what is found."""

    corpus: str | None = setting(
        None, "file or folder of the texts that are searched; their vectors are kept in cache_dir"
    )
    num_documents: int = setting(10, "texts of the corpus per query, the nearest first", low=1, high=10_000)
    num_negatives: int = setting(
        0,
        "hard negatives per query: rows to train on are written (query, pos, neg) instead of what is found; the input "
        "needs a positive beside each query; 0: none",
        low=0,
        high=62,
    )
    relative_margin: float = setting(
        0.05,
        "a negative's cosine with the query is below that of the positive by at least this share of it",
        low=0.0,
        high=2.0,
        needs="num_negatives",
    )


@dataclass(frozen=True)
class MetricsConfig(Noting):
    """How answers are scored."""

    metrics: str | Auto = setting(
        AUTO,
        f"scores of answers, separated by commas: {', '.join(SCORES)}, and with num_answers "
        f"{', '.join(RANKED_SHOWN)}; auto: all",
    )
    eval_generate_rows: int | Auto = setting(
        AUTO,
        "rows to answer and score per evaluation; auto: none in training, the first 256 pairs in evaluate and export",
        unit="rows",
        low=0,
        needs="head=text",
    )


@dataclass(frozen=True)
class ChatConfig(Noting):
    """The conversation in the terminal."""

    system_prompt: str | None = setting(None, "system prompt of the conversation")
    history_turns: int | Auto = setting(
        AUTO,
        "earlier questions and answers that the model sees; auto: all that fit if it was trained on conversations, "
        "else none",
        low=0,
    )


@dataclass(frozen=True)
class BoardConfig(Noting):
    """Address, access and files of the page and the API."""

    host: str = setting("127.0.0.1", "address to listen on; one that others can reach always requires a token")
    port: int | Auto = setting(
        AUTO, "port to listen on; 0: any free one; auto: 8300 for the page, 8400 for the API", low=0, high=65535
    )
    token: str | Auto | None = setting(
        AUTO,
        "password of the page and key of the API; auto: none if only this machine can connect, else a "
        "random one is printed",
    )
    data_dir: str = setting("data/files", "folder for data files and uploads")


@dataclass(frozen=True)
class ListingConfig(Noting):
    """Deleting runs."""

    delete: str | None = setting(None, "name of a run to delete, with its model and checkpoints")
    yes: bool = setting(False, "delete without asking")


@dataclass(frozen=True)
class Config:
    """All settings of one run, by group.

    Each value has an `origin`, from which four questions are answered:

    - `is_set`: did the user set it? An explicit value counts, even if it equals the default.
    - `is_on_command_line`: did the user set it for this start? Lines edited in `config.py` do not count, since they
      hold for all runs, models and commands.
    - `is_changed`: did the user set it to another value than the default? Only then does it matter that a setting has
      no effect.
    - `overrides_saved_model`: does it take precedence over what a saved model says? Presets that the user names count
      too.
    """

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
    embed: EmbedConfig = field(default_factory=EmbedConfig)
    search: SearchConfig = field(default_factory=SearchConfig)
    metrics: MetricsConfig = field(default_factory=MetricsConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    board: BoardConfig = field(default_factory=BoardConfig)
    listing: ListingConfig = field(default_factory=ListingConfig)
    model_preset: str = "tiny"
    origins: tuple[tuple[str, str], ...] = ()  # setting -> one of `precedence.ORIGINS`; defaults are absent
    is_record: bool = False  # whether its file is what a run has saved, which names all settings, chosen or not
    # Settings of the groups that note it which somebody has read; `changed`, `as_dict` and `save` read none.
    reads: set[str] = field(default_factory=set, compare=False, repr=False)

    def __post_init__(self) -> None:
        for settings in vars(self).values():
            if isinstance(settings, Noting):
                settings.note_reads(self.reads)

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self.__post_init__()

    def origin(self, name: str) -> str | None:
        """Where the value of a setting came from, one of `settings.precedence.ORIGINS`; None: the default."""
        return dict(self.origins).get(name)

    def is_set(self, name: str) -> bool:
        """Whether the user set it: by a flag, in the file of `--config`, or in an edited line of `config.py`."""
        return self.origin(name) in BY_USER

    def is_on_command_line(self, name: str) -> bool:
        """Whether the command of this start sets it: by a flag, or in the file of `--config`."""
        return self.origin(name) in ("flag", "file")

    def is_changed(self, name: str) -> bool:
        """Whether the user set it to another value than its default, and not a run that saved all its settings."""
        group, member = settings_by_name()[name]
        is_saved = self.is_record and self.origin(name) == "file"
        return self.is_set(name) and not is_saved and vars(getattr(self, group))[name] != member.default

    def overrides_saved_model(self, name: str) -> bool:
        """Whether its value stays where a saved model has another one: the user set it, or a preset they named."""
        return strength(self.origin(name)) > strength(SAVED)

    @property
    def task(self) -> Any:
        """The `tasks.base.BaseTask` of these settings; before the data have decided between text and pairs that of
        pairs.
        """
        return task_for(self.data.objective, self.model.head)

    def with_changes(self, model_preset: str | None = None, **values: Any) -> Config:
        """The same settings with other values, by flat name; where each came from stays. A `model_preset` brings the
        shape of its model.
        """
        shape = {} if model_preset is None else model_presets()[model_preset]
        unknown = values.keys() - settings_by_name().keys()
        assert not unknown, f"{unknown} are no settings"
        groups = groups_of({**self.as_dict(), **shape, **values})
        return dataclasses.replace(self, **groups, model_preset=model_preset or self.model_preset)

    def with_saved(self, values: Mapping[str, Any], **conditions: Any) -> Config:
        """The same settings, and but what a saved model says where `overrides_saved_model` does not hold.

        Args:
            values: of the saved model, by flat name.
            conditions: values that apply whatever the user set, such as the shape of the model that a run starts from.
        """
        saved = {name: value for name, value in values.items() if not self.overrides_saved_model(name)}
        origins = (*self.origins, *((name, SAVED) for name in saved))
        return dataclasses.replace(self, **groups_of({**self.as_dict(), **saved, **conditions}), origins=origins)

    def as_dict(self) -> dict[str, Any]:
        """Flat name -> value of every setting, the form in which a configuration is saved and loaded again."""
        values = {name: vars(getattr(self, group))[name] for name, (group, _) in settings_by_name().items()}
        return {"model_preset": self.model_preset, **values}

    def save(self, path: Path, **changes: Any) -> None:
        """Write all settings as JSON, some with another value; `load(command, {"config": path})` reads it back."""
        path.write_text(json.dumps({**self.as_dict(), **changes}, indent=1, ensure_ascii=False) + "\n", encoding="utf8")


GROUPS = {f.name: f.default_factory for f in dataclasses.fields(Config) if str(f.type).endswith("Config")}


def groups_of(values: Mapping[str, Any]) -> dict[str, Any]:
    """The groups of a `Config`, made of the values of all settings by flat name."""
    members: dict[str, dict[str, Any]] = {group: {} for group in GROUPS}
    for name, (group, _) in settings_by_name().items():
        members[group][name] = values[name]
    return {group: make(**members[group]) for group, make in GROUPS.items()}  # type: ignore[operator]


# Sets of settings that several commands take: of groups, single settings and other sets.
SETS = {
    "folders": "output_dir log_dir language",
    "texts": (
        "train_file text_column label_column prepare_text prompt_column response_column "
        "chosen_column rejected_column messages_column history_column "
        "expand_turns tokenizer_dir objective max_samples skip_bad_rows cache_dir"
    ),
    "rows": "texts validation_file prompt_template source_prefix max_seq_len max_target_len",
    "training": "model data train metrics lora memory tokenizer cleaning prepare_workers run answering",
    "answering": ("answers num_answers num_beams length_penalty repetition_penalty no_repeat_ngram_size split_prompts"),
    "use": "memory_budget weights_in weights_dir mixed_precision device num_threads compiled_kernels seed folders",
    "prompts": "prompt_template source_prefix answers response_column cache_dir max_seq_len",
    "text_vectors": (
        "query_prompt document_prompt text_column prepare_text skip_bad_rows max_seq_len "
        "eval_batch_size_per_gpu overwrite use"
    ),
    "decoding": (
        "max_new_tokens min_new_tokens temperature top_k top_p num_beams length_penalty early_stopping "
        "repetition_penalty no_repeat_ngram_size"
    ),
}
# What each command takes: groups, sets and single settings. `checkpoint.model` is the setting, `model` the group.
COMMANDS = {
    "train": "training",
    "plan": "plan training",
    "doctor": (
        "json model checkpoint.model max_seq_len max_target_len objective effective_batch_size "
        "batch_size_per_gpu eval_batch_size_per_gpu gradient_accumulation_steps optimizer "
        "max_grad_norm lora memory run"
    ),
    "tokenizer": "head texts extra_tokens is_finetune vocab_size tokenizer overwrite folders",
    "prepare": "head labels rows extra_tokens vocab_size is_finetune tokenizer cleaning prepare num_threads folders",
    "evaluate": (
        "checkpoint output overwrite json metrics generate answers num_answers rows "
        "noise_density mean_noise_span_length eval_rows eval_batch_size_per_gpu ultra_low_mem "
        "use"
    ),
    "generate": (
        "checkpoint answer generate prompts prompt_column text_column prepare_text skip_bad_rows overwrite use"
    ),
    "embed": "checkpoint input output embed text_vectors",
    "search": "checkpoint input output search truncate_dim text_vectors cache_dir",
    "rerank": "checkpoint input output prompts skip_bad_rows eval_batch_size_per_gpu overwrite use",
    "board": "board folders",
    "demo": "cache_dir memory_budget seed device num_threads compiled_kernels folders",
    "serve": (
        "checkpoint host port token generate_batch_size max_new_tokens temperature top_k top_p "
        "repetition_penalty no_repeat_ngram_size system_prompt prompts prepare_text prompt_name query_prompt "
        "document_prompt use"
    ),
    "runs": "listing json folders",
    "chat": "checkpoint json chat decoding prompts use",
    "merge": "checkpoint output overwrite memory_budget folders",
    "check": "checkpoint folders",
    "convert": "checkpoint.model head convert output overwrite folders",
    "export": (
        "export checkpoint dtype output overwrite validation_file eval_generate_rows cache_dir memory_budget folders"
    ),
    "quantize": (
        "checkpoint output rows eval_rows eval_batch_size_per_gpu ultra_low_mem overwrite memory_budget "
        "num_threads seed folders"
    ),
    "dpo": "preference training",
}


@cache
def settings_by_name() -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """Every setting: name -> (group, field)."""
    table: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    for group, cls in GROUPS.items():
        for member in dataclasses.fields(cls):  # type: ignore[arg-type]
            assert member.name not in table, f"{member.name} is in two groups"
            table[member.name] = (group, declared(member))
    return table


def declared_class(plain_class: type) -> Any:
    """The class declared here that a class of `config.py` shows with plain values: what Python code gets from there."""
    return globals()[plain_class.__name__]


def places() -> tuple[str, ...]:
    """The settings that say where a start reads and writes."""
    return tuple(name for name, (_, member) in settings_by_name().items() if member.metadata["is_place"])


@cache
def flags_of(command: str) -> dict[str, tuple[str, dataclasses.Field[Any]]]:
    """The settings that a command takes as flags, in the order of its groups."""
    flags: dict[str, tuple[str, dataclasses.Field[Any]]] = {}
    words = COMMANDS[command].split()
    while words:
        word = words.pop(0)
        if word in SETS:
            words = [*SETS[word].split(), *words]
            continue
        for name, (group, member) in settings_by_name().items():
            # `model` is a group and a setting: in a command's list it is the group.
            if word in (group, f"{group}.{name}") or (word == name and word not in GROUPS):
                flags[name] = group, member
    return flags


def unlisted(command: str) -> frozenset[str]:
    """Settings that a command takes and does not show: `plan` takes a whole command line of `train` as it is."""
    if command != "plan":
        return frozenset()
    groups = ("metrics", "generate", "cleaning")
    names = (
        "prepare_workers",
        "seed",
        "log_dir",
        "overwrite",
        "run_name",
        "push_to_hub",
        "answers",
        "num_answers",
    )
    return frozenset(name for name, (group, _) in flags_of(command).items() if group in groups or name in names)
