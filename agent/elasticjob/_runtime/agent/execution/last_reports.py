"""What an agent writes before it exits: its termination message, torch's events, and a warning."""

from __future__ import annotations

import json
import logging
import socket

from elasticjob._runtime.agent.config import AgentConfig
from elasticjob._runtime.agent.reporting import telemetry
from elasticjob._runtime.agent.reporting.termination_message import write_termination
from elasticjob._runtime.agent.reporting.worker_output import OutputSink
from elasticjob._runtime.agent.state_machine.effects import Exit
from elasticjob._runtime.agent.state_machine.state import AgentState
from elasticjob._runtime.contract.messages import Termination
from elasticjob._runtime.contract.names import Backend, ExitCode

log = logging.getLogger(__name__)

_NO_PROCESS_GROUP = (
    "no worker has connected to MASTER_ADDR:MASTER_PORT: unless the script joins its processes in another way, each of "
    "the %d workers ran the whole script alone. Call torch.distributed.init_process_group to train together"
)


def warn_of_unused_store(config: AgentConfig, state: AgentState, code: ExitCode, requests: int) -> None:
    """Log it if the workers have succeeded without any process group: nothing else shows that to the user.

    `requests`: how many the store of the round has had. Only that store is known. A script may have joined its
    processes in another way.
    """
    start = state.assignment
    if code is not ExitCode.SUCCEEDED or config.backend is Backend.C10D:
        return
    if start is None or start.group_rank > 0 or start.world_size == 1 or requests:
        return
    log.warning("%s", _NO_PROCESS_GROUP % start.world_size)


def write_last_message(path: str, termination: Termination) -> None:
    """Write the termination message; a folder that refuses it changes nothing else."""
    try:
        write_termination(path, termination)
    except OSError as error:
        log.warning("termination message was not written: %s", error)


def write_torch_events(
    config: AgentConfig, entry_point: str, state: AgentState, exit_: Exit, seconds: float, output: OutputSink
) -> None:
    """Write torch's events to `output`, as torch's `console` handler does. `seconds`: how long the agent ran."""
    if config.event_log_handler != "console":
        return
    subject = telemetry.EventSubject(config.run_id, config.role, socket.gethostname(), entry_point.rsplit("/", 1)[-1])
    for event in telemetry.final_events(subject, state, exit_.termination.outcome, seconds):
        output.put(json.dumps(event).encode() + b"\n")
