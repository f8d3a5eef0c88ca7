"""Labels, environment variables, exit codes and ports, shared by operator, store and agent."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

GROUP = "elasticjob.dev"
VERSION = "v1alpha1"
PLURAL = "elasticjobs"
KIND = "ElasticJob"

DEFAULT_PORT = 29400
"""Where a job's store listens unless `spec.rendezvous.port` says otherwise (torch's own default)."""


class Label:
    """Labels on every child of a job."""

    JOB_NAME = f"{GROUP}/job-name"
    JOB_UID = f"{GROUP}/job-uid"
    ROLE = f"{GROUP}/role"
    INDEX = f"{GROUP}/index"
    INCARNATION = f"{GROUP}/incarnation"
    EXECUTION_ATTEMPT = f"{GROUP}/execution-attempt"


WORKER_ROLE = f"{GROUP}/worker-role"
"""Annotation of the pod template: torch's name for what its workers do (ROLE_NAME); `default` without it."""


class Role(str, Enum):
    """Values of `Label.ROLE`."""

    WORKER = "worker"
    STORE = "store"


class Backend(str, Enum):
    """Values of `spec.rendezvous.backend`: who forms the process groups of a round."""

    ELASTICJOB = "elasticjob"
    """Our agents, from the ranks that the coordinator gave."""
    C10D = "c10d"
    """A stock torchrun that the command runs on each node, on the job's store."""


class Env:
    """Environment variables that the operator (or `elasticjob run`) sets for agents and stores."""

    # Both
    JOB = "ELASTICJOB_JOB"
    """The job's name."""
    RUN_ID = "ELASTICJOB_RUN_ID"
    """The job's uid: torch's rendezvous run id, TORCHELASTIC_RUN_ID of the workers."""
    EXECUTION_ATTEMPT = "ELASTICJOB_EXECUTION_ATTEMPT"
    NODE_KEY = "ELASTICJOB_NODE_KEY"
    """Hex key that a node proves on the control link. Never passed on to workers."""
    # Agent
    INDEX = "ELASTICJOB_INDEX"
    """Index of this pod in the job, from 0."""
    POD_NAME = "ELASTICJOB_POD_NAME"
    POD_IP = "ELASTICJOB_POD_IP"
    INCARNATION = "ELASTICJOB_INCARNATION"
    """How many pods this index had before this one."""
    STORE_ENDPOINT = "ELASTICJOB_STORE_ENDPOINT"
    """host:port of the job's store."""
    NPROC_PER_NODE = "ELASTICJOB_NPROC_PER_NODE"
    """A number: the operator has resolved `auto`."""
    GPUS = "ELASTICJOB_GPUS"
    """How many NVIDIA GPUs the trainer asked for; none when unset. They must be there and healthy."""
    RENDEZVOUS_BACKEND = "ELASTICJOB_RENDEZVOUS_BACKEND"
    """A `Backend`; elasticjob when unset."""
    PRELOAD = "ELASTICJOB_PRELOAD"
    """Comma-separated modules for the warm process; empty: no warm process."""
    STOP_GRACE_SECONDS = "ELASTICJOB_STOP_GRACE_SECONDS"
    JOIN_TIMEOUT_SECONDS = "ELASTICJOB_JOIN_TIMEOUT_SECONDS"
    KEEP_ALIVE = "ELASTICJOB_KEEP_ALIVE"
    """`INTERVALxATTEMPTS` in seconds, e.g. `1x3`: kernel TCP keep-alive of the control link."""
    ROLE = "ELASTICJOB_ROLE"
    """torch's worker role; `default` when unset."""
    TERMINATION_LOG = "ELASTICJOB_TERMINATION_LOG"
    """Where the termination message goes; /dev/termination-log when unset."""
    STEP_TIME_WINDOW_SECONDS = "ELASTICJOB_STEP_TIME_WINDOW_SECONDS"
    """For tests: how often an agent looks at how long steps take; `pace.WINDOW` when unset."""
    # Worker, set by its agent
    AGENT_SOCKET = "ELASTICJOB_AGENT_SOCKET"
    """Path of the Unix socket where a worker meets its agent (contract.page)."""
    ROUND = "ELASTICJOB_ROUND"
    """The round that a worker was started for."""
    STACK_DUMP_FILE = "ELASTICJOB_STACK_DUMP_FILE"
    """Where a worker writes the stacks of its threads when it is asked; unset where nobody looks for hangs."""
    # Store
    PORT = "ELASTICJOB_PORT"
    LISTEN_FD = "ELASTICJOB_LISTEN_FD"
    """An inherited socket that listens already; instead of `PORT`."""
    OPERATOR_KEY = "ELASTICJOB_OPERATOR_KEY"
    """Hex key that the operator proves on the control link. Only the store pod has it."""
    STORE_INCARNATION = "ELASTICJOB_STORE_INCARNATION"
    STATE_DIR = "ELASTICJOB_STATE_DIR"
    """A directory that outlives the store's container (an emptyDir); unset: this store starts once."""
    SETTINGS = "ELASTICJOB_SETTINGS"
    """JSON of `messages.Settings`: what holds until the operator's first `Facts`."""


STACK_DUMP_SIGNAL = 57
"""Real-time signal on which a worker writes the stacks of all its threads to `Env.STACK_DUMP_FILE`."""


class ExitCode(IntEnum):
    """How an agent ends. The termination message says why; the code alone must already tell success apart."""

    SUCCEEDED = 0
    """The coordinator declared the job succeeded."""
    FAILED = 1
    """The coordinator declared the job failed."""
    USAGE = 64
    """Bad flags or environment."""
    UNAVAILABLE = 69
    """The store could not be reached within the join timeout."""
    INTERNAL = 70
    """The agent itself broke."""
    JOIN_TIMEOUT = 75
    """No round took this node within the join timeout."""
    SUPERSEDED = 76
    """A newer incarnation of this index exists, or the job no longer wants this node."""
    LEFT = 143
    """Told to go by SIGTERM, and left the round in good order."""


class RoundId(NamedTuple):
    """A round's identity: ordered, never reused. Written `attempt.store.n` on the wire and in status."""

    attempt: int
    """Execution attempt of the job, from 1."""
    store_incarnation: int
    """Incarnation of the store that formed the round, from 0."""
    number: int
    """Counter of that store, from 1."""

    def __str__(self) -> str:
        return f"{self.attempt}.{self.store_incarnation}.{self.number}"

    @classmethod
    def parse(cls, text: str) -> RoundId:
        """Read `attempt.store.n`; ValueError with the text when it is something else."""
        parts = text.split(".")
        if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) < 19 for p in parts):
            raise ValueError(f"not a round id (attempt.store.n): {text!r}")
        attempt, store, n = (int(p) for p in parts)
        return cls(attempt, store, n)
