"""Check that every GPU computes correctly: run a short kernel on all of its processors, with the driver API only.

This runs as a separate process, so that the driver frees its context at the end. It prints the problem, or nothing.
Only errors that point to broken hardware count: differing results, and some error codes of the driver. A GPU that is
full, reserved or too old, or a missing driver, counts as healthy.
"""

from __future__ import annotations

import ctypes
import struct
from typing import Any

THREADS = 256
BLOCKS = 2048
"""Blocks of THREADS threads: more than any GPU runs at once, so that every processor runs some."""
ITERATIONS = 4096
"""Iterations of each thread; all of them together take milliseconds."""

_HARDWARE_ERRORS = {
    214: "uncorrectable memory error",
    220: "uncorrectable NVLink error",
    714: "hardware stack error",
    715: "illegal instruction",
    718: "invalid program counter",
    719: "launch failure",
}
"""Codes of CUresult that this program cannot have caused itself."""

_KERNEL = b"""
.version 6.0
.target sm_60
.address_size 64
.visible .entry work(.param .u64 out, .param .u32 iterations)
{
    .reg .u64 %d<3>;
    .reg .u32 %r<7>;
    .reg .f32 %f<3>;
    .reg .pred %more;
    ld.param.u64 %d1, [out];
    cvta.to.global.u64 %d1, %d1;
    ld.param.u32 %r1, [iterations];
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
"""PTX in which every block computes the same, one word for each thread.

The word combines a float series, x = 3.99 x (1 - x), where one wrong bit changes all later values, and an integer
series.
"""


class DriverError(Exception):
    """A function of the driver returned an error code."""

    def __init__(self, function: str, code: int) -> None:
        super().__init__(f"{function}: error {code}")
        self.code = code


class CudaDriver:
    """CUDA's driver API."""

    def __init__(self, library: Any) -> None:
        """`library`: a `ctypes.CDLL` of libcuda."""
        self._library = library

    def call(self, function: str, *args: object) -> None:
        """Call a function of the driver; raise `DriverError` on an error code."""
        if code := int(getattr(self._library, function)(*args)):
            raise DriverError(function, code)

    def count(self) -> int:
        """Return the number of GPUs that this process may use."""
        number = ctypes.c_int()
        self.call("cuInit", ctypes.c_uint(0))
        self.call("cuDeviceGetCount", ctypes.byref(number))
        return number.value

    def compute(self, index: int) -> bytes:
        """Run the kernel on one GPU; return its result, BLOCKS x THREADS words."""
        device, context, module, function = ctypes.c_int(), ctypes.c_void_p(), ctypes.c_void_p(), ctypes.c_void_p()
        memory, iterations, result = ctypes.c_uint64(), ctypes.c_uint32(ITERATIONS), ctypes.create_string_buffer(_SIZE)
        self.call("cuDeviceGet", ctypes.byref(device), ctypes.c_int(index))
        self.call("cuDevicePrimaryCtxRetain", ctypes.byref(context), device)
        self.call("cuCtxSetCurrent", context)
        self.call("cuModuleLoadData", ctypes.byref(module), _KERNEL)
        self.call("cuModuleGetFunction", ctypes.byref(function), module, b"work")
        self.call("cuMemAlloc_v2", ctypes.byref(memory), ctypes.c_size_t(_SIZE))
        pointers = (ctypes.c_void_p * 2)(ctypes.addressof(memory), ctypes.addressof(iterations))
        sizes = [ctypes.c_uint(n) for n in (BLOCKS, 1, 1, THREADS, 1, 1, 0)]
        self.call("cuLaunchKernel", function, *sizes, None, pointers, None)
        self.call("cuMemcpyDtoH_v2", result, memory, ctypes.c_size_t(_SIZE))  # waits for the kernel's end
        return result.raw


_SIZE = 4 * THREADS * BLOCKS


def check_result(result: bytes) -> str:
    """Return the problem in a kernel's result, or "" if all blocks agree."""
    block = 4 * THREADS
    blocks = [result[i : i + block] for i in range(0, len(result), block)]
    usual = max(set(blocks), key=blocks.count)
    if wrong := sum(found != usual for found in blocks):
        return f"{wrong} of {len(blocks)} equal computations had a different result"
    if len(set(struct.unpack(f"{THREADS}I", usual))) < THREADS // 2:
        return "the computations wrote no result"
    return ""


def find_broken_gpu(driver: CudaDriver) -> str:
    """Return the problem of the first GPU that fails the check, or "" if none does."""
    for index in range(driver.count()):
        try:
            problem = check_result(driver.compute(index))
        except DriverError as error:
            problem = _HARDWARE_ERRORS.get(error.code, "")
        if problem:
            return f"GPU {index} failed the compute check: {problem}"
    return ""


def main(library: str) -> None:
    """Print the problem of a GPU, or why the check could not run. `library`: the driver's name or path."""
    try:
        print(find_broken_gpu(CudaDriver(ctypes.CDLL(library))))
    except (OSError, DriverError) as error:
        print(f"skipped the compute check of GPUs: {error}")
