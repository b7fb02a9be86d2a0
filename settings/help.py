"""`--help`: the few flags that matter by task, and with `--help=all` every one a command uses, in the user's
language.
"""

from __future__ import annotations

import platform
import shutil
from importlib import metadata

from settings.declared import GROUPS, Config, flags_of, unlisted
from settings.fields import allowed, show
from settings.loading import user_edits
from settings.precedence import model_presets, run_presets
from settings.program import program
from support.language import join, say
from support.terminal import folded

VERSION = "0.2.0"  # The newest part of CHANGELOG.md has it too.
COMMAND_GROUPS: dict[str, dict[str, str]] = {
    "train": {
        "train": "pretrain a T5; --is_finetune=True finetunes, --is_keep_training=True resumes the last run",
        "dpo": "preference training on prompt, chosen and rejected answer (DPO, IPO, ORPO)",
        "demo": "pretrain on prose, finetune on dates, score and answer, in a few minutes; `make train` runs this",
        "tokenizer": "train a tokenizer on --train_file in bounded memory",
        "prepare": "turn text, JSONL, CSV, FASTA, Parquet or Arrow into token shards",
    },
    "use": {
        "generate": "answer one text, or a file of prompts",
        "chat": "talk with a trained model in the terminal",
        "evaluate": "loss, perplexity and scored answers on --validation_file",
        "embed": "vectors of texts or proteins from a model's encoder",
        "search": "the texts of --corpus that are nearest to each query, or hard negatives to train on",
        "rerank": "documents of each query of a file, best first",
        "serve": "HTTP API compatible with OpenAI clients: serve MODEL",
    },
    "publish": {
        "merge": "merge adapters into the weights of their base model",
        "quantize": "write int8 weights and report how much the loss changes",
        "convert": "write any checkpoint of the T5 family as a plain Hugging Face folder, and compare the two",
        "export": "export to GGUF (llama.cpp), CTranslate2 or ONNX, and check the result",
        "check": "verify a folder against its checksums: check FOLDER",
    },
    "look": {
        "plan": "predict peak memory and time before a run: whether it fits, and what needs less memory",
        "doctor": "what this machine offers and what limits it, with advice; --model_preset adds what a model takes",
        "runs": "list runs with their state and disk usage; --delete=NAME removes one",
        "board": "web page to start, watch and compare runs, and to chat with the models",
    },
}
ABOUT = {name: about for group in COMMAND_GROUPS.values() for name, about in group.items()}
# These flags are needed in the first hour, by task; all others are shown by --help=all.
TRAINING = {
    "data": ("train_file", "validation_file", "prompt_column", "response_column", "max_seq_len", "max_target_len"),
    "starting point": ("model_preset", "is_finetune", "finetune_from", "is_keep_training", "tokenizer_dir"),
    "training": ("max_steps", "epochs", "effective_batch_size", "learning_rate", "dropout_rate", "lora_rank"),
    "memory": ("memory_budget", "memory_mode", "batch_size_per_gpu", "mixed_precision"),
    "name, folder and saving": ("run_name", "output_dir", "eval_steps", "save_steps"),
}
SHORT: dict[str, dict[str, tuple[str, ...]]] = {
    "train": TRAINING,
    "dpo": {**TRAINING, "preferences": ("beta", "preference_loss", "chosen_column", "rejected_column")},
    "plan": {"planning": ("target", "json"), **TRAINING},
    "generate": {
        "prompt": ("model", "input", "output", "prompt_column", "max_seq_len", "prompt_template"),
        "answer": (
            "answers",
            "num_answers",
            "max_new_tokens",
            "temperature",
            "top_p",
            "num_beams",
            "repetition_penalty",
            "generate_batch_size",
        ),
        "memory": ("memory_budget", "mixed_precision"),
    },
    "evaluate": {
        "evaluation": (
            "model",
            "validation_file",
            "metrics",
            "answers",
            "num_answers",
            "eval_rows",
            "eval_generate_rows",
        ),
        "memory": ("memory_budget", "mixed_precision", "eval_batch_size_per_gpu"),
    },
    "chat": {
        "conversation": ("model", "system_prompt", "history_turns", "prompt_template"),
        "answer": ("answers", "max_new_tokens", "temperature", "top_p", "repetition_penalty"),
        "memory": ("memory_budget", "mixed_precision"),
    },
    "prepare": {
        "data": ("train_file", "validation_file", "text_column", "prompt_column", "response_column", "max_seq_len"),
        "token shards": ("tokenizer_dir", "is_finetune", "shards_dir", "preview", "clean", "dedup", "skip_bad_rows"),
    },
    "embed": {
        "texts": ("model", "input", "output", "vectors", "prompt_name", "truncate_dim", "text_column", "prepare_text"),
        "memory": ("memory_budget", "mixed_precision", "eval_batch_size_per_gpu"),
    },
    "search": {
        "texts": ("model", "input", "corpus", "output", "num_documents", "num_negatives", "relative_margin"),
        "memory": ("memory_budget", "mixed_precision", "eval_batch_size_per_gpu"),
    },
    "rerank": {
        "documents": ("model", "input", "output", "answers", "max_seq_len"),
        "memory": ("memory_budget", "mixed_precision", "eval_batch_size_per_gpu"),
    },
    "tokenizer": {"tokenizer": ("train_file", "vocab_size", "tokenizer_type", "tokenizer_dir", "text_column")},
}
ORDER = (
    "precedence: defaults < config.py < preset < file < flags; booleans: True, False, yes, no, 1, 0; sizes: 6G, 512M"
)
WIDEST = 120  # A line has so many letters at most.
COLUMN = 32  # The help of a flag begins here.


