"""`make demo-queues`: two elastic jobs share the quota of two queues of the real Kueue, and give pods up as they train.

What happens, with the time until Kueue has admitted what asked for quota, and the longest pause between two steps of
the job that gave it up, is printed at the end.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path[:0] = [str(ROOT / "tests"), str(Path(__file__).parent)]

from rich import box  # noqa: E402
from rich.table import Table  # noqa: E402

from demo import NAMESPACE, console, prepare  # noqa: E402
from support.cluster.jobs import Job  # noqa: E402
from support.cluster.kube import Json, Kube  # noqa: E402
from support.cluster.logbook import LogBook  # noqa: E402
from support.cluster.steps import elastic_job, queues, urgent_job, wait_admitted  # noqa: E402

RESEARCH, PRODUCT, NOMINAL = "research", "product", 2
"""The two queues, and for how many pods each has quota of its own. Each lends the other what it does not use."""


@dataclass
class Story:
    """The job `bert`, whose pods come and go, and what has happened so far."""

    kube: Kube
    bert: Job
    book: LogBook
    rows: list[tuple[str, str, str, str]] = field(default_factory=list)

    def tell(self, what: str, action: Callable[[], object], *, pods: int, admitted: str = "") -> None:
        """Do something; wait until Kueue has admitted the job `admitted`, and until `bert` trains on so many pods."""
        console.print(f"[bold red]>>>[/] {what}")
        first = self.book.steps[-1].time if self.book.steps else 0.0
        begin, moment = time.monotonic(), time.time()
        action()
        waited = "-"
        if admitted:
            wait_admitted(self.kube, NAMESPACE, admitted)
            waited = f"{time.monotonic() - begin:.2f} s"
        step = self.book.wait_steps_after(moment, world=pods, timeout=180)
        self.book.wait_step(step.step + 20, timeout=120)
        times = sorted(s.time for s in self.book.steps if s.time >= first) if first else []
        pause = max((later - earlier for earlier, later in pairwise(times)), default=0.0)
        self.rows.append((what, str(pods), waited, f"{pause:.2f} s" if first else "-"))
        console.print(f"    bert trains on {pods} pod{'s' if pods > 1 else ''}")


def play(kube: Kube) -> bool:
    """Let the jobs come and go, and print the table. Return whether no step was lost."""
    bert = Job(kube, NAMESPACE, "bert")
    with LogBook(kube, NAMESPACE, "bert") as book:
        story = Story(kube, bert, book)

        def apply(body: Json) -> Callable[[], object]:
            return lambda: kube.create("elasticjobs", body, NAMESPACE)

        def delete(name: str) -> Callable[[], object]:
            return lambda: kube.delete("elasticjobs", name, NAMESPACE)

        story.tell(
            "bert starts in research, and borrows what product does not use",
            apply(elastic_job("bert", RESEARCH, 1, 4)), pods=4, admitted="bert",
        )  # fmt: skip
        story.tell(
            "gpt starts in product, which takes its quota back",
            apply(elastic_job("gpt", PRODUCT, 1, 2)), pods=2, admitted="gpt",
        )  # fmt: skip
        story.tell(
            "an urgent job of one pod starts in research",
            apply(urgent_job("urgent", RESEARCH)), pods=1, admitted="urgent",
        )  # fmt: skip
        story.tell("the urgent job ends", delete("urgent"), pods=2)
        story.tell("gpt ends", delete("gpt"), pods=4)
        status, steps = bert.status(), {s.step for s in book.steps}
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in ("what happens", "pods of bert", "admitted after", "longest pause of bert"):
        table.add_column(column, justify="left" if column == "what happens" else "right", overflow="fold")
    for row in story.rows:
        table.add_row(*row)
    console.print(table)
    lost = max(steps) - len(steps)
    console.print(
        f"bert: {max(steps)} steps, {lost} lost; {status['restarts']} restarts, {status['executionAttempts']} execution"
    )
    return lost == 0


def main() -> int:
    begin = time.time()
    kube, cluster_dir = prepare()
    console.print("[bold]helm upgrade --install kueue[/]")
    with queues(kube, cluster_dir, NAMESPACE, (RESEARCH, PRODUCT), NOMINAL, cohort="all"):
        kept_all = play(kube)
    console.print(f"the whole demo took {time.time() - begin:.0f} s")
    return 0 if kept_all else 1


if __name__ == "__main__":
    sys.exit(main())
