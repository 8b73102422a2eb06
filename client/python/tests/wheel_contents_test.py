"""Checks the files in the wheel, and everything that they need from a system on which it is installed."""

import io
import os
import re
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest
from elftools.elf.elffile import ELFFile

# The wheel that Bazel has built, or another: one with CUDA kernels.
WHEEL = Path(os.environ.get("SIGNPOST_WHEEL") or next(Path("client/python").glob("signpost-*.whl")))
VERSION, _, _, PLATFORM = WHEEL.name[: -len(".whl")].split("-")[1:]
SOURCES = {
    str(path.relative_to("client/python")) for path in Path("client/python/signpost").rglob("*.py")
}

# glibc, libstdc++ and libgcc.
SYSTEM = r"ld-linux-x86-64\.so\.2|lib(c|m|dl|rt|pthread|resolv|util)\.so\.\d|libstdc\+\+\.so\.6|libgcc_s\.so\.1"
# The newest symbol versions that a system with that glibc has.
NEWEST = {"GLIBC": tuple(int(part) for part in PLATFORM.split("_")[1:3])}
if PLATFORM == "manylinux_2_34_x86_64":
    NEWEST["GLIBCXX"] = (3, 4, 29)  # of GCC 11, as Rocky 9 and Ubuntu 22.04 have it at least
    NEWEST["CXXABI"] = (1, 3, 13)

LIBRARY = r"signpost/lib/lib[\w+-]+-signpost-[0-9a-f]{8}\.so[.\d]*"
WANTED = [
    r"signpost/py\.typed",
    r"signpost/signpost",
    r"signpost/lib(signpost|pythoncodec)\.so",
    LIBRARY,
    r"signpost/include/(client/signpost|proto/signpost_codec)\.h",
    r"signpost/examples/(topk\.c|two_tensors\.c|(language_model|masked_language_model|resnet|training|with_\w+)\.py)",
    r"signpost/benchmarks/(peers\.py|netns_agent\.sh)",
    rf"signpost-{VERSION}\.data/data/share/(man/man1/signpost\.1|bash-completion/completions/signpost)",
    rf"signpost-{VERSION}\.data/data/share/(zsh/site-functions/_signpost|fish/vendor_completions\.d/signpost\.fish)",
    rf"signpost-{VERSION}\.dist-info/(METADATA|WHEEL|RECORD|entry_points\.txt)",
    rf"signpost-{VERSION}\.dist-info/licenses/(LICENSE|[a-z0-9.+-]+/copyright)",
]
EXPORTED = {
    "signpost/libsignpost.so": r"signpost_\w+",
    "signpost/libpythoncodec.so": r"signpost_codec\w*",
}


def contents_of(path):
    with zipfile.ZipFile(path) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def dynamic(elf, tag):
    section = elf.get_section_by_name(".dynamic")
    attribute = {"DT_NEEDED": "needed", "DT_RUNPATH": "runpath", "DT_SONAME": "soname"}[tag]
    return [getattr(entry, attribute) for entry in section.iter_tags(tag)]


def version_faults(name, elf):
    section = elf.get_section_by_name(".gnu.version_r")
    for _, versions in section.iter_versions() if section else []:
        for version in versions:
            family, _, number = version.name.partition("_")
            if family in NEWEST and tuple(map(int, number.split("."))) > NEWEST[family]:
                yield f"{name} needs {version.name}"


def symbol_faults(name, elf):
    for symbol in elf.get_section_by_name(".dynsym").iter_symbols():
        if symbol["st_shndx"] == "SHN_UNDEF":
            continue
        if symbol["st_info"]["bind"] in ("STB_LOOS", "STB_GNU_UNIQUE"):
            yield f"{name} shares {symbol.name} with the whole process"
        if name in EXPORTED and not re.fullmatch(EXPORTED[name], symbol.name):
            yield f"{name} exports {symbol.name}"


