{{/* Names. 41 characters leave room for the longest suffix within 53. */}}
{{- define "tandem.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride | trunc 41 | trimSuffix "-" -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) | trunc 41 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Never changes with the chart's version: selectors are immutable. */}}
{{- define "tandem.selector" -}}
app.kubernetes.io/name: {{ default .root.Chart.Name .root.Values.nameOverride | trunc 63 | trimSuffix "-" }}
app.kubernetes.io/instance: {{ .root.Release.Name }}
{{- with .role }}
app.kubernetes.io/component: {{ . }}
{{- end }}
{{- end -}}

{{- define "tandem.labels" -}}
{{ include "tandem.selector" . }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | replace "+" "_" }}
{{- end -}}

{{- define "tandem.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "tandem.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end -}}

{{- define "tandem.image" -}}
{{- with .Values.image -}}
{{- if .digest -}}{{ .repository }}@{{ .digest }}{{- else -}}{{ .repository }}:{{ default $.Chart.AppVersion .tag }}{{- end -}}
{{- end -}}
{{- end -}}

{{- define "tandem.headHost" -}}
{{ include "tandem.fullname" . }}-head
{{- end -}}

{{/* Bytes of a quantity with a binary suffix. */}}
{{- define "tandem.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 -}}
{{- mul (regexFind "^[0-9]+" .) (get $units (regexFind "[KMGT]i$" .)) -}}
{{- end -}}

{{/* Internal mutual TLS, as a TlsConfig. */}}
{{- define "tandem.trust" -}}
{{- $trust := dict "secret_file" "/etc/tandem/cluster/cluster-secret" -}}
{{- if .Values.internalTls.existingSecret -}}
{{- $tls := dict "cert_file" "/etc/tandem/internal-tls/tls.crt" "key_file" "/etc/tandem/internal-tls/tls.key" "ca_file" "/etc/tandem/internal-tls/ca.crt" "server_name" .Values.internalTls.serverName -}}
{{- $_ := set $trust "tls" $tls -}}
{{- end -}}
{{- toJson $trust -}}
{{- end -}}

{{/* Not empty: workers show metrics of their own, to be scraped. */}}
{{- define "tandem.workerMetrics" -}}
{{- if and .Values.monitoring.podMonitor.enabled .Values.monitoring.podMonitor.workers -}}true{{- end -}}
{{- end -}}

{{/* The ClusterConfig that the head gives to all workers. Pools size themselves by their replicas. */}}
{{- define "tandem.config" -}}
{{- $v := .Values -}}
{{- $worker := dict
  "device" $v.worker.device
  "threads" (int $v.worker.threads)
  "drain_s" (int $v.worker.drainSeconds)
  "host" ""
  "model" (dict "path" $v.model.source "dtype" $v.model.dtype "max_context_tokens" (int $v.model.maxContextTokens))
  "cache" (dict "budget_bytes" (include "tandem.bytes" $v.worker.cacheBudget | int64) "max_sequences" (int $v.worker.maxSequences))
  "transfer" (dict "ucx_tls" $v.worker.ucxTls "net_devices" $v.worker.netDevices) -}}
{{- if include "tandem.workerMetrics" . -}}{{- $_ := set $worker "metrics_port" (int $v.monitoring.podMonitor.workerPort) -}}{{- end -}}
{{- $worker = mergeOverwrite $worker (deepCopy $v.worker.settings) -}}
{{- $config := dict "worker" $worker "trust" (include "tandem.trust" . | fromJson) -}}
{{- with $v.tracing.otlpEndpoint -}}{{- $_ := set $config "tracing" (dict "otlp_endpoint" .) -}}{{- end -}}
{{- toPrettyJson $config -}}
{{- end -}}

{{/* The RouterConfig on the router's command line. */}}
{{- define "tandem.routerConfig" -}}
{{- $r := .Values.router -}}
{{- $trust := include "tandem.trust" . | fromJson -}}
{{- $config := dict "model" .Values.model.source "trust" (omit $trust "secret_file") "connection_age_s" (int $r.connectionAgeSeconds) "grace_s" (int $r.graceSeconds) -}}
{{- with .Values.tracing.otlpEndpoint -}}{{- $_ := set $config "tracing" (dict "otlp_endpoint" .) -}}{{- end -}}
{{- if $r.tls.existingSecret -}}
{{- $tls := dict "cert_file" "/etc/tandem/tls/tls.crt" "key_file" "/etc/tandem/tls/tls.key" -}}
{{- if $r.tls.clientCa -}}{{- $_ := set $tls "ca_file" "/etc/tandem/tls/ca.crt" -}}{{- end -}}
{{- $_ := set $config "tls" $tls -}}
{{- end -}}
{{- if $r.apiKeys.existingSecret -}}{{- $_ := set $config "api_keys_file" "/etc/tandem/api-keys/keys" -}}{{- end -}}
{{- toJson (mergeOverwrite $config (deepCopy $r.settings)) -}}
{{- end -}}
