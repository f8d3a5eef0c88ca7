"""The environment of a worker: the same as torchrun's, and how to reach the agent. Pure."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from elasticjob._runtime.contract.messages import StartRound
from elasticjob._runtime.contract.names import Backend, Env, RoundId
from elasticjob._runtime.system.code_root import IN_WORKERS

_ASSIGNED = (
    "LOCAL_RANK", "RANK", "GROUP_RANK", "ROLE_RANK", "LOCAL_WORLD_SIZE", "WORLD_SIZE", "GROUP_WORLD_SIZE",
    "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT",
)  # fmt: skip
"""The variables in `Env.WORLD`."""
NCCL_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
NAME_LOOKUPS = "timeout:1 attempts:5"
"""The resolver's options. torch looks up the name of each host to which it connects, only for its log, and a rank waits
for that in each round: 5 s if one packet is lost with the resolver's defaults. A slow answer still has 5 s."""


def worker_env(
    start: StartRound,
    *,
    local_rank: int,
    local_world_size: int,
    role: str,
    run_id: str,
    error_file: str,
    agent_socket: str,
    restart_socket: str = "",
    stack_dump_file: str = "",
    base: Mapping[str, str],
) -> dict[str, str]:
    """Return the variables that one worker of a round gets on top of `base`, the agent's environment without its keys.

    Defaults are left out where `base` sets them. A worker that starts ahead of a round gets no address of a store.
    """
    env: dict[str, object] = {
        "LOCAL_RANK": local_rank,
        "RANK": start.rank + local_rank,
        "GROUP_RANK": start.group_rank,
        "ROLE_RANK": start.role_rank + local_rank,
        "ROLE_NAME": role,
        "LOCAL_WORLD_SIZE": local_world_size,
        "WORLD_SIZE": start.world_size,
        "GROUP_WORLD_SIZE": start.group_world_size,
        "ROLE_WORLD_SIZE": start.role_world_size,
        "TORCHELASTIC_RESTART_COUNT": start.restarts,
        "TORCHELASTIC_MAX_RESTARTS": start.max_restarts,
        "TORCHELASTIC_RUN_ID": run_id,
        "TORCHELASTIC_USE_AGENT_STORE": True,
        "TORCHELASTIC_ERROR_FILE": error_file,
        Env.AGENT_SOCKET: agent_socket,
        Env.ROUND: start.round,
    }
    if base.get("ALLOW_SEPARATE_WORLDS") != "1":
        env["PET_NPROC_PER_NODE"] = local_world_size  # of a torchrun below the worker that is given no number
    if start.master_addr:  # without it, a process group outside of the function fails at once, ahead of the round
        env |= {"MASTER_ADDR": start.master_addr, "MASTER_PORT": start.master_port}
    env[Env.WORLD] = " ".join(f"{name}={env[name]}" for name in _ASSIGNED if name in env)
    if restart_socket:
        env[Env.RESTART_SOCKET] = restart_socket
    if stack_dump_file:
        env[Env.STACK_DUMP_FILE] = stack_dump_file
    if start.progress_timeout > 0:
        env[Env.DETECT_HANGS] = 1
    if NCCL_ERRORS in base:
        env[Env.SET_BY_USER] = NCCL_ERRORS
    # torch's own default. With torchrun's, "1", a process that the watchdog ends aborts its communicators before, and a
    # `commit` in its last moments could keep what a broken collective has left.
    return _with_defaults(env, {NCCL_ERRORS: "3"}, base)


def rendezvous_id(run_id: str, round_id: RoundId) -> str:
    """Return the id of a round's c10d rendezvous, which is TORCHELASTIC_RUN_ID of torchrun's workers."""
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
    """Return the variables that make a stock torchrun one node of a round; options of its command line win.

    Every round is a c10d rendezvous of its own with a fixed number of nodes: it has no last call and no key of an
    older round. A failed worker ends its torchrun, and the coordinator decides about a restart: the job has one budget.
    """
    env = {
        "PET_NNODES": f"{start.group_world_size}:{start.group_world_size}",
        "PET_NPROC_PER_NODE": local_world_size,
        "PET_ROLE": role,
        "PET_RDZV_BACKEND": Backend.C10D.value,
        "PET_RDZV_ENDPOINT": endpoint,
        "PET_RDZV_ID": rendezvous_id(run_id, start.round),
        "PET_RDZV_CONF": f"is_host=0,join_timeout={max(1, round(join_timeout))}",
        "PET_MAX_RESTARTS": 0,
        "PET_LOCAL_ADDR": address,
        # With a shared store, workers would find the process-group keys of an earlier round in the rendezvous store.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": 1,
        "TORCHELASTIC_ERROR_FILE": error_file,
    }
    # Older versions of torchrun poll their workers only every 5 s by default.
    return _with_defaults(env, {"PET_MONITOR_INTERVAL": "0.1"}, base)


def node_env(
    base: Mapping[str, str], local_world_size: int, code_root: str, backend: Backend = Backend.ELASTICJOB
) -> dict[str, str]:
    """Return the environment that all workers of this pod share; as with torchrun, several get one thread each.

    Options of the resolver (RES_OPTIONS) are left out where `base` sets them.
    `code_root` is the folder of this package. It comes last on PYTHONPATH, so that scripts can `import elasticjob` in
    images that do not have it installed. The patches of torch come first, except for a stock torchrun and its workers.
    """
    env = dict(base)
    patches = [str(Path(code_root) / IN_WORKERS)] if backend is Backend.ELASTICJOB else []
    path = [*patches, *filter(None, [env.get("PYTHONPATH")]), code_root]
    env["PYTHONPATH"] = os.pathsep.join(path)
    if local_world_size > 1:
        env.setdefault("OMP_NUM_THREADS", "1")
    env.setdefault("RES_OPTIONS", NAME_LOOKUPS)
    return env


def _with_defaults(env: Mapping[str, object], defaults: Mapping[str, str], base: Mapping[str, str]) -> dict[str, str]:
    return {name: str(value) for name, value in env.items()} | {k: v for k, v in defaults.items() if k not in base}
