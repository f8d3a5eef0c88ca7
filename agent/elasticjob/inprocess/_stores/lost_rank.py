"""Let the store's server record the end of a rank when the connections of its process and its monitor have closed.

The monitor process records the end of its rank, and misses it only if it ends too: when a container is killed, or all
processes of a user. Heartbeats tell that after `heartbeat_timeout`; the kernel closes the connections at once. A node
that is switched off or cut off closes none.
"""

from __future__ import annotations

from elasticjob._runtime.store.wire import Op
from elasticjob.inprocess._stores.socket_store import SocketStore
from elasticjob.inprocess._stores.store_mixin import BARRIERS_OF_LOST, IterationOutcome, StoreMixin
from elasticjob.inprocess.attribution import Interruption, InterruptionRecord


def record_when_lost(call: StoreMixin, initial_rank: int, rank: int, iteration: int) -> None:
    """Let the server record the end of a rank in this iteration once it is lost. `call`: the store of the call.

    Both the rank and its monitor process do this, each over a connection of its own.
    """
    if isinstance(call, SocketStore):
        call.when_lost(_name(initial_rank), _requests(call, initial_rank, rank, iteration))


def leaves_on_purpose(call: StoreMixin, initial_rank: int) -> None:
    """Let the connections of a rank close from now on."""
    if isinstance(call, SocketStore):
        call.when_lost(_name(initial_rank), [])


def _name(initial_rank: int) -> str:
    return f"rank/{initial_rank}"


def _requests(call: SocketStore, initial_rank: int, rank: int, iteration: int) -> list[bytes]:
    """Return what `StoreMixin.record_end` and then `record_base_terminated_rank` write, without what readers compute
    themselves within a second."""
    current = call.with_prefix(f"iteration/{iteration}")
    return [
        current.request(Op.APPEND, "interruptions", InterruptionRecord(rank, Interruption.TERMINATED).encode()),
        current.request(Op.COMPARE_SET, "outcome", "", IterationOutcome.INTERRUPTED.value),
        current.request(Op.APPEND, "terminated", f"{rank},"),
        *(current.request(Op.APPEND, f"{barrier}/arrived", f"{rank},") for barrier in BARRIERS_OF_LOST),
        call.request(Op.APPEND, "left", f"{initial_rank},"),
    ]
