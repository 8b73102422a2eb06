"""Carries manifests out: each pod is a network namespace on a bridge, each container a process with the
image's file system, read-only, the manifest's command line, environment, mounts, user and probes, and
process number 1. Names are those that Kubernetes gives, looked up with a name server; network policies are
the packet filter's. What stands in for Kubernetes, and no more than that: no scheduler, no limits of
resources, no seccomp. Needs root."""

import contextlib
import copy
import math
import os
import re
import shlex
import shutil
import signal
import subprocess
import threading
import time

from manifests import SIGNPOST, of_kind, selects

# Bazel's has not what only root's has as a rule.
os.environ["PATH"] += ":/usr/sbin:/sbin"

# Pods' addresses are 10.97.0.1 and on, none of which is used twice.
DNS_ADDRESS = "10.96.0.10"
DEADLINE_S = 120


def run(command, check=True, **options):
    done = subprocess.run(
        command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, **options
    )
    if check and done.returncode != 0:
        raise AssertionError(f"{command} ended with {done.returncode}: {done.stdout}")
    return done


def why_not():
    """Why nothing can be carried out here; empty if it can."""
    if os.geteuid() != 0:
        return "network namespaces need root"
    probe = run("unshare --net --mount --pid --fork nft add table inet t", check=False, shell=True)
    return "" if probe.returncode == 0 else f"no namespaces here: {probe.stdout.strip()}"


def wait_until(condition, what, deadline_s=DEADLINE_S):
    end = time.monotonic() + deadline_s
    while not condition():
        assert time.monotonic() < end, f"{what} did not happen within {deadline_s} s"
        time.sleep(0.02)


class Network:
    """A bridge with a namespace for each pod, and the name server in one of its own."""

    def __init__(self, directory):
        self._prefix = f"pods{os.getpid()}"
        self._directory = directory
        self._records = os.path.join(directory, "records")
        self._count = 0
        self._spaces = []
        self._names = {}
        self.lock = threading.RLock()
        run(["ip", "netns", "add", self._hub])
        for command in ("link add bridge type bridge", "link set bridge up"):
            run(["ip", "-n", self._hub, *command.split()])
        # Bridges may hand packets to the packet filter of the namespace; there is none in it.
        self.names_space = self._add(DNS_ADDRESS)
        self._write()
        self._server = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.names_space]
            + ["/usr/bin/python3", "tests/pods/dns_server.py", DNS_ADDRESS, self._records],
            stdout=subprocess.PIPE,
        )
        assert self._server.stdout.readline() == b"ready\n"

    @property
    def _hub(self):
        return f"{self._prefix}-hub"

    def _add(self, address):
        self._count += 1
        space, port = f"{self._prefix}-{self._count}", f"port{self._count}"
        run(["ip", "netns", "add", space])
        self._spaces.append(space)
        run(
            ["ip", "link", "add", "eth0", "netns", space, "type", "veth"]
            + ["peer", "name", port, "netns", self._hub]
        )
        run(["ip", "-n", self._hub, "link", "set", port, "master", "bridge", "up"])
        for command in (
            f"address add {address}/11 dev eth0",
            "link set eth0 up",
            "link set lo up",
        ):
            run(["ip", "-n", space, *command.split()])
        return space

    def add(self):
        """A new namespace, and its address."""
        with self.lock:
            address = f"10.97.{self._count // 250}.{self._count % 250 + 1}"
            return self._add(address), address

    def remove(self, space):
        with self.lock:
            self._spaces.remove(space)
            run(["ip", "netns", "delete", space])

    def name(self, name, address):
        """The name is that address's from now on; None: there is no such name."""
        with self.lock:
            self._names.pop(name, None)
            if address is not None:
                self._names[name] = address
            self._write()

    def _write(self):
        with open(self._records + ".new", "w") as file:
            file.writelines(f"{name} {address}\n" for name, address in self._names.items())
        os.rename(self._records + ".new", self._records)

    def close(self):
        self._server.kill()
        self._server.wait()
        self._server.stdout.close()
        for space in self._spaces + [self._hub]:
            run(["ip", "netns", "delete", space], check=False)


