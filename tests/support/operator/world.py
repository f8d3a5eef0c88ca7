"""A simulated Kubernetes cluster with kubelets and job stores, for model tests of the operator.

Nothing here waits or does I/O. The simulation keeps what the API server guarantees: UIDs, resource versions,
preconditions, unique names, deletion with grace. A test decides everything that Kubernetes does not guarantee.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Iterable, Mapping
from dataclasses import dataclass, field, replace
from itertools import count, islice
from typing import Any

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.failures.failure_rules import FailureAction
from elasticjob._runtime.contract.messages import (
    AgentReport,
    EndReason,
    Failure,
    FailureClass,
    InRound,
    OperatorView,
    Outcome,
    PodState,
    Report,
    RoundEnded,
    RoundPhase,
    Termination,
)
from elasticjob._runtime.contract.names import Env, ExitCode, Label, Role, RoundId
from elasticjob_operator.kube import (
    BUDGETS,
    JOBS,
    LEASES,
    PODS,
    AlreadyExists,
    Conflict,
    NotFound,
    Page,
    Refused,
    Resource,
)
from elasticjob_operator.model.cluster.nodes import NodeWarning
from elasticjob_operator.model.cluster.pods import FAILED_STARTS
from elasticjob_operator.model.cluster.raw import moment, timestamp
from elasticjob_operator.model.job.status_lists import read_ranges
from elasticjob_operator.model.observed import LinkView
from elasticjob_operator.plan import StoreAddress

Raw = dict[str, Any]

READY = {"type": "Ready", "status": "True"}
"""A condition of a pod that runs."""


class Crash(BaseException):
    """The operator's process crashes here."""


