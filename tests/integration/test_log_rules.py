"""Rules for the output of a script without torch and without calls of elasticjob: a hang, NaN, and the job's end."""

from __future__ import annotations

from pathlib import Path

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

WRITES = """
import os, sys, time

def hangs_here():
    time.sleep(3600)

restart, last = int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["RANK"] == "1"
for step in range(1, 4):
    if last:
        print(f" iteration {10 * restart + step:8d}/     100 | lm loss: {4 / step:.2E} |", flush=True)
if restart == 0 and last:
    hangs_here()
elif last:
    value = "nan" if restart == 1 else "9.9E+01"
    print(f" iteration       {restart}9/     100 | lm loss: {value} |", flush=True)
while True:
    time.sleep(0.1)
"""
"""Only the last rank writes its steps, as in Megatron-LM. The first round hangs, the second one writes NaN."""

RULE = {
    "name": "iteration",
    "pattern": r"iteration +(?P<step>\d+)/ *(?P<total>\d+) .*lm loss: (?P<loss>\S+)",
    "conditions": [
        {"metric": "loss", "notFinite": True, "action": "RestartGroup"},
        {"metric": "loss", "above": 3},
        {"metric": "loss", "above": 50, "action": "FailJob"},
    ],
}


def test_a_hang_and_metrics_in_the_output(tmp_path: Path) -> None:
    job = manifest(
        script(tmp_path, WRITES),
        replicas=2,
        preload=["json"],
        hangPolicy={"progressTimeoutSeconds": 10},
        logRules=[RULE, {"name": "other", "pattern": r"throughput (?P<throughput>\d+)"}],
    )
    with LocalRun(job, tmp_path) as run:
        run.wait_for(r"\[agent\] toy-1-0: log rule iteration matches a line of rank 1:  iteration        1/     100")
        run.wait_for(
            r"\[job\] rank 1: loss is 4.00E\+00 at step 1 \(log rule iteration: above 3\) .*; nothing is restar"
        )
        cause = run.wait_for(r"round 1.0.1 ended: WorkerFailed: (rank 1): no progress for 1[\d.]+ s (.*) \(Hang\)", 40)
        assert cause[2].startswith("after step 3: main thread is in hangs_here")
        run.wait_for(
            r"round 1.0.2 ended: WorkerFailed: rank 1: loss is nan at step 19 \(log rule iteration: not finite\) .* "
            r"\(counts as a restart\)"
        )
        assert run.exit_code() == 1
    end = "log rule iteration matched: rank 1 in toy-1-0 failed: LogRule: loss is 9.9E+01 at step 29"
    assert f"{end} (log rule iteration: above 50)" in run.text
    assert "toy-0-0: log rule other matched no line of this pod's workers in the last round" in run.text
    assert "round 1.0.4" not in run.text
