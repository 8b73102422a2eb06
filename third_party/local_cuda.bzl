"""Finds the CUDA toolkit of this machine: in $CUDA_HOME, by nvcc in PATH, or in /usr/local/cuda."""

# From the toolkit's root: as Nvidia installs it, and as Debian does.
_CUDART = [
    "lib64/libcudart_static.a",
    "lib/x86_64-linux-gnu/libcudart_static.a",
]

def _roots(repository_ctx):
    roots = []
    if repository_ctx.os.environ.get("CUDA_HOME"):
        roots.append(repository_ctx.path(repository_ctx.os.environ["CUDA_HOME"]))
    nvcc = repository_ctx.which("nvcc")
    if nvcc:
        roots.append(nvcc.realpath.dirname.dirname)
    roots.append(repository_ctx.path("/usr/local/cuda"))
    return roots

# The runtime's licence, from the toolkit's root: as Nvidia's installer, Python packages and Debian have it.
_LICENCES = [
    "EULA.txt",
    "dist-info/nvidia_cuda_runtime-*.dist-info/licenses/License.txt",
    "share/doc/libcudart*/copyright",
]

def _licence(repository_ctx, cudart):
    roots = [str(root) for root in _roots(repository_ctx)]
    patterns = " ".join([root + "/" + licence for root in roots for licence in _LICENCES])
    found = repository_ctx.execute(["sh", "-c", "ls -d %s 2>/dev/null | head -n 1" % patterns]).stdout.strip()
    if not cudart:
        repository_ctx.file("LICENCE", "")
    elif found:
        repository_ctx.symlink(found, "LICENCE")
    else:
        repository_ctx.file("LICENCE", "Nvidia's licence: https://docs.nvidia.com/cuda/eula\n")

# The compiler and its static runtime, or two empty strings. An nvcc without the runtime is passed
# over: some images have a script of that name in PATH that calls the real one.
def _toolkit(repository_ctx):
    for root in _roots(repository_ctx):
        nvcc = root.get_child("bin").get_child("nvcc")
        for cudart in _CUDART:
            library = repository_ctx.path(str(root) + "/" + cudart)
            if nvcc.exists and library.exists:
                return str(nvcc), str(library)
    return "", ""

def _local_cuda_impl(repository_ctx):
    nvcc, cudart = _toolkit(repository_ctx)
    _licence(repository_ctx, cudart)
    repository_ctx.file("BUILD.bazel", "exports_files([\"LICENCE\"])\n")
    repository_ctx.file("cuda.bzl", "NVCC = %r\nCUDART = %r\n" % (nvcc, cudart))

local_cuda = repository_rule(
    implementation = _local_cuda_impl,
    environ = ["CUDA_HOME", "PATH"],
    local = True,
)
