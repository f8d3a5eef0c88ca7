"""The agent's configuration, which it reads once from its environment."""

from __future__ import annotations

import binascii
import math
import uuid
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TypeVar

from elasticjob._runtime.agent.folders import NodeFolders, find_folders
from elasticjob._runtime.agent.monitoring.progress.step_times import WINDOW
from elasticjob._runtime.agent.reporting.log_options import PREFIX, LogOptions, read_ranks, read_streams
from elasticjob._runtime.agent.reporting.termination_message import TERMINATION_LOG
from elasticjob._runtime.agent.shipped_code import ShippedCode
from elasticjob._runtime.agent.start_workers.command import torchrun_options
from elasticjob._runtime.agent.start_workers.home import home_variables
from elasticjob._runtime.contract.commands.torchrun_command import NPROC_PER_NODE, check_options
from elasticjob._runtime.contract.commands.worker_count import (
    Devices,
    contradiction,
    named_workers,
    own_torchrun_workers,
)
from elasticjob._runtime.contract.messages import Announce
from elasticjob._runtime.contract.names import DEFAULT_PORT, Backend, Env
from elasticjob._runtime.system.code_root import CODE_ROOT
from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text, split_endpoint

T = TypeVar("T")

DEFAULT_PRELOAD = "torch,torch._dynamo"
_SECRETS = (Env.NODE_KEY, Env.OPERATOR_KEY)


class UsageError(Exception):
    """A flag, a variable or the pod's file system is wrong; the message says what to set or to mount."""


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
    graceful_shutdown: float
    pod_grace: float | None
    """From a signal to this agent until the end of its workers at the latest; None: no limit."""
    join_timeout: float
    keep_alive_interval: float
    keep_alive_attempts: int
    termination_log: str
    agent_id: str
    scratch_parent: str
    """Writable folder for the agent's own files."""
    env: Mapping[str, str]
    """The base of the workers' environment: the agent's own, without its keys. TMPDIR is added if Python finds no
    temporary folder, HOME and USER if the user has none."""
    logs: LogOptions = field(default_factory=LogOptions)
    step_time_window: float = WINDOW
    event_log_handler: str = "null"
    """torch's `null` or `console`."""
    code: ShippedCode = field(default_factory=ShippedCode, compare=False)
    """What `elasticjob submit` has shipped."""
    options_note: str = ""
    """A line for the log about torchrun's options that have no effect."""

    @property
    def processes(self) -> int:
        """The number of processes that this agent starts: its workers, or one torchrun that starts them."""
        return 1 if self.backend is Backend.C10D else self.local_world_size

    @property
    def torchrun_workers(self) -> int:
        """The number of workers that this pod's torchrun starts; 0 without a torchrun."""
        return self.local_world_size if self.backend is Backend.C10D else 0

    def announcement(self, store_port: int) -> Announce:
        """Return the first announcement of this agent. `store_port`: where it serves the store of its next round."""
        return Announce(
            index=self.index,
            incarnation=self.incarnation,
            agent_id=self.agent_id,
            pod=self.pod,
            address=self.address,
            store_port=store_port,
            local_world_size=self.local_world_size,
            role=self.role,
        )

    @property
    def endpoint(self) -> str:
        """host:port of the job's store."""
        return endpoint_text(self.host, self.port)


_DEFAULTS = {"PYTHONUNBUFFERED": "1"}
"""Variables of workers, unless the image, `envFrom` or `env` sets them. With this one `kubectl logs` shows each line as
soon as it is printed. The operator cannot set it, because a container's `env` overrides its image and `envFrom`."""


def read_options(env: Mapping[str, str], command: Sequence[str]) -> dict[str, str]:
    """Return torchrun's options by long name, for `read_config`; CommandError if torchrun itself would refuse them.

    As with torchrun, PET_<NAME> sets an option that is absent. With c10d, torchrun reads its options itself, and the
    agent needs only the number of workers.
    """
    if env.get(Env.RENDEZVOUS_BACKEND) == Backend.C10D.value:
        workers = own_torchrun_workers(command, env)
        return {} if workers is None else {NPROC_PER_NODE: str(workers)}
    return torchrun_options(command, env)


