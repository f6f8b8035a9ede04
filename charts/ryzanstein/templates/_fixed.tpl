{{/*
What Kubernetes fixes when it makes an object. Helm would meet the refusal in the middle of an upgrade, with half of the objects
changed, so values that differ from the objects of the release are refused before. `helm template` sees no objects.
*/}}

{{/* The chart's own claims by name: {of: component [pool], storage:, values: their path, kept: with what is in them}. */}}
{{- define "ryzanstein.claims" -}}
{{- $claims := dict -}}
{{- if and (eq .Values.redis.mode "bundled") .Values.redis.persistence.enabled (not (include "ryzanstein.redis.claims" .)) -}}
{{- $_ := set $claims (include "ryzanstein.redis.claim" .) (dict "of" (list "redis") "storage" (include "ryzanstein.redis.storage" . | fromYaml) "values" "redis.persistence" "kept" true) -}}
{{- end -}}
{{- range $component, $used := dict "prometheus" (eq .Values.monitoring.mode "bundled") "loki" .Values.monitoring.loki.enabled -}}
{{- $persistence := (get $.Values.monitoring $component).persistence -}}
{{- if and $used $persistence.enabled -}}
{{- $_ := set $claims (include "ryzanstein.name" (list $ $component)) (dict "of" (list $component) "storage" (merge (dict "accessModes" (list "ReadWriteOnce")) $persistence) "values" (printf "monitoring.%s.persistence" $component)) -}}
{{- end -}}
{{- end -}}
{{- range $name, $pool := include "ryzanstein.pools" . | fromYaml -}}
{{- if and (include "ryzanstein.pool.fetches" $pool) (eq $pool.storage.type "pvc") (not $pool.storage.existingClaim) -}}
{{- $_ := set $claims (include "ryzanstein.storage.shared" (list $ $name)) (dict "of" (list "worker" $name) "storage" $pool.storage "values" (printf "workers.pools.%s.storage" $name) "kept" true) -}}
{{- end -}}
{{- end -}}
{{- with .Values.finetuner -}}
{{- if and .enabled (not .storage.existingClaim) -}}
{{- $_ := set $claims (include "ryzanstein.finetuner.claim" $) (dict "of" (list "finetuner") "storage" .storage "values" "finetuner.storage" "kept" true) -}}
{{- end -}}
{{- end -}}
{{- toYaml $claims -}}
{{- end }}

{{/* A claim's spec in words. */}}
{{- define "ryzanstein.fixed.words" -}}
{{ .resources.requests.storage }} {{ join "," .accessModes }} of {{ with .storageClassName }}the class {{ . }}{{ else }}the default class{{ end }}
{{- end }}

{{- define "ryzanstein.validate.fixed" -}}
{{- include "ryzanstein.fixed.name" . }}
{{ include "ryzanstein.fixed.sets" . }}
{{ include "ryzanstein.fixed.claims" . }}
{{ include "ryzanstein.fixed.service" . }}
{{- end }}

{{/* The names of all objects, and the prefix of all keys in Redis. With others, Redis and the claims would be made anew, or be read in vain. */}}
{{- define "ryzanstein.fixed.name" -}}
{{- $wanted := include "ryzanstein.name" (list . "gateway") -}}
{{- range lookup "apps/v1" "Deployment" .Release.Namespace "" | dig "items" list -}}
{{- $name := .metadata.name -}}
{{- $labels := default dict .metadata.labels -}}
{{- $same := eq (get (default dict .metadata.annotations) "meta.helm.sh/release-name") $.Release.Name -}}
{{- range $label, $value := include "ryzanstein.selectorLabels" (list $ "gateway") | fromYaml -}}
{{- $same = and $same (eq $value (get $labels $label)) -}}
{{- end -}}
{{- if and $same (ne $name $wanted) }}
fullnameOverride: nothing has been changed, since other names are other objects, with an empty Redis and empty claims; the objects of this release are called {{ trimSuffix "-gateway" $name }}, and with these values {{ trimSuffix "-gateway" $wanted }}.
  Keep the names with --set fullnameOverride={{ trimSuffix "-gateway" $name }}. Or install a second release with the new names, move clients, keys and routes to it, and uninstall this one.
{{- else if $same -}}
{{- $prefix := include "ryzanstein.redis.namespace" $ -}}
{{- range dig "spec" "template" "spec" "containers" list . -}}
{{- range .env -}}
{{- if and (eq .name "RYZANSTEIN_NAMESPACE") (ne (default $prefix .value) $prefix) }}
redis.keyPrefix: nothing has been changed, since keys, routes, usage and jobs in Redis would be left behind; their names begin with {{ .value }}, and with these values {{ $prefix }}.
  Keep the prefix with --set redis.keyPrefix={{ .value }}. Or install a second release with the new one, move clients, keys and routes to it, and uninstall this one.
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* StatefulSets: their claim templates. */}}
{{- define "ryzanstein.fixed.sets" -}}
{{- $sets := dict -}}
{{- if and (eq .Values.redis.mode "bundled") (include "ryzanstein.redis.claims" .) -}}
{{- $storage := ternary (include "ryzanstein.redis.storage" . | fromYaml) dict .Values.redis.persistence.enabled -}}
{{- $_ := set $sets (include "ryzanstein.name" (list . "redis")) (dict "values" "redis.persistence" "storage" $storage) -}}
{{- end -}}
{{- range $name, $pool := include "ryzanstein.pools" . | fromYaml -}}
{{- $storage := ternary $pool.storage dict (not (empty (include "ryzanstein.storage.perPod" $pool))) -}}
{{- $_ := set $sets (include "ryzanstein.name" (list $ "worker" $name)) (dict "values" (printf "workers.pools.%s.storage" $name) "storage" $storage "pool" true) -}}
{{- end -}}
{{- range $name, $set := $sets -}}
{{- range $there := list (lookup "apps/v1" "StatefulSet" $.Release.Namespace $name) -}}
{{- $templates := dig "spec" "volumeClaimTemplates" list $there -}}
{{- $wanted := "none" -}}
{{- with $set.storage }}{{- $wanted = include "ryzanstein.storage.claim" . | fromYaml | include "ryzanstein.fixed.words" -}}{{ end -}}
{{- $has := "none" -}}
{{- with $templates }}{{- $has = include "ryzanstein.fixed.words" (first .).spec -}}{{ end -}}
{{- $same := eq $has $wanted -}}
{{- if and $templates $set.storage -}}
{{- $same = include "ryzanstein.fixed.same" (list (first $templates).spec (include "ryzanstein.storage.claim" $set.storage | fromYaml)) -}}
{{- end -}}
{{- if and $there (not $same) }}
{{ $set.values }}: nothing has been changed, since Kubernetes fixes the claims that a StatefulSet makes; {{ $name }} makes {{ $has }} for each pod, and with these values {{ $wanted }}.
  Keep the value{{ if $set.pool }}, or give the pool another name{{ end }}. Or delete the StatefulSet without its pods, which serve on and are replaced one after another, and upgrade again{{ if not $set.pool }} with --take-ownership{{ end }}:
  kubectl -n {{ $.Release.Namespace }} delete statefulset {{ $name }} --cascade=orphan --ignore-not-found
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Whether two claims are one for the API server: (list spec spec). Empty or "true". */}}
{{- define "ryzanstein.fixed.same" -}}
{{- $one := index . 0 -}}
{{- $other := index . 1 -}}
{{- $sizes := list (include "ryzanstein.bytes" $one.resources.requests.storage) (include "ryzanstein.bytes" $other.resources.requests.storage) -}}
{{- $classes := list (default "" $one.storageClassName) (default "" $other.storageClassName) -}}
{{- if and (eq (first $sizes) (last $sizes)) (eq (first $classes) (last $classes)) (eq (sortAlpha $one.accessModes | join ",") (sortAlpha $other.accessModes | join ",")) }}true{{ end -}}
{{- end }}

