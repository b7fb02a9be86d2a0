"""The form of an adapter, the matrices it adapts, and whether it fits a model; torch is not imported."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Any

from model.shapes import ALL, requested_targets, targets_of, weights
from settings.declared import T5ModelConfig
from settings.errors import UserError
from support.language import join, say


@dataclass(frozen=True)
class LoraSettings:
    """The form of an adapter.

    Args:
        rank: r, at least 1. alpha: numerator of the scaling.
        targets: names of the matrices as Hugging Face has them: q, k, v, o, wi or wi_0 and wi_1, wo.
        dropout: share dropped of what the adapters read.
        tokens: ids of the first and the last token whose rows of the tables learn too; None: none do.
    """

    rank: int
    alpha: float
    targets: tuple[str, ...] = ("q", "v")
    dropout: float = 0.0
    tokens: tuple[int, int] | None = None

    @property
    def scaling(self) -> float:
        """s, the factor on B A."""
        return self.alpha / self.rank


@dataclass(frozen=True)
class AdapterInfo:
    """What a folder says of its adapter: form, the folder of its base, the base's fingerprint ("" if unknown), and the
    fields of `T5ModelConfig` in which the adapted model has another head than its base.
    """

    settings: LoraSettings
    base: str
    fingerprint: str
    head: dict[str, Any] = field(default_factory=dict)

    def adapted(self, base: T5ModelConfig) -> T5ModelConfig:
        """The shape of the adapted model, from that of its base."""
        tokens = self.settings.tokens
        if tokens is not None:  # A base may have no rows for them.
            base = replace(base, vocab_size=max(base.vocab_size, tokens[1] + 1))
        if not self.head:
            return base
        fields = dict(self.head)
        if not fields.pop("has_decoder"):
            fields["num_decoder_layers"] = 0
        # PEFT saves no names of labels: they are those of the base, as in PeftModel.config.
        same_head = (base.head, str(base.num_labels)) == (fields["head"], fields.get("labels"))
        if same_head and not self.fingerprint:
            fields["labels"] = base.labels
        return replace(base, **fields, tie_word_embeddings=True, scale_decoder_outputs=True)


def resolve_targets(shape: T5ModelConfig, targets: str) -> tuple[str, ...]:
    """Turn the setting `lora_targets` into names of a model of this shape.

    Raises:
        UserError: names that do not exist there, all at once.
    """
    names = targets_of(shape)
    words = requested_targets(shape, targets)
    unknown = [word for word in words if word not in names]
    if unknown or not words:
        raise UserError(
            "--lora_targets = {asked}, {value} is not a module of this model; allowed: {known}, or {all}",
            asked=targets,
            value=join(", ", unknown) or say("nothing"),
            known=join(", ", names),
            all=ALL,
        )
    return tuple(filter(words.__contains__, names))


def adapted_paths(shape: T5ModelConfig, settings: LoraSettings) -> list[str]:
    """The paths of the matrices that adapters of this form stand beside, e.g. `encoder.blocks.0.attention.q`.

    Raises:
        UserError: the rank is larger than the narrowest of them.
    """
    widths = {
        weight.name.removesuffix(".weight"): min(weight.shape)
        for weight in weights(shape)
        if weight.is_product and weight.target in settings.targets
    }
    narrowest = min(widths.values())
    if settings.rank > narrowest:
        raise UserError(
            "--lora_rank = {rank}, is more than the width of the matrices ({narrowest}); allowed: 1 to {narrowest}",
            rank=settings.rank,
            narrowest=narrowest,
        )
    return list(widths)
