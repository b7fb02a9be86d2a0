"""A trained model in Python: what `generate` and `embed` do, without a command line."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from devices.environment import prepare_environment

prepare_environment()  # What it sets, torch reads once, when it is imported.

from commands.embed import VectorWork
from commands.generate import ANSWER, AnswerWork, WrittenAnswers, answer_work
from memory.monitor import watched
from settings.loading import load


class Model:
    """A trained model that answers prompts or embeds texts, inside a memory budget: `Model(folder).answer(["..."])`.

    It is loaded at the first call, as the budget allows, and stays for later calls of the same kind and budget.

    Args:
        folder: of a run, a checkpoint, an adapter, or a model published for Hugging Face.
        settings: flags of `generate` or `embed` by name, such as num_beams=4, truncate_dim=128, adapter="folder" or
            device="cpu".
    """

    def __init__(self, folder: str | Path, **settings: Any) -> None:
        self._settings = {"model": str(folder), **settings}
        self._work: AnswerWork | VectorWork | None = None
        self._use: tuple[str, str | int | None]  # It was loaded for this.

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
        work = self._load("generate", memory_budget)
        assert isinstance(work, AnswerWork)
        with watched(work.trained.monitor):
            columns = [answer.columns for answer in work.texts(prompts)]
        return [row[ANSWER] for row in columns] if isinstance(work, WrittenAnswers) else columns

    def embed(
        self, texts: Sequence[str], memory_budget: str | int | None = None, prompt_name: str | None = None
    ) -> list[NDArray[np.float32]]:
        """The vector of each text, in their order, as `embed` computes it: that of the model's embedding head, or without
        one the mean of the encoder's last hidden states.

        Args:
            memory_budget: as of `answer`.
            prompt_name: "query", "document" or "none", the prompt of the model that is put before each text; None: as
                the settings say, which is "document" unless they do.
        Returns:
            arrays (D,), D the width of the head's vectors, or truncate_dim, or d_model; with vectors="token", (tokens,
            d_model).
        Raises:
            UserError: the folder is not usable, or there is no such prompt. DoesNotFit: the budget does not hold the
                model or a text.
            OverBudget: all was computed, and took more.
        """
        work = self._load("embed", memory_budget)
        assert isinstance(work, VectorWork)
        with watched(work.trained.monitor):
            return work.embedder.embed(texts, prompt_name)

    def _load(self, command: str, memory_budget: str | int | None) -> AnswerWork | VectorWork:
        """What the command would load, kept from the last call where that was for the same use."""
        use = (command, memory_budget)
        if self._work is None or use != self._use:
            self._work = None  # Its memory is free before the model is loaded in another way.
            budget = {} if memory_budget is None else {"memory_budget": str(memory_budget)}
            config = load(command, {**self._settings, **budget})
            work = answer_work(config) if command == "generate" else VectorWork(config)
            work.load()
            self._work = work
            self._use = use
        return self._work
