"""Create the handler from torchrun's options: `torchrun --rdzv-backend=elasticjob --rdzv-conf=...`."""

from __future__ import annotations

from datetime import timedelta
from typing import Any

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

from elasticjob._runtime.contract.messages import RoundSettings
from elasticjob._runtime.torchrun import BACKEND
from elasticjob._runtime.torchrun.backend import create_backend
from elasticjob._runtime.torchrun.handler import ElasticJobRendezvousHandler, StoreEndpoint, check_settings
from elasticjob._runtime.torchrun.stores import host_store, node_key, parse_endpoint, parse_read_timeout

_UNLIMITED = 2**31 - 1


DYNAMIC = "dynamic"
"""The value of the option `handler` for torch's own handler."""


def create_handler(params: RendezvousParameters) -> Any:
    """Return the handler for torchrun's options: elasticjob's, or torch's dynamic rendezvous with `handler=dynamic`.

    torch's own keeps its state in elasticjob's store or in a file (`backend.create_backend`).
    """
    kind = str(params.get("handler", BACKEND)).strip().lower()
    if kind == DYNAMIC:
        backend, store = create_backend(params)
        handler = dynamic_rendezvous.create_handler(store, backend, params)
        handler.get_backend = lambda: BACKEND  # torch refuses a handler that has another name than its entry point
        return handler
    return _create_own_handler(params, kind)


def _create_own_handler(params: RendezvousParameters, kind: str) -> ElasticJobRendezvousHandler:
    """Return elasticjob's handler.

    `--rdzv-conf` accepts join_timeout, last_call_timeout, close_timeout and heartbeat_timeout (seconds),
    keep_alive_interval (seconds), keep_alive_max_attempt, read_timeout (seconds), is_host and key.
    As with c10d, the host of the endpoint runs the store, unless a process on that host already listens on the port.
    """
    try:
        if kind != BACKEND:
            raise ValueError(f"Invalid handler {kind!r} given. Write {BACKEND} or {DYNAMIC}.")
        settings = read_settings(params)
        check_settings(settings)
        host, port = parse_endpoint(params)
        hosted = host_store(params, host, port, _round_settings(settings))
        endpoint = StoreEndpoint(host, hosted.port if hosted else port, node_key(params), parse_read_timeout(params))
        return ElasticJobRendezvousHandler(settings, endpoint, params.local_addr, hosted)
    except Exception as error:
        construct_and_record_rdzv_event(
            run_id=params.run_id, message=f"{type(error).__name__}: {error}", node_state=NodeState.FAILED
        )
        raise


def read_settings(params: RendezvousParameters) -> RendezvousSettings:
    """Return torch's settings with torch's defaults, except for keep-alive.

    The default keep-alive is 1 s x 3 instead of 5 s x 3: it is the kernel's TCP keep-alive and sends no messages.
    """
    return RendezvousSettings(
        params.run_id,
        params.min_nodes,
        params.max_nodes,
        RendezvousTimeout(
            *(_seconds(params, f"{name}_timeout") for name in ("join", "last_call", "close", "heartbeat"))
        ),
        keep_alive_interval=_seconds(params, "keep_alive_interval") or timedelta(seconds=1),
        keep_alive_max_attempt=params.get_as_int("keep_alive_max_attempt", 3),
    )


def _seconds(params: RendezvousParameters, name: str) -> timedelta | None:
    seconds = params.get_as_int(name)
    return None if seconds is None else timedelta(seconds=seconds)


def _round_settings(settings: RendezvousSettings) -> RoundSettings:
    """Return the settings of a coordinator hosted by this process. Restarts are unlimited: torchrun counts them."""
    return RoundSettings(
        min_nodes=settings.min_nodes,
        max_nodes=settings.max_nodes,
        target=settings.max_nodes,
        max_restarts=_UNLIMITED,
        last_call_timeout=settings.timeout.last_call.total_seconds(),
        keep_alive_interval=settings.keep_alive_interval.total_seconds(),
        keep_alive_max_attempts=settings.keep_alive_max_attempt,
    )