def expand(text, environment):
    """Kubernetes' $(NAME), and $$ for a dollar before a parenthesis."""

    def value(match):
        if match.group(0).startswith("$$"):
            return match.group(0)[1:]
        return environment.get(match.group(1), match.group(0))

    return re.sub(r"\$\$\(\w+\)|\$\((\w+)\)", value, text)


def field(pod, path):
    match = re.fullmatch(r"metadata\.(labels|annotations)\['([^']+)'\]", path)
    assert match, path
    return pod.metadata[match.group(1)][match.group(2)]


class Pod:
    """One pod of one container, from start to end. A pod that is started again is another Pod."""

    def __init__(self, cluster, name, template, labels=None, annotations=None, claims=None):
        self.cluster = cluster
        self.name = name
        metadata = copy.deepcopy(template["metadata"])
        self.metadata = {
            "labels": {**metadata.get("labels", {}), **(labels or {})},
            "annotations": {**metadata.get("annotations", {}), **(annotations or {})},
        }
        self.spec = template["spec"]
        (self.container,) = self.spec["containers"]
        self.claims = claims or {}  # directory by volume's name
        self.lines = []
        self.ready_count = 0
        self._done = None

    @property
    def labels(self):
        return self.metadata["labels"]

    def environment(self):
        environment = {"PATH": "/usr/bin"}
        for entry in self.container.get("env", []):
            value = entry.get("value")
            if value is None:
                value = self._value_from(entry["valueFrom"])
            environment[entry["name"]] = value
        return environment

    def _value_from(self, source):
        if "fieldRef" in source:
            return field(self, source["fieldRef"]["fieldPath"])
        assert source == {"resourceFieldRef": {"resource": "requests.cpu"}}
        quantity = str(self.container["resources"]["requests"]["cpu"])
        if quantity.endswith("m"):
            return str(math.ceil(int(quantity[:-1]) / 1000))
        return quantity

    def command_line(self):
        words = self.container.get("command", ["/usr/bin/signpost"]) + self.container.get(
            "args", []
        )
        return [expand(word, self.environment()) for word in words]

    # Its life.

    def start(self):
        self.space, self.address = self.cluster.network.add()
        self.root = os.path.join(self.cluster.directory, "roots", f"{self.name}-{self.space}")
        self._tmp = self.root + ".tmp"
        os.makedirs(self.root)
        os.makedirs(self._tmp)
        self.cluster.apply_policies()
        self.process = subprocess.Popen(
            ["setpriv", "--pdeathsig", "KILL", "ip", "netns", "exec", self.space]
            + ["unshare", "--mount", "--pid", "--fork", "--kill-child", "sh", "-euc"]
            + [self._script()],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            env=self.environment(),
        )
        self._reader = threading.Thread(target=self._read)
        self._reader.start()

    def _script(self):
        """What the container's runtime does before it executes the command."""
        q = shlex.quote
        image, root, user = self.cluster.image, self.root, self.spec["securityContext"]
        lines = [
            "PATH=/usr/sbin:/usr/bin:/sbin:/bin",
            f"mount -t tmpfs tmpfs {q(root)}",
            f"cp -a {q(image)}/etc {q(root)}/",
            f"mkdir -p {q(root)}/usr {q(root)}/proc {q(root)}/dev {q(root)}/var/lib",
            f"cp -a {q(image)}/lib {q(image)}/lib64 {q(root)}/",
            f"mount --bind -o ro {q(image)}/usr {q(root)}/usr",
            f"mount -t proc proc {q(root)}/proc",
            f"mount --bind /dev {q(root)}/dev",
            f"printf %s {q(self._resolv_conf())} >{q(root)}/etc/resolv.conf",
            f"printf '127.0.0.1 localhost\\n{self.address} {self.name}\\n' >{q(root)}/etc/hosts",
        ]
        for mount in self.container["volumeMounts"]:
            target = root + mount["mountPath"]
            lines.append(f"mkdir -p {q(target)}")
            if self._is_memory(mount["name"]):
                lines.append(f"mount -t tmpfs -o mode=777 tmpfs {q(target)}")
            else:
                lines.append(f"mount --bind {q(self._source_of(mount['name']))} {q(target)}")
            if mount.get("readOnly"):
                lines.append(f"mount -o remount,bind,ro {q(target)}")
        assert self.container["securityContext"]["readOnlyRootFilesystem"]
        lines.append(f"mount -o remount,ro {q(root)}")
        ids = f"{user['runAsUser']}:{user['runAsGroup']}"
        command = " ".join(q(word) for word in self.command_line())
        lines.append(
            f"exec setpriv --no-new-privs --bounding-set -all,+setuid,+setgid,+sys_chroot "
            f"chroot --userspec={ids} --groups={user['fsGroup']} {q(root)} {command}"
        )
        return "\n".join(lines)

    def _resolv_conf(self):
        zone = self.cluster.zone
        return (
            f"nameserver {DNS_ADDRESS}\nsearch {zone} svc.cluster.local cluster.local\n"
            "options ndots:5\n"
        )

    def _is_memory(self, name):
        return {"name": name, "emptyDir": {"medium": "Memory"}} in self.spec.get("volumes", [])

    def _source_of(self, name):
        if name in self.claims:
            return self.claims[name]
        (volume,) = [v for v in self.spec["volumes"] if v["name"] == name]
        if "persistentVolumeClaim" in volume:
            return self.cluster.volume(volume["persistentVolumeClaim"]["claimName"])
        if "secret" in volume:
            return self.cluster.secret(volume["secret"]["secretName"])
        assert volume == {"name": name, "emptyDir": {}}
        os.chmod(self._tmp, 0o777)
        return self._tmp

    def _read(self):
        for line in self.process.stdout:
            self.lines.append(line.rstrip("\n"))
        self.process.stdout.close()

    def _init(self):
        """The number of the container's first process; ProcessLookupError: there is none."""
        children = f"/proc/{self.process.pid}/task/{self.process.pid}/children"
        with contextlib.suppress(FileNotFoundError), open(children) as file:
            for child in file.read().split():
                return int(child)
        raise ProcessLookupError(f"{self.name} runs no container")

    def probe(self, name):
        """Whether that probe succeeds now: executed in the container, as the kubelet does, or a
        connection to the pod's address, which policies do not keep the kubelet from."""
        probe = self.container[name]
        try:
            init = self._init()
        except ProcessLookupError:
            return False
        if "tcpSocket" in probe:
            (port,) = [
                p["containerPort"]
                for p in self.container["ports"]
                if p["name"] == probe["tcpSocket"]["port"]
            ]
            return self.cluster.connects(self, self.address, port)
        user = self.spec["securityContext"]
        done = run(
            ["nsenter", "--target", str(init), "--mount", "--net", "--pid", "--root"]
            + [f"--setuid={user['runAsUser']}", f"--setgid={user['runAsGroup']}"]
            + probe["exec"]["command"],
            check=False,
            env=self.environment(),
            timeout=probe["timeoutSeconds"] + 10,
        )
        return done.returncode == 0

    def is_running(self):
        return self.process.poll() is None

    def await_ready(self):
        """Startup, then readiness and liveness, as far as they are asked for."""
        for name in ("startupProbe", "readinessProbe", "livenessProbe"):
            wait_until(
                lambda: self.probe(name) or not self.is_running(),
                f"{name} of {self.name}",
            )
            assert self.is_running(), f"{self.name} ended: {self.text()}"

    def terminate(self):
        """SIGTERM to process 1, and the grace period; returns the exit code."""
        os.kill(self._init(), signal.SIGTERM)
        return self.wait(self.spec["terminationGracePeriodSeconds"])

    def wait(self, deadline_s=DEADLINE_S):
        try:
            self.process.wait(deadline_s)
        except subprocess.TimeoutExpired:
            self.kill()
            raise AssertionError(f"{self.name} did not end within {deadline_s} s: {self.text()}")
        return self._end()

    def kill(self):
        """The node is gone: nothing gets out any more, and the process is no more."""
        run(["ip", "-n", self.space, "link", "set", "eth0", "down"])
        with contextlib.suppress(ProcessLookupError):
            os.kill(self._init(), signal.SIGKILL)
        self.process.wait()
        return self._end()

    def _end(self):
        if self._done is None:
            self._done = self.process.returncode
            self._reader.join()
            self.cluster.network.remove(self.space)
        return self._done

    def text(self):
        return "\n".join(self.lines)


