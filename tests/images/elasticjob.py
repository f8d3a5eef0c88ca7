"""The elasticjob image: operator, store and agent on a small Debian, without torch."""

from __future__ import annotations

import hashlib
import io
import platform
import shutil
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO

import tomllib

from images import oci
from images.console import ImageError, stage
from images.debian import Root

REPOSITORY = Path(__file__).resolve().parents[2]
PACKAGES = (REPOSITORY / "agent/elasticjob", REPOSITORY / "operator/elasticjob_operator")
LOCK = REPOSITORY / "requirements/operator.lock"
"""What a release installs, too."""
PYTHON = "3.13"
LIBRARY = f"usr/local/lib/python{PYTHON}/dist-packages"
USER = "65532"
ZIP_TIME = (2000, 1, 1, 0, 0, 0)

ROOT = Root(
    variant="essential",
    packages=["python3"],
    dropped=[
        "usr/bin/perl*",
        "usr/lib/*/perl-base/*",
        "usr/lib/*/libdb-5*",
        "usr/lib/*/libsystemd.so*",
        "usr/lib/python3*/pydoc_data/*",
        "usr/lib/python3*/ensurepip/*",
        "usr/lib/python3*/lib2to3/*",
        "usr/lib/systemd/*",
        "usr/share/perl*",
        "usr/share/zoneinfo/*",
        "usr/sbin/ldconfig",
        "var/lib/dpkg/info/*",
    ],
    appended={
        "etc/passwd": f"elasticjob:x:{USER}:{USER}::/nonexistent:/usr/sbin/nologin\\n",
        "etc/group": f"elasticjob:x:{USER}:\\n",
    },
)

COMMANDS = {"elasticjob": "elasticjob.cli", "elasticjob-operator": "elasticjob_operator.command"}


def version() -> str:
    """Return the version, which is also the image's tag."""
    found: str = tomllib.loads((REPOSITORY / "pyproject.toml").read_text())["project"]["version"]
    return found


METADATA = f"Metadata-Version: 2.1\nName: elasticjob\nVersion: {version()}\n"
"""Metadata of the distribution, from which `importlib.metadata` reads the version."""

CONFIG = {
    "Env": ["PATH=/usr/local/bin:/usr/bin:/bin", "PYTHONUNBUFFERED=1", "PYTHONDONTWRITEBYTECODE=1"],
    "Cmd": ["elasticjob-operator"],
    "User": f"{USER}:{USER}",
    "WorkingDir": "/",
}


def build(cache: oci.Cache) -> oci.Image:
    """Build the image of this checkout's code."""
    root = layer(cache, oci.Recipe("elasticjob: Debian and Python (about 15 s)", ROOT.inputs, ROOT.make))
    base = Base(cache, root)
    libraries = layer(cache, base.libraries())
    return oci.Image(f"elasticjob:{version()}", [root, libraries, cache.layer(base.code())], CONFIG)


def layer(cache: oci.Cache, recipe: oci.Recipe) -> oci.Layer:
    """Return the recipe's layer; print progress where it must be built."""
    if (known := cache.known(recipe)) is not None:
        return known
    with stage(recipe.title):
        return cache.layer(recipe)


