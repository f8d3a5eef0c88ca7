"""Files in memory, also in a Python that lacks `os.memfd_create`."""

from __future__ import annotations

import ctypes
import errno
import mmap
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from elasticjob._runtime.system.memory_file import SHARED_MEMORY, fixed_memory_file, has_fixed_size, memory_file

Patch = pytest.MonkeyPatch
NAME = f"memory-of-{os.getpid()}"


def complete(patch: Patch) -> None:
    pass


def no_function_in_python(patch: Patch) -> None:
    patch.delattr(os, "memfd_create")
    patch.delattr(os, "MFD_CLOEXEC")


def no_function_in_the_c_library(patch: Patch) -> None:
    no_function_in_python(patch)
    patch.setattr(ctypes, "CDLL", lambda *_, **__: object())


def refused_by_the_kernel(patch: Patch) -> None:
    no_function_in_python(patch)
    patch.setattr(ctypes, "CDLL", lambda *_, **__: SimpleNamespace(memfd_create=lambda *_: -1))


def refused_by_the_sandbox(patch: Patch) -> None:
    def refuse(*_: Any) -> int:
        raise PermissionError(errno.EPERM, "seccomp")

    patch.setattr(os, "memfd_create", refuse)


@pytest.fixture(
    params=[
        complete,
        no_function_in_python,
        no_function_in_the_c_library,
        refused_by_the_kernel,
        refused_by_the_sandbox,
    ],
    ids=lambda environment: environment.__name__,
)
def descriptor(request: pytest.FixtureRequest, monkeypatch: Patch) -> Iterator[int]:
    environment: Callable[[Patch], None] = request.param
    with monkeypatch.context() as patch:
        environment(patch)
        found = memory_file(NAME)
    yield found
    os.close(found)


def test_a_memory_file_is_shared_and_leaves_nothing_behind(descriptor: int) -> None:
    os.ftruncate(descriptor, mmap.PAGESIZE)
    page = mmap.mmap(descriptor, mmap.PAGESIZE)
    page[:5] = b"state"
    assert os.pread(descriptor, 5, 0) == b"state"
    assert not os.get_inheritable(descriptor)
    assert not [path for path in Path(SHARED_MEMORY).iterdir() if path.name.startswith(NAME)]


def test_the_c_library_is_asked_before_a_file_in_shared_memory(monkeypatch: Patch) -> None:
    no_function_in_python(monkeypatch)
    descriptor = memory_file(NAME)
    assert Path(f"/proc/self/fd/{descriptor}").readlink() == Path(f"/memfd:{NAME} (deleted)")
    os.close(descriptor)


def test_the_size_of_a_fixed_file_stays_where_the_kernel_can_seal_it(monkeypatch: Patch) -> None:
    for environment, sealed in ((complete, True), (no_function_in_python, True), (refused_by_the_sandbox, False)):
        with monkeypatch.context() as patch:
            environment(patch)
            descriptor = fixed_memory_file(NAME, 100)
        assert (os.fstat(descriptor).st_size, has_fixed_size(descriptor)) == (100, sealed)
        if sealed:
            with pytest.raises(PermissionError):
                os.ftruncate(descriptor, 0)
        os.close(descriptor)
