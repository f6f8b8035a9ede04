{{/* Every router's address, asked for again and again: gateways report outcomes to each of them. */}}
{{- define "ryzanstein.routers" -}}
dns:{{ include "ryzanstein.host" (list . "router") }}:50052
{{- end }}
