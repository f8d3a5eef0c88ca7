"""failurePolicy.rules in the operator's plan: what ends the job, what counts, and what status and Events show."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from elasticjob._runtime.contract.failures.failure_rules import UNCOUNTED_ACTIONS, FailureAction, FailureRule
from elasticjob._runtime.contract.failures.failure_text import describe_out_of_memory
from elasticjob._runtime.contract.messages import FailureClass, Outcome, RoundEnded, RoundPhase, Termination
from elasticjob._runtime.contract.names import RoundId
from elasticjob_operator.actions import CreateWorker, DeletePod
from elasticjob_operator.model.cluster.pods import Pod
from elasticjob_operator.model.cluster.raw import timestamp
from elasticjob_operator.model.observed import Observed
from elasticjob_operator.plan import Plan
from elasticjob_operator.plan.pods.pod_decisions import MIN_POD_LIFETIME
from support.operator.build import (
    NOW,
    Raw,
    conditions_of,
    ended,
    events_of,
    evicted,
    failure,
    gathering,
    job,
    killed,
    link,
    reasons_of,
    round_ended,
    run,
    status,
    status_of,
    steady,
    worker,
)

OUT_OF_MEMORY = describe_out_of_memory(unlimited=True)

DISRUPTED = {"type": "DisruptionTarget", "status": "True", "reason": "EvictionByEvictionAPI"}


def rule(action: str, **criterion: Any) -> Raw:
    return {"name": "mine", "action": action, **(criterion or {"onReasons": ["OOMKilled"]})}


def observed(*rules: Raw, pod: Pod | None = None, rounds: tuple[RoundEnded, ...] = (), **fields: Any) -> Observed:
    """Return a job with these rules and one restart in its budget; `pod` replaces that of index 0."""
    workers = (pod or worker(0), worker(1))
    live = [p for p in workers if p.running]
    policy = {"maxRestarts": 1, "rules": list(rules)}
    base = steady(workers=workers, last_report=gathering(*live, rounds=1, ended_rounds=rounds))
    return replace(base, job=job(status=status(rendezvousRound=1, **fields), failurePolicy=policy))


OOM = worker(0, **killed(1))
DRAINED = worker(0, deleting=NOW + 20, conditions=[DISRUPTED])

COUNTS: list[tuple[str, Raw, Pod, tuple[int, int], list[str]]] = [
    ("no rule matches", rule("Ignore", onReasons=["Hang"]), OOM, (1, 1), ["WorkerFailed"]),
    ("charged", rule("RestartGroup"), OOM, (1, 1), ["WorkerFailed", "FailurePolicyMatched"]),
    ("replaced", rule("ReplacePod"), OOM, (1, 1), ["WorkerFailed", "FailurePolicyMatched"]),
    ("replaced elsewhere", rule("ReplacePodAndAvoidNode"), OOM, (1, 1),
     ["WorkerFailed", "FailurePolicyMatched", "FailurePolicyMatched"]),
    ("a drain that avoids the node", rule("ReplacePodAndAvoidNode", onReasons=["Preempted"]), DRAINED, (1, 1),
     ["WorkerFailed", "FailurePolicyMatched", "FailurePolicyMatched"]),
    ("uncounted", rule("RestartGroupAndIgnoreMaxRestarts"), OOM, (1, 0), ["FailurePolicyMatched"]),
    ("ignored", rule("Ignore"), OOM, (0, 0), ["FailurePolicyMatched"]),
    ("an exit code", rule("Ignore", onExitCodes={"operator": "In", "values": [137]}), OOM, (0, 0),
     ["FailurePolicyMatched"]),
    ("a drain", rule("Ignore", onReasons=["Hang"]), DRAINED, (0, 0), []),
    ("a drain that counts", rule("RestartGroup", onPodConditions=[{"type": "DisruptionTarget"}]), DRAINED, (1, 1),
     ["WorkerFailed", "FailurePolicyMatched"]),
    ("a drain by its class", rule("RestartGroupAndIgnoreMaxRestarts", onReasons=["Preempted"]), DRAINED, (1, 0),
     ["FailurePolicyMatched"]),
    ("the exit code of a drained agent", rule("RestartGroup", onExitCodes={"operator": "NotIn", "values": [1]}),
     worker(0, **(ended(143) | {"conditions": [DISRUPTED]})), (0, 0), []),
    ("deleted by a user", rule("FailJob", onReasons=["Preempted", "Killed"]), worker(0, deleting=NOW + 20), (0, 0), []),
    ("did not start", rule("FailJob", onReasons=["Evicted", "Preempted"]), worker(0, **evicted()), (0, 0),
     ["PodStartFailed"]),
]  # fmt: skip


@pytest.mark.parametrize(("name", "given", "pod", "counts", "events"), COUNTS, ids=[row[0] for row in COUNTS])
def test_what_the_end_of_a_pod_counts(
    name: str, given: Raw, pod: Pod, counts: tuple[int, int], events: list[str]
) -> None:
    p = run(observed(given, pod=pod))
    status_ = status_of(p)
    assert (status_["restarts"], status_["restartsCountTowardsMax"]) == counts
    assert events_of(p, warning=True) == events
    assert "FailureTarget" not in conditions_of(p)


def test_status_and_the_event_name_the_rule_the_pod_and_the_exit_code() -> None:
    p = run(observed(rule("RestartGroupAndIgnoreMaxRestarts"), pod=OOM))
    last = status_of(p)["lastFailure"]
    assert (last["rule"], last["action"], last["class"]) == ("mine", "RestartGroupAndIgnoreMaxRestarts", "OOMKilled")
    assert status_of(p)["uncountedOutages"] == ["1.0.1"]
    (event,) = [e for e in p.event_records if e.reason == "FailurePolicyMatched"]
    assert event.message == (
        f"failurePolicy rule mine matched: bert-0-0 on n1 failed: {OUT_OF_MEMORY} (exit code 137); the workers "
        "restart, which does not count towards maxRestarts"
    )


def test_a_pod_that_a_rule_fails_the_job_for_has_no_successor() -> None:
    p = run(observed(rule("FailJob"), pod=OOM))
    target = conditions_of(p)["FailureTarget"]
    assert (target["status"], target["reason"]) == ("True", "FailurePolicyRule")
    for part in ("rule mine matched", "bert-0-0 on n1", "OOMKilled", "spec.failurePolicy.rules", "delete the job"):
        assert part in target["message"]
    assert not any(isinstance(a, CreateWorker) for a in p.actions)
    assert p.operator_view is not None
    assert p.operator_view.finish is not None
    assert p.operator_view.finish.reason == "FailurePolicyRule"
    status_ = status_of(p)
    assert (status_["restarts"], status_["lastFailure"]["rule"]) == (0, "mine")
    assert events_of(p, warning=True) == ["WorkerFailed", "FailurePolicyMatched", "FailurePolicyRule"]


def test_a_log_rule_that_fails_the_job_is_named() -> None:
    cause = failure(exit_code=None, exception="", message="loss is nan at step 6", log_rule="steps", ends_job=True)
    ended = round_ended(1, failure=cause, rule="logRules/steps", action=FailureAction.FAIL_JOB, charged=False)
    p = run(steady(last_report=gathering(worker(0), worker(1), rounds=1, ended_rounds=(ended,))))
    target = conditions_of(p)["FailureTarget"]
    assert target["reason"] == "FailurePolicyRule"
    for part in ("log rule steps matched: rank 0 in bert-0-0 on n1 failed: LogRule: loss is nan", "spec.logRules"):
        assert part in target["message"]
    assert status_of(p)["lastFailure"]["rule"] == "logRules/steps"


# ---- rounds ------------------------------------------------------------------------------------------------------


def by_rule(action: FailureAction, **more: Any) -> RoundEnded:
    """Return the end of round 1, where the coordinator has applied a rule."""
    cause = failure(exit_code=2, exception="")
    charged = action not in (*UNCOUNTED_ACTIONS, FailureAction.FAIL_JOB)
    return round_ended(1, failure=cause, rule="theirs", action=action, charged=charged, **more)


@pytest.mark.parametrize(
    ("action", "counts"),
    [
        (FailureAction.RESTART_GROUP, (1, 1)),
        (FailureAction.REPLACE_POD, (1, 1)),
        (FailureAction.RESTART_GROUP_UNCOUNTED, (1, 0)),
        (FailureAction.IGNORE, (0, 0)),
    ],
)
def test_the_coordinators_rule_decides_whatever_the_spec_says_now(
    action: FailureAction, counts: tuple[int, int]
) -> None:
    p = run(observed(rule("FailJob", onExitCodes={"operator": "In", "values": [2]}), rounds=(by_rule(action),)))
    status_ = status_of(p)
    assert (status_["restarts"], status_["restartsCountTowardsMax"]) == counts
    assert (status_["lastFailure"]["rule"], status_["lastFailure"]["action"]) == ("theirs", action.value)
    assert p.operator_view is not None
    assert (p.operator_view.charged, p.operator_view.charged_round) == (counts[1], RoundId(1, 0, 1))
    assert "FailureTarget" not in conditions_of(p)


def test_a_worker_and_a_pod_of_one_round_are_one_restart() -> None:
    p = run(observed(pod=OOM, rounds=(by_rule(FailureAction.RESTART_GROUP_UNCOUNTED),)))
    assert (status_of(p)["restarts"], status_of(p)["restartsCountTowardsMax"]) == (1, 1)


def test_a_rule_of_the_coordinator_fails_the_job() -> None:
    seen = observed(rounds=(by_rule(FailureAction.FAIL_JOB),))
    assert seen.link.report is not None
    finished = replace(seen.link.report, phase=RoundPhase.FINISHED, outcome=Outcome.FAILED, failure=failure())
    p = run(replace(seen, link=link(finished)))
    assert reasons_of(p)["FailureTarget"] == ("True", "FailurePolicyRule")
    assert (
        "rule theirs matched: rank 0 in bert-0-0 on n1 failed: exit code 2: bad"
        in conditions_of(p)["FailureTarget"]["message"]
    )
    assert status_of(p)["lastFailure"]["action"] == "FailJob"
    assert "FailurePolicyMatched" in events_of(p)


def test_a_round_that_ended_before_a_report_of_it_came_is_counted() -> None:
    seen = observed(rounds=(by_rule(FailureAction.RESTART_GROUP_UNCOUNTED),))
    assert seen.link.report is not None
    later = replace(seen.link.report, rounds=seen.job.status.rounds + 1, round=None, formed_at=0.0)
    later = replace(later, phase=RoundPhase.FINISHED, outcome=Outcome.FAILED, failure=failure())
    assert status_of(run(replace(seen, link=link(later))))["rendezvousRound"] == seen.job.status.rounds + 1


@pytest.mark.parametrize(
    ("exception", "reason"), [("SeparateWorldError", "TrainsApart"), ("RefusedCommandError", "CommandRefused")]
)
def test_what_no_restart_can_mend_has_its_own_reason(exception: str, reason: str) -> None:
    seen = observed(rounds=(by_rule(FailureAction.FAIL_JOB),))
    assert seen.link.report is not None
    apart = replace(failure(), exception=exception, message="it would train apart from the others")
    (ended_round,) = seen.link.report.ended_rounds
    ended_round = replace(ended_round, failure=apart, rule="", action=None)
    finished = replace(
        seen.link.report, phase=RoundPhase.FINISHED, outcome=Outcome.FAILED, failure=apart, ended_rounds=(ended_round,)
    )
    p = run(replace(seen, link=link(finished)))
    assert reasons_of(p)["FailureTarget"] == ("True", reason)
    pods = tuple(worker(i, **ended(1)) for i in range(2))
    over = run(replace(seen, job=job(status=status_of(p)), link=link(finished), workers=pods))
    assert reasons_of(over)["Failed"] == ("True", reason)
    target = conditions_of(p)["FailureTarget"]["message"]
    assert f"no restart can mend this; last failure: rank 0 in bert-0-0 on n1 failed: {exception}" in target
    assert "change the command as the message says" in target


def target_without_a_store(message: str) -> str:
    """Return the message of FailureTarget if only a pod's termination message tells that a rule failed the job."""
    termination = Termination(Outcome.FAILED, "FailurePolicyRule", RoundId(1, 0, 1), message)
    seen = observed(pod=worker(0, **ended(1, termination=termination)))
    p = run(replace(seen, link=replace(seen.link, connected=False, report=None, since=NOW)))
    assert reasons_of(p)["FailureTarget"] == ("True", "FailurePolicyRule")
    return str(conditions_of(p)["FailureTarget"]["message"])


