"""Contradictions between settings that can be seen before data are read.

`config.load` tells all that is found together.
"""

from __future__ import annotations

import dataclasses
import os
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from language import say
from settings.fields import AUTO, counted, not_known

if TYPE_CHECKING:
    from settings.declared import Config

PREFERENCES = "preferences"  # the objective of the command dpo
TEXT = "text"  # the head of a T5 as it is: over the vocabulary
REGRESSION = "regression"  # the labels of a head that are numbers
HEADS = SEQUENCE, TOKEN = "sequence", "token"  # heads over labels, and the objectives of training them
ROUGE = ("rouge_1", "rouge_2", "rouge_l", "rouge_lsum")  # what `rouge` means in --metrics
GEOMETRIC_MEAN = "geometric_mean"  # of BLEU and chrF++
SCORES = ("exact_match", "f1", "bleu", "chrf", "chrf++", GEOMETRIC_MEAN, *ROUGE, "char_bleu", "identical")  # of answers
RANKED = re.compile(r"mrr|(?:recall|ndcg)@([1-9]\d{0,2})")  # scores of several answers, best first
RANKED_SHOWN = ("recall@K", "ndcg@K", "mrr")
CLASS_SCORES = ("accuracy", "macro_f1", "matthews")  # of predicted labels
NUMBER_SCORES = ("spearman", "pearson", "mse")  # of predicted numbers
SACREBLEU = ("bleu", "char_bleu", "chrf", "chrf++", GEOMETRIC_MEAN)  # what the library of this name computes


def check(config: Config) -> list[str]:
    """Find all contradictions, as `UserError` takes them."""
    parts = (_of_training, _preferences, _of_heads, answer_problems, _of_memory)
    return [problem for part in parts for problem in part(config)]


def objective_problems(config: Config, command: str) -> Iterator[str]:
    """Find an objective or a head that a command does not train with."""
    objective, head = config.data.objective, config.model.head
    if command == "train" and objective == PREFERENCES:
        told = "--objective = {objective}, belongs to the command dpo; use dpo instead of train"
        yield say(told, objective=objective)
    if command == "dpo" and objective not in (AUTO, PREFERENCES):
        told = "--objective = {asked}, dpo trains on {preferences} only; omit it"
        yield say(told, asked=objective, preferences=PREFERENCES)
    if head in HEADS and objective not in (AUTO, head):
        yield say("--objective = {asked}, --head={head} trains on labels; omit it", asked=objective, head=head)
    elif head not in HEADS and objective in HEADS:
        yield say("--objective = {asked}, is what --head={asked} trains on; name that instead", asked=objective)
    if head == "none" and command in ("train", "plan"):
        yield say("--head = none, has no loss to {command}; use sequence or token", command=command)
    if head != TEXT and command == "dpo":
        yield say("--head = {head}, dpo trains answers, which an encoder does not write; omit it", head=head)


def unheeded(config: Config, command: str) -> list[str]:
    """Flags that change nothing beside the others, each in a sentence. Contradictions are refused; these are told."""
    data, train, how = config.data, config.train, config.generate
    learns_pairs = train.is_finetune or data.objective in ("pairs", PREFERENCES)
    trains, writes = command in ("train", "dpo"), command in ("generate", "evaluate", "chat")
    idle: dict[str, tuple[bool, str]] = {
        **dict.fromkeys(("min_chars", "max_chars", "min_letters", "max_repetition"), (not config.cleaning.clean, "--clean=True")),
        **dict.fromkeys(("noise_density", "mean_noise_span_length"), (trains and (learns_pairs or data.objective in HEADS), "--objective=span")),
        **dict.fromkeys(("top_k", "top_p"), (writes and how.temperature == 0.0, "--temperature=0.7")),
        **({"mean_noise_span_length": (trains, "--objective=span")} if data.objective == "denoise" else {}),
        **dict.fromkeys(("metrics", "num_answers"), (trains and not writes_answers(config), "--eval_generate_rows=64")),
        "epochs": (trains and train.max_steps != AUTO, "--max_steps=auto"),
        "bf16_rounding": (trains and config.memory.mixed_precision == "no", "--mixed_precision=auto"),
    }  # fmt: skip
    told = _idle(config, {name: needed for name, (is_idle, needed) in idle.items() if is_idle})
    told += idle_search(config) if trains else []  # elsewhere the model may say that it answers by one
    if command == "chat" and config.origin("split_prompts") == "flag":
        text = "--split_prompts = {tokens}, has no effect in chat, which answers whole prompts"
        told.append(say(text, tokens=how.split_prompts))
    if trains and AUTO not in (train.warmup_steps, train.max_steps) and int(train.warmup_steps) > int(train.max_steps):
        text = "--warmup_steps = {warmup}, exceeds the {steps} of this run: the learning rate rises until the end"
        told.append(say(text, warmup=train.warmup_steps, steps=counted(int(train.max_steps), "step")))
    return told


