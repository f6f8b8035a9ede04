{{/* How many pods of a component there are, at the least. (list component scaled-by) */}}

{{/* Whether the chart says how many: nobody else scales. Empty or "true". */}}
{{- define "ryzanstein.scale.managed" -}}
{{- if and .replicasManaged (eq .autoscaling.mode "none") }}true{{ end -}}
{{- end }}

{{/* A PodDisruptionBudget: (dict "of" … "config" component), for two replicas and more: with one it would only block drains. */}}
{{- define "ryzanstein.pdb" -}}
{{- $scaled := and .config.autoscaling (ne (.config.autoscaling).mode "none") -}}
{{- if gt (int (ternary (.config.autoscaling).min .config.replicas (not (empty $scaled)))) 1 }}
---
apiVersion: policy/v1
kind: PodDisruptionBudget
metadata:
  {{- include "ryzanstein.metadata" (dict "of" .of) | nindent 2 }}
spec:
  {{- toYaml .config.pdb | nindent 2 }}
  selector:
    matchLabels:
      {{- include "ryzanstein.selectorLabels" .of | nindent 6 }}
{{- end }}
{{- end }}

{{/* A trigger of KEDA: (list $ query threshold [type]). A query without a result must fail, not count as 0. */}}
{{- define "ryzanstein.keda.trigger" -}}
{{- $root := index . 0 -}}
- type: prometheus
  metricType: {{ ternary (last .) "AverageValue" (gt (len .) 3) }}
  metadata:
    serverAddress: {{ default (printf "http://%s:9090" (include "ryzanstein.host" (list $root "prometheus"))) $root.Values.keda.prometheusUrl }}
    query: {{ index . 1 }}
    threshold: {{ index . 2 | quote }}
    ignoreNullValues: "false"
  {{- with $root.Values.keda.authenticationRef }}
  authenticationRef:
    {{- toYaml . | nindent 4 }}
  {{- end }}
{{- end }}

{{/* Whether KEDA asks the bundled Prometheus. Empty or "true". */}}
{{- define "ryzanstein.keda.bundled" -}}
{{- $modes := list .Values.gateway.autoscaling.mode -}}
{{- range include "ryzanstein.pools" . | fromYaml }}{{ $modes = append $modes .autoscaling.mode }}{{ end -}}
{{- if and (has "keda" $modes) (not .Values.keda.prometheusUrl) (eq .Values.monitoring.mode "bundled") }}true{{ end -}}
{{- end }}

{{/* The labels that series of this release have: include "ryzanstein.keda.series" $. */}}
{{- define "ryzanstein.keda.series" -}}
namespace={{ .Release.Namespace | quote }},release={{ .Release.Name | quote }}
{{- end }}
