"""Who else hears of a run? The trackers that Accelerate knows, off unless they are named: nothing leaves the machine unasked.

Each event of metrics.jsonl that holds numbers by step is handed on: `train/...` of a step, `eval/...` of an evaluation,
`memory/...` in bytes. A package that is missing is told with its `pip install` line, where Accelerate would leave it out.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from config import Config
from data.sources.places import public_values
from settings.errors import UserError
from settings.fields import not_known
from settings.program import needs

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "frugalt5"
MODULES = {
    "comet_ml": "comet_ml",
    "tensorboard": "torch.utils.tensorboard",
}  # where the module is not named like the package
PACKAGES = {"comet_ml": "comet-ml"}
# what each calls the name of a run; others number their runs
RUN_NAMES = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
}
PREFIXES = {"step": "train", "eval": "eval", "memory": "memory"}


def tracker_names(config: Config) -> list[str]:
    """The trackers that `log_with` names, each of which can be imported.

    Raises:
        UserError: one is not known, or its package is missing; all of them at once.
    """
    asked, problems = config.run.log_with, []
    if not asked:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # which loads torch

    names = list(dict.fromkeys(word.strip().lower() for word in asked.split(",") if word.strip()))
    for name in names:
        try:
            if name not in LOGGER_TYPE_TO_CLASS:
                raise UserError(f"--log_with = {asked}, {name} {not_known(name, sorted(LOGGER_TYPE_TO_CLASS))}")
            needs(PACKAGES.get(name, name), f"--log_with = {asked}", module=MODULES.get(name, name))
        except UserError as error:
            problems += error.problems
    if problems:
        raise UserError(*problems)
    return names


class Trackers:
    """Hands events to trackers; a context, which closes them whatever happens.

    Args:
        accelerator: made with `log_with`. config: of the run, its name settled.
    """

    def __init__(self, accelerator: Accelerator, config: Config) -> None:
        self._accelerator, run = accelerator, config.run
        if not accelerator.log_with:
            return
        accelerator.project_configuration.set_directories(str(Path(run.log_dir, run.run_name)))
        accelerator.project_configuration.logging_dir = str(Path(run.log_dir, run.run_name))
        named = {name: {word: run.run_name} for name, word in RUN_NAMES.items()}
        accelerator.init_trackers(PROJECT, config=_settings(config), init_kwargs=named)

    def __enter__(self) -> Trackers:
        return self

    def __exit__(self, *exc_info: object) -> None:
        self.close()

    def __call__(self, event: Mapping[str, Any]) -> None:
        """Take one event, as it stands in metrics.jsonl."""
        prefix = PREFIXES.get(event["event"])
        if prefix is not None and self._accelerator.trackers:
            values = {
                f"{prefix}/{name}": value for name, value in event.items() if name != "step" and _is_number(value)
            }
            self._accelerator.log(values, step=event["step"])
        elif event["event"] == "end":
            self.close()

    def close(self) -> None:
        """Let every tracker finish what it writes; twice is once."""
        while self._accelerator.trackers:
            self._accelerator.trackers.pop().finish()


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _settings(config: Config) -> dict[str, Any]:
    return {
        name: value if isinstance(value, (bool, int, float, str)) else str(value)
        for name, value in public_values(config.as_dict()).items()
    }
