"""Why a job cannot be submitted as it is."""

from __future__ import annotations

from elasticjob.cli.arguments import USAGE
from elasticjob.cli.cluster.errors import ClusterError


class SubmitError(ClusterError):
    """The code or the wishes of the user cannot be submitted; nothing was created. The text says what to change."""

    exit_code = USAGE


class InTheWayError(SubmitError):
    """What the cluster has stands against it, such as another job of this name."""

    exit_code = 1
