"""Run CUDA kernels without a GPU: they are compiled as C++, and a block's threads are fibers.

A warp's threads go in lockstep from one shuffle or barrier to the next, and warps take random
turns, the same ones in every run. So a missing barrier shows: an access that it should order comes
too early or too late. Memory that was never written reads as NaN.
"""

from __future__ import annotations

import ctypes
import functools
import math
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import mlx.core as mx
import numpy as np
import pytest

from rewarm.accel.launch import Launch

needs_a_compiler = pytest.mark.skipif(
    sys.platform != "linux" or shutil.which("g++") is None,
    reason="kernels are compiled by g++, on Linux: it is not there",
)

Sizes = tuple[int, int, int]
Template = Sequence[tuple[str, mx.Dtype | int]]

TYPES = {
    mx.float32: "float",
    mx.bfloat16: "__nv_bfloat16",
    mx.float16: "__half",
    mx.bool_: "bool",
    mx.int32: "int",
    mx.int64: "long long",
}
FLAGS = (
    *("-std=c++17", "-O1", "-w", "-shared", "-fPIC", "-fno-strict-aliasing", "-ffp-contract=off"),
    "-fsanitize=alignment,bounds",
    *("-nodefaultlibs", "-lc", "-lm"),  # the sanitizer's functions are below
)
BARRIER = 'asm volatile("bar.sync 1, %0;" ::"r"(threads) : "memory");'
NOBODY_WROTE = 0xFF
"""Each byte of unwritten memory: it makes a NaN in every floating type, and -1."""
MARGIN = 1 << 16
"""The number of bytes before and after an array, and its alignment."""

WORDS = r"""
#include <stdlib.h>
#include <string.h>
#include <ucontext.h>
extern "C" {  // to read <cmath> takes a third of the time that a kernel does
float exp2f(float), fabsf(float), fmaf(float, float, float), sqrtf(float);
float frexpf(float, int*), ldexpf(float, int);
long lrintf(float);
}

#define __device__
#define __shared__ static __attribute__((section("shared")))

struct alignas(8) float2 { float x, y; };
struct alignas(16) float4 { float x, y, z, w; };
static float2 make_float2(float x, float y) { return {x, y}; }
static float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }

static float __uint_as_float(unsigned bits) {
    float x;
    memcpy(&x, &bits, sizeof x);
    return x;
}
static float __int_as_float(int bits) { return __uint_as_float(bits); }
static float rsqrtf(float x) { return 1 / sqrtf(x); }

struct __nv_bfloat16 {
    unsigned short bits;
    __nv_bfloat16() = default;
    __nv_bfloat16(float x) {
        unsigned whole;
        memcpy(&whole, &x, sizeof x);
        bits = x != x ? 0x7fc0 : (whole + 0x7fff + (whole >> 16 & 1)) >> 16;
    }
    operator float() const { return __uint_as_float(bits << 16); }
};

struct __half {
    unsigned short bits;
    __half() = default;
    __half(float x) {
        int power;
        frexpf(x, &power);
        power = x != 0 && power - 11 > -24 ? power - 11 : -24;  // of its last bit: some have fewer
        bits = 0x7c00;
        if (fabsf(x) < 65520) bits = lrintf(ldexpf(fabsf(x), -power)) + (power + 24 << 10);
        if (x != x) bits = 0x7e00;
        if (__builtin_signbit(x)) bits |= 0x8000;
    }
    operator float() const {
        const int power = bits >> 10 & 31, rest = bits & 1023;
        float x = power ? ldexpf(rest + 1024, power - 25) : ldexpf(rest, -24);
        if (power == 31) x = rest ? __builtin_nanf("") : __builtin_inff();
        return bits & 0x8000 ? -x : x;
    }
};
"""

