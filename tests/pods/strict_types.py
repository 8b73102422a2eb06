"""Checks manifests against the types of Kubernetes and of operators, where an unknown field is an error.

The types are TypeScript's, generated from Kubernetes' OpenAPI and the operators' CRDs (the npm packages
of schemas/package.json, which `./signpost test` installs). A manifest becomes a literal of its type: the
compiler then refuses fields that the type has not, values of another type, and names of enumerations that
there are not.
"""

import json
import os
import pwd
import re
import hashlib
import subprocess

HOME = pwd.getpwuid(os.getuid()).pw_dir


def packages():
    """Where the npm packages are that schemas/package-lock.json names, if they are installed."""
    with open("tests/pods/schemas/package-lock.json", "rb") as lock:
        digest = hashlib.sha256(lock.read()).hexdigest()[:16]
    directory = f"{HOME}/.cache/signpost/npm-{digest}/node_modules"
    return directory if os.path.exists(f"{directory}/typescript/bin/tsc") else None


# By API group, but for Kubernetes' own groups without a dot in them.
PACKAGES = {
    "cert-manager.io": "@kubernetes-models/cert-manager/cert-manager.io",
    "monitoring.coreos.com": "@kubernetes-models/prometheus-operator/monitoring.coreos.com",
    "networking.k8s.io": "kubernetes-models/networking.k8s.io",
}


def module_of(api_version, kind):
    group, _, version = api_version.rpartition("/")
    package = PACKAGES.get(group, f"kubernetes-models/{group}" if group else "kubernetes-models")
    return f"{package}/{version}/{kind}"


def errors(documents, directory):
    """What the compiler says, by document: "[index]: message". Works in the empty directory."""
    os.symlink(packages(), f"{directory}/node_modules")
    for index, document in enumerate(documents):
        kind = document["kind"]
        module = module_of(document["apiVersion"], kind)
        with open(f"{directory}/m{index}.ts", "w") as file:
            file.write(f'import type {{ I{kind} }} from "{module}";\n')
            file.write(f"export const manifest: I{kind} = {json.dumps(document, indent=1)};\n")
    done = subprocess.run(
        ["node", "node_modules/typescript/bin/tsc", "--noEmit", "--strict", "--skipLibCheck"]
        + ["--target", "es2022", "--module", "esnext", "--moduleResolution", "bundler"]
        + [f"m{index}.ts" for index in range(len(documents))],
        cwd=directory,
        stdout=subprocess.PIPE,
        text=True,
    )
    found = re.findall(r"^m(\d+)\.ts\(\d+,\d+\): error (.*)$", done.stdout, re.MULTILINE)
    assert bool(found) == (done.returncode != 0), done.stdout
    return [f"{documents[int(i)]['kind']} {i}: {message}" for i, message in found]
