#include "deploy/render.h"

#include <algorithm>

#include "absl/strings/ascii.h"
#include "absl/strings/escaping.h"
#include "absl/strings/match.h"
#include "absl/strings/numbers.h"
#include "absl/strings/str_cat.h"
#include "absl/strings/str_format.h"
#include "absl/strings/str_join.h"
#include "absl/strings/str_replace.h"
#include "absl/strings/str_split.h"
#include "absl/strings/string_view.h"
#include "absl/time/time.h"

namespace signpost::deploy {
namespace {

constexpr uint64_t kMiB = uint64_t{1} << 20;

// A StatefulSet's name and eleven characters of a revision are a label's value, of at most 63.
constexpr size_t kMaxJobBytes = 52 - absl::string_view("-aggregator").size();
constexpr size_t kMaxLabelBytes = 63;

// How long an aggregator may take to write its state: at a disk's worst.
constexpr uint64_t kStateBytesPerSecond = 20 * kMiB;
constexpr int kDrainGraceSeconds = 30;

constexpr char kGenerated[] =
    "# Written by `signpost k8s render`, which knows the numbers in it: see deploy/README.md.\n";

// What an overlay has of its own.
struct Overlay {
  const char* name;
  bool tls;
  bool spread;        // over nodes
  bool certificates;  // cert-manager's
  bool one_node;      // all pods are on
};
constexpr Overlay kOverlays[] = {
    {.name = "dev", .tls = false, .spread = false, .certificates = false, .one_node = false},
    {.name = "local", .tls = true, .spread = false, .certificates = false, .one_node = true},
    {.name = "production", .tls = true, .spread = true, .certificates = true, .one_node = false},
};

// Templates: "{word}" is replaced; where it stands for lines, they bring their own indentation.

constexpr char kNamespace[] = R"(apiVersion: v1
kind: Namespace
metadata:
  name: {namespace}
  labels:
    # No pod in here may have more rights than ours need.
    pod-security.kubernetes.io/enforce: restricted
    pod-security.kubernetes.io/warn: restricted
)";

constexpr char kServices[] = R"(apiVersion: v1
kind: ServiceAccount
metadata:
  name: {job}-aggregator
  namespace: {namespace}
  labels: {aggregator_labels}
automountServiceAccountToken: false
---
apiVersion: v1
kind: ServiceAccount
metadata:
  name: {job}-worker
  namespace: {namespace}
  labels: {worker_labels}
automountServiceAccountToken: false
---
# Gives each aggregator a name of its own, which it keeps when it is started again elsewhere.
apiVersion: v1
kind: Service
metadata:
  name: {job}-aggregator
  namespace: {namespace}
  labels: {aggregator_labels}
spec:
  clusterIP: None
  # Workers wait for aggregators that load their state; they need to find them meanwhile.
  publishNotReadyAddresses: true
  selector: {aggregator_labels}
  ports:
    - name: data
      port: {data_port}
      targetPort: data
---
# A job waits for each of its aggregators: nodes are drained one at a time.
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {job}-aggregator
  namespace: {namespace}
  labels: {aggregator_labels}
spec:
  maxUnavailable: 1
  selector:
    matchLabels: {aggregator_labels}
)";

constexpr char kNetworkPolicies[] = R"(# Nothing may talk to anything,
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: default-deny
  namespace: {namespace}
spec:
  podSelector: {}
  policyTypes: [Ingress, Egress]
---
# but workers to the aggregators of their job,
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {job}-aggregator
  namespace: {namespace}
  labels: {aggregator_labels}
spec:
  podSelector:
    matchLabels: {aggregator_labels}
  policyTypes: [Ingress]
  ingress:
    - from:
        - podSelector:
            matchLabels: {worker_labels}
      ports:
        - port: data
---
# whose names they look up.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {job}-worker
  namespace: {namespace}
  labels: {worker_labels}
spec:
  podSelector:
    matchLabels: {worker_labels}
  policyTypes: [Egress]
  egress:
    - to:
        - podSelector:
            matchLabels: {aggregator_labels}
      ports:
        - port: {data_port}
    - to:
        - namespaceSelector:
            matchLabels: {kubernetes.io/metadata.name: kube-system}
          podSelector:
            matchLabels: {k8s-app: kube-dns}
      ports:
        - port: 53
          protocol: UDP
        - port: 53
          protocol: TCP
)";

