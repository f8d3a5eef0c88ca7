"""The error of all cluster verbs."""

from host.errors import SetupError


class ClusterError(SetupError):
    """A verb failed; the message is one line that names the problem and what to do."""
