"""Compiles other projects' headers once, for all source files that include them.

.bazelrc has GCC read the result ahead of each source file (-include). Where the flags differ from those with which
it was made, GCC reads the headers themselves. A source file includes what it uses all the same, which
tests/includes_test.py checks for Abseil and the standard library.
"""

load("@bazel_tools//tools/cpp:toolchain_utils.bzl", "find_cpp_toolchain")

def _precompiled_header_impl(ctx):
    header = ctx.actions.declare_file(ctx.label.name + ".h")
    ctx.actions.write(header, "".join(["#include <%s>\n" % name for name in ctx.attr.headers]))
    if not ctx.attr.headers:
        return DefaultInfo(files = depset([header]))

    toolchain = find_cpp_toolchain(ctx)
    features = cc_common.configure_features(
        ctx = ctx,
        cc_toolchain = toolchain,
        requested_features = ctx.features,
        unsupported_features = ctx.disabled_features,
    )
    flags = ctx.fragments.cpp.copts + ctx.fragments.cpp.cxxopts + ctx.attr.copts + ["-x", "c++-header"]
    result = ctx.actions.declare_file(ctx.label.name + ".h.gch")  # the name that GCC looks for
    variables = cc_common.create_compile_variables(
        feature_configuration = features,
        cc_toolchain = toolchain,
        source_file = header.path,
        output_file = result.path,
        user_compile_flags = flags,
        use_pic = True,
    )
    action = "c++-compile"
    ctx.actions.run(
        mnemonic = "PrecompileHeader",
        executable = cc_common.get_tool_for_action(feature_configuration = features, action_name = action),
        arguments = cc_common.get_memory_inefficient_command_line(
            feature_configuration = features,
            action_name = action,
            variables = variables,
        ),
        env = cc_common.get_environment_variables(
            feature_configuration = features,
            action_name = action,
            variables = variables,
        ),
        inputs = depset([header], transitive = [toolchain.all_files]),
        outputs = [result],
    )
    return DefaultInfo(files = depset([header, result]))

precompiled_header = rule(
    implementation = _precompiled_header_impl,
    attrs = {
        "headers": attr.string_list(doc = "Names as in #include <NAME>. An empty list makes an empty header."),
        "copts": attr.string_list(doc = "The flags that .bazelrc's --per_file_copt gives the sources that read it."),
        "_cc_toolchain": attr.label(default = "@bazel_tools//tools/cpp:current_cc_toolchain"),
    },
    fragments = ["cpp"],
    toolchains = ["@bazel_tools//tools/cpp:toolchain_type"],
)
