"""Who else hears of a run: the trackers that Accelerate knows, off unless they are named: nothing leaves the machine
unasked.

Each event of metrics.jsonl that holds numbers by step is handed on: `train/...` of a step, `eval/...` of an evaluation,
`memory/...` in bytes. A package that is missing is refused with its `pip install` line, where Accelerate would omit it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from data.sources.places import public_values
from settings.declared import RunConfig
from settings.errors import UserError, refuse
from settings.fields import not_known
from settings.program import needs

if TYPE_CHECKING:
    from accelerate import Accelerator

PROJECT = "frugalt5"
# Some trackers have a module, or a package, of another name.
MODULES = {"tensorboard": "torch.utils.tensorboard"}
PACKAGES = {"comet_ml": "comet-ml"}
# These take a name for the run, each as another parameter; the others number their runs.
NAME_PARAMETERS = {
    "wandb": "name",
    "trackio": "name",
    "mlflow": "run_name",
    "swanlab": "experiment_name",
    "clearml": "task_name",
}
PREFIXES = {"step": "train", "eval": "eval", "memory": "memory"}


def tracker_names(log_with: str | None) -> list[str]:
    """The trackers that `log_with` names, each of which can be imported.

    Raises:
        UserError: one is not known, or its package is missing; all of them at once.
    """
    if not log_with:
        return []
    from accelerate.tracking import LOGGER_TYPE_TO_CLASS  # This loads torch.

    names = list(dict.fromkeys(word.strip().lower() for word in log_with.split(",") if word.strip()))
    problems = list[str]()
    for name in names:
        try:
            if name not in LOGGER_TYPE_TO_CLASS:
                raise UserError(
                    "--log_with = {asked}, {name} {problem}",
                    asked=log_with,
                    name=name,
                    problem=not_known(name, sorted(LOGGER_TYPE_TO_CLASS)),
                )
            needs(PACKAGES.get(name, name), f"--log_with = {log_with}", module=MODULES.get(name, name))
        except UserError as error:
            problems += error.problems
    refuse(problems)
    return names


@contextmanager
def trackers(
    accelerator: Accelerator, output: RunConfig, settings: Mapping[str, Any]
) -> Iterator[Callable[[Mapping[str, Any]], None]]:
    """Open the trackers of a run, and close them whatever happens: a context that gives what takes its events.

    Args:
        accelerator: made with `log_with`. output: settings of the run, its name settled. settings: all of them, by flat
            name.
    """

    def close() -> None:
        while accelerator.trackers:
            accelerator.trackers.pop().finish()

    def log(event: Mapping[str, Any]) -> None:
        if event["event"] in PREFIXES and accelerator.trackers:
            prefix = PREFIXES[event["event"]]
            values = {
                f"{prefix}/{name.replace('@', '_at_')}": value  # mlflow takes no @ in a name.
                for name, value in event.items()
                if type(value) in (int, float) and name != "step"
            }
            accelerator.log(values, step=event["step"])
        elif event["event"] == "end":
            close()

    if accelerator.log_with:
        folder = str(Path(output.log_dir, output.run_name))
        accelerator.project_configuration.set_directories(folder)
        accelerator.project_configuration.logging_dir = folder
        hyperparameters = {  # Trackers take numbers, truth values and words.
            name: value if isinstance(value, (bool, int, float, str)) else str(value)
            for name, value in public_values(settings).items()
        }
        run_names = {tracker: {parameter: output.run_name} for tracker, parameter in NAME_PARAMETERS.items()}
        accelerator.init_trackers(PROJECT, config=hyperparameters, init_kwargs=run_names)
    try:
        yield log
    finally:
        close()
