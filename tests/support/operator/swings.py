"""An hour of virtual time in which an autoscaler changes a job's size without end, and what it costs the training.

The cluster has room for some of the pods only, nodes are lost and come back, agents are killed, and the operator is
restarted. A round makes one step a second. Training keeps its state as long as one member of a round is in the next
one, and else goes on from its last checkpoint.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass, field
from random import Random
from typing import Any

from elasticjob._runtime.contract.names import Label, Role
from elasticjob_operator.kube import JOBS
from support.operator.build import NOW, elastic, raw_job
from support.operator.process import ApiServer, run_virtual
from support.operator.scenarios import TICK, Simulation
from support.operator.world import Api, Node, World, is_deleting, job_indices, mark_deleted, number, phase

Raw = dict[str, Any]
Write = tuple[str, str, str]
"""Verb, plural and name."""

LOW, HIGH = 1, 6
SECONDS = 3600.0
CHECKPOINT = 600.0
"""Seconds between two checkpoints."""
EXPLAINED_SECONDS = 120.0
"""Seconds after a fault in which pods may be replaced because of it."""


@dataclass
class Ledger:
    """What the training has gained and lost so far, in steps."""

    done: int = 0
    """Steps of all rounds, those that were lost later included."""
    lost: int = 0
    """Steps that were made again, because no member of the last round was left."""
    idle: int = 0
    """Steps that were not made, because no round ran although the cluster had room for a node."""
    pods: int = 0
    """Worker pods that the operator created."""
    broken: list[str] = field(default_factory=list)
    """Which invariants did not hold, and when."""


class Swings(Simulation):
    """The job `bert` and an autoscaler; `faults`: whether anything else happens to the job."""

    def __init__(self, seed: int, *, faults: bool) -> None:
        api = Api(NOW)
        job = raw_job(**elastic(LOW, HIGH, 3))
        job["spec"]["elasticPolicy"]["faultyScaleDownSeconds"] = 60
        api.put(JOBS, job)
        world = World(api, {f"n{n}": Node(f"n{n}") for n in range(1, 5)}, room=4, plans_ends=True)
        super().__init__(api, world, ApiServer(api))
        self.random, self.faults, self.ledger = Random(seed), faults, Ledger()
        self._next_swing = self._next_fault = NOW + 30
        self._explained_until = NOW + 30
        """Until when a pod may be created for another reason than that the job lacks one."""
        self._last_members: frozenset[str] = frozenset()
        self._since_checkpoint = 0
        self._cut_until: dict[str, float] = {}

    async def play(self) -> None:
        """Let the hour pass."""
        try:
            while self.api.now < NOW + SECONDS:
                self._swing()
                self._fail()
                await self.tick()
                self._train()
        finally:
            await self.stop()

    async def _run_operator(self, seconds: float, reachable: bool) -> None:
        before = {pod["metadata"]["name"]: self._use(pod) for pod in self._pods()}
        members, written = frozenset(self._members()), len(self.server.applied)
        await super()._run_operator(seconds, reachable)
        self._check_writes(before, members, self.server.applied[written:])

    # -- what happens

    def _swing(self) -> None:
        """The autoscaler asks for another size: it follows a load that swings, as it sees it."""
        if self.api.now < self._next_swing or self.job is None:
            return
        self._next_swing = self.api.now + self.random.uniform(15, 90)
        size = self.random.randint(LOW, HIGH)
        if size > self.job["spec"]["replicas"]:
            self._explained_until = self.api.now + EXPLAINED_SECONDS
        self.world.scale(size)

    def _fail(self) -> None:
        for name in [n for n, until in self._cut_until.items() if self.api.now >= until]:
            self.world.nodes[name].cut = False
            del self._cut_until[name]
        if not self.faults or self.api.now < self._next_fault:
            return
        self._next_fault = self.api.now + self.random.uniform(30, 120)
        self._explained_until = self.api.now + EXPLAINED_SECONDS
        kind = self.random.choice(("room", "room", "room", "cut", "drained", "operator"))
        pods = [pod for pod in self._pods() if phase(pod) == "Running"]
        if kind == "room":
            self.world.room = self.random.randint(2, HIGH - 1)
            self._evict_beyond_room(pods)
        elif kind == "cut" and not self._cut_until:
            name = self.random.choice(list(self.world.nodes))
            self.world.nodes[name].cut, self._cut_until[name] = True, self.api.now + 60
        elif kind == "drained" and pods:
            mark_deleted(self.random.choice(pods), self.api.now)
        elif self._operator is not None:
            self._operator.connection.killed = True

    def _evict_beyond_room(self, pods: list[Raw]) -> None:
        """Pods of a higher priority take the room of some pods, whatever these do."""
        self.random.shuffle(pods)
        for pod in pods[self.world.room :]:
            mark_deleted(pod, self.api.now)

    # -- what it costs

    def _train(self) -> None:
        members = frozenset(self._members())
        if not members:
            self.ledger.idle += bool(self.world.room)
            return
        if self._last_members.isdisjoint(members) and self._last_members:
            self.ledger.lost += self._since_checkpoint
            self._since_checkpoint = 0
        self.ledger.done += 1
        self._since_checkpoint = (self._since_checkpoint + 1) % int(CHECKPOINT / TICK)
        self._last_members = members

    # -- what must be true

    def _check_writes(self, before: dict[str, int], members: frozenset[str], writes: Sequence[Write]) -> None:
        """Check the operator's writes of one second; `before` is the use of each pod before them."""
        workers = [(verb, name) for verb, kind, name in writes if kind == "pods" and "-rdzv-" not in name]
        replicas = self.job["spec"]["replicas"] if self.job else 0
        indices = job_indices(self.api, replicas)
        gone = {name for verb, name in workers if verb == "DELETE" and int(name.split("-")[1]) not in indices}
        stays = [use for name, use in before.items() if name not in gone and int(name.split("-")[1]) in indices]
        for name in gone & before.keys():
            if stays and before[name] > min(stays):
                self._broken(f"{name} goes, which is worth more than one that stays: {before}")
        if members and gone & members and len(members) <= replicas and not self._is_lossy(gone):
            self._broken(f"{sorted(gone & members)} train, and the round of {len(members)} is within {replicas}")
        self.ledger.pods += sum(verb == "POST" for verb, _ in workers)
        created = [name for verb, name in workers if verb == "POST"]
        if created and self.api.now > self._explained_until and not self._lacks_pods(created):
            self._broken(f"{created} are created although the job lacks none")

    def _is_lossy(self, gone: set[str]) -> bool:
        """Return whether one of these pods goes for another reason than the size of the job."""
        return any(self.world.nodes[node].cut for node in self._nodes_of(gone))

    def _nodes_of(self, names: set[str]) -> set[str]:
        return {
            pod["spec"]["nodeName"]
            for pod in self.api.pods(Role.WORKER)
            if pod["metadata"]["name"] in names and pod["spec"].get("nodeName")
        }

    def _lacks_pods(self, created: list[str]) -> bool:
        """Return whether a pod of one of the indices was lost, or the job has found room for missing pods."""
        old = [number(p, Label.INDEX) for p in self.api.pods(Role.WORKER) if is_deleting(p) or phase(p) == "Failed"]
        return any(int(name.split("-")[1]) in old for name in created) or any(self._cut_until)

    def _broken(self, what: str) -> None:
        self.ledger.broken.append(f"after {self.api.now - NOW:.0f} s: {what}")

    # -- what there is

    def _pods(self) -> list[Raw]:
        """Return the live worker pods."""
        pods = self.api.pods(Role.WORKER)
        return [pod for pod in pods if phase(pod) in ("Pending", "Running") and not is_deleting(pod)]

    def _members(self) -> list[str]:
        return [name for store in self.world.serving() for name in store.members]

    def _use(self, pod: Raw) -> int:
        """Return what a pod does: 2 if it trains, 1 if a node has it, else 0."""
        name, node = pod["metadata"]["name"], pod["spec"].get("nodeName")
        if node is None:
            return 0
        return 2 if name in self._members() and not self.world.nodes[node].cut else 1


def play_swings(seed: int, *, faults: bool) -> Ledger:
    """Play an hour, and return what it has cost."""
    sim = Swings(seed, faults=faults)
    run_virtual(sim.api, _main(sim))
    return sim.ledger


async def _main(sim: Swings) -> None:
    await sim.play()
    await asyncio.sleep(0)