@dataclass
class Api:
    """An API server that implements `KubeApi`."""

    now: float
    objects: dict[tuple[Resource, str], Raw] = field(default_factory=dict)
    calls: list[tuple[str, str, str]] = field(default_factory=list)
    """Mutating calls but those of Events: verb, plural, name."""
    reads: list[tuple[str, str]] = field(default_factory=list)
    """Plural and name of each object read; plural and selector of each list."""
    quota: int | None = None
    """How many worker pods may exist; None: any number."""
    refused: Resource | None = None
    """Objects of this kind cannot be created."""
    crash_in: int | None = None
    """Mutating calls until the operator crashes; None: it does not."""
    committed: bool = False
    """Whether the call of the crash takes effect."""
    operator_offset: float = 0.0
    """Seconds by which the clock of the operator's host is ahead of all other hosts' clocks."""
    _version: int = 0

    @property
    def operator_now(self) -> float:
        """The time on the operator's host."""
        return self.now + self.operator_offset

    def pods(self, role: Role) -> list[Raw]:
        """Return the pods of a role that the job owns, live or not."""
        found = [o for (r, _), o in self.objects.items() if r is PODS and o["metadata"].get("ownerReferences")]
        return [o for o in found if o["metadata"]["labels"][Label.ROLE] == role.value]

    def put(self, resource: Resource, body: Mapping[str, Any]) -> Raw:
        """Store an object as the server would, without checks."""
        version = self.next_version()
        stored = copied(body)
        meta = stored["metadata"]
        meta.setdefault("uid", f"uid-{version}")
        meta.setdefault("creationTimestamp", timestamp(self.now))
        meta["resourceVersion"] = version
        self.objects[resource, meta["name"]] = stored
        return stored

    def next_version(self) -> str:
        """Return a new resourceVersion."""
        self._version += 1
        return str(self._version)

    def remove(self, resource: Resource, name: str) -> None:
        self.objects.pop((resource, name), None)

    # -- KubeApi

    async def get(self, resource: Resource, namespace: str | None, name: str) -> Raw:
        self.reads.append((resource.plural, name))
        return copied(self._found(resource, name))

    async def list(self, resource: Resource, namespace: str | None, selector: str = "", fields: str = "") -> list[Raw]:
        self.reads.append((resource.plural, selector))
        key, exact, value = selector.partition("=")
        found = [o for (r, _), o in self.objects.items() if r is resource]
        labels = [(o, o["metadata"].get("labels", {})) for o in found]
        return [copied(o) for o, of in labels if not key or (of.get(key) == value if exact else key in of)]

    async def pages(
        self, resource: Resource, namespace: str | None, selector: str = "", fields: str = ""
    ) -> AsyncIterator[Page]:
        yield Page(await self.list(resource, namespace, selector), str(self._version))

    async def create(self, resource: Resource, namespace: str, body: Mapping[str, Any]) -> Raw:
        name = body["metadata"]["name"]
        self._begin_write("create", resource, name)
        if (resource, name) in self.objects:
            raise AlreadyExists(f"{resource.plural} {name} already exists", 409)
        if resource is PODS and self.quota is not None and len(self.pods(Role.WORKER)) >= self.quota:
            raise Refused(f"pods {name} is forbidden: exceeded quota: small", 403)
        if resource is self.refused:
            raise Refused(f"{resource.plural} {name} is forbidden", 403)
        stored = self.put(resource, body)
        self._end_write()
        return copied(stored)

    async def update(self, resource: Resource, namespace: str, body: Mapping[str, Any], subresource: str = "") -> Raw:
        name = body["metadata"]["name"]
        self._begin_write("update", resource, name)
        found = self._found(resource, name)
        if found["metadata"]["resourceVersion"] != body["metadata"]["resourceVersion"]:
            raise Conflict("the object has been modified", 409)
        changed = {**found, "status": body["status"]} if subresource == "status" else dict(body)
        stored = self.put(resource, changed)
        self._end_write()
        return copied(stored)

    async def patch(self, resource: Resource, namespace: str, name: str, body: Mapping[str, Any]) -> Raw:
        self._begin_write("patch", resource, name)
        found = self._found(resource, name)
        if body.get("metadata", found["metadata"])["uid"] != found["metadata"]["uid"]:
            raise Conflict("the uid has changed", 409)
        stored = self.put(resource, _merged(found, body))
        self._end_write()
        return copied(stored)

    async def delete(self, resource: Resource, namespace: str, name: str, *, uid: str, grace: int | None = None) -> Raw:
        self._begin_write("delete", resource, name)
        found = self._found(resource, name)
        if found["metadata"]["uid"] != uid:
            raise Conflict("the uid has changed", 409)
        if resource is PODS and grace != 0 and found.get("spec", {}).get("nodeName"):
            mark_deleted(found, self.now, grace)
            found["metadata"]["resourceVersion"] = self.next_version()
        else:
            self.remove(resource, name)
        self._end_write()
        return copied(found)

    def _found(self, resource: Resource, name: str) -> Raw:
        if (resource, name) not in self.objects:
            raise NotFound(f"{resource.plural} {name} not found", 404)
        return self.objects[resource, name]

    def _begin_write(self, verb: str, resource: Resource, name: str) -> None:
        if resource.plural == "events":
            return
        self.calls.append((verb, resource.plural, name))
        if self.crash_in is not None:
            self.crash_in -= 1
            if self.crash_in < 0 and not self.committed:
                raise Crash

    def _end_write(self) -> None:
        if self.crash_in is not None and self.crash_in < 0:
            raise Crash


def copied(raw: Mapping[str, Any]) -> Raw:
    """Return a copy of a JSON object, several times as fast as copy.deepcopy."""
    copy: Raw = json.loads(json.dumps(raw))
    return copy


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> Raw:
    """Return what a merge patch makes of an object: null removes a field."""
    both = dict(old)
    for key, value in new.items():
        both[key] = _merged(both.get(key) or {}, value) if isinstance(value, Mapping) else value
    return {key: value for key, value in both.items() if value is not None}


# ---- stores ----------------------------------------------------------------------------------------------------


