{{/* Where a pool's model is and what clients call it. Each takes the pool. */}}
{{- define "ryzanstein.model.path" -}}
{{- if not .model -}}
/app/models/ryzanstein-tiny
{{- else -}}
{{- .model -}}
{{- end -}}
{{- end }}

{{- define "ryzanstein.model.name" -}}
{{- default (regexReplaceAll "@[^/]*$" (include "ryzanstein.model.path" .) "" | base) .servedName -}}
{{- end }}

{{/* What all pools serve, comma-separated. */}}
{{- define "ryzanstein.models" -}}
{{- $names := list -}}
{{- range include "ryzanstein.pools" . | fromYaml }}
{{- $names = append $names (include "ryzanstein.model.name" .) -}}
{{- end }}
{{- $names | uniq | sortAlpha | join "," -}}
{{- end }}
