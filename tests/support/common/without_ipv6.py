"""Run a command where the kernel has no IPv6: `python without_ipv6.py COMMAND...`.

A filter lets the system call `socket` fail for AF_INET6 with EAFNOSUPPORT, as on a machine that was started with
ipv6.disable=1. It holds for all processes that the command starts.
"""

from __future__ import annotations

import ctypes
import errno
import os
import platform
import socket
import struct
import sys
from pathlib import Path

_SOCKET = {"x86_64": 41, "aarch64": 198}
"""Number of the system call."""
_SET_NO_NEW_PRIVS, _SET_SECCOMP, _MODE_FILTER = 38, 22, 2
"""PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP, SECCOMP_MODE_FILTER"""
_LOAD, _JUMP_IF_EQUAL, _RETURN = 0x20, 0x15, 0x06
_ALLOW, _FAIL = 0x7FFF0000, 0x00050000
_NUMBER, _FIRST_ARGUMENT = 0, 16
"""Offsets in struct seccomp_data."""


class _Program(ctypes.Structure):
    _fields_ = [("length", ctypes.c_ushort), ("filter", ctypes.c_void_p)]


def command() -> list[str]:
    """Return a command that runs the command in its arguments so."""
    return [sys.executable, str(Path(__file__))]


def _instruction(code: int, if_true: int, if_false: int, value: int) -> bytes:
    return struct.pack("=HBBI", code, if_true, if_false, value)


def _refuse_ipv6() -> None:
    code = b"".join(
        [
            _instruction(_LOAD, 0, 0, _NUMBER),
            _instruction(_JUMP_IF_EQUAL, 0, 3, _SOCKET[platform.machine()]),
            _instruction(_LOAD, 0, 0, _FIRST_ARGUMENT),
            _instruction(_JUMP_IF_EQUAL, 0, 1, socket.AF_INET6),
            _instruction(_RETURN, 0, 0, _FAIL | errno.EAFNOSUPPORT),
            _instruction(_RETURN, 0, 0, _ALLOW),
        ]
    )
    text = ctypes.create_string_buffer(code, len(code))
    program = _Program(len(code) // 8, ctypes.addressof(text))
    libc = ctypes.CDLL(None, use_errno=True)
    for arguments in ((_SET_NO_NEW_PRIVS, 1, 0), (_SET_SECCOMP, _MODE_FILTER, ctypes.byref(program))):
        if libc.prctl(*arguments, 0, 0):
            raise OSError(ctypes.get_errno(), "prctl")


if __name__ == "__main__":
    _refuse_ipv6()
    os.execvp(sys.argv[1], sys.argv[1:])  # noqa: S606
