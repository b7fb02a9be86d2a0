from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from data.prepare.child import ROOT, call_in_child
from settings.errors import DoesNotFit, UserError
from units import parse_size


def test_the_result_comes_back_from_another_process() -> None:
    assert call_in_child(os.getpid) != os.getpid()
    assert call_in_child(parse_size, "2K") == 2048


def test_what_is_printed_does_not_mix_with_the_result() -> None:
    assert call_in_child(print, "to the screen") is None


def test_user_errors_come_back() -> None:
    from data.sources.files import find

    with pytest.raises(UserError, match="no such file") as caught:
        call_in_child(find, "/missing/a.txt,/missing/b.txt")
    assert len(caught.value.problems) == 2


def test_a_killed_process_is_taken_as_one_that_did_not_fit() -> None:
    with pytest.raises(DoesNotFit, match="raise_signal was killed"):
        call_in_child(signal.raise_signal, signal.SIGKILL)


def test_a_process_that_takes_more_than_it_may_is_ended_from_outside() -> None:
    waits = "import signal; held = b'1' * 2**28; signal.pause()"
    with pytest.raises(DoesNotFit, match=r"holds .* MiB, and there is room for 128.0 MiB"):
        call_in_child(exec, waits, most_bytes=2**27)
    assert call_in_child(parse_size, "2K", most_bytes=2**30) == 2048


def test_an_interrupt_is_passed_on() -> None:
    with pytest.raises(KeyboardInterrupt):
        call_in_child(signal.raise_signal, signal.SIGINT)


@pytest.mark.skipif(os.name != "posix", reason="signals")
def test_it_ends_with_its_parent() -> None:
    """Also where that is killed alone, as by a batch system: nobody waits for what it makes."""
    waits = "import os, signal; os.write(2, b'here'); signal.pause()"
    code = f"from data.prepare.child import call_in_child; call_in_child(exec, {waits!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, stderr=subprocess.PIPE)
    assert parent.stderr is not None and parent.stderr.read(4) == b"here"
    parent.kill()
    assert parent.communicate(timeout=60)[1] == b"", "the pipe ends when nobody holds it, the child neither"


def test_anything_else_is_a_runtime_error() -> None:
    with pytest.raises(RuntimeError, match="exit code 1"):
        call_in_child(int, "x")


def test_the_data_wing_imports_nothing_heavy() -> None:
    names = "prepare.preparing batches.loader dataset prepare.task prepare.encoding"
    code = f"import sys; import {', '.join('data.' + name for name in names.split())}; print(*sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert not {"torch", "transformers", "datasets", "pandas", "accelerate"} & set(done.stdout.split())
