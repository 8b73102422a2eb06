"""Tests in Python, by pytest."""

def python_test(name, package = None, data = [], tags = [], **kwargs):
    """Runs a file of tests; each test function is a case.

    Args:
        name: name of the target. In //client/python the file is tests/NAME.py, elsewhere NAME.py.
        package: target in //client/python with the Python package "signpost" that the tests import. None means
            "package" in //client/python, and no package elsewhere.
        data: files that the tests read or run.
        tags: tags of the target; "python" is added.
        **kwargs: other attributes of sh_test.
    """
    is_sdk = native.package_name() == "client/python"
    if is_sdk and not package:
        package = "package"
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
