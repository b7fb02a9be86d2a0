"""Contradictions between settings that can be seen before data are read.

What a single setting needs stands beside it (`needs` in `settings/declared.py`); what is about several is a line of
`RULES`. All that is found is refused together.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Iterable, Mapping
from string import Formatter
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, NamedTuple

from settings.fields import AUTO, not_known
from settings.precedence import BY_USER
from settings.tasks import MODEL_HEADS, TASKS, command_of, is_pretraining, learns_labels
from support.language import Message, say

if TYPE_CHECKING:
    from settings.declared import Config, MetricsConfig

TEXT = "text"  # The head of a T5 as it is: over the vocabulary.
REGRESSION = "regression"  # Where `labels` has this value, they are numbers.
# Heads over labels are called like the objectives that train them.
SEQUENCE = "sequence"
TOKEN = "token"
# Scores of answers; `rouge` in --metrics means the four of that name, and sacreBLEU computes the second group.
ROUGE = ("rouge_1", "rouge_2", "rouge_l", "rouge_lsum")
GEOMETRIC_MEAN = "geometric_mean"
SACREBLEU = ("bleu", "char_bleu", "chrf", "chrf++", GEOMETRIC_MEAN)
SCORES = ("exact_match", "f1", "bleu", "chrf", "chrf++", GEOMETRIC_MEAN, *ROUGE, "char_bleu", "identical")
# Scores of several answers, best first.
RANKED = re.compile(r"mrr|(?:recall|ndcg)@([1-9]\d{0,2})")
RANKED_SHOWN = ("recall@K", "ndcg@K", "mrr")
# Scores of predicted labels, and of predicted numbers.
CLASS_SCORES = ("accuracy", "macro_f1", "matthews")
NUMBER_SCORES = ("spearman", "pearson", "mse")
# Scores of vectors: of how alike two texts are, and of what is found among the texts of all rows.
EMBEDDING_SCORES = ("spearman", "pearson", "recall@1", "recall@10", "mrr@10", "ndcg@10")
FLAG = "flag"


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
        "--head = none, has no loss to train; use sequence, token or embedding",
    ),
    Rule(
        lambda s: not MODEL_HEADS[s.head].writes_text and s.objective not in (AUTO, MODEL_HEADS[s.head].task),
        "--objective = {objective}, --head={head} has an objective of its own; omit it",
    ),
    Rule(
        lambda s: s.objective in TASKS and TASKS[s.objective].head not in (TEXT, s.head),
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
        "--num_decoder_layers = 0, an encoder writes no text; name a head: --head=sequence, token, embedding or none",
    ),
    Rule(
        lambda s: s.num_decoder_layers and not MODEL_HEADS[s.head].takes_decoder,
        "--num_decoder_layers = {num_decoder_layers}, --head={head} reads the encoder; omit it",
    ),
    # transformers has one head over a decoder, T5ForSequenceClassification.
    Rule(
        lambda s: _is_other_over_decoder(s, "pooling"),
        "--pooling = {pooling}, a head over a decoder is last; omit it, or num_decoder_layers",
    ),
    Rule(
        lambda s: _is_other_over_decoder(s, "head_kind"),
        "--head_kind = {head_kind}, a head over a decoder is dense; omit it, or num_decoder_layers",
    ),
    Rule(
        lambda s: are_numbers(s.labels) and s.class_weights is not None,
        "--class_weights = {class_weights}, regression has no classes; omit it",
    ),
    Rule(
        lambda s: not _are_weights(s.class_weights),
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
        lambda s: not _are_sizes(s),
        "--matryoshka_sizes = {matryoshka_sizes}, is wrong; allowed: numbers such as 256,128,64, up to the dimension "
        "of the embeddings",
    ),
    Rule(
        lambda s: (
            (s.embedding_loss == "distillation") > (s.teacher_vectors is not None or s.command not in ("train", "plan"))
        ),
        "--embedding_loss = distillation, needs teacher embeddings; give --teacher_vectors",
    ),
    Rule(
        lambda s: s.teacher_vectors is not None and s.embedding_loss not in (AUTO, "distillation"),
        "--embedding_loss = {embedding_loss}, does not use teacher_vectors; omit one of the two",
    ),
    Rule(
        lambda s: s.teacher_vectors is not None and s.skip_bad_rows,
        "--skip_bad_rows = true, would give the rows after a skipped one the embeddings of others (teacher_vectors); "
        "omit one of the two",
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
    best = config.train.metric_for_best
    if config.model.gives_vectors:
        problem = _head_score_problem(best, EMBEDDING_SCORES)
    elif learns_labels(config.data.objective):
        problem = _head_score_problem(best, label_scores(config.model.labels))
    else:
        problem = _answer_score_problem(best, config.metrics, config.answer.num_answers)
    return [*broken(RULES, config, command), *filter(None, [problem])]


def broken(rules: Iterable[Rule], config: Config, command: str = "") -> list[Message]:
    """The messages of the rules that these settings do not keep."""
    settings = view(config.as_dict(), config.origins, command)
    messages = list[Message]()
    for rule in rules:
        if rule.when(settings):
            names = [name for _, name, _, _ in Formatter().parse(rule.message) if name]
            messages.append(say(rule.message, **{name: getattr(settings, name) for name in names}))
    return messages


def view(values: Mapping[str, Any], origins: Iterable[tuple[str, str]], command: str) -> SimpleNamespace:
    """The values of all settings by name, with `command`, and `origin` and `is_set`, functions of a setting's name."""
    origin = dict(origins).get
    return SimpleNamespace(command=command, origin=origin, is_set=lambda name: origin(name) in BY_USER, **values)


