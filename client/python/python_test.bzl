"""Tests in Python, by pytest."""

def python_test(name, package = None, file = None, data = [], tags = [], **kwargs):
    """Runs a file of tests; each test function is a case.

    Args:
        name: of the target. In //client/python the file is tests/NAME.py, elsewhere NAME.py.
        package: name of the target in //client/python that has the Python package "signpost" to test. None: no
            package, or "package" in //client/python.
        file: another file than the one that the name says.
        data: what the test reads.
        tags: as of any test; "python" is added.
        **kwargs: as of sh_test.
    """
    is_sdk = native.package_name() == "client/python"
    if is_sdk and not package:
        package = "package"
    if not file:
        file = ("tests/%s.py" if is_sdk else "%s.py") % name
    native.sh_test(
        name = name,
        srcs = ["//client/python:tests/run.sh"],
        args = [package or "none", "$(location %s)" % file],
        data = data + [file, "//client/python:in_environment.sh"] +
               (["//client/python:" + package] if package else []),
        tags = ["python"] + tags,
        **kwargs
    )
