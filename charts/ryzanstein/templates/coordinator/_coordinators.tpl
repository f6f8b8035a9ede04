{{/* The coordinators' addresses: all shards of them, comma-separated. */}}
{{- define "ryzanstein.coordinators" -}}
{{- $shards := int .Values.coordinator.shards -}}
{{- $root := . -}}
{{- $addresses := list -}}
{{- range $shard := until $shards -}}
{{- $host := include "ryzanstein.host" (list $root (ternary "coordinators" "coordinator" (gt $shards 1))) -}}
{{- $pod := ternary (printf "%s-%d." (include "ryzanstein.name" (list $root "coordinator")) $shard) "" (gt $shards 1) -}}
{{- $addresses = append $addresses (printf "%s%s:50053" $pod $host) -}}
{{- end -}}
{{- join "," $addresses -}}
{{- end }}
