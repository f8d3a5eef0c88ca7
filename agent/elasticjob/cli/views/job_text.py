"""One job on one screen. Pure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from elasticjob._runtime.contract.text import describe_speed, printable, with_noun
from elasticjob.cli.views.event_text import history_lines
from elasticjob.cli.views.job_table import percent_text, phase_text
from elasticjob.cli.views.style import Painter
from elasticjob.cli.views.table import text_table
from elasticjob.cli.views.times import age_text, short_duration

_PHASES_OF_RECOVERY = ("detect", "stop", "rendezvous", "start")
SHOWN_FAILURES = 5
_GOOD = {
    "RendezvousReady": "True", "Running": "True", "FullyScaled": "True", "Complete": "True",
    "SuccessCriteriaMet": "True",
}  # fmt: skip
"""The status of a condition that is as it should be; False for all others."""

View = Mapping[str, Any]


def job_lines(view: View, painter: Painter, now: float) -> Iterator[str]:
    """Yield the lines of a `job_overview`."""
    yield from _head(view, painter, now)
    yield from _training(view, now)
    yield from _section("Conditions", _conditions(view.get("conditions", ()), painter, now), painter)
    yield from _section("Pods", _pods(view.get("pods", ()), painter, now), painter)
    yield from _section("Rounds and what ended them", history_lines(view.get("history", ()), painter, now), painter)
    yield from _section("Failures", _failures(view.get("failures", ()), painter, now), painter)


def _section(title: str, lines: Sequence[str], painter: Painter) -> Iterator[str]:
    if lines:
        yield ""
        yield painter.paint(title, "bold")
        yield from lines


def _head(view: View, painter: Painter, now: float) -> Iterator[str]:
    name = painter.paint(f"{view.get('namespace', '')}/{view['name']}", "bold")
    ended = view.get("completionTime")
    since = f"ended {age_text(ended, now)} ago" if ended else f"created {age_text(view.get('created'), now)} ago"
    yield f"{name}   {phase_text(view.get('phase', ''), painter)}   {since}"
    bounds = (
        "" if view["minReplicas"] == view["maxReplicas"] else f" (from {view['minReplicas']} to {view['maxReplicas']})"
    )
    target = view.get("target", view["wanted"])
    lowered = "" if target == view["wanted"] else f", of which {target} have room"
    standby = f", {with_noun(view['standby'], 'standby pod')}" if view.get("standby") else ""
    yield (
        f"  size       {view['training']} of {view['wanted']} worker pods train{bounds}{lowered},"
        f" {with_noun(view['worldSize'], 'worker')}{standby}"
    )
    last = f", the last one {age_text(view['lastRound'], now)} ago" if view.get("lastRound") else ""
    counted = f", {view['restartsCounted']} of {view['maxRestarts']} that maxRestarts allows"
    yield f"  rounds     {view['rounds']}{last}; {with_noun(view['restarts'], 'restart')}{counted}"


def _training(view: View, now: float) -> Iterator[str]:
    if view.get("codeSha256"):
        yield f"  code       sha256 {printable(str(view['codeSha256'])[:12])}, shipped by elasticjob submit"
    if view.get("stage"):
        yield f"  stage      {_value(view['stage'])}"
    if progress := view.get("progress"):
        yield f"  progress   {_progress(progress, now)}"
    if goodput := view.get("goodput"):
        seconds = float(goodput.get("lostSeconds") or 0)
        lost = f"{seconds:.2g} s" if seconds < 10 else short_duration(seconds)
        yield f"  goodput    {percent_text(goodput.get('percent'))}, {lost} lost by faults"
    if slow := view.get("straggler"):
        own, others = float(slow.get("stepSeconds") or 0), float(slow.get("medianSeconds") or 0)
        where = f"{slow.get('pod')} on Node {slow.get('node', '-')}"
        yield f"  straggler  rank {slow.get('rank')}, {where}: {own:.3g} s a step of its own, {others:.3g} s on others"
    if moved := view.get("stateTransfer"):
        speed = describe_speed(int(moved.get("bytes") or 0), float(moved.get("seconds") or 0) or 0.001)
        yield f"  state      rank {moved.get('rank')} got it last: {speed}"
    if view.get("warmFork"):
        yield f"  warm fork  {view['warmFork']}"
    for node in view.get("avoidedNodes", ()):
        until = f", until {node['until']}" if node.get("until") else ""
        yield f"  avoided    Node {node.get('name')}: {node.get('why') or node.get('reason')}{until}"


def _value(value: object) -> str:
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {_value(part)}" for key, part in value.items())
    return printable(str(value))


def _progress(progress: View, now: float) -> str:
    said = age_text(progress.get("lastUpdatedTime"), now)
    return progress_text(progress) + ("" if said == "-" else f" (written {said} ago)")


def progress_text(progress: View) -> str:
    """Return how far the training is: `status.trainerStatus` in one line."""
    parts = [f"step {progress['step']}"] if "step" in progress else []
    if "progressPercentage" in progress:
        parts.append(f"{progress['progressPercentage']}%")
    if "estimatedRemainingSeconds" in progress:
        parts.append(f"about {short_duration(progress['estimatedRemainingSeconds'])} left")
    parts += [printable(f"{m.get('name')} {m.get('value')}") for m in progress.get("metrics") or ()]
    return ", ".join(parts)


def _conditions(conditions: Sequence[View], painter: Painter, now: float) -> list[str]:
    rows = []
    failed = {c.get("message") for c in conditions if (c.get("type"), c.get("status")) == ("Failed", "True")}
    for condition in conditions:
        if condition.get("type") == "FailureTarget" and condition.get("message") in failed:
            continue  # a long message, which is said once
        good = condition.get("status") == _GOOD.get(str(condition.get("type")), "False")
        value = painter.paint(str(condition.get("status")), "green" if good else "yellow")
        message = " ".join(printable(str(condition.get("message", ""))).split())
        age = age_text(condition.get("lastTransitionTime"), now)
        rows.append((str(condition.get("type")), value, str(condition.get("reason", "")), age, message))
    return text_table((), rows, "  ") if rows else []


def _pods(pods: Sequence[View], painter: Painter, now: float) -> list[str]:
    rows = [
        (
            pod["name"],
            _ranks(pod.get("ranks", ())) if pod.get("role") == "worker" else f"({pod.get('role')})",
            str(pod.get("node", "-")),
            painter.paint(pod["state"], "green" if pod["state"] in ("Running", "Succeeded") else "yellow"),
            str(pod.get("restarts", 0)),
            age_text(pod.get("created"), now),
            " ".join(printable(pod.get("message", "")).split()),
        )
        for pod in pods
    ]
    return text_table(("POD", "RANKS", "NODE", "STATE", "RESTARTS", "AGE", ""), rows, "  ") if rows else []


def _ranks(ranks: Sequence[int]) -> str:
    if not ranks:
        return "-"
    return str(ranks[0]) if len(ranks) == 1 else f"{ranks[0]}-{ranks[-1]}"


def _failures(failures: Sequence[View], painter: Painter, now: float) -> list[str]:
    lines: list[str] = []
    for failure in list(reversed(failures))[:SHOWN_FAILURES]:
        rank = f" rank {failure['rank']}" if "rank" in failure else ""
        where = f"{failure.get('pod', '-')}{rank} on Node {failure.get('node', '-')}"
        kind = painter.paint(str(failure.get("class", "")), "red")
        lines.append(f"  {age_text(failure.get('time'), now)} ago  {kind}  {where}{_exit(failure)}")
        text = printable(str(failure.get("message") or failure.get("reason") or "")).strip().splitlines()
        lines += [f"      {line}" for line in text[:4]]
        if recovery := failure.get("recoverySeconds"):
            parts = [f"{name} {recovery[name]} s" for name in _PHASES_OF_RECOVERY if name in recovery]
            lines.append(painter.paint(f"      recovered: {', '.join(parts)}", "dim"))
    if len(failures) > SHOWN_FAILURES:
        lines.append(f"  and {len(failures) - SHOWN_FAILURES} earlier ones: -o yaml shows them")
    return lines


def _exit(failure: View) -> str:
    if failure.get("signal"):
        return f", {failure['signal']}"
    return f", exit code {failure['exitCode']}" if "exitCode" in failure else ""
