"""The Go programs of the cluster: built once from their published modules into a cache."""

import hashlib
import os
import re
import shutil
import subprocess
import threading
import time
from dataclasses import dataclass
from pathlib import Path

from . import pause
from .console import say
from .errors import ClusterError
from .layout import Layout
from .prerequisites import install, program

TOOLS = Path(__file__).parent / "tools"
VERSION = "v1.34.4"
"""Of k8s.io/kubernetes in tools/go.mod; without it every component calls itself v0.0.0."""
_KEY = "k8s.io/component-base/version"
LDFLAGS = f"-s -w -X {_KEY}.gitVersion={VERSION} -X {_KEY}.gitMajor=1 -X {_KEY}.gitMinor=34"
GO_NEEDED = (1, 24)
GO_FOLDERS = "/usr/local/go/bin:/usr/lib/go/bin"
GO_PACKAGE = "golang-go"
RENAMED = {"server": "etcd"}
"""go build names a program after the last element of its package's path."""
SAY_EVERY = 5.0
"""Seconds between two lines of progress."""


@dataclass(frozen=True)
class Programs:
    """A finished build."""

    folder: Path

    def path(self, name: str) -> str:
        return str(self.folder / name)

    @property
    def pause_image(self) -> Path:
        return self.folder / "pause.tar"


def key() -> str:
    """Names a build by all that goes into it."""
    parts = [(TOOLS / name).read_bytes() for name in ("go.mod", "go.sum", "pause/main.go")]
    return hashlib.sha256(b"\0".join([*parts, LDFLAGS.encode()])).hexdigest()[:16]


def programs(layout: Layout) -> Programs:
    """The built programs, from the cache where it has them."""
    folder = layout.cache / "cluster" / key()
    if not folder.exists():
        build(folder)
    return Programs(folder)


def build(folder: Path) -> None:
    """Builds everything beside `folder` and renames it in place, so that a killed build leaves no half one."""
    go = go_command()
    partial = folder.with_name(f"{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    say(f"building Kubernetes {VERSION}, etcd, CoreDNS and Helm into {folder}: once, about 8 minutes on 2 cores")
    began = time.monotonic()
    run_build([go, "build", "-v", "-o", str(partial), "-ldflags", LDFLAGS, "tool"], total=count_packages(go))
    for old, new in RENAMED.items():
        (partial / old).rename(partial / new)
    static = {**os.environ, "CGO_ENABLED": "0"}
    command = [go, "build", "-o", str(partial / "pause"), "-ldflags", "-s -w", "./pause"]
    subprocess.run(command, check=True, cwd=TOOLS, env=static)
    pause.write_image(partial / "pause", partial / "pause.tar")
    partial.rename(folder)
    say(f"built in {time.monotonic() - began:.0f} s")


def run_build(command: list[str], total: int) -> None:
    """Runs go build, saying every few seconds how far it is."""
    began = time.monotonic()
    lines: list[str] = []
    with subprocess.Popen(command, cwd=TOOLS, stderr=subprocess.PIPE, text=True) as process:
        assert process.stderr is not None
        reader = threading.Thread(target=lines.extend, args=(process.stderr,), daemon=True)
        reader.start()
        while reader.is_alive():
            reader.join(SAY_EVERY)
            minutes, seconds = divmod(int(time.monotonic() - began), 60)
            say(f"building {minutes}:{seconds:02d}, {len(lines)} packages compiled of {total} where none is cached")
    if process.returncode != 0:
        detail = " | ".join(line.strip() for line in lines[-3:])
        raise ClusterError(f"go build failed: {detail or process.returncode}")


def count_packages(go: str) -> int:
    """How many packages a cold build compiles; also what fetches the modules."""
    say("fetching the modules")
    result = subprocess.run([go, "list", "-deps", "tool"], cwd=TOOLS, check=False, capture_output=True, text=True)
    if result.returncode != 0:
        raise ClusterError(f"the Go modules cannot be fetched: {result.stderr.strip().splitlines()[-1]}")
    return len(result.stdout.split())


def go_command() -> str:
    """A Go that can build: new enough, or able to fetch a newer one of itself."""
    if (found := usable_go()) is not None:
        return found
    if program("apt-get") is not None and debian_go() >= GO_NEEDED:
        install([GO_PACKAGE])
        if (found := usable_go()) is not None:
            return found
    raise ClusterError("building the cluster's programs needs Go 1.24 or newer: install it and put `go` on the PATH")


def usable_go() -> str | None:
    go = shutil.which("go", path=f"{os.environ.get('PATH', '')}:{GO_FOLDERS}")
    if go is None:
        return None
    said = subprocess.run([go, "env", "GOVERSION", "GOTOOLCHAIN"], check=False, capture_output=True, text=True, cwd="/")
    version, _, toolchain = said.stdout.partition("\n")
    # From 1.21 on, Go fetches the toolchain that go.mod asks for unless told to stay local.
    needed = GO_NEEDED if toolchain.strip() == "local" else (1, 21)
    return go if parse_version(version) >= needed else None


def debian_go() -> tuple[int, ...]:
    """Version of Debian's Go package."""
    said = subprocess.run(["apt-cache", "policy", GO_PACKAGE], check=False, capture_output=True, text=True)
    candidate = re.search(r"Candidate: 2:(\S+)", said.stdout)
    return parse_version(candidate[1]) if candidate else (0,)


def parse_version(text: str) -> tuple[int, ...]:
    """`go1.24.1` or `1.24~2` → (1, 24)."""
    found = re.search(r"(\d+)\.(\d+)", text)
    return (int(found[1]), int(found[2])) if found else (0,)
