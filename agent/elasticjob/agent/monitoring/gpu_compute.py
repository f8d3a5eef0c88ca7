"""Whether every GPU computes: a short program on all of its processors, through the driver, without torch.

A program of its own, so that what a driver keeps for it ends with it. It prints what is wrong, or nothing. Only what
cannot be another's doing counts: results that differ from each other, and the driver's errors of broken hardware. A
GPU that is full, reserved or too old, or a driver that is none, is not tried.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

THREADS = 256
BLOCKS = 2048
"""More than any GPU runs at once, so that each of its processors has some."""
TURNS = 4096
"""Milliseconds in all."""

_BROKEN = {
    214: "an uncorrectable memory error",
    220: "an uncorrectable NVLink error",
    714: "an error in its hardware's stack",
    715: "an illegal instruction",
    718: "an invalid program counter",
    719: "a failed launch",
}
"""Of CUresult, what this program cannot have brought about itself."""

_PROGRAM = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry work(.param .u64 out, .param .u32 turns)
{
    .reg .u64 %d<3>;
    .reg .u32 %r<7>;
    .reg .f32 %f<3>;
    .reg .pred %more;
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d1, %d1;
    ld.param.u32 %r1, [turns];
    mov.u32 %r2, %ctaid.x;
    mov.u32 %r3, %ntid.x;
    mov.u32 %r4, %tid.x;
    mad.lo.u32 %r5, %r2, %r3, %r4;
    add.u32 %r6, %r4, 1;
    cvt.rn.f32.u32 %f1, %r6;
    mul.f32 %f1, %f1, 0f3A000000;
again:
    sub.f32 %f2, 0f3F800000, %f1;
    mul.f32 %f2, %f2, %f1;
    mul.f32 %f1, %f2, 0f407F5C29;
    mad.lo.u32 %r6, %r6, 1664525, 1013904223;
    sub.u32 %r1, %r1, 1;
    setp.ne.u32 %more, %r1, 0;
    @%more bra again;
    mov.b32 %r2, %f1;
    xor.b32 %r6, %r6, %r2;
    mul.wide.u32 %d2, %r5, 4;
    add.u64 %d1, %d1, %d2;
    st.global.u32 [%d1], %r6;
    ret;
}
\0"""
"""Every block computes the same: x = 3.99 x (1 - x) in floats, where one wrong bit changes all that follow, and a
series of whole numbers; one word for each thread."""


class DriverError(Exception):
    """A call of the driver that failed."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: error {code}")
        self.code = code


class CudaDriver:
    """CUDA's driver API; functions and their parameters are its own."""

    def __init__(self, library: Any) -> None:
        """`library`: as `ctypes.CDLL` gives it."""
        self._library = library

    def call(self, function: str, *args: object) -> None:
        """`DriverError` unless it succeeds."""
        if code := int(getattr(self._library, function)(*args)):
            raise DriverError(function, code)

    def count(self) -> int:
        """GPUs that this process may use."""
        number = ctypes.c_int()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def compute(self, index: int) -> bytes:
        """What the program writes on this GPU: THREADS words for each of BLOCKS."""
        device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        memory, turns, result = ctypes.c_uint64(), ctypes.c_uint32(TURNS), ctypes.create_string_buffer(_SIZE)
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), _PROGRAM)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"work")
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_SIZE))
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(memory), ctypes.addressof(turns))
        sizes = [ctypes.c_uint(n) for n in (BLOCKS, 1, 1, THREADS, 1, 1, 0)]
        self.call("cuLaunchKernel", function, *sizes, None, pointers, None)
        self.call("cuMemcpyDtoH_v2", result, memory, ctypes.c_size_t(_SIZE))  # waits for the program's end
        return result.raw


_SIZE = 4 * THREADS * BLOCKS


def check_result(result: bytes) -> str:
    """What is wrong with what the program has written."""
    block = 4 * THREADS
    blocks = [result[i : i + block] for i in range(0, len(result), block)]
    usual = max(set(blocks), key=blocks.count)
    if wrong := sum(found != usual for found in blocks):
        return f"{wrong} of {len(blocks)} equal computations had another result"
    if len(set(struct.unpack(f"{THREADS}I", usual))) < THREADS // 2:
        return "its computations had no result"
    return ""


def find_broken_gpu(driver: CudaDriver) -> str:
    """What is wrong with the first GPU that does not compute."""
    for index in range(driver.count()):
        try:
            trouble = check_result(driver.compute(index))
        except DriverError as error:
            trouble = _BROKEN.get(error.code, "")
        if trouble:
            return f"GPU {index} does not compute: {trouble}"
    return ""


def main(library: str) -> None:
    """Print what is wrong, or why nothing could be tried. `library`: the driver's name or path."""
    try:
        print(find_broken_gpu(CudaDriver(ctypes.CDLL(library))))
    except (OSError, DriverError) as error:
        print(f"GPUs were not tried: {error}")
