"""CUDA kernels run by a CPU, to test what they compute where there is no GPU: a thread of C++ for each of a block's."""

import ctypes
import re
import subprocess
from pathlib import Path

CUDA = """
#include <barrier>
#include <thread>
#include <vector>
struct Index { int x; };
struct float2 { float x, y; };
struct float4 { float x, y, z, w; };
static thread_local Index threadIdx, blockIdx, blockDim;
static std::barrier<>* barrier;
#define __global__
#define __device__ static
#define __shared__ static
#define __syncthreads() barrier->arrive_and_wait()
"""

RUN = """
extern "C" void run(int num_blocks, int num_threads, %(parameters)s) {
    for (int block = 0; block < num_blocks; block++) {  // one after the other: they have the same shared memory
        std::barrier<> own(num_threads);
        barrier = &own;
        std::vector<std::thread> threads;
        for (int thread = 0; thread < num_threads; thread++)
            threads.emplace_back([=] {
                threadIdx.x = thread, blockIdx.x = block, blockDim.x = num_threads;
                %(name)s(%(arguments)s);
                own_barrier_dropped();
            });
        for (auto& thread : threads) thread.join();
    }
}
""".replace("own_barrier_dropped()", "barrier->arrive_and_drop()")


def compiled_for_cpu(folder: Path):
    """A function like `compile_kernel`, whose libraries are in `folder`."""

    def compile_kernel(source, name, device):
        parameters = re.search(rf"void {name}\((.*?)\)", source, re.DOTALL)[1]
        arguments = ", ".join(parameter.split()[-1].lstrip("*") for parameter in parameters.split(","))
        file = folder / f"{name}-{len(list(folder.iterdir()))}.cpp"
        run = RUN % {"parameters": parameters, "name": name, "arguments": arguments}
        file.write_text(CUDA + re.sub(r"#pragma unroll( \d+)?", "", source) + run)
        library = file.with_suffix(".so")
        subprocess.run(["g++", "-O1", "-std=c++20", "-shared", "-fPIC", "-pthread", file, "-o", library], check=True)
        return ctypes.CDLL(str(library)).run

    return compile_kernel


def launch_on_cpu(kernel, num_blocks, arguments, num_threads=256):
    """Like `launch`."""
    given = [ctypes.c_void_p(each.data_ptr()) if hasattr(each, "data_ptr") else each for each in arguments]
    kernel(num_blocks, num_threads, *given)
