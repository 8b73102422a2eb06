"""The package, with libsignpost.so, the program `signpost` and what programs and codecs in C are written with in it."""

# Of signpost/, by their names there.
_C_KIT = {
    "examples/topk.c": "//client/examples:topk.c",
    "examples/two_tensors.c": "//client/examples:two_tensors.c",
    "include/client/signpost.h": "//client:signpost.h",
    "include/proto/signpost_codec.h": "//proto:signpost_codec.h",
}

def python_package(name, sources, files, library, program = "//cli:signpost", **kwargs):
    """The directory <name>/signpost: `sources` of signpost/, `files` of here, the library, the program and what is for C."""
    native.genrule(
        name = name,
        srcs = sources + files + _C_KIT.values() + [
            program,
            "//client:libpythoncodec.so",
            library,
        ],
        outs = [name + "/" + source for source in sources] +
               [name + "/signpost/" + file for file in files + _C_KIT.keys()] + [
            name + "/signpost/libpythoncodec.so",
            name + "/signpost/libsignpost.so",
            name + "/signpost/signpost",
        ],
        cmd = """
            for file in $(SRCS); do
                case $$file in
                    */python/signpost/*) name=$${file#*/python/signpost/} ;;
                    */python/examples/* | */python/benchmarks/*) name=$${file#*/python/} ;;
                    */examples/*.c) name=examples/$${file##*/} ;;
                    *client/signpost.h) name=include/client/signpost.h ;;
                    *proto/signpost_codec.h) name=include/proto/signpost_codec.h ;;
                    */libpythoncodec.so) name=libpythoncodec.so ;;
                    *.so) name=libsignpost.so ;;
                    */cli/*) name=signpost ;;
                    *) name=$${file##*/} ;;
                esac
                cp $$file $(RULEDIR)/%s/signpost/$$name
            done
        """ % name,
        **kwargs
    )