def test_the_rule_is_known_from_a_termination_message_if_the_store_is_lost() -> None:
    message = "failurePolicy rule theirs matched: rank 0 in bert-0-0 failed: exit code 2"
    assert message in target_without_a_store(message)


def test_a_hang_that_fails_the_job_is_known_from_a_termination_message_if_the_store_is_lost() -> None:
    message = "training hung and hangPolicy.action is FailJob; last failure: rank 0 in bert-0-0: no progress for 60 s"
    target = target_without_a_store(message)
    assert target.startswith(f"{message}. ")
    assert "change spec.hangPolicy" in target


def test_the_coordinator_gets_the_rules() -> None:
    p = run(observed(rule("FailJob")))
    assert p.operator_view is not None
    expected = FailureRule("mine", FailureAction.FAIL_JOB, reasons=(FailureClass.OOM_KILLED.value,))
    assert p.operator_view.settings.failure_rules == (expected,)


@pytest.mark.parametrize(("action", "at_once"), [("RestartGroup", True), ("Ignore", False)])
def test_a_failure_that_does_not_count_is_not_repeated_as_fast_as_containers_start(action: str, at_once: bool) -> None:
    pod = worker(0, created=NOW - 1.0, **killed(1))
    p = run(observed(rule(action), pod=pod))
    assert bool([a for a in p.actions if isinstance(a, CreateWorker)]) is at_once
    later = run(observed(rule(action), pod=replace(pod, seen=NOW - MIN_POD_LIFETIME)))
    assert [a for a in later.actions if isinstance(a, CreateWorker)]