class Guest:
    """A pod of another namespace, as far as others see it: where it is, and what it is called."""

    def __init__(self, network, namespace, labels):
        self.space, self.address = network.add()
        self.namespace = {"kubernetes.io/metadata.name": namespace}
        self.labels = labels


class Cluster:
    """What a namespace's manifests become."""

    def __init__(self, documents, image, directory):
        self.documents = documents
        self.image = image
        self.directory = str(directory)
        self.namespace = of_kind(documents, "Namespace")[0]["metadata"]["name"]
        self.zone = f"{self.namespace}.svc.cluster.local"
        self.secrets = {}  # directory by name
        self.pods = {}
        self.guests = []
        self.network = Network(self.directory)

    def close(self):
        for pod in list(self.pods.values()):
            if pod.is_running():
                pod.kill()
            else:
                pod.wait()
        self.network.close()

    def volume(self, name):
        path = os.path.join(self.directory, "volumes", name)
        os.makedirs(path, exist_ok=True)
        os.chown(path, 0, 65532)  # as fsGroup has it
        os.chmod(path, 0o2770)
        return path

    def add_certificates(self, job):
        """As cert-manager would: a secret for each role, of which pods may read three files."""
        made = os.path.join(self.directory, "certificates")
        run([SIGNPOST, "cert", "init", made, "--job", job])
        for role in ("aggregator", "worker", "admin", "observer"):
            secret = os.path.join(self.directory, "secrets", role)
            os.makedirs(secret)
            for name in ("ca.crt", "tls.crt", "tls.key"):
                shutil.copyfile(f"{made}/{role}/{name}", f"{secret}/{name}")
                os.chown(f"{secret}/{name}", 0, 65532)  # as fsGroup and defaultMode have it
                os.chmod(f"{secret}/{name}", 0o440)
            self.secrets[f"{job}-{role}-tls"] = secret

    def secret(self, name):
        return self.secrets[name]

    def start_aggregators(self):
        for statefulset in of_kind(self.documents, "StatefulSet"):
            for index in range(statefulset["spec"]["replicas"]):
                self.start_aggregator(statefulset, index)
        for pod in self.aggregators():
            pod.await_ready()

    def aggregators(self):
        return [p for p in self.pods.values() if "apps.kubernetes.io/pod-index" in p.labels]

    def workers(self):
        key = "batch.kubernetes.io/job-completion-index"
        return [p for p in self.pods.values() if key in p.metadata["annotations"]]

    def start_aggregator(self, statefulset, index):
        spec = statefulset["spec"]
        name = f"{statefulset['metadata']['name']}-{index}"
        claims = {
            claim["metadata"]["name"]: self.volume(f"{claim['metadata']['name']}-{name}")
            for claim in spec["volumeClaimTemplates"]
        }
        pod = Pod(
            self,
            name,
            spec["template"],
            labels={
                "apps.kubernetes.io/pod-index": str(index),
                "statefulset.kubernetes.io/pod-name": name,
            },
            claims=claims,
        )
        self._start(pod)
        # Whether it is ready or not: publishNotReadyAddresses.
        service = spec["serviceName"]
        self.network.name(f"{name}.{service}.{self.zone}", pod.address)
        return pod

    def start_workers(self):
        (job,) = of_kind(self.documents, "Job")
        for index in range(job["spec"]["completions"]):
            pod = Pod(
                self,
                f"{job['metadata']['name']}-{index}",
                job["spec"]["template"],
                annotations={"batch.kubernetes.io/job-completion-index": str(index)},
            )
            self._start(pod)

    def _start(self, pod):
        self.pods[pod.name] = pod
        pod.start()

    def replace(self, pod):
        """As the StatefulSet's controller: the same name, index and volume, and another address."""
        (statefulset,) = of_kind(self.documents, "StatefulSet")
        new = self.start_aggregator(statefulset, int(pod.labels["apps.kubernetes.io/pod-index"]))
        assert new.address != pod.address
        return new

    def may_evict(self, pod):
        """What the disruption budget says to who drains a node."""
        for budget in of_kind(self.documents, "PodDisruptionBudget"):
            if not selects(budget["spec"]["selector"], pod.labels):
                continue
            matching = [
                p for p in self.pods.values() if selects(budget["spec"]["selector"], p.labels)
            ]
            unready = [p for p in matching if not (p.is_running() and p.probe("readinessProbe"))]
            if len(unready) >= budget["spec"]["maxUnavailable"]:
                return False
        return True

    def add_guest(self, namespace, labels):
        self.guests.append(Guest(self.network, namespace, labels))
        self.apply_policies()
        return self.guests[-1]

    # Network policies.

    def apply_policies(self):
        pods = [pod for pod in self.pods.values() if getattr(pod, "address", None)]
        with self.network.lock:
            for pod in pods:
                if not hasattr(pod, "process") or pod.is_running():
                    rules = self._rules_for(pod, pods)
                    run(["ip", "netns", "exec", pod.space, "nft", "-f", "-"], input=rules)

    def _rules_for(self, pod, pods):
        policies = [
            policy["spec"]
            for policy in of_kind(self.documents, "NetworkPolicy")
            if selects(policy["spec"]["podSelector"], pod.labels)
        ]
        rules = ["table inet pods", "delete table inet pods", "table inet pods {"]
        for direction, hook, key, peer_key, address in (
            ("Ingress", "input", "ingress", "from", "saddr"),
            ("Egress", "output", "egress", "to", "daddr"),
        ):
            closed = any(direction in policy["policyTypes"] for policy in policies)
            rules.append(f"chain {hook} {{ type filter hook {hook} priority 0; policy ")
            rules[-1] += "drop;" if closed else "accept;"
            rules.append("ct state established,related accept")
            rules.append(f"{'iif' if hook == 'input' else 'oif'} lo accept")
            for rule in [rule for policy in policies for rule in policy.get(key, [])]:
                addresses = self._peers(rule[peer_key], pods)
                for port in rule["ports"] if addresses else []:
                    protocol = port.get("protocol", "TCP").lower()
                    rules.append(
                        f"ip {address} {{ {', '.join(sorted(addresses))} }} "
                        f"{protocol} dport {self._port(pod, port['port'])} accept"
                    )
            rules.append("}")
        return "\n".join(rules + ["}"])

    def _peers(self, peers, pods):
        addresses = set()
        for peer in peers:
            if "namespaceSelector" in peer:
                system = {"kubernetes.io/metadata.name": "kube-system"}
                if selects(peer["namespaceSelector"], system):
                    assert selects(peer["podSelector"], {"k8s-app": "kube-dns"})
                    addresses.add(DNS_ADDRESS)
                addresses |= {
                    guest.address
                    for guest in self.guests
                    if selects(peer["namespaceSelector"], guest.namespace)
                    and selects(peer["podSelector"], guest.labels)
                }
            else:
                addresses |= {p.address for p in pods if selects(peer["podSelector"], p.labels)}
        return addresses

    @staticmethod
    def _port(pod, port):
        """A name is one of the pod's own."""
        if isinstance(port, int):
            return port
        return {p["name"]: p["containerPort"] for p in pod.container["ports"]}[port]

    def connects(self, pod, address, port):
        """Whether a connection from the pod gets through."""
        script = f"import socket; socket.create_connection(('{address}', {port}), 1)"
        done = run(
            ["ip", "netns", "exec", pod.space, "/usr/bin/python3", "-c", script], check=False
        )
        return done.returncode == 0
