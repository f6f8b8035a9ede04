{{/* Every router's address: gateways report outcomes to each of them. */}}
{{- define "ryzanstein.routers" -}}
{{- $addresses := list -}}
{{- range until (int .Values.router.replicas) -}}
{{- $addresses = append $addresses (printf "%s-%d.%s:50052" (include "ryzanstein.name" (list $ "router")) . (include "ryzanstein.host" (list $ "router"))) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}
