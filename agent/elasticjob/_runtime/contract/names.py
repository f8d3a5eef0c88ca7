"""Labels, environment variables, exit codes, ports and round ids shared by operator, store and agent."""

from __future__ import annotations

from enum import Enum, IntEnum
from typing import NamedTuple

GROUP = "elasticjob.dev"
VERSION = "v1alpha1"
PLURAL = "elasticjobs"
KIND = "ElasticJob"

DEFAULT_PORT = 29400
"""Port of a job's store if `spec.rendezvous.port` is not set; torch's own default."""


class Label:
    """Labels on every child object of a job."""

    JOB_NAME = f"{GROUP}/job-name"
    JOB_UID = f"{GROUP}/job-uid"
    ROLE = f"{GROUP}/role"
    INDEX = f"{GROUP}/index"
    INCARNATION = f"{GROUP}/incarnation"
    EXECUTION_ATTEMPT = f"{GROUP}/execution-attempt"


WORKER_ROLE = f"{GROUP}/worker-role"
"""Annotation of the pod template: torch's role name of its workers (ROLE_NAME); `default` without it."""


class Role(str, Enum):
    """Values of `Label.ROLE`."""

    WORKER = "worker"
    STORE = "store"


class TrainerIntegration(str, Enum):
    """What is added to the trainers of frameworks in scripts that do not use elasticjob (`spec.trainerIntegration`)."""

    AUTO = "Auto"
    """The status shows their progress; they save and stop at the same step on all ranks, and go on from there."""
    NONE = "None"


class Backend(str, Enum):
    """Values of `spec.rendezvous.backend`: the program that starts the workers and assigns their ranks."""

    ELASTICJOB = "elasticjob"
    """The agent of each worker pod, with the ranks that the coordinator assigned."""
    C10D = "c10d"
    """A stock torchrun that each pod's command runs; it meets its peers on the job's store."""


class StoreClients(str, Enum):
    """Clients that may use the TCPStore operations of a store."""

    NONE = "none"
    NODES = "nodes"
    """Clients on the addresses of the job's worker pods: an agent has a control link from there or is about to
    open one, or client and store have the same address."""
    ANY = "any"


def job_store_clients(backend: Backend) -> StoreClients:
    """Return the clients of a job's own store: only torchrun's c10d backend keeps its state there."""
    return StoreClients.NODES if backend is Backend.C10D else StoreClients.NONE


def round_store_clients(backend: Backend) -> StoreClients:
    """Return the clients of a round's store: workers of a stock torchrun meet on a store of torchrun's."""
    return StoreClients.NONE if backend is Backend.C10D else StoreClients.NODES


