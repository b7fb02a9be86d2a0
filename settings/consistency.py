"""Contradictions between settings that can be seen before data are read.

What a single setting needs stands beside it (`needs` in `settings/declared.py`); what is about several is a line of
`RULES`. All that is found is refused together.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterable, Iterator
from string import Formatter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from language import Message, say
from settings.fields import AUTO, not_known
from settings.tasks import MODEL_HEADS, TASKS, command_of, is_pretraining, learns_labels

if TYPE_CHECKING:
    from settings.declared import Config, MetricsConfig

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
FLAG = "flag"  # origin of a value


class Rule(NamedTuple):
    """A contradiction.

    Args:
        when: whether there is one, by all settings as `view` shows them.
        message: a setting's name in braces stands for its value.
    """

    when: Callable[[Any], Any]
    message: str


# How answers are written: checked again where a model's folder says some of it.
ANSWER_RULES = (
    Rule(
        lambda s: s.num_beams > 1 and s.temperature > 0.0,
        "--num_beams = {num_beams}, is a search and draws no tokens; leave temperature 0, or num_beams 1",
    ),
    Rule(
        lambda s: s.split_prompts and s.num_answers > 1,
        "--split_prompts = {split_prompts}, joins one answer of each part, and num_answers is {num_answers}; omit one",
    ),
    Rule(
        lambda s: s.split_prompts >= s.max_seq_len,
        "--split_prompts = {split_prompts}, is not less than max_seq_len ({max_seq_len}); lower it",
    ),
    Rule(
        lambda s: s.min_new_tokens > s.max_new_tokens,
        "--min_new_tokens = {min_new_tokens}, is more than max_new_tokens ({max_new_tokens}); lower it",
    ),
)
RULES = (
    Rule(
        lambda s: s.command == "train" != command_of(s.objective),
        "--objective = {objective}, belongs to the command dpo; use dpo instead of train",
    ),
    Rule(
        lambda s: s.command == "dpo" != command_of(s.objective) and s.objective in TASKS,
        "--objective = {objective}, dpo trains on preferences only; omit it",
    ),
    Rule(
        lambda s: s.command == "dpo" and s.is_finetune,
        "--is_finetune = True, has no effect with dpo, which always starts from a trained model; omit it",
    ),
    Rule(
        lambda s: s.command == "dpo" and not MODEL_HEADS[s.head].writes_text,
        "--head = {head}, dpo trains answers, which an encoder does not write; omit it",
    ),
    Rule(
        lambda s: s.command in ("train", "plan") and MODEL_HEADS[s.head].task is None,
        "--head = none, has no loss to train; use sequence or token",
    ),
    Rule(
        lambda s: MODEL_HEADS[s.head].has_labels and s.objective in TASKS and TASKS[s.objective].head != s.head,
        "--objective = {objective}, --head={head} trains on labels; omit it",
    ),
    Rule(
        lambda s: learns_labels(s.objective) and not MODEL_HEADS[s.head].has_labels,
        "--objective = {objective}, is what --head={objective} trains on; name that instead",
    ),
    Rule(
        lambda s: s.is_finetune and is_pretraining(s.objective),
        "--objective = {objective}, finetuning trains on pairs; use pairs or omit is_finetune",
    ),
    Rule(
        lambda s: max(s.pad_token_id, s.eos_token_id, s.decoder_start_token_id or 0) >= s.vocab_size,
        "--vocab_size = {vocab_size}, must be larger than pad_token_id, eos_token_id and decoder_start_token_id",
    ),
    Rule(
        lambda s: s.relative_attention_max_distance <= s.relative_attention_num_buckets // 2,
        "--relative_attention_max_distance = {relative_attention_max_distance}, must be more than half of "
        "relative_attention_num_buckets ({relative_attention_num_buckets})",
    ),
    Rule(
        lambda s: s.bias_in_every_layer and not s.scale_decoder_outputs,
        "--scale_decoder_outputs = False, UMT5 (bias_in_every_layer) is always scaled elsewhere; leave it True",
    ),
    Rule(
        lambda s: MODEL_HEADS[s.head].needs_decoder and not s.num_decoder_layers,
        "--num_decoder_layers = 0, an encoder writes no text; name a head: --head=sequence, token or none",
    ),
    Rule(
        lambda s: s.num_decoder_layers and not MODEL_HEADS[s.head].takes_decoder,
        "--num_decoder_layers = {num_decoder_layers}, --head={head} reads the encoder; omit it",
    ),
    # transformers has one head over a decoder, T5ForSequenceClassification.
    Rule(
        lambda s: _has_label_decoder(s) and s.pooling not in (AUTO, "last"),
        "--pooling = {pooling}, a head over a decoder is last; omit it, or num_decoder_layers",
    ),
    Rule(
        lambda s: _has_label_decoder(s) and s.head_kind not in (AUTO, "dense"),
        "--head_kind = {head_kind}, a head over a decoder is dense; omit it, or num_decoder_layers",
    ),
    Rule(
        lambda s: are_numbers(s.labels) and s.class_weights is not None,
        "--class_weights = {class_weights}, regression has no classes; omit it",
    ),
    Rule(
        lambda s: s.class_weights not in (None, "balanced") and not _are_weights(s.class_weights),
        "--class_weights = {class_weights}, is wrong; allowed: balanced, or numbers such as 1,2.5",
    ),
    Rule(
        lambda s: are_numbers(s.labels) and s.label_smoothing,
        "--label_smoothing = {label_smoothing}, regression has no classes; omit it",
    ),
    Rule(
        lambda s: (
            AUTO not in (s.effective_batch_size, s.batch_size_per_gpu) and s.batch_size_per_gpu > s.effective_batch_size
        ),
        "--batch_size_per_gpu = {batch_size_per_gpu}, is more than effective_batch_size ({effective_batch_size}); "
        "lower it or use auto",
    ),
    Rule(
        lambda s: (
            AUTO not in (s.effective_batch_size, s.batch_size_per_gpu, s.gradient_accumulation_steps)
            and s.effective_batch_size % (s.batch_size_per_gpu * s.gradient_accumulation_steps)
        ),
        "--effective_batch_size = {effective_batch_size}, is not a multiple of batch_size_per_gpu x "
        "gradient_accumulation_steps ({batch_size_per_gpu} x {gradient_accumulation_steps}); set one of the three to "
        "auto",
    ),
    Rule(
        lambda s: (
            AUTO not in (s.warmup_steps, s.max_steps)
            and s.warmup_steps > s.max_steps
            and s.origin("warmup_steps") == FLAG
        ),
        "--warmup_steps = {warmup_steps}, is more than max_steps ({max_steps}): the learning rate would rise until the "
        "end; lower it",
    ),
    Rule(
        lambda s: s.average_checkpoints == 1,
        "--average_checkpoints = 1, averages nothing; use 2 or more, or 0",
    ),
    Rule(
        lambda s: s.average_checkpoints > s.keep_latest_n_ckp,
        "--average_checkpoints = {average_checkpoints}, are more than are kept ({keep_latest_n_ckp}); "
        "--keep_latest_n_ckp={average_checkpoints} keeps them",
    ),
    Rule(
        lambda s: s.is_keep_training == AUTO and s.run_name == AUTO,
        "--is_keep_training = auto, needs a run_name, so that the run can be found again; give it one",
    ),
    Rule(
        lambda s: os.path.abspath(s.log_dir) == os.path.abspath(s.output_dir),
        "--log_dir = {log_dir}, is the output_dir too, where the run has a folder of the same name; give it another "
        "one",
    ),
    *ANSWER_RULES,
)


def check(config: Config, command: str = "") -> list[str]:
    """Find all contradictions, as `UserError` takes them.

    Args:
        command: that the settings are for; empty where it took them before.
    """
    return [*broken(RULES, config, command), *_metric_problems(config)]


def broken(rules: Iterable[Rule], config: Config, command: str = "") -> list[Message]:
    """The messages of the rules that these settings do not keep."""
    settings = view(config, command)
    return [
        say(
            rule.message, **{name: getattr(settings, name) for _, name, _, _ in Formatter().parse(rule.message) if name}
        )
        for rule in rules
        if rule.when(settings)
    ]


def view(config: Config, command: str) -> SimpleNamespace:
    """The values of all settings by name, with `command` and `origin`, a function of a setting's name."""
    return SimpleNamespace(command=command, origin=config.origin, given=config.given, **config.as_dict())


