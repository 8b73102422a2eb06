"""Makes programs and libraries independent of the machine that they were linked on.

`bundle()` copies every shared library that they load, directly or not, apart from those of SYSTEM, and makes
each file find the copies beside itself. auditwheel does the same for most wheels. It is not used here because
it leaves zlib to the system, keeps symbols that are unique in a process, and collects no licences.
"""

import hashlib
import re
import struct
import subprocess
import tempfile
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional

# glibc, libstdc++ and libgcc: any system on which PyTorch runs has these.
SYSTEM = re.compile(
    r"ld-linux-x86-64\.so\.2|lib(c|m|dl|rt|pthread|resolv|util)\.so\.\d|libstdc\+\+\.so\.6|libgcc_s\.so\.1"
)

# Debian's packages of headers, whose code is compiled into our files.
HEADERS = ["libcli11-dev", "libeigen3-dev", "nlohmann-json3-dev"]

# The folder of the copies, relative to a library or program in the package, and to a program in a bin/.
SEARCH_PATH = "$ORIGIN/lib:$ORIGIN/../lib"

SHT_DYNSYM = 11
STB_GLOBAL, STB_GNU_UNIQUE = 1, 10


class Bundle(NamedTuple):
    files: Dict[str, bytes]  # the files given, by name
    libraries: Dict[str, bytes]  # what they load, by the names of the copies
    licences: Dict[str, bytes]  # of the Debian packages that the code is from, by package


def bundle(files: Dict[str, Path]) -> Bundle:
    """Reads the ELF files given, by name, and Debian's libraries. Changes nothing on disk.

    Raises FileNotFoundError for a library that ld.so would not find, and CalledProcessError when patchelf, strip
    or dpkg fails. The same files and libraries give the same bytes.
    """
    paths = _loaded_libraries(list(files.values()))
    names = {soname: _name_of_copy(soname, path) for soname, path in paths.items()}
    return Bundle(
        files={name: _patched(path, names, SEARCH_PATH) for name, path in files.items()},
        libraries={
            names[soname]: _patched(path, names, "$ORIGIN", names[soname])
            for soname, path in paths.items()
        },
        licences=_licences(paths.values()),
    )


def _output_of(*command: str) -> str:
    return subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout


def _needed(path: Path) -> List[str]:
    return _output_of("patchelf", "--print-needed", str(path)).split()


def _loaded_libraries(files: List[Path]) -> Dict[str, Path]:
    """Maps the soname of each library that is loaded, but for SYSTEM, to its file."""
    # libz.so.1 (libc6,x86-64) => /lib/x86_64-linux-gnu/libz.so.1
    cache = re.findall(r"^\t(\S+) \(libc6,x86-64\) => (\S+)$", _output_of("/sbin/ldconfig", "-p"), re.M)
    installed = {soname: Path(path) for soname, path in reversed(cache)}  # the first one counts
    found: Dict[str, Path] = {}
    remaining = list(files)
    while remaining:
        path = remaining.pop()
        for soname in _needed(path):
            if soname in found or SYSTEM.fullmatch(soname):
                continue
            if soname not in installed:
                raise FileNotFoundError(f"{path} needs {soname}, which ldconfig does not know")
            found[soname] = installed[soname].resolve()
            remaining.append(found[soname])
    return dict(sorted(found.items()))


def _name_of_copy(soname: str, path: Path) -> str:
    """Returns a name that no other library has: of two with one name ld.so loads only the first."""
    stem, suffix = soname.split(".so", 1)
    return f"{stem}-signpost-{hashlib.sha256(path.read_bytes()).hexdigest()[:8]}.so{suffix}"


def _patched(
    path: Path, names: Dict[str, str], search_path: str, soname: Optional[str] = None
) -> bytes:
    with tempfile.TemporaryDirectory() as directory:
        copy = Path(directory) / "copy"
        copy.write_bytes(path.read_bytes())
        copy.chmod(0o755)

        # Each kind of change is a call of its own: Debian 12's patchelf, 0.14.3, mixes up names when one call has
        # several kinds.
        def patchelf(*arguments: str) -> None:
            subprocess.run(["patchelf", *arguments, str(copy)], check=True)

        patchelf("--set-rpath", search_path)
        if soname is None:
            subprocess.run(["strip", "--strip-unneeded", str(copy)], check=True)
        else:
            patchelf("--set-soname", soname)  # Debian's libraries are stripped
        replacements = [
            argument
            for needed in _needed(path)
            if needed in names
            for argument in ("--replace-needed", needed, names[needed])
        ]
        if replacements:
            patchelf(*replacements)
        return _without_unique_symbols(copy.read_bytes())


def _without_unique_symbols(elf: bytes) -> bytes:
    """Makes symbols with STB_GNU_UNIQUE global ones.

    ld.so keeps one definition of a unique symbol for the whole process, even among libraries that cannot see
    each other: another gRPC in the process would share variables of templates and inline functions with ours.
    """
    changed = bytearray(elf)
    # Elf64_Ehdr: e_shoff at 40; e_shentsize, e_shnum at 58.
    (section_headers,) = struct.unpack_from("<Q", elf, 40)
    size, count = struct.unpack_from("<HH", elf, 58)
    for index in range(count):
        # Elf64_Shdr: sh_type at 4, sh_offset at 24, sh_size at 32.
        header = section_headers + index * size
        (kind,) = struct.unpack_from("<I", elf, header + 4)
        if kind != SHT_DYNSYM:
            continue
        begin, length = struct.unpack_from("<QQ", elf, header + 24)
        for symbol in range(begin, begin + length, 24):  # Elf64_Sym: st_info at 4
            info = elf[symbol + 4]
            if info >> 4 == STB_GNU_UNIQUE:
                changed[symbol + 4] = STB_GLOBAL << 4 | info & 15
    return bytes(changed)


def _licences(libraries) -> Dict[str, bytes]:
    packages = set(HEADERS)
    for path in libraries:
        # dpkg knows files of packages from before /usr was merged by their old path: /lib/...
        owners = _output_of("dpkg-query", "--search", f"*{path.name}")
        packages.update(
            line.split(":")[0]
            for line in owners.splitlines()
            if Path(line.split(": ", 1)[1]).resolve() == path
        )
    return {
        package: Path(f"/usr/share/doc/{package}/copyright").read_bytes() for package in sorted(packages)
    }
