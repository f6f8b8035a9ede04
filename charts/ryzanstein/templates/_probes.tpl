{{/*
Probes of our services. All but the gateway's readiness use the metrics port, which a thread of its own serves.
Liveness: time-out 6 s, since the service itself gives its event loop 5 s to answer; 3 failures of 10 s each.
Readiness: a draining pod is gone after two failures. Startup: a period of 2 s only while starting; our
services are given three minutes, since on a crowded node their imports alone have taken one.
include "ryzanstein.probes" (dict "ready" port "failures" 2 "budget" seconds "startup" path "readyScheme" HTTPS or none).
*/}}
{{- define "ryzanstein.probes" -}}
{{- $period := ternary 5 2 (eq .startup "/readyz") -}}
startupProbe:
  httpGet: {path: {{ .startup }}, port: metrics}
  periodSeconds: {{ $period }}
  timeoutSeconds: 6
  failureThreshold: {{ ceil (divf .budget $period) }}
livenessProbe:
  httpGet: {path: /livez, port: metrics}
  periodSeconds: 10
  timeoutSeconds: 6
  failureThreshold: 3
readinessProbe:
  httpGet: {path: /readyz, port: {{ .ready }}{{ with .readyScheme }}, scheme: {{ . }}{{ end }}}
  periodSeconds: 5
  timeoutSeconds: 3
  failureThreshold: {{ .failures }}
{{- end }}
