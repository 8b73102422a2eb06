"""Tests in Python, by pytest."""

def python_test(name, package = "package", data = [], tags = [], **kwargs):
    """Runs tests/<name>.py, with that package in its path; each test function is a case."""
    native.sh_test(
        name = name,
        srcs = ["tests/run.sh"],
        args = [package, "$(location tests/%s.py)" % name],
        data = ["tests/%s.py" % name, package] + data,
        tags = ["python"] + tags,
        **kwargs
    )
