"""Checksums, and a statement of what was built from what, by in-toto's and SLSA's formats. The statement is unsigned:
whoever publishes it signs it."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Sequence
from pathlib import Path

from release.source import Source

BUILD_TYPE = "https://elasticjob.dev/make-release/v1"


def sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def write_checksums(files: Sequence[Path], dist: Path) -> Path:
    """Write SHA256SUMS, which `sha256sum --check` reads."""
    path = dist / "SHA256SUMS"
    path.write_text("".join(f"{sha256(file)}  {file.name}\n" for file in sorted(files)))
    return path


def write_provenance(source: Source, files: Sequence[Path], dist: Path) -> Path:
    """Write the statement about these files. RELEASE_BUILDER names who builds, such as a workflow's URL."""
    subjects = [{"name": file.name, "digest": {"sha256": sha256(file)}} for file in sorted(files)]
    base = os.environ.get("PYTHON_IMAGE", "").partition("@sha256:")
    locks = sorted((source.folder / "requirements").glob("*.lock"))
    statement = {
        "_type": "https://in-toto.io/Statement/v1",
        "subject": subjects,
        "predicateType": "https://slsa.dev/provenance/v1",
        "predicate": {
            "buildDefinition": {
                "buildType": BUILD_TYPE,
                "externalParameters": {"version": source.version, "commit": source.commit},
                "internalParameters": {"SOURCE_DATE_EPOCH": source.epoch, "uncommittedChanges": source.changed},
                "resolvedDependencies": [
                    {"uri": "git+file:.", "digest": {"gitCommit": source.commit}},
                    *({"uri": f"file:requirements/{lock.name}", "digest": {"sha256": sha256(lock)}} for lock in locks),
                    *([{"uri": f"oci:{base[0]}", "digest": {"sha256": base[2]}}] if base[2] else []),
                ],
            },
            "runDetails": {"builder": {"id": os.environ.get("RELEASE_BUILDER", "https://elasticjob.dev/local")}},
        },
    }
    path = dist / f"elasticjob-{source.version}.provenance.json"
    path.write_text(json.dumps(statement, indent=1, sort_keys=True) + "\n")
    return path
