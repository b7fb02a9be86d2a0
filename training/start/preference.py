"""What does a run minimise? Cross-entropy, or a preference loss; and where do the reference log-probabilities come from?

With adapters that begin at zero, the reference is the model without them: one more forward, no second model. Where all
weights learn, or adapters that have learnt before, the reference's log-probabilities are computed once and stored
(`training.start.reference`). ORPO needs none.
"""

from __future__ import annotations

from functools import partial

from config import PREFERENCES, Config
from engine.objectives.objective import Objective
from engine.objectives.preference import PreferenceLoss, PreferenceObjective
from model.formats.adapter_folder import is_adapter
from model.lora.adapter import adapters_off
from model.t5 import T5


def pair_loss_of(config: Config) -> PreferenceLoss:
    """The preference loss that the settings ask for."""
    chosen = config.preference
    return PreferenceLoss(chosen.preference_loss, chosen.beta, chosen.preference_label_smoothing, chosen.orpo_lambda)


def is_preference_run(config: Config) -> bool:
    """Whether the run learns from pairs of answers."""
    return config.data.objective == PREFERENCES


def stores_reference(config: Config) -> bool:
    """Whether the run compares with stored log-probabilities; `finetune_from` is resolved."""
    if not is_preference_run(config) or not pair_loss_of(config).needs_reference:
        return False
    return not config.lora.lora_rank or is_adapter(str(config.train.finetune_from))


def objective_of(config: Config, model: T5) -> Objective:
    """What the run minimises.

    Args:
        model: with its adapters on, if there are any; they are taken off for a reference that is not stored.
    """
    if not is_preference_run(config):
        return Objective()
    return PreferenceObjective(pair_loss_of(config), None if stores_reference(config) else partial(adapters_off, model))
