"""The agent's configuration, which it reads once from its environment."""

from __future__ import annotations

import binascii
import math
import tempfile
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elasticjob.agent.monitoring.step_times import WINDOW
from elasticjob.agent.reporting.log_options import PREFIX, LogOptions, read_ranks, read_streams
from elasticjob.contract.names import DEFAULT_PORT, Backend, Env

T = TypeVar("T")

DEFAULT_PRELOAD = "torch,torch._dynamo"
TERMINATION_LOG = "/dev/termination-log"
_SECRETS = (Env.NODE_KEY, Env.OPERATOR_KEY)


class UsageError(Exception):
    """A flag or environment variable is wrong; the message names it and the expected value."""


@dataclass(frozen=True)
class AgentConfig:
    """The configuration of one agent. Durations are in seconds.

    `address` is this pod's IP address, `host` and `port` are those of the job's store.
    """

    job: str
    run_id: str
    key: bytes
    index: int
    incarnation: int
    pod: str
    address: str
    host: str
    port: int
    local_world_size: int
    gpus: int
    role: str
    backend: Backend
    preload: tuple[str, ...]
    """Modules that the fork server imports; empty: there is no fork server."""
    stop_grace: float
    join_timeout: float
    keep_alive_interval: float
    keep_alive_attempts: int
    termination_log: str
    agent_id: str
    env: Mapping[str, str]
    """The agent's environment without its keys: the base of the workers' environment."""
    logs: LogOptions = field(default_factory=LogOptions)
    step_time_window: float = WINDOW
    event_log_handler: str = "null"
    """torch's `null` or `console`."""

    @property
    def processes(self) -> int:
        """The number of processes that this agent starts: its workers, or one torchrun that starts them."""
        return 1 if self.backend is Backend.C10D else self.local_world_size

    @property
    def torchrun_workers(self) -> int:
        """The number of workers that this node's torchrun starts; 0 without a torchrun."""
        return self.local_world_size if self.backend is Backend.C10D else 0

    @property
    def endpoint(self) -> str:
        """host:port of the job's store."""
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"


def read_config(env: Mapping[str, str], options: Mapping[str, str] | None = None) -> AgentConfig:
    """Parse the variables of `Env`; `UsageError` names the variable that is missing or wrong.

    `options` are torchrun's, by long name; as with torchrun, PET_<NAME> sets an option that is absent. With c10d the
    agent ignores both: they are for the torchrun that it starts.
    """
    backend = _parse(env, Env.RENDEZVOUS_BACKEND, Backend, Backend.ELASTICJOB.value)
    pet = {name: value for name, value in env.items() if name.startswith("PET_")}
    pet |= {f"PET_{name.replace('-', '_').upper()}": value for name, value in (options or {}).items()}
    prefix = pet.get("PET_LOG_LINE_PREFIX_TEMPLATE") or PREFIX
    if backend is Backend.C10D:
        pet, prefix = {}, f"[{env.get(Env.POD_NAME)}]:"
    host, port = _parse(env, Env.STORE_ENDPOINT, _endpoint)
    interval, attempts = _parse(env, Env.KEEP_ALIVE, _keep_alive, "1x3")
    return AgentConfig(
        job=env.get(Env.JOB, ""),
        run_id=_parse(env, Env.RUN_ID, _text),
        key=_parse(env, Env.NODE_KEY, _hex),
        index=_parse(env, Env.INDEX, _count),
        incarnation=_parse(env, Env.INCARNATION, _count, "0"),
        pod=_parse(env, Env.POD_NAME, _text),
        address=_parse(env, Env.POD_IP, _text),
        host=host,
        port=port,
        local_world_size=max(1, _parse(env, Env.NPROC_PER_NODE, _count, "1")),
        gpus=_parse(env, Env.GPUS, _count, "0"),
        role=env.get(Env.ROLE) or pet.get("PET_ROLE") or "default",
        backend=backend,
        preload=tuple(m.strip() for m in env.get(Env.PRELOAD, DEFAULT_PRELOAD).split(",") if m.strip()),
        stop_grace=_parse(env, Env.STOP_GRACE_SECONDS, _seconds, "1"),
        join_timeout=_parse(env, Env.JOIN_TIMEOUT_SECONDS, _seconds, "600"),
        keep_alive_interval=interval,
        keep_alive_attempts=attempts,
        termination_log=env.get(Env.TERMINATION_LOG) or TERMINATION_LOG,
        agent_id=uuid.uuid4().hex,
        env={name: value for name, value in env.items() if name not in _SECRETS},
        step_time_window=_parse(env, Env.STEP_TIME_WINDOW_SECONDS, _seconds, str(WINDOW)),
        event_log_handler=pet.get("PET_EVENT_LOG_HANDLER", "null"),
        logs=LogOptions(
            directory=pet.get("PET_LOG_DIR") or str(Path(tempfile.gettempdir(), "elasticjob-logs")),
            redirects=_parse(pet, "PET_REDIRECTS", read_streams, "0"),
            tee=_parse(pet, "PET_TEE", read_streams, "0"),
            ranks=_parse(pet, "PET_LOCAL_RANKS_FILTER", read_ranks, ""),
            prefix=prefix,
        ),
    )


def _parse(env: Mapping[str, str], name: str, parse: Callable[[str], T], default: str | None = None) -> T:
    text = env.get(name, default)
    if text is None:
        raise UsageError(f"{name} is not set; the operator and `elasticjob run` set it")
    try:
        return parse(text)
    except ValueError as error:
        raise UsageError(f"{name}={text if name != Env.NODE_KEY else '...'}: {error}") from None


def _text(text: str) -> str:
    if not text:
        raise ValueError("must not be empty")
    return text


def _count(text: str) -> int:
    if not (text.isascii() and text.isdigit()):
        raise ValueError("want a whole number, 0 or more")
    return int(text)


def _seconds(text: str) -> float:
    value = float(text)
    if not (math.isfinite(value) and value >= 0):
        raise ValueError("want seconds, 0 or more")
    return value


def _hex(text: str) -> bytes:
    try:
        return binascii.unhexlify(text)
    except binascii.Error:
        raise ValueError("want hex digits") from None


def _endpoint(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not host:
        host, port = text, str(DEFAULT_PORT)
    return host.strip("[]"), _count(port)


def _keep_alive(text: str) -> tuple[float, int]:
    interval, separator, attempts = text.partition("x")
    if not separator:
        raise ValueError("want INTERVALxATTEMPTS, for instance 1x3")
    return _seconds(interval), _count(attempts)
