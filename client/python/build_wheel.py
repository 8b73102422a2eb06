"""Writes the wheel (PEP 427, PEP 639): build_wheel.py WHEEL LICENSE[,CUDA_LICENCE] FILE...

Each FILE lies in a directory `package` as it does in the wheel. Programs and libraries among them are made
independent of this machine's libraries: see bundle.py. The same inputs give the same bytes.
"""

import base64
import hashlib
import re
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import List, Tuple

from bundle import bundle

METADATA = """\
Metadata-Version: 2.4
Name: signpost
Version: {version}
Summary: Data-parallel training that sends one bit per parameter each way, over ordinary Ethernet
Keywords: pytorch,distributed training,optimizer,gradient compression,1-bit Adam
Classifier: Intended Audience :: Science/Research
Classifier: Operating System :: POSIX :: Linux
Classifier: Programming Language :: C++
Classifier: Programming Language :: Python :: 3
Classifier: Topic :: Scientific/Engineering :: Artificial Intelligence
Project-URL: Paper, https://arxiv.org/abs/2102.02888
License-Expression: Apache-2.0
{licences}Requires-Python: >=3.9
Provides-Extra: torch
Requires-Dist: torch>=2.6; extra == "torch"
Provides-Extra: codec
Requires-Dist: numpy; extra == "codec"
"""

WHEEL = """\
Wheel-Version: 1.0
Generator: signpost build_wheel
Root-Is-Purelib: false
Tag: {tag}
"""

ENTRY_POINTS = """\
[console_scripts]
signpost = signpost._program:main
"""

# The program writes its manual and completions. A shell and man(1) look for them below share/.
SHARED = [
    (["man"], "man/man1/signpost.1"),
    (["completion", "bash"], "bash-completion/completions/signpost"),
    (["completion", "zsh"], "zsh/site-functions/_signpost"),
    (["completion", "fish"], "fish/vendor_completions.d/signpost.fish"),
]

# The files that are linked.
LINKED = ["signpost/signpost", "signpost/libsignpost.so", "signpost/libpythoncodec.so"]

Entry = Tuple[str, bytes, int]  # name in the archive, contents, mode


def package_entries(files: List[Path]) -> Tuple[List[Entry], List[Entry]]:
    """Returns the package's entries, and the licences of the libraries that are bundled with it."""
    paths = {"/".join(path.parts[path.parts.index("package") + 1 :]): path for path in files}
    bundled = bundle({name: paths[name] for name in LINKED})
    entries = [
        (name, bundled.files.get(name) or path.read_bytes(), 0o755 if name == LINKED[0] else 0o644)
        for name, path in paths.items()
    ]
    entries += [
        (f"signpost/lib/{name}", contents, 0o755) for name, contents in bundled.libraries.items()
    ]
    licences = [(f"{package}/copyright", text, 0o644) for package, text in bundled.licences.items()]
    return sorted(entries), licences


def shared_entries(program: bytes, libraries: List[Entry], version: str) -> List[Entry]:
    """Runs the program as it is in the wheel, with the libraries that are in the wheel."""
    with tempfile.TemporaryDirectory() as directory:
        for name, contents, mode in [("signpost/signpost", program, 0o755), *libraries]:
            path = Path(directory) / name
            path.parent.mkdir(exist_ok=True, parents=True)
            path.write_bytes(contents)
            path.chmod(mode)
        return [
            (
                f"signpost-{version}.data/data/share/{name}",
                subprocess.run(
                    [f"{directory}/signpost/signpost", *arguments],
                    check=True,
                    stdout=subprocess.PIPE,
                ).stdout,
                0o644,
            )
            for arguments, name in SHARED
        ]


def record(entries: List[Entry], path: str) -> str:
    """Returns the text of the file RECORD: each entry's name, SHA-256 and size, and RECORD itself without them."""
    lines = []
    for name, contents, _ in entries:
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(contents)}\n")
    return "".join([*lines, f"{path},,\n"])


def licence_entries(paths: List[str]) -> List[Entry]:
    """The project's own licence and, where CUDA's runtime is linked, the runtime's: an empty file means that it is not."""
    names = ["LICENSE", "cuda-runtime/copyright"]
    entries = [(name, Path(path).read_bytes(), 0o644) for name, path in zip(names, paths)]
    return [(name, text, mode) for name, text, mode in entries if text]


def main(wheel: str, licences_of_program: str, files: List[str]) -> None:
    name = re.fullmatch(r"signpost-([^-]+)-(py3-none-[^-]+)\.whl", Path(wheel).name)
    if name is None:
        sys.exit(f"{wheel} is not a wheel's name: signpost-VERSION-py3-none-PLATFORM.whl")
    version, tag = name.groups()
    entries, licences = package_entries([Path(file) for file in files])
    contents = {name: contents for name, contents, _ in entries}
    libraries = [entry for entry in entries if entry[0].startswith("signpost/lib/")]
    entries += shared_entries(contents["signpost/signpost"], libraries, version)
    licences = [*licence_entries(licences_of_program.split(",")), *licences]
    license_files = "".join(f"License-File: {name}\n" for name, _, _ in licences)
    info = f"signpost-{version}.dist-info"
    entries += [(f"{info}/licenses/{name}", text, mode) for name, text, mode in licences]
    entries += [
        (f"{info}/METADATA", METADATA.format(version=version, licences=license_files).encode(), 0o644),
        (f"{info}/WHEEL", WHEEL.format(tag=tag).encode(), 0o644),
        (f"{info}/entry_points.txt", ENTRY_POINTS.encode(), 0o644),
    ]
    entries.append((f"{info}/RECORD", record(entries, f"{info}/RECORD").encode(), 0o644))

    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED, compresslevel=9) as archive:
        for name, contents, mode in entries:
            member = zipfile.ZipInfo(name)  # dated 1980, whenever it is written
            member.external_attr = (0o100000 | mode) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, contents, compresslevel=9)


main(sys.argv[1], sys.argv[2], sys.argv[3:])