@dataclass
class Store:
    """The coordinator in a store pod, much simplified: it forms rounds of connected nodes, up to the target."""

    pod: str
    incarnation: int
    max_restarts: int
    last_rounds: dict[str, RoundId]
    """By pod: the last round that its agent started workers of."""
    view: OperatorView | None = None
    rounds: int = 0
    members: tuple[str, ...] = ()
    formed_at: float = 0.0
    connected: dict[str, tuple[int, int]] = field(default_factory=dict)
    """Pods whose agents are connected, each with its index and incarnation."""
    lost: set[str] = field(default_factory=set)
    unhealthy: dict[str, Failure] = field(default_factory=dict)
    ended: list[RoundEnded] = field(default_factory=list)
    outcome: Outcome | None = None
    failure: Failure | None = None
    confirmation_request: float = 0.0
    """When the store asked the operator to confirm that it is the only store; 0: it does not ask."""
    passive: bool = False
    """Whether this is a standby store that has not taken over."""
    retired: bool = False
    plans_ends: bool = False
    """Whether a round ends as soon as a member is to leave, and not only with its pod."""
    acknowledged: int = 0
    """Charged rounds that the operator reported as persisted."""

    def receive(self, view: OperatorView) -> None:
        """Take over the operator's view, and forget the ended rounds that it has persisted."""
        self.view = view
        if self.passive:
            self.retired = view.retired
            self.passive = self.retired or view.serving != self.incarnation
        persisted = view.charged_round
        if persisted is not None:
            self.acknowledged += sum(e.charged for e in self.ended if e.round <= persisted)
            self.ended = [e for e in self.ended if e.round > persisted]
        self.max_restarts = view.settings.max_restarts
        self.outcome = self.outcome or (view.finish.outcome if view.finish else None)

    @property
    def charged(self) -> int:
        """Charged restarts, persisted or not."""
        counted = self.view.charged_rounds if self.view else ()
        return (self.view.charged if self.view else 0) + sum(e.charged and e.round not in counted for e in self.ended)

    def form(self, now: float, minimum: int) -> None:
        """Form a round of the connected nodes, up to the target; those that were in the last one stay in it."""
        last = {pod for pod, round_ in self.last_rounds.items() if round_ == self.round and self.plans_ends}
        stay = sorted(self.candidates, key=lambda pod: (pod not in last, pod))
        if self.outcome is None and not self.members and len(stay) >= minimum:
            self.rounds += 1
            self.members, self.formed_at = tuple(stay[: self.target]), now
            self.last_rounds.update(dict.fromkeys(self.members, self.round))

    @property
    def round(self) -> RoundId:
        """The running round, or the last one."""
        return RoundId(1, self.incarnation, self.rounds)

    @property
    def target(self) -> int:
        return self.view.settings.target if self.view else 0

    @property
    def needs_new_round(self) -> bool:
        """Whether a new round would have other members, or another number of them."""
        missing = set(self.members) - self.candidates
        return bool(self.members) and (bool(missing) or len(self.members) != min(self.target, len(self.candidates)))

    @property
    def candidates(self) -> set[str]:
        """The connected pods, with planned ends those that are not to leave."""
        pods = self.view.pods if self.view and self.plans_ends else ()
        return set(self.connected) - {p.pod for p in pods if p.state is PodState.DRAINING}

    def end(
        self, reason: EndReason, now: float, failed: str = "", broken: str = "", action: FailureAction | None = None
    ) -> None:
        """End the round. A failure of pod `failed` is charged while the budget lasts; after that it ends the job.

        A collective that breaks in pod `broken`, because another node is lost, is reported and not charged. `action`:
        that of the rule that matched, if one did.
        """
        if not self.members or self.outcome is not None:
            return
        failure = Failure(FailureClass.USER_ERROR, failed, now, rank=0, exit_code=1, exception="E") if failed else None
        failure = Failure(FailureClass.COLLECTIVE_FAILED, broken, now, rank=0) if broken else failure
        known = self.view is not None and self.round in self.view.charged_rounds
        charged = bool(failed) and not known and self.charged < self.max_restarts
        ended = RoundEnded(self.round, reason, "ended", charged, now, len(self.members), failure)
        self.ended.append(replace(ended, rule="rule" if action else "", action=action))
        self.members, self.formed_at = (), 0.0
        if failed and not known and not charged:
            self.outcome, self.failure = Outcome.FAILED, failure

    def report(self) -> Report:
        running = {p.pod for p in self.view.pods if p.state is PodState.RUNNING} if self.view else set()
        return Report(
            incarnation=self.incarnation,
            phase=self._phase(),
            reason="",
            round=self.round if self.members else None,
            rounds=self.rounds,
            world_size=len(self.members),
            formed_at=self.formed_at,
            nodes=tuple(AgentReport(*self.connected[p], p, True, p in self.members) for p in sorted(self.connected)),
            ended_rounds=tuple(self.ended),
            outcome=self.outcome,
            failure=self.failure,
            lost_pods=tuple(sorted(self.lost & running)),
            unhealthy=tuple(self.unhealthy.values()),
            active=len(self.members),
            confirmation_request=self.confirmation_request,
            retired=self.retired,
        )

    def _phase(self) -> RoundPhase:
        if self.passive:
            return RoundPhase.STANDBY
        if self.outcome:
            return RoundPhase.FINISHED
        return RoundPhase.RUNNING if self.members else RoundPhase.GATHERING


