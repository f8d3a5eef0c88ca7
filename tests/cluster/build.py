"""Build the cluster's Go programs from their published modules, once, into a cache."""

import fcntl
import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from host.debian_packages import has_apt, install

from . import pause
from .console import console, progress
from .errors import ClusterError
from .layout import Layout

TOOLS = Path(__file__).parent / "tools"
CHOICE = "ELASTICJOB_KUBERNETES"
"""Environment variable with the Kubernetes of the cluster, such as `1.34`."""
_KEY = "k8s.io/component-base/version"
PAUSE = TOOLS / "pause" / "main.go"
METRICS_SERVER = TOOLS / "metrics_server"
MONITORING = TOOLS / "monitoring"
MONITORING_TAGS = "remove_all_sd,enable_kubernetes_sd"
"""Prometheus without what finds targets in clouds, which is most of its code."""
GO_NEEDED = (1, 24)
GO_FOLDERS = "/usr/local/go/bin:/usr/lib/go/bin"
GO_PACKAGE = "golang-go"
RENAMED = {"server": "etcd"}
"""go build names a program after the last element of its package's path."""
PROGRESS_SECONDS = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Release:
    """A version of Kubernetes that the cluster can run, such as `1.34.4`."""

    version: str
    gates: tuple[str, ...] = ()
    """Feature gates that its control plane has on, besides those that are on by default."""
    apis: tuple[str, ...] = ()
    """APIs that it serves besides those that are served by default, such as `lifecycle.k8s.io/v1alpha1`."""

    @property
    def gate_flags(self) -> list[str]:
        """Flags of a component of the control plane."""
        return [f"--feature-gates={','.join(f'{gate}=true' for gate in self.gates)}"] if self.gates else []

    @property
    def api_flags(self) -> list[str]:
        """Further flags of the API server."""
        return [f"--runtime-config={','.join(f'{api}=true' for api in self.apis)}"] if self.apis else []

    @property
    def minor(self) -> str:
        return self.version.rpartition(".")[0]

    @property
    def module(self) -> Path:
        """Its Go module, which also has etcd, CoreDNS and Helm."""
        return TOOLS / f"kubernetes_{self.minor.replace('.', '_')}"

    @property
    def linker_flags(self) -> str:
        """Without them every component reports v0.0.0."""
        major, minor = self.minor.split(".")
        return f"-s -w -X {_KEY}.gitVersion=v{self.version} -X {_KEY}.gitMajor={major} -X {_KEY}.gitMinor={minor}"


OLDEST = Release("1.34.4")
NEWEST = Release(
    "1.37.2", ("EvictionRequestAPI", "GenericWorkload"), ("lifecycle.k8s.io/v1alpha1", "scheduling.k8s.io/v1beta1")
)
DEFAULT = NEWEST


def find_release(minor: str = "") -> Release:
    """Return the release of this minor version, or else of the one in the environment. ClusterError: no such."""
    wanted = minor or os.environ.get(CHOICE) or DEFAULT.minor
    for found in (OLDEST, NEWEST):
        if wanted == found.minor:
            return found
    raise ClusterError(f"{CHOICE}={wanted}: write {OLDEST.minor} or {NEWEST.minor}")