constexpr char kAggregators[] = R"(apiVersion: apps/v1
kind: StatefulSet
metadata:
  name: {job}-aggregator
  namespace: {namespace}
  labels: {aggregator_labels}
spec:
  serviceName: {job}-aggregator
  replicas: {aggregators}
  podManagementPolicy: Parallel
  selector:
    matchLabels: {aggregator_labels}
  template:
    metadata:
      labels: {aggregator_labels}
    spec:
      serviceAccountName: {job}-aggregator
      automountServiceAccountToken: false
      enableServiceLinks: false
      # SIGTERM has the state written down, {state} at most.
      terminationGracePeriodSeconds: {aggregator_grace}
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        fsGroup: 65532
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
{spread}      containers:
        - name: aggregator
          image: {image}
          args:
            - aggregator
            - --listen=0.0.0.0:{data_port}
            - --shard=$(SHARD)/{aggregators}
            - --state-dir=/var/lib/signpost/state
            - --drain-grace={drain_grace}s
            - --max-workers={workers}
            - --max-parameters={parameters}
{aggregator_security_args}          env:
            - name: SHARD
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
{security_env}          ports:
            - name: data
              containerPort: {data_port}
          # It listens once its state is loaded.
          startupProbe:
            exec:
              command: {probe}
            periodSeconds: 2
            timeoutSeconds: 5
            failureThreshold: {startup_failures}
          readinessProbe:
            exec:
              command: {probe}
            periodSeconds: 5
            timeoutSeconds: 5
            failureThreshold: 2
          livenessProbe:
            exec:
              command: {probe}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          resources:
            requests:
              cpu: "1"
              memory: {aggregator_memory}
            limits:
              memory: {aggregator_memory}
          securityContext: {container_security}
          volumeMounts:
            - name: state
              mountPath: /var/lib/signpost
{tls_mount}{aggregator_volumes}  volumeClaimTemplates:
    - metadata:
        name: state
        labels: {aggregator_labels}
      spec:
{storage_class_8}        accessModes: [ReadWriteOnce]
        resources:
          requests:
            storage: {aggregator_disk}
)";

constexpr char kWorkers[] =
    R"(# Seen by all workers. Two checkpoints, and the one that is being written.
apiVersion: v1
kind: PersistentVolumeClaim
metadata:
  name: {job}-checkpoints
  namespace: {namespace}
  labels: {worker_labels}
spec:
{storage_class_2}  accessModes: [{checkpoint_access}]
  resources:
    requests:
      storage: {checkpoint_disk}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job}-worker
  namespace: {namespace}
  labels: {worker_labels}
spec:
  completionMode: Indexed
  completions: {workers}
  parallelism: {workers}
  backoffLimit: {backoff_limit}
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      # Who is told to go somewhere else comes back,
      - action: Ignore
        onPodConditions:
          - type: DisruptionTarget
            status: "True"
      # and so does who was interrupted, or found no aggregator.
      - action: Ignore
        onExitCodes:
          containerName: worker
          operator: In
          values: [69, 75]
      # A wrong configuration stays wrong.
      - action: FailJob
        onExitCodes:
          containerName: worker
          operator: In
          values: [64]
  template:
    metadata:
      labels: {worker_labels}
    spec:
      restartPolicy: Never
      serviceAccountName: {job}-worker
      automountServiceAccountToken: false
      enableServiceLinks: false
      # SIGTERM has the step finished and the job left.
      terminationGracePeriodSeconds: 120
      securityContext:
        runAsNonRoot: true
        runAsUser: 65532
        runAsGroup: 65532
        fsGroup: 65532
        fsGroupChangePolicy: OnRootMismatch
        seccompProfile:
          type: RuntimeDefault
      containers:
        - name: worker
          image: {worker_image}
{worker_command}          env:
            - name: SIGNPOST_JOB
              value: {job_name}
            - name: SIGNPOST_AGGREGATORS
              value: {aggregator_addresses}
            - name: SIGNPOST_WORLD_SIZE
              value: "{workers}"
            - name: SIGNPOST_RANK
              valueFrom:
                fieldRef:
                  fieldPath: metadata.annotations['batch.kubernetes.io/job-completion-index']
{late_workers_env}            - name: HOME
              value: /tmp
{security_env}          resources:
            requests:
              cpu: {worker_cpus}
              memory: {worker_memory}
            limits:
              memory: {worker_memory}
{gpus}          securityContext: {container_security}
          volumeMounts:
            - name: checkpoints
              mountPath: /checkpoints
            - name: tmp
              mountPath: /tmp
{tls_mount}      volumes:
        - name: checkpoints
          persistentVolumeClaim:
            claimName: {job}-checkpoints
        - name: tmp
          emptyDir: {}
{tls_volume})";