def versions() -> str:
    """This program's version, and those of what it stands on."""
    words = [f"Python {platform.python_version()}"]
    for name in ("torch", "tokenizers", "pyarrow", "accelerate"):
        try:
            words.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            words.append(f"{name} missing")
    return f"FrugalT5 {VERSION} ({', '.join(words)})"


def general_help() -> str:
    """The commands by what one wants to do, one line each."""
    lines: list[str] = [say("usage: {program} {command} [--flag=value ...]", program=program(), command=say("COMMAND"))]
    for group, commands in COMMAND_GROUPS.items():
        lines += ["", say("{heading}:", heading=say(group))]
        lines += [part for name, about in commands.items() for part in _folded(f"  {name:10} " + say(about), 13)]
    more = say(
        "{program} COMMAND --help shows the flags that matter, --help=all every flag; --version", program=program()
    )
    return join("\n", [*lines, "", *_folded(more)])


def command_help(name: str, everything: bool = False) -> str:
    """The flags of one command: by task those that matter, or all by group, with default, allowed values and a line of
    help.
    """
    usage = say("usage: {program} {command} [--flag=value ...]", program=program(), command=name)
    head = [*_folded(join(": ", [name, say(ABOUT[name])]), len(name) + 2), "", usage, *_folded(say(ORDER))]
    short = SHORT.get(name)
    if everything or short is None:
        return join("\n", [*head, "", *_all_flags(name)])
    lines = head
    for task, flags in short.items():
        lines += ["", say("{heading}:", heading=say(task))]
        for flag in flags:
            lines += _flag_lines(name, flag, is_short=True)
    more = len(flags_of(name)) - len(unlisted(name)) + 3 - sum(map(len, short.values()))
    lines += ["", *_folded(say("{command} --help=all shows {more} more", command=f"{program()} {name}", more=more))]
    if unlisted(name):
        lines += _folded(say("every flag of train is accepted, so that its command line can be planned unchanged"))
    return join("\n", lines)


def _all_flags(name: str) -> list[str]:
    presets = ("preset", "model_preset") if "vocab_size" in flags_of(name) else ()
    lines = [line for flag in ("config", *presets) for line in _flag_lines(name, flag)]
    last_group = ""
    for flag, (group, _) in flags_of(name).items():
        if flag in unlisted(name):
            continue
        if group != last_group:
            about = (getattr(GROUPS[group], "__doc__", "") or "").splitlines()[0]
            lines += ["", *_folded(say(about))]
        last_group = group
        lines += _flag_lines(name, flag)
    return lines


def _flag_lines(command: str, flag: str, is_short: bool = False) -> list[str]:
    """Default, help and, unless it is short, allowed values of a flag."""
    none = say("none; without train_file: sample") if command == "train" else "none"
    own: dict[str, tuple[str, str, str]] = {
        "config": ("none", "YAML or JSON file of settings, which may be sorted into groups", say("a file")),
        "preset": (none, "settings by machine and goal", " | ".join(run_presets())),
        "model_preset": (Config.model_preset, "model architecture and size", " | ".join(model_presets())),
    }
    needs = ""
    if flag in own:
        default, text, values = own[flag]
    else:
        member = flags_of(command)[flag][1]
        edit = user_edits().by_name.get(flag)
        value = member.default if edit is None else edit.value
        default = "none" if value is None else show(member, value)
        if edit is not None:
            default = say("{value}, {place}", value=default, place=edit.place)
        elif (derived := member.metadata["derived"]) is not None:
            default = say("{value}; {derived}", value=default, derived=say(derived.text))
        text = member.metadata["help"]
        values = allowed(member.metadata)
        needs = " ".join(f"--{need}" for need in member.metadata["needs"])
    if is_short:
        return _folded(
            say("  --{flag}  {help} ({default})", flag=f"{flag:26}", help=say(text), default=default), COLUMN
        )
    lines: list[str] = [say("  --{flag}  (default {default})", flag=flag, default=default)]
    lines += _folded(say("      {help} [{values}]", help=say(text), values=values), 6)
    return [*lines, say("      needs {needs}", needs=needs)] if needs else lines


def _folded(text: str, indent: int = 0) -> list[str]:
    """Lines as wide as the terminal, or as most terminals are where there is none."""
    return folded(text, min(WIDEST, shutil.get_terminal_size().columns), indent)
