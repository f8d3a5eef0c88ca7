"""Start the monitor process of a rank, with the times of its wrapper."""

from __future__ import annotations

from elasticjob.inprocess._call.wrapper_arguments import WrapperArguments
from elasticjob.inprocess.monitor_process import MonitorProcess, monitor_config
from elasticjob.inprocess.state import State


def start_monitor_process(state: State, arguments: WrapperArguments) -> MonitorProcess:
    """Return a new monitor process of this rank. It records nothing before `can_create_store`."""
    times = arguments.times
    return MonitorProcess(
        monitor_config(
            state.initial_rank,
            state.initial_world_size,
            interval=times.monitor_process_interval,
            heartbeat_interval=times.heartbeat_interval,
            heartbeat_timeout=times.heartbeat_timeout,
            hard_timeout=times.hard_timeout,
            termination_grace_time=times.termination_grace_time,
            connect_timeout=times.barrier_timeout,
            log_file=arguments.monitor_process_logfile,
        )
    )
