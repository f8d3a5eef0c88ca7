"""The numbers among the wrapper's arguments, and the rules about them."""

from __future__ import annotations

from dataclasses import dataclass, fields
from datetime import timedelta
from pathlib import PurePath

from elasticjob.inprocess._arguments.enforce import enforce_type, enforce_value

_ORDER = (
    ("soft_timeout", "hard_timeout"),
    ("hard_timeout", "barrier_timeout"),
    ("monitor_process_interval", "barrier_timeout"),
    ("heartbeat_timeout", "barrier_timeout"),
    ("monitor_process_interval", "heartbeat_timeout"),
    ("heartbeat_interval", "heartbeat_timeout"),
    ("monitor_thread_interval", "soft_timeout"),
    ("progress_watchdog_interval", "soft_timeout"),
)
"""Pairs of arguments of which the first must be less than the second."""
_MAY_BE_ZERO = ("last_call_wait", "termination_grace_time")


@dataclass(frozen=True, kw_only=True)
class Times:
    """The intervals and time-outs of a wrapper. TypeError or ValueError: an argument is wrong."""

    monitor_thread_interval: timedelta = timedelta(seconds=1)
    monitor_process_interval: timedelta = timedelta(seconds=1)
    heartbeat_interval: timedelta = timedelta(seconds=1)
    heartbeat_timeout: timedelta = timedelta(seconds=30)
    progress_watchdog_interval: timedelta = timedelta(seconds=1)
    soft_timeout: timedelta = timedelta(seconds=60)
    hard_timeout: timedelta = timedelta(seconds=90)
    barrier_timeout: timedelta = timedelta(seconds=120)
    completion_timeout: timedelta = timedelta(seconds=120)
    last_call_wait: timedelta = timedelta(seconds=1)
    termination_grace_time: timedelta = timedelta(seconds=5)

    def __post_init__(self) -> None:
        for argument in fields(self):
            value = getattr(self, argument.name)
            enforce_type(argument.name, value, timedelta)
            zero = argument.name in _MAY_BE_ZERO
            enforce_value(
                value > timedelta(0) or (zero and value == timedelta(0)),
                f"{argument.name} must be {'at least' if zero else 'more than'} 0 s, not {seconds(value)}",
            )
        for shorter, longer in _ORDER:
            low, high = getattr(self, shorter), getattr(self, longer)
            enforce_value(
                low < high,
                f"{shorter} ({seconds(low)}) must be less than {longer} ({seconds(high)}): "
                f"decrease {shorter} or increase {longer}",
            )

    @property
    def completion_chunk(self) -> timedelta:
        """How long one wait of the completion barrier lasts: the rank reports progress between two of them."""
        return (self.soft_timeout - self.progress_watchdog_interval) / 2


def check_log_file(path: str | None) -> None:
    """Raise TypeError or ValueError unless `monitor_process_logfile` is None or an absolute path."""
    enforce_type("monitor_process_logfile", path, str, None)
    if path is None:
        return
    enforce_value(
        PurePath(path).is_absolute(), f"monitor_process_logfile must be an absolute path, not {path!r}: write /{path}"
    )
    try:
        path.format(rank=0)
    except (LookupError, ValueError, AttributeError) as error:
        raise ValueError(
            f"monitor_process_logfile {path!r} may contain the placeholder {{rank}} and no other braces"
        ) from error


def seconds(duration: timedelta) -> str:
    return f"{duration.total_seconds():g} s"
