"""What is fuzzed: a program for libFuzzer, and a test that does without."""

def fuzz_target(name, deps, size = "small", tags = []):
    """`<name>.cc` defines LLVMFuzzerTestOneInput and Seeds (seeds.h).

    `<name>`, with --config=fuzz, is the libFuzzer program; `<name>_test` is in every test run.
    """
    native.cc_library(
        name = name + "_target",
        testonly = True,
        srcs = [name + ".cc"],
        deps = deps + ["//fuzzing:seeds"],
        alwayslink = True,
    )
    native.cc_binary(
        name = name,
        testonly = True,
        linkopts = [
            "-fsanitize=fuzzer",
            # Bazel links with clang, not clang++, which leaves it out.
            "-fsanitize-link-c++-runtime",
        ],
        tags = ["manual"],  # only clang can
        deps = [
            ":" + name + "_target",
            "//fuzzing:seed_writer",
        ],
    )
    native.cc_test(
        name = name + "_test",
        size = size,
        tags = tags,
        deps = [
            ":" + name + "_target",
            "//fuzzing:mutation_test",
        ],
    )
