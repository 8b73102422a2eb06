"""Manifests as data: those that `signpost k8s render` writes, and what can be asked of them."""

import subprocess

import yaml

SIGNPOST = "cli/signpost"
OVERLAYS = ("dev", "local", "monitoring", "production")


def render(*arguments):
    """The documents that the command prints."""
    done = subprocess.run(
        [SIGNPOST, "k8s", "render", *arguments], stdout=subprocess.PIPE, check=True, text=True
    )
    return list(yaml.safe_load_all(done.stdout))


def load(path):
    with open(path) as file:
        return list(yaml.safe_load_all(file))


def of_kind(documents, kind):
    return [document for document in documents if document["kind"] == kind]


def the(documents, kind, suffix=""):
    """The only one of its kind whose name ends so."""
    (document,) = [d for d in of_kind(documents, kind) if d["metadata"]["name"].endswith(suffix)]
    return document


def pod_templates(documents):
    return [d["spec"]["template"] for d in documents if d["kind"] in ("StatefulSet", "Job")]


def selects(selector, labels):
    """A label selector of `matchLabels` only; an empty one selects all."""
    assert set(selector) <= {"matchLabels"}, selector
    return all(labels.get(key) == value for key, value in selector.get("matchLabels", {}).items())


def seconds(duration):
    """Of "30s", as the program's flags have durations here."""
    assert duration.endswith("s"), duration
    return int(duration[:-1])
