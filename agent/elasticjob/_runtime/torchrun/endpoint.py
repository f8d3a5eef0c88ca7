"""Who a node under torchrun is, and where its coordinator is."""

from __future__ import annotations

from dataclasses import dataclass

from elasticjob._runtime.control_link.link import ControlLink, LinkRole, connect
from elasticjob._runtime.system.sockets.ip_addresses import endpoint_text
from elasticjob._runtime.system.sockets.keep_alive import KeepAlive


@dataclass(frozen=True)
class NodeDesc:
    """The identity of a node. Handlers of one process differ by `local_id`."""

    addr: str
    pid: int
    local_id: int

    def __str__(self) -> str:
        return f"{self.addr}_{self.pid}_{self.local_id}"


@dataclass(frozen=True)
class StoreEndpoint:
    """The address of the coordinator and the key that a node must prove. `read_timeout` in seconds."""

    host: str
    port: int
    key: bytes
    read_timeout: int

    def __str__(self) -> str:
        return endpoint_text(self.host, self.port)

    async def dial(self, run_id: str, keep_alive: KeepAlive) -> ControlLink:
        return await connect(
            self.host, self.port, role=LinkRole.AGENT, key=self.key, run_id=run_id, keep_alive=keep_alive
        )