BLOCK = r"""
constexpr int MOST = 1024;  // threads
struct Index { unsigned x, y, z; };
enum { READY = -1, DONE = -2 };

static Index threadIdx, blockIdx, blockDim, gridDim;
static ucontext_t scheduler, fibers[MOST];
static char stacks[MOST][1 << 17];
static int held[MOST];  // READY, DONE, or the barrier that a thread waits at
static int current, ready;
static int arrived[16];  // at each barrier
static long long given[MOST];  // by shuffles
static int shuffles[MOST];
static const char* wrong;
static char** memory;  // of the arrays
static const int** shapes;
static const long long** strides;

static void give_way() { swapcontext(&fibers[current], &scheduler); }

static void give_up(const char* why) {
    wrong = why;
    setcontext(&scheduler);
}

#define CALLED_BY_THE_SANITIZER extern "C" __attribute__((visibility("hidden"))) void
CALLED_BY_THE_SANITIZER __ubsan_handle_type_mismatch_v1(void*, void*) {
    give_up("an address is not aligned");
}
CALLED_BY_THE_SANITIZER __ubsan_handle_out_of_bounds(void*, void*) {
    give_up("an index is out of bounds");
}

static void wait_at(int barrier, int threads) {
    if (++arrived[barrier] < threads) {
        held[current] = barrier;
        --ready;
    } else {
        arrived[barrier] = 0;
        ready += threads - 1;
        for (int& at : held)
            if (at == barrier) at = READY;
    }
    give_way();
}
static void __syncthreads() { wait_at(0, blockDim.x * blockDim.y * blockDim.z); }

template <typename N>
static N given_by(int from, N mine) {
    memcpy(&given[current], &mine, sizeof mine);
    ++shuffles[current];
    give_way();
    if (shuffles[current] != shuffles[from]) give_up("some of a warp take no part in a shuffle");
    memcpy(&mine, &given[from], sizeof mine);
    give_way();
    return mine;
}
template <typename N>
static N __shfl_xor_sync(unsigned, N x, int away) { return given_by(current ^ away, x); }
template <typename N>
static N __shfl_sync(unsigned, N x, int lane, int width = 32) {
    return given_by(current / width * width + lane % width, x);
}
"""

LAUNCH = r"""
static void thread() {
    kernel();
    held[current] = DONE;
    --ready;
}

// Whether the warp could go on.
static bool go_on(int warp, int threads) {
    bool could = false;
    for (int i = warp * 32; i < warp * 32 + 32 && i < threads; ++i) {
        if (held[i] != READY || wrong) continue;
        could = true;
        current = i;
        threadIdx.x = i % blockDim.x;
        threadIdx.y = i / blockDim.x % blockDim.y;
        threadIdx.z = i / blockDim.x / blockDim.y;
        swapcontext(&scheduler, &fibers[i]);
    }
    return could;
}

extern char __start_shared[] __attribute__((weak, visibility("hidden")));
extern char __stop_shared[] __attribute__((weak, visibility("hidden")));

static void run_block(int threads) {
    memset(__start_shared, 0xff, __stop_shared - __start_shared);
    memset(shuffles, 0, sizeof shuffles);
    memset(arrived, 0, sizeof arrived);
    ready = threads;
    for (int i = 0; i < threads; ++i) {
        held[i] = READY;
        getcontext(&fibers[i]);
        fibers[i].uc_stack.ss_sp = stacks[i];
        fibers[i].uc_stack.ss_size = sizeof stacks[i];
        fibers[i].uc_link = &scheduler;
        makecontext(&fibers[i], thread, 0);
    }
    while (ready && !wrong) {
        const int warp = rand() % ((threads + 31) / 32);
        int turns = 1 << rand() % 8;
        while (turns-- && go_on(warp, threads)) {}
    }
    for (int i = 0; i < threads && !wrong; ++i)
        if (held[i] != DONE) wrong = "threads wait for ever";
}

extern "C" const char* launch(char** arrays, const int** its_shapes, const long long** its_strides,
                              const unsigned* blocks, const unsigned* threads) {
    memory = arrays;
    shapes = its_shapes;
    strides = its_strides;
    gridDim = {blocks[0], blocks[1], blocks[2]};
    blockDim = {threads[0], threads[1], threads[2]};
    wrong = nullptr;
    if (__stop_shared - __start_shared > 48 << 10) wrong = "more than 48 KB are shared";
    srand(1);
    for (blockIdx.z = 0; blockIdx.z < gridDim.z; ++blockIdx.z)
        for (blockIdx.y = 0; blockIdx.y < gridDim.y; ++blockIdx.y)
            for (blockIdx.x = 0; blockIdx.x < gridDim.x && !wrong; ++blockIdx.x)
                run_block(blockDim.x * blockDim.y * blockDim.z);
    return wrong;
}
"""


class Memory:
    """The bytes of an array. The bytes around them belong to no array and must not change."""

    def __init__(self, size: int, off: int = 0) -> None:
        everything = np.full(size + 3 * MARGIN, NOBODY_WROTE, np.uint8)
        start = MARGIN + -everything.ctypes.data % MARGIN + off
        self.bytes = everything[start : start + size]
        self._around = (everything[:start], everything[start + size :])

    @classmethod
    def of(cls, x: mx.array, off_by: int) -> Memory:
        given = np.array(x.reshape(-1).view(mx.uint8))
        found = cls(given.size, off_by * x.dtype.size)
        found.bytes[:] = given
        return found

    def read(self, shape: Sequence[int], dtype: mx.Dtype) -> mx.array:
        return mx.array(self.bytes).view(dtype).reshape(shape)

    def is_bounded(self) -> bool:
        return all((part == NOBODY_WROTE).all() for part in self._around)


