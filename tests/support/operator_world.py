"""A small Kubernetes with kubelets and job stores, at the seams of the operator: for exploring what it does.

Nothing here waits or does I/O. What the API server guarantees is kept: uids, resource versions, preconditions, names
that are taken, deletion with grace. What nobody guarantees is left to the moves of a test.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from elasticjob.contract import codec
from elasticjob.contract.messages import (
    EndReason,
    Failure,
    FailureClass,
    NodeReport,
    OperatorView,
    Outcome,
    PodState,
    Report,
    RoundEnded,
    RoundPhase,
    Termination,
)
from elasticjob.contract.names import Label, Role, RoundId
from elasticjob_operator.kube import (
    JOBS,
    LEASES,
    PODS,
    AlreadyExists,
    Conflict,
    NotFound,
    Refused,
    Resource,
)
from elasticjob_operator.model.observed import LinkView
from elasticjob_operator.model.raw import timestamp
from elasticjob_operator.plan import StoreAddress

Raw = dict[str, Any]


class Crash(BaseException):
    """The operator's process ends here."""


@dataclass
class Api:
    """An API server. `crash_in` counts mutating calls; `committed` says on which side of the last one the crash is."""

    now: float
    objects: dict[tuple[Resource, str], Raw] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Mutating calls: verb, plural, name. Events apart."""
    quota: int | None = None
    """How many pods may exist."""
    crash_in: int | None = None
    committed: bool = False
    _version: int = 0

    def pods(self, role: Role) -> list[Raw]:
        """Pods of a role that the job owns, live or not."""
        found = [o for (r, _), o in self.objects.items() if r is PODS and o["metadata"].get("ownerReferences")]
        return [o for o in found if o["metadata"]["labels"][Label.ROLE] == role.value]

    def put(self, resource: Resource, body: Mapping[str, Any]) -> Raw:
        """Store an object as the server would, without asking anybody."""
        self._version += 1
        stored = copy.deepcopy(dict(body))
        meta = stored["metadata"]
        meta.setdefault("uid", f"uid-{self._version}")
        meta.setdefault("creationTimestamp", timestamp(self.now))
        meta["resourceVersion"] = str(self._version)
        self.objects[resource, meta["name"]] = stored
        return stored

    def remove(self, resource: Resource, name: str) -> None:
        self.objects.pop((resource, name), None)

    # -- KubeApi

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Raw:
        return copy.deepcopy(self._found(resource, name))

    async def list(self, resource: Resource, namespace: str | None, selector: str = "") -> list[Raw]:
        key, _, value = selector.partition("=")
        found = [o for (r, _), o in self.objects.items() if r is resource]
        return [copy.deepcopy(o) for o in found if o["metadata"].get("labels", {}).get(key) == value]

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Raw:
        name = body["metadata"]["name"]
        self._call("create", resource, name)
        if (resource, name) in self.objects:
            raise AlreadyExists(f"{resource.plural} {name} already exists", 409)
        if resource is PODS and self.quota is not None and len(self.pods(Role.WORKER)) >= self.quota:
            raise Refused(f"pods {name} is forbidden: exceeded quota: small", 403)
        stored = self.put(resource, body)
        self._after()
        return copy.deepcopy(stored)

    async def update(self, resource: Resource, namespace: str, body: Mapping[str, Any], subresource: str = "") -> Raw:
        name = body["metadata"]["name"]
        self._call("update", resource, name)
        found = self._found(resource, name)
        if found["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified", 409)
        changed = {**found, "status": body["status"]} if subresource == "status" else dict(body)
        stored = self.put(resource, changed)
        self._after()
        return copy.deepcopy(stored)

    async def patch(self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]) -> Raw:
        self._call("patch", resource, name)
        found = self._found(resource, name)
        if body.get("metadata", found["metadata"])["uid"] != found["metadata"]["uid"]:
            raise Conflict("the uid has changed", 409)
        stored = self.put(resource, _merged(found, body))
        self._after()
        return copy.deepcopy(stored)

    async def delete(
        self, resource: Resource, namespace: str, name: str, *, uid: str, grace: int | None = None
    ) -> None:
        self._call("delete", resource, name)
        found = self._found(resource, name)
        if found["metadata"]["uid"] != uid:
            raise Conflict("the uid has changed", 409)
        if resource is PODS and grace != 0 and found.get("spec", {}).get("nodeName"):
            found["metadata"].setdefault("deletionTimestamp", timestamp(self.now + 30))
        else:
            self.remove(resource, name)
        self._after()

    def _found(self, resource: Resource, name: str) -> Raw:
        if (resource, name) not in self.objects:
            raise NotFound(f"{resource.plural} {name} not found", 404)
        return self.objects[resource, name]

    def _call(self, verb: str, resource: Resource, name: str) -> None:
        if resource.plural == "events":
            return
        self.calls.append((verb, resource.plural, name))
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0 and not self.committed:
                raise Crash

    def _after(self) -> None:
        if self.crash_in is not None and self.crash_in < 0:
            raise Crash


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> Raw:
    both = dict(old)
    for key, value in new.items():
        both[key] = _merged(both.get(key, {}), value) if isinstance(value, Mapping) else value
    return both


# ---- stores ----------------------------------------------------------------------------------------------------


@dataclass
class Store:
    """The coordinator in a store pod, much simplified: rounds of the nodes that are here, up to the target."""

    pod: str
    incarnation: int
    max_restarts: int
    facts: OperatorView | None = None
    n: int = 0
    members: tuple[str, ...] = ()
    formed_at: float = 0.0
    here: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Pods whose agents are connected: index and incarnation."""
    lost: set[str] = field(default_factory=set)
    unfit: dict[str, Failure] = field(default_factory=dict)
    ended: list[RoundEnded] = field(default_factory=list)
    outcome: Outcome | None = None
    failure: Failure | None = None
    asks: float = 0.0
    acknowledged: int = 0
    """Charged rounds that the operator said it has persisted."""

    def hear(self, facts: OperatorView) -> None:
        """The operator's word: ended rounds that it has taken into account are let go."""
        self.facts = facts
        seen = facts.charged_round
        if seen is not None:
            self.acknowledged += sum(e.charged for e in self.ended if e.round <= seen)
            self.ended = [e for e in self.ended if e.round > seen]
        self.max_restarts = facts.settings.max_restarts
        self.outcome = self.outcome or (facts.finish.outcome if facts.finish else None)

    @property
    def charged(self) -> int:
        """What is persisted, and what is not yet."""
        return (self.facts.charged if self.facts else 0) + sum(e.charged for e in self.ended)

    def form(self, now: float, minimum: int) -> None:
        """Start a round of everybody who is here and has a place in it."""
        if self.outcome is None and not self.members and len(self.here) >= minimum:
            self.n += 1
            self.members, self.formed_at = tuple(sorted(self.here))[: self.target], now

    @property
    def target(self) -> int:
        return self.facts.settings.target if self.facts else 0

    @property
    def short(self) -> bool:
        """Whether another round would have other members, or another number of them."""
        gone = set(self.members) - set(self.here)
        return bool(self.members) and (bool(gone) or len(self.members) != min(self.target, len(self.here)))

    def end(self, reason: EndReason, now: float, failed: str = "") -> None:
        """End the round; a failure is charged while the budget lasts, and ends the job after that."""
        if not self.members or self.outcome is not None:
            return
        failure = Failure(FailureClass.USER_ERROR, failed, now, rank=0, exit_code=1, exception="E") if failed else None
        charged = bool(failed) and self.charged < self.max_restarts
        round_id = RoundId(1, self.incarnation, self.n)
        self.ended.append(RoundEnded(round_id, reason, "ended", charged, now, len(self.members), failure))
        self.members, self.formed_at = (), 0.0
        if failed and not charged:
            self.outcome, self.failure = Outcome.FAILED, failure

    def report(self) -> Report:
        calls_running = {f.pod for f in self.facts.pods if f.state is PodState.RUNNING} if self.facts else set()
        return Report(
            incarnation=self.incarnation,
            phase=RoundPhase.FINISHED if self.outcome else RoundPhase.RUNNING if self.members else RoundPhase.GATHERING,
            reason="",
            round=RoundId(1, self.incarnation, self.n) if self.members else None,
            rounds=self.n,
            world_size=len(self.members),
            formed_at=self.formed_at,
            nodes=tuple(NodeReport(*self.here[p], p, True, p in self.members) for p in sorted(self.here)),
            ended_rounds=tuple(self.ended),
            outcome=self.outcome,
            failure=self.failure,
            lost_pods=tuple(sorted(self.lost & calls_running)),
            unhealthy=tuple(self.unfit.values()),
            active=len(self.members),
            confirmation_request=self.asks,
        )


