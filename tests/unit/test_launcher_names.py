"""The tables of launchers name the same ones: one that a table leaves out would run in another way, and say nothing."""

from __future__ import annotations

import pytest

from elasticjob._runtime.agent.start_workers.command import parse_command
from elasticjob._runtime.agent.start_workers.in_workers.launchers import PACKAGES, PROGRAMS
from elasticjob._runtime.agent.start_workers.in_workers.sitecustomize import PATCHES
from elasticjob._runtime.agent.start_workers.launches.launcher_commands import may_start_launcher
from elasticjob._runtime.contract.commands.launchers import REPLACED_LAUNCHERS

PATCHED = [
    module
    for module, patches in PATCHES.items()
    if any(patch.startswith(("launchers.replace_", "other_launchers.replace_")) for patch in patches)
]
"""Modules of launchers that start ranks themselves; a refused one is in none of the other tables."""


@pytest.mark.parametrize("name", sorted({*PROGRAMS, *REPLACED_LAUNCHERS}))
def test_a_command_with_a_launcher_runs_once_in_a_pod(name: str) -> None:
    assert may_start_launcher(parse_command(["bash", "-c", f"cd x && {name} run train.py"]), {})


@pytest.mark.parametrize("module", PATCHED)
def test_the_process_of_a_patched_launcher_becomes_the_worker(module: str) -> None:
    package = module.split(".", maxsplit=1)[0]
    assert module.startswith(PACKAGES)
    assert package == "torch" or package in PROGRAMS


def test_the_converter_knows_the_launchers_whose_process_becomes_the_worker() -> None:
    assert set(PROGRAMS) <= set(REPLACED_LAUNCHERS)
