"""Which of our flags means what a flag of another program means? Names of the Trainer, of LLaMA-Factory and of older guides.

A flag that does not exist is answered with the one that does, and with its value where that means the same.
"""

from __future__ import annotations

from collections.abc import Callable

from language import say
from settings.fields import TRUE_WORDS

Answer = str | Callable[[str], str]  # the name of our flag, or a sentence made of the value


def _if_true(flag: str, otherwise: str) -> Callable[[str], str]:
    return lambda value: f"write {flag}" if value.lower() in (*TRUE_WORDS, "") else otherwise


def _steps(flag: str) -> Callable[[str], str]:
    """Of a strategy of the Trainer: no, steps or epoch."""
    return lambda value: (
        f"write --{flag}=N, in steps"
        + ("; an epoch has as many as rows / effective_batch_size" if value == "epoch" else "")
    )


def _nothing(why: str) -> Callable[[str], str]:
    return lambda value: f"leave it out: {why}"


# ours by the Trainer's; a line or a polynomial to zero is nearest to the cosine
SCHEDULES = {
    "constant": "constant", "constant_with_warmup": "constant", "inverse_sqrt": "inverse_sqrt", "warmup_stable_decay": "wsd",
}  # fmt: skip

BY_NAME: dict[str, Answer] = {
    "lr": "learning_rate",
    "num_train_epochs": "epochs", "num_epochs": "epochs", "epoch": "epochs",
    "per_device_train_batch_size": "batch_size_per_gpu", "train_batch_size": "batch_size_per_gpu",
    "batch_size": "effective_batch_size", "global_batch_size": "effective_batch_size", "micro_batch_size": "batch_size_per_gpu",
    "per_device_eval_batch_size": "eval_batch_size_per_gpu", "eval_batch_size": "eval_batch_size_per_gpu",
    "gradient_clip": "max_grad_norm", "gradient_clip_val": "max_grad_norm", "clip_grad_norm": "max_grad_norm", "grad_clip": "max_grad_norm",
    "gradient_accumulation": "gradient_accumulation_steps",
    "bf16": _if_true("--mixed_precision=bf16", "write --mixed_precision=no"),
    "fp16": _if_true("--mixed_precision=fp16 (or bf16, which needs no scaling)", "write --mixed_precision=no"),
    "tf32": _nothing("products are as exact as --mixed_precision says"),
    "optim": lambda value: f"write --optimizer={'adafactor' if 'adafactor' in value else 'adamw'}",
    "lr_scheduler_type": lambda value: f"write --lr_schedule={SCHEDULES.get(value, 'cosine')}",
    "lr_scheduler": "lr_schedule", "warmup_ratio": lambda value: "write --warmup_steps=N, or leave it out: a tenth of all steps",
    "cutoff_len": "max_seq_len", "max_length": "max_seq_len", "max_source_length": "max_seq_len", "max_input_length": "max_seq_len",
    "max_target_length": "max_target_len", "max_output_length": "max_target_len", "model_max_length": "max_seq_len",
    "source_max_len": "max_seq_len", "target_max_len": "max_target_len",
    "generation_max_length": "max_target_len", "generation_num_beams": "num_beams",
    "save_total_limit": "keep_latest_n_ckp", "logging_steps": "log_steps", "logging_dir": "log_dir",
    "eval_strategy": _steps("eval_steps"), "evaluation_strategy": _steps("eval_steps"), "save_strategy": _steps("save_steps"),
    "logging_strategy": _steps("log_steps"),
    "load_best_model_at_end": _nothing("the best checkpoint is the run's model; --metric_for_best says which that is"),
    "metric_for_best_model": "metric_for_best", "predict_with_generate": lambda value: "write --eval_generate_rows=64",
    "early_stopping_patience": "early_stopping_evals", "label_smoothing_factor": "label_smoothing",
    "resume_from_checkpoint": lambda value: "write --is_keep_training=True, with the --run_name of the run",
    "overwrite_output_dir": "overwrite", "output": "output_dir", "save_dir": "output_dir",
    "dataloader_num_workers": _nothing("rows come from token shards, read beside the steps; preparing them takes --prepare_workers"),
    "num_workers": "prepare_workers", "preprocessing_num_workers": "prepare_workers",
    "dataloader_pin_memory": _nothing("the device decides it"), "remove_unused_columns": _nothing("other columns are not read"),
    "deepspeed": _nothing("--shard_weights=True shares weights among processes"), "fsdp": "shard_weights",
    "report_to": lambda value: _tracker(value), "disable_tqdm": _nothing("bars are drawn on terminals alone"),
    "do_train": _nothing("the first word is the command: train"), "do_eval": _nothing("evaluation is part of a run; see eval_steps"),
    "do_predict": _nothing("the command is generate"), "stage": lambda value: f"the command is {'dpo' if value == 'dpo' else 'train'}",
    "model_name_or_path": "finetune_from", "model_path": "finetune_from", "model_name": "finetune_from",
    "base_model": "finetune_from", "pretrained_model": "finetune_from", "checkpoint_path": "finetune_from",
    "tokenizer_name": "tokenizer_dir", "tokenizer_path": "tokenizer_dir", "tokenizer": "tokenizer_dir",
    "dataset": "train_file", "data_path": "train_file", "dataset_dir": "train_file", "train_data": "train_file",
    "train_dataset": "train_file", "data_file": "train_file", "eval_file": "validation_file", "dataset_name": "train_file",
    "validation_data": "validation_file", "eval_dataset": "validation_file", "val_file": "validation_file",
    "template": "prompt_template", "prefix": "source_prefix", "max_train_samples": "max_samples",
    "finetuning_type": lambda value: "write --lora_rank=8" if "lora" in value else "leave it out: all weights learn",
    "lora_r": "lora_rank", "lora_target": "lora_targets", "lora_target_modules": "lora_targets", "target_modules": "lora_targets",
    "load_in_8bit": lambda value: "write --lora_base=int8", "load_in_4bit": lambda value: "write --lora_base=int4",
    "quantization_bit": lambda value: f"write --lora_base=int{4 if value == '4' else 8}",
    "use_cpu": lambda value: "write --device=cpu", "no_cuda": lambda value: "write --device=cpu",
    "max_memory": "memory_budget", "memory": "memory_budget", "ram": "memory_budget", "low_mem": lambda value: "write --memory_mode=low",
    "dropout": "dropout_rate", "hidden_size": "d_model", "intermediate_size": "d_ff", "num_attention_heads": "num_heads",
    "num_hidden_layers": "num_layers", "pref_beta": "beta", "dpo_beta": "beta",
    "learn_rate": "learning_rate", "model_file": "finetune_from", "model_config_file": "model_preset",
    "div_factor": lambda value: "write --lr_schedule=one_cycle", "dataloader_buffer_size": _nothing("rows are read beside the steps"),
    "do_sample": lambda value: "write --temperature=0.7", "max_tokens": "max_new_tokens", "prompt": "input", "text": "input",
}  # fmt: skip


def answer(name: str, value: object, taken: set[str]) -> str:
    """What to write for a flag of another program; empty where it is not known, or the command has no such setting.

    Args:
        value: as it was typed. taken: the settings of the command.
    """
    found = BY_NAME.get(name)
    typed = str(value).strip("\0") if isinstance(value, (str, int, float)) else ""  # a table may be of any length
    if name == "model_path" and "finetune_from" not in taken:
        found = "model"
    if found is None:
        return ""
    if callable(found):
        return found(typed)
    return say("write --{flag}={value}", flag=found, value=typed or "VALUE") if found in taken else ""


def _tracker(value: str) -> str:
    if value in ("none", "", "false"):
        return "leave it out: no tracker is told unless --log_with names it"
    return f"write --log_with={value}"