@dataclass
class FakeStoreLinks:
    """The operator's links. `up`: whether it reaches stores at all."""

    api: Api
    stores: dict[str, Store]
    up: bool = True
    address: StoreAddress | None = None
    since: float = 0.0
    known: Report | None = None
    lost: dict[str, float] = field(default_factory=dict)

    def view(self, key: object) -> LinkView:
        store = self._store()
        if store is None:
            return LinkView(False, self.since, self.known)
        self.known = store.report()
        self.lost = {pod: self.lost.get(pod, self.api.now) for pod in self.known.lost_pods}
        return LinkView(True, self.since, self.known, dict(self.lost))

    def set_address(self, key: object, address: StoreAddress | None, secret: bytes) -> None:
        if address != self.address:
            self.address, self.since, self.lost = address, self.api.now, {}

    def set_view(self, key: object, facts: OperatorView) -> None:
        store = self._store()
        if store is not None:
            if facts.confirmed_request and facts.confirmed_request == store.asks:
                older = [p for p in self.api.pods(Role.STORE) if number(p, Label.INCARNATION) < store.incarnation]
                assert all(phase(p) == "Failed" for p in older), "called the only store beside an older one"
                store.asks = 0.0
            store.hear(facts)

    def forget(self, key: object) -> None:
        self.address = None

    def _store(self) -> Store | None:
        return self.stores.get(self.address.pod) if self.up and self.address is not None else None


