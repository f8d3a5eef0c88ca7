"""The chart as an archive, which `helm push` uploads to an OCI registry as it is.

`helm package` writes the time of the build into the archive; this writes the same bytes each time.
"""

from __future__ import annotations

import gzip
import io
import re
import tarfile
from pathlib import Path

from release.source import Source
from release.version import chart_version

NAME = "elasticjob"
IGNORED = (".helmignore",)


def build_chart(source: Source, dist: Path) -> Path:
    """Write the archive of the chart, whose versions are the release's."""
    root = source.folder / "charts" / NAME
    version = chart_version(source.version)
    archive = dist / f"{NAME}-chart-{version}.tgz"
    # Helm reads Chart.yaml first.
    paths = sorted((path for path in root.rglob("*") if path.is_file()), key=lambda p: (p.name != "Chart.yaml", str(p)))
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", 9, file, mtime=0) as packed,
        tarfile.open(fileobj=packed, mode="w", format=tarfile.USTAR_FORMAT) as tar,
    ):
        for path in paths:
            name = str(path.relative_to(root))
            if name in IGNORED:
                continue
            content = path.read_bytes()
            if name == "Chart.yaml":
                content = versioned(content.decode(), version, source.version).encode()
            entry = tarfile.TarInfo(f"{NAME}/{name}")
            entry.size, entry.mode, entry.mtime = len(content), 0o644, source.epoch
            tar.addfile(entry, io.BytesIO(content))
    return archive


def versioned(chart: str, version: str, app: str) -> str:
    """Return Chart.yaml with these versions: the chart's, and that of the image."""
    chart = re.sub(r"^version: .*$", f"version: {version}", chart, flags=re.MULTILINE)
    return re.sub(r"^appVersion: .*$", f"appVersion: {app}", chart, flags=re.MULTILINE)