def faults(contents):
    """Returns a sentence for each fault of a wheel with these contents (name to bytes)."""
    found = []
    needed_by_any = set()
    for name, data in contents.items():
        is_source = name.endswith(".py") and name in SOURCES
        if not is_source and not any(re.fullmatch(pattern, name) for pattern in WANTED):
            found.append(f"{name} is unexpected")
        if not data.startswith(b"\x7fELF"):
            continue
        elf = ELFFile(io.BytesIO(data))
        for needed in dynamic(elf, "DT_NEEDED"):
            needed_by_any.add(needed)
            if not re.fullmatch(SYSTEM, needed) and f"signpost/lib/{needed}" not in contents:
                found.append(f"{name} needs {needed}")
        is_library = re.fullmatch(LIBRARY, name) is not None
        if dynamic(elf, "DT_RUNPATH") != [
            "$ORIGIN" if is_library else "$ORIGIN/lib:$ORIGIN/../lib"
        ]:
            found.append(f"{name} looks for libraries in {dynamic(elf, 'DT_RUNPATH')}")
        if is_library and dynamic(elf, "DT_SONAME") != [Path(name).name]:
            found.append(f"{name} calls itself {dynamic(elf, 'DT_SONAME')}")
        found += [*version_faults(name, elf), *symbol_faults(name, elf)]
    for name in contents:
        if re.fullmatch(LIBRARY, name) and Path(name).name not in needed_by_any:
            found.append(f"{name} is loaded by no file")
    return found


@pytest.fixture(scope="module")
def contents():
    return contents_of(WHEEL)


def test_wheel_has_no_faults(contents):
    assert faults(contents) == []
    assert SOURCES <= contents.keys()


def test_is_small_enough_to_be_downloaded(contents):
    assert WHEEL.stat().st_size < (40 << 20 if "SIGNPOST_WHEEL" in os.environ else 20 << 20)
    assert not [name for name in contents if "blas" in name]


def test_auditwheel_finds_the_platform_in_the_name():
    shown = subprocess.run(
        [sys.executable, "-m", "auditwheel", "show", WHEEL],
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    ).stdout
    # The oldest glibc with which auditwheel would let it run.
    [found] = re.findall(r'tag:\s+"manylinux_(\d+)_(\d+)_x86_64"', shown)
    assert tuple(map(int, found)) <= NEWEST["GLIBC"], shown


def test_metadata_names_requirements_and_licences(contents):
    metadata = contents[f"signpost-{VERSION}.dist-info/METADATA"].decode()
    for line in [
        "Name: signpost",
        f"Version: {VERSION}",
        "Requires-Python: >=3.9",
        'Requires-Dist: torch>=2.6; extra == "torch"',
        "License-Expression: Apache-2.0",
    ]:
        assert line in metadata.splitlines()
    files = re.findall("^License-File: (.*)$", metadata, re.MULTILINE)
    prefix = f"signpost-{VERSION}.dist-info/licenses/"
    assert sorted(files) == sorted(
        name[len(prefix) :] for name in contents if name.startswith(prefix)
    )
    assert {"LICENSE", "libeigen3-dev/copyright", "libre2-9/copyright"} <= set(
        files
    ) or "2_34" not in PLATFORM
    has_cuda = b"libcuda.so.1" in contents["signpost/libsignpost.so"]  # what CUDA's runtime loads
    assert ("cuda-runtime/copyright" in files) == has_cuda


@pytest.mark.skipif("SIGNPOST_WHEEL" in os.environ, reason="its files are not here")
def test_the_same_files_give_the_same_bytes(tmp_path):
    files = [str(path) for path in Path("client/python/package").rglob("*") if path.is_file()]
    again = tmp_path / WHEEL.name
    subprocess.run(
        [sys.executable, "client/python/build_wheel.py", again, "LICENSE", *files], check=True
    )
    assert again.read_bytes() == WHEEL.read_bytes()


def linked(tmp_path, source, *flags):
    """A shared object of this C source."""
    (tmp_path / "planted.c").write_text(source)
    subprocess.run(
        ["cc", "-shared", "-fPIC", "-fno-builtin", "planted.c", "-o", "planted.so", *flags]
        + ["-Wl,-rpath,$ORIGIN/lib:$ORIGIN/../lib,--enable-new-dtags"],
        cwd=tmp_path,
        check=True,
    )
    return (tmp_path / "planted.so").read_bytes()


def test_finds_files_that_are_not_needed(contents):
    library = "signpost/lib/libspare-signpost-01234567.so.1"
    [some] = [data for name, data in contents.items() if "/libaddress_sorting-" in name]
    found = faults(
        {**contents, "signpost/notes.txt": b"", "signpost/_spare.py": b"", library: some}
    )
    assert "signpost/notes.txt is unexpected" in found
    assert "signpost/_spare.py is unexpected" in found
    assert f"{library} is loaded by no file" in found


