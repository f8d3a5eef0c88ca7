"""The image builder's progress on standard error, and the error that ends a build."""

from host.console import Console
from host.errors import SetupError

console = Console("images")
progress, stage = console.progress, console.stage


class ImageError(SetupError):
    """An image cannot be built; the message says why and what to do."""
