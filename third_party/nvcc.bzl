"""Objects that nvcc compiles. Where there is no nvcc they cannot be built, and nobody asks for them."""

load("@local_cuda//:cuda.bzl", "CUDART", "NVCC")

HAVE_CUDA = NVCC != ""

# The static runtime finds the driver when it is first called, so that programs start without it.
CUDA_LINKOPTS = [
    CUDART,
    "-ldl",
    "-lrt",
]

def nvcc_object(name, src, hdrs):
    """name.cu.o: machine code for Ampere and Hopper, and PTX from which drivers make later GPUs'."""
    native.genrule(
        name = name,
        srcs = [src] + hdrs,
        outs = [name + ".cu.o"],
        cmd = NVCC + " -std=c++20 -O2 -fmad=false --extended-lambda --expt-relaxed-constexpr " +
              # nvcc takes it for ignored when an absl::Status is assigned.
              "-diag-suppress=2810 " +
              # Lines for what compute-sanitizer finds; no code changes.
              "-lineinfo " +
              "-Xcompiler=-fPIC -I. -gencode=arch=compute_80,code=sm_80 " +
              "-gencode=arch=compute_90,code=[sm_90,compute_90] -c $(location %s) -o $@" % src,
        tags = ["manual"],
    )
