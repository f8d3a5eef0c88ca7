"""Entry point of `elasticjob run`."""

from __future__ import annotations

import asyncio
import sys

from elasticjob.contract.names import ExitCode
from elasticjob.local.driver import Driver
from elasticjob.local.manifest import ManifestError, load, read_job


def main(path: str, *, nodes: int | None = None) -> int:
    """Run the job in a manifest to its end; its exit code."""
    try:
        job = read_job(load(path), nodes=nodes)
    except ManifestError as error:
        print(f"elasticjob run: {error}", file=sys.stderr)
        return ExitCode.USAGE
    return asyncio.run(Driver(job).run())
