"""Why a job is not running, not at full size or slow: the likely causes, the first one first. Pure."""

from __future__ import annotations

from collections.abc import Iterator

from elasticjob._runtime.contract.messages import FailureClass
from elasticjob._runtime.contract.names import Label
from elasticjob.cli.objects.jobs import is_true, job_condition, job_status, wanted_replicas
from elasticjob.cli.verbs.explain import advice, explanations
from elasticjob.cli.verbs.why.circumstances import Circumstances, Finding, finding
from elasticjob.cli.verbs.why.pod_problems import pod_problems
from elasticjob.cli.views.times import parse_time, short_duration

UNSEEN_SECONDS = 10.0
"""If a job older than this has no status, no operator has seen it."""
SILENT_SECONDS = 900.0
"""A training job without new progress for this many seconds may hang. The status is updated every 30 s."""
RECENT_SECONDS = 3600.0
LOW_GOODPUT = 90.0
_CONSEQUENCE = FailureClass.COLLECTIVE_FAILED.value
"""The class of a failure that another rank may have caused."""
_POD_REASONS = frozenset(
    {"Unschedulable", "ImagePullFailed", "PodStartFailed", "InsufficientCapacity", "WaitingForMinReplicas"}
)
"""Reasons of conditions that the pods themselves explain better."""


def likely_causes(seen: Circumstances) -> list[Finding]:
    """Return what is wrong; empty if the job trains at full size and nothing holds it up."""
    ended = list(_ended(seen))
    if ended:
        return ended
    return [
        *_not_reconciled(seen),
        *_suspended(seen),
        *_not_running(seen),
        *_not_at_full_size(seen),
        *_slow_or_at_risk(seen),
    ]


def _ended(seen: Circumstances) -> Iterator[Finding]:
    if is_true(seen.job, "Complete"):
        yield finding("the job has ended, and succeeded", seen.message("Complete"))
    elif is_true(seen.job, "Failed") or is_true(seen.job, "FailureTarget"):
        kind = "Failed" if is_true(seen.job, "Failed") else "FailureTarget"
        reason = str(job_condition(seen.job, kind).get("reason", ""))
        failure = job_status(seen.job).get("lastFailure") or {}
        meaning = advice(str(failure.get("class", ""))).replace("JOB", seen.name)
        steps = f"elasticjob logs {seen.name} --tail 50" + (f"; {meaning}" if meaning else "")
        text = f"the job has failed ({reason}). A job that has ended does not run again: delete it and apply it again"
        message = seen.message(kind)
        yield finding(text, ". ".join([message.rstrip("."), *_failures(seen, failure, message)]), steps)


def _failures(seen: Circumstances, last: dict[str, object], message: str) -> Iterator[str]:
    """Yield the last failure, unless this message of the condition quotes it, and an earlier one that may be its cause.

    A rank may still be on its way out when its failure breaks the collectives of others, which then report first.
    """
    line = _last_line(last)
    if last and not (line and line in message):
        yield f"The last failure: {_describe_failure(last)}"
    others = [f for f in job_status(seen.job).get("recentFailures") or [] if f.get("class") != _CONSEQUENCE]
    if last.get("class") == _CONSEQUENCE and others:
        yield f"An earlier failure may have caused it: {_describe_failure(others[-1])}"


def _describe_failure(failure: dict[str, object]) -> str:
    rank = f" rank {failure['rank']}" if "rank" in failure else ""
    return f"{failure.get('class', '')} of {failure.get('pod', '-')}{rank}: {_last_line(failure)}"


def _last_line(failure: dict[str, object]) -> str:
    """Return the line that says most: the exception at the end of a traceback, or the newest line of other output."""
    lines = str(failure.get("message") or failure.get("reason") or "").strip().splitlines()
    return lines[-1] if lines else ""


