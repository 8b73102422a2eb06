"""The rendered manifests, carried out: a job trains to its end, while aggregators are rolled, nodes are
drained or lost, and workers go; with mTLS, and always with the bits of a job without."""

import re
import subprocess
import sys
from pathlib import Path

import manifests
import pods
import pytest

STEPS = 200
TRAINING = ["/usr/bin/signpost", "demo-worker", "--text=/usr/share/common-licenses/GPL-3"]
TRAINING += ["--batch=1", f"--steps={STEPS}", "--freeze-step=30"]
TRAINING += ["--checkpoint-dir=/checkpoints", "--checkpoint-every=40", "--resume-if-any"]
WORKERS = 3


@pytest.fixture(scope="module")
def image(tmp_path_factory):
    reason = pods.why_not()
    if reason:
        pytest.skip(reason)
    directory = tmp_path_factory.mktemp("image")
    [wheel] = Path("client/python").glob("signpost-*.whl")
    subprocess.run(
        [sys.executable, "deploy/unpack_program.py", wheel, directory / "program"], check=True
    )
    subprocess.run(
        ["deploy/image_root.sh", directory / "program", directory / "root"], check=True
    )
    return str(directory / "root")


def cluster_of(overlay, image, directory):
    documents = manifests.render(f"--overlay={overlay}", f"--workers={WORKERS}", "--", *TRAINING)
    return pods.Cluster(documents, image, directory)


@pytest.fixture
def cluster(image, tmp_path):
    """Production's, with mTLS."""
    cluster = cluster_of("production", image, tmp_path)
    cluster.add_certificates("demo")
    yield cluster
    cluster.close()


def step_of(pod):
    """The newest that rank 0 has spoken of."""
    steps = re.findall(r"^step (\d+)  loss", pod.text(), re.MULTILINE)
    return int(steps[-1]) if steps else 0


def train(cluster, until_step):
    """Starts the job and returns when it has made so many steps."""
    cluster.start_aggregators()
    cluster.start_workers()
    rank_0 = cluster.workers()[0]
    pods.wait_until(
        lambda: step_of(rank_0) >= until_step or not rank_0.is_running(), f"step {until_step}"
    )
    assert rank_0.is_running(), rank_0.text()


def digest(cluster):
    """Of the parameters at the end, at which no worker may have failed."""
    for worker in cluster.workers():
        assert worker.wait() == 0, worker.text()
    (digest,) = re.findall(r"CRC-32C is (\w+)", cluster.workers()[0].text())
    return digest


@pytest.fixture(scope="module")
def undisturbed(image, tmp_path_factory):
    """What all jobs here must end with: dev's, without TLS."""
    cluster = cluster_of("dev", image, tmp_path_factory.mktemp("undisturbed"))
    try:
        train(cluster, until_step=1)
        result = digest(cluster)
        for aggregator in cluster.aggregators():
            assert aggregator.terminate() == 0, aggregator.text()
        return result
    finally:
        cluster.close()


def expect_progress(cluster, within_s):
    """Workers find an aggregator at its new address, and go on."""
    rank_0 = cluster.workers()[0]
    step = step_of(rank_0)
    pods.wait_until(lambda: step_of(rank_0) > step, f"a step after {step}", within_s)


def expect_alive(cluster):
    running = [aggregator for aggregator in cluster.aggregators() if aggregator.is_running()]
    assert running
    for aggregator in running:
        assert aggregator.probe("livenessProbe"), aggregator.text()


def test_rolling_all_aggregators_changes_nothing(cluster, undisturbed):
    """As an update does, and who drains all nodes: one at a time, when the one before is ready."""
    train(cluster, until_step=20)
    for aggregator in reversed(cluster.aggregators()):
        assert cluster.may_evict(aggregator)
        assert aggregator.terminate() == 0, aggregator.text()
        assert not any(cluster.may_evict(other) for other in cluster.aggregators())
        expect_alive(cluster)  # whom the kubelet would otherwise kill for waiting
        cluster.replace(aggregator).await_ready()
        expect_progress(cluster, within_s=15)
        expect_alive(cluster)
    assert digest(cluster) == undisturbed