constexpr char kSpread[] = R"(      affinity:
        podAntiAffinity:
          preferredDuringSchedulingIgnoredDuringExecution:
            # Not on a node where another aggregator takes the link's rate.
            - weight: 100
              podAffinityTerm:
                topologyKey: kubernetes.io/hostname
                labelSelector:
                  matchLabels: {app.kubernetes.io/component: aggregator}
      topologySpreadConstraints:
        - maxSkew: 1
          topologyKey: kubernetes.io/hostname
          whenUnsatisfiable: ScheduleAnyway
          labelSelector:
            matchLabels: {aggregator_labels}
)";

constexpr char kIssuers[] =
    R"(# An authority of this namespace's own. An issuer that you have can take the place of these three.
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  name: {job}-self-signed
  namespace: {namespace}
spec:
  selfSigned: {}
---
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {job}-authority
  namespace: {namespace}
spec:
  isCA: true
  commonName: {job}-authority
  secretName: {job}-authority
  duration: 87600h
  privateKey:
    algorithm: ECDSA
    size: 256
  issuerRef:
    group: cert-manager.io
    kind: Issuer
    name: {job}-self-signed
---
apiVersion: cert-manager.io/v1
kind: Issuer
metadata:
  name: {job}-authority
  namespace: {namespace}
spec:
  ca:
    secretName: {job}-authority
)";

constexpr char kCertificate[] = R"(---
# Secret {job}-{role}-tls: ca.crt, tls.crt and tls.key. Renewed while processes run.
apiVersion: cert-manager.io/v1
kind: Certificate
metadata:
  name: {job}-{role}
  namespace: {namespace}
spec:
  secretName: {job}-{role}-tls
  uris:
    - spiffe://{trust_domain}/{role}/{job}
  duration: 168h
  renewBefore: 56h
  usages: [digital signature, server auth, client auth]
  privateKey:
    algorithm: ECDSA
    size: 256
    rotationPolicy: Always
  issuerRef:
    group: cert-manager.io
    kind: Issuer
    name: {job}-authority
)";

constexpr char kTlsVolume[] = R"(        - name: tls
          secret:
            secretName: {job}-{role}-tls
            defaultMode: 0440
)";

constexpr char kTlsMount[] = R"(            - name: tls
              mountPath: /etc/signpost/tls
              readOnly: true
)";

constexpr char kTlsEnvironment[] = R"(            - name: SIGNPOST_TLS_DIR
              value: /etc/signpost/tls
)";

constexpr char kInsecureEnvironment[] = R"(            - name: SIGNPOST_INSECURE_I_UNDERSTAND
              value: "1"
)";

// Until `signpost aggregator` reads the variable.
constexpr char kInsecureArgument[] = "            - --insecure\n";

constexpr char kContainerSecurity[] =
    "{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}";

// By word, with its braces. What stands for one is not looked at again.
using Words = std::map<std::string, std::string>;

std::string Fill(absl::string_view text, const Words& words) {
  return absl::StrReplaceAll(text, words);
}

bool IsLabel(absl::string_view name) {
  const auto is_inner = [](char c) {
    return absl::ascii_islower(c) || absl::ascii_isdigit(c) || c == '-';
  };
  return !name.empty() && name.size() <= kMaxLabelBytes && name.front() != '-' &&
         name.back() != '-' && std::all_of(name.begin(), name.end(), is_inner);
}

absl::Status CheckLabel(absl::string_view flag, absl::string_view name, size_t most_bytes) {
  if (IsLabel(name) && name.size() <= most_bytes && !absl::ascii_isdigit(name.front())) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(absl::StrFormat(
      "%s is '%s', wanted a name as Kubernetes has them: at most %d of a-z, 0-9 and '-', beginning "
      "with a letter and not ending with '-'",
      flag, absl::CHexEscape(name), most_bytes));
}

// Lower-case labels with dots in between.
absl::Status CheckDomain(absl::string_view flag, absl::string_view name) {
  for (const absl::string_view label : absl::StrSplit(name, '.')) {
    if (!IsLabel(label)) {
      return absl::InvalidArgumentError(absl::StrFormat(
          "%s is '%s', wanted a name of a-z, 0-9, '-' and '.'", flag, absl::CHexEscape(name)));
    }
  }
  return absl::OkStatus();
}