def test_finds_a_library_of_the_system(contents, tmp_path):
    (tmp_path / "libspare.c").write_text("int spare(void) { return 1; }")
    subprocess.run(
        ["cc", "-shared", "-fPIC", "libspare.c", "-o", "libspare.so"], cwd=tmp_path, check=True
    )
    planted = linked(
        tmp_path, "int spare(void); int signpost_f(void) { return spare(); }", "-L.", "-lspare"
    )
    assert faults({**contents, "signpost/libsignpost.so": planted}) == [
        "signpost/libsignpost.so needs libspare.so"
    ]


@pytest.mark.skipif("2_34" not in PLATFORM, reason="this wheel may need this machine's glibc")
def test_finds_a_symbol_that_is_too_new(contents, tmp_path):
    source = "double hypot(double, double); double signpost_f(double a) { return hypot(a, a); }"
    planted = linked(tmp_path, source, "-lm")
    assert faults({**contents, "signpost/libsignpost.so": planted}) == [
        "signpost/libsignpost.so needs GLIBC_2.35"
    ]


def test_finds_a_symbol_outside_of_the_c_abi(contents, tmp_path):
    planted = linked(tmp_path, "int signpost_f(void) { return 1; } int spare(void) { return 1; }")
    assert faults({**contents, "signpost/libsignpost.so": planted}) == [
        "signpost/libsignpost.so exports spare"
    ]


def test_finds_a_symbol_that_the_process_shares(contents, tmp_path):
    source = 'int signpost_f; __asm__(".type signpost_f, @gnu_unique_object");'
    planted = linked(tmp_path, source)
    assert faults({**contents, "signpost/libsignpost.so": planted}) == [
        "signpost/libsignpost.so shares signpost_f with the whole process"
    ]


def test_finds_a_search_path_or_name_of_the_system(contents, tmp_path):
    [name] = [name for name in contents if "/libgpr-" in name]
    planted = linked(tmp_path, "int f;", f"-Wl,-soname,{Path(name).name}")
    assert any("looks for libraries in" in fault for fault in faults({**contents, name: planted}))
    unnamed = linked(tmp_path, "int f;", "-Wl,-soname,libgpr.so.29")
    assert any(
        "calls itself ['libgpr.so.29']" in fault for fault in faults({**contents, name: unnamed})
    )


GRPC = """
import grpc
def call_something():
    try:
        grpc.channel_ready_future(grpc.insecure_channel("127.0.0.1:1")).result(timeout=0.5)
    except grpc.FutureTimeoutError:
        pass
"""
PROTOBUF = """
from google.protobuf import struct_pb2
assert struct_pb2.Struct.FromString(struct_pb2.Struct(fields={"a": struct_pb2.Value()}).SerializeToString())
"""
SIGNPOST = """
import signpost.torch as signpost, torch
signpost.init()
parameter = torch.nn.Parameter(torch.ones(10))
optimizer = signpost.OneBitAdam([parameter], lr=0.1, freeze_step=1)
"""
WORK = """
call_something()
for _ in range(3):
    parameter.grad = torch.ones(10)
    optimizer.step()
call_something()
print(optimizer.steps, "steps")
"""


@pytest.fixture(scope="module")
def installed(tmp_path_factory):
    directory = tmp_path_factory.mktemp("installed")
    command = [sys.executable, "-m", "pip", "install", "--quiet", "--no-index", "--no-deps"]
    subprocess.run([*command, "--target", directory, WHEEL], check=True)
    return directory


@pytest.mark.parametrize(
    "flags", ["", "import os, sys; sys.setdlopenflags(os.RTLD_NOW | os.RTLD_GLOBAL)\n"]
)
@pytest.mark.parametrize(
    "order", [[GRPC, PROTOBUF, SIGNPOST], [SIGNPOST, GRPC, PROTOBUF]], ids=["after", "before"]
)
def test_works_beside_grpcio_and_protobuf_in_one_process(installed, order, flags):
    program = flags + "".join(order) + WORK
    ended = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": str(installed), "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert (ended.returncode, ended.stdout) == (0, "3 steps\n"), ended.stderr