def read_config(env: Mapping[str, str], options: Mapping[str, str] | None = None) -> AgentConfig:
    """Parse the variables of `Env`, and find folders; `UsageError` names what is missing or wrong.

    `options`: torchrun's, by long name; CommandError if elasticjob does not support one of them. Without torchrun,
    PET_<NAME> also sets an absent option about logs or the role. With c10d these variables are left to the torchrun
    that the agent starts.
    """
    backend = _parse(env, Env.RENDEZVOUS_BACKEND, Backend, Backend.ELASTICJOB.value)
    pet = {name: value for name, value in env.items() if name.startswith("PET_")}
    pet |= {f"PET_{name.replace('-', '_').upper()}": value for name, value in (options or {}).items()}
    prefix = pet.get("PET_LOG_LINE_PREFIX_TEMPLATE") or env.get("TORCHELASTIC_LOG_LINE_PREFIX_TEMPLATE") or PREFIX
    if backend is Backend.C10D:
        # The role is passed on to torchrun.
        pet = {name: value for name, value in env.items() if name == "PET_ROLE"}
        prefix = f"[{env.get(Env.POD_NAME)}]:"
    host, port = _parse(env, Env.STORE_ENDPOINT, _endpoint)
    folders = _node_folders(env)
    own_env = {**_DEFAULTS, **env, **folders.worker_env, **home_variables(env, folders.home_parent)}
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
        local_world_size=_read_workers(env, (options or {}).get(NPROC_PER_NODE, "")),
        gpus=_parse(env, Env.GPUS, _count, "0"),
        role=env.get(Env.ROLE) or pet.get("PET_ROLE") or "default",
        backend=backend,
        preload=tuple(m.strip() for m in env.get(Env.PRELOAD, DEFAULT_PRELOAD).split(",") if m.strip()),
        stop_grace=_parse(env, Env.STOP_GRACE_SECONDS, _seconds, "1"),
        graceful_shutdown=_parse(env, Env.GRACEFUL_SHUTDOWN_SECONDS, _seconds, "120"),
        pod_grace=_parse(env, Env.POD_GRACE_SECONDS, _seconds) if env.get(Env.POD_GRACE_SECONDS) else None,
        join_timeout=_parse(env, Env.JOIN_TIMEOUT_SECONDS, _seconds, "600"),
        keep_alive_interval=interval,
        keep_alive_attempts=attempts,
        termination_log=env.get(Env.TERMINATION_LOG) or TERMINATION_LOG,
        agent_id=uuid.uuid4().hex,
        scratch_parent=folders.scratch,
        env={name: value for name, value in own_env.items() if name not in _SECRETS},
        step_time_window=_parse(env, Env.STEP_TIME_WINDOW_SECONDS, _seconds, str(WINDOW)),
        event_log_handler=pet.get("PET_EVENT_LOG_HANDLER", "null"),
        options_note=check_options(options or {}),
        logs=_read_log_options(pet, prefix, folders.temporary),
    )


def _read_workers(env: Mapping[str, str], asked: str) -> int:
    """Return the number of workers of this pod. `asked`: torchrun's --nproc-per-node."""
    written = max(1, _parse(env, Env.NPROC_PER_NODE, _count, "1"))
    if not asked or asked == "auto":
        return written
    if Env.NPROC_PER_NODE in env and env.get(Env.NPROC_IS_DEFAULT) != "1":
        if asked.isdigit() and int(asked) != written:
            raise contradiction(written, int(asked))
        return written  # `asked` is a word, which the operator has resolved
    if asked == "cpu":
        raise UsageError("--nproc-per-node is cpu, and only the manifest has the number: set spec.nprocPerNode: cpu")
    gpus = written if written > 1 else _parse(env, Env.GPUS, _count, "0")
    return named_workers(asked, Devices(gpus, cpus=0)) or written


def _node_folders(env: Mapping[str, str]) -> NodeFolders:
    folders = find_folders(env, CODE_ROOT)
    if folders is None:
        raise UsageError(
            "no folder is writable for the agent's own files: mount an emptyDir at /tmp, or let the container's user "
            "write to /dev/shm"
        )
    return folders


def _read_log_options(pet: Mapping[str, str], prefix: str, temporary: str | None) -> LogOptions:
    options = LogOptions(
        directory=pet.get("PET_LOG_DIR") or (str(Path(temporary, "elasticjob-logs")) if temporary else ""),
        redirects=_parse(pet, "PET_REDIRECTS", read_streams, "0"),
        tee=_parse(pet, "PET_TEE", read_streams, "0"),
        ranks=_parse(pet, "PET_LOCAL_RANKS_FILTER", read_ranks, ""),
        prefix=prefix,
    )
    # Log files grow. In /dev/shm they would fill the container's memory, so they need a disk.
    if options.writes_files and not options.directory:
        raise UsageError(
            "--redirects and --tee (PET_REDIRECTS, PET_TEE) need a folder for log files: mount a volume at /tmp, or "
            "set --log-dir (PET_LOG_DIR) to a folder of a mounted volume"
        )
    return options


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
    host, port = split_endpoint(text, str(DEFAULT_PORT))
    return host, _count(port)


def _keep_alive(text: str) -> tuple[float, int]:
    interval, separator, attempts = text.partition("x")
    if not separator:
        raise ValueError("want INTERVALxATTEMPTS, for instance 1x3")
    return _seconds(interval), _count(attempts)