@dataclass
class FakeStoreLinks:
    """The operator's control links, in place of `StoreLinks`."""

    api: Api
    stores: dict[str, Store]
    reachable: bool = True
    """Whether the operator can connect to stores."""
    address: StoreAddress | None = None
    standby_address: StoreAddress | None = None
    standby_since: float = 0.0
    standby_last_report: Report | None = None
    since: float = 0.0
    last_report: Report | None = None
    lost: dict[str, float] = field(default_factory=dict)

    def view(self, key: object) -> LinkView:
        store = self._store()
        if store is None:
            return LinkView(False, self.since, self.last_report)
        self.last_report = store.report()
        self.lost = {pod: self.lost.get(pod, self.api.operator_now) for pod in self.last_report.lost_pods}
        return LinkView(True, self.since, self.last_report, dict(self.lost))

    def standby_view(self, key: object) -> LinkView:
        if self.standby_address is None:
            return LinkView(since=self.api.operator_now)
        store = self._store_at(self.standby_address)
        if store is None:
            return LinkView(False, self.standby_since, self.standby_last_report)
        self.standby_last_report = store.report()
        return LinkView(True, self.standby_since, self.standby_last_report)

    def set_address(
        self, key: object, address: StoreAddress | None, secret: bytes, standby: StoreAddress | None = None
    ) -> None:
        if address != self.address:
            self.address, self.since, self.lost = address, self.api.operator_now, {}
        if standby != self.standby_address:
            self.standby_address, self.standby_since = standby, self.api.operator_now
            self.standby_last_report = None

    def set_standby_view(self, key: object, view: OperatorView) -> None:
        store = self._store_at(self.standby_address)
        if store is not None:
            store.receive(view)

    def set_operator_view(self, key: object, view: OperatorView) -> None:
        store = self._store()
        if store is not None:
            if view.confirmed_request and view.confirmed_request == store.confirmation_request:
                older = [p for p in self.api.pods(Role.STORE) if number(p, Label.INCARNATION) < store.incarnation]
                assert all(phase(p) == "Failed" for p in older), (
                    "the operator confirmed a store although an older one runs"
                )
                newer = [s for s in self.stores.values() if s.incarnation > store.incarnation]
                assert all(s.retired for s in newer), "the operator confirmed a store beside a standby store"
                store.confirmation_request = 0.0
            store.receive(view)

    def forget(self, key: object) -> None:
        self.address = self.standby_address = self.last_report = self.standby_last_report = None
        self.lost = {}

    def _store(self) -> Store | None:
        return self._store_at(self.address)

    def _store_at(self, address: StoreAddress | None) -> Store | None:
        return self.stores.get(address.pod) if self.reachable and address is not None else None


