"""The aggregator's page in a real browser: what it shows of a training, and that it runs no script but its own.

Needs Debian's chromium. SIGNPOST_SCREENSHOTS=DIR keeps pictures of it."""

import base64
import json
import os
import re
import shutil
import subprocess
import time

import pytest

PROGRAM = "cli/signpost"
NASTY = "<img src=x onerror=alert(1)>\"'&lt;"


def start(*arguments, **environment):
    return subprocess.Popen(
        [PROGRAM, *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.DEVNULL,
        text=True,
        env={**os.environ, **environment},
    )


def rank_of(job, rank, aggregator, directory):
    return start(
        # In one bit from step 20 on. The variance that is frozen so early fits for the whole test: one window of text
        # a step makes noise of the gradients, and the learning rate changes little.
        *"demo-worker --hidden 64 --layers 2 --batch 1 --steps 100000 --freeze-step 20".split(),
        "--learning-rate=1e-5",
        *("--results", directory),
        SIGNPOST_AGGREGATORS=aggregator,
        SIGNPOST_JOB=job,
        SIGNPOST_RANK=str(rank),
        SIGNPOST_WORLD_SIZE="2",
    )


class Browser:
    """Chromium, by its DevTools protocol: messages in JSON, each with a zero byte behind it, on two pipes."""

    def __init__(self, directory):
        to_read, self.to = os.pipe()
        self.answers, to_write = os.pipe()
        flags = (
            "--headless=new --no-sandbox --disable-gpu --hide-scrollbars --remote-debugging-pipe"
        )
        self.process = subprocess.Popen(
            ["bash", "-c", f'exec chromium {flags} "$@" 3<&{to_read} 4>&{to_write}', "chromium"]
            + [f"--user-data-dir={directory}/browser", "about:blank"],
            pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            env={**os.environ, "HOME": directory},
        )
        os.close(to_read)
        os.close(to_write)
        self.read = b""
        self.number = 0
        self.session = None
        self.complaints = []
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self.session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log"):
            self.call(f"{domain}.enable")

    def call(self, method, **parameters):
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self.receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, answer
                return answer["result"]
            if answer["method"] in ("Log.entryAdded", "Runtime.exceptionThrown"):
                self.complaints.append(json.dumps(answer["params"]))

    def receive(self):
        while b"\0" not in self.read:
            piece = os.read(self.answers, 1 << 16)
            assert piece, "the browser has ended"
            self.read += piece
        message, self.read = self.read.split(b"\0", 1)
        return json.loads(message)

    def evaluate(self, expression):
        return self.call("Runtime.evaluate", expression=expression)["result"].get("value")

    def show(self, url, until):
        """Until that expression is true there; what the page is then."""
        self.complaints.clear()
        self.call("Page.navigate", url=url)
        return self.wait(until)

    def wait(self, until):
        deadline = time.monotonic() + 30
        while not self.evaluate(until):
            assert time.monotonic() < deadline, self.page() + str(self.complaints)
        return self.page()

    def page(self):
        return self.evaluate("document.documentElement.outerHTML")

    def picture(self, path, scheme, width, height):
        self.call(
            "Emulation.setDeviceMetricsOverride",
            **dict(width=width, height=height, deviceScaleFactor=1, mobile=False),
        )
        feature = {"name": "prefers-color-scheme", "value": scheme}
        self.call("Emulation.setEmulatedMedia", features=[feature])
        picture = base64.b64decode(self.call("Page.captureScreenshot")["data"])
        with open(path, "wb") as file:
            file.write(picture)
        return picture

    def end(self):
        self.process.kill()
        self.process.wait()
        os.close(self.to)
        os.close(self.answers)


class Aggregator:
    """With jobs of two ranks each, of which the first come, and both in 'bert'."""

    def __init__(self, directory, jobs, **environment):
        self.directory = directory
        self.process = start(
            *("aggregator", "--metrics-listen=127.0.0.1:0", "--state-dir", directory), **environment
        )
        target = self.process.stdout.readline().split()[-1]
        self.url = "http://" + self.process.stdout.readline().split()[-1]
        self.ranks = [rank_of(job, 0, target, directory) for job in jobs]
        self.ranks += [rank_of("bert", 1, target, directory)]

    def end(self):
        for process in [self.process, *self.ranks]:
            process.kill()
            process.wait()


@pytest.fixture(scope="module")
def aggregator(tmp_path_factory):
    if not shutil.which("chromium"):
        pytest.skip("there is no chromium: apt-get install --no-install-recommends chromium")
    # One that trains, and one that waits.
    started = Aggregator(str(tmp_path_factory.mktemp("job")), jobs=["bert", NASTY])
    yield started
    started.end()


# When it has drawn for some seconds.
DRAWN = """Array.from(document.querySelectorAll('[aria-label="Job bert"] polyline')).every(
    (line) => line.points.length > 3)
    && document.querySelectorAll("section").length == 2"""


@pytest.fixture(scope="module")
def browser(aggregator):
    started = Browser(aggregator.directory)
    yield started
    started.end()


@pytest.fixture(scope="module")
def shown(aggregator, browser):
    page = browser.show(aggregator.url, until=DRAWN)
    return page, list(browser.complaints)


def section(shown, name):
    page, complaints = shown
    found = re.search(rf'<section class="job" aria-label="Job {name}.*?</section>', page, re.S)
    assert found, page
    return found.group()


def test_it_shows_a_job_that_trains(shown):
    job = section(shown, "bert")
    figures = dict(re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", job))
    assert figures["Workers"] == "2 of 2"
    assert int(figures["Step"].replace(",", "")) > 20
    assert float(figures["Steps per second"]) > 0
    assert re.fullmatch(r"[\d.]+ [kM]?B/s", figures["Received"])
    assert float(figures["Compression"].split()[0]) > 20
    assert 0 < float(figures["Error / momentum"].split()[0]) < 5
    assert figures["Newest snapshot"].endswith(" ago")


def test_it_says_aloud_what_it_draws(shown):
    job = section(shown, "bert")
    assert len(re.findall(r"<svg [^>]*role=\"img\"[^>]* aria-label=", job)) == 5
    assert re.search(r'aria-label="Payloads, [^"]*now received [\d.]+ [kM]?B/s', job)
    time = r"[\d.]+ (µs|ms|s)"
    assert re.search(
        rf'aria-label="One round takes, [^"]*now to gather {time}, to average {time}, held for the disk {time};',
        job,
    )
    assert re.search(r'<meter [^>]*aria-label="rank [01]: \d+%"', job)


def test_it_says_whom_a_job_waits_for(shown):
    job = section(shown, "&lt;img")
    assert re.search(r"<dt>Waiting for</dt><dd[^>]*>rank 1, [\d.]+ (s|min)</dd>", job)
    assert '<dd class="bad">1 of 2</dd>' in job


def test_names_of_jobs_are_text(shown):
    page, complaints = shown
    assert "<h2>&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<img" not in page


def test_the_browser_has_nothing_to_complain_of(shown):
    page, complaints = shown
    assert 'class="up">live<' in page
    assert complaints == []


def test_other_scripts_do_not_run(aggregator, browser, shown):
    browser.show(aggregator.url, until=DRAWN)
    browser.evaluate(
        "document.body.append(Object.assign(document.createElement('script'), {textContent: 'document.title = 1'}))"
    )
    assert browser.wait("document.title.startsWith('Signpost shard')")
    assert any("Content Security Policy" in complaint for complaint in browser.complaints)


def test_it_can_be_seen(aggregator, browser, shown):
    pictures = os.environ.get("SIGNPOST_SCREENSHOTS", aggregator.directory)
    browser.show(aggregator.url, until=DRAWN)
    light = browser.picture(f"{pictures}/light.png", "light", width=1280, height=900)
    dark = browser.picture(f"{pictures}/dark.png", "dark", width=1280, height=900)
    narrow = browser.picture(f"{pictures}/narrow.png", "light", width=400, height=1400)
    assert len({light, dark, narrow}) == 3
    assert browser.evaluate("document.documentElement.scrollWidth") <= 400


@pytest.fixture
def hanging(tmp_path):
    """An aggregator whose third snapshot does not end, with a job."""
    directory = str(tmp_path)
    hangs = {"SIGNPOST_FAILPOINT": "snapshot.begun=sleep:1h@3"}
    started = Aggregator(directory, jobs=["bert"], **hangs)
    yield started
    started.end()


def test_it_says_that_a_job_waits_for_the_disk(browser, hanging):
    value = "document.querySelector('[aria-label=\"Job bert\"] dl div:nth-child(4) dd')"
    browser.show(hanging.url, until=f"{value} && {value}.textContent.startsWith('the disk, ')")
    figures = dict(re.findall(r"<dt>(.*?)</dt><dd[^>]*>(.*?)</dd>", browser.page()))
    assert re.fullmatch(r"the disk, [\d.]+ (ms|s)", figures["Waiting for"])


def test_it_says_so_when_the_aggregator_is_gone(aggregator, browser, shown):
    page = browser.show(aggregator.url, until=DRAWN)
    aggregator.process.kill()
    browser.wait("document.getElementById('link').className == 'down'")
    assert "no answer from the aggregator" in browser.page()
    assert section((browser.page(), []), "bert")  # what was known stays
