{{/* Names. At most 30 characters, so that the longest suffix (-workers-<16> and a revision's hash) stays within 63. */}}
{{- define "ryzanstein.fullname" -}}
{{- if .Values.fullnameOverride -}}
{{- .Values.fullnameOverride -}}
{{- else -}}
{{- $name := default .Chart.Name .Values.nameOverride -}}
{{- ternary .Release.Name (printf "%s-%s" .Release.Name $name) (contains $name .Release.Name) -}}
{{- end -}}
{{- end }}

{{/* The name of one component's objects: include "ryzanstein.name" (list $ "gateway"), or (list $ "worker" "pool"). */}}
{{- define "ryzanstein.name" -}}
{{- $root := index . 0 -}}
{{- if eq (index . 1) "worker" -}}
{{- printf "%s-workers-%s" (include "ryzanstein.fullname" $root) (index . 2) -}}
{{- else -}}
{{- printf "%s-%s" (include "ryzanstein.fullname" $root) (index . 1) -}}
{{- end -}}
{{- end }}

{{/* The whole DNS name of a Service: include "ryzanstein.host" (list $ "router"). */}}
{{- define "ryzanstein.host" -}}
{{- $root := index . 0 -}}
{{- printf "%s.%s.svc.%s" (include "ryzanstein.name" .) $root.Release.Namespace $root.Values.clusterDomain -}}
{{- end }}

{{- define "ryzanstein.serviceAccountName" -}}
{{- if .Values.serviceAccount.create -}}
{{- default (include "ryzanstein.fullname" .) .Values.serviceAccount.name -}}
{{- else -}}
{{- default "default" .Values.serviceAccount.name -}}
{{- end -}}
{{- end }}
