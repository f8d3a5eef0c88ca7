"""torch's rendezvous settings, and those of a coordinator that torchrun hosts."""

from __future__ import annotations

from datetime import timedelta

from torch.distributed.elastic.rendezvous.api import RendezvousParameters
from torch.distributed.elastic.rendezvous.dynamic_rendezvous import RendezvousSettings, RendezvousTimeout

from elasticjob._runtime.contract.messages import RoundSettings

_UNLIMITED = 2**31 - 1


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


def hosted_round_settings(settings: RendezvousSettings) -> RoundSettings:
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


def check_settings(settings: RendezvousSettings) -> None:
    """Raise ValueError, with torch's messages, if the settings are invalid."""
    if not settings.run_id:
        raise ValueError("The run id must be a non-empty string.")
    if settings.min_nodes < 1:
        raise ValueError(f"The minimum number of nodes ({settings.min_nodes}) must be greater than zero.")
    if settings.max_nodes < settings.min_nodes:
        raise ValueError(
            f"The maximum number of nodes ({settings.max_nodes}) must be greater than or equal to the minimum number"
            f" of nodes ({settings.min_nodes})."
        )
