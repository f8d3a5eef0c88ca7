"""Where a process runs, read from one process and given to another."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest

from elasticjob._runtime.system import process_placement
from elasticjob._runtime.system.process_placement import ProcessPlacement, read_placement

HERE = read_placement(os.getpid())
HAS_NUMA = Path("/proc/self/numa_maps").exists()


def test_a_child_gets_the_placement() -> None:
    wanted = replace(HERE, processors=frozenset({min(HERE.processors)}), nice=min(HERE.nice + 2, 19))
    if HAS_NUMA:
        wanted = replace(wanted, memory="bind=static:0")
    assert wanted.can_be_applied()
    code = "import sys; sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, preexec_fn=wanted.apply) as child:
        assert read_placement(child.pid) == wanted
        child.communicate(b"")


def test_what_the_agent_does_not_know_or_may_not_do_is_not_applied(monkeypatch: pytest.MonkeyPatch) -> None:
    assert HERE.can_be_applied()
    assert not replace(HERE, memory="weighted interleave:0-1").can_be_applied()
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert not replace(HERE, nice=HERE.nice - 1).can_be_applied()
    assert replace(HERE, nice=HERE.nice + 1).can_be_applied()
    monkeypatch.setattr(platform, "machine", lambda: "riscv64")
    assert HERE.can_be_applied()
    assert not replace(HERE, memory="bind:0").can_be_applied()


@pytest.mark.parametrize(
    ("line", "policy"),
    [
        ("5620a1 default file=/usr/bin/cat mapped=2 N0=2 kernelpagesize_kB=4\n5 bind:1 heap", "default"),
        ("5620a1 bind=static:0-1 anon=1 dirty=1", "bind=static:0-1"),
        ("5620a1 prefer (many):0,2 heap anon=1", "prefer (many):0,2"),
        ("5620a1 interleave:0-3", "interleave:0-3"),
    ],
)
def test_the_policy_is_that_of_the_first_mapping(line: str, policy: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda _self, **_: line)
    assert process_placement.memory_policy("1") == policy


@pytest.mark.parametrize(("text", "nodes"), [("", []), ("0", [0]), ("0-2,5", [0, 1, 2, 5])])
def test_nodes_of_a_list(text: str, nodes: Sequence[int]) -> None:
    assert process_placement.parse_nodes(text) == nodes


def test_a_placement_that_fails_is_an_error() -> None:
    with pytest.raises(OSError, match="Invalid argument"):
        ProcessPlacement(frozenset({1 << 12})).apply()
