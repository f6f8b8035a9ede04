{{/* Who calls whom within the release: what NetworkPolicies allow, on both sides. */}}
{{- define "ryzanstein.connections" -}}
connections:
  - {from: gateway, to: router, port: 50052}
  - {from: gateway, to: worker, port: 50054}
  - {from: router, to: worker, port: 50054}
  # KV blocks move between workers.
  - {from: worker, to: worker, port: 50054}
  {{- if .Values.coordinator.enabled }}
  - {from: router, to: coordinator, port: 50053}
  - {from: coordinator, to: worker, port: 50054}
  {{- end }}
  {{- if eq .Values.redis.mode "bundled" }}
  {{- range include "ryzanstein.services" . | fromJsonArray }}
  - {from: {{ . }}, to: redis, port: 6379}
  {{- end }}
  {{- end }}
  {{- if eq .Values.monitoring.mode "bundled" }}
  {{- range include "ryzanstein.services" . | fromJsonArray }}
  - {from: prometheus, to: {{ . }}, port: 9100}
  {{- end }}
  {{- if .Values.monitoring.grafana.enabled }}
  - {from: grafana, to: prometheus, port: 9090}
  {{- if eq .Values.tracing.mode "bundled" }}
  - {from: grafana, to: jaeger, port: 16686}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if eq .Values.tracing.mode "bundled" }}
  {{- range include "ryzanstein.services" . | fromJsonArray }}
  - {from: {{ . }}, to: jaeger, port: 4317}
  {{- end }}
  {{- end }}
  {{- if .Values.tests.enabled }}
  - {from: test, to: gateway, port: 8000}
  {{- if eq .Values.monitoring.mode "bundled" }}
  - {from: test, to: prometheus, port: 9090}
  {{- end }}
  {{- end }}
{{- end }}

{{/* The components that serve, and have metrics and probes. */}}
{{- define "ryzanstein.services" -}}
{{- toJson (without (list "gateway" "router" (ternary "coordinator" "" .Values.coordinator.enabled) "worker") "") -}}
{{- end }}

{{/* The pods that watch the others, and their ports for people: {component: port}. */}}
{{- define "ryzanstein.watchers" -}}
{{- $bundled := eq .Values.monitoring.mode "bundled" -}}
{{- $watchers := dict -}}
{{- if $bundled }}{{- $_ := set $watchers "prometheus" 9090 -}}{{ end -}}
{{- if and $bundled .Values.monitoring.grafana.enabled }}{{- $_ := set $watchers "grafana" 3000 -}}{{ end -}}
{{- if eq .Values.tracing.mode "bundled" }}{{- $_ := set $watchers "jaeger" 16686 -}}{{ end -}}
{{- toJson $watchers -}}
{{- end }}

{{/* The port of a URL: given, or that of its scheme. */}}
{{- define "ryzanstein.port" -}}
{{- $ports := dict "redis" "6379" "rediss" "6379" "http" "80" "https" "443" -}}
{{- regexFind "[0-9]+$" (urlParse .).host | default (get $ports (urlParse .).scheme) -}}
{{- end }}
