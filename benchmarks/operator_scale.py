"""`make bench-operator`: the operator at a thousand jobs, with a real API server and simulated pods.

The operator is the real process with its defaults, and so are etcd and kube-apiserver. One process plays all the rest:
scheduler, kubelets, stores and nodes (`simulated_pods`). They share the machine's cores.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import os
import sys
import tempfile
import time
from collections.abc import Awaitable, Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import yaml

from benchmarks import machine, operator_peer, report
from benchmarks.api_server import api_server
from benchmarks.crowd import cpu_seconds
from benchmarks.goodput import quantile
from benchmarks.kube_requests import Json, KubeRequests
from benchmarks.operator_process import NAMESPACE as SYSTEM
from benchmarks.operator_process import QUIET_SECONDS, OperatorProcess, by_verb, mutating, share_of_limit, total
from benchmarks.rendezvous import memory
from benchmarks.row import OURS, Row, Sample
from benchmarks.run import exit_on_sigterm, format_value, save
from benchmarks.simulated_pods import NAMESPACE, SimulatedPods, jobs_path
from elasticjob._runtime.store.open_files import raise_open_file_limit
from elasticjob_operator.settings import OperatorSettings
from support.common.ports import free_ports

JOBS = 1000
"""Jobs of the rows in docs/contribute/benchmarks.md."""
WORKERS = 4
FAILURES = 200
FAILURE_EVERY = 0.25
"""Seconds from one failure to the next."""
IDLE_SECONDS = 60.0
IDLE_ATTEMPTS = 3
"""Minutes of which the first without a list counts, else the last."""
LIMIT = 600.0
"""Seconds that a step may take."""
OTHER_NAMESPACE = "other-tenant"
CRD = Path(__file__).parents[1] / "crds/elasticjobs.yaml"
BUSY = 1.0
"""Load average from which on a sample says that other programs ran."""


PEER_ROW = "operator-pods"
"""The row that has other sides."""
FAIR_ROW = "operator-fair"


@dataclass(frozen=True)
class Goal:
    """What a row must reach; `{jobs}` in its title is the number of jobs."""

    title: str
    want: float | None
    unit: str
    more_is_better: bool = False
    note: str = ""


ROWS = {
    "operator-create": Goal(
        f"{{jobs}} jobs of {WORKERS} pods applied at once: requests until all pods exist, of those that the rate limit "
        "allows",
        95.0,
        "%",
        more_is_better=True,
    ),
    PEER_ROW: Goal(
        f"{{jobs}} jobs of {WORKERS} pods applied at once: pods created a second",
        None,
        "/s",
        more_is_better=True,
        note="Ours also creates two stores a job, which do not count. training-operator runs first, and its jobs are "
        "deleted before ours are created. It has our default limit of requests and number of workers, but as shipped: "
        "there it has its own, 20 requests a second for each client and 1 worker, and a fifth of the jobs.",
    ),
    FAIR_ROW: Goal(
        "{jobs} jobs applied at once, then one in another namespace: its first pod exists",
        2.0,
        "s",
        note="The jobs of both namespaces are those of the first rows.",
    ),
    "operator-requests": Goal(
        f"requests of the life of a job of {WORKERS} pods",
        30.0,
        "",
        note="From its creation until it is Complete and its stores are gone, by the operator's own metric.",
    ),
    "operator-mutating": Goal(
        f"requests of the life of a job of {WORKERS} pods that change the API, without Events", WORKERS + 14.0, ""
    ),
    "operator-replacement": Goal("a pod fails: its replacement is created, p99 with {jobs} jobs", 1.0, "s"),
    "operator-memory": Goal("memory of the operator with {jobs} jobs, peak", 250.0, "MB"),
    "operator-restarted": Goal(
        "operator restarted with {jobs} jobs: all stores have its view",
        15.0,
        "s",
        note="From SIGTERM. No job restarts, and no pod is created.",
    ),
    "operator-idle-processor": Goal(
        "{jobs} idle jobs: processor",
        2.0,
        "% of a core",
        note="For a minute without a list of all jobs and pods: a new leader lists them again 30 s after its watch "
        "began, and then every 5 minutes.",
    ),
    "operator-idle-requests": Goal("{jobs} idle jobs: requests in a minute, without Leases", 0.0, ""),
    "operator-large-job": Goal(
        "a job of {jobs} pods, then at once {small} small ones: all pods of the small ones exist", None, "s"
    ),
}


@dataclass
class Run:
    """One operator and its jobs. Each step returns a sample for some of the rows."""

    api: KubeRequests
    pods: SimulatedPods
    operator: OperatorProcess
    jobs: int
    port: int
    """On which the stores listen."""

    @property
    def names(self) -> list[str]:
        return [f"job-{number}" for number in range(self.jobs)]

    async def live(self) -> dict[str, Sample]:
        """Run one job from its creation to its end."""
        before = await self.operator.wait_until_quiet(LIMIT)
        await self._apply([self._job("single", WORKERS)])
        await self.pods.until("the job runs", lambda: self._run(["single"]), LIMIT)
        await self.operator.wait_until_quiet(LIMIT)
        self.pods.succeed("single")
        await self.pods.until("the job is complete", lambda: self._is_complete("single"), LIMIT)
        used = await self.operator.wait_until_quiet(LIMIT) - before
        parts = by_verb(used)
        return {
            "operator-requests": Sample(total(used), parts=parts),
            "operator-mutating": Sample(mutating(used)),
        }

    async def create(self) -> dict[str, Sample]:
        """Apply all jobs at once and wait until they run."""
        before, known, began = await self.operator.requests(), len(self.pods.created), time.monotonic()
        processor = cpu_seconds(self.operator.pid)
        await self._apply([self._job(name, WORKERS) for name in self.names])
        applied = time.monotonic() - began
        first_pod, before_it = await self._first_pod_of_other(), len(self.pods.created) - known
        wanted = known + self.jobs * WORKERS
        await self.pods.until("all pods exist", lambda: len(self.pods.created) >= wanted, LIMIT)
        used, seconds = await self.operator.requests() - before, time.monotonic() - began
        processor = cpu_seconds(self.operator.pid) - processor
        defaults = OperatorSettings("", "", "")
        share = share_of_limit(total(used), seconds, rate=defaults.qps, burst=defaults.burst)
        await self.pods.until("all jobs run", lambda: self._run(self.names), LIMIT)
        parts = {
            "seconds": seconds,
            "seconds of processor": processor,
            "pods a second": self.jobs * WORKERS / seconds,
            "requests a job": total(used) / self.jobs,
            "seconds until all were applied": applied,
            "seconds until all run": time.monotonic() - began,
            **by_verb(used),
        }
        await self.operator.wait_until_quiet(LIMIT)
        pods = {name: parts[name] for name in ("seconds", "seconds of processor", "requests a job")}
        return {
            "operator-create": Sample(share, parts=parts),
            PEER_ROW: Sample(parts["pods a second"], parts=pods),
            FAIR_ROW: Sample(first_pod, parts={"pods of the others until then": float(before_it)}),
        }

    async def _first_pod_of_other(self) -> float:
        """Apply a job in another namespace; return the seconds until it has a pod, and delete the job."""
        job = self._job("alone", WORKERS, OTHER_NAMESPACE)
        began = time.monotonic()
        await self.api.request("POST", jobs_path(OTHER_NAMESPACE), job)
        async with asyncio.timeout(LIMIT):
            async for _ in self.api.watch(f"/api/v1/namespaces/{OTHER_NAMESPACE}/pods"):
                break
        seconds = time.monotonic() - began
        await self.api.request("DELETE", f"{jobs_path(OTHER_NAMESPACE)}/alone")
        return seconds

    async def replace(self) -> dict[str, Sample]:
        """Let a pod fail in one job after the other."""
        before = await self.operator.requests()
        failed: dict[str, float] = {}
        for name in self.names[:FAILURES]:
            node = self.pods.node(name, 1)
            failed[f"{name}-1-{node.incarnation + 1}"] = await self.pods.fail(node)
            await asyncio.sleep(FAILURE_EVERY)
        created = self.pods.created
        await self.pods.until("all failed pods are replaced", lambda: failed.keys() <= created.keys(), LIMIT)
        seconds = sorted(created[pod] - failed[pod] for pod in failed)
        await self.pods.until("all jobs run", lambda: self._run(self.names), LIMIT)
        used = await self.operator.wait_until_quiet(LIMIT) - before
        parts = {"p50": quantile(seconds, 0.5) or 0.0, "longest": seconds[-1], "failures": float(len(seconds))}
        parts["requests a failure"] = total(used) / len(seconds)
        peak, now = memory(self.operator.pid) * 2**20 / 1e6, resident(self.operator.pid) / 1e6
        return {
            "operator-replacement": Sample(quantile(seconds, 0.99), parts=parts),
            "operator-memory": Sample(peak, parts={"once it has nothing to do": now}),
        }

    async def restart(self) -> dict[str, Sample]:
        """End the operator and start it again."""
        before = self._generations()
        restarts, pods = self._restarts(), set(self.pods.pods)
        began = time.monotonic()
        await self.operator.stop()
        stopped = time.monotonic() - began
        self.operator.start()
        await self.pods.until("all stores have a view", lambda: self._followed(before), LIMIT)
        seconds = time.monotonic() - began
        used = await self.operator.wait_until_quiet(LIMIT)
        parts = {"until it had stopped": stopped, "requests a job": total(used) / self.jobs}
        parts["until it had nothing to do"] = time.monotonic() - QUIET_SECONDS - began
        more, made = self._restarts() - restarts, sorted(set(self.pods.pods) - pods)
        if more or made:
            raise AssertionError(f"{more} restarts, {len(made)} pods were created: {', '.join(made[:5])}")
        return {"operator-restarted": Sample(seconds, parts=parts)}

    async def idle(self) -> dict[str, Sample]:
        """Watch jobs that need nothing, for a minute in which the operator lists nothing."""
        for _ in range(IDLE_ATTEMPTS):
            before, processor = await self.operator.wait_until_quiet(LIMIT), cpu_seconds(self.operator.pid)
            await asyncio.sleep(IDLE_SECONDS)
            share = 100 * (cpu_seconds(self.operator.pid) - processor) / IDLE_SECONDS
            used = await self.operator.requests() - before
            if not any(verb == "list" for verb, _ in used):
                break
        return {
            "operator-idle-processor": Sample(share),
            "operator-idle-requests": Sample(total(used), parts=by_verb(used)),
        }

    async def mix(self) -> dict[str, Sample]:
        """Apply a large job, and at once many small ones."""
        small = [f"small-{number}" for number in range(small_jobs(self.jobs))]
        began = time.monotonic()
        await self._apply([self._job("large", self.jobs)])
        await self._apply([self._job(name, WORKERS) for name in small])
        wanted = {f"{name}-{index}-0" for name in small for index in range(WORKERS)}
        created = self.pods.created
        await self.pods.until("the small jobs have their pods", lambda: wanted <= created.keys(), LIMIT)
        large = {f"large-{index}-0" for index in range(self.jobs)}
        await self.pods.until("the large job has its pods", lambda: large <= created.keys(), LIMIT)
        last = max(created[pod] for pod in wanted) - began
        parts = {"until the large one has its pods": max(created[pod] for pod in large) - began}
        return {"operator-large-job": Sample(last, parts=parts)}

    async def _apply(self, jobs: Iterable[Json]) -> None:
        await asyncio.gather(*(self.api.request("POST", jobs_path(NAMESPACE), job) for job in jobs))

    def _job(self, name: str, workers: int, namespace: str = NAMESPACE) -> Json:
        container = {"name": "trainer", "image": "example.org/train:1", "command": ["python", "train.py"]}
        spec = {
            "replicas": workers,
            "elasticPolicy": {"minReplicas": max(1, workers // 2), "maxReplicas": workers},
            "rendezvous": {"port": self.port},
            "template": {"spec": {"containers": [container]}},
        }
        return {
            "apiVersion": "elasticjob.dev/v1alpha1",
            "kind": "ElasticJob",
            "metadata": {"name": name, "namespace": namespace},
            "spec": spec,
        }

    # ---- what the watches have delivered

    def _run(self, names: Sequence[str]) -> bool:
        """Return whether all these jobs run at full size, beside a standby store."""
        statuses = [self.pods.jobs.get(name, {}).get("status", {}) for name in names]
        return all(
            status.get("worldSize") == status.get("targetReplicas") and "standby" in status.get("rendezvous", {})
            for status in statuses
        )

    def _is_complete(self, name: str) -> bool:
        conditions = self.pods.jobs[name].get("status", {}).get("conditions", [])
        complete = any(c["type"] == "Complete" and c["status"] == "True" for c in conditions)
        return complete and self.pods.serving_store(name) is None

    def _restarts(self) -> int:
        return sum(int(job.get("status", {}).get("restarts", 0)) for job in self.pods.jobs.values())

    def _generations(self) -> dict[str, int]:
        """Return the generation of the view that each job's store has; -1 without one.

        They differ: an operator raises the generation of one job's views if the store has one from before.
        """
        stores = {name: self.pods.serving_store(name) for name in self.names}
        return {name: -1 if store is None else store.view_generation for name, store in stores.items()}

    def _followed(self, before: Mapping[str, int]) -> bool:
        return all(generation > before[name] for name, generation in self._generations().items())


STEPS: dict[Callable[[Run], Awaitable[dict[str, Sample]]], tuple[str, ...]] = {
    Run.live: ("operator-requests", "operator-mutating"),
    Run.create: ("operator-create", PEER_ROW, FAIR_ROW),
    Run.replace: ("operator-replacement", "operator-memory"),
    Run.restart: ("operator-restarted",),
    Run.idle: ("operator-idle-processor", "operator-idle-requests"),
    Run.mix: ("operator-large-job",),
}
"""The steps in their order, and the rows of each."""


def resident(pid: int) -> int:
    """Return the resident memory of a process in bytes."""
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE")


def small_jobs(jobs: int) -> int:
    """Return the number of small jobs beside a large one."""
    return max(1, jobs // 10)


async def measure(folder: Path, jobs: int, rows: Sequence[str]) -> tuple[dict[str, Sample], dict[str, Sample]]:
    """Return a sample of each of these rows, and those of the other sides of PEER_ROW. Any row needs all jobs.

    A step that fails ends the run: its rows have no value, those after it no sample.
    """
    raise_open_file_limit()
    with api_server(folder) as server:
        async with KubeRequests(server) as api:
            master = await prepare(api)
            others: dict[str, Sample] = {}
            if PEER_ROW in rows and (peer := operator_peer.find()).built:
                others = await operator_peer.measure_peer(peer, server, api, folder, jobs, WORKERS)
                _print(others, PEER_ROW)
            pods, operator = SimulatedPods(api, master), OperatorProcess(server, folder)
            await pods.start()
            operator.start()
            try:
                return await _steps(Run(api, pods, operator, jobs, free_ports(1)[0]), rows), others
            finally:
                await operator.stop()
                await pods.close()


async def _steps(run: Run, wanted: Sequence[str]) -> dict[str, Sample]:
    found: dict[str, Sample] = {}
    for step, rows in STEPS.items():
        chosen = [row for row in rows if row in wanted]
        if not chosen and step is not Run.create:
            continue
        try:
            samples = await step(run)
        except Exception as error:
            problem = f"{type(error).__name__}: {error} {error.__cause__ or ''}".strip()
            return found | {row: Sample(None, problem[:300]) for row in chosen or wanted if row not in found}
        samples = {row: sample for row, sample in samples.items() if row in chosen}
        for row, sample in samples.items():
            _print({row: sample}, row)
        found |= samples
    return found


def _print(samples: Mapping[str, Sample], row: str) -> None:
    for name, sample in samples.items():
        split = ", ".join(f"{part} {value:.3g}" for part, value in sample.parts.items())
        print(f"  {name:40} {format_value(sample.value, ROWS[row].unit):16} [{split}] {sample.note}", flush=True)


async def prepare(api: KubeRequests) -> bytes:
    """Wait for the API server and create what the operator needs. Return its master key."""
    await api.until_answered("/api/v1/namespaces/kube-node-lease")
    await api.create_namespace(SYSTEM)
    await api.create_namespace(NAMESPACE)
    await api.create_namespace(OTHER_NAMESPACE)
    master = os.urandom(32)
    secret = {
        "metadata": {"name": OperatorSettings.master_secret, "namespace": SYSTEM},
        "data": {"key": base64.b64encode(master).decode()},
    }
    await api.request("POST", f"/api/v1/namespaces/{SYSTEM}/secrets", secret)
    await api.define(yaml.safe_load(CRD.read_text()), jobs_path(NAMESPACE))
    return master


def main() -> int:
    options = _options()
    exit_on_sigterm()
    description = machine.describe()
    load = os.getloadavg()[0]
    busy = f"other programs ran: load average {load:.1f} before the run" if load >= BUSY else ""
    begin = time.monotonic()
    with tempfile.TemporaryDirectory(prefix="elasticjob-bench-", ignore_cleanup_errors=True) as folder:
        samples, others = asyncio.run(measure(Path(folder), options.jobs, options.rows))
    took = time.monotonic() - begin
    for name, sample in samples.items():
        goal = ROWS[name]
        title = goal.title.format(jobs=options.jobs, small=small_jobs(options.jobs))
        sides = {OURS: sample, **(others if name == PEER_ROW else {})}
        print(f"{title:110} {_comparison(sides, goal.unit)} {sample.note}", flush=True)
        if options.jobs == JOBS and sample.value is not None:
            row = Row(name, title, goal.unit, goal.want, {}, {}, 0, goal.more_is_better, goal.note)
            noted = {side: [_noted(found, busy)] for side, found in sides.items()}
            save(row, noted, description, took, "make bench-operator")
    if PEER_ROW in options.rows and not others:
        print(operator_peer.MISSING)
    if options.jobs == JOBS:
        report.write()
    measured = all(sample.value is not None for sample in (*samples.values(), *others.values()))
    return 0 if measured and len(samples) == len(options.rows) else 1


def _noted(sample: Sample, busy: str) -> Sample:
    return replace(sample, note="; ".join(text for text in (sample.note, busy) if text))


def _comparison(sides: Mapping[str, Sample], unit: str) -> str:
    """Return our figure; then the others', each with how many times as high ours is."""
    ours = sides[OURS].value
    texts = [format_value(ours, unit)]
    for side, sample in sides.items():
        if side != OURS:
            ratio = f", ours {ours / sample.value:.2f} times" if ours and sample.value else ""
            texts.append(f"{side}: {format_value(sample.value, unit)}{ratio}")
    return "; ".join(texts)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.operator_scale", description=__doc__)
    parser.add_argument("--jobs", type=int, default=JOBS, help=f"only with {JOBS} jobs are figures saved")
    parser.add_argument("--rows", type=_rows, default=tuple(ROWS), help=f"comma-separated, of {', '.join(ROWS)}")
    return parser.parse_args()


def _rows(text: str) -> tuple[str, ...]:
    rows = tuple(filter(None, text.split(",")))
    if unknown := set(rows) - ROWS.keys():
        raise argparse.ArgumentTypeError(f"no such row: {', '.join(sorted(unknown))}")
    return rows


if __name__ == "__main__":
    sys.exit(main())
