"""The error of everything that sets this machine up."""


class SetupError(Exception):
    """This machine cannot be set up; the message says in one line why and what to do."""
