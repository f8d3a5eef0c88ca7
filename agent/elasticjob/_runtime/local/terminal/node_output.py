"""Print the output of a pod's agent and workers on the screen."""

from __future__ import annotations

import asyncio

from elasticjob._runtime.local.terminal.screen import Screen

_LONGEST_LINE = 1 << 20
"""Bytes of one line. A longer line is printed in parts."""


async def print_output(output: asyncio.StreamReader, screen: Screen) -> None:
    """Print all that is written to `output` until it is closed; lines that have come together are printed together."""
    rest = b""
    while data := await output.read(1 << 16):
        *lines, rest = (rest + data).split(b"\n")
        if len(rest) > _LONGEST_LINE:
            lines, rest = [*lines, rest], b""
        if lines:
            screen.print_output([line.decode(errors="replace") for line in lines])
    if rest:
        screen.print_output([rest.decode(errors="replace")])
