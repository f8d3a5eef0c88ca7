"""`elasticjob store`: the TCPStore service of one job, with its coordinator, in one process."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import resource
import signal
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from elasticjob.contract import codec
from elasticjob.contract.messages import RoundSettings
from elasticjob.contract.names import DEFAULT_PORT, Env, ExitCode
from elasticjob.control_link.link import LinkGate, LinkRole, Welcome
from elasticjob.keep_alive import KeepAlive
from elasticjob.rendezvous.state import initial_state
from elasticjob.store.server import StoreServer
from elasticjob.store_pod.coordinator import Coordinator

log = logging.getLogger(__name__)

ROUNDS_PER_START = 1_000_000
"""Each start of one store pod counts its rounds from its own multiple of this, so that no number comes twice."""


@dataclass(frozen=True)
class StoreConfig:
    """What a store is told at its start."""

    run_id: str
    attempt: int
    incarnation: int
    port: int
    settings: RoundSettings
    node_key: bytes
    operator_key: bytes
    state_dir: Path | None = None
    listen_fd: int | None = None

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> StoreConfig:
        """Read `Env.*`; ValueError names the variable that is missing or wrong."""
        settings = codec.parse(RoundSettings, codec.loads(_need(environ, Env.SETTINGS).encode()), Env.SETTINGS)
        state_dir = environ.get(Env.STATE_DIR)
        return cls(
            run_id=_need(environ, Env.RUN_ID),
            attempt=_number(environ, Env.EXECUTION_ATTEMPT, "1"),
            incarnation=_number(environ, Env.STORE_INCARNATION, "0"),
            port=_number(environ, Env.PORT, str(DEFAULT_PORT)),
            settings=settings,
            node_key=_key(environ, Env.NODE_KEY),
            operator_key=_key(environ, Env.OPERATOR_KEY),
            state_dir=Path(state_dir) if state_dir else None,
            listen_fd=_number(environ, Env.LISTEN_FD, "") if environ.get(Env.LISTEN_FD) else None,
        )


def _need(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ValueError(f"{name} is not set")
    return value


def _number(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name) or default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _key(environ: Mapping[str, str], name: str) -> bytes:
    try:
        key = bytes.fromhex(_need(environ, name))
    except ValueError:
        raise ValueError(f"{name} must be set, in hexadecimal") from None
    if len(key) < 16:
        raise ValueError(f"{name} must have at least 16 bytes")
    return key


def count_container_start(state_dir: Path | None) -> int:
    """How often this store pod's container started before; the directory outlives the container (an emptyDir)."""
    if state_dir is None:
        return 0
    marker = state_dir / "starts"
    starts = int(marker.read_text()) if marker.exists() else 0
    marker.write_text(str(starts + 1))
    return starts


def raise_open_file_limit() -> None:
    """A connection is an open file, and the usual limit (1024) is below what a large job needs."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


async def serve_store(config: StoreConfig) -> None:
    """Serve until SIGTERM or SIGINT; closed from when a newer store is heard of."""
    raise_open_file_limit()
    stop = asyncio.Event()
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, stop.set)
    starts = count_container_start(config.state_dir)
    now = time.monotonic()
    coordinator = Coordinator(
        initial_state(
            config.settings,
            attempt=config.attempt,
            store=config.incarnation,
            now=now,
            epoch=time.time() - now,
            recovering=config.incarnation > 0 or starts > 0,
            n=starts * ROUNDS_PER_START,
        )
    )
    gate = LinkGate(
        welcome=Welcome(config.run_id, config.attempt, config.incarnation),
        keys={LinkRole.NODE: config.node_key, LinkRole.OPERATOR: config.operator_key},
        serve=coordinator.serve,
        keep_alive=KeepAlive(config.settings.keep_alive_interval, config.settings.keep_alive_max_attempts),
    )
    server = StoreServer(links=gate.accept)
    sock = None if config.listen_fd is None else socket.socket(fileno=config.listen_fd)
    port = await server.start(port=config.port, sock=sock)
    coordinator.start()
    log.info("serving on port %d, incarnation %d, start %d", port, config.incarnation, starts)
    ends = [asyncio.ensure_future(event.wait()) for event in (stop, coordinator.superseded)]
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    coordinator.stop()
    await server.close()
    # Ending would only bring it back, in a container that restarts in place.
    await stop.wait()
    ends[1].cancel()


def main(argv: Sequence[str] | None = None) -> int:
    """Entry point; configuration comes from the environment that the operator sets."""
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
    asyncio.run(serve_store(config))
    return 0
