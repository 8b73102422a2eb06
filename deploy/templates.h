// What manifests are made of. "{word}" is replaced (render.cc); a word that stands for lines has
// their indentation with it.

#ifndef SIGNPOST_DEPLOY_TEMPLATES_H_
#define SIGNPOST_DEPLOY_TEMPLATES_H_

namespace signpost::deploy {

inline constexpr char kGenerated[] =
    "# Written by `signpost k8s render`, which knows the numbers in it: see deploy/README.md.\n";

inline constexpr char kNamespace[] = R"(apiVersion: v1
kind: Namespace
metadata:
  name: {namespace}
  labels:
    # No pod in here may have more rights than ours need.
    pod-security.kubernetes.io/enforce: restricted
    pod-security.kubernetes.io/warn: restricted
)";

inline constexpr char kServices[] = R"(apiVersion: v1
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

inline constexpr char kNetworkPolicies[] = R"(# Nothing may talk to anything,
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

inline constexpr char kAggregators[] = R"(apiVersion: apps/v1
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
            - --max-parameters={most_parameters}
            - --max-frames={most_frames}
            - --max-held-bytes={held_bytes}
            - --max-receive-bytes={receive_bytes}
{metrics_args}          env:
            - name: SHARD
              valueFrom:
                fieldRef:
                  fieldPath: metadata.labels['apps.kubernetes.io/pod-index']
{security_env}          ports:
            - name: data
              containerPort: {data_port}
{metrics_port}          # It listens once its state is loaded.
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
          # No certificate takes part: one that has expired keeps new connections away, and training
          # goes on over those that there are.
          livenessProbe:
            tcpSocket:
              port: data
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

inline constexpr char kCheckpoints[] =
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
)";

// Of a Job, indented as it stands in one.
inline constexpr char kWorkerSpec[] = R"(  completionMode: Indexed
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
      # and so does who was interrupted, found no aggregator, or lost another worker.
      - action: Ignore
        onExitCodes:
          containerName: worker
          operator: In
          values: [69, 75]
      # A wrong configuration stays wrong, and so does a model that is not the others'.
      - action: FailJob
        onExitCodes:
          containerName: worker
          operator: In
          values: [64, 76]
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
            - name: MALLOC_MMAP_THRESHOLD_  # with the next, glibc keeps the memory of messages
              value: "33554432"
            - name: MALLOC_TRIM_THRESHOLD_
              value: "2147483647"
            - name: OMP_NUM_THREADS  # PyTorch would have a thread for each of the node's processors
              valueFrom:
                resourceFieldRef:
                  resource: requests.cpu
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
            - name: shared-memory
              mountPath: /dev/shm
{tls_mount}      volumes:
        - name: checkpoints
          persistentVolumeClaim:
            claimName: {job}-checkpoints
        - name: tmp
          emptyDir: {}
        # In which PyTorch's DataLoader workers hand batches over. A container's own has 64 MiB. What
        # is in it counts in the worker's memory.
        - name: shared-memory
          emptyDir:
            medium: Memory
{tls_volume})";

inline constexpr char kJob[] = R"(apiVersion: batch/v1
kind: Job
metadata:
  name: {job}-worker
  namespace: {namespace}
  labels: {worker_labels}
spec:
{worker_spec})";

// The same in the hands of those who queue and restart jobs. Aggregators are none of their
// business: they stay a StatefulSet, and keep the job's state while its workers come and go.

inline constexpr char kKueue[] =
    R"(# Kueue (v1beta1): the Job waits until its queue has room for all of it. Aggregators run meanwhile.
# The queue has room for this job and no other. A LocalQueue that you have can take the place of these
# three, of which the first two are the whole cluster's.
apiVersion: kueue.x-k8s.io/v1beta1
kind: ResourceFlavor
metadata:
  name: {job_name}
---
apiVersion: kueue.x-k8s.io/v1beta1
kind: ClusterQueue
metadata:
  name: {job_name}
spec:
  namespaceSelector: {}
  resourceGroups:
    - coveredResources: [cpu, memory{kueue_gpu}]
      flavors:
        - name: {job_name}
          resources:
            - name: cpu
              nominalQuota: {all_workers_cpus}
            - name: memory
              nominalQuota: {all_workers_memory}
{kueue_gpus}---
apiVersion: kueue.x-k8s.io/v1beta1
kind: LocalQueue
metadata:
  name: {job_name}
  namespace: {namespace}
spec:
  clusterQueue: {job_name}