# ---- pods that a rule replaces -----------------------------------------------------------------------------------

WHY = {
    "worker": "failurePolicy rule theirs matched: rank 0 in bert-0-0 on n1 failed: exit code 2: bad",
    "pod": f"failurePolicy rule mine matched: bert-0-0 on n1 failed: {OUT_OF_MEMORY}",
}


def created(p: Plan) -> list[CreateWorker]:
    return [a for a in p.actions if isinstance(a, CreateWorker)]


@pytest.mark.parametrize("failed", ["worker", "pod"])
def test_a_new_pod_avoids_the_node_of_the_failed_one_for_avoid_node_seconds(failed: str) -> None:
    action = FailureAction.REPLACE_POD_AND_AVOID_NODE
    seen = observed(rounds=(by_rule(action),)) if failed == "worker" else observed(rule(action.value), pod=OOM)
    p = run(seen)
    assert created(p) == [CreateWorker("bert-0-1", 0, 1, ("n1",))]
    assert status_of(p)["incarnations"] == "1,0"
    (avoided,) = status_of(p)["avoidedNodes"]
    assert avoided == {
        "name": "n1", "since": timestamp(NOW), "until": timestamp(NOW + 86400), "why": WHY[failed],
        "reason": "FailurePolicyMatched",
    }  # fmt: skip
    event = [e for e in p.event_records if e.reason == "FailurePolicyMatched"][-1]
    assert event.message == f"{WHY[failed]}; new pods avoid n1 until {timestamp(NOW + 86400)}"
    pending = worker(0, 1, avoids="n1", phase="Pending", node="")
    known = {name: status_of(p)[name] for name in ("avoidedNodes", "incarnations", "rendezvousRound")}
    later = replace(steady(workers=(pending, worker(1)), **known), returned_nodes=frozenset({"n1"}))
    assert status_of(run(later))["avoidedNodes"] == [avoided], "its kubelet is not what was wrong"
    assert "avoidedNodes" not in status_of(run(later, NOW + 86401))


