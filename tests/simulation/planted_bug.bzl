"""The simulator's own test: bugs that it must find."""

def planted_bug_test(name, src, old, new = "", first = 1, seeds = 50, finds = "", always = False):
    """Expects the simulation, built with a changed source file, to violate an invariant.

    Args:
      name: what the bug is.
      src: the file, which a library that the simulation depends on is made of. Its object comes
        before that library's, so the linker takes no notice of the latter.
      old: a piece of text that stands in it exactly once.
      new: what stands there instead.
      first: the first seed, where a bug shows in few.
      seeds: of how many from there on it must find the bug in one.
      finds: what the violation says, of a bug that is to be found without a program that lacks it:
        by that check alone. Empty: any may find it, and digests of such a program may, too.
      always: whether `./signpost test` runs it too. The others take minutes to compile and say more of the simulator
        than of a change elsewhere: `./signpost test //tests/simulation/...` runs all.
    """
    file = name + "/" + src.split(":")[1]
    native.genrule(
        name = name + "_source",
        testonly = True,
        srcs = [src],
        outs = [file],
        cmd = "OLD='%s' NEW='%s' perl -0pe " % (old, new) +
              "'$$n += s/\\Q$$ENV{OLD}\\E/$$ENV{NEW}/g; END { $$? = $$n != 1 }' $< > $@",
    )
    native.cc_test(
        name = name + "_test",
        size = "medium",
        srcs = [file],
        copts = ["-w"],  # a bug may leave something unused
        args = [
            "--gtest_filter=*FindsThePlantedBug",
            "--seeds=%d" % seeds,
            "'--finds=%s'" % finds if finds else "--without_bug=$(location :simulation_test)",
        ] + (["--first=%d" % first] if first > 1 else []),
        data = [] if finds else [":simulation_test"],
        linkstatic = True,
        tags = ["no-tsan"] + ([] if always else ["planted-bug"]),
        deps = [
            ":simulation_tests",
        ],
    )
