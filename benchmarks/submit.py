"""`make bench-cluster-submit`: from `elasticjob submit`, and from an edit, to the first step of all ranks.

Both times have all that a user waits for: the command line starts, packs the folder and talks to the API server. An
edit begins when the file is saved, and ends when the last rank has made a step with it, in the same pods.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
import time
from pathlib import Path

from benchmarks import machine, report
from benchmarks.row import OURS, Sample
from benchmarks.run import exit_on_sigterm, save_cluster_row
from benchmarks.stage import NAMESPACE, prepare
from support.cluster.jobs import DIGITS
from support.cluster.kube import Kube
from support.cluster.logbook import LogBook

PODS = 3
EDITS = 5
JOBS = 2
NAME = "edited"
TRAIN = """
import time, torch, torch.distributed as dist, elasticjob
from edited import CODE
dist.init_process_group("gloo")
model = torch.nn.parallel.DistributedDataParallel(torch.nn.Linear(64, 10))
optimizer = torch.optim.AdamW(model.parameters())
for step in range(10**6):
    loss = model(torch.randn(32, 64)).pow(2).mean()
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    elasticjob.progress(step)
    print(f"step={step} loss={loss.item():.3f} world={dist.get_world_size()} code={CODE};", flush=True)
    time.sleep(0.05)
dist.destroy_process_group()
"""
ROWS = {
    "submit": "submit until the first step of all ranks",
    "edit": "edit (submit --update) until the first step of all ranks",
}
TARGETS = {"submit": None, "edit": 3.0}


def run_job(kube: Kube, kubeconfig: Path) -> dict[str, list[Sample]]:
    """Submit one job and edit it several times; return the samples of each row."""
    kube.recreate_namespace(NAMESPACE)
    with tempfile.TemporaryDirectory() as name, LogBook(kube, NAMESPACE, NAME) as book:
        folder = Path(name)
        (folder / "train.py").write_text(TRAIN)
        command = [sys.executable, "-m", "elasticjob", "submit", "--kubeconfig", str(kubeconfig), "-n", NAMESPACE]
        command += ["--code", name, "--detach"]
        submit = [*command, "train.py", "--name", NAME, "--image", DIGITS, "--pods", str(PODS)]
        samples = {"submit": [_sample(book, folder, 0, submit)], "edit": list[Sample]()}
        pods = {pod["metadata"]["uid"] for pod in kube.list("pods", NAMESPACE)}
        for code in range(1, EDITS + 1):
            samples["edit"].append(_sample(book, folder, code, [*command, "--update", NAME]))
        if not pods <= {pod["metadata"]["uid"] for pod in kube.list("pods", NAMESPACE)}:
            raise AssertionError("pods were replaced")
    kube.delete("elasticjobs", NAME, NAMESPACE)
    return samples


def _sample(book: LogBook, folder: Path, code: int, command: list[str]) -> Sample:
    """Save the file, run the command, and return the seconds until all ranks have made a step with it."""
    moment = time.time()
    (folder / "edited.py").write_text(f"CODE = {code}\n")
    subprocess.run(command, check=True, capture_output=True, timeout=120)

    def first_steps() -> dict[str, float]:
        return {line.pod: line.time for line in reversed(list(book.lines)) if f"code={code};" in line.text}

    book.wait(lambda: len(first_steps()) == PODS, timeout=180, what=f"a step of all ranks with code {code}")
    return Sample(max(first_steps().values()) - moment)


def main() -> int:
    exit_on_sigterm()
    description, begin = machine.describe(), time.monotonic()
    kube, folder = prepare()
    samples: dict[str, list[Sample]] = {name: [] for name in ROWS}
    for _ in range(JOBS):
        for name, found in run_job(kube, folder / "kubeconfig").items():
            samples[name] += found
            print(f"  {ROWS[name]}: {[sample.value for sample in found]}", flush=True)
    for name, found in samples.items():
        took = time.monotonic() - begin
        save_cluster_row(name, ROWS[name], TARGETS[name], {OURS: found}, description, took, "make bench-cluster-submit")
    report.write()
    return 0


if __name__ == "__main__":
    sys.exit(main())
