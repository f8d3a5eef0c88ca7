"""`elasticjob store`: the store process of one job, with its TCPStore server and its coordinator."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import signal
import socket
import sys
import time
from collections.abc import Coroutine, Sequence
from pathlib import Path
from typing import Any

from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.contract.names import ExitCode
from elasticjob._runtime.control_link.link import LinkGate, LinkRole, Welcome
from elasticjob._runtime.rendezvous.state import initial_state
from elasticjob._runtime.store.open_files import (
    connection_limit,
    raise_open_file_limit,
    unauthenticated_bytes,
    unauthenticated_limit,
)
from elasticjob._runtime.store.server import StoreServer
from elasticjob._runtime.store.wire import MIB, Limits
from elasticjob._runtime.store_pod import event_loop
from elasticjob._runtime.store_pod.config import StoreConfig
from elasticjob._runtime.store_pod.coordinator import Coordinator
from elasticjob._runtime.system.daemon_threads import with_daemon_threads
from elasticjob._runtime.system.loop_errors import call_on_error
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive

log = logging.getLogger(__name__)

ROUNDS_PER_START = 1_000_000
"""Numbers of rounds reserved for each start of the container, so that no number is used twice in one incarnation."""
KEYS_MEMORY, ANSWERS_MEMORY = 64 * MIB, 32 * MIB
"""Bytes of keys, and of unread answers, in a job's store. Only torchrun's c10d backend uses it as a TCPStore, for one
value."""
_MAX_DIGITS = 18
"""Digits of a counter. This program has not written a longer one."""


def count_container_start(state_dir: Path | None, now: float) -> int:
    """Count one more start of the container in `state_dir`; return the number of earlier starts, 0 without it.

    `now` in Unix seconds. If the counter is unreadable, it continues from `now`: that is more than all starts so far,
    so no number is used twice.
    """
    if state_dir is None:
        return 0
    counter = state_dir / "starts"
    starts = _read_counter(counter)
    if starts is None:
        starts = int(now)
        log.warning("%s is unreadable: this start counts as number %d", counter, starts)
    _write_counter(counter, starts + 1)
    return starts


def _read_counter(path: Path) -> int | None:
    """Return the number in the file, 0 if there is no file, None if its content is not a number."""
    try:
        data = path.read_bytes()
    except FileNotFoundError:
        return 0
    return int(data) if data.isdigit() and len(data) <= _MAX_DIGITS else None


def _write_counter(path: Path, number: int) -> None:
    """Replace the file as a whole: a process that ends in between leaves the old number or the new one."""
    written = path.with_name(f"{path.name}.new")
    with written.open("w") as file:
        file.write(str(number))
        file.flush()
        os.fsync(file.fileno())
    written.replace(path)


async def serve_store(config: StoreConfig, early_signals: Sequence[str] = ()) -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent process (`parent_fd`).

    After the first signal the store serves on until it may end without cost for its agents, after the second one it
    ends at once. If an agent reports a newer store, stop listening, but wait for the signal too. `early_signals`: names
    of those received before; the caller's handlers append to it. An error in a callback, or while an agent is
    served, is raised: a store that skipped what it was about to do may leave the job waiting, while another start of
    the store learns from the agents which round runs.
    """
    _, open_files = raise_open_file_limit()
    stop, at_once = asyncio.Event(), asyncio.Event()
    loop = asyncio.get_running_loop()
    failed: asyncio.Future[None] = loop.create_future()

    def fail(error: BaseException) -> None:
        if not failed.done():
            failed.set_exception(error)

    call_on_error(loop, fail)

    def end() -> None:
        (at_once if stop.is_set() else stop).set()

    for signum in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(signum, end)
    for _ in early_signals:
        end()
    if config.parent_fd is not None:
        loop.add_reader(config.parent_fd, _end_with_parent, config.parent_fd, stop, at_once)
    starts = count_container_start(config.state_dir, time.time())
    coordinator = _coordinator(config, starts)
    gate = LinkGate(
        welcome=Welcome(config.run_id, config.attempt, config.incarnation),
        keys={LinkRole.AGENT: config.node_key, LinkRole.OPERATOR: config.operator_key},
        serve=coordinator.serve,
        keep_alive=KeepAlive(config.settings.keep_alive_interval, config.settings.keep_alive_max_attempts),
        passive=lambda: coordinator.state.passive,
    )
    limits = store_limits(config.settings, open_files)
    server = StoreServer(limits=limits, links=gate.accept, clients=config.clients)
    sock = None if config.listen_fd is None else socket.socket(fileno=config.listen_fd)
    port = await server.start(port=config.port, sock=sock)
    coordinator.start()
    role = ", standby" if config.standby else ""
    log.info("serving on port %d, incarnation %d, start %d%s", port, config.incarnation, starts, role)
    await _first_of(failed, stop.wait(), coordinator.superseded.wait())
    log.info("this store ends once its agents can do without it")
    await _first_of(failed, coordinator.wait_until_it_may_end(), at_once.wait())
    coordinator.stop()
    await server.close()
    # If a superseded process exited, the kubelet would restart its container.
    await _first_of(failed, stop.wait())


