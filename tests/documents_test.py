"""What documents say that can be looked up: links, codes, messages, variables.

They point anywhere in the source tree, so this looks at the tree itself, in every run."""

import ctypes
import re
import subprocess
from pathlib import Path

import pytest

ROOT = Path("README.md").resolve().parent
PROGRAM = "cli/signpost"


def tree(*suffixes):
    return sorted(
        path
        for path in ROOT.rglob("*")
        if path.suffix in suffixes
        and not re.match(r"(\.|bazel-|signpost-demo)", str(path.relative_to(ROOT)))
    )


DOCUMENTS = [path for path in tree(".md") if "node_modules" not in path.parts]


def prose(path):
    """Without what is fenced off."""
    return re.sub(r"^```.*?^```", "", path.read_text(), flags=re.DOTALL | re.MULTILINE)


def anchors(path):
    """Of its headings, as GitHub makes them."""
    headings = re.findall(r"^#+ (.*)$", prose(path), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_there_are_documents():
    assert {"README.md", "errors.md", "faq.md", "SECURITY.md"} <= {path.name for path in DOCUMENTS}


@pytest.mark.parametrize("path", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_links_lead_somewhere(path):
    for link in re.findall(r"\]\(([^)\s]+)\)", prose(path)):
        if re.match(r"https?:", link):
            continue
        name, _, anchor = link.partition("#")
        target = (path.parent / name).resolve() if name else path
        assert target.exists(), link
        if anchor:
            assert anchor in anchors(target), link


def test_each_test_that_the_security_page_names_is_there():
    tests = set()
    for path in tree(".cc"):
        if path.name.endswith("_test.cc"):
            tests.update(re.findall(r"TEST(?:_F|_P)?\((\w+),\s*(\w+)\)", path.read_text()))
    page = prose(ROOT / "SECURITY.md")
    named = set(re.findall(r"\b([A-Z]\w+(?:Test)?)\.([A-Z]\w+[a-z]\w*)\b", page))
    assert len(named) > 30
    assert named <= tests, named - tests
    for directory, fuzzer in re.findall(r"\b(\w+)/(\w+_fuzzer)\b", page):
        assert (ROOT / directory / f"{fuzzer}.cc").exists(), fuzzer


ERRORS = ROOT / "docs/errors.md"


def rows():
    """The first table: [status, number, C, Python, exit code]."""
    table = ERRORS.read_text().partition("## From one to the other")[2].partition("\n\nThe ")[0]
    return [[cell.strip() for cell in line.split("|")[1:-1]] for line in table.splitlines()[4:]]


def test_the_table_of_codes_has_all_of_grpcs():
    assert [int(row[1]) for row in rows()] == list(range(17))


def test_the_table_of_codes_has_the_headers_names():
    header = (ROOT / "client/signpost.h").read_text()
    enum = header.partition("worth telling apart")[2].partition("};")[0]
    wanted = {name: int(number) for name, number in re.findall(r"(SIGNPOST_\w+) = (\d+)", enum)}
    assert {row[2].strip("`"): int(row[1]) for row in rows() if row[2]} == wanted


def test_the_table_of_codes_has_pythons_exceptions():
    source = (ROOT / "client/python/signpost/_errors.py").read_text()
    wanted = dict(re.findall(r"^    (\d+): (\w+),$", source, re.MULTILINE))
    table = {row[1]: row[3].strip("`") for row in rows()[1:]}
    assert {code: name for code, name in table.items() if name != "SignpostError"} == wanted


def test_the_table_of_codes_has_the_librarys_exit_codes():
    library = ctypes.CDLL("client/libsignpost.so")
    for row in rows():
        assert row[4].split(";")[0] == str(library.signpost_exit_code(int(row[1]))), row[0]


def test_each_exit_code_has_a_section():
    enum = re.findall(r"kExit\w+ = (\d+)", (ROOT / "proto/exit_code.h").read_text())
    assert re.findall(r"^### (\d+)$", ERRORS.read_text(), re.MULTILINE) == enum
    page = subprocess.run([PROGRAM, "man"], check=True, capture_output=True, text=True).stdout
    status = page.partition(".SH EXIT STATUS")[2].partition(".PP")[0]
    assert re.findall(r"^\\fB(\d+)\\fR$", status, re.MULTILINE) == enum


def sources():
    """All string literals, those joined that stand behind one another."""
    text = "\n".join(
        path.read_text()
        for path in tree(".cc", ".cu", ".h", ".py")
        if not re.search(r"(_test|/tests/.*)\.\w+$", str(path))
    )
    return re.sub(r'"\s*\n\s*f?"', "", text).replace('\\"', '"')


# Said by the system's libraries.
OTHERS = [
    "No such file or directory",
    "Address already in use",
    "Connection refused",
    "failed to connect to all addresses",
    "last error",
    "Tls handshake failed",
    "SSL routines",
    "certificate verify failed",
]


def runs_of_words(message):
    """What is the same in every message of this kind: no names, numbers, paths or flags."""
    for others in OTHERS:
        message = message.replace(others, "|")
    message = re.sub(r"'[^']*'(?!\w)|\([^()]*process \d+\)|\[[^]]*\]", "|", message)
    for run in re.split(r"[:;,?()|`]|\. |\S*[\d_/<>=.](?=\S)\S*|\S*\d\S*|--\S+", message):
        yield re.sub(r"^[\s,.]+|[\s,.]+$", "", run)


def is_said(words, text):
    """Whether the text has them, perhaps in pieces of two words and more."""
    if not words:
        return True
    return any(
        " ".join(words[:end]) in text and is_said(words[end:], text)
        for end in range(len(words), 1, -1)
    )


def test_quoted_messages_are_the_programs():
    text = sources()
    messages = re.findall(r"^```text\n(.*?)^```", ERRORS.read_text(), re.DOTALL | re.MULTILINE)
    lines = [line for message in messages for line in message.splitlines()]
    assert len(lines) > 40
    for line in lines:
        runs = [run.split() for run in runs_of_words(line)]
        assert [run for run in runs if len(run) >= 2], line
        for run in runs:
            # The first word may be a name; two words may be another message's.
            if len(run) >= 3 and not is_said(run, text) and not is_said(run[1:], text):
                raise AssertionError(f"nothing says {' '.join(run)!r} any more, of {line!r}")


def test_the_manual_has_every_variable_that_is_read():
    page = subprocess.run([PROGRAM, "man"], check=True, capture_output=True, text=True).stdout
    read = set()
    for path in tree(".cc", ".py"):
        if not re.search(r"_test\.|/tests/|/bench/|/benchmarks/", str(path)):
            read |= set(
                re.findall(
                    r'(?:env|envname|Variable|environ\.get)\("(SIGNPOST_\w+)"', path.read_text()
                )
            )
    assert len(read) > 10
    assert {name for name in read if f"\\fB{name}\\fR" not in page} == set()


def test_documents_and_images_have_the_version_that_is_built():
    [version] = re.findall('^VERSION = "(.*)"$', (ROOT / "proto/version.bzl").read_text(), re.MULTILINE)
    assert f"\n## {version}\n" in (ROOT / "CHANGELOG.md").read_text()
    named = {
        (str(path.relative_to(ROOT)), found)
        for path in [*DOCUMENTS, *tree(".yaml"), ROOT / "deploy/Dockerfile"]
        for found in re.findall(r"\bsignpost[:-](\d+\.\d+\.\d+)\b", path.read_text())
    }
    assert {path for path, _ in named} >= {"CHANGELOG.md", "docs/deployment.md", "deploy/Dockerfile"}
    assert {found for _, found in named} == {version}