def are_numbers(labels: str) -> bool:
    """Whether the labels of a head are numbers, not classes."""
    return labels == REGRESSION


def _has_label_decoder(s: Any) -> bool:
    head = MODEL_HEADS[s.head]
    return head.has_labels and head.takes_decoder and bool(s.num_decoder_layers)


def _are_weights(text: str) -> bool:
    try:
        weights = [float(word) for word in text.split(",")]
    except ValueError:
        return False
    return all(0 <= weight < float("inf") for weight in weights) and any(weights)


def _metric_problems(config: Config) -> Iterator[str]:
    named, metrics = config.train.metric_for_best, config.metrics.metrics
    best = named.rpartition("/")[2]  # of a set: news/loss
    if best == "loss":
        return
    if learns_labels(config.data.objective):
        of_labels = {AUTO: (*CLASS_SCORES, *NUMBER_SCORES), REGRESSION: NUMBER_SCORES}
        allowed = of_labels.get(config.model.labels, CLASS_SCORES)
        if best not in allowed:
            problem = not_known(best, ("loss", *allowed))
            yield say("--metric_for_best = {metric_for_best}, {problem}", metric_for_best=named, problem=problem)
        return
    is_ranked = RANKED.fullmatch(best) is not None
    if not writes_answers(config.metrics):
        if best in SCORES or is_ranked:
            yield say(
                "--metric_for_best = {best}, is a score of answers, and none are written; set --eval_generate_rows=64",
                best=best,
            )
        else:
            yield say(
                "--metric_for_best = {metric_for_best}, {known}; a metric of your own needs --eval_generate_rows=64",
                metric_for_best=named,
                known=not_known(named, ("loss", *SCORES, *RANKED_SHOWN)),
            )
    elif (best in SCORES and metrics != AUTO and best not in score_words(metrics)) or (
        is_ranked and best not in ranked_words(config)
    ):
        yield say(
            "--metric_for_best = {best}, is not among --metrics ({metrics}); add it there", best=best, metrics=metrics
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


def writes_answers(metrics: MetricsConfig) -> bool:
    """Whether evaluations within a run write answers."""
    return metrics.eval_generate_rows not in (AUTO, 0)
