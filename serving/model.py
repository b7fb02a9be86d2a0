"""A trained model in Python: what `generate` and `embed` do, without a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devices.environment import prepare_environment

prepare_environment()  # What it sets, torch reads once, when it is imported.

from commands.answering import check_one_process, refuse_several_adapters
from commands.embed import Embedder
from commands.generate import ANSWER, Labelled, Written, answering_model
from commands.text_reader import text_settings
from data.sources.prompts import Prompt
from memory.answers import AnswerBatch
from memory.monitor import watched
from settings.declared import Config
from settings.loading import load
from training.loaded_model import LoadedModel, load_model
from training.saved_model import find_model


class Model:
    """A trained model that answers prompts or embeds texts, inside a memory budget: `Model(folder).answer(["..."])`.

    It is loaded at the first call, as the budget allows, and stays for later calls of the same kind and budget.

    Args:
        folder: of a run, a checkpoint, an adapter, or a model published for Hugging Face.
        settings: flags of `generate` or `embed` by name, such as num_beams=4, adapter="folder" or device="cpu".
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        self._settings = {"model": str(folder), **settings}
        self._loaded: dict[tuple[str, str | int | None], LoadedModel] = {}  # by what it is used for, at most one
        self._config: Config
        self._answering: Written | Labelled

    def answer(self, prompts: Sequence[str], memory_budget: str | int | None = None) -> list[Any]:
        """One answer to each prompt, in their order, as `generate` writes it; a blank prompt has a blank answer.

        Args:
            memory_budget: such as "2G", or bytes, for the whole process; None: as the settings say, else what is free.
        Returns:
            texts; of a model with a head over labels the columns that `generate` writes, such as {"label": ...,
            "probabilities": ...}.
        Raises:
            UserError: the folder is not usable, or gives no answers. DoesNotFit: the budget does not hold the model or
                an answer.
            OverBudget: all was answered, and took more.
        """
        loaded = self._load("generate", memory_budget)
        rows = (Prompt(str(number), text, {}) for number, text in enumerate(prompts))
        with watched(loaded.monitor):
            columns = [answer.columns for window in self._answering.windows(rows) for _, answer in window]
        return [row[ANSWER] for row in columns] if isinstance(self._answering, Written) else columns

    def embed(self, texts: Sequence[str], memory_budget: str | int | None = None) -> list[NDArray[np.float32]]:
        """The vector of each text, in their order, as `embed` computes it: the mean of the encoder's last hidden
        states.

        Args:
            memory_budget: as of `answer`.
        Returns:
            arrays (d_model,); with vectors="token", (tokens, d_model).
        Raises:
            UserError: the folder is not usable. DoesNotFit: the budget does not hold the model or a text.
            OverBudget: all was computed, and took more.
        """
        loaded = self._load("embed", memory_budget)
        with watched(loaded.monitor):
            rows = self._config.train.eval_batch_size_per_gpu
            return Embedder.of(loaded, self._config.data, rows, self._config.embed.vectors)(iter(texts))

    def _load(self, command: str, memory_budget: str | int | None) -> LoadedModel:
        """The model as the command would load it, kept from the last call where that was for the same use."""
        use = (command, memory_budget)
        if use in self._loaded:
            return self._loaded[use]
        self._loaded.clear()  # Its memory is free before the model is loaded in another way.
        check_one_process(command)
        budget = {} if memory_budget is None else {"memory_budget": str(memory_budget)}
        config = load(command, {**self._settings, **budget})
        if command == "generate":
            saved, self._answering = answering_model(config)
            loaded = load_model(self._answering.config, saved, self._answering.least, self._answering.tree)
            self._answering.load(loaded)
        else:
            saved = find_model(config)
            refuse_several_adapters(saved)
            self._config = config.with_saved(text_settings(saved))
            loaded = load_model(self._config, saved, AnswerBatch(1, self._config.data.max_seq_len, 1))
        self._loaded[use] = loaded
        return loaded