def _not_reconciled(seen: Circumstances) -> Iterator[Finding]:
    manager = seen.job.get("spec", {}).get("managedBy", "elasticjob.dev/elasticjob-controller")
    created = parse_time(seen.job["metadata"].get("creationTimestamp")) or seen.now
    if not job_status(seen.job):
        if manager != "elasticjob.dev/elasticjob-controller":
            yield finding(f"the job is managed by {manager}, so this operator does not reconcile it")
        elif seen.now - created < UNSEEN_SECONDS:
            yield finding("the job is new, and the operator has not seen it yet", "", f"elasticjob why {seen.name}")
        else:
            yield finding(
                "no operator has seen the job: it is not installed, does not run, or does not watch this namespace", "",
                "kubectl -n elasticjob-system get deployment elasticjob; then the chart's value watchNamespaces",
            )  # fmt: skip
    if is_true(seen.job, "ReconcileFailed"):
        reason = job_condition(seen.job, "ReconcileFailed").get("reason", "")
        yield finding(
            f"the operator cannot go on with this job ({reason}); a round that trains is not affected",
            seen.message("ReconcileFailed"),
            "kubectl -n elasticjob-system logs -l app.kubernetes.io/component=operator --prefix --tail=50",
        )  # fmt: skip
    if seen.job["metadata"].get("deletionTimestamp"):
        yield finding("the job is being deleted", "", f"kubectl get pods -l {Label.JOB_NAME}={seen.name}")


def _suspended(seen: Circumstances) -> Iterator[Finding]:
    if not is_true(seen.job, "Suspended"):
        return
    reason = job_condition(seen.job, "Suspended").get("reason")
    if reason == "SuspendedByUser":
        yield finding(
            "the job is suspended on purpose", seen.message("Suspended"), f"elasticjob resume {seen.name}"
        )  # fmt: skip
    elif reason == "SuspendedByQueue":
        queue = seen.job["metadata"].get("labels", {}).get("kueue.x-k8s.io/queue-name", "")
        yield finding(
            f"the queue {queue} has not admitted the job", f"{seen.message('Suspended')} {_queue_message(seen)}",
            f"kubectl describe localqueue {queue}; ask for fewer pods or GPUs, or wait for quota",
        )  # fmt: skip
    else:
        yield finding(f"the job is suspended for a moment ({reason})", seen.message("Suspended"))


def _queue_message(seen: Circumstances) -> str:
    """Return what Kueue says about the job's Workload that keeps it waiting."""
    uid = seen.job["metadata"].get("uid")
    for workload in seen.workloads:
        owners = workload["metadata"].get("ownerReferences") or []
        if any(owner.get("uid") == uid for owner in owners):
            conditions = workload.get("status", {}).get("conditions") or []
            said = [
                str(c.get("message", "")) for c in conditions if c.get("status") == "False" or c["type"] == "Evicted"
            ]
            return f"Workload {workload['metadata']['name']}: {'; '.join(said)}" if said else ""
    return ""


def _not_running(seen: Circumstances) -> Iterator[Finding]:
    running = job_condition(seen.job, "Running")
    if running.get("status") != "False" or is_true(seen.job, "Suspended"):
        return
    yield from _explained(seen, "Running", "the job does not train")


def _not_at_full_size(seen: Circumstances) -> Iterator[Finding]:
    scaled = job_condition(seen.job, "FullyScaled")
    if scaled.get("status") != "False" or not is_true(seen.job, "Running"):
        return
    status = job_status(seen.job)
    title = f"the job trains with {status.get('active', 0)} of {wanted_replicas(seen.job)} worker pods"
    yield from _explained(seen, "FullyScaled", title)


