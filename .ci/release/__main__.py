"""Build a release: `python -m release`."""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from pathlib import Path

from release.bill_of_materials import LOCKS, build_bill
from release.chart import build_chart
from release.images import Images, build_images
from release.packages import build_packages
from release.provenance import write_checksums, write_provenance
from release.source import REPOSITORY, ReleaseError, copy_source
from release.version import places


def release(dist: Path, image: bool, allow_changes: bool) -> tuple[str, ...]:
    """Write all files of a release to an empty `dist`; return notes for people."""
    with tempfile.TemporaryDirectory(prefix="elasticjob-release-") as folder:
        source = copy_source(Path(folder), allow_changes)
        wrong = sorted({str(path.relative_to(REPOSITORY)) for path, found in places() if found != source.version})
        if wrong:
            raise ReleaseError(f"{', '.join(wrong)}: not version {source.version}: run python -m release.version")
        empty(dist)
        files = [*build_packages(source, dist), build_chart(source, dist), build_bill(source, dist)]
        for extra in LOCKS:
            files.append(Path(shutil.copyfile(source.folder / f"requirements/{extra}.lock", dist / f"{extra}.lock")))
        images = build_images(source, dist) if image else Images(notes=("not built: the image, as asked",))
        files += images.files
        files.append(write_provenance(source, files, dist))
        write_checksums(files, dist)
        changes = ("built from files with changes that are in no commit",) if source.changed else ()
        return (*images.notes, *changes)


def empty(dist: Path) -> None:
    """Make `dist` an empty folder. Raise ReleaseError if it has files that no earlier release left there."""
    if dist.exists() and any(dist.iterdir()) and not (dist / "SHA256SUMS").exists():
        raise ReleaseError(f"{dist} has files, but not those of an earlier release: empty it, or pass another --dist")
    shutil.rmtree(dist, ignore_errors=True)
    dist.mkdir(parents=True)


def main() -> int:
    parser = argparse.ArgumentParser(prog="release", description=__doc__)
    parser.add_argument(
        "--dist", type=Path, default=REPOSITORY / "dist", help="the folder to write; an earlier release there goes"
    )
    parser.add_argument("--no-image", action="store_true", help="build no image")
    parser.add_argument("--allow-changes", action="store_true", help="also from files that are in no commit")
    options = parser.parse_args()
    try:
        notes = release(options.dist, not options.no_image, options.allow_changes)
    except ReleaseError as error:
        print(f"release: {error}", file=sys.stderr)
        return 1
    print((options.dist / "SHA256SUMS").read_text(), end="")
    for note in notes:
        print(f"release: {note}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main())