def idle_search(config: Config) -> list[str]:
    """Flags of a beam search, where there is none."""
    searching = ("length_penalty", "early_stopping")
    return _idle(config, dict.fromkeys(searching, "--num_beams=4")) if config.generate.num_beams == 1 else []


def _idle(config: Config, needed: Mapping[str, str]) -> list[str]:
    text, values = "--{name} = {value}, has no effect here without {needed}", config.as_dict()
    typed = (name for name in needed if config.origin(name) == "flag")
    return [say(text, name=name, value=values[name], needed=needed[name]) for name in typed]


def _not_default(config: Config, names: Iterable[str]) -> list[tuple[str, Any]]:
    """Those of these settings that have another value than their default, with it."""
    values, defaults = config.as_dict(), type(config)().as_dict()
    return [(name, values[name]) for name in names if values[name] != defaults[name]]


def _of_training(config: Config) -> Iterator[str]:
    model, train, lora, objective = config.model, config.train, config.lora, config.data.objective
    if max(model.pad_token_id, model.eos_token_id, model.start_token_id) >= model.vocab_size:
        yield say(
            "--vocab_size = {vocab_size}, must be larger than pad_token_id, eos_token_id and decoder_start_token_id",
            vocab_size=model.vocab_size,
        )
    if model.relative_attention_max_distance <= model.relative_attention_num_buckets // 2:
        yield (
            say(
                "--relative_attention_max_distance = {relative_attention_max_distance}, must be more than half of "
                "relative_attention_num_buckets ({relative_attention_num_buckets})",
                relative_attention_max_distance=model.relative_attention_max_distance,
                relative_attention_num_buckets=model.relative_attention_num_buckets,
            )
        )
    if model.bias_in_every_layer and not model.scale_decoder_outputs:
        yield say(
            "--scale_decoder_outputs = False, UMT5 (bias_in_every_layer) is always scaled elsewhere; leave it True"
        )
    rows, batch_size = train.effective_batch_size, train.batch_size_per_gpu
    accumulation = train.gradient_accumulation_steps
    if AUTO not in (rows, batch_size) and batch_size > rows:  # type: ignore[operator]
        yield say(
            "--batch_size_per_gpu = {batch_size}, is more than effective_batch_size ({rows}); lower it or use auto",
            batch_size=batch_size,
            rows=rows,
        )
    if AUTO not in (rows, batch_size, accumulation) and rows % (batch_size * accumulation):  # type: ignore[operator]
        yield (
            say(
                "--effective_batch_size = {rows}, is not a multiple of batch_size_per_gpu x "
                "gradient_accumulation_steps ({batch_size} x {accumulation}); set one of the three to auto",
                rows=rows,
                batch_size=batch_size,
                accumulation=accumulation,
            )
        )
    is_typed = config.origin("text_column") == "flag"  # a file may be what a run has saved
    if train.is_finetune and objective not in (AUTO, "pairs", PREFERENCES, *HEADS):
        yield say(
            "--objective = {objective}, finetuning trains on pairs; use pairs or omit is_finetune", objective=objective
        )
    elif is_typed and objective not in HEADS and (train.is_finetune or objective in ("pairs", PREFERENCES)):
        what = say("preferences") if objective == PREFERENCES else say("pairs")
        yield say(
            "--text_column = {text_column}, has no effect on {what}; omit it",
            text_column=config.data.text_column,
            what=what,
        )
    if not lora.lora_rank:
        for name, value in _not_default(config, [member.name for member in dataclasses.fields(lora)]):
            yield say("--{name} = {value}, has no effect without adapters; set --lora_rank=8", name=name, value=value)
    best, metrics = train.metric_for_best.rpartition("/")[2], config.metrics.metrics  # of a set: news/loss
    if objective in HEADS:
        of_head = {AUTO: (*CLASS_SCORES, *NUMBER_SCORES), REGRESSION: NUMBER_SCORES}.get(model.labels, CLASS_SCORES)
        if best not in ("loss", *of_head):
            yield say(
                "--metric_for_best = {metric_for_best}, {problem}",
                metric_for_best=train.metric_for_best,
                problem=not_known(best, ("loss", *of_head)),
            )
    elif best not in ("loss", *SCORES) and not RANKED.fullmatch(best) and not writes_answers(config):
        known = not_known(train.metric_for_best, ("loss", *SCORES, *RANKED_SHOWN))
        yield say(
            "--metric_for_best = {metric_for_best}, {known}; a metric of your own needs --eval_generate_rows=64",
            metric_for_best=train.metric_for_best,
            known=known,
        )
    elif best != "loss" and not writes_answers(config):
        yield say(
            "--metric_for_best = {best}, is a score of answers, and none are written; set --eval_generate_rows=64",
            best=best,
        )
    elif (best in SCORES and metrics != AUTO and best not in score_words(metrics)) or (
        RANKED.fullmatch(best) and best not in ranked_words(config)
    ):
        yield say(
            "--metric_for_best = {best}, is not among --metrics ({metrics}); add it there", best=best, metrics=metrics
        )
    asked, kept = train.average_checkpoints, train.keep_latest_n_ckp
    if asked == 1:
        yield say("--average_checkpoints = 1, averages nothing; use 2 or more, or 0")
    elif asked > kept:
        yield say(
            "--average_checkpoints = {asked}, are more than are kept ({kept}); --keep_latest_n_ckp={asked} keeps them",
            asked=asked,
            kept=kept,
        )
    if train.is_keep_training == AUTO and config.run.run_name == AUTO:
        yield say("--is_keep_training = auto, needs a run_name, so that the run can be found again; give it one")
    if os.path.abspath(config.run.log_dir) == os.path.abspath(config.run.output_dir):
        told = "--log_dir = {folder}, is the output_dir too, where the run has a folder of the same name; give it another one"
        yield say(told, folder=config.run.log_dir)
    mirror = config.run.checkpoint_mirror
    if mirror is not None and "://" not in mirror:
        yield say(
            "--checkpoint_mirror = {mirror}, is not an address; write s3://bucket/folder, gs://.. or file:///..",
            mirror=mirror,
        )


