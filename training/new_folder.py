"""How does a folder that a command writes appear whole, or not at all?

It is filled under a hidden name beside its own, and renamed. A folder that exists is kept unless overwriting is asked for.
"""

from __future__ import annotations

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from data.tokenizer import Tokenizer
from model.hf_format import GENERATION_FILE
from settings import UserError


@contextmanager
def new_folder(named: str | None, overwrite: bool, *sources: Path) -> Iterator[Path]:
    """An empty folder to fill; it becomes `named` when the context ends without an error.

    Args:
        named: the setting `output`. overwrite: whether it may replace one that exists.
        sources: folders that are read, which it may not be.
    Raises:
        UserError: no name, one that exists or is read, or a disk that cannot be written.
    """
    if named is None:
        raise UserError("--output = none, is needed: the folder to write")
    output = Path(named)
    if any(output.resolve() == source.resolve() for source in sources):
        raise UserError(f"--output = {output}, is the folder that is read; name another one")
    if output.exists() and not overwrite and not (output.is_dir() and not any(output.iterdir())):
        raise UserError(f"--output = {output}, exists; name another folder or use --overwrite=True")
    partial = output.with_name(f".tmp-{output.name}")
    try:
        shutil.rmtree(partial, ignore_errors=True)
        partial.mkdir(parents=True)
        yield partial
        if output.is_dir():
            shutil.rmtree(output)
        os.replace(partial, output)
    except OSError as error:
        raise UserError(f"--output = {output}, cannot be written: {error.strerror}; name another folder") from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)


def copy_companions(tokenizer: Path, home: Path, folder: Path) -> None:
    """Put the tokenizer and the published generation settings of a model beside its new weights.

    Args:
        tokenizer, home: folders of the tokenizer and of the model.
    """
    if any(any(tokenizer.glob(kind)) for kind in ("tokenizer.json", "*.model", "vocab.json", "tokenizer_config.json")):
        Tokenizer.load(tokenizer).save(folder)
    if (home / GENERATION_FILE).is_file():
        shutil.copyfile(home / GENERATION_FILE, folder / GENERATION_FILE)
