"""The environment of an agent that runs without a store."""

from __future__ import annotations

import os
from pathlib import Path

from elasticjob._runtime.contract.names import Env
from elasticjob._runtime.system.code_root import CODE_ROOT


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
