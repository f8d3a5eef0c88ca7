"""The demo's timeline, computed from invented steps and statuses."""

from __future__ import annotations

from typing import Any

from rich.console import Console

from demo import timeline_table
from support.cluster.logbook import Step
from timeline import Action, Row, Snapshot, rows


def status(formed: str, size: int, **reasons: str) -> dict[str, Any]:
    conditions = [{"type": k, "reason": v} for k, v in reasons.items()]
    return {"lastRendezvousTime": f"1970-01-01T00:00:{formed}Z", "worldSize": size, "conditions": conditions}


def test_a_row_has_the_pause_the_recovery_time_and_the_status_changes() -> None:
    steps = [Step(t, "j-0-0", n, 1.0, w) for n, (t, w) in enumerate([(9, 3), (10, 3), (10.1, 3), (10.5, 2), (14, 3)])]
    snapshots = [
        Snapshot(5, status("05", 3, FullyScaled="AtDesiredReplicas")),
        Snapshot(10.4, status("10.4", 2, FullyScaled="BelowDesiredAboveMin", Restarting="PodEvicted")),
        Snapshot(13.8, status("13.8", 3, FullyScaled="AtDesiredReplicas", Restarting="WorldFormed")),
        Snapshot(15, status("13.8", 0, FullyScaled="AtDesiredReplicas", Restarting="WorldFormed")),
    ]
    (row,) = rows([Action(10.0, "delete", 3)], steps, snapshots)
    assert (round(row.next_step or 0, 3), round(row.pause or 0, 3), row.full_size) == (0.5, 0.4, 4.0)
    assert row.status == (
        "Restarting: PodEvicted → WorldFormed", "FullyScaled: BelowDesiredAboveMin → AtDesiredReplicas"
    )  # fmt: skip


def test_an_action_without_effect_has_no_figures() -> None:
    steps = [Step(t, "j-0-0", t, 1.0, 3) for t in range(20)]
    (row,) = rows([Action(10.0, "nothing", 3)], steps, [Snapshot(5, status("05", 3))])
    assert (row.next_step, row.pause, row.full_size, row.status) == (None, None, None, ())


def test_the_table_is_readable_on_80_columns() -> None:
    console = Console(width=80)
    status = ("RendezvousReady: StorePodPending → WorldFormed → Finished", "lastFailure: rank 2 in digits-2-0, SIGKILL")
    what = "kill elasticjob-node-2 (kubelet and all containers)"
    with console.capture() as capture:
        console.print(timeline_table([Row(Action(1.0, what, 3), 10.41, 12.43, 114.19, status)], "digits"))
    lines = capture.get().splitlines()
    assert max(map(len, lines)) <= 80
    assert [line.split()[-6:] for line in lines if "114.19" in line] == [["10.41", "s", "12.43", "s", "114.19", "s"]]
    assert "…" not in capture.get()
