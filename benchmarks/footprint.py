"""Memory of store and agent, the time until they are ready, and their wake-ups while a job is idle."""

from __future__ import annotations

import time
from pathlib import Path

from benchmarks.ours import Ours
from benchmarks.recovery import START
from benchmarks.rendezvous import EmptyStore, memory
from benchmarks.row import OURS, Row, Sample
from benchmarks.side import Size
from benchmarks.threads import thread_files

IDLE = 60.0


def store_memory(nodes: int) -> Row:
    """Return the row of the store's memory with this many nodes."""

    def measure(folder: Path) -> Sample:
        with EmptyStore(folder, Size(nodes, nodes)) as store:
            return Sample(store.crowd()["store MiB"])

    target = 40 if nodes == 4 else 150
    return Row(
        f"store-memory-{nodes}", f"store's memory with {nodes} nodes", "MiB", target, {OURS: measure}, {OURS: 3}, 10
    )


def exec_to_serving(folder: Path) -> Sample:
    """The time from the start of the store to its first report on the operator's link."""
    with Ours(folder) as side:
        began = side.start(0)
        side.wait_until_serving()
        return Sample(side.reports[0][0] - began)


def exec_to_joined(folder: Path) -> Sample:
    """The time from the start of an agent to its announcement at a running store. It has not imported torch by then."""
    with Ours(folder, Size(1, 1)) as side:
        side.start(0)
        side.wait_until_serving()
        began = side.add(0)
        if not side.output.wait(lambda: any(report.nodes for _, report in side.reports), 30, side.dead):
            return Sample(None, "not within 30 s")
        return Sample(next(at for at, report in side.reports if report.nodes) - began)


def idle(folder: Path) -> Sample:
    """Wake-ups of one agent in an idle minute; those of the store are a part.

    The worker pauses after its first steps, so that its output causes no wake-ups.
    """
    with Ours(folder, Size(1, 1)) as side:
        side.start(1)
        if not side.runs(1, START):
            return Sample(None, f"did not train within {START:g} s")
        (folder / "stuck-0").touch()
        time.sleep(2.0 + 3.0)  # the last step, then the pre-fork of workers after two idle seconds
        assert side.store is not None
        agent, store = side.agents[0].pid, side.store.pid
        before = {pid: switches(pid) for pid in (agent, store)}
        time.sleep(IDLE)
        woken = {pid: switches(pid) - before[pid] for pid in (agent, store)}
        parts = {"store": woken[store] * 60 / IDLE, "agent MiB": memory(agent), "store MiB": memory(store)}
        return Sample(woken[agent] * 60 / IDLE, parts=parts)


def switches(pid: int) -> int:
    """Return the voluntary context switches of all threads of a process."""
    total = 0
    for status in thread_files(pid, "status"):
        total += sum(int(line.split()[1]) for line in status.splitlines() if line.startswith("voluntary_ctxt_switches"))
    return total


ROWS = [
    store_memory(4),
    store_memory(1024),
    Row("store-serving", "store: from exec to serving", "s", 0.3, {OURS: exec_to_serving}, {OURS: 5}, 5),
    Row("agent-joined", "agent: from exec to joined", "s", 0.2, {OURS: exec_to_joined}, {OURS: 5}, 10),
    Row("idle", "agent: wake-ups in an idle minute", "", 0, {OURS: idle}, {OURS: 1}, 75),
]
