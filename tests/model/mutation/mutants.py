"""The mutants: small replacements in the code of the pure decisions, each of them a plausible mistake.

A mutant is found by its code in the syntax tree, in all files of a package: code may be formatted, and moved to another
module.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from model.mutation.source_match import Match, find_code, replace_code

REPOSITORY = Path(__file__).resolve().parents[3]
CONTRACT = "agent/elasticjob/_runtime/contract"
RENDEZVOUS = "agent/elasticjob/_runtime/rendezvous"
AGENT = "agent/elasticjob/_runtime/agent"
OPERATOR = "operator/elasticjob_operator"


@dataclass(frozen=True)
class Mutant:
    """One mistake: the expression, statement or `case` in `old` occurs exactly once in the package.

    `new` replaces it; if `new` is empty, a statement goes.
    """

    name: str
    package: str
    old: str
    new: str
    within: str = ""
    """The name of the function that has the code, for code that the package has elsewhere too."""

    @property
    def path(self) -> str:
        """The file that has the code; ValueError if none or more than one has it."""
        return str(self._match().path.relative_to(REPOSITORY))

    def apply(self, root: Path) -> None:
        """Write the mistake into the copy of the repository at `root`; ValueError: the code has changed."""
        (root / self.path).write_text(replace_code(self._match(), self.new))

    def _match(self) -> Match:
        found = find_code(REPOSITORY / self.package, self.old, self.within)
        if len(found) != 1:
            raise ValueError(f"{self.name}: {self.package} has {len(found)} of {self.old!r}")
        return found[0]


def _contract(name: str, old: str, new: str, within: str = "") -> Mutant:
    return Mutant(name, CONTRACT, old, new, within)


def _rendezvous(name: str, old: str, new: str, within: str = "") -> Mutant:
    return Mutant(name, RENDEZVOUS, old, new, within)


def _agent(name: str, old: str, new: str, within: str = "") -> Mutant:
    return Mutant(name, AGENT, old, new, within)


def _operator(name: str, old: str, new: str, within: str = "") -> Mutant:
    return Mutant(name, OPERATOR, old, new, within)


MUTANTS = (
    # ---- the break of a round's collectives
    _rendezvous(
        "the first node that counts no step breaks its collectives",
        "_all_have_ended(state)",
        "True",
    ),
    _rendezvous(
        "one that counts steps is not waited for",
        "all(m.accounted_for or has_ended_results(state, a) for a, m in round_.members.items())",
        "any(m.accounted_for or has_ended_results(state, a) for a, m in round_.members.items())",
    ),
    _rendezvous(
        "a lost node goes on with its state",
        "not is_member and agent.ended_in_time != agent.results_ended",
        "False",
    ),
    _agent(
        "broken collectives may be used",
        "replace(KILL, discard_state=True)",
        "KILL",
    ),
    # ---- the end of a round
    _rendezvous(
        "success with one member still running",
        "not all(m.state is MemberState.SUCCEEDED and not m.lost for m in round_.members.values())",
        "sum(m.state is not MemberState.SUCCEEDED or m.lost for m in round_.members.values()) > 1",
    ),
    _rendezvous(
        "success although a member was lost",
        "m.state is MemberState.SUCCEEDED and not m.lost",
        "m.state is MemberState.SUCCEEDED or m.lost",
    ),
    _rendezvous(
        "a failure is never charged",
        "reason is EndReason.WORKER_FAILED",
        "False",
    ),
    _rendezvous(
        "lost nodes are charged",
        "reason is EndReason.WORKER_FAILED",
        "reason in (EndReason.WORKER_FAILED, EndReason.AGENT_LOST)",
    ),
    _rendezvous(
        "what status has charged is charged again",
        "reason is EndReason.WORKER_FAILED and not state.is_counted(round_.id)",
        "reason is EndReason.WORKER_FAILED",
    ),
    _rendezvous(
        "one restart more than the budget",
        "state.charged_at(ended.time) >= state.settings.max_restarts",
        "state.charged_at(ended.time) > state.settings.max_restarts",
    ),
    _rendezvous(
        "one restart less than the budget",
        "state.charged_at(ended.time) >= state.settings.max_restarts",
        "state.charged_at(ended.time) + 1 >= state.settings.max_restarts",
    ),
    _rendezvous(
        "failures on lost nodes are the cause",
        "(f for f in round_.failures if f.pod not in excused)",
        "round_.failures",
    ),
    _rendezvous(
        "a broken collective is charged although a node was lost",
        "cause and not (broken_collective and (excused or ending.reason is not EndReason.WORKER_FAILED))",
        "cause",
    ),
    _rendezvous(
        "a round is concluded before its last member has stopped",
        "not all(m.accounted_for for m in round_.members.values())",
        "sum(not m.accounted_for for m in round_.members.values()) > 1",
    ),
    _rendezvous(
        "a failed member ends nothing",
        "m.state is MemberState.FAILED or m.pod in reported",
        "False",
    ),
    _rendezvous(
        "members are lost without the grace for a reconnect",
        "self.disconnected_at + RECONNECT_GRACE",
        "self.disconnected_at",
    ),
    _rendezvous(
        "a node that left the link is never lost",
        "agent is None or agent.expired(now)",
        "agent is None",
    ),
    _rendezvous(
        "a lost node joins before its workers have stopped",
        "replace(state.agents[agent_id], stale_round=round_.id, unresponsive=agent_id in connected)",
        "replace(state.agents[agent_id], stale_round=None, unresponsive=agent_id in connected)",
    ),
    # ---- planned ends
    _rendezvous(
        "the last step is the minimum",
        "PlannedEndDecision(max(steps), f'the last step is {max(steps)}')",
        "PlannedEndDecision(min(steps), f'the last step is {max(steps)}')",
    ),
    _rendezvous(
        "the last step is set before all have reported",
        "len(steps) == len(members)",
        "len(steps) >= len(members) - 1 and steps",
    ),
    _rendezvous(
        "a failure does not end a planned end",
        "round_.failures or any(m.lost or m.state is MemberState.FAILED for m in members.values())",
        "False",
    ),
    # ---- which nodes, which ranks
    _rendezvous(
        "unstable ranks",
        "place[n.agent_id]",
        "-place[n.agent_id]",
    ),
    _rendezvous(
        "ranks of nodes that stay follow the topology",
        "_behind_their_places(staying, _side_by_side(joining, topology), topology)",
        "_side_by_side([*staying, *joining], topology)",
    ),
    _rendezvous(
        "ranks follow the index only",
        "_behind_their_places(staying, _side_by_side(joining, topology), topology)",
        "staying + joining",
    ),
    _rendezvous(
        "joining nodes have the last ranks",
        "_behind_their_places(staying, _side_by_side(joining, topology), topology)",
        "staying + _side_by_side(joining, topology)",
    ),
    _rendezvous(
        "a joining node goes before the first of its place",
        "stays, *behind.get(at, ())",
        "*behind.get(at, ()), stays",
    ),
    _rendezvous(
        "all nodes join, also beyond the target",
        "sorted(pool, key=lambda n: (n.index >= desired_pods, n.agent_id not in place, n.index))[:size]",
        "sorted(pool, key=lambda n: (n.index >= desired_pods, n.agent_id not in place, n.index))",
    ),
    _rendezvous(
        "a node with an older round joins the next one",
        "agent.disconnected_at is not None or agent.stale_round is not None or departure_reason(state, agent)",
        "agent.disconnected_at is not None or departure_reason(state, agent)",
    ),
    _rendezvous(
        "two nodes suffice where three are needed",
        "len(ready) >= state.settings.min_nodes",
        "len(ready) >= state.settings.min_nodes - 1",
    ),
    _rendezvous(
        "spares stay standbys",
        "sorted(pool, key=lambda n: (n.index >= desired_pods, n.agent_id not in place, n.index))",
        "sorted((n for n in pool if not place or n.agent_id in place) if len(place) > 1 else pool, "
        "key=lambda n: (n.index >= desired_pods, n.agent_id not in place, n.index))",
    ),
    # ---- ends of machines
    _rendezvous(
        "a node that connects is not sent when its machine ends",
        "node_ends.known_ends(decision.state, [agent] if agent is not None else [], now)",
        "()",
    ),
    _rendezvous(
        "the operator's clock is taken for the coordinator's",
        "now + pod.time - view.sent_at",
        "pod.time",
    ),
    _rendezvous(
        "a standby store that takes over forgets when machines end",
        "node_ends.known_ends(decision.state, decision.state.agents.values(), now)",
        "()",
    ),
    # ---- messages and links
    _rendezvous(
        "messages of an old round count",
        "round_ is None or message.round != round_.id",
        "round_ is None",
    ),
    _rendezvous(
        "an older view of the operator is applied",
        "(view.lease, view.sequence) <= (state.operator_view.lease, state.operator_view.sequence)",
        "False",
    ),
    _rendezvous(
        "a closed store goes on",
        "replace(state, newer_store=incarnation)",
        "state",
    ),
    _rendezvous(
        "a reconnected member is not sent what it missed",
        "RoundDecision(state, (SendToAgent(agent.agent_id, end),), reason)",
        "RoundDecision(state, (), reason)",
    ),
    _rendezvous(
        "a member that leaves is displaced by the pod that replaces it",
        "newer or other.incarnation < agent.incarnation and _runs_workers(state, other)",
        "newer",
    ),
    _rendezvous(
        "a node with an older round is not sent the end of it",
        "last is not None and last.state is not MemberState.STOPPED",
        "False",
    ),
    # ---- batches
    _rendezvous(
        "any announcement may wait in a batch",
        "_announcement_may_wait(state, round_, event.agent_id, announce)",
        "True",
    ),
    _rendezvous(
        "any message of a member may wait in a batch",
        "agent.disconnected_at is None and _message_may_wait(state, round_, member, event, counts)",
        "True",
    ),
    _rendezvous(
        "recovery waits for the whole batch",
        "not due and counts.connected + 1 < wanted",
        "True",
    ),
    # ---- a lost store
    _rendezvous(
        "a round is restored without a missing member",
        "len(found) == size",
        "len(found) >= size - 1",
    ),
    _rendezvous(
        "failures that a recovering store is sent are forgotten",
        "not isinstance(message, WorkersFailed)",
        "True",
    ),
    _rendezvous(
        "succeeded nodes run again before the operator has answered",
        "found and not state.operator_seen and all(one or m.state is MemberState.SUCCEEDED for m in found.values())",
        "False and all(one or m.state is MemberState.SUCCEEDED for m in found.values())",
    ),
    _rendezvous(
        "an outcome from the operator is not adopted",
        "finish is None or state.outcome is not None",
        "True or finish is None",
    ),
    # ---- confirmations
    _rendezvous(
        "a confirmation never expires",
        "state.confirmed_until is None or now >= state.confirmed_until",
        "state.confirmed_until is None",
    ),
    _rendezvous(
        "no confirmation is needed",
        "not (state.operator_seen or state.successor) or not _lacks_majority(state)",
        "True",
    ),
    _rendezvous(
        "a confirmation for half of the nodes holds for any number",
        "state.confirmed_half and not _exactly_half_missing(state)",
        "False",
    ),
    _rendezvous(
        "half of the nodes suffice without a confirmation",
        "2 * self.missing >= self.size",
        "2 * self.missing > self.size",
    ),
    _rendezvous(
        "a confirmation of an older request counts",
        "view.confirmed_request != open_request(state)",
        "not view.confirmed_request",
    ),
    # ---- the standby store
    _rendezvous(
        "a standby store takes over with half of the nodes",
        "state.operator_seen and not state.restarted and 2 * connected > size",
        "state.operator_seen and not state.restarted and connected and 2 * connected >= size",
    ),
    _rendezvous(
        "a standby store takes over with an older round",
        "newest is None or state.is_outdated(newest)",
        "newest is None",
    ),
    # ---- the agent
    _agent(
        "success with one worker still running",
        "if round_.running_ranks:\n    return AgentDecision(state)",
        "",
    ),
    _agent(
        "a greeting forgets the failure",
        "round_ is not None and round_.failure is not None",
        "False",
    ),
    _agent(
        "a cut-off node goes on",
        "AgentDecision(frozen, (FreezeWorkers(True), Log(f'{reason}: the workers are frozen')))",
        "AgentDecision(state, (Log(f'{reason}: the workers are frozen'),))",
    ),
    _agent(
        "a node that ends on plan reports success",
        "if round_.stopped_as_planned:\n    return begin_stop(state, state.stop_grace)",
        "",
    ),
    _agent(
        "a new round starts while the last one runs",
        "not isinstance(state.activity, Idle)",
        "False",
        within="start_round",
    ),
    _agent(
        "the workers stop at a last step that they have passed",
        "round_ is None or round_id != round_.id or not isinstance(state.activity, Running)",
        "True",
        within="last_step_missed",
    ),
    # ---- the operator
    _operator(
        "the operator's budget is off by one",
        "window.count >= spec.max_restarts",
        "window.count > spec.max_restarts",
    ),
    _operator(
        "the operator counts a round again",
        "e.round > charged",
        "e.round >= charged",
    ),
    _operator(
        "the operator charges every ended round",
        "rule is None and not ended.charged or _excused(ended.failure, decisions)",
        "_excused(ended.failure, decisions)",
    ),
    _operator(
        "scaling down deletes the lowest index",
        "{(index, incarnations[index]) for index in ctx.indices}",
        "set(list(enumerate(incarnations))[-ctx.spec.settings.desired_pods:])",
    ),
    _operator(
        "pods below the target are deleted",
        "unwanted and newest_ended.get(pod.index) != pod.uid",
        "(unwanted or pod.index == 0) and newest_ended.get(pod.index) != pod.uid",
    ),
    _operator(
        "a confirmation while an older store runs",
        "if not older:\n    return report.confirmation_request",
        "if True:\n    return report.confirmation_request",
    ),
    _operator(
        "a lost store is not replaced",
        "_succeed(ctx, f'{name} no longer exists')",
        "StorePlan(current, None, Actions())",
    ),
    _operator(
        "a pod is created before its predecessor has ended",
        "_older(ctx, decision, new)",
        "()",
    ),
    # ---- steps of size
    _contract(
        "an off-step target is rounded up",
        "nodes - (nodes - low) % increment",
        "nodes + (low - nodes) % increment",
    ),
    _contract(
        "a round takes every node up to the target",
        "allowed_size(min(nodes, self.target), self.min_nodes, self.increment)",
        "min(nodes, self.target)",
    ),
    _rendezvous(
        "a round ends for any joining node",
        "if places <= 0:\n"
        "    return None if state.joiners_since is None else RoundDecision(replace(state, "
        "joiners_since=None))",
        "if free <= 0 or not joining:\n"
        "    return None if state.joiners_since is None else RoundDecision(replace(state, "
        "joiners_since=None))",
    ),
    # ---- failure rules
    _contract(
        "rules are tried in reverse order",
        "(rule for rule in rules if rule.matches(exit_code, reasons, conditions))",
        "(rule for rule in tuple(rules)[::-1] if rule.matches(exit_code, reasons, conditions))",
    ),
    _contract(
        "the first rule is never tried",
        "(rule for rule in rules if rule.matches(exit_code, reasons, conditions))",
        "(rule for rule in tuple(rules)[1:] if rule.matches(exit_code, reasons, conditions))",
    ),
    _contract(
        "NotIn selects what In selects",
        "exit_code is not None and found is (self.operator is ExitCodeOperator.IN)",
        "found",
    ),
    _contract(
        "a signal has no exit code",
        "exit_code is not None or signal_name not in signal.Signals.__members__",
        "True",
    ),
    _rendezvous(
        "what a rule ignores is charged",
        "rule.action not in UNCOUNTED_ACTIONS",
        "True",
    ),
    _rendezvous(
        "FailJob restarts the workers",
        "ended.action is FailureAction.FAIL_JOB",
        "False",
    ),
    _operator(
        "the operator charges what a rule ignores",
        "case FailureAction.IGNORE:\n    return budget.record(record, matched)",
        "case FailureAction.IGNORE:\n    return budget.charge(ctx.spec, failure)",
    ),
    _operator(
        "the operator counts what a rule ignores as a restart",
        "case FailureAction.IGNORE:\n    return budget.record(record, matched)",
        "case FailureAction.IGNORE:\n    return budget.restart_uncounted(outage).record(record, matched)",
    ),
    _operator(
        "a pod that FailJob matches is replaced",
        "budget.failed_by_rule or record",
        "budget.failed_by_rule",
    ),
    # ---- the restart window
    _contract(
        "the restart window never ends",
        "RestartWindow() if seconds and time >= self.start + seconds else self",
        "self",
    ),
    _contract(
        "each restart begins the restart window again",
        "now.start if now.count else time",
        "time",
    ),
    _contract(
        "a new restart window goes on with the old count",
        "now.count + 1",
        "self.count + 1",
    ),
    _operator(
        "the operator does not see the end of the restart window",
        "self.window.at(failure.time, spec.restart_window)",
        "self.window",
    ),
    # ---- restartStrategy Recreate, successPolicy Any
    _rendezvous(
        "Recreate keeps one pod of the round",
        "(m.pod for m in round_.members.values())",
        "(m.pod for m in tuple(round_.members.values())[1:])",
    ),
    _rendezvous(
        "Recreate keeps the pods that a lost node leaves",
        "ended.reason in (EndReason.WORKER_FAILED, EndReason.AGENT_LOST)",
        "ended.reason is EndReason.WORKER_FAILED",
    ),
    _rendezvous(
        "Any waits for all members",
        "if state.settings.success_policy is SuccessPolicy.ANY:\n"
        "    return _declare_success_of_one(state, round_, now)",
        "if False:\n    return _declare_success_of_one(state, round_, now)",
    ),
    _rendezvous(
        "Any ends the job at the first failure",
        "(m.pod for m in round_.members.values() if m.state is MemberState.SUCCEEDED)",
        "(m.pod for m in round_.members.values() if m.state.value in ('Succeeded', 'Failed'))",
    ),
    # ---- a cluster without room, a suspended job
    _operator(
        "a job without room has a target below its minimum",
        "max(spec.min_replicas, spec.settings.desired_pods - len(missing.indices))",
        "spec.settings.desired_pods - len(missing.indices)",
    ),
    _operator(
        "pods without room are never asked for again",
        "frozenset() if placed else indices",
        "indices",
    ),
    _operator(
        "all pods without room are withdrawn",
        "self.indices - {min(self.indices)}",
        "self.indices",
    ),
    _operator(
        "pods that were given back are never asked for again",
        "before if ctx.now < _retry_at(ctx, before, before.since) else BackOff(before.attempts)",
        "before",
    ),
    _operator(
        "a round does not end the row of times that pods were given back",
        "ctx.spec.wait_for_min is None or training.formed or training.is_new_round",
        "ctx.spec.wait_for_min is None",
    ),
    _operator(
        "a job resumes before its pods have ended",
        "_anything_left(ctx) if was_suspended(ctx) else has_changed(ctx)",
        "not was_suspended(ctx) and has_changed(ctx)",
    ),
    _operator(
        "a suspended job keeps its store",
        "actions + delete_store_and_services(ctx, _WHY)",
        "actions",
    ),
    _operator(
        "a resumed job goes on with the same execution",
        "if decisions.resumes:\n    return attempts + 1",
        "",
    ),
    _operator(
        "the stores of the next execution begin at 0 again",
        "0 if ctx.status.execution_attempts <= 1 else next_incarnation(ctx)",
        "0",
    ),
    # ---- what the watches delivered
    _operator(
        "by the cache, stores are not sent what has changed",
        "_sent(decided) != memory.sent or decided.withheld != memory.withheld",
        "decided.withheld != memory.withheld",
    ),
    _operator(
        "a pod is replaced by a late view",
        "moved or replaced or new.standby_store != old.standby_store is not None or _ends(after) != _ends(before)",
        "moved or new.standby_store != old.standby_store is not None or _ends(after) != _ends(before)",
    ),
    _operator(
        "a failure is charged by a late view",
        "if any(before.get(name) != after.get(name) for name in _DECISIONS):\n    return True",
        "",
    ),
    _operator(
        "pods are deleted by a late view",
        "if not all(map(_creates, decided.actions)):\n    return True",
        "",
    ),
)