def test_a_lost_node_changes_nothing(cluster, undisturbed):
    train(cluster, until_step=50)
    lost = cluster.aggregators()[1]
    lost.kill()
    cluster.replace(lost).await_ready()
    expect_progress(cluster, within_s=25)  # 10 of them until silence is taken for a loss
    assert digest(cluster) == undisturbed


def test_network_policies_are_what_the_job_needs(cluster):
    train(cluster, until_step=1)
    aggregator, other = cluster.aggregators()
    worker, neighbour = cluster.workers()[:2]
    assert cluster.connects(worker, aggregator.address, 4000)
    for port in (22, 53, 4001):
        assert not cluster.connects(worker, aggregator.address, port)
    assert not cluster.connects(worker, neighbour.address, 4000)
    assert not cluster.connects(aggregator, other.address, 4000)
    assert not cluster.connects(aggregator, pods.DNS_ADDRESS, 53)
    expect_progress(cluster, within_s=30)


def test_prometheus_scrapes_and_nobody_else(image, tmp_path):
    cluster = cluster_of("monitoring", image, tmp_path)
    try:
        cluster.add_certificates("demo")
        cluster.start_aggregators()
        name = {"app.kubernetes.io/name": "prometheus"}
        prometheus = cluster.add_guest("monitoring", name)
        others = [cluster.add_guest("monitoring", {}), cluster.add_guest("default", name)]
        for aggregator in cluster.aggregators():
            (port,) = [
                p["containerPort"] for p in aggregator.container["ports"] if p["name"] == "metrics"
            ]
            url = f"http://{aggregator.address}:{port}/metrics"
            script = f"import urllib.request as r; print(r.urlopen('{url}', timeout=10).read())"
            asked = ["ip", "netns", "exec", prometheus.space, "/usr/bin/python3", "-c", script]
            assert "signpost_tls_certificate_expiry_timestamp_seconds" in pods.run(asked).stdout
            assert not cluster.connects(prometheus, aggregator.address, 4000)
            for other in others:
                assert not cluster.connects(other, aggregator.address, port)
    finally:
        cluster.close()


def test_who_has_no_certificate_of_the_job_is_not_answered(cluster):
    cluster.start_aggregators()
    aggregator = cluster.aggregators()[0]
    probe = ["ip", "netns", "exec", aggregator.space, manifests.SIGNPOST, "probe"]
    probe += [f"--aggregators={aggregator.address}:4000", "--timeout=2s"]
    assert pods.run(probe + ["--tls-dir", cluster.secret("demo-worker-tls")]).returncode == 0
    assert pods.run(probe + ["--insecure-i-understand"], check=False).returncode != 0


def test_an_aggregator_with_a_broken_secret_is_not_ready_and_not_ended(cluster, undisturbed):
    """Nor is one whose certificate has expired: whoever is connected goes on."""
    train(cluster, until_step=20)
    secret = cluster.secret("demo-aggregator-tls")
    with open(f"{secret}/tls.crt", "w", encoding="utf-8") as file:
        file.write("no certificate\n")
    for aggregator in cluster.aggregators():
        assert not aggregator.probe("readinessProbe")
    expect_alive(cluster)
    expect_progress(cluster, within_s=30)
    assert digest(cluster) == undisturbed


def test_a_worker_that_is_evicted_fails_no_job(cluster, undisturbed):
    """It and the others end as the pod failure policy lets them come back, from the checkpoint."""
    train(cluster, until_step=100)
    worker = cluster.workers()[1]
    codes = [worker.terminate()] + [other.wait() for other in cluster.workers() if other != worker]
    assert codes == [75] * WORKERS, [pod.text() for pod in cluster.workers()]
    cluster.start_workers()
    assert digest(cluster) == undisturbed
    assert "going on from" in cluster.workers()[0].text()
