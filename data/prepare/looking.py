"""Files of others are read in a child of this process, in memory that the system bounds: what they do to a library ends there.

The child is kept while there is more to ask, as each costs the start of an interpreter, and takes its memory with it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from childproc import CRASHED, MEMORY, ChildDied, Worker
from config import Config
from data.prepare.room import most_in_child
from data.shards.store import is_shards
from data.sources.places import public
from settings.errors import DoesNotFit, UserError
from units import format_size

Result = TypeVar("Result")
_kept: list[tuple[Worker, int]] = []  # one with its bytes, or none


def look(config: Config, function: Callable[..., Result], *arguments: Any) -> Result:
    """What a module's function says: asked in the child where the settings name files, here where they name shards or nothing.

    Raises:
        as `ask`.
    """
    return ask(config, function, *arguments) if names_files(config) else function(*arguments)


def names_files(config: Config) -> bool:
    """Whether the settings name files of rows that are no shards."""
    return bool(_files(config))


def _files(config: Config) -> list[str]:
    data = config.data
    return [str(spec) for spec in (data.train_file, data.validation_file) if spec and not is_shards(spec)]


def ask(config: Config, function: Callable[..., Result], *arguments: Any) -> Result:
    """What a module's function says, asked in the child.

    Args:
        function: it, its arguments and its answer are picklable; of its errors only UserError comes back.
    Raises:
        UserError: also where a file ends the child. DoesNotFit: it takes more than the budget leaves.
    """
    if not _kept:
        most = most_in_child(config)
        _kept.append((Worker(_asked, max_bytes=most), most))
    worker, most = _kept[0]
    try:
        result: Result = worker.ask((function, arguments))
        return result
    except ChildDied as died:
        forget()
        files = public(" and ".join(_files(config)) or "the built-in sample")
        if died.reason == MEMORY:
            raise DoesNotFit(
                f"{files}: reading the rows takes more than {format_size(most)}, which is what there is room for: a row may be far "
                "larger than the others, or unpack to far more than it shows; what was done before is kept. Look at the file named "
                "last, or give --memory_budget more"
            ) from None
        if died.reason == CRASHED:
            raise UserError(
                f"{files}: reading the rows has crashed a library ({died}); fetch or write the file anew"
            ) from None
        raise
    except KeyboardInterrupt:
        forget()
        raise


def forget() -> None:
    """End the child."""
    while _kept:
        _kept.pop()[0].close()


def _asked() -> Callable[[tuple[Callable[..., Any], tuple[Any, ...]]], Any]:
    return lambda request: request[0](*request[1])
