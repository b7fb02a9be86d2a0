"""Every key of the JSON files in a published T5 folder, and what is done with it here: used, without effect, or
refused.

One declaration: readers check a file against it (`check_keys`), and `python docs/make_published_keys.py` writes its
table into the documentation. Keys are those that transformers 4 and 5 write for T5, mT5, UMT5, ByT5 and CodeT5.

Source: transformers 5.23 and 4.57: configuration_utils, generation/configuration_utils, models t5, mt5, umt5, byt5,
roberta, tokenization_utils_base; config files of the published checkpoints; sentence-transformers 6.2 and 3.0.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from settings.tasks import MODEL_HEADS
from support.language import say

USED = "used"
IDLE = "no effect here"
REFUSED = "refused"
CONFIG = "config.json"
GENERATION = "generation_config.json"
TOKENIZER = "tokenizer_config.json"
SPECIAL = "special_tokens_map.json"
# Files of sentence-transformers, see `model.formats.sentence_transformers`.
VECTOR_MODEL = "config_sentence_transformers.json"
VECTOR_TEXTS = "sentence_bert_config.json"
POOLING = f"1_Pooling/{CONFIG}"
DENSE = f"2_Dense/{CONFIG}"
HEADS_OF_ROWS = [name for name, head in MODEL_HEADS.items() if head.has_labels and head.pools_rows]
_SHOWN_LENGTH = 60  # A message shows so many characters of a value.


def _draws(content: Mapping[str, Any]) -> bool:
    return content.get("do_sample") is True


def _searches(content: Mapping[str, Any]) -> bool:
    return (content.get("num_beams") or 1) > 1


def _writes_text(content: Mapping[str, Any]) -> bool:
    return any(str(name).endswith("ForConditionalGeneration") for name in content.get("architectures") or [])


def _labels_texts(content: Mapping[str, Any]) -> bool:
    is_published = any(str(name).endswith("ForSequenceClassification") for name in content.get("architectures") or [])
    return is_published or content.get("head") in HEADS_OF_ROWS


class Key(NamedTuple):
    """What is done with a key.

    Args:
        kind: USED, IDLE or REFUSED. does: what it says, and what becomes of it. allowed: values of a refused key that
            ask for nothing; null always does. counts: whether the key has an effect at all in this file.
    """

    kind: str
    does: str
    allowed: tuple[Any, ...] = ()
    counts: Callable[[Mapping[str, Any]], bool] = bool


def _keys(*rows: tuple[str, Key]) -> dict[str, Key]:
    return {name: key for names, key in rows for name in names.split()}


_REPORTS = Key(IDLE, "what a call gives back in Python")
_IDS = Key(USED, "id of that token; the tokenizer must have the same")
# config.json may hold these too, and counts where there is no generation_config.json.
GENERATION_KEYS = _keys(
    ("max_new_tokens", Key(USED, "longest answer; overrides max_length")),
    ("max_length", Key(USED, "the same with the start token counted")),
    ("min_new_tokens", Key(USED, "shortest answer; overrides min_length")),
    ("min_length", Key(USED, "the same with the start token counted")),
    ("num_beams length_penalty early_stopping", Key(USED, "beam search (not in serve, which has none)")),
    (
        "split_prompts",
        Key(USED, "longer prompts are answered in parts (not in serve and chat); no key of transformers"),
    ),
    ("num_answers", Key(USED, "how many answers of a beam search evaluate scores by rank; no key of transformers")),
    ("repetition_penalty no_repeat_ngram_size", Key(USED, "penalises or forbids tokens of the answer so far")),
    ("do_sample", Key(USED, "sampling, with temperature 1, top_k 50 and top_p 1 unless given")),
    ("temperature top_k top_p", Key(USED, "if do_sample is true; otherwise no effect, as in transformers")),
    ("eos_token_id", Key(USED, "must be the model's own end token; several are refused")),
    ("decoder_start_token_id", Key(USED, "must be that of config.json")),
    ("pad_token_id", Key(IDLE, "answers are not padded")),
    ("bos_token_id", Key(IDLE, "T5 starts with decoder_start_token_id")),
    ("min_p", Key(REFUSED, "sampling from likely tokens only", (0.0,), _draws)),
    ("top_h", Key(REFUSED, "entropy sampling", (), _draws)),
    ("typical_p", Key(REFUSED, "typical sampling", (1.0,), _draws)),
    ("epsilon_cutoff eta_cutoff", Key(REFUSED, "sampling above a cut-off", (0.0,), _draws)),
    ("renormalize_logits", Key(REFUSED, "renormalised scores of a search", (False,), _searches)),
    ("bad_words_ids force_words_ids", Key(REFUSED, "words that answers must not or must hold", ([],))),
    ("constraints", Key(REFUSED, "constraints on answers", ([],))),
    ("suppress_tokens begin_suppress_tokens", Key(REFUSED, "tokens that answers must not hold", ([],))),
    ("sequence_bias", Key(REFUSED, "biased scores of sequences", ([], {}))),
    ("forced_bos_token_id forced_eos_token_id", Key(REFUSED, "a forced first or last token")),
    ("force_bos_token_to_be_generated", Key(REFUSED, "a forced first token", (False,))),
    ("encoder_no_repeat_ngram_size", Key(REFUSED, "n-grams of the prompt forbidden in the answer", (0,))),
    ("encoder_repetition_penalty", Key(REFUSED, "tokens of the prompt preferred", (1.0,))),
    ("exponential_decay_length_penalty", Key(REFUSED, "longer answers penalised")),
    ("diversity_penalty", Key(REFUSED, "group beam search", (0.0,))),
    ("num_beam_groups", Key(REFUSED, "group beam search", (1,))),
    ("penalty_alpha", Key(REFUSED, "contrastive search", (0.0,))),
    ("dola_layers", Key(REFUSED, "contrastive decoding between layers")),
    ("guidance_scale", Key(REFUSED, "classifier-free guidance", (1, 1.0))),
    ("token_healing", Key(REFUSED, "re-tokenizing the end of the prompt", (False,))),
    ("watermarking_config", Key(REFUSED, "a watermark")),
    ("stop_strings", Key(REFUSED, "stop strings", ([],))),
    ("max_time", Key(REFUSED, "a time limit for answers")),
    ("use_mtp", Key(REFUSED, "multi-token prediction", (False,))),
    ("num_return_sequences", Key(IDLE, "one answer is written, the best or first of them")),
    ("remove_invalid_values", Key(IDLE, "outputs of an intact model are finite")),
    (
        "use_cache cache_implementation cache_config max_cache_len return_legacy_cache prefill_chunk_size low_memory "
        "disable_compile compile_config continuous_batching_config",
        Key(IDLE, "how it is computed; the answers are the same"),
    ),
    (
        "is_assistant num_assistant_tokens num_assistant_tokens_schedule assistant_confidence_threshold "
        "assistant_early_exit assistant_lookbehind assistant_ensemble_weight target_lookbehind "
        "prompt_lookup_num_tokens max_matching_ngram_size speculation_type",
        Key(IDLE, "how it is computed; the answers are the same"),
    ),
    (
        "output_attentions output_hidden_states output_scores output_logits return_dict_in_generate",
        _REPORTS,
    ),
    ("transformers_version _from_model_config _commit_hash generation_kwargs", Key(IDLE, "where the file comes from")),
)
_ONLY_IN_GENERATION = ("pad_token_id", "eos_token_id", "bos_token_id", "decoder_start_token_id", "transformers_version")

CONFIG_KEYS = _keys(
    (
        "model_type architectures",
        Key(USED, "t5, mt5 or umt5, and the class: a T5, an encoder, or one with a head over labels"),
    ),
    ("vocab_size d_model d_kv d_ff num_layers num_decoder_layers num_heads", Key(USED, "the shape")),
    (
        "hidden_size head_dim num_hidden_layers num_attention_heads",
        Key(USED, "other names of d_model, d_kv, num_layers, num_heads"),
    ),
    ("relative_attention_num_buckets relative_attention_max_distance", Key(USED, "position bias")),
    (
        "feed_forward_proj dense_act_fn is_gated_act",
        Key(USED, "relu, gated-gelu (gelu_new) or gated-silu; others are refused"),
    ),
    ("layer_norm_epsilon initializer_factor", Key(USED, "")),
    ("dropout_rate", Key(IDLE, "chosen for each training run: --dropout_rate")),
    (
        "tie_word_embeddings",
        Key(
            USED,
            "whether the head is the embedding (from version 5 on, the tensors decide), and whether the output is "
            "scaled",
        ),
    ),
    ("scale_decoder_outputs", Key(USED, "output scaled by d_model^-0.5; if absent, tie_word_embeddings decides")),
    ("bias_in_every_layer", Key(IDLE, "follows from model_type")),
    ("transformers_version", Key(USED, "an mT5 with tied heads is scaled up to version 4, not from 5 on")),
    ("pad_token_id eos_token_id", _IDS),
    ("decoder_start_token_id", Key(USED, "first token of the decoder; if absent, padding")),
    ("is_encoder_decoder", Key(REFUSED, "an encoder that writes text", (True,), _writes_text)),
    ("is_decoder", Key(REFUSED, "a decoder without an encoder", (False,))),
    ("tie_encoder_decoder", Key(REFUSED, "one set of weights for encoder and decoder", (False,))),
    ("pruned_heads", Key(REFUSED, "pruned attention heads", ({},))),
    (
        "quantization_config",
        Key(REFUSED, "weights quantized by another program; give the model that they were made from"),
    ),
    (
        "prefix task_specific_params",
        Key(IDLE, "what transformers' pipelines add, by task, and its `generate` does not: --source_prefix and flags"),
    ),
    ("auto_map custom_pipelines", Key(IDLE, "code of the folder is never run; its tensors must be a T5's")),
    ("torch_dtype dtype use_bfloat16", Key(IDLE, "the tensors decide")),
    (
        "n_positions max_position_embeddings output_past gradient_checkpointing scalable_attention",
        Key(IDLE, "the model has no such limit or switch"),
    ),
    (
        "chunk_size_feed_forward attn_implementation _attn_implementation _attn_implementation_internal "
        "_attn_implementation_autoset _experts_implementation torchscript xla_device tf_legacy_loss",
        Key(IDLE, "how it is computed; the numbers are the same"),
    ),
    ("return_dict", _REPORTS),
    ("tokenizer_class", Key(IDLE, "tokenizer_config.json decides")),
    (
        "bos_token_id sep_token_id cross_attention_hidden_size add_cross_attention type_vocab_size",
        Key(IDLE, "not used by T5"),
    ),
    ("id2label num_labels", Key(USED, "labels of a head: names of classes, or their number")),
    (
        "problem_type",
        Key(REFUSED, "several labels per text", ("single_label_classification", "regression"), _labels_texts),
    ),
    (
        "head pooling head_kind embedding_size normalize",
        Key(USED, "written here: the head over labels, of which transformers has no class of its own"),
    ),
    ("label2id finetuning_task", Key(IDLE, "the same as id2label")),
    ("classifier_dropout classifier_dropout_rate", Key(IDLE, "chosen for each training run: --dropout_rate")),
    ("_name_or_path _commit_hash", Key(IDLE, "where the file comes from")),
)
CONFIG_KEYS = {
    **{name: key for name, key in GENERATION_KEYS.items() if name not in _ONLY_IN_GENERATION},
    **CONFIG_KEYS,
}

_SPECIAL_TOKEN = Key(USED, "that token's text")
_MORE_TOKENS = Key(USED, "further tokens that are never split")
SPECIAL_KEYS = _keys(
    ("eos_token pad_token unk_token bos_token", _SPECIAL_TOKEN),
    ("sep_token cls_token mask_token", Key(IDLE, "not used by T5; their ids are kept")),
    ("additional_special_tokens extra_special_tokens", _MORE_TOKENS),
)
TOKENIZER_KEYS = {
    **SPECIAL_KEYS,
    **_keys(
        ("extra_ids _extra_ids", Key(USED, "number of sentinels after the vocabulary")),
        ("added_tokens_decoder model_specific_special_tokens", _MORE_TOKENS),
        (
            "tokenizer_class",
            Key(USED, "the kind: T5 (SentencePiece), ByT5 (bytes), Roberta (byte-level BPE, <s> before a text)"),
        ),
        ("chat_template", Key(USED, "--prompt_template=chat_template")),
        ("add_prefix_space trim_offsets", Key(USED, "whether a text begins with a space")),
        ("legacy", Key(USED, "false: no space is inserted after special tokens")),
        ("sp_model_kwargs", Key(REFUSED, "sampled segmentation", ({}, {"enable_sampling": False}))),
        ("do_lower_case", Key(REFUSED, "lower-casing", (False,))),
        ("split_special_tokens", Key(REFUSED, "special tokens split like text", (False,))),
        (
            "padding_side truncation_side model_max_length max_length stride truncation_strategy pad_to_multiple_of "
            "pad_token_type_id model_input_names",
            Key(IDLE, "rows are padded and cut here: --max_seq_len"),
        ),
        (
            "clean_up_tokenization_spaces clean_up_tokenization_spaces_for_bpe_even_though_it_will_corrupt_output "
            "spaces_between_special_tokens skip_special_tokens",
            Key(IDLE, "answers are shown as they were written"),
        ),
        (
            "add_bos_token add_eos_token",
            Key(IDLE, "every text ends with the end token; the tokenizer's own file says what comes first"),
        ),
        (
            "keep_accents errors response_template response_schema chat_control_tokens use_default_system_prompt",
            Key(IDLE, "not used by T5"),
        ),
        (
            "name_or_path special_tokens_map_file tokenizer_file vocab_file merges_file backend files_loaded is_local "
            "from_slow use_fast processor_class verbose auto_map local_files_only unk_id additional_chat_templates "
            "transformers_version _commit_hash",
            Key(IDLE, "where the file comes from, and how it is loaded"),
        ),
    ),
}
VECTOR_MODEL_KEYS = _keys(
    (
        "prompts default_prompt_name",
        Key(
            USED,
            "`query` and `document` (or `passage`, `corpus`): query_prompt and document_prompt; without these the default "
            "prompt is both",
        ),
    ),
    ("model_type", Key(REFUSED, "a model without one dense embedding per text", ("SentenceTransformer",))),
    ("truncate_dim", Key(REFUSED, "truncated embeddings; truncate them where they are used")),
    ("similarity_fn_name", Key(IDLE, "scores use cosine similarity")),
    ("requirements __version__", Key(IDLE, "where the file comes from, and how it is loaded")),
)
VECTOR_TEXTS_KEYS = _keys(
    ("max_seq_length", Key(USED, "max_seq_len; if absent, model_max_length of tokenizer_config.json")),
    ("do_lower_case", Key(REFUSED, "lower-casing", (False,))),
    ("transformer_task", Key(REFUSED, "another output than hidden states", ("feature-extraction",))),
    ("module_output_name", Key(REFUSED, "another output than hidden states", ("token_embeddings",))),
    ("processing_kwargs", Key(REFUSED, "other ways to cut and join texts", ({},))),
    ("query_length document_length query_expansion", Key(REFUSED, "queries and documents of different lengths")),
    ("modality_config unpad_inputs", Key(IDLE, "how it is computed; the numbers are the same")),
    (
        "model_args tokenizer_args config_args model_kwargs processor_kwargs config_kwargs",
        Key(IDLE, "how it is loaded"),
    ),
)
POOLING_KEYS = _keys(
    (
        "pooling_mode pooling_mode_cls_token pooling_mode_max_tokens pooling_mode_mean_tokens "
        "pooling_mode_mean_sqrt_len_tokens pooling_mode_weightedmean_tokens pooling_mode_lasttoken",
        Key(USED, "pooling: mean, cls (first) or lasttoken (last); others and several are refused"),
    ),
    ("include_prompt", Key(USED, "false is refused if the folder has prompts: here their tokens are pooled too")),
    ("embedding_dimension word_embedding_dimension", Key(IDLE, "d_model")),
)
DENSE_KEYS = _keys(
    ("in_features out_features", Key(USED, "dimensions of the dense layer; embedding_size")),
    ("bias use_residual", Key(USED, "false; true is refused")),
    ("activation_function", Key(USED, "torch.nn.modules.linear.Identity; others are refused")),
    ("module_input_name module_output_name", Key(USED, "sentence_embedding; others are refused")),
)
FILES: dict[str, dict[str, Key]] = {
    CONFIG: CONFIG_KEYS,
    GENERATION: GENERATION_KEYS,
    TOKENIZER: TOKENIZER_KEYS,
    SPECIAL: SPECIAL_KEYS,
    VECTOR_MODEL: VECTOR_MODEL_KEYS,
    VECTOR_TEXTS: VECTOR_TEXTS_KEYS,
    POOLING: POOLING_KEYS,
    DENSE: DENSE_KEYS,
}


def check_keys(path: Path, content: Mapping[str, Any], names: Collection[str] | None = None) -> list[str]:
    """Find values that ask for what is not done here.

    Args:
        path: of the file; its name says which. names: only these keys; None: all.
    """
    problems: list[str] = []
    for name, key in FILES[path.name].items():
        value = content.get(name)
        if key.kind != REFUSED or value is None or (names is not None and name not in names):
            continue
        if key.counts(content) and value not in key.allowed:
            allowed = ", ".join(json.dumps(one) for one in (*key.allowed, None))
            problems.append(
                say(
                    "{path}: {name} = {value}, {does}: that is not done here; allowed: {allowed}, or no such line",
                    path=path,
                    name=name,
                    value=str(value)[:_SHOWN_LENGTH],
                    does=key.does,
                    allowed=allowed,
                )
            )
    return problems