@dataclass(frozen=True)
class Programs:
    """A finished build in `folder`."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def pause_image(self) -> Path:
        return self.folder / "pause.tar"


def key(chosen: Release) -> str:
    """Return the name of the build: a hash of its inputs."""
    inputs = [chosen.module / "go.mod", chosen.module / "go.sum", PAUSE]
    parts = [path.read_bytes() for path in inputs]
    return hashlib.sha256(b"\0".join([*parts, chosen.linker_flags.encode()])).hexdigest()[:16]


def programs(layout: Layout, chosen: Release | None = None) -> Programs:
    """Return the programs, built unless the cache has them. Of two calls at the same time one waits for the other."""
    chosen = chosen or find_release()
    folder = layout.cache / "cluster" / key(chosen)
    if not folder.exists():
        folder.parent.mkdir(parents=True, exist_ok=True)
        with folder.with_name("lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            if not folder.exists():
                build(folder, chosen)
    return Programs(folder)


def build(folder: Path, chosen: Release) -> None:
    """Build everything beside `folder` and rename it in the end, so that a killed build leaves nothing in `folder`."""
    go = go_command()
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    parts = f"Kubernetes {chosen.version}, etcd, CoreDNS and Helm"
    progress(f"building {parts} into {folder}: once, about 12 minutes on 2 cores")
    began = time.monotonic()
    command = [go, "build", "-v", "-o", str(partial), "-ldflags", chosen.linker_flags, "tool"]
    run_build(command, count_packages(go, chosen.module, "tool"), chosen.module)
    for old, new in RENAMED.items():
        (partial / old).rename(partial / new)
    static = {**os.environ, "CGO_ENABLED": "0"}
    command = [go, "build", "-o", str(partial / "pause"), "-ldflags", "-s -w", PAUSE.name]
    subprocess.run(command, check=True, cwd=PAUSE.parent, env=static)
    pause.write_image(partial / "pause", partial / "pause.tar")
    partial.rename(folder)
    progress(f"built in {time.monotonic() - began:.0f} s")


def metrics_server(layout: Layout) -> Path:
    """Return metrics-server, built unless the cache has it."""
    program = module_program(layout, METRICS_SERVER)
    if not program.exists():
        build_module(program, METRICS_SERVER, "tool", minutes=3)
    return program


def monitoring(layout: Layout) -> Programs:
    """Return prometheus, promtool and kube-state-metrics, built unless the cache has them."""
    folder = module_program(layout, MONITORING)
    if not folder.exists():
        build_module(folder, MONITORING, "tool", minutes=5, tags=MONITORING_TAGS, several=True)
    return Programs(folder)


def module_program(layout: Layout, module: Path) -> Path:
    """Return where the cache has the program of a Go module of its own, or a folder of several. It may not be built."""
    inputs = [module / "go.mod", module / "go.sum", *sorted(module.glob("*.go"))]
    digest = hashlib.sha256(b"".join(path.read_bytes() for path in inputs)).hexdigest()[:16]
    return layout.cache / "cluster" / f"{module.name.replace('_', '-')}-{digest}"


def build_module(
    program: Path,
    module: Path,
    package: str,
    minutes: int,
    tags: str = "",
    several: bool = False,
    static: bool = False,
    finish: Callable[[Path], None] = lambda built: None,
) -> None:
    """Build a package of a module as `program`, or `several` into that folder. `minutes`: on two cores.

    `static`: without the C library, for an image that has none. `finish` adds to what was built, before it is named.
    """
    go = go_command()
    program.parent.mkdir(parents=True, exist_ok=True)
    partial = program.with_name(f"{program.name}.{os.getpid()}.part")
    name = program.name.rpartition("-")[0]
    progress(f"building {name}: once, about {minutes} minutes on 2 cores")
    if several:
        partial.mkdir()
    command = [go, "build", "-v", "-o", str(partial), "-ldflags", "-s -w", "-tags", tags, package]
    run_build(command, count_packages(go, module, package), module, static)
    finish(partial)
    partial.rename(program)


def go_environ() -> dict[str, str]:
    """Return the variables for Go. A module may need a newer Go than the machine's, whose settings may refuse that."""
    return {"GOTOOLCHAIN": "auto", **os.environ}


def run_build(command: list[str], total: int, module: Path, static: bool = False) -> None:
    """Run `go build`, and print progress every few seconds. `total` is the number of packages of a cold build."""
    began = time.monotonic()
    lines: list[str] = []
    environ = go_environ() | ({"CGO_ENABLED": "0"} if static else {})
    with subprocess.Popen(command, cwd=module, env=environ, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reader.start()
        while reader.is_alive():
            reader.join(PROGRESS_SECONDS)
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            progress(
                f"building {minutes}:{seconds:02d}, {len(lines)} packages compiled (of {total} with an empty cache)"
            )
    if process.returncode != 0:
        detail = " | ".join(line.strip() for line in lines[-3:])
        raise ClusterError(f"go build failed: {detail or process.returncode}")


def count_packages(go: str, module: Path, package: str) -> int:
    """Return how many packages a cold build compiles. This fetches the modules."""
    progress("fetching Go modules")
    command = [go, "list", "-deps", package]
    result = subprocess.run(command, cwd=module, env=go_environ(), check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise ClusterError(f"Go cannot fetch the modules: {result.stderr.strip().splitlines()[-1]}")
    return len(result.stdout.split())


def go_command() -> str:
    """Return a Go that is new enough or can fetch a newer toolchain; ClusterError where there is none."""
    if (found := usable_go()) is not None:
        return found
    if has_apt() and debian_go() >= GO_NEEDED:
        install([GO_PACKAGE], console)
        if (found := usable_go()) is not None:
            return found
    raise ClusterError("building the cluster's programs needs Go 1.24 or newer: install it and put `go` on the PATH")


def usable_go() -> str | None:
    go = shutil.which("go", path=f"{os.environ.get('PATH', '')}:{GO_FOLDERS}")
    if go is None:
        return None
    answer = subprocess.run(
        [go, "env", "GOVERSION", "GOTOOLCHAIN"], check=False, capture_output=True, text=True, cwd="/"
    )
    version, _, toolchain = answer.stdout.partition("\n")
    # From 1.21 on, Go fetches the toolchain that go.mod requires, unless GOTOOLCHAIN is local.
    needed = GO_NEEDED if toolchain.strip() == "local" else (1, 21)
    return go if parse_version(version) >= needed else None


def debian_go() -> tuple[int, ...]:
    """Return the version of Debian's Go package; (0,) where apt has none."""
    policy = subprocess.run(["apt-cache", "policy", GO_PACKAGE], check=False, capture_output=True, text=True)
    candidate = re.search(r"Candidate: 2:(\S+)", policy.stdout)
    return parse_version(candidate[1]) if candidate else (0,)


def parse_version(text: str) -> tuple[int, ...]:
    """Return major and minor version: `go1.24.1` or `1.24~2` → (1, 24)."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0,)
