{{/* Names. The longest suffix is -workers-<16>, and a StatefulSet's revision adds 11: a fullname of 27 stays within 63. */}}
{{- define "ryzanstein.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- end }}

{{/* The name of a component's objects: include "ryzanstein.name" (list $ "gateway"), or (list $ "worker" "pool"). */}}
{{- define "ryzanstein.name" -}}
{{- $suffix := index . 1 -}}
{{- if eq $suffix "worker" -}}
{{- $suffix = printf "workers-%s" (index . 2) -}}
{{- end -}}
{{- printf "%s-%s" (include "ryzanstein.fullname" (index . 0)) $suffix -}}
{{- end }}

{{/* The whole DNS name of a component's Service. */}}
{{- define "ryzanstein.host" -}}
{{- $root := index . 0 -}}
{{- printf "%s.%s.svc.%s" (include "ryzanstein.name" .) $root.Release.Namespace $root.Values.clusterDomain -}}
{{- end }}

{{- define "ryzanstein.serviceAccountName" -}}
{{- default (ternary (include "ryzanstein.fullname" .) "default" .Values.serviceAccount.create) .Values.serviceAccount.name -}}
{{- end }}
