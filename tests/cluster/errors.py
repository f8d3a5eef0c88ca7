"""The error of all cluster verbs."""


class ClusterError(Exception):
    """A verb failed; the message is one line that names the problem and what to do."""
