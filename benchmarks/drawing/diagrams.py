"""Diagrams of how elasticjob works: its rooms, the parts of a job, a failure, a planned end, state, store. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.drawing.svg import Picture
from benchmarks.row import BEST, OURS

_PHASES = (
    ("detect", "notice", "red"), ("stop", "stop the others", "amber"), ("rendezvous", "agree on a round", "violet"),
    ("start", "start", "blue"), ("import", "imports", "grey"), ("first step", "first step", "green"),
)  # fmt: skip


def parts() -> str:
    """Return the parts of a job in a cluster."""
    p = Picture(920, 440, "The parts of a job in a cluster")
    p.label(20, 30, "The parts of a job in a cluster", bold=True, size=16)
    p.titled_box(20, 60, 190, 60, ["API server", "your ElasticJob, its status"])
    p.titled_box(20, 210, 190, 80, ["operator", "one for the cluster:", "pods, status, restarts, end"], "violet")
    p.line(115, 208, 115, 124, arrow=True)
    p.line(95, 122, 95, 206, arrow=True)
    p.titled_box(310, 60, 190, 80, ["store pod", "coordinator: decides who", "trains together"], "amber")
    p.titled_box(310, 210, 190, 80, ["standby store", "on another Node,", "takes over by itself"], "grey")
    p.line(212, 235, 308, 120, arrow=True)
    p.label(208, 166, "view, report", size=12, faint=True)
    for number, y in enumerate((60, 240)):
        p.box(590, y, 310, 150, "box")
        p.label(605, y + 22, f"worker pod {number}", bold=True)
        p.titled_box(605, y + 34, 110, 100, ["agent", "starts and", "watches"], "blue")
        p.titled_box(765, y + 34, 120, 44, ["worker", "your script"], "green")
        p.titled_box(765, y + 90, 120, 44, ["worker", "your script"], "green")
        p.line(717, y + 56, 763, y + 56, arrow=True)
        p.line(717, y + 112, 763, y + 112, arrow=True)
        p.line(502, 100 if number == 0 else 120, 603, y + 84, arrow=True)
    p.line(825, 196, 825, 272, dashed=True)
    p.label(817, 229, "torch: NCCL, gloo", anchor="end", size=12, faint=True)
    p.note(
        420,
        "Training needs neither the operator nor the store: a round has a store of its own, in the agent of rank 0.",
    )
    return p.text()


def failure(results: Sequence[Mapping[str, Any]]) -> str:
    """Return the time lines of a killed worker: in process, by processes, and torchrun, as they were measured."""
    rows = {result["row"]: result["sides"] for result in results if "sides" in result}
    lanes = (
        ("in process: a rank raises", rows["raises-in-process"][OURS], 0.12),
        ("in process: a worker is killed", rows["killed-in-process"][OURS], 0.12),
        ("processes: a worker is killed", rows["worker-killed"][OURS], 0.12),
        ("torchrun, best settings: a worker is killed", rows["worker-killed"][BEST], 8.4),
    )
    p = Picture(920, 360, "From a fault to the next step, phase by phase")
    p.label(20, 30, "From the fault to the next step, phase by phase", bold=True, size=16)
    x = 20.0
    for _, name, colour in _PHASES:
        p.box(x, 44, 14, 14, colour, 3)
        p.label(x + 20, 56, name, size=12)
        x += 46 + 7 * len(name)
    for number, (name, side, scale) in enumerate(lanes):
        y = 92 + 66 * number
        p.label(20, y, name, size=13, bold=True)
        x = 20.0
        for phase, _, colour in _PHASES:
            width = side["parts"].get(phase, 0) / scale * 780
            if width >= 1:
                p.box(x, y + 8, width, 24, colour, 2)
            x += width
        p.label(x + 8, y + 25, f"{side['median']:.2g} s", size=13)
    p.note(348, "The last line has another scale: 70 times as many seconds in the same width.")
    return p.text()


def planned_end() -> str:
    """Return the time line of a planned end of three worker pods, of which one leaves."""
    p = Picture(920, 330, "A planned end: all ranks stop after the same step")
    p.label(20, 30, "A Node is drained: all ranks stop after the same step", bold=True, size=16)
    left, step = 150, 62
    for lane, (name, done) in enumerate((("pod 0", 5), ("pod 1", 5), ("pod 2, drained", 5))):
        y = 80 + 62 * lane
        p.label(20, y + 22, name, bold=lane == 2)
        for number in range(done):
            p.box(left + number * step, y, step - 4, 32, "green" if number < 4 else "blue", 3)
            p.label(left + number * step + 29, y + 21, str(40 + number), anchor="middle", size=12)
        p.box(left + done * step, y, 88, 32, "amber", 3)
        p.label(left + done * step + 44, y + 21, "save, stop", anchor="middle", size=12)
        if lane < 2:
            for number in range(4):
                x = left + done * step + 130 + number * step
                p.box(x, y, step - 4, 32, "green", 3)
                p.label(x + 29, y + 21, str(45 + number), anchor="middle", size=12)
        else:
            p.label(left + done * step + 140, y + 21, "the pod ends; nobody calls this a failure", size=13)
    p.line(left + 2.5 * step, 60, left + 2.5 * step, 254, dashed=True)
    p.label(left + 2.5 * step, 54, "SIGTERM to pod 2", anchor="middle", size=12, faint=True)
    p.line(left + 5 * step - 2, 60, left + 5 * step - 2, 254, dashed=True)
    p.label(left + 5 * step, 54, "last step of all: 44", anchor="middle", size=12, faint=True)
    p.line(left + 5 * step + 110, 254, left + 5 * step + 110, 72, dashed=True)
    p.label(left + 5 * step + 116, 54, "next round: two pods, step 45", size=12, faint=True)
    p.note(
        286,
        "The coordinator asks all agents for their step and chooses a step that no rank has passed.",
        "No step is lost or done twice. A script that reports no steps gets SIGTERM instead.",
    )
    return p.text()


def state() -> str:
    """Return where the training state lives, and what each place survives."""
    p = Picture(920, 300, "Where the training state lives")
    p.label(20, 30, "Where the training state lives, and what each place outlives", bold=True, size=16)
    places = (
        ("process", "your model, optimizer", "green", "an exception,", "with @restartable"),
        ("agent's memory", "same pod, after commit()", "blue", "the end of", "all its processes"),
        ("another pod's memory", "State: each pod has it", "violet", "the loss of", "a pod and its Node"),
        ("file", "path=, or your checkpoint", "amber", "the end of all pods:", "suspend, drain of all"),
    )
    for number, (name, what, colour, first, second) in enumerate(places):
        x = 20 + 228 * number
        p.titled_box(x, 60, 186, 76, [name, what], colour)
        p.label(x + 93, 172, "outlives", anchor="middle", size=12, faint=True)
        p.label(x + 93, 192, first, anchor="middle")
        p.label(x + 93, 212, second, anchor="middle")
        if number:
            p.line(x - 38, 98, x - 4, 98, arrow=True)
    p.note(
        252,
        "State.sync() takes the newest one that is left, and the process group carries it to ranks without it.",
        "A ShardedState has no file: each shard is in its own pod and in the next one.",
    )
    return p.text()


def store() -> str:
    """Return what happens when the job's store is lost."""
    p = Picture(920, 360, "The store is lost, and its standby takes over")
    p.label(20, 30, "The store is lost: training does not notice, and the standby takes over", bold=True, size=16)
    columns = ((20, "1. as usual"), (325, "2. the store's Node fails"), (630, "3. a moment later"))
    for x, title in columns:
        p.label(x, 66, title, bold=True)
        for number in range(3):
            p.titled_box(x + 92 * number, 240, 82, 50, [f"agent {number}", "trains"], "green")
        p.line(x + 84, 265, x + 90, 265)
        p.line(x + 176, 265, x + 182, 265)
    x = 20
    p.titled_box(x, 90, 125, 60, ["store 0", "coordinator"], "amber")
    p.titled_box(x + 145, 90, 125, 60, ["store 1", "passive"], "grey")
    x = 325
    p.titled_box(x, 90, 125, 60, ["store 0", "lost"], "red")
    p.titled_box(x + 145, 90, 125, 60, ["store 1", "waits for a majority"], "grey")
    x = 630
    p.titled_box(x, 90, 125, 60, ["store 1", "coordinator"], "amber")
    p.titled_box(x + 145, 90, 125, 60, ["store 2", "new, passive"], "grey")
    for number in range(3):
        p.line(20 + 92 * number + 41, 238, 82, 154, arrow=True)
        p.line(325 + 92 * number + 41, 238, 325 + 207, 154, arrow=True, dashed=True)
        p.line(630 + 92 * number + 41, 238, 692, 154, arrow=True)
    p.note(
        326,
        "The ranks of a round talk over a store of their own, in the agent of rank 0. With more than half of the",
        "round connected, the standby goes on with the same round. The operator then makes a new standby.",
    )
    return p.text()