# ---- nodes -----------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A kubelet. While `cut`, nobody hears it, and what runs there goes on."""

    name: str
    cut: bool = False


@dataclass
class World:
    """The cluster around one job."""

    api: Api
    nodes: dict[str, Node]
    stores: dict[str, Store] = field(default_factory=dict)
    failures: int = 0
    """Failures that may be charged, so far."""
    ever: dict[str, str] = field(default_factory=dict)
    """uid of every pod name ever used."""

    def renew(self) -> None:
        """Kubelets that are heard of renew their leases."""
        for node in self.nodes.values():
            if not node.cut or (LEASES, node.name) not in self.api.objects:
                spec = {"renewTime": timestamp(self.api.now, precise=True)}
                self.api.put(LEASES, {"metadata": {"name": node.name}, "spec": spec})

    def schedule(self, pod: Raw, node: str) -> None:
        avoid = pod["metadata"].get("annotations", {}).get("elasticjob.dev/avoids", "").split(",")
        if node in avoid or pod["spec"].get("nodeName"):
            return
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": "Pending"}

    def no_room(self, pod: Raw) -> None:
        """The scheduler finds no node for a pod."""
        if not pod["spec"].get("nodeName"):
            told = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            pod["status"] = {"phase": "Pending", "conditions": [told]}

    def run(self, pod: Raw) -> None:
        """The kubelet starts a scheduled pod; its agent or store comes up."""
        if not self._heard(pod) or phase(pod) != "Pending" or "deletionTimestamp" in pod["metadata"]:
            return
        state = {"name": pod["spec"]["containers"][0]["name"], "state": {"running": {}}}
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [state]}
        name = pod["metadata"]["name"]
        if role(pod) is Role.STORE:
            pod["status"]["conditions"] = [{"type": "Ready", "status": "True"}]
            self.stores[name] = Store(name, number(pod, Label.INCARNATION), 3)

    def connect(self, pod: Raw) -> None:
        """A running agent reaches the store."""
        for store in self.serving():
            if phase(pod) == "Running" and not self.nodes[pod["spec"]["nodeName"]].cut and store.outcome is None:
                place = (number(pod, Label.INDEX), number(pod, Label.INCARNATION))
                facts = {f.index: f.incarnation for f in store.facts.pods} if store.facts else {}
                if facts.get(place[0]) == place[1] and "deletionTimestamp" not in pod["metadata"]:
                    store.here[pod["metadata"]["name"]] = place
                    store.lost.discard(pod["metadata"]["name"])

    def serving(self) -> list[Store]:
        """Stores that agents can reach."""
        names = {p["metadata"]["name"] for p in self.api.pods(Role.STORE) if phase(p) == "Running" and self._heard(p)}
        return [store for name, store in self.stores.items() if name in names]

    def drop(self, name: str) -> None:
        """An agent's link closes; a round it was in ends."""
        for store in self.serving():
            if name in store.here:
                del store.here[name]
                store.lost.add(name)
                if name in store.members:
                    store.end(EndReason.AGENT_LOST, self.api.now)

    def unfit(self, pod: Raw) -> None:
        """The agent of a pod says that its node must not train, and leaves. It may take its time to end."""
        name = pod["metadata"]["name"]
        for store in self.serving():
            if name in store.here:
                store.unfit[name] = Failure(FailureClass.DEVICE_UNHEALTHY, name, self.api.now, message="GPU is lost")
                if name in store.members:
                    store.end(EndReason.NODE_LEFT, self.api.now)
                del store.here[name]

    def finish(self, pod: Raw, exit_code: int, reason: str = "Error", said: Termination | None = None) -> None:
        """A container ends, and its kubelet says so."""
        if not self._heard(pod) or phase(pod) not in ("Running",):
            return
        self.drop(pod["metadata"]["name"])
        message = codec.dumps(said).decode() if said else ""
        ended = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": timestamp(self.api.now)}
        pod["status"]["phase"] = "Failed" if exit_code else "Succeeded"
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}

    def reap(self, pod: Raw) -> None:
        """The kubelet completes a deletion."""
        if "deletionTimestamp" in pod["metadata"] and self._heard(pod):
            self.drop(pod["metadata"]["name"])
            self.api.remove(PODS, pod["metadata"]["name"])
            self.stores.pop(pod["metadata"]["name"], None)

    def delete(self, pod: Raw, *, force: bool) -> None:
        """A person deletes a pod."""
        if force or not pod["spec"].get("nodeName"):
            self.drop(pod["metadata"]["name"])
            self.api.remove(PODS, pod["metadata"]["name"])
        else:
            pod["metadata"].setdefault("deletionTimestamp", timestamp(self.api.now + 30))

    def settle_agents(self) -> None:
        """Agents of an ended job exit as they were told, and stores that were taken away are silent."""
        existing = {p["metadata"]["name"] for p in self.api.pods(Role.STORE)}
        for name in [n for n in self.stores if n not in existing]:
            del self.stores[name]
        for store in self.serving():
            live = {p["metadata"]["name"] for p in self.api.pods(Role.WORKER) if phase(p) == "Running"}
            for gone in set(store.here) - live:
                self.drop(gone)

    def scale(self, replicas: int) -> None:
        job = self.api.objects[JOBS, "bert"]
        spec = {**job["spec"], "replicas": replicas}
        meta = {**job["metadata"], "generation": job["metadata"]["generation"] + 1}
        self.api.put(JOBS, {**job, "spec": spec, "metadata": meta})

    def _heard(self, pod: Raw) -> bool:
        node = pod["spec"].get("nodeName")
        return node is not None and not self.nodes[node].cut


def phase(pod: Raw) -> str:
    found: str = pod.get("status", {}).get("phase", "Pending")
    return found


def role(pod: Raw) -> Role:
    return Role(pod["metadata"]["labels"][Label.ROLE])


def number(pod: Raw, label: str) -> int:
    return int(pod["metadata"]["labels"][label])


def job_status(api: Api) -> Raw:
    """The job's status as stored."""
    status: Raw = api.objects[JOBS, "bert"].get("status") or {}
    return status


def conditions(api: Api) -> dict[str, str]:
    return {c["type"]: c["status"] for c in job_status(api).get("conditions", [])}


def reset(links: FakeStoreLinks) -> FakeStoreLinks:
    """What a new process knows of its links."""
    return replace(links, address=None, since=links.api.now, known=None, lost={})
