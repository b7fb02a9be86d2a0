"""What tests of several wings start from. Nothing heavy is imported before a test asks for it."""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from devices import machine_file, processor
from devices.processor import AVX2, Processor
from tests import warm


def pytest_configure(config: pytest.Config) -> None:
    """Speeds that tests measure are not those of the user's runs; child processes inherit the folder.

    Compiled kernels are taken along: their names hold what they were made of, and making them takes seconds.
    """
    folder = tempfile.mkdtemp(prefix="frugalt5-tests-")
    known = machine_file.location().parent
    ours = Path(folder) / known.name
    ours.mkdir()
    for kernels in known.glob("kernels-*.so"):
        shutil.copy2(kernels, ours)
    config.add_cleanup(lambda: shutil.rmtree(folder, ignore_errors=True))
    os.environ["XDG_CACHE_HOME"] = folder  # before test modules copy the environment
    # or each child process compiles all modules anew, for half a second, and each run rewrites all asserts, for seven
    os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
    sys.dont_write_bytecode = False
    warm.trust_the_disk()
    os.environ["LC_ALL"] = "C.UTF-8"  # what tests read is English, whoever runs them
    # as in an environment that was activated: commands that are shown begin with `python`
    os.environ["PATH"] = os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", "")])


def pytest_collection_finish() -> None:
    warm.set_imports_aside()


@pytest.fixture(scope="module")
def processor_class() -> Iterator[Processor]:
    """What is planned for, wherever tests run: a processor without bf16 units, of two threads."""
    from devices.base import Device

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(processor, "here", lambda *_, **__: AVX2)
        patch.setattr(Device, "threads", 2)
        yield AVX2


@pytest.fixture(params=[True, False], ids=["compiled", "torch"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Once with compiled kernels, where they can be made, and once without."""
    from devices.kernels import calls

    if request.param and calls.kernels() is None:
        pytest.skip(f"no compiled kernels: {calls.why_none()}")
    calls.use(request.param)
    return bool(request.param)


@pytest.fixture(autouse=True)
def kernels_as_before() -> Iterator[None]:
    """What one test says of compiled kernels holds for no other."""
    yield
    if calls := sys.modules.get("devices.kernels.calls"):
        calls.use(True)


@pytest.fixture(autouse=True)
def language_as_before() -> Iterator[None]:
    """What one test speaks is spoken in no other."""
    yield
    if language := sys.modules.get("support.language"):
        language.speak("en")


class Reader:
    """Reads rows in this process, where that they are read in a child is not the point: each costs the start of an
    interpreter.
    """

    def __init__(self, make: Callable[[], Callable[[Any], Any]], **limits: Any) -> None:
        self.ask = make()

    def close(self) -> None:
        pass


@pytest.fixture(scope="module", autouse=True)
def reader(request: pytest.FixtureRequest) -> Iterator[None]:
    with pytest.MonkeyPatch.context() as patch:
        if (looking := sys.modules.get("data.prepare.looking")) and not request.node.get_closest_marker("children"):
            patch.setattr(looking, "Worker", Reader)
        yield


@pytest.fixture(autouse=True)
def readers_as_before() -> Iterator[None]:
    """The child that read one test's files, with its folder and budget, reads no other's."""
    yield
    if looking := sys.modules.get("data.prepare.looking"):
        looking.forget()


@pytest.fixture
def one_thread() -> Iterator[None]:
    """Small products take longer to share between threads than to compute."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclass(frozen=True)
class S3:
    """A service with the bucket `bucket`.

    Args:
        client: of boto3, to fill it. query: what addresses need after their `?`.
    """

    client: Any
    query: str


@pytest.fixture(scope="module")
def s3() -> Iterator[S3]:
    """A real S3 server on this machine (moto)."""
    server_module = pytest.importorskip("moto.server", reason="needs moto[server]")
    boto3 = pytest.importorskip("boto3")
    patch = pytest.MonkeyPatch()
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        patch.setenv(name, "test")
    server = server_module.ThreadedMotoServer("127.0.0.1", 0, verbose=False)
    server.start()
    host, port = server.get_host_and_port()
    client = boto3.client("s3", endpoint_url=f"http://{host}:{port}", region_name="us-east-1")
    client.create_bucket(Bucket="bucket")
    yield S3(client, f"endpoint_override={host}%3A{port}&scheme=http&region=us-east-1")
    client.close()
    server.stop()
    patch.undo()
