"""What `signpost k8s render` writes, held against Kubernetes' types and against itself."""

import os
import re
import shutil
import subprocess

import pytest
import strict_types
import yaml
from manifests import (
    OVERLAYS,
    SIGNPOST,
    load,
    of_kind,
    pod_templates,
    render,
    seconds,
    selects,
    the,
)

KUSTOMIZE = "deploy/kustomize"
EXAMPLES = [
    f"{KUSTOMIZE}/examples/{name}/{name}.yaml" for name in ("jobset", "kubeflow-trainer", "kueue")
]
# Other jobs than the default: all options, and so all lines of the templates.
JOBS = {
    "default": [],
    "large": ["--job=bert", "--namespace=nlp", "--workers=64", "--aggregators=16"]
    + ["--parameters=340000000", "--warm-up-codec=int8", "--min-workers=60", "--gpus=8"]
    + ["--storage-class=fast", "--worker-image=bert:1", "--", "python", "train.py"],
    "yes": ["--job=yes", "--namespace=null", "--storage-class=1"],
}

# Fields of resources that no package of types has, as their API types name them, as far as we use them:
# JobSet (api/jobset/v1alpha2/jobset_types.go), Kubeflow Trainer (pkg/apis/trainer/v1alpha1) and Kueue
# (apis/kueue/v1beta1) in their repositories. A value is a field's own fields, or
# None where it is not looked into.
OWN_FIELDS = {
    "JobSet": {
        "failurePolicy": {"maxRestarts": None},
        "replicatedJobs": {"name": None, "replicas": None, "template": {"spec": None}},
    },
    "TrainingRuntime": {
        "mlPolicy": {"numNodes": None},
        "template": {
            "spec": {
                "replicatedJobs": {
                    "name": None,
                    "template": {"metadata": {"labels": None}, "spec": None},
                }
            }
        },
    },
    "TrainJob": {
        "runtimeRef": {"apiGroup": None, "kind": None, "name": None},
        "trainer": {"numNodes": None},
    },
    "ResourceFlavor": {},
    "ClusterQueue": {
        "namespaceSelector": None,
        "resourceGroups": {
            "coveredResources": None,
            "flavors": {"name": None, "resources": {"name": None, "nominalQuota": None}},
        },
    },
    "LocalQueue": {"clusterQueue": None},
}


@pytest.fixture(scope="module", params=[(o, j) for o in OVERLAYS for j in JOBS], ids=str)
def documents(request):
    overlay, job = request.param
    return render("--overlay", overlay, *JOBS[job])


def types():
    if strict_types.packages() is None:
        pytest.skip("the npm packages of tests/pods/schemas are installed by ./signpost test")


def test_every_manifest_has_only_fields_that_kubernetes_knows(tmp_path):
    types()
    documents = [d for o in OVERLAYS for j in JOBS for d in render("--overlay", o, *JOBS[j])]
    assert strict_types.errors(documents, tmp_path) == []


@pytest.mark.parametrize(
    "kind, path, key, value",
    [
        ("StatefulSet", ["spec", "template", "spec", "containers", 0], "livenesProbe", {}),
        ("StatefulSet", ["spec"], "replicas", "2"),
        ("Job", ["spec", "podFailurePolicy", "rules", 0], "action", "Ignored"),
        ("NetworkPolicy", ["spec"], "policyType", ["Ingress"]),
        ("Certificate", ["spec"], "uriSANs", ["spiffe://a"]),
    ],
)
def test_a_planted_mistake_is_found(tmp_path, kind, path, key, value):
    types()
    document = of_kind(render(), kind)[0]
    place = document
    for step in path:
        place = place[step]
    place[key] = value
    assert len(strict_types.errors([document], tmp_path)) == 1


def jobs_within(document):
    """The spec of each Job that an operator's resource has in it."""
    spec = document.get("spec", {})
    if document["kind"] == "TrainingRuntime":
        spec = spec["template"]["spec"]
    return [job["template"]["spec"] for job in spec.get("replicatedJobs", [])]


