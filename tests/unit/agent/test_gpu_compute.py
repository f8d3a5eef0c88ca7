"""The compute check of GPUs, on a fake driver made of C functions of this process."""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Callable
from ctypes import CFUNCTYPE, c_char_p, c_int, c_size_t, c_uint, c_uint64, c_void_p
from typing import Any

import pytest

from elasticjob._runtime.agent.monitoring.node import gpu_compute
from elasticjob._runtime.agent.monitoring.node.gpu_compute import (
    BLOCKS,
    THREADS,
    CudaDriver,
    DriverError,
    check_result,
    find_broken_gpu,
)

BLOCK = struct.pack(f"{THREADS}I", *range(1, THREADS + 1))
RIGHT = BLOCK * BLOCKS


def wrong(number: int) -> bytes:
    """Return a result in which this block has one bit flipped."""
    place = number * len(BLOCK) + 100
    return RIGHT[:place] + bytes([RIGHT[place] ^ 4]) + RIGHT[place + 1 :]


class Library:
    """Functions of libcuda for GPUs with these results. `failing`: error codes by function name."""

    def __init__(self, *results: bytes, **failing: int) -> None:
        self.launched: list[tuple[int, int, int]] = []
        current = 0

        def count(into: int) -> int:
            ctypes.memmove(into, struct.pack("i", len(results)), 4)
            return 0

        def get(into: int, index: int) -> int:
            nonlocal current
            current = index
            ctypes.memmove(into, struct.pack("i", index), 4)
            return 0

        def allocate(into: int, size: int) -> int:
            ctypes.memmove(into, struct.pack("Q", 0xAB00 + current), 8)
            return 0 if size == len(RIGHT) else 1

        def launch(_: int, blocks: int, y: int, z: int, threads: int, *rest: Any) -> int:
            memory, iterations = ctypes.cast(rest[-2], ctypes.POINTER(c_void_p))[:2]
            assert ctypes.cast(memory, ctypes.POINTER(c_uint64))[0] == 0xAB00 + current
            assert rest[2:5] == (0, None, rest[-2])
            self.launched.append((blocks * y * z, threads, ctypes.cast(iterations, ctypes.POINTER(c_uint))[0]))
            return 0

        def copy(into: int, memory: int, size: int) -> int:
            assert memory == 0xAB00 + current
            ctypes.memmove(into, results[current], size)
            return 0

        succeed = lambda *_: 0  # noqa: E731
        functions: dict[str, tuple[Callable[..., int], tuple[type, ...]]] = {
            "cuInit": (succeed, (c_uint,)),
            "cuDeviceGetCount": (count, (c_void_p,)),
            "cuDeviceGet": (get, (c_void_p, c_int)),
            "cuDevicePrimaryCtxRetain": (succeed, (c_void_p, c_int)),
            "cuCtxSetCurrent": (succeed, (c_void_p,)),
            "cuModuleLoadData": (succeed, (c_void_p, c_char_p)),
            "cuModuleGetFunction": (succeed, (c_void_p, c_void_p, c_char_p)),
            "cuMemAlloc_v2": (allocate, (c_void_p, c_size_t)),
            "cuLaunchKernel": (launch, (c_void_p, *[c_uint] * 7, c_void_p, c_void_p, c_void_p)),
            "cuMemcpyDtoH_v2": (copy, (c_void_p, c_uint64, c_size_t)),
        }
        for name, (function, types) in functions.items():
            body = (lambda *_, code=failing[name]: code) if name in failing else function
            setattr(self, name, CFUNCTYPE(c_int, *types)(body))


def test_gpus_that_compute() -> None:
    library = Library(RIGHT, RIGHT)
    assert find_broken_gpu(CudaDriver(library)) == ""
    assert library.launched == [(BLOCKS, THREADS, gpu_compute.ITERATIONS)] * 2


@pytest.mark.parametrize("block", [0, 7, BLOCKS - 1])
def test_one_wrong_bit_names_the_gpu(block: int) -> None:
    problem = find_broken_gpu(CudaDriver(Library(RIGHT, wrong(block))))
    assert problem == f"GPU 1 failed the compute check: 1 of {BLOCKS} equal computations had a different result"


def test_a_gpu_that_writes_nothing() -> None:
    assert check_result(bytes(len(RIGHT))) == "the computations wrote no result"


@pytest.mark.parametrize(
    ("function", "code", "problem"),
    [
        ("cuMemcpyDtoH_v2", 214, "GPU 0 failed the compute check: uncorrectable memory error"),
        ("cuLaunchKernel", 719, "GPU 0 failed the compute check: launch failure"),
        ("cuDevicePrimaryCtxRetain", 2, ""),  # out of memory
        ("cuDevicePrimaryCtxRetain", 46, ""),  # reserved for another process
        ("cuModuleLoadData", 218, ""),  # the driver or GPU is too old for the kernel
    ],
)
def test_only_errors_of_broken_hardware_count(function: str, code: int, problem: str) -> None:
    assert find_broken_gpu(CudaDriver(Library(RIGHT, **{function: code}))) == problem


def test_a_driver_that_does_not_initialize_raises() -> None:
    with pytest.raises(DriverError, match="cuInit: error 100"):
        find_broken_gpu(CudaDriver(Library(RIGHT, cuInit=100)))