absl::Status CheckImage(absl::string_view flag, absl::string_view image) {
  const auto may_be_in_image = [](char c) {
    return absl::ascii_isalnum(c) || absl::StrContains("._-/:@", c);
  };
  if (!image.empty() && image.size() <= 255 && absl::ascii_isalnum(image.front()) &&
      absl::ascii_isalnum(image.back()) &&
      std::all_of(image.begin(), image.end(), may_be_in_image)) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s', wanted an image such as registry.example/signpost:0.1.0", flag,
                      absl::CHexEscape(image)));
}

// In what `units` are, by name; none for what is no such quantity.
absl::Status CheckQuantity(absl::string_view flag, absl::string_view quantity,
                           const std::vector<absl::string_view>& units, uint64_t& number,
                           absl::string_view& unit) {
  const size_t digits =
      std::find_if_not(quantity.begin(), quantity.end(), absl::ascii_isdigit) - quantity.begin();
  unit = quantity.substr(digits);
  if (digits <= 9 && absl::SimpleAtoi(quantity.substr(0, digits), &number) && number > 0 &&
      std::find(units.begin(), units.end(), unit) != units.end()) {
    return absl::OkStatus();
  }
  return absl::InvalidArgumentError(
      absl::StrFormat("%s is '%s', wanted a whole number with a unit of Kubernetes: %s", flag,
                      absl::CHexEscape(quantity), absl::StrJoin(units, ", ")));
}

absl::StatusOr<uint64_t> ParseBytes(absl::string_view flag, absl::string_view quantity) {
  uint64_t number = 0;
  absl::string_view unit;
  if (absl::Status status = CheckQuantity(flag, quantity, {"Mi", "Gi", "Ti"}, number, unit);
      !status.ok()) {
    return status;
  }
  return number << (unit == "Mi" ? 20 : unit == "Gi" ? 30 : 40);
}

std::string Mebibytes(uint64_t bytes) { return absl::StrCat((bytes + kMiB - 1) / kMiB, "Mi"); }

// JSON's strings are YAML's.
std::string Quote(absl::string_view text) {
  std::string quoted = "\"";
  for (const unsigned char c : text) {
    if (c == '"' || c == '\\') quoted.push_back('\\');
    if (c < 0x20 || c == 0x7f) {
      absl::StrAppendFormat(&quoted, "\\u%04x", c);
    } else {
      quoted.push_back(static_cast<char>(c));
    }
  }
  quoted.push_back('"');
  return quoted;
}

// Kubernetes puts variables where it finds "$(NAME)".
std::string QuoteArgument(absl::string_view text) {
  return Quote(absl::StrReplaceAll(text, {{"$(", "$$("}}));
}

std::string WorkerCommand(const RenderOptions& options) {
  if (options.worker_command.empty()) {
    return "          args:\n"
           "            - demo-worker\n"
           "            - --text=/usr/share/common-licenses/GPL-3\n"
           "            - --checkpoint-dir=/checkpoints\n"
           "            - --checkpoint-every=100\n"
           "            - --resume-if-any\n";
  }
  std::string lines = "          command:\n";
  for (const std::string& argument : options.worker_command) {
    absl::StrAppend(&lines, "            - ", QuoteArgument(argument), "\n");
  }
  return lines;
}

std::string LateWorkersEnvironment(const RenderOptions& options) {
  if (options.min_workers == 0) return "";
  return absl::StrFormat(
      "            - name: SIGNPOST_MIN_WORKERS\n"
      "              value: \"%d\"\n"
      "            - name: SIGNPOST_ROUND_DEADLINE\n"
      "              value: %s\n",
      options.min_workers, Quote(options.round_deadline));
}

std::string AggregatorAddresses(const RenderOptions& options) {
  std::vector<std::string> addresses;
  for (uint32_t shard = 0; shard < options.size.aggregators; ++shard) {
    addresses.push_back(absl::StrFormat("%s-aggregator-%d.%s-aggregator:%d", options.job, shard,
                                        options.job, kDataPort));
  }
  return absl::StrJoin(addresses, ",");
}

std::string Labels(const RenderOptions& options, absl::string_view component) {
  return absl::StrFormat(
      "{app.kubernetes.io/name: signpost, app.kubernetes.io/instance: %s, "
      "app.kubernetes.io/component: %s}",
      Quote(options.job), component);
}