class Env:
    """Environment variables of agents and stores, set by operator or `elasticjob run`, and of workers, by agents."""

    # Agent and store
    JOB = "ELASTICJOB_JOB"
    """The job's name."""
    RUN_ID = "ELASTICJOB_RUN_ID"
    """UID of the job: torch's rendezvous run id, and TORCHELASTIC_RUN_ID of the workers."""
    EXECUTION_ATTEMPT = "ELASTICJOB_EXECUTION_ATTEMPT"
    """Execution attempt of the job, from 1."""
    NODE_KEY = "ELASTICJOB_NODE_KEY"
    """Hexadecimal key with which an agent authenticates on the control link. The agent does not pass it to workers."""
    # Agent
    INDEX = "ELASTICJOB_INDEX"
    """Index of the pod in the job, from 0."""
    POD_NAME = "ELASTICJOB_POD_NAME"
    POD_IP = "ELASTICJOB_POD_IP"
    INCARNATION = "ELASTICJOB_INCARNATION"
    """How many pods the index had before this one."""
    STORE_ENDPOINT = "ELASTICJOB_STORE_ENDPOINT"
    """host:port of the job's store."""
    NPROC_PER_NODE = "ELASTICJOB_NPROC_PER_NODE"
    """Workers per worker pod, a number: the operator has resolved `auto`."""
    NPROC_IS_DEFAULT = "ELASTICJOB_NPROC_IS_DEFAULT"
    """1 if the manifest leaves the number open: a number that torchrun's command or variable has counts instead."""
    GPUS = "ELASTICJOB_GPUS"
    """NVIDIA GPUs that the trainer container requests; 0 if unset. The agent checks that they exist and are healthy."""
    RENDEZVOUS_BACKEND = "ELASTICJOB_RENDEZVOUS_BACKEND"
    """A `Backend`; `elasticjob` if unset."""
    PRELOAD = "ELASTICJOB_PRELOAD"
    """Comma-separated modules that the fork server imports; empty: no fork server."""
    STOP_GRACE_SECONDS = "ELASTICJOB_STOP_GRACE_SECONDS"
    GRACEFUL_SHUTDOWN_SECONDS = "ELASTICJOB_GRACEFUL_SHUTDOWN_SECONDS"
    POD_GRACE_SECONDS = "ELASTICJOB_POD_GRACE_SECONDS"
    """Seconds from the pod's SIGTERM until its workers must have ended; no limit if unset."""
    JOIN_TIMEOUT_SECONDS = "ELASTICJOB_JOIN_TIMEOUT_SECONDS"
    KEEP_ALIVE = "ELASTICJOB_KEEP_ALIVE"
    """Kernel TCP keep-alive of the control link as `INTERVALxATTEMPTS`, interval in seconds, e.g. `1x3`."""
    ROLE = "ELASTICJOB_ROLE"
    """torch's worker role; `default` if unset."""
    TERMINATION_LOG = "ELASTICJOB_TERMINATION_LOG"
    """File of the termination message; /dev/termination-log if unset."""
    SCRATCH_DIR = "ELASTICJOB_SCRATCH_DIR"
    """Folder for the agent's own files; a temporary folder if unset or its path is too long for sockets."""
    STEP_TIME_WINDOW_SECONDS = "ELASTICJOB_STEP_TIME_WINDOW_SECONDS"
    """For tests: seconds over which an agent averages step times; `step_times.WINDOW` if unset."""
    # Worker
    AGENT_SOCKET = "ELASTICJOB_AGENT_SOCKET"
    """Path of the Unix socket on which a worker connects to its agent (`contract.shared_memory.progress_page`)."""
    AGENT_PID = "ELASTICJOB_AGENT_PID"
    """Process id of the agent; only of workers that are started by exec: their Python records how it ends."""
    RESTART_SOCKET = "ELASTICJOB_RESTART_SOCKET"
    """Path of the Unix socket of `contract.restart_messages`; unset if workers run in a torchrun of their own."""
    ROUND = "ELASTICJOB_ROUND"
    """Round that the worker was started for; `PRESTART_ROUND` if it was prestarted."""
    STACK_DUMP_FILE = "ELASTICJOB_STACK_DUMP_FILE"
    """File to which a worker dumps the stacks of its threads on STACK_DUMP_SIGNAL, if it may be asked to."""
    WORLD = "ELASTICJOB_WORLD"
    """`NAME=VALUE` of each variable of torchrun that has a rank, a size or the address of the round's store, separated
    by spaces: no launcher changes it, and a process group of another size or rank ends the job."""
    LAUNCHES = "ELASTICJOB_LAUNCHES"
    """Path of the Unix socket on which a launcher in a pod's command hands its ranks over to the agent; unset in ranks,
    and where the command runs once for each rank."""
    SHIMS = "ELASTICJOB_SHIMS"
    """The agent's folder of shims; unset without them."""
    DETECT_HANGS = "ELASTICJOB_DETECT_HANGS"
    """1 if the job has a hangPolicy: each worker reports the steps of its optimizers, and can dump its stacks."""
    TRAINER_INTEGRATION = "ELASTICJOB_TRAINER_INTEGRATION"
    """A `TrainerIntegration`, for the agent and for Python below workers; `Auto` if unset."""
    SET_BY_USER = "ELASTICJOB_SET_BY_USER"
    """Comma-separated names of variables that the user has set, of those for which the agent has a default."""
    # Store
    PORT = "ELASTICJOB_PORT"
    """Port to listen on; DEFAULT_PORT if unset."""
    LISTEN_FD = "ELASTICJOB_LISTEN_FD"
    """Descriptor of an inherited socket that listens already; replaces `PORT`."""
    PARENT_FD = "ELASTICJOB_PARENT_FD"
    """Read end of a pipe: the store ends when the other end is closed, as it is when its parent process ends."""
    OPERATOR_KEY = "ELASTICJOB_OPERATOR_KEY"
    """Hexadecimal key with which the operator authenticates on the control link. Only the store pod has it."""
    STORE_INCARNATION = "ELASTICJOB_STORE_INCARNATION"
    """How many store pods the job had before this one."""
    STANDBY_STORE = "ELASTICJOB_STANDBY_STORE"
    """1 if the store starts as a passive standby store."""
    STATE_DIR = "ELASTICJOB_STATE_DIR"
    """Directory that outlives the store's container (an emptyDir); unset if the container is never restarted."""
    STORE_CLIENTS = "ELASTICJOB_STORE_CLIENTS"
    """A `StoreClients`; `none` if unset."""
    SETTINGS = "ELASTICJOB_SETTINGS"
    """JSON of `messages.RoundSettings`, in force until the operator's first `OperatorView`."""