def house() -> str:
    """Return the four programs with their rooms; rooms that only decide are violet."""
    p = Picture(920, 520, "The four programs and their rooms")
    p.label(20, 30, "The four programs and their rooms (violet: decides, without I/O)", bold=True, size=16)
    pure = {"plan", "model", "manifests", "rendezvous", "state_machine"}

    def room(x: float, y: float, name: str) -> None:
        p.box(x, y, 122, 38, "violet" if name in pure else "grey")
        p.label(x + 61, y + 24, name, anchor="middle")

    p.box(20, 50, 700, 150)
    p.label(34, 74, "operator: one for the cluster", size=13, bold=True)
    for number, name in enumerate(("watch", "queue", "observation", "plan", "reconcile")):
        room(30 + 138 * number, 90, name)
        if number:
            p.line(30 + 138 * number - 15, 109, 30 + 138 * number - 2, 109, arrow=True)
    room(442, 148, "model")
    p.line(498, 146, 498, 130, arrow=True)
    room(578, 148, "manifests")
    p.line(634, 146, 634, 130, arrow=True)
    p.titled_box(780, 82, 120, 54, ["API server"])
    p.line(706, 104, 776, 104, arrow=True)
    p.line(776, 118, 706, 118, arrow=True)
    p.box(20, 224, 290, 100)
    p.label(34, 248, "store pod, and its standby", size=13, bold=True)
    room(34, 264, "rendezvous")
    room(184, 264, "store_pod")
    p.line(158, 283, 182, 283)
    p.line(270, 202, 270, 262, arrow=True)
    p.line(284, 262, 284, 202, arrow=True)
    p.label(262, 216, "links: view, report", anchor="end", size=12, faint=True)
    p.box(340, 224, 560, 156)
    p.label(354, 248, "worker pod: the agent", size=13, bold=True)
    for number, name in enumerate(("state_machine", "runner", "workers", "start_workers")):
        room(354 + 138 * number, 264, name)
        if number:
            p.line(354 + 138 * number - 15, 283, 354 + 138 * number - 2, 283, arrow=True)
    room(492, 330, "monitoring")
    p.line(548, 328, 548, 304, arrow=True)
    p.line(308, 312, 338, 312, arrow=True)
    p.line(338, 320, 308, 320, arrow=True)
    p.label(290, 342, "control link", anchor="middle", size=12, faint=True)
    p.line(832, 304, 832, 408, arrow=True)
    p.label(824, 400, "fork, exec", anchor="end", size=12, faint=True)
    p.box(340, 410, 560, 90)
    p.label(354, 434, "worker: your script", size=13, bold=True)
    p.titled_box(354, 446, 530, 40, ["training, data, inprocess, frameworks"], "green")
    p.line(548, 444, 548, 370, arrow=True)
    p.label(556, 402, "contract: progress page", size=12, faint=True)
    return p.text()
