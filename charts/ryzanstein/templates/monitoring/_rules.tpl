{{/* Rules for this release, from files/rules, which Prometheus could read as they are. */}}

{{/* The names of all alerts, as JSON. */}}
{{- define "ryzanstein.rules.names" -}}
{{- $names := list -}}
{{- range (.Files.Get "files/rules/alerts.yaml" | fromYaml).groups -}}
{{- range .rules -}}
{{- $names = append $names .alert -}}
{{- end -}}
{{- end -}}
{{- toJson ($names | uniq | sortAlpha) -}}
{{- end }}

{{/* The error budget of an objective in percent, e.g. 99.9 → 0.001. */}}
{{- define "ryzanstein.rules.budget" -}}
{{- round (divf (subf 100 .) 100) 6 -}}
{{- end }}

{{/* Both files as {groups: …}: series of this release only, its objectives, its runbooks. */}}
{{- define "ryzanstein.rules" -}}
{{- $rules := .Values.monitoring.rules -}}
{{- $late := $rules.slo.ttftSeconds -}}
{{- $bound := ternary (printf "%d.0" (int64 $late)) (toString $late) (eq (float64 $late) (floor $late)) -}}
{{- $release := printf "namespace=%q,release=%q" .Release.Namespace .Release.Name -}}
{{- $pods := printf "namespace=%q,pod=~\"%s-.*\"" .Release.Namespace (include "ryzanstein.fullname" .) -}}
{{- $groups := list -}}
{{- range $file := list "recording" "alerts" -}}
{{- $text := $.Files.Get (printf "files/rules/%s.yaml" $file)
  | replace "job=\"ryzanstein\"" $release
  | replace "pod=~\"ryzanstein-.*\"" $pods
  | replace "le=\"2.5\"" (printf "le=%q" $bound)
  | replace "* 0.001" (printf "* %s" (include "ryzanstein.rules.budget" $rules.slo.availability))
  | replace "* 0.01" (printf "* %s" (include "ryzanstein.rules.budget" $rules.slo.ttftPercent))
  | replace "https://github.com/ryzanstein/ryzanstein/blob/main/docs/runbooks" (trimSuffix "/" $rules.runbookBase) -}}
{{- range ($text | fromYaml).groups -}}
{{- if include "ryzanstein.rules.wanted" (list $ .name) -}}
{{- $groups = append $groups (include "ryzanstein.rules.group" (list $rules .) | fromYaml) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "groups" $groups) -}}
{{- end }}

{{/* Whether a group has its metrics here: (list $ name). Empty or "true". */}}
{{- define "ryzanstein.rules.wanted" -}}
{{- $root := index . 0 -}}
{{- $name := index . 1 | trimPrefix "ryzanstein-" -}}
{{- if eq $name "autoscaling" -}}
{{- range include "ryzanstein.pools" $root | fromYaml }}{{ if has .autoscaling.mode (list "builtin" "keda") }}true{{ end }}{{ end -}}
{{- else if has $name (list "kubernetes" "gpu") -}}
{{- if get $root.Values.monitoring.rules $name }}true{{ end -}}
{{- else -}}
true
{{- end -}}
{{- end }}

{{/* A group with the overrides: (list rules-values group). */}}
{{- define "ryzanstein.rules.group" -}}
{{- $values := index . 0 -}}
{{- $group := index . 1 -}}
{{- $rules := list -}}
{{- range $rule := $group.rules -}}
{{- $own := default dict (get $values.overrides (default "" $rule.alert)) -}}
{{- if and $rule.alert (ne (toString $own.enabled) "false") -}}
{{- $severity := ternary (dict "severity" $own.severity) dict (not (empty $own.severity)) -}}
{{- $labels := merge (dict) (default dict $own.labels) $severity $rule.labels $values.labels -}}
{{- $rules = append $rules (merge (dict "labels" $labels "for" (default $rule.for $own.for)) $rule) -}}
{{- else if $rule.record -}}
{{- $rules = append $rules $rule -}}
{{- end -}}
{{- end -}}
{{- toYaml (dict "name" $group.name "rules" $rules) -}}
{{- end }}

{{/* Every dashboard by file name; its objective is that of the rules. */}}
{{- define "ryzanstein.dashboards" -}}
{{- $budget := include "ryzanstein.rules.budget" .Values.monitoring.rules.slo.availability -}}
{{- range $path, $_ := .Files.Glob "files/dashboards/*.json" }}
{{- $name := base $path }}
{{- if or (ne $name "rz-k8s.json") (eq $.Values.monitoring.mode "operator") }}
{{ $name }}: |
  {{- $.Files.Get $path | replace "/ 0.001" (printf "/ %s" $budget) | trim | nindent 2 }}
{{- end }}
{{- end }}
{{- end }}
