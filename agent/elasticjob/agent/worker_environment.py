"""The environment of a worker: exactly torchrun's, and where to find its agent. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping

from elasticjob.contract.messages import StartRound
from elasticjob.contract.names import Env, RoundId


def worker_env(
    start: StartRound,
    *,
    local_rank: int,
    local_world_size: int,
    role: str,
    run_id: str,
    error_file: str,
    agent_socket: str,
    stacks: str = "",
    base: Mapping[str, str],
) -> dict[str, str]:
    """What to add to `base` (the agent's environment without its keys) for one worker of a round."""
    env = {
        "LOCAL_RANK": local_rank,
        "RANK": start.rank + local_rank,
        "GROUP_RANK": start.group_rank,
        "ROLE_RANK": start.role_rank + local_rank,
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": local_world_size,
        "WORLD_SIZE": start.world_size,
        "GROUP_WORLD_SIZE": start.group_world_size,
        "ROLE_WORLD_SIZE": start.role_world_size,
        "MASTER_ADDR": start.master_addr,
        "MASTER_PORT": start.master_port,
        "TORCHELASTIC_RESTART_COUNT": start.restarts,
        "TORCHELASTIC_MAX_RESTARTS": start.max_restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        Env.AGENT_SOCKET: agent_socket,
        Env.ROUND: start.round,
    }
    if start.progress_timeout > 0:
        env[Env.STACK_DUMP_FILE] = stacks
    defaults = {"TORCH_NCCL_ASYNC_ERROR_HANDLING": "1"}
    return {name: str(value) for name, value in env.items()} | {k: v for k, v in defaults.items() if k not in base}


def rendezvous_id(run_id: str, round_id: RoundId) -> str:
    """What a torchrun calls the rendezvous of a round, and its workers TORCHELASTIC_RUN_ID."""
    return f"{run_id}.{round_id}"


def torchrun_env(
    start: StartRound,
    *,
    local_world_size: int,
    role: str,
    address: str,
    endpoint: str,
    run_id: str,
    join_timeout: float,
    error_file: str,
    base: Mapping[str, str],
) -> dict[str, str]:
    """What makes a stock torchrun one node of a round, whatever its own options leave open.

    Every round is a rendezvous of its own, of exactly its nodes: no last call, and no key of an older round. A worker
    that fails ends its torchrun, and the coordinator decides what follows: there is one budget, the job's.
    """
    env = {
        "PET_NNODES": f"{start.group_world_size}:{start.group_world_size}",
        "PET_NPROC_PER_NODE": local_world_size,
        "PET_ROLE": role,
        "PET_RDZV_BACKEND": "c10d",
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ID": rendezvous_id(run_id, start.round),
        "PET_RDZV_CONF": f"is_host=0,join_timeout={max(1, round(join_timeout))}",
        "PET_MAX_RESTARTS": 0,
        "PET_LOCAL_ADDR": address,
        # Otherwise workers meet on the store of the rendezvous, where a restart finds the keys of the last one.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    # Older ones look after their workers every 5 s.
    defaults = {"PET_MONITOR_INTERVAL": "0.1"}
    return {name: str(value) for name, value in env.items()} | {k: v for k, v in defaults.items() if k not in base}


def node_env(base: Mapping[str, str], local_world_size: int, code_root: str) -> dict[str, str]:
    """What every worker of this node starts from; torchrun too gives several workers one thread each by default.

    `code_root`, where this package is, comes last on PYTHONPATH: scripts can `import elasticjob` in images that know
    nothing of us.
    """
    env = dict(base)
    env["PYTHONPATH"] = os.pathsep.join([*filter(None, [env.get("PYTHONPATH")]), code_root])
    if local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    return env