async def _first_of(failed: asyncio.Future[None], *waits: Coroutine[None, None, object]) -> None:
    """Return when one of `waits` has returned, and cancel the others. Raise the error with which `failed` ends."""
    tasks: list[asyncio.Future[Any]] = [failed, *(asyncio.ensure_future(wait) for wait in waits)]
    ended, others = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
    for task in others - {failed}:
        task.cancel()
    for task in ended:
        task.result()


def _end_with_parent(parent_fd: int, stop: asyncio.Event, at_once: asyncio.Event) -> None:
    """Stop the store: the other end of the pipe, to which no process writes, is closed."""
    asyncio.get_running_loop().remove_reader(parent_fd)
    stop.set()
    at_once.set()


def store_limits(settings: RoundSettings, open_files: int) -> Limits:
    """Return the limits of a job's store. `open_files`: how many files its process may open."""
    nodes = settings.max_nodes + settings.spares
    return Limits(
        memory=KEYS_MEMORY,
        total_write_buffer=ANSWERS_MEMORY,
        connections=connection_limit(0, nodes, open_files),
        unauthenticated=unauthenticated_limit(nodes),
        unauthenticated_bytes=unauthenticated_bytes(unauthenticated_limit(nodes)),
    )


def _coordinator(config: StoreConfig, starts: int) -> Coordinator:
    now = time.monotonic()
    return Coordinator(
        initial_state(
            config.settings,
            attempt=config.attempt,
            store=config.incarnation,
            now=now,
            epoch=time.time() - now,
            recovering=config.incarnation > 0 or starts > 0,
            round_number=starts * ROUNDS_PER_START,
            standby=config.standby,
            restarted=starts > 0,
        )
    )


def main(argv: Sequence[str] | None = None, early_signals: Sequence[str] = ()) -> int:
    """Entry point. Exit code 64: the environment is invalid; 70: the store itself has failed.

    `early_signals`: as in `serve_store`.
    """
    parser = argparse.ArgumentParser(
        prog="elasticjob store",
        description="The TCPStore service of one job. The operator (or `elasticjob run`) starts it; "
        "it is configured by ELASTICJOB_* variables.",
    )
    parser.parse_args(argv)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s [store] %(message)s")
    try:
        config = StoreConfig.from_environ(os.environ)
    except ValueError as error:
        parser.exit(ExitCode.USAGE, f"elasticjob store: {error}\n")
    try:
        event_loop.run_in_turns(with_daemon_threads(serve_store(config, early_signals)))
    except Exception:
        log.exception("the store has failed")
        return ExitCode.INTERNAL
    return 0
