"""What can go wrong, said in one line that tells what to do."""


class ClusterError(Exception):
    """The cluster cannot do what was asked; the message is one line for a person."""