def _preferences(config: Config) -> Iterator[str]:
    """Settings that preference training does not heed."""
    if config.data.objective != PREFERENCES:
        return
    chosen = config.preference.preference_loss
    unheeded = {
        "is_finetune": (True, ""), "label_smoothing": (True, say("; see preference_label_smoothing")), "z_loss": (True, ""),
        "beta": (chosen == "orpo", say("; see orpo_lambda")), "preference_label_smoothing": (chosen != "sigmoid", ""),
        "orpo_lambda": (chosen != "orpo", say("; see beta")),
    }  # fmt: skip
    hints = {name: hint for name, (has_no_effect, hint) in unheeded.items() if has_no_effect}
    for name, value in _not_default(config, hints):
        yield say(
            "--{name} = {value}, has no effect with dpo and preference_loss {chosen}; omit it{hints}",
            name=name,
            value=value,
            chosen=chosen,
            hints=hints[name],
        )


def _of_heads(config: Config) -> Iterator[str]:
    """Settings of heads that contradict each other."""
    model, train, head = config.model, config.train, config.model.head
    if head == TEXT:
        if not model.num_decoder_layers:
            yield say(
                "--num_decoder_layers = 0, an encoder writes no text; name a head: --head=sequence, token or none"
            )
        idle, hint = ["labels", "pooling", "head_kind", "class_weights"], say("name --head=sequence or token")
    else:
        idle = ["z_loss", "eval_generate_rows", "max_target_len", "num_beams", "answers", "num_answers"]
        hint = say("omit it")
    if head == TOKEN:
        idle.append("pooling")
    for name, value in _not_default(config, idle):
        yield say(
            "--{name} = {value}, has no effect with --head={head}; {hint}", name=name, value=value, head=head, hint=hint
        )
    if head in (TOKEN, "none") and model.num_decoder_layers:
        yield say(
            "--num_decoder_layers = {num_decoder_layers}, --head={head} reads the encoder; omit it",
            num_decoder_layers=model.num_decoder_layers,
            head=head,
        )
    if head == SEQUENCE and model.num_decoder_layers:  # transformers has one such class, T5ForSequenceClassification
        for name, fixed in (("pooling", "last"), ("head_kind", "dense")):
            if (value := getattr(model, name)) not in (AUTO, fixed):
                yield say(
                    "--{name} = {value}, a head over a decoder is {fixed}; omit it, or num_decoder_layers",
                    name=name,
                    value=value,
                    fixed=fixed,
                )
    if model.labels == REGRESSION and train.class_weights is not None:
        yield say(
            "--class_weights = {class_weights}, regression has no classes; omit it", class_weights=train.class_weights
        )
    elif train.class_weights not in (None, "balanced"):
        try:
            weights = [float(word) for word in str(train.class_weights).split(",")]
        except ValueError:
            weights = []
        if not weights or not all(0 <= weight < float("inf") for weight in weights) or not any(weights):
            yield say(
                "--class_weights = {class_weights}, is wrong; allowed: balanced, or numbers such as 1,2.5",
                class_weights=train.class_weights,
            )
    if model.labels == REGRESSION and train.label_smoothing:
        yield say(
            "--label_smoothing = {label_smoothing}, regression has no classes; omit it",
            label_smoothing=train.label_smoothing,
        )