class Base:
    """The layers on the Debian root, whose Python compiles their byte code."""

    def __init__(self, cache: oci.Cache, root: oci.Layer) -> None:
        self.cache = cache
        self.root = root

    def libraries(self) -> oci.Recipe:
        """Return the recipe of the operator's libraries from PyPI."""
        wanted = LOCK.read_text()

        def make(output: IO[bytes]) -> None:
            with self.staging() as (folder, inside):
                install(folder)
                # kubernetes has 75 MB of generated source, mostly docstrings: keep only its byte code.
                self.python("compileall", "-q", "-b", "-o", "2", *unchecked(inside), f"{inside}/kubernetes")
                for source in (folder / "kubernetes").rglob("*.py"):
                    source.unlink()
                self.python("compileall", "-q", "-x", "/kubernetes/", *unchecked(inside), inside)
                with tarfile.open(fileobj=output, mode="w|") as tar:
                    oci.add_tree(tar, folder, LIBRARY)

        inputs = {"root": self.root.digest, "requirements": wanted, "python": PYTHON, "recipe": 1}
        return oci.Recipe("elasticjob: the operator's libraries (about 20 s)", inputs, make)

    def code(self) -> oci.Recipe:
        """Return the recipe of the two packages, their commands, and the agent as one file for users' images."""

        def make(output: IO[bytes]) -> None:
            with self.staging() as (folder, inside):
                for package in PACKAGES:
                    shutil.copytree(package, folder / package.name, ignore=shutil.ignore_patterns("__pycache__"))
                self.python("compileall", "-q", *unchecked(inside), inside)
                with tarfile.open(fileobj=output, mode="w|") as tar:
                    oci.add_tree(tar, folder, LIBRARY)
                    oci.add_file(tar, f"{LIBRARY}/elasticjob-{version()}.dist-info/METADATA", METADATA.encode())
                    oci.add_folder(tar, "opt/elasticjob")
                    oci.add_file(tar, "opt/elasticjob/agent.pyz", agent_zip())
                    for command, module in COMMANDS.items():
                        oci.add_file(tar, f"usr/local/bin/{command}", starter(module), 0o755)

        inputs = {"root": self.root.digest, "sources": sources(), "commands": COMMANDS, "metadata": METADATA}
        return oci.Recipe("elasticjob: code", inputs, make)

    @contextmanager
    def staging(self) -> Iterator[tuple[Path, str]]:
        """Create an empty folder inside the root; yield its path on this machine, and inside the root."""
        root = oci.unpacked(self.cache, self.root)
        with tempfile.TemporaryDirectory(dir=root / "tmp") as folder:
            yield Path(folder), f"/{Path(folder).relative_to(root)}"

    def python(self, *module: str) -> None:
        """Run a module with the root's Python; ImageError where it fails."""
        root = oci.unpacked(self.cache, self.root)
        ran = subprocess.run(
            ["chroot", str(root), "python3", "-m", *module],
            capture_output=True,
            text=True,
            env={"PATH": "/usr/sbin:/usr/bin:/sbin:/bin"},
            check=False,
        )
        if ran.returncode != 0:
            raise ImageError(f"python3 -m {' '.join(module)} failed:\n{ran.stdout}{ran.stderr}")


def unchecked(inside: str) -> list[str]:
    """Return options of compileall: never check byte code against its source, and record its path in the image."""
    return ["--invalidation-mode", "unchecked-hash", "-s", inside, "-p", f"/{LIBRARY}"]


def install(folder: Path) -> None:
    """Install the locked wheels for the image's Python, which may differ from this one."""
    command = [sys.executable, "-m", "uv", "pip", "install", "-q", "--only-binary", ":all:", "--require-hashes"]
    target = ["--python-version", PYTHON, "--python-platform", f"{platform.machine()}-manylinux_2_28"]
    ran = subprocess.run(
        [*command, *target, "--target", str(folder), "-r", str(LOCK)], capture_output=True, text=True, check=False
    )
    if ran.returncode != 0:
        raise ImageError(f"uv cannot install the operator's libraries:\n{ran.stderr}")


def source_files(package: Path) -> list[Path]:
    return [path for path in sorted(package.rglob("*")) if path.is_file() and "__pycache__" not in path.parts]


def sources() -> dict[str, str]:
    """Return the SHA-256 of every source file, by path in the repository."""
    return {
        str(path.relative_to(REPOSITORY)): hashlib.sha256(path.read_bytes()).hexdigest()
        for package in PACKAGES
        for path in source_files(package)
    }


def starter(module: str) -> bytes:
    """Return a script that runs the `main` of a module."""
    return f"#!/usr/bin/python3\nimport sys\n\nfrom {module} import main\n\nsys.exit(main())\n".encode()


def agent_zip() -> bytes:
    """Return the agent as a zip that Python 3.10 or newer runs; the same sources give the same bytes."""
    package = PACKAGES[0]
    files = {str(path.relative_to(package.parent)): path.read_bytes() for path in source_files(package)}
    files["__main__.py"] = starter(COMMANDS["elasticjob"])
    output = io.BytesIO()
    with zipfile.ZipFile(output, "w") as archive:
        for name, content in sorted(files.items()):
            archive.writestr(zipfile.ZipInfo(name, ZIP_TIME), content)
    return output.getvalue()
