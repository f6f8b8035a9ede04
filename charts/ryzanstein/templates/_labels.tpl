{{/* Labels. Each takes (list $ component) or (list $ "worker" pool). */}}

{{/* Frozen: a Deployment's or StatefulSet's selector can't change. No value and no version belongs here; an alias does. */}}
{{- define "ryzanstein.selectorLabels" -}}
{{- $root := index . 0 -}}
app.kubernetes.io/name: {{ $root.Chart.Name }}
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

{{/* The metadata of an object: (dict "of" (list $ component [pool]) "name" default: the component's "annotations" map). */}}
{{- define "ryzanstein.metadata" -}}
{{- $root := index .of 0 -}}
name: {{ if .name }}{{ .name }}{{ else }}{{ include "ryzanstein.name" .of }}{{ end }}
namespace: {{ $root.Release.Namespace }}
labels:
  {{- include "ryzanstein.labels" .of | nindent 2 }}
{{- with merge (dict) (default dict .annotations) $root.Values.commonAnnotations }}
annotations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
