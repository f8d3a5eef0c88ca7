"""Build Kueue's controller from its module, once: an image for the cluster's nodes, beside the chart of the module."""

import json
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from . import build, pause
from .layout import Layout

MODULE = build.TOOLS / "kueue"
IMAGE = ("localhost/kueue", "tests")
"""Name and tag of the image."""
_PATH = "sigs.k8s.io/kueue"


@dataclass(frozen=True)
class Kueue:
    """A finished build in `folder`."""

    folder: Path

    @property
    def image(self) -> Path:
        """An OCI archive of the controller's image."""
        return self.folder / "kueue.tar"

    @property
    def chart(self) -> Path:
        """The Helm chart of the module, with Kueue's definitions, roles and webhooks."""
        return self.folder / "chart"


def kueue(layout: Layout) -> Kueue:
    """Return Kueue, built unless the cache has it."""
    folder = build.module_program(layout, MODULE)
    if not folder.exists():
        build.build_module(folder, MODULE, "tool", minutes=5, several=True, finish=_finish, static=True)
    return Kueue(folder)


def _finish(folder: Path) -> None:
    """Write the image, and copy the chart: Go's cache of modules may be gone when a test needs it."""
    program, built = folder / "kueue", Kueue(folder)
    pause.write_image(program, built.image, ":".join(IMAGE), path="manager")
    program.unlink()
    shutil.copytree(_module_folder() / "charts" / "kueue", built.chart, copy_function=shutil.copyfile)
    for directory in [built.chart, *(path for path in built.chart.rglob("*") if path.is_dir())]:
        directory.chmod(0o755)  # those of Go's cache are read-only


def _module_folder() -> Path:
    command = [build.go_command(), "list", "-m", "-json", _PATH]
    answer = subprocess.run(command, check=True, cwd=MODULE, env=build.go_environ(), capture_output=True, text=True)
    return Path(json.loads(answer.stdout)["Dir"])