def test_the_pod_of_a_failed_worker_is_replaced_at_once_and_only_once() -> None:
    seen = observed(rounds=(by_rule(FailureAction.REPLACE_POD),))
    p = run(seen)
    assert created(p) == [CreateWorker("bert-0-1", 0, 1)]
    assert [a.name for a in p.actions if isinstance(a, DeletePod)] == ["bert-0-0"]
    assert "failurePolicy rule theirs matched a failure in bert-0-0; bert-0-1 replaces it" in [
        e.message for e in p.event_records if e.reason == "PodReplaced"
    ]
    assert "avoidedNodes" not in status_of(p)
    assert p.operator_view is not None
    assert [pod.pod for pod in p.operator_view.pods] == ["bert-0-1", "bert-1-0"]
    policy = {"maxRestarts": 1}
    written = replace(seen, job=job(status=dict(status_of(p)), failurePolicy=policy))
    assert created(run(replace(written, workers=(worker(0, 1), worker(1))))) == []


def test_the_node_is_avoided_though_the_agent_has_left_before_the_operator_saw_the_round() -> None:
    left = worker(0, **ended(143, termination=Termination(Outcome.LEFT, "NodeLeft", RoundId(1, 0, 1))))
    p = run(observed(pod=left, rounds=(by_rule(FailureAction.REPLACE_POD_AND_AVOID_NODE),)))
    assert created(p) == [CreateWorker("bert-0-1", 0, 1, ("n1",))]
    assert (status_of(p)["restarts"], status_of(p)["avoidedNodes"][0]["reason"]) == (1, "FailurePolicyMatched")