def emulated(
    name: str,
    inputs: Sequence[str],
    outputs: Sequence[str],
    source: str,
    header: str = "",
    off_by: Mapping[str, int] | None = None,
    **options: Any,
) -> Launch:
    """Make a kernel as `launch.kernel` does. Inputs are contiguous whatever the options say.
    An input named in `off_by` begins that many numbers after an aligned address, as a view may."""
    off_by = off_by or {}
    input_names, output_names = inputs, outputs

    def launched(
        inputs: Sequence[mx.array],
        grid: Sizes,
        threadgroup: Sizes,
        output_shapes: Sequence[Sequence[int]],
        output_dtypes: Sequence[mx.Dtype],
        template: Template = (),
    ) -> list[mx.array]:
        kernel = [
            *as_inputs(input_names, inputs),
            *as_outputs(output_names, output_dtypes, len(inputs)),
            *(as_constant(*entry) for entry in template),
            source,
        ]
        given = [
            Memory.of(x, off_by.get(name, 0)) for name, x in zip(input_names, inputs, strict=True)
        ]
        made = [
            Memory(math.prod(shape) * dtype.size)
            for shape, dtype in zip(output_shapes, output_dtypes, strict=True)
        ]
        wrong = run(
            compiled(program("\n".join(kernel), header)),
            [*given, *made],
            [x.shape for x in inputs],
            [-(-n // size) for n, size in zip(grid, threadgroup, strict=True)],
            threadgroup,
        )
        if not all(memory.is_bounded() for memory in (*given, *made)):
            wrong = "it writes outside of its arrays"
        if wrong:
            raise RuntimeError(f"{name}: {wrong}")
        return list(map(Memory.read, made, output_shapes, output_dtypes))

    return launched


def as_inputs(names: Sequence[str], arrays: Sequence[mx.array]) -> Iterator[str]:
    for i, (name, x) in enumerate(zip(names, arrays, strict=True)):
        yield f"const auto {name} = (const {TYPES[x.dtype]}*)memory[{i}];"
        yield f"const int* const {name}_shape = shapes[{i}];"
        yield f"const long long* const {name}_strides = strides[{i}];"


def as_outputs(names: Sequence[str], dtypes: Sequence[mx.Dtype], first: int) -> Iterator[str]:
    for i, (name, dtype) in enumerate(zip(names, dtypes, strict=True), first):
        yield f"const auto {name} = ({TYPES[dtype]}*)memory[{i}];"


def as_constant(name: str, value: mx.Dtype | int) -> str:
    if isinstance(value, mx.Dtype):
        return f"using {name} = {TYPES[value]};"
    return f"constexpr {'bool' if isinstance(value, bool) else 'int'} {name} = {int(value)};"


def program(kernel: str, header: str) -> str:
    header = header.replace(BARRIER, "wait_at(1, threads);")
    return f"{WORDS}{BLOCK}{header}\nstatic void kernel() {{\n{kernel}\n}}\n{LAUNCH}"


@functools.cache
def compiled(program: str) -> ctypes.CDLL:
    with tempfile.TemporaryDirectory() as folder:
        source, library = Path(folder, "kernel.cpp"), Path(folder, "kernel.so")
        source.write_text(program)
        command = ["g++", *FLAGS, "-o", str(library), str(source)]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            raise RuntimeError(f"g++ does not compile the kernel: {done.stderr}")
        return ctypes.CDLL(str(library))  # once loaded it needs no file


def run(
    library: ctypes.CDLL,
    memory: Sequence[Memory],
    shapes: Sequence[Sequence[int]],
    blocks: Sequence[int],
    threads: Sequence[int],
) -> str:
    """Run the kernel, and return a sentence on what went wrong, or nothing."""
    strides = [[math.prod(shape[i + 1 :]) for i in range(len(shape))] for shape in shapes]
    arrays = (
        [x.bytes for x in memory],
        [np.array(shape, np.int32) for shape in shapes],
        [np.array(steps, np.int64) for steps in strides],
    )
    addresses = [(ctypes.c_void_p * len(row))(*(x.ctypes.data for x in row)) for row in arrays]
    sizes = [(ctypes.c_uint * 3)(*three) for three in (blocks, threads)]
    library.launch.restype = ctypes.c_char_p
    wrong: bytes | None = library.launch(*addresses, *sizes)
    return (wrong or b"").decode()
