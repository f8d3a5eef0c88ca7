"""What a GPU adds to the seconds of a row. None of it was measured."""

from __future__ import annotations

_GROUPS = "All ranks also form NCCL communicators."
_NEW_PROCESS = (
    "The new process waits until the killed one has left the GPU, sets up its CUDA context and loads kernels. "
    f"{_GROUPS}"
)
_ABORT = "`abort` ends the kernels that wait."
_FREED = "The driver frees the GPU memory of the killed process."
_HOST_COPY = "The copy from the GPU to the host takes the place of the memcpy."

ON_GPU = {
    "killed-4gb": f"{_FREED} Each new process sets up its CUDA context and loads kernels. {_GROUPS}",
    "killed-in-process": _NEW_PROCESS,
    "killed-slow-start": f"{_ABORT} The new process has set up its CUDA context when it joins. {_GROUPS}",
    "killed-4gb-in-process": f"{_FREED} {_NEW_PROCESS}",
    "killed-with-spare": (
        "The spare process has its CUDA context, has loaded kernels, and holds GPU memory meanwhile. It waits until "
        f"the killed one has left the GPU. {_GROUPS}"
    ),
    "raises-in-process": f"{_ABORT} {_GROUPS}",
    "stuck-in-process": f"{_ABORT} {_NEW_PROCESS}",
    "lost-in-process": f"{_ABORT} {_GROUPS}",
    "replaced-in-process": f"The standby node has its CUDA contexts and has loaded kernels. {_GROUPS}",
    "joins-in-process": f"The node that joins has its CUDA contexts and has loaded kernels. {_GROUPS}",
    "joins-1gb-in-process": f"NCCL broadcasts the state from GPU to GPU. {_GROUPS}",
    "joins-1gb-frozen": _GROUPS,
    "hangs-in-process": f"{_ABORT} {_GROUPS}",
    "stopped-in-process": f"{_ABORT} {_NEW_PROCESS}",
    "stopped-with-spare": f"{_ABORT} The spare process waits until the killed one has left the GPU. {_GROUPS}",
    "commit-1gb": _HOST_COPY,
    "commit-1gb-non-blocking": f"{_HOST_COPY} It has a stream of its own.",
    "transfer-1gb": "NCCL broadcasts the state from GPU to GPU.",
}
"""By the name of the row."""
