{{/* Environment variables: one map by name, so that a name is rendered once and users can override or remove any. */}}

{{/* (dict "root" $ "own" map "config" component): common, own, settings, env; less envUnset. A list. */}}
{{- define "ryzanstein.env" -}}
{{- $env := merge (dict) .own (include "ryzanstein.env.common" .root | fromYaml) -}}
{{- range $key, $value := .config.settings -}}
{{- $_ := set $env (include "ryzanstein.env.name" $key) (kindIs "map" $value | ternary (toJson $value) $value) -}}
{{- end -}}
{{- range $name, $value := .config.env -}}
{{- $_ := set $env $name $value -}}
{{- end -}}
{{- range .config.envUnset -}}
{{- $_ := unset $env . -}}
{{- end -}}
{{- include "ryzanstein.env.list" $env -}}
{{- end }}

{{/* A map as Kubernetes' list, by name; null is nothing. */}}
{{- define "ryzanstein.env.list" -}}
{{- range $name, $value := . }}
{{- if not (kindIs "invalid" $value) }}
- name: {{ $name }}
{{- if kindIs "map" $value }}
  {{- toYaml $value | nindent 2 }}
{{- else }}
  value: {{ include "ryzanstein.env.value" $value | quote }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* maxBodyBytes → RYZANSTEIN_MAX_BODY_BYTES */}}
{{- define "ryzanstein.env.name" -}}
RYZANSTEIN_{{ snakecase . | upper }}
{{- end }}

{{/* Helm reads whole numbers as floats and prints large ones as 1.6e+07; services read lists with commas. */}}
{{- define "ryzanstein.env.value" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- int64 . -}}
{{- else if kindIs "slice" . -}}
{{- join "," . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}

{{/* Environment of all services. */}}
{{- define "ryzanstein.env.common" -}}
RYZANSTEIN_NAMESPACE: {{ include "ryzanstein.redis.namespace" . }}
RYZANSTEIN_LOG_LEVEL: {{ .Values.logLevel }}
{{- with .Values.telemetryNames }}
RYZANSTEIN_TELEMETRY_NAMES: {{ join "," . | quote }}
{{- end }}
RYZANSTEIN_HOST: {{ .Values.bindAddress | quote }}
# The pod's address: no DNS entry has to appear before peers can call.
RYZANSTEIN_ADVERTISE_HOST: {valueFrom: {fieldRef: {fieldPath: status.podIP}}}
RYZANSTEIN_METRICS_PORT: "9100"
{{ include "ryzanstein.redis.env" . }}
{{- include "ryzanstein.tls.env" . }}
{{- with include "ryzanstein.tracing.endpoint" . }}
OTEL_EXPORTER_OTLP_ENDPOINT: {{ . }}
OTEL_TRACES_SAMPLER: parentbased_traceidratio
# A collector chooses when it has seen all of a trace.
OTEL_TRACES_SAMPLER_ARG: {{ ternary 1 $.Values.tracing.ratio $.Values.monitoring.collector.enabled | quote }}
OTEL_RESOURCE_ATTRIBUTES: k8s.namespace.name={{ $.Release.Namespace }},service.namespace={{ $.Release.Name }},service.version={{ $.Chart.AppVersion }}
{{- end }}
{{- end }}
