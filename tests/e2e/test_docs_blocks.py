"""The shell blocks of the documentation on the test cluster, in the order in which a new user reads the pages.

docs/operate/migrate-from-kubeflow.md comes last: its PyTorchJob runs the image that first-job.md has built.
"""

from __future__ import annotations

import shlex
import sys
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest

from support.cluster.install import RELEASE, SYSTEM, install, wait_rolled_out
from support.cluster.kube import Kube
from support.cluster.kubectl import REPOSITORY, Tools
from support.docs.blocks import Block, all_blocks
from support.docs.docker import ARCHIVES
from support.docs.pip import pip_stand_in
from support.docs.shell import Shell, own_kubeconfig, stand_in

pytestmark = pytest.mark.alone

NODE = "node2"
REGISTRY = "registry.example.com/me"
WORDS = {"NODE": NODE}
KUBEFLOW = "pytorchjobs.kubeflow.org"
PYTORCHJOBS = {
    "apiVersion": "apiextensions.k8s.io/v1",
    "kind": "CustomResourceDefinition",
    "metadata": {"name": KUBEFLOW},
    "spec": {
        "group": "kubeflow.org",
        "names": {"kind": "PyTorchJob", "plural": "pytorchjobs", "singular": "pytorchjob"},
        "scope": "Namespaced",
        "versions": [
            {
                "name": "v1",
                "served": True,
                "storage": True,
                "schema": {"openAPIV3Schema": {"type": "object", "x-kubernetes-preserve-unknown-fields": True}},
            }
        ],
    },
}
"""Enough of Kubeflow's definition for `kubectl get pytorchjob`: no program here acts on a PyTorchJob."""


@pytest.fixture
def shell(bare: Kube, cluster_dir: Path, tmp_path: Path) -> Iterator[Shell]:
    """A checkout of the repository, kubectl with a namespace of its own, and a cluster without the operator."""
    bin_, checkout = tmp_path / "bin", tmp_path / "checkout"
    for folder in (bin_, checkout):
        folder.mkdir()
    for name in ("charts", "examples", "Dockerfile"):  # what `docker build .` is given
        (checkout / name).symlink_to(REPOSITORY / name)
    docker = f"{shlex.quote(sys.executable)} {REPOSITORY}/tests/support/docs/docker.py"
    path = f"{REPOSITORY}/tests:{REPOSITORY}:{REPOSITORY}/agent:{REPOSITORY}/operator"
    stand_in(bin_, "docker", f'#!/bin/sh\nexport PYTHONPATH={path}\nexec {docker} "$@"\n')
    pip_stand_in(bin_)
    namespace = f"docs-{time.time_ns() % 10**6}"
    kubeconfig = own_kubeconfig(cluster_dir / "kubeconfig", namespace, tmp_path)
    variables = {"KUBECONFIG": str(kubeconfig), ARCHIVES: str(tmp_path), "REGISTRY": REGISTRY}
    bare.create("namespaces", {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": namespace}})
    tools = Tools(cluster_dir / "bin", cluster_dir / "kubeconfig")
    tools.helm("uninstall", RELEASE, "-n", SYSTEM, "--wait", check=False)
    try:
        yield Shell(checkout, [bin_, cluster_dir / "bin", Path(sys.executable).parent], variables, WORDS)
    finally:
        tools.kubectl("uncordon", NODE)
        tools.kubectl("annotate", "node", NODE, "elasticjob.dev/terminating-")
        tools.kubectl("delete", "clusterrolebinding", "prometheus-reads-elasticjob", "--ignore-not-found")
        bare.delete("customresourcedefinitions", KUBEFLOW)
        bare.delete("namespaces", namespace)
        install(bare, cluster_dir)


PYTORCHJOB_INSTEAD = "kubectl delete ej mnist && kubectl apply -f pytorchjob.yaml"
"""What puts the PyTorchJob of a page where its ElasticJob is."""
MOVES = "docs/operate/migrate-from-"
"""Pages with a job of their own: a name may be that of an earlier job."""
ORDER = [
    "docs/get-started/install.md",
    "docs/get-started/first-job.md",
    "docs/operate/drains-and-spot.md",
    "docs/operate/security.md",
    "docs/operate/upgrades.md",
    "docs/run/elastic.md",
    "docs/operate/monitoring.md",
    "docs/operate/migrate-from-kubeflow.md",
    "docs/operate/migrate-from-jobset.md",
    "docs/operate/migrate-from-hyperpod.md",
]
"""The pages in the order in which a new user meets them."""


def position(block: Block) -> tuple[int, int]:
    return ORDER.index(block.page), block.line


def test_the_first_hour(shell: Shell, bare: Kube) -> None:
    """Install, hello, an own script in an own image, faults, drains, an upgrade and a suspension, with one job."""
    chosen = [block for block in all_blocks() if block.mark("run") == "cluster" or block.mark("file")]
    bare.create("customresourcedefinitions", PYTORCHJOBS)
    new_image = "docker build -t $REGISTRY/elasticjob:0.2.0 charts/.. && docker push $REGISTRY/elasticjob:0.2.0"
    found: list[str] = []
    previous = ""
    for block in sorted(chosen, key=position):
        if block.text.startswith("helm upgrade"):
            shell.run(replace(block, text=new_image, output=None))
        if block.text.startswith("kubectl get pytorchjob"):
            shell.run(replace(block, text=PYTORCHJOB_INSTEAD, output=None))
        if block.page.startswith(MOVES) and block.page != previous:
            shell.run(replace(block, text="kubectl delete ej --all", output=None))
        previous = block.page
        if (name := block.mark("file")) is not None:
            (shell.folder / name).unlink(missing_ok=True)  # the Dockerfile of the checkout is a link
            (shell.folder / name).write_text(block.text)
            continue
        began = time.monotonic()
        found += shell.problems(block)
        if "rollout status" in block.text:
            wait_rolled_out(bare)  # the logs of pods that are being deleted cannot always be read, and one may lead
        print(f"{time.monotonic() - began:6.1f} s  {block}  {block.text.splitlines()[0]}")
    assert not found, "\n\n".join(found)
