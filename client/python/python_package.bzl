"""The package, with libsignpost.so and the program `signpost` in it."""

def python_package(name, sources, files, library, **kwargs):
    """The directory <name>/signpost: `sources` of signpost/, `files` of here, the library, the program."""
    native.genrule(
        name = name,
        srcs = sources + files + [
            "//cli:signpost",
            "//client:libpythoncodec.so",
            library,
        ],
        outs = [name + "/" + source for source in sources] +
               [name + "/signpost/" + file for file in files] + [
            name + "/signpost/libpythoncodec.so",
            name + "/signpost/libsignpost.so",
            name + "/signpost/signpost",
        ],
        cmd = """
            for file in $(SRCS); do
                case $$file in
                    */python/signpost/*) name=$${file#*/python/signpost/} ;;
                    */python/examples/* | */python/benchmarks/*) name=$${file#*/python/} ;;
                    */libpythoncodec.so) name=libpythoncodec.so ;;
                    *.so) name=libsignpost.so ;;
                    *) name=$${file##*/} ;;
                esac
                cp $$file $(RULEDIR)/%s/signpost/$$name
            done
        """ % name,
        **kwargs
    )