def check_fields(value, fields, where):
    if fields is None:
        return
    for item in value if isinstance(value, list) else [value]:
        for key in item:
            assert key in fields, f"{where}.{key} is not documented"
            check_fields(item[key], fields[key], f"{where}.{key}")


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_have_only_documented_fields(path, tmp_path):
    types()
    typed = []
    for document in load(path):
        kind = document["kind"]
        if kind in OWN_FIELDS:
            assert set(document) <= {"apiVersion", "kind", "metadata", "spec"}
            check_fields(document.get("spec", {}), OWN_FIELDS[kind], kind)
            typed += [
                {"apiVersion": "batch/v1", "kind": "Job", "metadata": {}, "spec": spec}
                for spec in jobs_within(document)
            ]
        else:
            typed.append(document)
    assert typed or any(d["kind"] == "TrainJob" for d in load(path))
    assert strict_types.errors(typed, tmp_path) == []


@pytest.mark.parametrize("path", EXAMPLES)
def test_examples_have_productions_workers_and_no_aggregators(path):
    workers = the(render("--overlay=production"), "Job")["spec"]
    documents = load(path)
    specs = [spec for document in documents for spec in jobs_within(document)]
    specs += [document["spec"] for document in of_kind(documents, "Job")]
    assert [{k: v for k, v in spec.items() if k != "suspend"} for spec in specs] == [workers]
    assert "aggregator\n" not in yaml.safe_dump(of_kind(documents, "StatefulSet"))


def quantity(text):
    """Of processors, bytes or GPUs, as a number."""
    number, unit = re.fullmatch(r"(\d+)(m|Mi|)", str(text)).groups()
    return int(number) * {"m": 0.001, "Mi": 1 << 20, "": 1}[unit]