def are_numbers(labels: str) -> bool:
    """Whether the labels of a head are numbers, not classes."""
    return label_scores(labels) == NUMBER_SCORES


def label_scores(labels: str) -> tuple[str, ...]:
    """The scores of a head whose labels are these; of both kinds while they are not known."""
    return {AUTO: (*CLASS_SCORES, *NUMBER_SCORES), REGRESSION: NUMBER_SCORES}.get(labels, CLASS_SCORES)


def _is_other_over_decoder(s: Any, name: str) -> bool:
    """Whether a setting of a head is not what it has to be over a decoder."""
    fixed = MODEL_HEADS[s.head].over_decoder
    return s.num_decoder_layers > 0 and name in fixed and getattr(s, name) not in (AUTO, fixed[name])


def _are_sizes(s: Any) -> bool:
    """Whether `matryoshka_sizes` are widths that the vectors have."""
    if s.matryoshka_sizes is None:
        return True
    words = s.matryoshka_sizes.split(",")
    return all(word.strip().isdecimal() and 0 < int(word) <= (s.embedding_size or s.d_model) for word in words)


def _are_weights(text: str | None) -> bool:
    if text in (None, "balanced"):
        return True
    try:
        weights = [float(word) for word in str(text).split(",")]
    except ValueError:
        return False
    return all(0 <= weight < math.inf for weight in weights) and any(weights)


def _head_score_problem(best: str, scores: tuple[str, ...]) -> str:
    """What is wrong with a `metric_for_best` of a head with these scores; empty: nothing."""
    allowed = ("loss", *scores)
    figure = _without_set(best)
    if figure in allowed:
        return ""
    problem = not_known(figure, allowed)
    return say("--metric_for_best = {metric_for_best}, {problem}", metric_for_best=best, problem=problem)


def _answer_score_problem(best: str, metrics: MetricsConfig, num_answers: int) -> str:
    """What is wrong with a `metric_for_best` of a model that writes text; empty: nothing, or it is one of the user's
    own.
    """
    figure = _without_set(best)
    is_score = figure in SCORES or RANKED.fullmatch(figure) is not None
    formed = (*score_words(metrics.metrics), *ranked_words(metrics.metrics, num_answers))
    if figure == "loss" or (writes_answers(metrics) and (not is_score or figure in formed)):
        return ""
    if writes_answers(metrics):
        return say(
            "--metric_for_best = {best}, is not among --metrics ({metrics}); add it there",
            best=figure,
            metrics=metrics.metrics,
        )
    if is_score:
        return say(
            "--metric_for_best = {best}, is a score of answers, and none are written; set --eval_generate_rows=64",
            best=figure,
        )
    return say(
        "--metric_for_best = {metric_for_best}, {known}; a metric of your own needs --eval_generate_rows=64",
        metric_for_best=best,
        known=not_known(best, ("loss", *SCORES, *RANKED_SHOWN)),
    )


def _without_set(best: str) -> str:
    """The figure of a `metric_for_best`, which may be of one of several sets: news/loss."""
    return best.rpartition("/")[2]


def score_words(metrics: str) -> list[str]:
    """The scores that a value of `--metrics` names, in small letters, known or not; `rouge` means its four, auto
    all.
    """
    groups = {"rouge": ROUGE, AUTO: SCORES}
    words = [word.strip().lower() for word in metrics.split(",") if word.strip()]
    return [name for word in words for name in groups.get(word, (word,))]


def ranked_words(metrics: str, num_answers: int) -> list[str]:
    """The scores of several answers that evaluations form: those of `--metrics`; auto: at 5, at 10 and at
    `--num_answers`.
    """
    if metrics != AUTO:
        return list(dict.fromkeys(filter(RANKED.fullmatch, score_words(metrics))))
    depths = [depth for depth in sorted({5, 10, num_answers}) if 1 < depth <= num_answers]
    names = [f"{name}@{depth}" for name in ("recall", "ndcg") for depth in depths]
    return [*names, "mrr"] if depths else []


def ranking_problems(metrics: str, num_answers: int, num_beams: int) -> list[str]:
    """Find what `--num_answers` asks for and the beams, or `--metrics` and the answers, do not give."""
    problems = list[str]()
    if num_answers > num_beams:
        text = "--num_answers = {answers}, needs as many beams and there are {beams}; give --num_beams={answers}"
        problems.append(say(text, answers=num_answers, beams=num_beams))
    depths = [int(name.partition("@")[2] or 1) for name in ranked_words(metrics, num_answers)]
    deepest = max(depths, default=1)
    if deepest > num_answers:
        problems.append(
            say(
                "--metrics = {metrics}, looks at {deepest} answers per prompt and there are {answers}; give "
                "--num_answers={deepest} --num_beams={beams}",
                metrics=metrics,
                deepest=deepest,
                answers=num_answers,
                beams=max(num_beams, deepest),
            )
        )
    return problems


def writes_answers(metrics: MetricsConfig) -> bool:
    """Whether evaluations within a run write answers."""
    return metrics.eval_generate_rows not in (AUTO, 0)