# ---- nodes -----------------------------------------------------------------------------------------------------


@dataclass
class Node:
    """A kubelet. While the node is `cut`, nothing reaches it, and its pods keep running."""

    name: str
    cut: bool = False


@dataclass
class World:
    """The cluster around one job."""

    api: Api
    nodes: dict[str, Node]
    stores: dict[str, Store] = field(default_factory=dict)
    outages: set[str] = field(default_factory=set)
    """Rounds in which workers or agents failed, and attempts to start in which agents failed: each may be charged."""
    last_rounds: dict[str, RoundId] = field(default_factory=dict)
    """By pod: the last round that its agent started workers of. The agent writes it into the termination message."""
    room: int | None = None
    """How many worker pods the nodes have room for; None: any number."""
    warnings: dict[str, NodeWarning] | None = None
    """The warnings of nodes by name; None: the operator may not watch Nodes."""
    plans_ends: bool = False
    """As in `Store`."""
    drained: str = ""
    """The node from which a user evicts all worker pods, as far as their PodDisruptionBudget allows it."""

    def renew(self) -> None:
        """Kubelets of reachable nodes renew their Leases."""
        for node in self.nodes.values():
            if not node.cut or (LEASES, node.name) not in self.api.objects:
                spec = {"renewTime": timestamp(self.api.now, precise=True)}
                self.api.put(LEASES, {"metadata": {"name": node.name}, "spec": spec})

    def schedule(self, pod: Raw, node: str) -> None:
        """The scheduler binds a pod to a node that is not cordoned and that the pod does not avoid."""
        avoid = pod["metadata"].get("annotations", {}).get("elasticjob.dev/avoids", "").split(",")
        if node in avoid or self._warning(node).cordoned or pod["spec"].get("nodeName"):
            return
        if role(pod) is Role.WORKER and self._is_full():
            self.mark_unschedulable(pod)
            return
        pod["spec"]["nodeName"] = node
        pod["status"] = {"phase": "Pending"}

    def _is_full(self) -> bool:
        placed = (p for p in self.api.pods(Role.WORKER) if p["spec"].get("nodeName"))
        return self.room is not None and sum(phase(p) in ("Pending", "Running") for p in placed) >= self.room

    def mark_unschedulable(self, pod: Raw) -> None:
        """The scheduler finds no node for a pod."""
        if not pod["spec"].get("nodeName"):
            condition = {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "no room"}
            pod["status"] = {"phase": "Pending", "conditions": [condition]}

    def start(self, pod: Raw) -> None:
        """The kubelet starts a scheduled pod, and with it an agent or a store."""
        if not self._reachable(pod) or phase(pod) != "Pending" or "deletionTimestamp" in pod["metadata"]:
            return
        state = {"name": pod["spec"]["containers"][0]["name"], "state": {"running": {}}}
        pod["status"] = {"phase": "Running", "podIP": "10.0.0.1", "containerStatuses": [state], "conditions": [READY]}
        name = pod["metadata"]["name"]
        if role(pod) is Role.STORE:
            env = {e["name"]: e.get("value") for e in pod["spec"]["containers"][0]["env"]}
            standby = env.get(Env.STANDBY_STORE) == "1"
            incarnation = number(pod, Label.INCARNATION)
            ends = self.plans_ends
            self.stores[name] = Store(name, incarnation, 3, self.last_rounds, passive=standby, plans_ends=ends)

    def connect(self, pod: Raw) -> None:
        """The agent of a running pod connects to the store."""
        for store in self.serving():
            if phase(pod) == "Running" and not self.nodes[pod["spec"]["nodeName"]].cut and store.outcome is None:
                index, incarnation = number(pod, Label.INDEX), number(pod, Label.INCARNATION)
                expected = {p.index: p.incarnation for p in store.view.pods} if store.view else {}
                if expected.get(index) == incarnation and "deletionTimestamp" not in pod["metadata"]:
                    store.connected[pod["metadata"]["name"]] = (index, incarnation)
                    store.lost.discard(pod["metadata"]["name"])

    def serving(self) -> list[Store]:
        """Return the stores that agents can reach."""
        names = {
            p["metadata"]["name"] for p in self.api.pods(Role.STORE) if phase(p) == "Running" and self._reachable(p)
        }
        return [store for name, store in self.stores.items() if name in names and not store.passive]

    def take_over(self) -> None:
        """All nodes lose the store, and their standby store takes over."""
        names = {
            p["metadata"]["name"] for p in self.api.pods(Role.STORE) if phase(p) == "Running" and self._reachable(p)
        }
        standbys = [s for name, s in self.stores.items() if name in names and s.passive and not s.retired and s.view]
        serving = self.serving()
        if standbys and serving and serving[-1].outcome is None and serving[-1].members:
            old, new = serving[-1], standbys[-1]
            new.passive = False
            new.connected, old.connected, old.members = dict(old.connected), {}, ()

    def disconnect(self, name: str) -> None:
        """The link of a pod's agent closes; its round ends."""
        for store in self.serving():
            if name in store.connected:
                del store.connected[name]
                store.lost.add(name)
                if name in store.members:
                    others = [member for member in store.members if member != name]
                    store.end(EndReason.AGENT_LOST, self.api.now, broken=others[0] if others else "")

    def fail_health_check(self, pod: Raw) -> None:
        """The agent of a pod reports its node as unhealthy and leaves the job. The pod ends later."""
        name = pod["metadata"]["name"]
        for store in self.serving():
            if name in store.connected:
                store.unhealthy[name] = Failure(
                    FailureClass.DEVICE_UNHEALTHY, name, self.api.now, message="GPU is lost"
                )
                if name in store.members:
                    store.end(EndReason.NODE_LEFT, self.api.now)
                del store.connected[name]

    def terminate(
        self, pod: Raw, exit_code: int, reason: str = "Error", termination: Termination | None = None
    ) -> None:
        """A container ends, and its kubelet reports that."""
        if not self._reachable(pod) or phase(pod) != "Running":
            return
        name = pod["metadata"]["name"]
        self.disconnect(name)
        in_round = InRound(self.last_rounds[name]) if name in self.last_rounds else None
        message = codec.dumps(termination or in_round).decode() if termination or in_round else ""
        ended = {"exitCode": exit_code, "reason": reason, "message": message, "finishedAt": timestamp(self.api.now)}
        pod["status"]["phase"] = "Failed" if exit_code else "Succeeded"
        pod["status"]["conditions"] = [c for c in pod["status"]["conditions"] if c != READY]
        pod["status"]["containerStatuses"][0]["state"] = {"terminated": ended}

    def fail_worker(self, store: Store, name: str, *, replaced: bool) -> None:
        """A worker of this pod fails. `replaced`: a rule has the action ReplacePod, so its agent leaves the job."""
        store.end(EndReason.WORKER_FAILED, self.api.now, name, action=FailureAction.REPLACE_POD if replaced else None)
        pod = self.api.objects.get((PODS, name))
        if replaced and store.outcome is None and pod is not None:
            self.terminate(pod, ExitCode.LEFT, termination=Termination(Outcome.LEFT, "NodeLeft", store.round))

    def kill_agent(self, pod: Raw) -> None:
        """The kernel kills an agent with its workers at the container's memory limit."""
        if not self._reachable(pod) or phase(pod) != "Running":
            return
        self._add_outage(pod)
        self.terminate(pod, 137, "OOMKilled")

    def stop_agent(self, pod: Raw) -> None:
        """The kubelet stops a pod whose livenessProbe has failed, and the agent leaves."""
        if not self._reachable(pod) or phase(pod) != "Running":
            return
        self._add_outage(pod)
        last_round = self.last_rounds.get(pod["metadata"]["name"])
        self.terminate(pod, ExitCode.LEFT, termination=Termination(Outcome.LEFT, "NodeLeft", last_round, "SIGTERM"))

    def _add_outage(self, pod: Raw) -> None:
        last_round = self.last_rounds.get(pod["metadata"]["name"])
        attempt = pod["metadata"].get("annotations", {}).get(FAILED_STARTS, "0")
        self.outages.add(str(last_round) if last_round else f"start-{attempt}")

    def fail_init(self, pod: Raw) -> None:
        """An init container of a scheduled pod fails."""
        if not self._reachable(pod) or phase(pod) != "Pending" or "deletionTimestamp" in pod["metadata"]:
            return
        failed = {"name": "setup", "state": {"terminated": {"exitCode": 3, "message": "no such bucket"}}}
        pod["status"] = {"phase": "Failed", "initContainerStatuses": [failed]}

    def evict_for_own_use(self, pod: Raw) -> None:
        """The kubelet evicts a pod that has filled an emptyDir."""
        if self._reachable(pod) and phase(pod) == "Running":
            self.terminate(pod, 137)
            pod["status"] |= {"reason": "Evicted", "message": "Usage of EmptyDir exceeds the limit"}

    def finish_deletion(self, pod: Raw) -> None:
        """The kubelet completes a deletion."""
        if "deletionTimestamp" in pod["metadata"] and self._reachable(pod):
            self.disconnect(pod["metadata"]["name"])
            self.api.remove(PODS, pod["metadata"]["name"])
            self.stores.pop(pod["metadata"]["name"], None)

    def delete(self, pod: Raw, *, force: bool) -> None:
        """A user deletes a pod."""
        if force or not pod["spec"].get("nodeName"):
            self.disconnect(pod["metadata"]["name"])
            self.api.remove(PODS, pod["metadata"]["name"])
        else:
            mark_deleted(pod, self.api.now)

    def must_leave(self, pod: Raw) -> bool:
        """Return whether the end of the pod's node is announced, or a drain is asked for."""
        warning = self._warning(pod["spec"].get("nodeName", ""))
        return bool(warning.notice or warning.drain)

    def _warning(self, node: str) -> NodeWarning:
        return (self.warnings or {}).get(node, NodeWarning())

    def drain(self) -> None:
        """Evict the worker pods of the drained node, as `kubectl drain` does."""
        if not self.drained:
            return
        budgets = [raw for (kind, _), raw in self.api.objects.items() if kind is BUDGETS]
        for pod in self.api.pods(Role.WORKER):
            ready = [p for p in self.api.pods(Role.WORKER) if phase(p) == "Running" and not is_deleting(p)]
            allowed = all(len(ready) > budget["spec"]["minAvailable"] for budget in budgets)
            if pod["spec"].get("nodeName") == self.drained and not is_deleting(pod) and (allowed or pod not in ready):
                mark_deleted(pod, self.api.now)

    def drop_deleted(self) -> None:
        """Drop stores whose pods are deleted, and disconnect agents whose pods do not run."""
        existing = {p["metadata"]["name"] for p in self.api.pods(Role.STORE)}
        for name in [n for n in self.stores if n not in existing]:
            del self.stores[name]
        for store in self.serving():
            live = {p["metadata"]["name"] for p in self.api.pods(Role.WORKER) if phase(p) == "Running"}
            for name in set(store.connected) - live:
                self.disconnect(name)

    def exit_agents(self, store: Store, pods: Iterable[Raw]) -> None:
        """The agents of these pods that know the job's outcome exit."""
        if store.outcome is None:
            return
        code = 0 if store.outcome is Outcome.SUCCEEDED else 1
        for pod in pods:
            if pod["metadata"]["name"] in store.connected:
                self.terminate(pod, code, "Completed", Termination(store.outcome, "message"))

    def edit(self, **spec: Any) -> None:
        """A user changes fields of the job's spec."""
        job = self.api.objects[JOBS, "bert"]
        meta = {**job["metadata"], "generation": job["metadata"]["generation"] + 1}
        self.api.put(JOBS, {**job, "spec": {**job["spec"], **spec}, "metadata": meta})

    def scale(self, replicas: int) -> None:
        """A user changes spec.replicas."""
        self.edit(replicas=replicas)

    # -- all of them, without faults

    def run_rounds(self, minimum: int) -> None:
        """Agents connect, and stores form rounds of them."""
        for pod in self.api.pods(Role.WORKER):
            self.connect(pod)
        for store in self.serving():
            if store.needs_new_round:
                store.end(EndReason.SCALING_UP, self.api.now)
            store.form(self.api.now, minimum)

    def run_pods(self, stop_seconds: float = 0.0) -> None:
        """The scheduler places each pod on the first node that it does not avoid; kubelets start pods, and end those
        that are being deleted after `stop_seconds`."""
        for pod in self.api.pods(Role.WORKER) + self.api.pods(Role.STORE):
            for node in self.nodes:
                self.schedule(pod, node)
            self.mark_unschedulable(pod)
            self.start(pod)
            grace = pod["metadata"].get("deletionGracePeriodSeconds", 0)
            if self.api.now >= (moment(pod, "metadata", "deletionTimestamp") or 0.0) - grace + stop_seconds:
                self.finish_deletion(pod)
        self.drop_deleted()

    def collect_garbage(self) -> None:
        """The garbage collector deletes the objects of deleted jobs."""
        jobs = {raw["metadata"]["uid"] for (resource, _), raw in self.api.objects.items() if resource is JOBS}
        for (resource, name), raw in list(self.api.objects.items()):
            owners = {owner["uid"] for owner in raw["metadata"].get("ownerReferences", ())}
            if not owners or owners & jobs:
                continue
            if resource is PODS:
                self.delete(raw, force=False)
            else:
                self.api.remove(resource, name)

    def _reachable(self, pod: Raw) -> bool:
        node = pod["spec"].get("nodeName")
        return node is not None and not self.nodes[node].cut