STACK_DUMP_SIGNAL = 57
"""Real-time signal on which a worker dumps the stacks of all its threads to `Env.STACK_DUMP_FILE`."""


class ExitCode(IntEnum):
    """Exit codes of an agent. The termination message has the reason; the code alone distinguishes success."""

    SUCCEEDED = 0
    """The coordinator declared the job succeeded."""
    FAILED = 1
    """The coordinator declared the job failed."""
    USAGE = 64
    """Invalid flags or environment."""
    UNAVAILABLE = 69
    """The store could not be reached within the join timeout."""
    INTERNAL = 70
    """The agent itself failed."""
    SUPERSEDED = 76
    """A newer pod has this index, or the job no longer needs this pod."""
    LEFT = 143
    """The pod was drained (SIGTERM), and its agent left the round in good order."""


FINAL_EXCEPTIONS = {"SeparateWorldError": "TrainsApart", "RefusedCommandError": "CommandRefused"}
"""Exceptions of a worker that no restart can mend, by type name, and the reason with which the job fails at once: its
ranks would train apart from each other, or a launcher in its command cannot be run."""


def script_returned_file(error_file: str) -> str:
    """Return the path of the file in which a forked worker notes its process id and when its script had succeeded.

    Its exit functions still run then.
    """
    return f"{error_file}.left"


def success_recorded_file(error_file: str) -> str:
    """Return the path of the file in which a forked worker writes its process id after its exit functions.

    From then on a signal that ends it is not a failure of the script.
    """
    return f"{error_file}.succeeded"


def early_variable_file(error_file: str) -> str:
    """Return the path of the file in which a forked worker writes why it, and the next ones, must start by exec."""
    return f"{error_file}.early"


class RoundId(NamedTuple):
    """Identity of a round: ordered, never reused. Written `attempt.store.n` on the wire and in status."""

    attempt: int
    """Execution attempt of the job, from 1."""
    store_incarnation: int
    """Incarnation of the store whose coordinator formed the round, from 0."""
    number: int
    """Counter of rounds of that store, from 1."""

    def __str__(self) -> str:
        return f"{self.attempt}.{self.store_incarnation}.{self.number}"

    @property
    def is_prestarted(self) -> bool:
        """Whether it stands for the round of a prestarted worker; see PRESTART_ROUND."""
        return self.attempt == 0

    @classmethod
    def parse(cls, text: str) -> RoundId:
        """Return the round id written as `attempt.store.n`. ValueError: `text` is something else."""
        parts = text.split(".")
        if len(parts) != 3 or not all(p.isascii() and p.isdigit() and len(p) < 19 for p in parts):
            raise ValueError(f"not a round id (attempt.store.n): {text!r}")
        attempt, store, n = (int(p) for p in parts)
        return cls(attempt, store, n)


PRESTART_ROUND = RoundId(0, 0, 0)
"""Stands for the round in the environment of a prestarted worker: one that is started before its first round. A spare
process has `0.0.n`."""

MAX_LAUNCHERS = 64
"""Launchers of a command whose names are kept. A shell may start launchers in a loop."""
