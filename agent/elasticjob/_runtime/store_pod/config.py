"""The configuration of a store pod, from its environment."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from elasticjob._runtime.contract import codec
from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.contract.names import DEFAULT_PORT, Env, StoreClients

_MIN_KEY_BYTES = 16


@dataclass(frozen=True)
class StoreConfig:
    """Configuration of one store process. `contract.names.Env` describes the variables."""

    run_id: str
    attempt: int
    """Execution attempt of the job."""
    incarnation: int
    port: int
    settings: RoundSettings
    node_key: bytes
    operator_key: bytes
    clients: StoreClients = StoreClients.NONE
    state_dir: Path | None = None
    """Directory that outlives the container; None if the container is never restarted."""
    standby: bool = False
    """Whether the store starts as a passive standby store."""
    listen_fd: int | None = None
    """Inherited listening socket; None: listen on `port`."""
    parent_fd: int | None = None
    """Inherited read end of a pipe whose other end the parent process has; None if the store outlives its parent."""

    @classmethod
    def from_environ(cls, environ: Mapping[str, str]) -> StoreConfig:
        """Return the configuration in `Env.*` variables. ValueError names a missing or invalid variable."""
        settings = codec.parse(RoundSettings, codec.loads(_required(environ, Env.SETTINGS).encode()), Env.SETTINGS)
        state_dir = environ.get(Env.STATE_DIR)
        return cls(
            run_id=_required(environ, Env.RUN_ID),
            attempt=_number(environ, Env.EXECUTION_ATTEMPT, "1"),
            incarnation=_number(environ, Env.STORE_INCARNATION, "0"),
            port=_number(environ, Env.PORT, str(DEFAULT_PORT)),
            settings=settings,
            node_key=_key(environ, Env.NODE_KEY),
            operator_key=_key(environ, Env.OPERATOR_KEY),
            standby=environ.get(Env.STANDBY_STORE) == "1",
            clients=_clients(environ.get(Env.STORE_CLIENTS) or StoreClients.NONE.value),
            state_dir=Path(state_dir) if state_dir else None,
            listen_fd=_descriptor(environ, Env.LISTEN_FD),
            parent_fd=_descriptor(environ, Env.PARENT_FD),
        )


def _required(environ: Mapping[str, str], name: str) -> str:
    value = environ.get(name, "")
    if not value:
        raise ValueError(f"{name} is not set")
    return value


def _number(environ: Mapping[str, str], name: str, default: str) -> int:
    text = environ.get(name) or default
    if not (text.isascii() and text.isdigit()):
        raise ValueError(f"{name} must be a whole number, not {text!r}")
    return int(text)


def _descriptor(environ: Mapping[str, str], name: str) -> int | None:
    return _number(environ, name, "") if environ.get(name) else None


def _clients(text: str) -> StoreClients:
    try:
        return StoreClients(text)
    except ValueError:
        allowed = ", ".join(clients.value for clients in StoreClients)
        raise ValueError(f"{Env.STORE_CLIENTS} must be one of {allowed}, not {text!r}") from None


def _key(environ: Mapping[str, str], name: str) -> bytes:
    try:
        key = bytes.fromhex(_required(environ, name))
    except ValueError:
        raise ValueError(f"{name} must be set, in hexadecimal") from None
    if len(key) < _MIN_KEY_BYTES:
        raise ValueError(f"{name} must have at least {_MIN_KEY_BYTES} bytes")
    return key
