{{/* Calls between the release's components: NetworkPolicies allow them, on both sides. */}}
{{- define "ryzanstein.connections" -}}
connections:
  - {from: gateway, to: router, port: 50052}
  {{- $most := include "ryzanstein.pools.most" . | int }}
  {{- $last := ternary (dict "endPort" (add 50053 $most)) dict (gt $most 1) }}
  {{- range $caller := list "gateway" "router" }}
  - {{ toJson (merge (dict "from" $caller "to" "worker" "port" 50054) $last) }}
  {{- end }}
  # The router that scales asks each for its requests.
  - {from: router, to: router, port: 50052}
  # KV blocks move between workers.
  - {{ toJson (merge (dict "from" "worker" "to" "worker" "port" 50054) $last) }}
  {{- if .Values.coordinator.enabled }}
  - {from: router, to: coordinator, port: 50053}
  - {{ toJson (merge (dict "from" "coordinator" "to" "worker" "port" 50054) $last) }}
  {{- end }}
  {{- if eq .Values.redis.mode "bundled" }}
  {{- range $port := include "ryzanstein.redis.ports" . | fromJson }}
  {{- range include "ryzanstein.services" $ | fromJsonArray }}
  - {from: {{ . }}, to: redis, port: {{ $port }}}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- if eq .Values.monitoring.mode "bundled" }}
  {{- range include "ryzanstein.services" . | fromJsonArray }}
  - {{ toJson (merge (dict "from" "prometheus" "to" . "port" 9100) (include "ryzanstein.metrics.range" (list $ .) | fromYaml)) }}
  {{- end }}
  {{- if .Values.monitoring.grafana.enabled }}
  - {from: grafana, to: prometheus, port: 9090}
  {{- if eq .Values.tracing.mode "bundled" }}
  - {from: grafana, to: jaeger, port: 16686}
  {{- end }}
  {{- if .Values.monitoring.loki.enabled }}
  - {from: grafana, to: loki, port: 3100}
  {{- end }}
  {{- end }}
  {{- end }}
  {{- $bundled := eq .Values.tracing.mode "bundled" }}
  {{- $collector := .Values.monitoring.collector.enabled }}
  {{- if or $bundled $collector }}
  {{- range include "ryzanstein.services" . | fromJsonArray }}
  - {from: {{ . }}, to: {{ ternary "collector" "jaeger" $collector }}, port: 4317}
  {{- end }}
  {{- end }}
  {{- if and $bundled $collector }}
  - {from: collector, to: jaeger, port: 4317}
  {{- end }}
  {{- if and .Values.monitoring.loki.enabled .Values.monitoring.loki.alloy.enabled }}
  - {from: alloy, to: loki, port: 3100}
  {{- end }}
  {{- if .Values.tests.enabled }}
  - {from: test, to: gateway, port: 8000}
  {{- if eq .Values.monitoring.mode "bundled" }}
  - {from: test, to: prometheus, port: 9090}
  {{- end }}
  {{- end }}
{{- end }}

{{/* The last port of metrics, where a component has several: those of a pod's workers follow that of their supervisor. (list $ component) */}}
{{- define "ryzanstein.metrics.range" -}}
{{- $most := include "ryzanstein.pools.most" (index . 0) | int -}}
{{- if and $most (eq (index . 1) "worker") }}endPort: {{ add 9100 $most }}{{ end -}}
{{- end }}

{{/* The components that serve, and have metrics and probes. */}}
{{- define "ryzanstein.services" -}}
{{- toJson (without (list "gateway" "router" (ternary "coordinator" "" .Values.coordinator.enabled) "worker"
  (ternary "finetuner" "" .Values.finetuner.enabled)) "") -}}
{{- end }}

{{/* The pods that watch the others, and the ports where people and probes ask them: {component: {page:, health:}}. */}}
{{- define "ryzanstein.watchers" -}}
{{- $bundled := eq .Values.monitoring.mode "bundled" -}}
{{- $watchers := dict -}}
{{- $loki := .Values.monitoring.loki -}}
{{- if $bundled }}{{- $_ := set $watchers "prometheus" (dict "page" 9090 "health" 9090) -}}{{ end -}}
{{- if and $bundled .Values.monitoring.grafana.enabled }}{{- $_ := set $watchers "grafana" (dict "page" 3000 "health" 3000) -}}{{ end -}}
{{- if eq .Values.tracing.mode "bundled" }}{{- $_ := set $watchers "jaeger" (dict "page" 16686 "health" 13133) -}}{{ end -}}
{{- if .Values.monitoring.collector.enabled }}{{- $_ := set $watchers "collector" (dict "health" 13133) -}}{{ end -}}
{{- if $loki.enabled }}{{- $_ := set $watchers "loki" (dict "page" 3100 "health" 3100) -}}{{ end -}}
{{- if and $loki.enabled $loki.alloy.enabled }}{{- $_ := set $watchers "alloy" (dict "page" 12345 "health" 12345) -}}{{ end -}}
{{- toJson $watchers -}}
{{- end }}

{{/* How clients speak to the gateway: https where it ends TLS itself. */}}
{{- define "ryzanstein.gateway.scheme" -}}
{{- ternary "https" "http" (ne .Values.gateway.tls.secretName "") -}}
{{- end }}

{{/* The port of a URL: given, or that of its scheme. */}}
{{- define "ryzanstein.port" -}}
{{- $ports := dict "redis" "6379" "rediss" "6379" "http" "80" "https" "443" -}}
{{- regexFind "[0-9]+$" (urlParse .).host | default (get $ports (urlParse .).scheme) -}}
{{- end }}
