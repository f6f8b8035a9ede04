{{/* Every image of the chart comes from one of these two, so that a mirror and pull secrets hold for all of them. */}}

{{/* One of ours: include "ryzanstein.image" (list $ "worker-cpu"). A whole reference, as skaffold gives it, wins. */}}
{{- define "ryzanstein.image" -}}
{{- $root := index . 0 -}}
{{- $target := index . 1 -}}
{{- $image := $root.Values.image -}}
{{- $tag := printf "%s-%s" $target (default $root.Chart.AppVersion $image.tag) -}}
{{- $reference := include "ryzanstein.image.reference" (list $root (dict
  "registry" $image.registry "repository" $image.repository "tag" $tag
  "digest" (get (default dict $image.digests) $target))) -}}
{{- default $reference (get (default dict $image.references) $target) -}}
{{- end }}

{{/* Any image: include "ryzanstein.image.reference" (list $ .Values.redis.image). A digest wins over a tag. */}}
{{- define "ryzanstein.image.reference" -}}
{{- $image := index . 1 -}}
{{- $registry := default $image.registry (index . 0).Values.global.imageRegistry -}}
{{- $name := ternary (printf "%s/%s" $registry $image.repository) $image.repository (ne $registry "") -}}
{{- if $image.digest -}}
{{- printf "%s@%s" $name $image.digest -}}
{{- else -}}
{{- printf "%s:%s" $name $image.tag -}}
{{- end -}}
{{- end }}
