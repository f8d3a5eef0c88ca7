"""Keep a fork server running: start it, replace one that is lost, and say why there is none."""

from __future__ import annotations

import asyncio
import logging
import signal
from collections.abc import Callable
from typing import Any

from elasticjob._runtime.agent.start_workers.fork_server_client import ForkServerClient, ForkServerError
from elasticjob._runtime.system.loop_errors import background_task

log = logging.getLogger(__name__)

MAX_REPLACEMENTS = 5
"""Restart a crashed fork server at most this often per pod."""


class ForkServerSupervisor:
    """The fork server of a pod. Without one, workers start by exec."""

    def __init__(self, *, wanted: bool) -> None:
        """`wanted`: whether the user wants forks, so that `disabled_reason` says why there are none."""
        self._wanted = wanted
        self._disabled_reason = ""
        self._server: ForkServerClient | None = None
        self._is_ready = False
        """Whether the fork server has finished its imports and its self-test."""
        self._create: Callable[[], ForkServerClient] | None = None
        self._replaceable_pid: int | None = None
        """The process that another fork server replaces when it ends: the last one that was ready."""
        self._replacements = 0
        self._replacing: asyncio.Task[None] | None = None

    @property
    def server(self) -> ForkServerClient | None:
        """The fork server, also one that is not ready yet."""
        return self._server

    @property
    def ready(self) -> ForkServerClient | None:
        """The fork server, if it can fork."""
        return self._server if self._is_ready else None

    @property
    def disabled_reason(self) -> str:
        """Why there is no fork server, at most 256 characters; empty if there is one, or the user wants none."""
        return self._disabled_reason

    async def start(self, create: Callable[[], ForkServerClient]) -> dict[str, Any]:
        """Start the fork server, and return its result. `create` also creates those that replace it.

        ForkServerError: it cannot be used. Call `disable` then.
        """
        self._create = create
        return await self._start(create)

    def child_ended(self, pid: int, code: int) -> None:
        """Handle a reaped child of this process: if it was the fork server, another one starts in the background.

        Workers start by exec until that one is ready.
        """
        if self._server is not None and pid == self._server.pid:
            self._server.mark_lost()
        if pid != self._replaceable_pid:
            return
        self._replaceable_pid = None
        reason = f"the fork server ended {f'by {signal.Signals(-code).name}' if code < 0 else f'with exit code {code}'}"
        if self._create is None or self._replacements == MAX_REPLACEMENTS:
            log.warning("%s", self.disable(reason))
            return
        log.warning("%s; another one starts", self.disable(reason))
        self._replacements += 1
        self._replacing = background_task(self._replace(self._create))

    def failed(self, server: ForkServerClient, reason: str) -> str:
        """Give up a fork server that does not answer, unless another one has its place. Return a log line."""
        if server is self._server:
            return self.disable(reason)
        return f"workers start by exec: {reason}"

    def disable(self, reason: str) -> str:
        """End the fork server, if there is one. Return a log line."""
        self._close()
        self._disabled_reason = reason[:256] if self._wanted else ""
        return f"workers start by exec: {reason}"

    def replace_no_more(self) -> None:
        """Start no fork server in the place of the present one when it ends."""
        self._replaceable_pid = None

    def stop(self) -> None:
        """End the fork server for good. Its pre-forked workers end with it; started workers go on."""
        self.replace_no_more()
        if self._replacing is not None:
            self._replacing.cancel()
        self._close()

    async def _start(self, create: Callable[[], ForkServerClient]) -> dict[str, Any]:
        self._server, self._is_ready = create(), False
        result = await self._server.ready()
        self._is_ready, self._replaceable_pid = True, self._server.pid
        return result

    async def _replace(self, create: Callable[[], ForkServerClient]) -> None:
        try:
            result = await self._start(create)
        except (ForkServerError, OSError) as error:  # OSError: no descriptor left
            log.warning("%s", self.disable(str(error)))
        else:
            self._disabled_reason = ""
            log.info("another fork server is ready after %.1f s", result["seconds"])

    def _close(self) -> None:
        if self._server is not None:
            self._server.close()
            self._server, self._is_ready = None, False
