from __future__ import annotations

import ctypes
import subprocess
import sys

import pytest

from devices import malloc
from devices.malloc import ALWAYS, TUNINGS, _libc, trim_malloc, tune_malloc
from limits import MALLOCS
from memory.observe.processes import has_proc

needs_glibc = pytest.mark.skipif(_libc() is None or not has_proc(), reason="no glibc or no /proc here")


@pytest.fixture
def without_glibc(monkeypatch):
    def missing(name):
        raise TypeError("Windows has no library of the process")

    _libc.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", missing)
    yield
    monkeypatch.undo()
    _libc.cache_clear()


def test_without_glibc_nothing_happens(without_glibc):
    assert not tune_malloc("small") and not trim_malloc()


def test_other_c_libraries_are_left_alone(monkeypatch):
    _libc.cache_clear()
    monkeypatch.setattr(ctypes, "CDLL", lambda name: object())
    assert not tune_malloc("fast")
    monkeypatch.undo()
    _libc.cache_clear()


class Recorded:
    """Stands for the C library, so that the tests' own process keeps its malloc."""

    def __init__(self, answer=1):
        self.answer, self.options = answer, {}

    def mallopt(self, option, value):
        self.options[option] = value
        return self.answer


@pytest.mark.parametrize("tuning", TUNINGS)
def test_every_option_is_set_and_a_refusal_is_told(monkeypatch, tuning):
    libc = Recorded()
    monkeypatch.setattr(malloc, "_libc", lambda: libc)
    assert tune_malloc(tuning) and libc.options == {**ALWAYS, **TUNINGS[tuning]}
    monkeypatch.setattr(malloc, "_libc", lambda: Recorded(answer=0))
    assert not tune_malloc(tuning)


PROGRAM = """
import os
from devices.malloc import trim_malloc, tune_malloc
from memory.observe.processes import process_usage

assert tune_malloc("{tuning}")
held = lambda: process_usage(os.getpid()).anon_bytes
start = held()
blocks = [b"x" * 2**18 for _ in range(320)]
above = b"x" * 2**18  # holds the top of the heap, where malloc would trim by itself
full = held() - start
blocks.clear()
freed = held() - start
trim_malloc()
print(full, freed, held() - start)
"""


FOREIGN = {  # what makes malloc keep all that it ever had
    "none": {},
    "variables": {
        "MALLOC_MMAP_THRESHOLD_": "4294967296",
        "MALLOC_TRIM_THRESHOLD_": "4294967296",
        "MALLOC_MMAP_MAX_": "0",
    },
    "tunables": {"GLIBC_TUNABLES": "glibc.malloc.mmap_threshold=4294967296:glibc.malloc.trim_threshold=4294967296"},
}


@needs_glibc
@pytest.mark.parametrize("environ", FOREIGN)
@pytest.mark.parametrize(("tuning", "keeps"), [("fast", True), ("small", False)])
def test_fast_keeps_freed_blocks_until_trimmed_and_small_returns_them_at_once(tuning, keeps, environ):
    command = [sys.executable, "-c", PROGRAM.format(tuning=tuning)]
    variables = {"PYTHONHASHSEED": "0", **FOREIGN[environ]}
    done = subprocess.run(command, capture_output=True, text=True, check=True, env=variables)
    full, freed, trimmed = (int(word) / 2**20 for word in done.stdout.split())
    assert full > 76 and trimmed < 8
    assert (freed > 16) == keeps and (freed < 8) == (not keeps)


@needs_glibc
@pytest.mark.parametrize("tuning", TUNINGS)
def test_glibc_takes_every_tuning_of_a_plan(tuning: str) -> None:
    assert tuple(TUNINGS) == MALLOCS
    told = subprocess.run(
        [sys.executable, "-c", f"from devices.malloc import tune_malloc; print(tune_malloc({tuning!r}))"],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert told.stdout.strip() == "True", "a threshold beyond what it allows would change nothing"
