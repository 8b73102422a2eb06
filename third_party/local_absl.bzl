"""Says which of Abseil's newer libraries this machine has: its headers call them where Debian 12's had all inline."""

_NEWER = [
    "crc_cord_state",
    "crc_internal",
    "kernel_timeout_internal",
    "string_view",
]

def _local_absl_impl(repository_ctx):
    directory = "/usr/lib/x86_64-linux-gnu/libabsl_"
    present = [name for name in _NEWER if repository_ctx.path(directory + name + ".so").exists]
    repository_ctx.file("BUILD.bazel", "")
    repository_ctx.file("absl.bzl", "NEWER_LIBRARIES = %r\n" % present)

local_absl = repository_rule(
    implementation = _local_absl_impl,
    local = True,
)
