"""The jobs in trouble of docs/operate/troubleshooting.md, one for each fault, and the job that each section is about.

Only the script of the slow rank imports torch, because that takes time. Its report needs the backward passes.
"""

from __future__ import annotations

from typing import Any

from support.cluster.jobs import manifest

Json = dict[str, Any]
FINALIZER = "example.com/backup"
MULTIKUEUE = "kueue.x-k8s.io/multikueue"
MISSING_IMAGE = "registry.invalid/me/bert:2"
_RAISES = """
import sys
learning_rate = float(sys.argv[1])
if learning_rate < 0:
    raise ValueError("the learning rate is negative")
"""
_HANGS = """
import os, threading, time, elasticjob
rank = int(os.environ["RANK"])
for step in range(1, 100_000):
    elasticjob.progress(step)
    time.sleep(0.2)
    if rank == 1 and step == 5:
        threading.Event().wait()
"""
_TRAINS = """
import time, elasticjob
for step in range(1, 100_000):
    elasticjob.progress(step)
    time.sleep(0.2)
"""
_DIFFERS = """
import pathlib, time
checkpoint = pathlib.Path("/tmp/step")
step = int(checkpoint.read_text()) if checkpoint.exists() else 0
while True:
    step += 1
    checkpoint.write_text(str(step))
    print(f"step={step} loss={1 / step:.4f}", flush=True)
    time.sleep(0.2)
"""
_SLOW = """
import time, torch, torch.distributed as dist, elasticjob
from torch.nn.parallel import DistributedDataParallel
dist.init_process_group("gloo")
model = DistributedDataParallel(torch.nn.Linear(10, 10))
for step in range(1, 100_000):
    time.sleep(0.3 if dist.get_rank() == 1 else 0.03)
    model(torch.randn(4, 10)).sum().backward()
    elasticjob.progress(step)
dist.destroy_process_group()
"""
_BAD_GPU = """
import sys
print("GPU 3 has an uncorrectable error", file=sys.stderr, flush=True)
sys.exit(22)
"""
_WAITS = "import time; time.sleep(3600)"
SCRIPTS = {
    "raises.py": _RAISES, "hangs.py": _HANGS, "trains.py": _TRAINS, "differs.py": _DIFFERS, "slow.py": _SLOW,
    "bad_gpu.py": _BAD_GPU, "waits.py": _WAITS,
}  # fmt: skip


def scripts() -> Json:
    """Return the ConfigMap with the scripts, which all jobs mount."""
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "scripts"},
        "data": {name: text.lstrip() for name, text in SCRIPTS.items()},
    }


def _job(name: str, *command: str, **spec: Any) -> Json:
    volume = {"name": "scripts", "configMap": {"name": "scripts"}}
    mount = {"name": "scripts", "mountPath": "/app"}
    words = ["python3", *command]
    return manifest(name, words, preload=[], volumes=[volume], mounts=[mount], **{"replicas": 1, **spec})


def jobs() -> dict[str, Json]:
    """Return the manifests of all jobs by name."""
    pending = _job("pending", "/app/waits.py")
    pending["spec"]["template"]["spec"]["nodeSelector"] = {"disk": "nvme"}
    bad_gpu = {"name": "bad-gpu", "action": "ReplacePodAndAvoidNode", "onExitCodes": {"operator": "In", "values": [22]}}
    found = [
        pending,
        _job("slow", "/app/slow.py", replicas=2),
        _job("elsewhere", "/app/waits.py", managedBy=MULTIKUEUE),
        _job("fails", "/app/raises.py", "-0.1", failurePolicy={"maxRestarts": 2}),
        _job("hangs", "/app/hangs.py", replicas=2),
        _job("trains", "/app/trains.py", replicas=2),
        _job("differs", "/app/differs.py", replicas=2, hangPolicy={"progressTimeoutSeconds": 10, "action": "Event"}),
        _job("stuck", "/app/waits.py"),
        _job("image", "/app/waits.py", image=MISSING_IMAGE),
        _job("moves", "/app/bad_gpu.py", failurePolicy={"maxRestarts": 1, "rules": [bad_gpu]}),
    ]
    return {job["metadata"]["name"]: job for job in found}


def written(name: str) -> Json:
    """Return the manifest that a person has written: what is wrong is corrected, and in `refused` it is not yet."""
    job = jobs()["trains" if name == "refused" else name]
    job["metadata"]["name"] = name
    job["spec"]["template"]["spec"].pop("nodeSelector", None)
    if name == "refused":
        job["spec"] |= {"replicas": 9, "elasticPolicy": {"minReplicas": 2, "maxReplicas": 8}}
    if name == "fails":
        job["spec"]["template"]["spec"]["containers"][0]["command"][-1] = "0.1"
    if name == "pending":
        job["spec"]["suspend"] = True
    return job


JOB_OF_SECTION = {
    "Troubleshooting": "pending",
    "The API server refuses my manifest": "refused",
    "My job has no status at all": "elsewhere",
    "My job is Pending": "pending",
    "It starts, and never trains": "hangs",
    "It hangs": "hangs",
    "It restarts again and again": "fails",
    "It failed, and I have corrected the cause": "fails",
    "It is slower than before": "slow",
    "One rank's loss differs": "differs",
    "A pod is stuck Terminating": "stuck",
    "The image cannot be pulled": "image",
    "My template is wrong, and the API server refuses to change it": "pending",
    "Where are the logs of the rank that failed yesterday?": "moves",
    "It leaves a Node": "moves",
    "The store is lost": "trains",
    "The operator cannot reconcile my job": "trains",
    "What do I attach to a bug report?": "moves",
}
"""The page tells of a job `bert`: which job has the fault of a section."""
