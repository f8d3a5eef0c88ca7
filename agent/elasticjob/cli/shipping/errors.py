"""Why a job cannot be submitted as it is."""

from __future__ import annotations

from elasticjob.cli.cluster.errors import ClusterError


class SubmitError(ClusterError):
    """The code or the wishes of the user cannot be submitted; nothing was created. The text says what to change."""
