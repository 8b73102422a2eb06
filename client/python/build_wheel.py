"""Writes the wheel: build_wheel.py WHEEL LICENSE FILE...  (the binary distribution format, PEP 427)

The same inputs give the same bytes.
"""

import base64
import hashlib
import re
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import List, Tuple

TAG = "py3-none-linux_x86_64"

METADATA = """\
Metadata-Version: 2.1
Name: signpost
Version: {version}
Summary: Data-parallel training that sends one bit per parameter each way
License: Apache-2.0
Requires-Python: >=3.8
"""

WHEEL = f"""\
Wheel-Version: 1.0
Generator: signpost build_wheel
Root-Is-Purelib: false
Tag: {TAG}
"""

ENTRY_POINTS = """\
[console_scripts]
signpost = signpost._program:main
"""

# What the program writes of itself, and where a shell and man(1) look for it below share/.
SHARED = [
    (["man"], "man/man1/signpost.1"),
    (["completion", "bash"], "bash-completion/completions/signpost"),
    (["completion", "zsh"], "zsh/site-functions/_signpost"),
    (["completion", "fish"], "fish/vendor_completions.d/signpost.fish"),
]

Entry = Tuple[str, bytes, int]  # name in the archive, contents, mode


def package_entry(path: Path) -> Entry:
    """The package lies in `package`, as in the wheel."""
    parts = path.parts
    name = "/".join(parts[parts.index("package") + 1 :])
    return name, path.read_bytes(), 0o755 if name == "signpost/signpost" else 0o644


def shared_entries(program: str, version: str) -> List[Entry]:
    return [
        (
            f"signpost-{version}.data/data/share/{name}",
            subprocess.run([program, *arguments], check=True, stdout=subprocess.PIPE).stdout,
            0o644,
        )
        for arguments, name in SHARED
    ]


def version_of(entries: List[Entry]) -> str:
    [source] = [contents for name, contents, _ in entries if name == "signpost/__init__.py"]
    return re.search(r'^__version__ = "(.*)"$', source.decode(), re.MULTILINE)[1]


def record(entries: List[Entry], path: str) -> str:
    """A line for each entry: its name, digest and size."""
    lines = []
    for name, contents, _ in entries:
        digest = base64.urlsafe_b64encode(hashlib.sha256(contents).digest()).rstrip(b"=")
        lines.append(f"{name},sha256={digest.decode()},{len(contents)}\n")
    return "".join([*lines, f"{path},,\n"])


def main(wheel: str, licence: str, files: List[str]) -> None:
    entries = sorted(package_entry(Path(file)) for file in files)
    version = version_of(entries)
    if Path(wheel).name != f"signpost-{version}-{TAG}.whl":
        sys.exit(f"{wheel}: the package's version is {version}, its tag {TAG}")
    [program] = [file for file in files if file.endswith("/signpost/signpost")]
    entries += shared_entries(program, version)
    info = f"signpost-{version}.dist-info"
    for name, contents in [
        ("METADATA", METADATA.format(version=version).encode()),
        ("WHEEL", WHEEL.encode()),
        ("entry_points.txt", ENTRY_POINTS.encode()),
        ("LICENSE", Path(licence).read_bytes()),
    ]:
        entries.append((f"{info}/{name}", contents, 0o644))
    entries.append((f"{info}/RECORD", record(entries, f"{info}/RECORD").encode(), 0o644))

    with zipfile.ZipFile(wheel, "w", zipfile.ZIP_DEFLATED) as archive:
        for name, contents, mode in entries:
            member = zipfile.ZipInfo(name)  # of 1980, always
            member.external_attr = (0o100000 | mode) << 16
            member.compress_type = zipfile.ZIP_DEFLATED
            archive.writestr(member, contents)


main(sys.argv[1], sys.argv[2], sys.argv[3:])
