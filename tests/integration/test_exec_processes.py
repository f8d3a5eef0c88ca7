"""A process that `kubectl exec` left in the container outlives a restart; one that a worker left does not."""

from __future__ import annotations

from pathlib import Path

from support.agent.worker_scripts import script
from support.local.run import LocalRun, manifest

STARTS_TWO = """
import os, subprocess, sys, time
folder = sys.argv[1]

def start_orphan(name, **variables):
    # Its parent ends at once, so that the agent adopts it, as PID 1 of a container adopts what `kubectl exec` left.
    text = f"import os, time; open({folder + '/' + name!r}, 'w').write(str(os.getpid())); time.sleep(600)"
    start = "import subprocess, sys; subprocess.Popen([sys.executable, '-c', sys.argv[1]], start_new_session=True)"
    subprocess.run([sys.executable, "-c", start, text], env={**os.environ, **variables}, check=True)
    while not os.path.exists(f"{folder}/{name}") or not open(f"{folder}/{name}").read():
        time.sleep(0.01)

def runs(name):
    pid = open(f"{folder}/{name}").read()
    return os.path.exists(f"/proc/{pid}") and open(f"/proc/{pid}/stat").read().rpartition(")")[2].split()[0] != "Z"

if os.environ["TORCHELASTIC_RESTART_COUNT"] == "0":
    start_orphan("worker")
    start_orphan("exec", ELASTICJOB_NODE_KEY="00ff")  # the container's own variables
    raise ValueError("bad batch")
print("runs after the restart: worker", runs("worker"), "exec", runs("exec"), flush=True)
if runs("exec"):
    os.kill(int(open(f"{folder}/exec").read()), 9)
"""


def test_what_kubectl_exec_left_outlives_a_restart(tmp_path: Path) -> None:
    job = manifest([*script(tmp_path, STARTS_TWO), str(tmp_path)], preload=[], failurePolicy={"maxRestarts": 1})
    with LocalRun(job, tmp_path) as run:
        assert run.exit_code() == 0, run.text
    assert "runs after the restart: worker False exec True" in run.text
