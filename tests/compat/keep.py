"""Keep the code of a released version for the tests of this folder: `python tests/compat/keep.py [COMMIT]`.

Run it at each release, and commit the archive. It holds what runs in a cluster, the definition of an ElasticJob, and
the page that lists its conditions: the tests let that version talk to today's, and compare the rest.
"""

from __future__ import annotations

import lzma
import re
import subprocess
import sys
from pathlib import Path

FOLDER = Path(__file__).parent
KEPT = ("agent/elasticjob", "operator/elasticjob_operator", "crds/elasticjobs.yaml")
CONDITIONS = ("docs/reference/conditions-and-events.md", "docs/reference.md")
"""The page that lists the conditions: a version has one of these."""
LEFT_OUT = (
    *(
        f"agent/elasticjob/{name}"
        for name in ("convert", "data", "frameworks", "inprocess", "_runtime/local", "_runtime/torchrun")
    ),
    *(f"agent/elasticjob/training/{name}" for name in ("replicated", "sharded")),
)
"""What only users' machines and scripts import."""


def keep(commit: str) -> Path:
    """Write the archive of the version at a commit; return its path."""
    source = _git("show", f"{commit}:agent/elasticjob/__init__.py").decode()
    version = re.search(r'^__version__ = "([^"]+)"$', source, re.MULTILINE)
    if version is None:
        raise SystemExit(f"agent/elasticjob/__init__.py at {commit} has no __version__")
    excluded = [f":(exclude){path}" for path in LEFT_OUT]
    pages = _git("ls-tree", "--full-tree", "--name-only", commit, *CONDITIONS).decode().splitlines()
    archive = FOLDER / f"elasticjob-{version[1]}.tar.xz"
    code = _git("archive", commit, *KEPT, *pages, *excluded)
    archive.write_bytes(lzma.compress(code, preset=9 | lzma.PRESET_EXTREME))
    return archive


def _git(*arguments: str) -> bytes:
    return subprocess.run(["git", *arguments], cwd=FOLDER.parents[1], check=True, capture_output=True).stdout


if __name__ == "__main__":
    written = keep(*sys.argv[1:] or ["HEAD"])
    print(f"{written} has {written.stat().st_size} bytes")
