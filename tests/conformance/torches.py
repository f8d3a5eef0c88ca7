#!/usr/bin/env python3
"""Run the conformance tests on other torch versions: PyPI's (`2.6.0`), or a Debian suite's (`trixie`; needs root).

Each version is installed into a temporary folder (up to 8 GB, a few minutes), which is removed afterwards. The script
prints one row of docs/contribute/conformance.md for each version.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

REPOSITORY = Path(__file__).resolve().parents[2]
TOOLS = ["pytest", "pytest-asyncio", "pytest-timeout", "hypothesis"]
DEBIAN = ["python3", "python3-numpy", "python3-torch"]
LIMITS = ["--timeout=60", "--maxfail=5", "-p", "no:cacheprovider"]
SHOWN = "import sys, torch; print(torch.__version__, '|', sys.version.split()[0])"


def on_pypi(version: str, folder: Path) -> tuple[list[str], Path, dict[str, str]]:
    """Install a version from PyPI; return the command of its Python, the repository's path there, and environment."""
    python = folder / "venv/bin/python"
    cache = ["--cache-dir", str(folder / "cache")]
    _run("uv", "venv", "-q", "--python", "3.11", str(folder / "venv"), *cache)
    _run("uv", "pip", "install", "-q", "--python", str(python), *cache, f"torch=={version}", "numpy<2", *TOOLS)
    shutil.rmtree(folder / "cache")
    return [str(python)], REPOSITORY, {}


def on_debian(suite: str, folder: Path) -> tuple[list[str], Path, dict[str, str]]:
    """Install a Debian suite's torch in a root file system of its own; return the same as `on_pypi`."""
    root = folder / "root"
    options = ["--aptopt=Acquire::Check-Valid-Until false", "--variant=minbase", f"--include={','.join(DEBIAN)}"]
    _run("mmdebstrap", "--quiet", "--format=directory", *options, suite, str(root))
    version = subprocess.run(
        ["chroot", root, "python3", "-c", "import sys; print('%d.%d' % sys.version_info[:2])"],
        check=True, capture_output=True, text=True,
    ).stdout.strip()  # fmt: skip
    _run("uv", "pip", "install", "-q", "--target", str(root / "tools"), "--python-version", version, *TOOLS)
    for part in ("agent", "tests", "pyproject.toml"):
        _run("cp", "-r", "--parents", part, str(root / "srv"), cwd=REPOSITORY)
    command = ["unshare", "--mount", "--pid", "--fork", f"--mount-proc={root}/proc", "chroot", str(root), "env", "-C"]
    return [*command, "/srv", "PYTHONPATH=/tools", "python3"], Path("/srv"), {"HOME": "/root"}


def row(name: str) -> tuple[str, bool]:
    """Install, test and remove one version; return its row of the table, and whether all tests passed."""
    with tempfile.TemporaryDirectory(prefix="torch-") as folder:
        install = on_pypi if name[0].isdigit() else on_debian
        python, repository, environ = install(name, Path(folder))
        environ = {**os.environ, **environ}
        shown = subprocess.run([*python, "-c", SHOWN], capture_output=True, text=True, env=environ, check=False)
        where = str(repository / "tests/conformance")
        command = [*python, "-m", "pytest", "-q", where, *LIMITS]
        ran = subprocess.run(command, capture_output=True, text=True, env=environ, cwd=folder, check=False)
        output = (shown.stderr if shown.returncode else "") + ran.stdout + ran.stderr
        if ran.returncode:
            print(output[-6000:], file=sys.stderr)
        counts = re.findall(r"\d+ (?:passed|failed|skipped|errors?)", ran.stdout.strip().rpartition("\n")[2])
        versions = shown.stdout.strip() or "does not import"
        return f"| {name} | {versions} | {', '.join(counts) or 'no test ran'} |", ran.returncode == 0


def _run(*command: str, cwd: Path | None = None) -> None:
    subprocess.run(command, check=True, cwd=cwd)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("torch", nargs="+", help="a version on PyPI, or a Debian suite")
    all_passed = True
    for name in parser.parse_args().torch:
        line, passed = row(name)
        print(line, flush=True)
        all_passed = all_passed and passed
    return 0 if all_passed else 1


if __name__ == "__main__":
    sys.exit(main())
