"""Says which systems this machine's programs run on: the wheel's platform tag (PEP 600)."""

# Debian 12 has glibc 2.36, but nothing that the wheel needs is newer than 2.34: wheel_contents_test.py checks that.
_OLDEST = {"2.36": "2.34"}

def _local_glibc_impl(repository_ctx):
    # "glibc 2.36"
    version = repository_ctx.execute(["getconf", "GNU_LIBC_VERSION"]).stdout.split(" ")[-1].strip()
    needed = _OLDEST.get(version, version)
    repository_ctx.file("BUILD.bazel", "")
    repository_ctx.file(
        "glibc.bzl",
        "PLATFORM = \"manylinux_%s_x86_64\"\n" % needed.replace(".", "_"),
    )

local_glibc = repository_rule(
    implementation = _local_glibc_impl,
    local = True,
)
