{{/* Values that would install and not work are refused with a sentence. Types and ranges are values.schema.json's part. */}}
{{- define "tandem.validate" -}}
{{- $v := .Values -}}
{{- if not $v.cluster.existingSecret -}}
{{- fail "cluster.existingSecret must name a Secret with the key cluster-secret; make it with: kubectl create secret generic tandem-cluster --from-literal=cluster-secret=$(openssl rand -hex 32)" -}}
{{- end -}}
{{- if eq (toString $v.image.tag) "latest" -}}
{{- fail "image.tag must not be latest: pods of one release would run different versions; name a version or a digest" -}}
{{- end -}}
{{- if hasPrefix "/" $v.model.source -}}
{{- if not $v.model.volume.source -}}
{{- fail (printf "model.source %s is a folder, but model.volume.source names no volume to mount it from" $v.model.source) -}}
{{- end -}}
{{- if not (or (eq $v.model.source $v.model.volume.mountPath) (hasPrefix (printf "%s/" $v.model.volume.mountPath) $v.model.source)) -}}
{{- fail (printf "model.source %s is not below model.volume.mountPath %s" $v.model.source $v.model.volume.mountPath) -}}
{{- end -}}
{{- end -}}
{{- if and $v.router.tls.clientCa (not $v.router.tls.existingSecret) -}}
{{- fail "router.tls.clientCa asks clients for certificates, but router.tls.existingSecret names no Secret with tls.crt, tls.key and ca.crt" -}}
{{- end -}}
{{- if eq (int $v.head.rayPort) (int $v.head.membershipPort) -}}
{{- fail (printf "head.rayPort and head.membershipPort are both %d" (int $v.head.rayPort)) -}}
{{- end -}}
{{- if eq (int $v.router.service.grpcPort) (int $v.router.service.httpPort) -}}
{{- fail (printf "router.service.grpcPort and router.service.httpPort are both %d" (int $v.router.service.grpcPort)) -}}
{{- end -}}
{{- range $key := list "host" "trust" "tracing" "metrics_port" -}}
{{- if hasKey $v.worker.settings $key -}}
{{- fail (printf "worker.settings.%s is the chart's part; remove it" $key) -}}
{{- end -}}
{{- end -}}
{{- range $key := list "host" "grpc_port" "http_port" "tls" "trust" "api_keys_file" "model" "tracing" "connection_age_s" "grace_s" -}}
{{- if hasKey $v.router.settings $key -}}
{{- fail (printf "router.settings.%s is the chart's part; remove it" $key) -}}
{{- end -}}
{{- end -}}
{{- $budget := include "tandem.bytes" $v.worker.cacheBudget | int64 -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $v $role -}}
{{- $limit := dig "limits" "memory" "" $pool.resources | toString -}}
{{- if and (eq $v.worker.device "cpu") (regexMatch "^[0-9]+[KMGT]i$" $limit) -}}
{{- if ge $budget (include "tandem.bytes" $limit | int64) -}}
{{- fail (printf "worker.cacheBudget %s does not fit into %s.resources.limits.memory %s: the worker would be killed" $v.worker.cacheBudget $role $limit) -}}
{{- end -}}
{{- end -}}
{{- if and (eq $v.worker.device "cuda") (not (dig "limits" "nvidia.com/gpu" "" $pool.resources)) (not $pool.runtimeClassName) -}}
{{- fail (printf "worker.device is cuda, but %s.resources.limits asks for no nvidia.com/gpu and %s.runtimeClassName is empty" $role $role) -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" "router" -}}
{{- $scaling := (get $v $role).autoscaling -}}
{{- if $scaling.enabled -}}
{{- if not $scaling.metrics -}}
{{- fail (printf "%s.autoscaling.enabled is set, but %s.autoscaling.metrics is empty: nothing would scale; docs/kubernetes.md names the signals" $role $role) -}}
{{- end -}}
{{- if lt (int $scaling.maxReplicas) (int $scaling.minReplicas) -}}
{{- fail (printf "%s.autoscaling.maxReplicas %d is less than minReplicas %d" $role (int $scaling.maxReplicas) (int $scaling.minReplicas)) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- range $role := list "prefill" "decode" -}}
{{- $pool := get $v $role -}}
{{- if and (include "tandem.workerMetrics" $) (eq (int $pool.probePort) (int $v.monitoring.podMonitor.workerPort)) -}}
{{- fail (printf "%s.probePort and monitoring.podMonitor.workerPort are both %d" $role (int $pool.probePort)) -}}
{{- end -}}
{{- end -}}
{{- if and (include "tandem.workerMetrics" .) $v.prefill.hostNetwork $v.decode.hostNetwork -}}
{{- fail "with hostNetwork in both pools two workers of a node would share monitoring.podMonitor.workerPort; leave monitoring.podMonitor.workers off, routers show their numbers" -}}
{{- end -}}
{{- if and $v.prefill.hostNetwork $v.decode.hostNetwork (eq (int $v.prefill.probePort) (int $v.decode.probePort)) -}}
{{- fail (printf "with hostNetwork, prefill.probePort and decode.probePort must differ where both may run on a node; both are %d" (int $v.prefill.probePort)) -}}
{{- end -}}
{{- end -}}
