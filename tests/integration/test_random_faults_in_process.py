"""Faults drawn at random, one after the other, in a job with in-process restart: all steps are those of one process.

`make faults FAULTS=200 SEED=7` injects more of them, and others.
"""

from __future__ import annotations

import itertools
import random
from pathlib import Path

import pytest

from support.training.fault_draw import draw_incidents
from support.training.faulty_job import FaultyJob, possible_kinds

pytestmark = pytest.mark.torch
pytest.importorskip("torch")


@pytest.mark.timeout(900)
@pytest.mark.parametrize("queued_device", [pytest.param(False, marks=pytest.mark.deep), True])
def test_no_step_is_lost_or_wrong_whatever_happens(queued_device: bool, tmp_path: Path) -> None:
    """Some draws; `test_fault_kinds` has each kind of fault."""
    with FaultyJob(tmp_path, queued_device=queued_device) as job:
        for incident in itertools.islice(draw_incidents(random.Random(1), possible_kinds()), 6):
            print(job.inject(incident), flush=True)
        job.finish()