def _explained(seen: Circumstances, kind: str, title: str) -> Iterator[Finding]:
    """Yield why a condition is False: the problems of its pods if they explain it, else the meaning of its reason."""
    reason = str(job_condition(seen.job, kind).get("reason", ""))
    problems = list(pod_problems(seen))
    if not problems or reason not in _POD_REASONS:
        meaning = next((e["meaning"] for e in explanations(reason) if kind in e["kind"]), reason)
        evidence = (
            f"{seen.message(kind)} {_quota_use(seen) if 'quota' in (meaning + seen.message(kind)).lower() else ''}"
        )
        yield finding(f"{title} ({reason}): {meaning}", evidence, _next_step(reason, seen.name))
    for problem in problems:
        yield {**problem, "what": f"{title}: {problem['what']}"}
    failure = job_status(seen.job).get("lastFailure")
    if reason == "Restarting" and failure:
        yield finding(
            f"the workers restart after a failure: {_describe_failure(failure)}", "",
            f"elasticjob logs {seen.name} --pod {failure.get('pod', '')}",
        )  # fmt: skip


def _next_step(reason: str, job: str) -> str:
    if reason in ("WaitingForMinReplicas", "ScalingUp", "BelowDesiredAboveMin"):
        return f"elasticjob logs {job} -f: the agents say what they wait for"
    return advice(reason).replace("JOB", job)


def _quota_use(seen: Circumstances) -> str:
    parts = []
    for quota in seen.quotas:
        status = quota.get("status", {})
        used, hard = status.get("used") or {}, status.get("hard") or {}
        parts.append(f"{quota['metadata']['name']}: " + ", ".join(f"{k} {used.get(k, '?')} of {hard[k]}" for k in hard))
    return f"(ResourceQuota {'; '.join(parts)})" if parts else ""


def _slow_or_at_risk(seen: Circumstances) -> Iterator[Finding]:
    status = job_status(seen.job)
    if job_condition(seen.job, "RendezvousReady").get("status") in ("False", "Unknown") and is_true(
        seen.job, "Running"
    ):
        reason = job_condition(seen.job, "RendezvousReady").get("reason", "")
        yield finding(
            f"the job's store is unavailable ({reason}); training goes on, but recovery from a fault would take longer",
            seen.message("RendezvousReady"), f"kubectl get pods -l {Label.JOB_NAME}={seen.name},{Label.ROLE}=store",
        )  # fmt: skip
    if not is_true(seen.job, "Running"):
        return
    if slow := status.get("straggler"):
        yield finding(
            f"rank {slow.get('rank')} holds up every step: {slow.get('stepSeconds')} s of its own,"
            f" {slow.get('medianSeconds')} s on other ranks",
            f"pod {slow.get('pod')} on Node {slow.get('node', '-')}", f"elasticjob drain {slow.get('pod')}",
        )  # fmt: skip
    written = parse_time((status.get("trainerStatus") or {}).get("lastUpdatedTime"))
    if written is not None and seen.now - written > SILENT_SECONDS:
        yield finding(
            f"no new step was reported for {short_duration(seen.now - written)}: it may hang", "",
            f"elasticjob stacks {seen.name}",
        )  # fmt: skip
    recent = [
        f for f in status.get("recentFailures") or [] if seen.now - (parse_time(f.get("time")) or 0) < RECENT_SECONDS
    ]
    percent = (status.get("goodput") or {}).get("percent")
    if recent and percent is not None and float(percent) < LOW_GOODPUT:
        yield finding(
            f"faults have cost {100 - float(percent):.3g}% of the time; in the last hour there were {len(recent)}",
            f"the newest: {_describe_failure(recent[-1])}", f"elasticjob status {seen.name}",
        )  # fmt: skip
    if status.get("hangGuard") and seen.job.get("spec", {}).get("hangPolicy"):
        text = "a hang would go unnoticed, because hangPolicy has no steps to watch"
        yield finding(text, str(status["hangGuard"]), "elasticjob explain NoStepsReported")
    if status.get("warmFork"):
        text = "each restart imports the modules again, because workers start by exec"
        yield finding(text, str(status["warmFork"]), "elasticjob explain WarmForkOff")
