"""The cluster's progress on standard error."""

from host.console import Console

console = Console("cluster")
progress, stage = console.progress, console.stage
