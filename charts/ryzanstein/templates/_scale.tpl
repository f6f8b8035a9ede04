{{/* How many pods of a component there are, at the least. (list component scaled-by) */}}

{{/* Whether the chart says how many, and no autoscaler. Empty or "true". */}}
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

{{/* The source by which KEDA scales pools of workers: routers or prometheus. */}}
{{- define "ryzanstein.keda.source" -}}
{{- default (ternary "routers" "prometheus" (empty .Values.keda.prometheusUrl)) .Values.keda.source -}}
{{- end }}

{{/* The modes of all pools, as JSON; keda becomes keda-routers or keda-prometheus. */}}
{{- define "ryzanstein.scale.modes" -}}
{{- $modes := list -}}
{{- $source := include "ryzanstein.keda.source" . -}}
{{- range include "ryzanstein.pools" . | fromYaml -}}
{{- $modes = append $modes (ternary (printf "keda-%s" $source) .autoscaling.mode (eq .autoscaling.mode "keda")) -}}
{{- end -}}
{{- toJson ($modes | uniq) -}}
{{- end }}

{{/* Whether routers ask each other for their demand. Empty or "true". */}}
{{- define "ryzanstein.scale.byRouters" -}}
{{- $modes := include "ryzanstein.scale.modes" . | fromJsonArray -}}
{{- if or (has "builtin" $modes) (has "keda-routers" $modes) }}true{{ end -}}
{{- end }}

{{/* The pools that routers scale, or tell KEDA about, as services/router/scaling/pools.py reads them. */}}
{{- define "ryzanstein.scaling" -}}
{{- $pools := list -}}
{{- $keda := eq (include "ryzanstein.keda.source" .) "routers" -}}
{{- range $name, $pool := include "ryzanstein.pools" . | fromYaml -}}
{{- $scale := $pool.autoscaling -}}
{{- if or (eq $scale.mode "builtin") (and (eq $scale.mode "keda") $keda) -}}
{{- $settings := pick $scale "mode" "min" "max" "firstTokenSeconds" "tokenMilliseconds" "kvPercent" "idleSeconds" "scaleDownAfterSeconds" "schedule" -}}
{{- $pools = append $pools (merge (dict "name" $name "statefulSet" (include "ryzanstein.name" (list $ "worker" $name))
  "models" (include "ryzanstein.pool.names" $pool | fromJsonArray)) $settings) -}}
{{- end -}}
{{- end -}}
{{- toJson (dict "lease" (include "ryzanstein.name" (list . "scaler")) "pools" $pools) -}}
{{- end }}

{{/* Whether KEDA asks the bundled Prometheus. Empty or "true". */}}
{{- define "ryzanstein.keda.bundled" -}}
{{- $modes := include "ryzanstein.scale.modes" . | fromJsonArray -}}
{{- if and (or (has "keda-prometheus" $modes) (eq .Values.gateway.autoscaling.mode "keda")) (not .Values.keda.prometheusUrl) (eq .Values.monitoring.mode "bundled") }}true{{ end -}}
{{- end }}

{{/* The labels that series of this release have: include "ryzanstein.keda.series" $. */}}
{{- define "ryzanstein.keda.series" -}}
namespace={{ .Release.Namespace | quote }},release={{ .Release.Name | quote }}
{{- end }}
