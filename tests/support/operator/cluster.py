"""One job, an API server in memory, and a controller that is called only when it asked for it."""

from __future__ import annotations

from typing import Any

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.kube import JOBS
from elasticjob_operator.reconcile.controller import Controller
from elasticjob_operator.reconcile.events import Recorder
from elasticjob_operator.reconcile.keys import JobKeys
from support.operator.build import NOW, UID, raw_job
from support.operator.world import Api, FakeStoreLinks, World, job_status

KEY = ("ns", "bert")


class Cluster:
    """An API server with the job `bert`, and its controller; `spec` are fields of the job."""

    def __init__(self, **spec: Any) -> None:
        self.api = Api(NOW)
        self.api.put(JOBS, raw_job(**spec))
        self.world = World(self.api, {})
        links: Any = FakeStoreLinks(self.api, self.world.stores)
        self.recorder = Recorder(self.api, "me")
        self.controller = Controller(
            self.api, JobKeys(b"k" * 32), links, self.recorder, "image", clock=lambda: self.api.now
        )

    async def reconcile(self) -> float:
        """Reconcile; return the seconds after which the controller wants to reconcile again."""
        delay = await self.controller.reconcile(KEY)
        assert delay is not None
        return delay

    async def reconcile_for(self, seconds: float) -> list[float]:
        """Reconcile whenever the controller asked for it; return its delays."""
        end, delays = self.api.now + seconds, []
        while self.api.now < end:
            delays.append(await self.reconcile())
            self.api.now += delays[-1]
        return delays

    def change(self, **spec: Any) -> None:
        """Change fields of the job's spec."""
        job = self.api.objects[JOBS, "bert"]
        self.api.put(JOBS, {**job, "spec": {**job["spec"], **spec}})

    def running(self) -> dict[str, str]:
        """Return the job's condition `Running`."""
        found: dict[str, str] = next(c for c in job_status(self.api)["conditions"] if c["type"] == "Running")
        return found

    def workers(self) -> list[str]:
        """Return the names of the job's own worker pods."""
        own = [p["metadata"] for p in self.api.pods(Role.WORKER) if p["metadata"]["labels"][Label.JOB_UID] == UID]
        return sorted(meta["name"] for meta in own)
