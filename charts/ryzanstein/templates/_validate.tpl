{{/* Errors that Kubernetes does not detect, each as a line that names the value. Kubernetes checks its own fields. */}}

{{- define "ryzanstein.validate" -}}
{{- $lines := list -}}
{{- range $part := list "forms" "names" "externals" "adapters" "owned" "tenancy" "pools" "finetuner" "redis" "tls" "exposure" "scaling" "monitoring" "fixed" -}}
{{- $lines = concat $lines (include (printf "ryzanstein.validate.%s" $part) $ | splitList "\n") -}}
{{- end -}}
{{- $lines = without $lines "" -}}
{{- if $lines -}}
{{- fail (printf "\n\n  %s\n" (join "\n  " $lines)) -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.names" -}}
{{- $name := include "ryzanstein.fullname" . -}}
{{- if gt (len $name) 27 }}
fullnameOverride: the name {{ $name }} has {{ len $name }} characters; give one of at most 27
{{- end -}}
{{- range $pool, $_ := .Values.workers.pools }}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,14}[a-z0-9])?$" $pool) }}
workers.pools.{{ $pool }}: a pool's name has 1 to 16 characters of a-z, 0-9 and -, and neither begins nor ends with -
{{- end -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.externals" -}}
{{- range $name, $external := .Values.externals }}
{{- if not (regexMatch "^https?://[^/?#@\\s]+(/[^?#\\s]*)?$" $external.baseUrl) }}
externals.{{ $name }}.baseUrl: it should be a URL such as https://api.example.org/v1, without a user, a query or a fragment
{{- end -}}
{{- if not (regexMatch "^[a-z0-9]([-a-z0-9]{0,52}[a-z0-9])?$" $name) }}
externals.{{ $name }}: a name has 1 to 54 characters of a-z, 0-9 and -, and neither begins nor ends with -
{{- end -}}
{{- end -}}
{{- end }}

{{/* Names that services/common/adapters.py allows: a terminal shows all their characters. */}}
{{- define "ryzanstein.validate.adapters" -}}
{{- $hidden := "[\\p{C}\\p{Zl}\\p{Zp}]" -}}
{{- range $pool, $config := include "ryzanstein.pools" . | fromYaml -}}
{{- $settings := default dict $config.settings -}}
{{- range $name, $folder := default dict $settings.adapters }}
{{- if or (regexMatch $hidden $name) (regexMatch "^(\\s.*|.*\\s|)$" $name) (gt (len $name) 256) }}
workers.pools.{{ $pool }}.settings.adapters: {{ quote $name }} is no name; it has 1 to 256 printable characters, no control or format characters, no space at an end
{{- end -}}
{{- if or (regexMatch $hidden (toString $folder)) (not $folder) }}
workers.pools.{{ $pool }}.settings.adapters: {{ quote $name }} has the folder {{ quote $folder }}; it has printable characters, no control or format characters
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Variables that ports, probes, policies and the grace depend on: a value sets them, no variable behind its back. */}}
{{- define "ryzanstein.validate.owned" -}}
{{- $places := dict
  "RYZANSTEIN_DRAIN_DELAY_S" "gateway.drain.delaySeconds" "RYZANSTEIN_DRAIN_TIMEOUT_S" "gateway.drain.streamSeconds"
  "RYZANSTEIN_DRAIN_SILENCE_S" "gateway.drain.silenceSeconds" "RYZANSTEIN_DRAIN_S" "the pool's drainSeconds" "RYZANSTEIN_HOST" "bindAddress"
  "RYZANSTEIN_NAMESPACE" "redis.keyPrefix"
  "RYZANSTEIN_REDIS_PASSWORD_FILE" "redis.auth" "RYZANSTEIN_ADMIN_TOKEN_FILE" "gateway.tenancy.adminSecret"
  "RYZANSTEIN_ROUTES_FILE" "routes"
  "RYZANSTEIN_TLS_FOLDER" "tls" "RYZANSTEIN_TLS_PHASE" "tls.phase"
  "RYZANSTEIN_MODELS" "the pool's models" "RYZANSTEIN_PINNED" "the pool's pin" "RYZANSTEIN_PRIORITY" "the pool's priority" "RYZANSTEIN_IDLE_SLEEP_S" "the pool's idleSleep"
  "RYZANSTEIN_EXPECTED_MODELS" "workers.pools" "RYZANSTEIN_EXPECTED_MODELS_CONFIG_MAP" "workers.pools"
  "RYZANSTEIN_SERVICE_ACCOUNT_FOLDER" "router"
  "RYZANSTEIN_FINETUNER_MODELS" "finetuner.pools" "RYZANSTEIN_FINETUNER_FOLDER" "finetuner.storage"
  "RYZANSTEIN_FINETUNER_JOB_TEMPLATE" "finetuner.job" "RYZANSTEIN_FINETUNER_QUANTIZATIONS" "finetuner.job.device"
  "RYZANSTEIN_ROUTER_ADDRESSES" "router" "RYZANSTEIN_ROUTER_PEERS" "router" "RYZANSTEIN_COORDINATOR_ADDRESS" "coordinator"
  "RYZANSTEIN_COORDINATOR_SHARD" "coordinator.shards" "RYZANSTEIN_COORDINATOR_SHARDS" "coordinator.shards" -}}
{{- $configs := dict "podDefaults" .Values.podDefaults "gateway" .Values.gateway "router" .Values.router "coordinator" .Values.coordinator "finetuner" .Values.finetuner -}}
{{- range $name, $pool := include "ryzanstein.pools" . | fromYaml -}}
{{- $_ := set $configs (printf "workers.pools.%s" $name) $pool -}}
{{- end -}}
{{- range $where, $config := $configs -}}
{{- $names := keys (default dict $config.env) -}}
{{- range $key := keys (default dict $config.settings) -}}
{{- $names = append $names (include "ryzanstein.env.name" $key) -}}
{{- end -}}
{{- range $names | uniq | sortAlpha -}}
{{- if hasKey $places . }}
{{ $where }} sets {{ . }}: set {{ get $places . }} instead, which other objects follow
{{- else if regexMatch "^RYZANSTEIN_(GATEWAY|GRPC|ADMIN|ROUTER|COORDINATOR|WORKER|METRICS)_PORT$" . }}
{{ $where }} sets {{ . }}: ports are fixed, probes and policies name them; change the Service's port
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.tenancy" -}}
{{- with .Values.gateway.tenancy }}
{{- if and .jwt.issuer (not .enabled) }}
gateway.tenancy.jwt.issuer: needs gateway.tenancy.enabled, without it no request needs a token
{{- end -}}
{{- if and .jwt.issuer (not .jwt.audience) }}
gateway.tenancy.jwt.audience: name what tokens must be made for; tokens for other services are no keys
{{- end -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.pools" -}}
{{- $root := . -}}
{{- $pools := include "ryzanstein.pools" . | fromYaml -}}
{{- if not $pools }}
workers.pools: at least one pool is needed
{{- end -}}
{{- range $name, $pool := $pools -}}
{{- $where := printf "workers.pools.%s" $name -}}
{{- $storage := $pool.storage -}}
{{- $most := mul $pool.nodes (ternary $pool.replicas $pool.autoscaling.max (eq $pool.autoscaling.mode "none")) | int64 -}}
{{- $fetched := include "ryzanstein.pool.fetches" $pool -}}
{{- include "ryzanstein.validate.models" (list $where $pool) -}}
{{- if and $fetched (eq $storage.type "pvc") (not (has "ReadWriteMany" $storage.accessModes)) (gt $most 1) }}
{{ $where }}.storage.accessModes: {{ $most }} pods can't share a claim of {{ join ", " $storage.accessModes }}; take [ReadWriteMany], or type perPod or ephemeral
{{- end -}}
{{- if and $fetched (eq $storage.type "hostPath") (not $storage.hostPath) }}
{{ $where }}.storage.hostPath: name the folder of the node
{{- end -}}
{{- range $index, $model := include "ryzanstein.pool.models" $pool | fromJsonArray -}}
{{- $place := ternary (printf "%s.models[%d]" $where $index) $where (not (empty $pool.models)) -}}
{{- $bundled := eq (include "ryzanstein.model.scheme" $model) "bundled" -}}
{{- if and $bundled (eq $pool.engine "native") (not (has (toString $pool.tensorParallel) (list "1" "3"))) }}
{{ $where }}.tensorParallel: {{ $pool.tensorParallel }} ranks cannot divide the 9 attention heads of the bundled model; take 1 or 3, or name a model
{{- end -}}
{{- if and $bundled (eq $pool.engine "vllm") }}
{{ $place }}.model: the vllm engine serves folders of safetensors, and the bundled model is a GGUF file; name a model
{{- end -}}
{{- if and (eq (include "ryzanstein.model.scheme" $model) "oci") (not (regexMatch (include "ryzanstein.model.reference" $model) (include "ryzanstein.model.place" $model))) }}
{{ $place }}.model: {{ $model.model }} needs a tag or a digest
{{- end -}}
{{- end -}}
{{- if eq $pool.engine "vllm" -}}
{{- if and (eq (include "ryzanstein.worker.device" $pool) "cpu") (not (get (default dict $root.Values.image.references) "worker-vllm")) }}
{{ $where }}.engine: the image worker-vllm is for GPUs; set device: cuda, or image.references.worker-vllm to an image of vLLM for CPUs
{{- end -}}
{{- if ne (toString $pool.speculation) "auto" }}
{{ $where }}.speculation: is the native engine's; the vllm engine drafts nothing unless engineArgs has speculative_config
{{- end -}}
{{- if ne $pool.attention "dense" }}
{{ $where }}.attention: is the native engine's; vLLM attends densely
{{- end -}}
{{- if and (eq (include "ryzanstein.worker.device" $pool) "cpu") (hasKey (default dict $pool.engineArgs) "speculative_config") }}
{{ $where }}.engineArgs: speculative_config is for GPUs, vLLM drafts nothing on CPUs
{{- end -}}
{{- else if $pool.engineArgs }}
{{ $where }}.engineArgs: are vLLM's; also set engine: vllm
{{- end -}}
{{- $gpus := include "ryzanstein.worker.gpus" $pool | int64 -}}
{{- $ranks := include "ryzanstein.worker.ranks" $pool | int64 -}}
{{- if and $gpus (lt $gpus $ranks) }}
{{ $where }}.gpu.count: {{ $gpus }} is less than {{ ternary (printf "tensorParallel %d" $ranks) (printf "the %d ranks of a pod" $ranks) (eq $ranks (int64 $pool.tensorParallel)) }}; each rank needs a GPU of its own
{{- end -}}
{{- if gt (int64 $pool.nodes) 1 -}}
{{- $world := mul (int64 $pool.tensorParallel) (int64 (default 1 $pool.engineArgs.pipeline_parallel_size)) -}}
{{- if ne $pool.engine "vllm" }}
{{ $where }}.nodes: our own engine's ranks are in one pod; set engine: vllm
{{- end -}}
{{- if mod $world (int64 $pool.nodes) }}
{{ $where }}.nodes: {{ $world }} ranks (tensorParallel times pipeline_parallel_size) can't be shared evenly by {{ $pool.nodes }} pods
{{- end -}}
{{- if ne $pool.autoscaling.mode "none" }}
{{ $where }}.autoscaling.mode: scales pods, and a worker of this pool is {{ $pool.nodes }} pods; take none
{{- end -}}
{{- end -}}
{{- if and (eq $pool.device "cpu") (gt (int64 $pool.gpu.count) 0) }}
{{ $where }}.gpu.count: device cpu uses no GPU; take device cuda
{{- end -}}
{{- end -}}
{{- end }}

{{/* Several models of a pool: (list where pool). */}}
{{- define "ryzanstein.validate.models" -}}
{{- $where := index . 0 -}}
{{- $pool := index . 1 -}}
{{- if $pool.models -}}
{{- range $key := list "model" "servedName" -}}
{{- if get $pool $key }}
{{ $where }}.{{ $key }}: has no effect with models, each of which has its own
{{- end -}}
{{- end -}}
{{- range $key := list "adapters" "adapterPins" -}}
{{- if get (default dict $pool.settings) $key }}
{{ $where }}.settings.{{ $key }}: an adapter is of one model; set it under settings of one of models
{{- end -}}
{{- end -}}
{{- if gt (int64 $pool.nodes) 1 }}
{{ $where }}.nodes: a worker over several pods is alone in them; take 1, or one model
{{- end -}}
{{- $names := include "ryzanstein.pool.names" $pool | fromJsonArray -}}
{{- range $name := $names | uniq -}}
{{- if gt (sub (len $names) (len (without $names $name))) 1 }}
{{ $where }}.models: several are called {{ $name }}; give each a servedName of its own
{{- end -}}
{{- end -}}
{{- $pinned := 0 -}}
{{- range include "ryzanstein.pool.models" $pool | fromJsonArray -}}
{{- if .pin }}{{- $pinned = add1 $pinned }}{{ end -}}
{{- end -}}
{{- if and $pool.maxAwake (gt (int64 $pinned) (sub (int64 $pool.maxAwake) (ternary 1 0 (lt (int64 $pinned) (int64 (len $names)))))) }}
{{ $where }}.maxAwake: with {{ $pool.maxAwake }}, {{ $pinned }} models with pin leave no room for others
{{- end -}}
{{- else -}}
{{- range $key := list "maxAwake" "priority" -}}
{{- if get $pool $key }}
{{ $where }}.{{ $key }}: is for a pool with several models; name them in models
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.redis" -}}
{{- with .Values.redis -}}
{{- if and (include "ryzanstein.redis.users" $) .auth.username }}
redis.auth.username: has no effect with redis.auth.users components, whose users are gateway, router, coordinator, worker and finetuner; take shared for one user
{{- end -}}
{{- if eq .mode "external" -}}
{{- if not .external.url }}
redis.external.url: redis.mode external needs the address of your Redis, redis://host:6379/0
{{- end -}}
{{- if and .auth.enabled (not .auth.existingSecret.name) }}
redis.auth.existingSecret.name: name the secret with the password of your Redis, or set redis.auth.enabled to false
{{- end -}}
{{- else -}}
{{- if or .external.url .external.caSecret.name }}
redis.mode: redis.external is set, but the mode is bundled; take external
{{- end -}}
{{- if .auth.username }}
redis.auth.username: the bundled Redis has no user of yours
{{- end -}}
{{- end -}}
{{- with include "ryzanstein.redis.users.missing" $ }}
{{ . }}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.exposure" -}}
{{- range $kind := list "httpRoute" "grpcRoute" -}}
{{- $route := get $.Values $kind -}}
{{- if and $route.enabled (not $route.parents) }}
{{ $kind }}.parents: name the Gateway that it belongs to
{{- end -}}
{{- end -}}
{{- if and .Values.grpcRoute.enabled (not .Values.gateway.grpc.enabled) }}
grpcRoute.enabled: needs gateway.grpc.enabled
{{- end -}}
{{- range $kind := list "ingress" "httpRoute" "grpcRoute" -}}
{{- if and $.Values.gateway.tls.secretName (get $.Values $kind).enabled }}
gateway.tls.secretName: behind {{ $kind }} TLS ends there; take one of both
{{- end -}}
{{- end -}}
{{- if and .Values.gateway.tenancy.keysSecret.name (not .Values.gateway.tenancy.enabled) }}
gateway.tenancy.keysSecret.name: has no effect without gateway.tenancy.enabled
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.scaling" -}}
{{- $scalers := dict "gateway" .Values.gateway -}}
{{- range $name, $pool := include "ryzanstein.pools" . | fromYaml -}}
{{- $_ := set $scalers (printf "workers.pools.%s" $name) $pool -}}
{{- end -}}
{{- range $where, $config := $scalers -}}
{{- $scale := $config.autoscaling -}}
{{- if and $scale.schedule (ne $scale.mode "builtin") }}
{{ $where }}.autoscaling.schedule: has no effect in mode {{ $scale.mode }}; take builtin{{ if eq $scale.mode "keda" }}, or KEDA's trigger cron{{ end }}
{{- end -}}
{{- range $at, $floor := $scale.schedule -}}
{{- if gt (int64 $floor.min) (int64 $scale.max) }}
{{ $where }}.autoscaling.schedule[{{ $at }}].min: {{ $floor.min }} is more than max, {{ $scale.max }}
{{- end -}}
{{- end -}}
{{- if ne $scale.mode "none" -}}
{{- if gt (int64 $scale.min) (int64 $scale.max) }}
{{ $where }}.autoscaling.min: {{ $scale.min }} is more than max, {{ $scale.max }}
{{- end -}}
{{- if and (eq $scale.mode "hpa-cpu") (eq (int64 $scale.min) 0) }}
{{ $where }}.autoscaling.min: hpa-cpu measures pods that run, so it can't scale to zero; take at least 1, or mode builtin
{{- end -}}
{{- $asksPrometheus := or (eq $where "gateway") (eq (include "ryzanstein.keda.source" $) "prometheus") -}}
{{- if and (eq $scale.mode "keda") $asksPrometheus (not $.Values.keda.prometheusUrl) (ne $.Values.monitoring.mode "bundled") }}
keda.prometheusUrl: {{ $where }}.autoscaling.mode keda asks a Prometheus, and monitoring.mode {{ $.Values.monitoring.mode }} brings none; name its address
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.validate.monitoring" -}}
{{- $known := include "ryzanstein.rules.names" . | fromJsonArray -}}
{{- range $alert, $_ := .Values.monitoring.rules.overrides -}}
{{- if not (has $alert $known) }}
monitoring.rules.overrides.{{ $alert }}: there is no such alert; the alerts are {{ join ", " $known }}
{{- end -}}
{{- end -}}
{{- if and .Values.monitoring.collector.enabled (eq .Values.tracing.mode "none") }}
monitoring.collector.enabled: there are no traces to collect with tracing.mode none; take bundled or otlp
{{- end -}}
{{- with .Values.tracing -}}
{{- if and (eq .mode "otlp") (not .endpoint) }}
tracing.endpoint: tracing.mode otlp needs the address that traces are sent to
{{- end -}}
{{- if and .endpoint (ne .mode "otlp") }}
tracing.endpoint: has no effect with tracing.mode {{ .mode }}; take otlp
{{- end -}}
{{- end -}}
{{- end }}
