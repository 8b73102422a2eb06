"""Takes the program, its libraries, manual, completions and licences out of a wheel: WHEEL DIRECTORY

The program finds its libraries in ../lib as well as where the wheel has them.
"""

import re
import sys
import zipfile
from pathlib import Path

# Paths in the wheel, and what they become.
PLACES = [
    (r"signpost/signpost", r"bin/signpost"),
    (r"signpost/(lib/.*)", r"\1"),
    (r"signpost-[^/]*\.data/data/(share/.*)", r"\1"),
    (r"signpost-[^/]*\.dist-info/(licenses/.*)", r"\1"),
]


def main(wheel: str, directory: str) -> None:
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            for pattern, place in PLACES:
                if re.fullmatch(pattern, member.filename):
                    path = Path(directory, re.sub(pattern, place, member.filename))
                    path.parent.mkdir(parents=True, exist_ok=True)
                    path.write_bytes(archive.read(member))
                    path.chmod(member.external_attr >> 16 & 0o777)


main(*sys.argv[1:])
