"""The mutants: small replacements in the source of the pure decisions, each of them a plausible mistake."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[3]
CONTRACT = "agent/elasticjob/_runtime/contract"
RENDEZVOUS = "agent/elasticjob/_runtime/rendezvous"
STATE_MACHINE = "agent/elasticjob/_runtime/agent/state_machine"
OPERATOR = "operator/elasticjob_operator"


@dataclass(frozen=True)
class Mutant:
    """One mistake: `old` occurs exactly once in the file, and `new` replaces it."""

    name: str
    path: str
    old: str
    new: str

    def apply(self, root: Path) -> None:
        """Write the mistake into the tree at `root`; raise ValueError if the source has changed."""
        file = root / self.path
        source = file.read_text()
        if source.count(self.old) != 1:
            raise ValueError(f"{self.name}: {self.path} has {source.count(self.old)} of {self.old!r}")
        file.write_text(source.replace(self.old, self.new))


def _in_package(name: str, package: str, module: str, old: str, new: str) -> Mutant:
    """Return a mutant of the module of this name, in whichever folder of the package it is."""
    paths = sorted((REPOSITORY / package).rglob(f"{module}.py"))
    if len(paths) != 1:
        raise ValueError(f"{name}: {package} has {len(paths)} modules {module}")
    return Mutant(name, str(paths[0].relative_to(REPOSITORY)), old, new)


def _contract(name: str, module: str, old: str, new: str) -> Mutant:
    return _in_package(name, CONTRACT, module, old, new)


def _rendezvous(name: str, module: str, old: str, new: str) -> Mutant:
    return _in_package(name, RENDEZVOUS, module, old, new)


def _machine(name: str, old: str, new: str) -> Mutant:
    return _in_package(name, STATE_MACHINE, "decide", old, new)


def _plan(name: str, module: str, old: str, new: str) -> Mutant:
    return _in_package(name, f"{OPERATOR}/plan", module, old, new)


MUTANTS = (
    # ---- the break of a round's collectives
    _rendezvous(
        "the first node that counts no step breaks its collectives",
        "round_break",
        "all_have = _all_have_ended(state)",
        "all_have = True",
    ),
    _rendezvous(
        "one that counts steps is not waited for",
        "round_break",
        "return ending and all(m.accounted_for or",
        "return ending and any(m.accounted_for or",
    ),
    _rendezvous(
        "a lost node goes on with its state",
        "round_break",
        "return not is_member and agent.ended_in_time != agent.results_ended",
        "return False",
    ),
    _machine(
        "broken collectives may be used",
        "replace(_KILL, discard_state=True)",
        "_KILL",
    ),
    # ---- the end of a round
    _rendezvous(
        "success with one member still running",
        "round_conclusion",
        "if not all(m.state is MemberState.SUCCEEDED and not m.lost for m in round_.members.values()):",
        "if sum(m.state is not MemberState.SUCCEEDED or m.lost for m in round_.members.values()) > 1:",
    ),
    _rendezvous(
        "success although a member was lost",
        "round_conclusion",
        "m.state is MemberState.SUCCEEDED and not m.lost for m",
        "m.state is MemberState.SUCCEEDED or m.lost for m",
    ),
    _rendezvous(
        "a failure is never charged",
        "round_conclusion",
        "charged = reason is EndReason.WORKER_FAILED and ",
        "charged = False and ",
    ),
    _rendezvous(
        "lost nodes are charged",
        "round_conclusion",
        "charged = reason is EndReason.WORKER_FAILED and ",
        "charged = reason in (EndReason.WORKER_FAILED, EndReason.AGENT_LOST) and ",
    ),
    _rendezvous(
        "what status has charged is charged again",
        "round_conclusion",
        " and not state.is_counted(round_.id)",
        "",
    ),
    _rendezvous(
        "one restart more than the budget",
        "round_conclusion",
        "state.charged_at(ended.time) >= state.settings.max_restarts",
        "state.charged_at(ended.time) > state.settings.max_restarts",
    ),
    _rendezvous(
        "one restart less than the budget",
        "round_conclusion",
        "state.charged_at(ended.time) >= state.settings.max_restarts",
        "state.charged_at(ended.time) + 1 >= state.settings.max_restarts",
    ),
    _rendezvous(
        "failures on lost nodes are the cause",
        "round_conclusion",
        "cause = root_cause(f for f in round_.failures if f.pod not in excused)",
        "cause = root_cause(round_.failures)",
    ),
    _rendezvous(
        "a broken collective is charged although a node was lost",
        "round_conclusion",
        "if cause and not (broken_collective and (excused or ending.reason is not EndReason.WORKER_FAILED)):",
        "if cause:",
    ),
    _rendezvous(
        "a round is concluded before its last member has stopped",
        "round_conclusion",
        "round_.ending is None or not all(m.accounted_for for m in round_.members.values()):\n"
        "        return None\n    ended",
        "round_.ending is None or sum(not m.accounted_for for m in round_.members.values()) > 1:\n"
        "        return None\n    ended",
    ),
    _rendezvous(
        "a failed member ends nothing",
        "round_end",
        "if m.state is MemberState.FAILED or m.pod in reported]",
        "if False]",
    ),
    _rendezvous(
        "members are lost without the grace for a reconnect",
        "agents",
        "now >= self.disconnected_at + RECONNECT_GRACE",
        "now >= self.disconnected_at",
    ),
    _rendezvous(
        "a node that left the link is never lost",
        "lost_members",
        "if agent is None or agent.expired(now):\n        return True",
        "if agent is None:\n        return True",
    ),
    _rendezvous(
        "a lost node joins before its workers have stopped",
        "lost_members",
        "stale_round=round_.id, unresponsive",
        "stale_round=None, unresponsive",
    ),
    # ---- planned ends
    _rendezvous(
        "the last step is the minimum",
        "planned_end",
        "PlannedEndDecision(max(steps), f",
        "PlannedEndDecision(min(steps), f",
    ),
    _rendezvous(
        "the last step is set before all have reported",
        "planned_end",
        "if len(steps) == len(members):",
        "if len(steps) >= len(members) - 1 and steps:",
    ),
    _rendezvous(
        "a failure does not end a planned end",
        "planned_end",
        "if round_.failures or any(m.lost or m.state is MemberState.FAILED for m in members.values()):",
        "if False:",
    ),
    # ---- which nodes, which ranks
    _rendezvous(
        "unstable ranks",
        "rank_assignment",
        "key=lambda n: place[n.agent_id])",
        "key=lambda n: -place[n.agent_id])",
    ),
    _rendezvous(
        "ranks of nodes that stay follow the topology",
        "rank_assignment",
        "_behind_their_places(staying, _side_by_side(joining, topology), topology)",
        "_side_by_side([*staying, *joining], topology)",
    ),
    _rendezvous(
        "ranks follow the index only",
        "rank_assignment",
        "_behind_their_places(staying, _side_by_side(joining, topology), topology)",
        "staying + joining",
    ),
    _rendezvous(
        "joining nodes have the last ranks",
        "rank_assignment",
        "_behind_their_places(staying, _side_by_side(joining, topology), topology)",
        "staying + _side_by_side(joining, topology)",
    ),
    _rendezvous(
        "a joining node goes before the first of its place",
        "rank_assignment",
        "(stays, *behind.get(at, ()))]",
        "(*behind.get(at, ()), stays)]",
    ),
    _rendezvous("all nodes join, also beyond the target", "rank_assignment", "n.index))[:size]", "n.index))"),
    _rendezvous(
        "a node with an older round joins the next one",
        "queries",
        "or agent.stale_round is not None or departure",
        "or departure",
    ),
    _rendezvous(
        "two nodes suffice where three are needed",
        "round_start",
        "if has_survivor and len(ready) >= state.settings.min_nodes:",
        "if has_survivor and len(ready) >= state.settings.min_nodes - 1:",
    ),
    _rendezvous(
        "spares stay standbys",
        "rank_assignment",
        "preferred = sorted(pool,",
        "preferred = sorted((n for n in pool if not place or n.agent_id in place) if len(place) > 1 else pool,",
    ),
    # ---- ends of machines
    _rendezvous(
        "a node that connects is not sent when its machine ends",
        "apply_event",
        "node_ends.known_ends(decision.state, [agent] if agent is not None else [], now)",
        "()",
    ),
    _rendezvous(
        "the operator's clock is taken for the coordinator's",
        "node_ends",
        "now + pod.time - view.sent_at",
        "pod.time",
    ),
    _rendezvous(
        "a standby store that takes over forgets when machines end",
        "standby_store",
        "node_ends.known_ends(decision.state, decision.state.agents.values(), now)",
        "()",
    ),
    # ---- messages and links
    _rendezvous(
        "messages of an old round count",
        "agent_messages",
        "if round_ is None or message.round != round_.id:\n        return state\n    member",
        "if round_ is None:\n        return state\n    member",
    ),
    _rendezvous(
        "an older view of the operator is applied",
        "operator_views",
        "if (view.lease, view.sequence) <= (state.operator_view.lease, state.operator_view.sequence):",
        "if False:",
    ),
    _rendezvous(
        "a closed store goes on",
        "apply_event",
        "return RoundDecision(replace(state, newer_store=incarnation), reason=reason)",
        "return RoundDecision(state, reason=reason)",
    ),
    _rendezvous(
        "a reconnected member is not sent what it missed",
        "announcements",
        "return RoundDecision(state, (SendToAgent(agent.agent_id, end),), reason)",
        "return RoundDecision(state, (), reason)",
    ),
    _rendezvous(
        "a member that leaves is displaced by the pod that replaces it",
        "announcements",
        "return newer or (other.incarnation < agent.incarnation and _must_stop(state, other))",
        "return newer",
    ),
    _rendezvous(
        "a node with an older round is not sent the end of it",
        "announcements",
        "    if last is not None and last.state is not MemberState.STOPPED:\n        return stop_stale_round",
        "    if False:\n        return stop_stale_round",
    ),
    # ---- batches
    _rendezvous(
        "any announcement may wait in a batch",
        "event_batch",
        "return _announcement_may_wait(state, round_, event.agent_id, event.message)",
        "return True",
    ),
    _rendezvous(
        "any message of a member may wait in a batch",
        "event_batch",
        "return agent.disconnected_at is None and _message_may_wait(state, round_, member, event, counts)",
        "return True",
    ),
    _rendezvous(
        "recovery waits for the whole batch",
        "event_batch",
        "return not due and counts.connected + 1 < wanted",
        "return True",
    ),
    # ---- a lost store
    _rendezvous(
        "a round is restored without a missing member",
        "store_recovery",
        "if newest is not None and len(found) == size:",
        "if newest is not None and len(found) >= size - 1:",
    ),
    _rendezvous(
        "failures that a recovering store is sent are forgotten",
        "store_recovery",
        "if not isinstance(message, WorkersFailed):\n        return state",
        "if True:\n        return state",
    ),
    _rendezvous(
        "succeeded nodes run again before the operator has answered",
        "store_recovery",
        "if found and not state.operator_seen and all(",
        "if False and all(",
    ),
    _rendezvous(
        "an outcome from the operator is not adopted",
        "job_outcome",
        "if finish is None or state.outcome is not None:",
        "if True or finish is None:",
    ),
    # ---- confirmations
    _rendezvous(
        "a confirmation never expires",
        "confirmation",
        "if state.confirmed_until is None or now >= state.confirmed_until:",
        "if state.confirmed_until is None:",
    ),
    _rendezvous(
        "no confirmation is needed",
        "confirmation",
        "if not (state.operator_seen or state.successor) or not _lacks_majority(state):",
        "if True:",
    ),
    _rendezvous(
        "a confirmation for half of the nodes holds for any number",
        "confirmation",
        "return state.confirmed_half and not _exactly_half_missing(state)",
        "return False",
    ),
    _rendezvous(
        "half of the nodes suffice without a confirmation",
        "round",
        "return self.missing > 0 and 2 * self.missing >= self.size",
        "return self.missing > 0 and 2 * self.missing > self.size",
    ),
    _rendezvous(
        "a confirmation of an older request counts",
        "confirmation",
        "if state.confirmation_requested_at is None or view.confirmed_request != open_request(state):",
        "if state.confirmation_requested_at is None or not view.confirmed_request:",
    ),
    # ---- the standby store
    _rendezvous(
        "a standby store takes over with half of the nodes",
        "standby_store",
        "not state.restarted and 2 * connected > size",
        "not state.restarted and connected and 2 * connected >= size",
    ),
    _rendezvous(
        "a standby store takes over with an older round",
        "store_recovery",
        "if newest is None or state.is_outdated(newest):",
        "if newest is None:",
    ),
    # ---- the agent
    _machine(
        "success with one worker still running",
        "    if state.running_ranks:\n        return AgentDecision(state)\n",
        "",
    ),
    _machine(
        "a greeting forgets the failure",
        "if state.assignment and state.failure:\n        messages",
        "if False:\n        messages",
    ),
    _machine(
        "a cut-off node goes on",
        "return AgentDecision(replace(state, frozen=True), (FreezeWorkers(True), log))",
        "return AgentDecision(state, (log,))",
    ),
    _machine(
        "a node that ends on plan reports success",
        "    if state.stopped_as_planned:\n        return _stop(state, state.stop_grace)\n",
        "",
    ),
    _machine(
        "a new round starts while the last one runs",
        "if state.phase is not AgentPhase.IDLE:\n        stopped",
        "if False:\n        stopped",
    ),
    _machine(
        "the workers stop at a last step that they have passed",
        "if round_id != state.round or state.phase is not AgentPhase.RUNNING:\n        return AgentDecision(state)\n"
        "    stopped = _stop(state, max(",
        "if True:\n        return AgentDecision(state)\n    stopped = _stop(state, max(",
    ),
    # ---- the operator
    _plan(
        "the operator's budget is off by one",
        "budget",
        "if window.count >= spec.max_restarts:",
        "if window.count > spec.max_restarts:",
    ),
    _plan(
        "the operator counts a round again",
        "context",
        "sorted((e for e in ended if charged is None or e.round > charged), key=lambda e: e.round)",
        "sorted((e for e in ended if charged is None or e.round >= charged), key=lambda e: e.round)",
    ),
    _plan(
        "the operator charges every ended round",
        "budget",
        "if (rule is None and not ended.charged) or _excused(ended.failure, decisions):",
        "if _excused(ended.failure, decisions):",
    ),
    _plan(
        "scaling down deletes the lowest index",
        "workers",
        "{(index, incarnations[index]) for index in ctx.indices}",
        "set(list(enumerate(incarnations))[-ctx.spec.settings.desired_pods :])",
    ),
    _plan(
        "pods below the target are deleted",
        "workers",
        'elif unwanted and newest_ended.get(pod.index) != pod.uid:',
        "elif (unwanted or pod.index == 0) and newest_ended.get(pod.index) != pod.uid:",
    ),
    _plan(
        "a confirmation while an older store runs",
        "store_confirmation",
        "    if not older:\n        return report.confirmation_request\n",
        "    if True:\n        return report.confirmation_request\n",
    ),
    _plan(
        "a lost store is not replaced",
        "stores",
        '    if refusal is None:\n        return _succeed(ctx, f"{name} no longer exists")\n',
        "    if refusal is None:\n        return StorePlan(current, None, Actions())\n",
    ),
    _plan(
        "a pod is created before its predecessor has ended",
        "workers",
        "if older := _older(ctx, decision, new):",
        "if older := ():",
    ),
    # ---- steps of size
    _contract(
        "an off-step target is rounded up",
        "round_settings",
        "return nodes - (nodes - low) % increment",
        "return nodes + (low - nodes) % increment",
    ),
    _contract(
        "a round takes every node up to the target",
        "round_settings",
        "return allowed_size(min(nodes, self.target), self.min_nodes, self.increment)",
        "return min(nodes, self.target)",
    ),
    _rendezvous(
        "a round ends for any joining node",
        "round_size",
        "    if places <= 0:\n",
        "    if free <= 0 or not joining:\n",
    ),
    # ---- failure rules
    _contract(
        "rules are tried in reverse order",
        "failure_rules",
        "return next((rule for rule in rules if rule.matches(",
        "return next((rule for rule in tuple(rules)[::-1] if rule.matches(",
    ),
    _contract(
        "the first rule is never tried",
        "failure_rules",
        "return next((rule for rule in rules if rule.matches(",
        "return next((rule for rule in tuple(rules)[1:] if rule.matches(",
    ),
    _contract(
        "NotIn selects what In selects",
        "failure_rules",
        "return exit_code is not None and found is (self.operator is ExitCodeOperator.IN)",
        "return found",
    ),
    _contract(
        "a signal has no exit code",
        "failure_rules",
        "    if exit_code is not None or signal_name not in signal.Signals.__members__:\n",
        "    if True:\n",
    ),
    _rendezvous(
        "what a rule ignores is charged",
        "round_conclusion",
        "counts = rule.action not in UNCOUNTED_ACTIONS",
        "counts = True",
    ),
    _rendezvous(
        "FailJob restarts the workers",
        "round_conclusion",
        "failed_by_rule = ended.action is FailureAction.FAIL_JOB",
        "failed_by_rule = False",
    ),
    _plan(
        "the operator charges what a rule ignores",
        "budget",
        "        case FailureAction.IGNORE:\n            return budget.record(record, matched)",
        "        case FailureAction.IGNORE:\n            return budget.charge(ctx.spec, failure)",
    ),
    _plan(
        "the operator counts what a rule ignores as a restart",
        "budget",
        "        case FailureAction.IGNORE:\n            return budget.record(record, matched)",
        "        case FailureAction.IGNORE:\n"
        "            return budget.restart_uncounted(outage).record(record, matched)",
    ),
    _plan(
        "a pod that FailJob matches is replaced",
        "budget",
        "failed_by_rule=budget.failed_by_rule or record",
        "failed_by_rule=budget.failed_by_rule",
    ),
    # ---- the restart window
    _contract(
        "the restart window never ends",
        "restart_window",
        "return RestartWindow() if seconds and time >= self.start + seconds else self",
        "return self",
    ),
    _contract(
        "each restart begins the restart window again",
        "restart_window",
        "return RestartWindow(now.count + 1, now.start if now.count else time)",
        "return RestartWindow(now.count + 1, time)",
    ),
    _contract(
        "a new restart window goes on with the old count",
        "restart_window",
        "return RestartWindow(now.count + 1, now.start if now.count else time)",
        "return RestartWindow(self.count + 1, now.start if now.count else time)",
    ),
    _plan(
        "the operator does not see the end of the restart window",
        "budget",
        "window = self.window.at(failure.time, spec.restart_window)",
        "window = self.window",
    ),
    # ---- restartStrategy Recreate, successPolicy Any
    _rendezvous(
        "Recreate keeps one pod of the round",
        "round_conclusion",
        "return dict.fromkeys((m.pod for m in round_.members.values()), why)",
        "return dict.fromkeys((m.pod for m in tuple(round_.members.values())[1:]), why)",
    ),
    _rendezvous(
        "Recreate keeps the pods that a lost node leaves",
        "round_conclusion",
        "fault = ended.reason in (EndReason.WORKER_FAILED, EndReason.AGENT_LOST)",
        "fault = ended.reason is EndReason.WORKER_FAILED",
    ),
    _rendezvous(
        "Any waits for all members",
        "round_conclusion",
        "if state.settings.success_policy is SuccessPolicy.ANY:",
        "if False:",
    ),
    _rendezvous(
        "Any ends the job at the first failure",
        "round_conclusion",
        "next((m.pod for m in round_.members.values() if m.state is MemberState.SUCCEEDED), None)",
        "next((m.pod for m in round_.members.values() if m.state.value in ('Succeeded', 'Failed')), None)",
    ),
    # ---- a cluster without room, a suspended job
    _plan(
        "a job without room has a target below its minimum",
        "capacity",
        "room = min(spec.target, max(spec.min_replicas, spec.settings.desired_pods - len(missing.indices)))",
        "room = min(spec.target, spec.settings.desired_pods - len(missing.indices))",
    ),
    _plan(
        "pods without room are never asked for again",
        "capacity",
        "return frozenset() if placed else indices",
        "return indices",
    ),
    Mutant(
        "all pods without room are withdrawn",
        f"{OPERATOR}/model/job/status.py",
        "return self.indices - {min(self.indices)}",
        "return self.indices",
    ),
    _plan(
        "pods that were given back are never asked for again",
        "capacity",
        "return before if ctx.now < _retry_at(ctx, before, before.since) else BackOff(before.attempts)",
        "return before",
    ),
    _plan(
        "a round does not end the row of times that pods were given back",
        "capacity",
        "if ctx.spec.wait_for_min is None or world.formed or world.is_new_round:",
        "if ctx.spec.wait_for_min is None:",
    ),
    _plan(
        "a job resumes before its pods have ended",
        "suspension",
        "return _must_wait(ctx) or (_anything_left(ctx) if was_suspended(ctx) else has_changed(ctx))",
        "return _must_wait(ctx) or (not was_suspended(ctx) and has_changed(ctx))",
    ),
    _plan(
        "a suspended job keeps its store",
        "suspension",
        "return actions + delete_store_and_services(ctx, _WHY) + Actions(forced)",
        "return actions + Actions(forced)",
    ),
    _plan(
        "a resumed job goes on with the same execution",
        "next_status",
        "    if job.resumes:\n        return attempts + 1\n",
        "",
    ),
    _plan(
        "the stores of the next execution begin at 0 again",
        "stores",
        "0 if ctx.status.execution_attempts <= 1 else next_incarnation(ctx)",
        "0",
    ),
    # ---- what the watches delivered
    Mutant(
        "by the cache, stores are not sent what has changed",
        f"{OPERATOR}/reconcile/controller.py",
        "changed = _sent(decided) != memory.sent or ",
        "changed = ",
    ),
    Mutant(
        "a pod is replaced by a late view",
        f"{OPERATOR}/plan/staleness.py",
        "return moved or replaced or ",
        "return moved or ",
    ),
    Mutant(
        "a failure is charged by a late view",
        f"{OPERATOR}/plan/staleness.py",
        "    if any(before.get(name) != after.get(name) for name in _DECISIONS):\n        return True\n",
        "",
    ),
    Mutant(
        "pods are deleted by a late view",
        f"{OPERATOR}/plan/staleness.py",
        "    if not all(map(_creates, decided.actions)):\n        return True\n",
        "",
    ),
)  # fmt: skip
