{{/* What all pods share. Each takes a dict: root, role, and spec (the role's values). */}}

{{- define "tandem.pod.metadata" -}}
labels:
  {{- include "tandem.selector" . | nindent 2 }}
  {{- with .spec.podLabels }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
annotations:
  checksum/config: {{ include "tandem.config" .root | sha256sum }}
  {{- with .spec.podAnnotations }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end -}}

{{- define "tandem.pod.placement" -}}
serviceAccountName: {{ include "tandem.serviceAccountName" .root }}
automountServiceAccountToken: false
enableServiceLinks: false
securityContext:
  {{- toYaml .root.Values.podSecurityContext | nindent 2 }}
{{- with .root.Values.image.pullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with .spec.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .spec.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end -}}

{{/* Spread over nodes unless told otherwise. */}}
{{- define "tandem.pod.spread" -}}
topologySpreadConstraints:
{{- if .spec.topologySpreadConstraints }}
  {{- toYaml .spec.topologySpreadConstraints | nindent 2 }}
{{- else }}
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- include "tandem.selector" . | nindent 8 }}
{{- end }}
{{- end -}}

{{- define "tandem.container.base" -}}
image: {{ include "tandem.image" .root }}
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
    {{- if (dig "rdma" "enabled" false .spec) }}
    add: [IPC_LOCK]
    {{- end }}
resources:
  {{- $resources := deepCopy .spec.resources }}
  {{- if (dig "rdma" "enabled" false .spec) }}
  {{- $rdma := dict .spec.rdma.resourceName (toString .spec.rdma.count) }}
  {{- $resources = mergeOverwrite $resources (dict "requests" $rdma "limits" $rdma) }}
  {{- end }}
  {{- toYaml $resources | nindent 2 }}
{{- end -}}

{{- define "tandem.container.env" -}}
- name: POD_IP
  valueFrom: {fieldRef: {fieldPath: status.podIP}}
- name: HOME
  value: /tmp
- name: TANDEM_HOME
  value: /var/cache/tandem
- name: HF_HOME
  value: /var/cache/tandem/hub
{{- with .root.Values.model.hubTokenSecret }}
- name: HF_TOKEN
  valueFrom: {secretKeyRef: {name: {{ . }}, key: {{ $.root.Values.model.hubTokenKey }}}}
{{- end }}
{{- with .spec.extraEnv }}
{{ toYaml . }}
{{- end }}
{{- end -}}

{{- define "tandem.container.mounts" -}}
- {name: tmp, mountPath: /tmp}
- {name: cache, mountPath: /var/cache/tandem}
- {name: config, mountPath: /etc/tandem/config, readOnly: true}
- {name: cluster, mountPath: /etc/tandem/cluster, readOnly: true}
{{- if .spec.shmSize }}
- {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if .root.Values.model.volume.source }}
- {name: model, mountPath: {{ .root.Values.model.volume.mountPath }}, readOnly: true}
{{- end }}
{{- if .root.Values.internalTls.existingSecret }}
- {name: internal-tls, mountPath: /etc/tandem/internal-tls, readOnly: true}
{{- end }}
{{- end -}}

{{- define "tandem.pod.volumes" -}}
- name: tmp
  emptyDir: {}
- name: cache
  {{- if .root.Values.model.cacheVolume }}
  {{- toYaml .root.Values.model.cacheVolume | nindent 2 }}
  {{- else }}
  emptyDir: {}
  {{- end }}
- name: config
  configMap: {name: {{ include "tandem.fullname" .root }}}
- name: cluster
  secret:
    secretName: {{ .root.Values.cluster.existingSecret }}
    defaultMode: 0440
    items: [{key: {{ .root.Values.cluster.secretKey }}, path: cluster-secret}]
{{- with .spec.shmSize }}
- name: shm
  emptyDir: {medium: Memory, sizeLimit: {{ . }}}
{{- end }}
{{- with .root.Values.model.volume.source }}
- name: model
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .root.Values.internalTls.existingSecret }}
- name: internal-tls
  secret: {secretName: {{ . }}, defaultMode: 0440}
{{- end }}
{{- end -}}
