"""Environment variables that a pod template may not set, because elasticjob sets them for workers or torchrun. Pure.

`elasticjob convert`, `elasticjob run` and the chart's admission policy share this list; `make crds` writes the chart's
copy. A variable that elasticjob also reads from the template, such as PET_ROLE or PET_LOG_DIR, is not reserved.
"""

from __future__ import annotations

RESERVED_VARIABLES = frozenset({
    # of each worker, as torchrun sets them
    "RANK", "LOCAL_RANK", "GROUP_RANK", "ROLE_RANK", "ROLE_NAME", "WORLD_SIZE", "LOCAL_WORLD_SIZE",
    "GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID",
    "TORCHELASTIC_RESTART_COUNT", "TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE",
    "TORCHELASTIC_ERROR_FILE",
    # of a torchrun with rendezvous.backend c10d: its nodes, its rendezvous and its budget
    "PET_NNODES", "PET_RDZV_BACKEND", "PET_RDZV_ENDPOINT", "PET_RDZV_ID", "PET_RDZV_CONF", "PET_MAX_RESTARTS",
    "PET_LOCAL_ADDR",
})  # fmt: skip
RESERVED_PREFIX = "ELASTICJOB_"


def is_reserved_variable(name: str) -> bool:
    """Return whether a template may not set this environment variable."""
    return name in RESERVED_VARIABLES or name.startswith(RESERVED_PREFIX)
