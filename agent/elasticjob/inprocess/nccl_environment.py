"""What torch reads from the environment when it creates an nccl group in a process that outlives its groups."""

from __future__ import annotations

from collections.abc import MutableMapping

_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
_DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_TRACE = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")


def keep_process_at_nccl_errors(environ: MutableMapping[str, str]) -> None:
    """Set what lets a process survive the loss of a peer, unless the user has set something else.

    Call it before a group is created. `TORCH_NCCL_USE_COMM_NONBLOCKING` is left as it is: see
    docs/design/in-process-restart.md.
    """
    if environ.get(_ERRORS, "1") == "1":  # the default of torchrun and of the agent; torch's own one is 3
        environ[_ERRORS] = "0"  # the watchdog would end this process when a peer is lost
    if environ[_ERRORS] == "0":
        # ... and when it sees an error of the device, which the main thread raises too. In other modes, "0" would also
        # hide a time-out for which the user wants the process to end.
        environ.setdefault(_RETHROW, "0")
    if not any(environ.get(name, "0") != "0" for name in _TRACE):
        # After a peer's loss, the end of a group waits 15 s for a dump of the flight recorder, which is off.
        environ.setdefault(_DUMP_WAIT, "1")
