"""The alert rules, the dashboard and the documents, held against promtool and against what an aggregator tells
while it serves a training."""

import json
import os
import re
import shutil
import subprocess
import time
import urllib.request

import pytest

PROGRAM = "cli/signpost"
HERE = "deploy/monitoring/"
# ./signpost test gets it out of Debian's package, which would start a server if it were installed.
PROMTOOL = shutil.which("promtool") or "third_party/promtool/promtool"

# Of targets, by Prometheus itself.
BUILT_IN = {"up"}
WORDS = re.compile(r"\b(?:signpost|process)_\w+|\bup\b")


def read(path):
    with open(path) as file:
        return file.read()


def promtool(*arguments, **options):
    if not os.path.exists(PROMTOOL):
        pytest.skip("there is no promtool; ./signpost test gets one")
    run = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, **options)
    assert run.returncode == 0, run.stdout + run.stderr
    return run.stdout


def start(*arguments, **environment):
    return subprocess.Popen(
        [PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    )


def rank_of(job, rank, aggregator, directory, certificates):
    return start(
        *("demo-worker --hidden 8 --layers 1 --steps 100000".split()),
        *("--results", directory),
        SIGNPOST_AGGREGATORS=aggregator,
        SIGNPOST_TLS_DIR=f"{certificates}/worker",
        SIGNPOST_JOB=job,
        SIGNPOST_RANK=str(rank),
        SIGNPOST_WORLD_SIZE="2",
    )


def get(address, path="/metrics"):
    with urllib.request.urlopen(f"http://{address}{path}", timeout=10) as answer:
        return answer.read().decode()


@pytest.fixture(scope="module")
def scrape(tmp_path_factory):
    """Of an aggregator with a job that trains, in one bit, and one that waits for its second rank."""
    directory = str(tmp_path_factory.mktemp("job"))
    certificates = str(tmp_path_factory.mktemp("certificates"))
    assert start("cert", "init", certificates).wait() == 0
    aggregator = start(
        *("aggregator", "--metrics-listen=127.0.0.1:0", "--state-dir", directory),
        SIGNPOST_TLS_DIR=f"{certificates}/aggregator",
    )
    processes = [aggregator]
    try:
        target = aggregator.stdout.readline().split()[-1]
        metrics = aggregator.stdout.readline().split()[-1]
        processes += [rank_of("train", rank, target, directory, certificates) for rank in (0, 1)]
        processes += [rank_of("wait", 0, target, directory, certificates)]
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline:
            text = get(metrics)
            if (
                'answer_norm{shard="0",job_name="train"' in text
                and 'for{shard="0",job_name="wait"' in text
            ):
                return text
        pytest.fail("no one-bit rounds within a minute:\n" + text)
    finally:
        for process in processes:
            process.kill()
            process.wait()


def names_in(text):
    """Of metrics; a histogram's series are one metric."""
    names = set()
    for word in WORDS.findall(text):
        names.add(re.sub(r"(_seconds)_(bucket|sum|count)$", r"\1", word))
    return names - BUILT_IN


def metrics_of(scrape):
    return set(re.findall(r"^# TYPE (\S+) ", scrape, re.MULTILINE))


def alert_expressions():
    expressions = re.findall(
        r"^        expr:(.*?)^        (?:for|labels):", read(HERE + "alerts.yaml"), re.M | re.S
    )
    assert len(expressions) == len(alerts())
    return expressions


def alerts():
    return re.findall(r"- alert: (\w+)", read(HERE + "alerts.yaml"))


def dashboard_expressions():
    dashboard = json.loads(read(HERE + "dashboard.json"))
    return [target["expr"] for panel in dashboard["panels"] for target in panel.get("targets", [])]


def test_a_scrape_is_as_prometheus_wants_it(scrape):
    assert promtool("check", "metrics", input=scrape) == ""


def test_each_metric_is_explained_and_no_other(scrape):
    table = read("docs/operations.md").split("## Metrics")[1].split("\n## ")[0]
    listed = re.findall(r"^\| (`.*?) \|", table, re.MULTILINE)
    explained = set(re.findall(r"`(\w+)`", " ".join(listed)))
    assert explained == metrics_of(scrape)


def test_alerts_speak_of_metrics_that_there_are(scrape):
    for expression in alert_expressions():
        assert names_in(expression) <= metrics_of(scrape), expression


def test_the_dashboard_speaks_of_metrics_that_there_are(scrape):
    assert len(dashboard_expressions()) > 10
    for expression in dashboard_expressions():
        assert names_in(expression) <= metrics_of(scrape), expression


def test_labels_that_are_asked_for_are_there(scrape):
    labels = set(re.findall(r'[{,](\w+)="', scrape)) | {"job", "instance"}
    values = set(re.findall(r'(\w+="[^"]*")', scrape))
    for expression in alert_expressions() + dashboard_expressions():
        for matcher in re.findall(r"\{(.*?)\}", expression):
            for label, operator, value in re.findall(r'(\w+)(=~|=)"(.*?)"', matcher):
                assert label in labels, expression
                if operator == "=" and label != "job":
                    assert f'{label}="{value}"' in values, expression


def test_rules_are_valid():
    assert "SUCCESS" in promtool("check", "rules", HERE + "alerts.yaml")


def test_alerts_fire_when_they_should():
    assert "SUCCESS" in promtool("test", "rules", HERE + "alerts_test.yaml")


def test_each_alert_is_tested_firing_and_silent():
    tested = re.findall(r"alertname: (\w+)\n +exp_alerts:( \[\])?", read(HERE + "alerts_test.yaml"))
    assert {name for name, silent in tested if silent} == set(alerts())
    assert {name for name, silent in tested if not silent} == set(alerts())


def test_the_dashboards_expressions_are_valid(tmp_path):
    rules = ["groups:", "  - name: dashboard", "    rules:"]
    for i, expression in enumerate(dashboard_expressions()):
        expression = expression.replace("$__rate_interval", "5m")
        rules += [f"      - record: expression_{i}", f"        expr: {json.dumps(expression)}"]
    (tmp_path / "rules.yaml").write_text("\n".join(rules))
    promtool("check", "rules", str(tmp_path / "rules.yaml"))


def test_the_dashboards_panels_are_told_apart():
    panels = json.loads(read(HERE + "dashboard.json"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert all(panel.get("description") or panel["type"] == "row" for panel in panels)


def test_each_alert_has_a_section_in_the_runbook_and_leads_to_it():
    sections = re.findall(r"^## (Signpost\w+)$", read("docs/runbook.md"), re.MULTILINE)
    assert sections == alerts()
    urls = re.findall(r"runbook_url: \S*docs/runbook.md#(\w+)", read(HERE + "alerts.yaml"))
    assert urls == [alert.lower() for alert in alerts()]


def test_each_section_says_what_it_means_and_how_to_look_and_mend():
    for section in re.split(r"^## Signpost", read("docs/runbook.md"), flags=re.MULTILINE)[1:]:
        for part in ("**Means**", "**Look**", "**Mend**"):
            assert part in section, section
