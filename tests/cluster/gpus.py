"""Simulated GPUs: a node advertises them, and scheduler and kubelet count them."""

from .api import STRATEGIC, Api

RESOURCE = "nvidia.com/gpu"


def advertise(api: Api, node: str, count: int) -> None:
    """Set capacity and allocatable of a node; the kubelet keeps resources that it does not know."""
    quantity = {RESOURCE: str(count)}
    status = {"status": {"capacity": quantity, "allocatable": quantity}}
    api.request("PATCH", f"/api/v1/nodes/{node}/status", status, STRATEGIC)