def test_a_rule_replaces_the_entry_of_a_lost_node_and_no_loss_replaces_that_of_a_rule() -> None:
    lost = {"name": "n1", "since": timestamp(NOW - 5), "until": timestamp(NOW + 9e5), "why": "w", "reason": "NodeLost"}
    p = run(observed(rule("ReplacePodAndAvoidNode"), pod=OOM, avoidedNodes=[lost]))
    (avoided,) = status_of(p)["avoidedNodes"]
    assert avoided["reason"] == "FailurePolicyMatched"
    shorter = avoided | {"until": timestamp(NOW + 600)}
    seen = observed(avoidedNodes=[shorter])
    p = run(replace(seen, link=link(seen.link.report, bert_0_0=NOW - 9)))
    assert created(p) == [CreateWorker("bert-0-1", 0, 1, ("n1",))]
    assert status_of(p)["avoidedNodes"] == [shorter]


def test_the_coordinator_gets_the_wait_before_a_restart_and_status_shows_it() -> None:
    reason = "the next round starts 40 s after the failure (failurePolicy.backoffSeconds)"
    seen = steady(last_report=gathering(worker(0), worker(1), rounds=1, reason=reason))
    policy = {"backoffSeconds": 10, "maxBackoffSeconds": 40}
    p = run(replace(seen, job=job(status=status(rendezvousRound=1), failurePolicy=policy)))
    assert p.operator_view is not None
    settings = p.operator_view.settings
    assert (settings.backoff, settings.max_backoff) == (10.0, 40.0)
    running = conditions_of(p)["Running"]
    assert (running["status"], running["reason"], running["message"]) == ("False", "Restarting", reason)