---
apiVersion: batch/v1
kind: Job
metadata:
  name: {job}-worker
  namespace: {namespace}
  labels: {app.kubernetes.io/name: signpost, app.kubernetes.io/instance: {job_name}, app.kubernetes.io/component: worker, kueue.x-k8s.io/queue-name: {job_name}}
spec:
  suspend: true  # until Kueue admits it
{worker_spec})";

inline constexpr char kJobSet[] =
    R"(# JobSet (v1alpha2): when the workers' Job has failed it is made anew, and training goes on from its
# newest checkpoint. A JobSet restarts all that is in it: so aggregators are not.
apiVersion: jobset.x-k8s.io/v1alpha2
kind: JobSet
metadata:
  name: {job_name}
  namespace: {namespace}
  labels: {worker_labels}
spec:
  failurePolicy:
    maxRestarts: 3
  replicatedJobs:
    - name: worker
      replicas: 1
      template:
        spec:
{worker_spec_8})";

inline constexpr char kTrainer[] =
    R"(# Kubeflow Trainer (v1alpha1): what jobs of this kind share, and one of them. The policy is the plain
# one, without torchrun: ranks and world size are Signpost's.
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainingRuntime
metadata:
  name: {job_name}
  namespace: {namespace}
  labels: {worker_labels}
spec:
  mlPolicy:
    numNodes: {workers}
  template:
    spec:
      replicatedJobs:
        - name: node
          template:
            metadata:
              labels: {trainer.kubeflow.org/trainjob-ancestor-step: trainer}
            spec:
{worker_spec_12}---
apiVersion: trainer.kubeflow.org/v1alpha1
kind: TrainJob
metadata:
  name: {job_name}
  namespace: {namespace}
  labels: {worker_labels}
spec:
  runtimeRef:
    apiGroup: trainer.kubeflow.org
    kind: TrainingRuntime
    name: {job_name}
  trainer:
    numNodes: {workers}
)";

inline constexpr char kSpread[] = R"(      affinity:
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

inline constexpr char kMetricsArgument[] = "            - --metrics-listen=0.0.0.0:{metrics}\n";
inline constexpr char kMetricsPortLines[] = R"(            - name: metrics
              containerPort: {metrics}
)";

inline constexpr char kMonitoring[] = R"(# The Prometheus operator scrapes each aggregator,
apiVersion: monitoring.coreos.com/v1
kind: PodMonitor
metadata:
  name: {job}-aggregator
  namespace: {namespace}
  labels: {aggregator_labels}
spec:
  selector:
    matchLabels: {aggregator_labels}
  podTargetLabels: [app.kubernetes.io/instance]
  podMetricsEndpoints:
    - port: metrics
      interval: 15s
      relabelings:  # the name that alerts and the dashboard have for all aggregators
        - targetLabel: job
          replacement: signpost
---
# and is let in from the namespace where it usually runs.
apiVersion: networking.k8s.io/v1
kind: NetworkPolicy
metadata:
  name: {job}-metrics
  namespace: {namespace}
  labels: {aggregator_labels}
spec:
  podSelector:
    matchLabels: {aggregator_labels}
  policyTypes: [Ingress]
  ingress:
    - from:
        - namespaceSelector:
            matchLabels: {kubernetes.io/metadata.name: monitoring}
          podSelector:
            matchLabels: {app.kubernetes.io/name: prometheus}
      ports:
        - port: metrics
)";

// Of all jobs in the namespace.
inline constexpr char kAlertRules[] = R"(apiVersion: monitoring.coreos.com/v1
kind: PrometheusRule
metadata:
  name: signpost
  namespace: {namespace}
  labels: {app.kubernetes.io/name: signpost}
spec:
{alerts})";

inline constexpr char kIssuers[] =
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

inline constexpr char kCertificate[] = R"(---
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

inline constexpr char kTlsVolume[] = R"(        - name: tls
          secret:
            secretName: {job}-{role}-tls
            defaultMode: 0440
)";

inline constexpr char kTlsMount[] = R"(            - name: tls
              mountPath: /etc/signpost/tls
              readOnly: true
)";

inline constexpr char kTlsEnvironment[] = R"(            - name: SIGNPOST_TLS_DIR
              value: /etc/signpost/tls
)";

inline constexpr char kInsecureEnvironment[] = R"(            - name: SIGNPOST_INSECURE_I_UNDERSTAND
              value: "1"
)";

inline constexpr char kContainerSecurity[] =
    "{allowPrivilegeEscalation: false, readOnlyRootFilesystem: true, capabilities: {drop: [ALL]}}";

}  // namespace signpost::deploy

#endif  // SIGNPOST_DEPLOY_TEMPLATES_H_
