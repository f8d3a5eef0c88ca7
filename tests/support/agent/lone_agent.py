"""An agent that runs without a store: its environment, and a coordinator that is part of its process."""

from __future__ import annotations

import os
from pathlib import Path

from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.system.code_root import CODE_ROOT

OWN_COORDINATOR = """
from elasticjob._runtime.agent import runner
from elasticjob._runtime.contract import messages
from elasticjob._runtime.contract.names import RoundId

class OwnCoordinator(runner.CoordinatorClient):
    def __init__(self, dial, greeting, on_message, **options):
        super().__init__(dial, greeting, on_message, **options)
        self.send_to_agent = on_message

    async def run(self):
        await coordinate(self.send_to_agent)

runner.CoordinatorClient = OwnCoordinator
"""
"""The begin of a script that defines `async def coordinate(send)`: what the agent gets, instead of a connection."""


def lone_agent_environment(log: Path) -> dict[str, str]:
    """Return the variables of an agent of one pod, where no store listens. Its termination message is at `log`."""
    return {
        **os.environ,
        "PYTHONPATH": CODE_ROOT,
        Env.RUN_ID: "uid",
        Env.NODE_KEY: "00" * 32,
        Env.INDEX: "0",
        Env.POD_NAME: "bert-0-0",
        Env.POD_IP: "127.0.0.1",
        Env.STORE_ENDPOINT: "127.0.0.1:1",
        Env.PRELOAD: "",
        Env.TERMINATION_LOG: str(log),
    }