def score_words(metrics: str) -> list[str]:
    """The scores that a value of `--metrics` names, in small letters, known or not; `rouge` means its four."""
    words = [word.strip().lower() for word in metrics.split(",") if word.strip()]
    return [name for word in words for name in (ROUGE if word == "rouge" else (word,))]


def ranked_words(config: Config) -> list[str]:
    """The scores of several answers that evaluations form: those of `--metrics`; auto: at 5, at 10 and at `--num_answers`."""
    if config.metrics.metrics != AUTO:
        return [name for name in dict.fromkeys(score_words(config.metrics.metrics)) if RANKED.fullmatch(name)]
    depths = sorted({depth for depth in (5, 10, config.answer.num_answers) if 1 < depth <= config.answer.num_answers})
    return [*(f"{name}@{depth}" for name in ("recall", "ndcg") for depth in depths), "mrr"] if depths else []


def ranking_problems(config: Config) -> Iterator[str]:
    """Find what `--num_answers` asks for and the beams, or `--metrics` and the answers, do not give."""
    answers, beams = config.answer.num_answers, config.generate.num_beams
    if answers > beams:
        yield say(
            "--num_answers = {answers}, needs as many beams and there are {beams}; give --num_beams={answers}",
            answers=answers,
            beams=beams,
        )
    deepest = max((int(RANKED.fullmatch(name)[1] or 1) for name in ranked_words(config)), default=1)  # type: ignore[index]
    if deepest > answers:
        yield (
            say(
                "--metrics = {metrics}, looks at {deepest} answers per prompt and there are {answers}; give "
                "--num_answers={deepest} --num_beams={beams}",
                metrics=config.metrics.metrics,
                deepest=deepest,
                answers=answers,
                beams=max(beams, deepest),
            )
        )


def writes_answers(config: Config) -> bool:
    """Whether evaluations within a run write answers."""
    return config.metrics.eval_generate_rows not in (AUTO, 0)


def answer_problems(config: Config) -> Iterator[str]:
    """Find settings of answers that contradict each other."""
    how = config.generate
    several = config.answer.num_answers
    if how.num_beams > 1 and how.temperature > 0.0:
        yield say(
            "--num_beams = {num_beams}, is a search and draws no tokens; leave temperature 0, or num_beams 1",
            num_beams=how.num_beams,
        )
    if how.split_prompts and several > 1:
        yield say(
            "--split_prompts = {split_prompts}, joins one answer of each part, and num_answers is {several}; omit one",
            split_prompts=how.split_prompts,
            several=several,
        )
    if how.split_prompts >= config.data.max_seq_len:
        yield say(
            "--split_prompts = {split_prompts}, is not less than max_seq_len ({max_seq_len}); lower it",
            split_prompts=how.split_prompts,
            max_seq_len=config.data.max_seq_len,
        )
    if how.min_new_tokens > how.max_new_tokens:
        yield say(
            "--min_new_tokens = {min_new_tokens}, is more than max_new_tokens ({max_new_tokens}); lower it",
            min_new_tokens=how.min_new_tokens,
            max_new_tokens=how.max_new_tokens,
        )


def _of_memory(config: Config) -> Iterator[str]:
    memory, train = config.memory, config.train
    recomputes_none = memory.memory_mode == "standard" or memory.gradient_checkpointing is False
    if memory.offload_boundaries is True and recomputes_none:
        yield say(
            "--offload_boundaries = True, moves the inputs of recomputed blocks, and memory_mode=standard or "
            "gradient_checkpointing=False recompute none; omit one"
        )
    if memory.shard_weights is not True:
        return
    if config.lora.lora_rank or config.data.objective == PREFERENCES:
        yield say(
            "--shard_weights = True, is for training all weights on texts and pairs; omit it with adapters "
            "(--lora_base=int8 or int4 makes their base smaller) and with preferences"
        )
    if train.max_grad_norm > 0:
        yield say(
            "--max_grad_norm = {max_grad_norm}, needs all gradients at once, which shard_weights=True never has; "
            "omit one",
            max_grad_norm=train.max_grad_norm,
        )
    if writes_answers(config):
        yield (
            say(
                "--eval_generate_rows = {eval_generate_rows}, is written by each process for itself, which none can "
                "with shard_weights=True; omit one, and score the finished model with evaluate",
                eval_generate_rows=config.metrics.eval_generate_rows,
            )
        )
    if memory.mixed_precision == "fp16":
        yield say(
            "--mixed_precision = fp16, does not work with shard_weights=True: whether scaled gradients overflow is not decided across processes; omit one"
        )
