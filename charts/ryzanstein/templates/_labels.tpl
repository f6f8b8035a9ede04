{{/* Labels. Each takes (list $ component) or (list $ "worker" pool). */}}

{{/* Frozen: a Deployment's or StatefulSet's selector can't change. No value and no version belongs here. */}}
{{- define "ryzanstein.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: ryzanstein
app.kubernetes.io/instance: {{ $root.Release.Name }}
app.kubernetes.io/component: {{ index . 1 }}
{{- if gt (len .) 2 }}
ryzanstein.dev/pool: {{ index . 2 }}
{{- end }}
{{- end }}

{{- define "ryzanstein.labels" -}}
{{- $root := index . 0 -}}
{{- $labels := include "ryzanstein.selectorLabels" . | fromYaml -}}
{{- $labels = merge $labels (dict
  "app.kubernetes.io/version" $root.Chart.AppVersion
  "app.kubernetes.io/part-of" "ryzanstein"
  "app.kubernetes.io/managed-by" $root.Release.Service
  "helm.sh/chart" (printf "%s-%s" $root.Chart.Name ($root.Chart.Version | replace "+" "_"))) -}}
{{- toYaml (merge $labels $root.Values.commonLabels) -}}
{{- end }}

{{/* The metadata of every object: include "ryzanstein.metadata" (list $ component [pool]), its name left to the caller. */}}
{{- define "ryzanstein.metadata" -}}
namespace: {{ (index . 0).Release.Namespace }}
labels:
  {{- include "ryzanstein.labels" . | nindent 2 }}
{{- with (index . 0).Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
