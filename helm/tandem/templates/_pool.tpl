{{/* One pool: a Deployment whose pods are Ray nodes with a place for one worker each. Takes a dict: root, role. */}}
{{- define "tandem.pool.deployment" -}}
{{- $root := .root -}}
{{- $spec := get $root.Values .role -}}
{{- $context := dict "root" $root "role" .role "spec" $spec -}}
{{- $head := include "tandem.headHost" $root -}}
{{- $leave := add (int $root.Values.worker.drainSeconds) 30 -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  name: {{ include "tandem.fullname" $root }}-{{ .role }}
  labels:
    {{- include "tandem.labels" $context | nindent 4 }}
spec:
  {{- if and (not $spec.autoscaling.enabled) (not (kindIs "invalid" $spec.replicas)) }}
  replicas: {{ int $spec.replicas }}
  {{- end }}
  selector:
    matchLabels:
      {{- include "tandem.selector" $context | nindent 6 }}
  strategy:
    rollingUpdate: {maxSurge: 1, maxUnavailable: 0}
  template:
    metadata:
      {{- include "tandem.pod.metadata" $context | nindent 6 }}
    spec:
      {{- include "tandem.pod.placement" $context | nindent 6 }}
      {{- include "tandem.pod.spread" $context | nindent 6 }}
      {{- if $spec.hostNetwork }}
      hostNetwork: true
      dnsPolicy: ClusterFirstWithHostNet
      {{- end }}
      {{- with $spec.runtimeClassName }}
      runtimeClassName: {{ . }}
      {{- end }}
      # preStop waits for the worker: drainSeconds, then what still runs moves on; then Ray ends.
      terminationGracePeriodSeconds: {{ add $leave 60 }}
      containers:
        - name: worker
          {{- include "tandem.container.base" $context | nindent 10 }}
          command: [tandem]
          args:
            - node
            - --role={{ .role }}
            - --head={{ $head }}:{{ $root.Values.head.rayPort }}
            - --controller={{ $head }}:{{ $root.Values.head.membershipPort }}
            - --host=$(POD_IP)
            - --config=/etc/tandem/config/cluster.json
            - --probe-port={{ $spec.probePort }}
            - --leave-s={{ $leave }}
          env:
            {{- include "tandem.container.env" $context | nindent 12 }}
          ports:
            - {name: probes, containerPort: {{ $spec.probePort }}}
            {{- if include "tandem.workerMetrics" $root }}
            - {name: metrics, containerPort: {{ $root.Values.monitoring.podMonitor.workerPort }}}
            {{- end }}
          startupProbe:
            httpGet: {path: /readyz, port: probes}
            periodSeconds: 5
            failureThreshold: {{ div (add (int $spec.startupSeconds) 4) 5 }}
          readinessProbe:
            httpGet: {path: /readyz, port: probes}
            periodSeconds: 5
            failureThreshold: 2
          livenessProbe:
            httpGet: {path: /healthz, port: probes}
            periodSeconds: 10
            timeoutSeconds: 5
            failureThreshold: 6
          lifecycle:
            preStop:
              exec:
                command: [tandem, leave, --probe-port={{ $spec.probePort }}, --timeout-s={{ add $leave 15 }}]
          volumeMounts:
            {{- include "tandem.container.mounts" $context | nindent 12 }}
      volumes:
        {{- include "tandem.pod.volumes" $context | nindent 8 }}
{{- end -}}

{{- define "tandem.pdb" -}}
{{- $spec := get .root.Values .role -}}
{{- if $spec.pdb.enabled -}}
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .role }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  maxUnavailable: {{ $spec.pdb.maxUnavailable }}
  unhealthyPodEvictionPolicy: AlwaysAllow
  selector:
    matchLabels:
      {{- include "tandem.selector" . | nindent 6 }}
{{- end -}}
{{- end -}}

{{- define "tandem.hpa" -}}
{{- $spec := get .root.Values .role -}}
{{- if $spec.autoscaling.enabled -}}
apiVersion: autoscaling/v2
kind: HorizontalPodAutoscaler
metadata:
  name: {{ include "tandem.fullname" .root }}-{{ .role }}
  labels:
    {{- include "tandem.labels" . | nindent 4 }}
spec:
  scaleTargetRef:
    apiVersion: apps/v1
    kind: Deployment
    name: {{ include "tandem.fullname" .root }}-{{ .role }}
  minReplicas: {{ int $spec.autoscaling.minReplicas }}
  maxReplicas: {{ int $spec.autoscaling.maxReplicas }}
  metrics:
    {{- toYaml $spec.autoscaling.metrics | nindent 4 }}
  {{- with $spec.autoscaling.behavior }}
  behavior:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end -}}
{{- end -}}
