"""What does `--help` say? The few flags that matter by task, and with `--help=all` every one a command uses."""

from __future__ import annotations

import platform
import textwrap
from functools import partial
from importlib import metadata

from config import COMMANDS, GROUPS, Config, flags_of, unlisted
from settings.fields import allowed, show
from settings.precedence import model_presets, run_presets
from settings.program import program

VERSION = "0.2.0"  # that stands above the newest part of CHANGELOG.md
ABOUT = {
    "train": "pretrain a T5; --is_finetune=True finetunes, --is_keep_training=True resumes the last run",
    "dpo": "continue from a trained model with preferences: prompt, chosen and rejected answer (DPO, IPO, ORPO)",
    "demo": "train a small model on prose and on dates in a few minutes, and let it answer: what `make train` runs",
    "plan": "predict peak memory and speed, and show the choice, its parts and what else could be done",
    "doctor": "what this machine offers and limits, measured; with --model_preset also what a model takes; advice last",
    "tokenizer": "train a tokenizer on --train_file in bounded memory",
    "prepare": "turn text, JSONL, CSV, Parquet or Arrow into token shards",
    "evaluate": "loss, perplexity and scored answers of a trained model on --validation_file",
    "convert": "write a checkpoint of the T5 family, old or new, as a plain Hugging Face folder, and compare both",
    "export": "write a trained model for llama.cpp (GGUF), CTranslate2 or ONNX runtimes, and check it",
    "merge": "put adapters into the weights of their base: a plain model folder",
    "quantize": "write a model with int8 weights, one byte each, and tell what that changes",
    "check": "compare a folder's files with the sums they were written with: check FOLDER",
    "generate": "answer a text, or a file of prompts, with a trained model",
    "chat": "talk with a trained model in the terminal",
    "runs": "list the runs, how they stand and what they take on the disk; --delete=NAME removes one",
    "board": "a page in the browser: start runs, watch them, talk with what was trained",
    "serve": "an HTTP API over a trained model, for clients of OpenAI's: serve MODEL",
}
# what the first hour needs, by task; all else is shown by --help=all
TRAINING = {
    "the data": ("train_file", "validation_file", "prompt_column", "response_column", "max_seq_len", "max_target_len"),
    "where it starts": ("model_preset", "is_finetune", "finetune_from", "is_keep_training", "tokenizer_dir"),
    "how long, and how": ("max_steps", "epochs", "effective_batch_size", "learning_rate", "dropout_rate", "lora_rank"),
    "memory": ("memory_budget", "memory_mode", "batch_size_per_gpu", "mixed_precision"),
    "the run": ("run_name", "output_dir", "eval_steps", "save_steps"),
}
SHORT: dict[str, dict[str, tuple[str, ...]]] = {
    "train": TRAINING,
    "dpo": {**TRAINING, "preferences": ("beta", "preference_loss", "chosen_column", "rejected_column")},
    "plan": {"what is planned": ("target", "json"), **TRAINING},
    "generate": {
        "the question": ("model", "input", "output", "prompt_column", "max_seq_len", "prompt_template"),
        "the answer": ("max_new_tokens", "temperature", "top_p", "num_beams", "repetition_penalty", "generate_batch_size"),
        "memory": ("memory_budget", "mixed_precision"),
    },
    "evaluate": {
        "what is measured": ("model", "validation_file", "metrics", "eval_rows", "eval_generate_rows"),
        "memory": ("memory_budget", "mixed_precision", "eval_batch_size_per_gpu"),
    },
    "chat": {
        "the conversation": ("model", "system_prompt", "history_turns", "prompt_template"),
        "the answer": ("max_new_tokens", "temperature", "top_p", "repetition_penalty"),
        "memory": ("memory_budget", "mixed_precision"),
    },
    "prepare": {
        "the data": ("train_file", "validation_file", "text_column", "prompt_column", "response_column", "max_seq_len"),
        "the shards": ("tokenizer_dir", "is_finetune", "shards_dir", "preview", "clean", "dedup", "skip_bad_rows"),
    },
    "tokenizer": {"the tokenizer": ("train_file", "vocab_size", "tokenizer_type", "tokenizer_dir", "text_column")},
}  # fmt: skip
ORDER = "order: defaults < preset < file < flags; True and False also as yes, no, 1, 0; sizes as 6G, 512M"


def versions() -> str:
    """This program's version, and those of what it stands on."""
    found = {}
    for name in ("torch", "tokenizers", "pyarrow", "accelerate"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "missing"
    return f"FrugalT5 {VERSION} (Python {platform.python_version()}, {', '.join(map(' '.join, found.items()))})"


def general_help() -> str:
    """The commands, one line each."""
    lines = [f"  {name:10} {ABOUT[name]}" for name in COMMANDS]
    usage = f"usage: {program()} COMMAND [--flag=value ...]"
    more = f"{program()} COMMAND --help shows the flags that matter, --help=all every one; --version"
    return "\n".join([usage, "", "commands:", *lines, "", more])


def command_help(name: str, everything: bool = False) -> str:
    """The flags of one command: by task those that matter, or all by group, with default, allowed values and a line of help."""
    head = [f"{name}: {ABOUT[name]}", "", f"usage: {program()} {name} [--flag=value ...]"]
    short = SHORT.get(name)
    if everything or short is None:
        return "\n".join([*head, ORDER, "", *_all_flags(name)])
    lines = [*head, ORDER]
    for task, flags in short.items():
        lines += ["", f"{task}:", *(line for flag in flags for line in _told(name, flag, is_short=True))]
    more = len(flags_of(name)) - len(unlisted(name)) + 3 - sum(map(len, short.values()))
    also = (
        ";\nthe flags of train are taken too, so that its command line can be planned as it is"
        if unlisted(name)
        else ""
    )
    return "\n".join([*lines, "", f"{program()} {name} --help=all shows {more} more{also}"])


def _all_flags(name: str) -> list[str]:
    trains = {"model", "vocab_size"} & set(COMMANDS[name])
    lines = [line for flag in ("config", *(("preset", "model_preset") if trains else ())) for line in _told(name, flag)]
    group, hidden = "", unlisted(name)
    for flag, (its_group, _) in flags_of(name).items():
        if flag not in hidden:
            if its_group != group:
                lines += ["", f"{its_group}: {(getattr(GROUPS[its_group], '__doc__', '') or '').splitlines()[0]}"]
            group = its_group
            lines += _told(name, flag)
    return lines


def _told(command: str, flag: str, is_short: bool = False) -> list[str]:
    """Default, help and, unless it is short, allowed values of a flag."""
    none = "none; without train_file: sample" if command == "train" else "none"
    own = {
        "config": ("none", "YAML or JSON file of settings, also sorted into groups", "a file"),
        "preset": (none, "settings by machine and goal", " | ".join(run_presets())),
        "model_preset": (Config.model_preset, "shape of the model", " | ".join(model_presets())),
    }
    if flag in own:
        default, text, values = own[flag]
    else:
        member = flags_of(command)[flag][1]
        default = "none" if member.default is None else show(member, member.default)
        text, values = member.metadata["help"], allowed(member.metadata)
    wrap = partial(textwrap.wrap, break_long_words=False, break_on_hyphens=False)
    if is_short:
        return wrap(f"{text} ({default})", 116, initial_indent=f"  --{flag:26}  ", subsequent_indent=" " * 32)
    return [f"  --{flag}  (default {default})", *(f"      {line}" for line in wrap(f"{text} [{values}]", 100))]