@pytest.mark.parametrize("options", [["--gpus=8"], ["--workers=64", "--worker-cpus=1500m"]])
def test_kueues_queue_has_room_for_all_workers_and_is_the_jobs_own(options, tmp_path):
    command = [SIGNPOST, "k8s", "render", "--job=bert", "--output", str(tmp_path), *options]
    subprocess.run(command, check=True)
    documents = load(f"{tmp_path}/examples/kueue/kueue.yaml")
    job = the(documents, "Job")
    requests = dict(job["spec"]["template"]["spec"]["containers"][0]["resources"]["requests"])
    limits = job["spec"]["template"]["spec"]["containers"][0]["resources"]["limits"]
    (group,) = the(documents, "ClusterQueue")["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    quotas = {r["name"]: quantity(r["nominalQuota"]) for r in flavor["resources"]}
    workers = job["spec"]["parallelism"]
    wanted = {name: quantity(value) * workers for name, value in {**limits, **requests}.items()}
    assert quotas == pytest.approx(wanted)
    assert set(group["coveredResources"]) == set(quotas)
    assert flavor["name"] == the(documents, "ResourceFlavor")["metadata"]["name"] == "bert"
    assert the(documents, "ClusterQueue")["metadata"]["name"] == "bert"
    queue = the(documents, "LocalQueue")
    assert queue["spec"]["clusterQueue"] == "bert"
    assert job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] == queue["metadata"]["name"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_kustomize_builds_what_render_prints(overlay, tmp_path):
    if shutil.which("kubectl") is None:
        pytest.skip("no kubectl")
    # It follows no links.
    tree = shutil.copytree(KUSTOMIZE, tmp_path / "kustomize")
    built = subprocess.run(
        ["kubectl", "kustomize", f"{tree}/overlays/{overlay}"],
        stdout=subprocess.PIPE,
        check=True,
        text=True,
    )

    def by_name(documents):
        return {(d["kind"], d["metadata"]["name"]): d for d in documents}

    assert by_name(yaml.safe_load_all(built.stdout)) == by_name(render("--overlay", overlay))


def test_every_object_is_in_the_namespace(documents):
    namespace = the(documents, "Namespace")
    for document in documents:
        if document is not namespace:
            assert document["metadata"]["namespace"] == namespace["metadata"]["name"]
    names = [(d["kind"], d["metadata"]["name"]) for d in documents]
    assert len(set(names)) == len(names)
    assert all(isinstance(name, str) for _, name in names)
    assert namespace["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "restricted"


def test_selectors_match_the_pods_that_they_mean(documents):
    aggregator = the(documents, "StatefulSet")["spec"]["template"]["metadata"]["labels"]
    worker = the(documents, "Job")["spec"]["template"]["metadata"]["labels"]
    for labels in (aggregator, worker):
        assert all(isinstance(value, str) for value in labels.values())
    selectors = [
        the(documents, "StatefulSet")["spec"]["selector"],
        {"matchLabels": the(documents, "Service")["spec"]["selector"]},
        the(documents, "PodDisruptionBudget")["spec"]["selector"],
    ]
    for selector in selectors:
        assert selects(selector, aggregator) and not selects(selector, worker)


def test_workers_dial_each_aggregator_by_the_name_that_it_has(documents):
    statefulset = the(documents, "StatefulSet")
    service = the(documents, "Service")
    assert statefulset["spec"]["serviceName"] == service["metadata"]["name"]
    assert service["spec"]["clusterIP"] == "None"
    (port,) = service["spec"]["ports"]
    (container,) = statefulset["spec"]["template"]["spec"]["containers"]
    ports = {p["name"]: p["containerPort"] for p in container["ports"]}
    assert port["port"] == ports[port["targetPort"]]
    assert f"--listen=0.0.0.0:{port['port']}" in container["args"]
    name = statefulset["metadata"]["name"]
    replicas = statefulset["spec"]["replicas"]
    expected = [f"{name}-{i}.{service['metadata']['name']}:{port['port']}" for i in range(replicas)]
    (worker,) = the(documents, "Job")["spec"]["template"]["spec"]["containers"]
    env = {e["name"]: e.get("value") for e in worker["env"]}
    assert env["SIGNPOST_AGGREGATORS"].split(",") == expected
    assert f"--shard=$(SHARD)/{replicas}" in container["args"]
    assert f"--max-workers={env['SIGNPOST_WORLD_SIZE']}" in container["args"]
    assert the(documents, "Job")["spec"]["completions"] == int(env["SIGNPOST_WORLD_SIZE"])


def test_workers_compute_with_as_many_threads_as_they_ask_for_processors(documents):
    (worker,) = the(documents, "Job")["spec"]["template"]["spec"]["containers"]
    (threads,) = [e["valueFrom"] for e in worker["env"] if e["name"] == "OMP_NUM_THREADS"]
    assert threads == {"resourceFieldRef": {"resource": "requests.cpu"}}
    assert float(worker["resources"]["requests"]["cpu"]) >= 1


def test_workers_have_shared_memory_as_far_as_their_memory_goes(documents):
    """DataLoader workers die of a container's own, which has 64 MiB."""
    pod = the(documents, "Job")["spec"]["template"]["spec"]
    (worker,) = pod["containers"]
    (name,) = [m["name"] for m in worker["volumeMounts"] if m["mountPath"] == "/dev/shm"]
    assert {"name": name, "emptyDir": {"medium": "Memory"}} in pod["volumes"]


def test_what_pods_refer_to_is_there(documents):
    names = {(d["kind"], d["metadata"]["name"]) for d in documents}
    secrets = {c["spec"]["secretName"] for c in of_kind(documents, "Certificate")}
    statefulset = the(documents, "StatefulSet")
    for template in pod_templates(documents):
        spec = template["spec"]
        assert ("ServiceAccount", spec["serviceAccountName"]) in names
        volumes = {volume["name"] for volume in spec.get("volumes", [])}
        if template is statefulset["spec"]["template"]:
            volumes |= {c["metadata"]["name"] for c in statefulset["spec"]["volumeClaimTemplates"]}
        (container,) = spec["containers"]
        assert {mount["name"] for mount in container["volumeMounts"]} == volumes
        for volume in spec.get("volumes", []):
            if "persistentVolumeClaim" in volume:
                claim = volume["persistentVolumeClaim"]["claimName"]
                assert ("PersistentVolumeClaim", claim) in names
            if "secret" in volume and secrets:
                assert volume["secret"]["secretName"] in secrets
            assert "configMap" not in volume


def test_pods_have_no_rights(documents):
    for template in pod_templates(documents):
        spec = template["spec"]
        assert spec["automountServiceAccountToken"] is False
        assert spec["securityContext"]["runAsNonRoot"] is True
        assert spec["securityContext"]["runAsUser"] > 0
        assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
        for container in spec["containers"]:
            assert container["securityContext"] == {
                "allowPrivilegeEscalation": False,
                "readOnlyRootFilesystem": True,
                "capabilities": {"drop": ["ALL"]},
            }
            assert container["resources"]["limits"]["memory"]


def test_aggregators_have_the_time_to_drain(documents):
    spec = the(documents, "StatefulSet")["spec"]
    pod = spec["template"]["spec"]
    (drain,) = [a for a in pod["containers"][0]["args"] if a.startswith("--drain-grace=")]
    assert pod["terminationGracePeriodSeconds"] >= 30 + seconds(drain.split("=")[1])
    assert spec["podManagementPolicy"] == "Parallel"
    assert the(documents, "PodDisruptionBudget")["spec"]["maxUnavailable"] == 1


def test_network_policies_let_through_what_is_needed_and_no_more(documents):
    statefulset = the(documents, "StatefulSet")["spec"]["template"]
    aggregator = statefulset["metadata"]["labels"]
    worker = the(documents, "Job")["spec"]["template"]["metadata"]["labels"]
    policies = [policy["spec"] for policy in of_kind(documents, "NetworkPolicy")]
    deny = {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    assert deny in policies
    into, *scraping = [
        rule
        for p in policies
        if selects(p["podSelector"], aggregator)
        for rule in p.get("ingress", [])
    ]
    assert into == {
        "from": [{"podSelector": {"matchLabels": worker}}],
        "ports": [{"port": "data"}],
    }
    assert len(scraping) == len(of_kind(documents, "PodMonitor"))
    out = [
        rule for p in policies if selects(p["podSelector"], worker) for rule in p.get("egress", [])
    ]
    port = statefulset["spec"]["containers"][0]["ports"][0]["containerPort"]
    data, names = out
    assert data == {"to": [{"podSelector": {"matchLabels": aggregator}}], "ports": [{"port": port}]}
    assert [p["port"] for p in names["ports"]] == [53, 53]
    # Aggregators dial nobody, and nobody dials workers.
    assert [
        rule for p in policies if selects(p["podSelector"], worker) for rule in p.get("ingress", [])
    ] == []
    assert [
        rule
        for p in policies
        if selects(p["podSelector"], aggregator)
        for rule in p.get("egress", [])
    ] == []


def test_what_is_scraped_is_a_port_that_pods_have_and_prometheus_may_dial():
    documents = render("--overlay=monitoring")
    monitor = the(documents, "PodMonitor")["spec"]
    template = the(documents, "StatefulSet")["spec"]["template"]
    assert selects(monitor["selector"], template["metadata"]["labels"])
    (endpoint,) = monitor["podMetricsEndpoints"]
    (container,) = template["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in container["ports"]}
    assert f"--metrics-listen=0.0.0.0:{ports[endpoint['port']]}" in container["args"]
    (rule,) = the(documents, "NetworkPolicy", "-metrics")["spec"]["ingress"]
    assert rule["ports"] == [{"port": endpoint["port"]}]


def alerts_text():
    with open("deploy/monitoring/alerts.yaml", encoding="utf-8") as file:
        return file.read()


def test_alerts_are_prometheus_own_and_find_what_is_scraped():
    documents = render("--overlay=monitoring")
    assert the(documents, "PrometheusRule")["spec"] == yaml.safe_load(alerts_text())
    (endpoint,) = the(documents, "PodMonitor")["spec"]["podMetricsEndpoints"]
    assert endpoint["relabelings"] == [{"targetLabel": "job", "replacement": "signpost"}]
    rules = [r for g in the(documents, "PrometheusRule")["spec"]["groups"] for r in g["rules"]]
    jobs = {job for rule in rules for job in re.findall(r'\bjob="([^"]*)"', rule["expr"])}
    assert jobs == {"signpost"}


def test_certificates_are_renewed_before_the_alert():
    (alert,) = re.findall(r"expiry_timestamp_seconds - time\(\) < (\d+) \* 86400", alerts_text())
    for overlay in ("production", "monitoring"):
        specs = [c["spec"] for c in of_kind(render(f"--overlay={overlay}"), "Certificate")]
        renewed = [s for s in specs if not s.get("isCA")]
        assert len(renewed) == 4
        for spec in renewed:
            left, lifetime = hours(spec["renewBefore"]), hours(spec["duration"])
            assert int(alert) * 24 < left < lifetime


def hours(duration):
    return int(re.fullmatch(r"(\d+)h", duration)[1])


def test_exit_codes_decide_whether_a_worker_comes_back(documents):
    rules = the(documents, "Job")["spec"]["podFailurePolicy"]["rules"]
    codes = {c: r["action"] for r in rules for c in r.get("onExitCodes", {}).get("values", [])}
    assert codes == {69: "Ignore", 75: "Ignore", 64: "FailJob", 76: "FailJob"}
    assert rules[0]["onPodConditions"] == [{"type": "DisruptionTarget", "status": "True"}]
    assert the(documents, "Job")["spec"]["template"]["spec"]["restartPolicy"] == "Never"


def test_only_dev_is_without_tls(documents):
    text = yaml.safe_dump_all(documents)
    insecure = "SIGNPOST_INSECURE_I_UNDERSTAND" in text
    assert insecure != ("SIGNPOST_TLS_DIR" in text)
    assert insecure == ("/etc/signpost/tls" not in text)


def test_certificates_say_role_and_job():
    documents = render("--overlay=production", "--job=bert", "--trust-domain=example.org")
    uris = [uri for c in of_kind(documents, "Certificate") for uri in c["spec"].get("uris", [])]
    roles = ("aggregator", "worker", "admin", "observer")
    assert uris == [f"spiffe://example.org/{role}/bert" for role in roles]


def test_the_program_takes_the_aggregators_arguments(tmp_path):
    """The dev overlay's: certificates are the others' affair."""
    container = the(render("--overlay=dev"), "StatefulSet")["spec"]["template"]["spec"][
        "containers"
    ][0]
    replaced = {"--listen": "127.0.0.1:0", "--state-dir": str(tmp_path / "state")}
    arguments = []
    for argument in container["args"]:
        flag = argument.split("=")[0]
        argument = f"{flag}={replaced[flag]}" if flag in replaced else argument
        arguments.append(argument.replace("$(SHARD)", "0"))
    aggregator = subprocess.Popen([SIGNPOST, *arguments], stdout=subprocess.PIPE, text=True)
    try:
        assert aggregator.stdout.readline().startswith("listening on 127.0.0.1:")
    finally:
        aggregator.terminate()
        assert aggregator.wait() == 0
        aggregator.stdout.close()


def test_every_file_is_of_some_kustomization():
    for directory, _, files in os.walk(KUSTOMIZE):
        if "kustomization.yaml" not in files:
            continue
        (kustomization,) = load(f"{directory}/kustomization.yaml")
        own = {name for name in kustomization["resources"] if name.endswith(".yaml")}
        assert own == set(files) - {"kustomization.yaml"}
