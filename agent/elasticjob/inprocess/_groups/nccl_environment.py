"""What torch reads from the environment when it creates an nccl group in a process that outlives its groups."""

from __future__ import annotations

from collections.abc import MutableMapping

from elasticjob._runtime.contract.names import Env

_ERRORS = "TORCH_NCCL_ASYNC_ERROR_HANDLING"
_RETHROW = "TORCH_NCCL_RETHROW_CUDA_ERRORS"
_DUMP = "TORCH_NCCL_DUMP_ON_TIMEOUT"
_DUMP_WAIT = "TORCH_NCCL_WAIT_TIMEOUT_DUMP_MILSEC"
_TRACE = ("TORCH_NCCL_TRACE_BUFFER_SIZE", "TORCH_FR_BUFFER_SIZE")
_BLOCKING = "TORCH_NCCL_BLOCKING_WAIT"
_OFF = ("", "0")
_NO_HANDLING, _OF_TORCHRUN, _OF_THE_AGENT = "0", "1", "3"


def survive_nccl_errors(environ: MutableMapping[str, str]) -> bool:
    """Set what lets a process survive the loss of a peer, unless the user has set something else.

    Call it before a group is created. Return whether torch's watchdog leaves the process alone because of that: it
    would end it when a peer is lost, and when a collective is overdue. `TORCH_NCCL_USE_COMM_NONBLOCKING` is left as it
    is: see docs/contribute/design/in-process-restart.md.
    """
    by_user = _ERRORS in environ.get(Env.SET_BY_USER, "").split(",")
    defaults = (_OF_TORCHRUN, _OF_THE_AGENT) if Env.ROUND in environ else (_OF_TORCHRUN,)
    if not by_user and environ.get(_ERRORS, _OF_TORCHRUN) in defaults:
        environ[_ERRORS] = _NO_HANDLING
    is_off = environ.get(_ERRORS) == _NO_HANDLING
    if is_off:
        # The main thread raises the errors of the device too. In other modes, "0" would also hide a time-out for which
        # the user wants the process to end.
        environ.setdefault(_RETHROW, "0")
    if all(environ.get(name, "0") in _OFF for name in _TRACE):
        # After a peer's loss, the end of a group waits 15 s for a dump of the flight recorder, which is off.
        environ.setdefault(_DUMP_WAIT, "1")
        if is_off and not by_user:
            # Otherwise torch ends the process 8 minutes after it has found an overdue collective, and the end of the
            # group waits for the thread that does so.
            environ.setdefault(_DUMP, "0")
    # With a blocking wait, torch raises in the main thread and needs no watchdog.
    return is_off and not by_user and environ.get(_BLOCKING, "0") in _OFF