std::string StorageClass(const RenderOptions& options, absl::string_view indentation) {
  if (options.storage_class.empty()) return "";
  return absl::StrCat(indentation, "storageClassName: ", Quote(options.storage_class), "\n");
}

absl::Status Check(const RenderOptions& options) {
  absl::Status status = CheckLabel("--job", options.job, kMaxJobBytes);
  status.Update(CheckLabel("--namespace", options.name_space, kMaxLabelBytes));
  status.Update(CheckImage("--image", options.image));
  if (!options.worker_image.empty()) {
    status.Update(CheckImage("--worker-image", options.worker_image));
    if (options.worker_command.empty()) {
      status.Update(absl::InvalidArgumentError(
          "--worker-image without a command: the training program stands behind ' -- '"));
    }
  }
  uint64_t number = 0;
  absl::string_view unit;
  status.Update(CheckQuantity("--worker-cpus", options.worker_cpus, {"", "m"}, number, unit));
  if (!options.storage_class.empty()) {
    status.Update(CheckDomain("--storage-class", options.storage_class));
  }
  status.Update(CheckDomain("--trust-domain", options.trust_domain));
  absl::Duration deadline;
  if (!absl::ParseDuration(options.round_deadline, &deadline) || deadline <= absl::ZeroDuration()) {
    status.Update(absl::InvalidArgumentError(
        absl::StrFormat("--round-deadline is '%s', wanted a duration such as 2s",
                        absl::CHexEscape(options.round_deadline))));
  }
  if (options.min_workers > options.size.workers) {
    status.Update(
        absl::InvalidArgumentError(absl::StrFormat("--min-workers is %d, and there are %d workers",
                                                   options.min_workers, options.size.workers)));
  }
  return status;
}

// All that is the same in all overlays.
Words WordsOf(const RenderOptions& options, const Requirements& required, uint64_t program_bytes) {
  const uint64_t state_seconds = required.aggregator_disk_bytes / 3 / kStateBytesPerSecond;
  const JobSize& size = options.size;
  // Values, moments and the aggregators' errors once, and each worker's error.
  const uint64_t checkpoint_bytes = 4 * size.parameters * (size.workers + 4) + 16 * kMiB;
  const std::string worker_image =
      options.worker_image.empty() ? options.image : options.worker_image;
  return {
      {"{job}", options.job},
      {"{job_name}", Quote(options.job)},
      {"{namespace}", Quote(options.name_space)},
      {"{trust_domain}", options.trust_domain},
      {"{image}", Quote(options.image)},
      {"{worker_image}", Quote(worker_image)},
      {"{workers}", absl::StrCat(size.workers)},
      {"{aggregators}", absl::StrCat(size.aggregators)},
      {"{parameters}", absl::StrCat(size.parameters)},
      {"{data_port}", absl::StrCat(kDataPort)},
      {"{drain_grace}", absl::StrCat(kDrainGraceSeconds)},
      {"{state}", Mebibytes(required.aggregator_disk_bytes / 3)},
      {"{aggregator_grace}", absl::StrCat(2 * kDrainGraceSeconds + state_seconds)},
      {"{startup_failures}", absl::StrCat(150 + state_seconds)},
      {"{aggregator_memory}", Mebibytes(required.aggregator_memory_bytes)},
      {"{aggregator_disk}", Mebibytes(required.aggregator_disk_bytes)},
      {"{worker_memory}", Mebibytes(required.worker_memory_bytes + program_bytes)},
      {"{worker_cpus}", Quote(options.worker_cpus)},
      {"{gpus}", options.gpus == 0
                     ? ""
                     : absl::StrFormat("              nvidia.com/gpu: %d\n", options.gpus)},
      {"{checkpoint_disk}", Mebibytes(3 * checkpoint_bytes)},
      {"{backoff_limit}", absl::StrCat(3 * size.workers)},
      {"{aggregator_labels}", Labels(options, "aggregator")},
      {"{worker_labels}", Labels(options, "worker")},
      {"{aggregator_addresses}", Quote(AggregatorAddresses(options))},
      {"{storage_class_2}", StorageClass(options, "  ")},
      {"{storage_class_8}", StorageClass(options, "        ")},
      {"{late_workers_env}", LateWorkersEnvironment(options)},
      {"{worker_command}", WorkerCommand(options)},
      {"{container_security}", kContainerSecurity},
      {"{probe}", absl::StrFormat("[signpost, probe, --aggregators, \"127.0.0.1:%d\"]", kDataPort)},
  };
}