{{/* The chart's own claims. */}}
{{- define "ryzanstein.fixed.claims" -}}
{{- range $name, $claim := include "ryzanstein.claims" . | fromYaml -}}
{{- range $there := list (lookup "v1" "PersistentVolumeClaim" $.Release.Namespace $name) -}}
{{- if $there -}}
{{- $wanted := include "ryzanstein.storage.claim" $claim.storage | fromYaml -}}
{{- $class := default "" $wanted.storageClassName -}}
{{- /* The server fills in the default class, so the annotation says which one the values named. */}}
{{- $named := dig "metadata" "annotations" "ryzanstein.dev/storage-class" $class $there -}}
{{- $other := or (ne $class $named) (and $class (ne $class (default "" $there.spec.storageClassName))) -}}
{{- $modes := ne (sortAlpha $wanted.accessModes | join ",") (sortAlpha $there.spec.accessModes | join ",") -}}
{{- if or $other $modes (not (include "ryzanstein.fixed.resizes" (list $there $wanted))) }}
{{ $claim.values }}: nothing has been changed, since a claim keeps its class and access modes, and grows only if its class allows and it is bound; {{ $name }} has {{ include "ryzanstein.fixed.words" $there.spec }}, and with these values {{ include "ryzanstein.fixed.words" $wanted }}.
  Keep the value. Or upgrade without the claim, delete it with its data, and upgrade again:
  kubectl -n {{ $.Release.Namespace }} delete persistentvolumeclaim {{ $name }} --ignore-not-found
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}

{{/* Whether a claim has a size, or can grow to it: (list claim spec). Empty or "true". */}}
{{- define "ryzanstein.fixed.resizes" -}}
{{- $there := index . 0 -}}
{{- $has := include "ryzanstein.bytes" $there.spec.resources.requests.storage | int64 -}}
{{- $wants := include "ryzanstein.bytes" (index . 1).resources.requests.storage | int64 -}}
{{- if eq $has $wants -}}
true
{{- else if and (lt $has $wants) (eq (dig "status" "phase" "" $there) "Bound") -}}
{{- if (lookup "storage.k8s.io/v1" "StorageClass" "" (default "-" $there.spec.storageClassName)).allowVolumeExpansion }}true{{ end -}}
{{- end -}}
{{- end }}

{{/* The load balancer's class. Some clouds fill in one, so an annotation says which one the values named. */}}
{{- define "ryzanstein.fixed.service" -}}
{{- $name := include "ryzanstein.name" (list . "gateway") -}}
{{- $there := lookup "v1" "Service" .Release.Namespace $name -}}
{{- $named := dig "metadata" "annotations" "ryzanstein.dev/load-balancer-class" "" $there -}}
{{- $has := dig "spec" "loadBalancerClass" "" $there -}}
{{- with .Values.gateway.service -}}
{{- $other := ternary (ne .loadBalancerClass $has) (ne $named "") (ne .loadBalancerClass "") -}}
{{- if and $other (eq .type "LoadBalancer") (eq (dig "spec" "type" "" $there) "LoadBalancer") }}
gateway.service.loadBalancerClass: nothing has been changed, since a Service of type LoadBalancer keeps its class; {{ $name }} has {{ default "none" $has }}, and with these values {{ default "none" .loadBalancerClass }}.
  Keep the value. Or upgrade with --set gateway.service.type=ClusterIP, which takes its address, and upgrade again.
{{- end -}}
{{- end -}}
{{- end }}
