"""Processes whose names are no text: the kernel cuts a name after 15 bytes, also inside of a character."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from elasticjob._runtime.agent import processes
from elasticjob._runtime.agent.monitoring.exits import stuck_processes
from elasticjob._runtime.agent.monitoring.progress import hangs

NAME = "entraînement-é".encode()[:15]
RENAMED = f"open('/proc/self/comm', 'wb').write({NAME!r}); print(flush=True); input()"


@pytest.fixture
def pid() -> Iterator[int]:
    with subprocess.Popen([sys.executable, "-c", RENAMED], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        process.stdout.readline()
        yield process.pid
        process.kill()


def test_the_name_is_cut_inside_of_a_character(pid: int) -> None:
    with pytest.raises(UnicodeDecodeError):
        Path(f"/proc/{pid}/comm").read_bytes().decode()


def test_what_the_kernel_shows_of_such_a_process_is_read(pid: int) -> None:
    assert not processes.has_ended(pid)
    assert not processes.is_stopped(pid)
    assert stuck_processes.held_resources([pid])
    assert stuck_processes.blocked_threads([pid]) == frozenset()
    assert "its main thread" in hangs.describe_place("", pid)
    assert pid in processes.descendants(os.getpid())