// Those, and what is of the overlay's.
Words WordsOf(const Overlay& overlay, Words words) {
  const auto of_role = [&words](const char* text, const char* role) {
    words["{role}"] = role;
    return Fill(text, words);
  };
  words["{checkpoint_access}"] = overlay.one_node ? "ReadWriteOnce" : "ReadWriteMany";
  words["{spread}"] = overlay.spread ? Fill(kSpread, words) : "";
  words["{security_env}"] = overlay.tls ? kTlsEnvironment : kInsecureEnvironment;
  words["{aggregator_security_args}"] = overlay.tls ? "" : kInsecureArgument;
  words["{tls_mount}"] = overlay.tls ? kTlsMount : "";
  words["{tls_volume}"] = overlay.tls ? of_role(kTlsVolume, "worker") : "";
  words["{aggregator_volumes}"] =
      overlay.tls ? absl::StrCat("      volumes:\n", of_role(kTlsVolume, "aggregator")) : "";
  return words;
}

std::string Certificates(const Words& words) {
  std::string text = Fill(kIssuers, words);
  for (const char* role : {"aggregator", "worker", "admin", "observer"}) {
    Words with_role = words;
    with_role["{role}"] = role;
    text += Fill(kCertificate, with_role);
  }
  return text;
}

std::string Kustomization(const std::vector<std::string>& resources) {
  return absl::StrCat(
      kGenerated,
      "apiVersion: kustomize.config.k8s.io/v1beta1\nkind: Kustomization\nresources:\n  - ",
      absl::StrJoin(resources, "\n  - "), "\n");
}

void AddOverlay(const Overlay& overlay, const Words& common, Files& files) {
  const Words words = WordsOf(overlay, common);
  const std::string directory = absl::StrCat("overlays/", overlay.name, "/");
  std::vector<std::string> resources = {"../../base", "aggregators.yaml", "workers.yaml"};
  files[directory + "aggregators.yaml"] = kGenerated + Fill(kAggregators, words);
  files[directory + "workers.yaml"] = kGenerated + Fill(kWorkers, words);
  if (overlay.certificates) {
    resources.push_back("certificates.yaml");
    files[directory + "certificates.yaml"] = kGenerated + Certificates(words);
  }
  files[directory + "kustomization.yaml"] = Kustomization(resources);
}

}  // namespace

absl::StatusOr<Files> Render(const RenderOptions& options) {
  if (absl::Status status = Check(options); !status.ok()) return status;
  const absl::StatusOr<uint64_t> program_bytes =
      ParseBytes("--worker-memory", options.worker_memory);
  if (!program_bytes.ok()) return program_bytes.status();
  JobSize size = options.size;
  size.closes_without_late_workers = options.min_workers != 0;
  const absl::StatusOr<Requirements> required = RequirementsOf(size);
  if (!required.ok()) return required.status();

  const Words words = WordsOf(options, *required, *program_bytes);
  Files files;
  files["base/kustomization.yaml"] =
      Kustomization({"namespace.yaml", "network-policies.yaml", "services.yaml"});
  files["base/namespace.yaml"] = kGenerated + Fill(kNamespace, words);
  files["base/network-policies.yaml"] = kGenerated + Fill(kNetworkPolicies, words);
  files["base/services.yaml"] = kGenerated + Fill(kServices, words);
  for (const Overlay& overlay : kOverlays) AddOverlay(overlay, words, files);
  return files;
}

absl::StatusOr<std::string> DocumentsOf(const Files& files, const std::string& overlay) {
  std::vector<std::string> names;
  for (const Overlay& known : kOverlays) names.push_back(known.name);
  if (std::find(names.begin(), names.end(), overlay) == names.end()) {
    return absl::InvalidArgumentError(absl::StrFormat("--overlay is '%s', wanted one of: %s",
                                                      overlay, absl::StrJoin(names, ", ")));
  }
  std::vector<std::string> documents;
  for (const auto& [path, text] : files) {
    const bool is_ours = absl::StartsWith(path, "base/") ||
                         absl::StartsWith(path, absl::StrCat("overlays/", overlay, "/"));
    if (is_ours && !absl::EndsWith(path, "/kustomization.yaml")) documents.push_back(text);
  }
  return absl::StrJoin(documents, "---\n");
}

}  // namespace signpost::deploy