def mark_deleted(pod: Raw, now: float, grace: int | None = None) -> None:
    """The API server begins to delete a pod, with this grace in seconds or with the pod's own. A later request can only
    shorten it."""
    seconds = pod["spec"].get("terminationGracePeriodSeconds", 30) if grace is None else grace
    end, meta = timestamp(now + seconds), pod["metadata"]
    if end < meta.get("deletionTimestamp", "9999"):
        meta |= {"deletionTimestamp": end, "deletionGracePeriodSeconds": seconds}


def is_deleting(pod: Raw) -> bool:
    return "deletionTimestamp" in pod["metadata"]


def phase(pod: Raw) -> str:
    found: str = pod.get("status", {}).get("phase", "Pending")
    return found


def role(pod: Raw) -> Role:
    return Role(pod["metadata"]["labels"][Label.ROLE])


def number(pod: Raw, label: str) -> int:
    return int(pod["metadata"]["labels"][label])


def job_status(api: Api) -> Raw:
    """Return the job's status as stored."""
    status: Raw = api.objects[JOBS, "bert"].get("status") or {}
    return status


def job_indices(api: Api, pods: int) -> set[int]:
    """Return which indices the job has, if it has this number of pods."""
    vacant = read_ranges(job_status(api), "vacantIndices")
    return set(islice((index for index in count() if index not in vacant), pods))


def conditions(api: Api) -> dict[str, str]:
    return {c["type"]: c["status"] for c in job_status(api).get("conditions", [])}


def reset(links: FakeStoreLinks) -> FakeStoreLinks:
    """Return the links as a restarted operator starts with them."""
    return replace(
        links,
        address=None,
        standby_address=None,
        since=links.api.operator_now,
        last_report=None,
        standby_last_report=None,
        lost={},
    )
