"""Create the handler from torchrun's options: `torchrun --rdzv-backend=elasticjob --rdzv-conf=...`."""

from __future__ import annotations

from typing import Any

from torch.distributed.elastic.events import NodeState, construct_and_record_rdzv_event
from torch.distributed.elastic.rendezvous import dynamic_rendezvous
from torch.distributed.elastic.rendezvous.api import RendezvousParameters

from elasticjob._runtime.torchrun import BACKEND
from elasticjob._runtime.torchrun.backend import create_backend
from elasticjob._runtime.torchrun.endpoint import StoreEndpoint
from elasticjob._runtime.torchrun.handler import ElasticJobRendezvousHandler
from elasticjob._runtime.torchrun.settings import check_settings, hosted_round_settings, read_settings
from elasticjob._runtime.torchrun.stores import host_store, node_key, parse_endpoint, parse_read_timeout

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
        hosted = host_store(params, host, port, hosted_round_settings(settings))
        endpoint = StoreEndpoint(host, hosted.port if hosted else port, node_key(params), parse_read_timeout(params))
        return ElasticJobRendezvousHandler(settings, endpoint, params.local_addr, hosted)
    except Exception as error:
        construct_and_record_rdzv_event(
            run_id=params.run_id, message=f"{type(error).__name__}: {error}", node_state=NodeState.FAILED
        )
        raise
