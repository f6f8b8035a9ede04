{{/* Where a pool's model is, what clients call it, how it comes into the pod. Each takes the pool, or (list $ name pool). */}}

{{/*
The models of a pool's pods, each as a pool of one model: the pool's keys, its own over them, `root`, where its volume is mounted,
and `volume`, that volume's name. Fetched models share the pool's storage. A list as JSON.
*/}}
{{- define "ryzanstein.pool.models" -}}
{{- $models := list -}}
{{- range $index, $own := default (list dict) .models -}}
{{- $model := mergeOverwrite (deepCopy (omit $ "models" "settings")) (deepCopy $own) -}}
{{- $shared := or (not $.models) (eq (include "ryzanstein.model.scheme" $model) "hf") -}}
{{- $models = append $models (merge (dict "root" (ternary "/models" (printf "/sources/%d" $index) $shared)
  "volume" (ternary "models" (printf "models-%d" $index) $shared)) $model) -}}
{{- end -}}
{{- toJson $models -}}
{{- end }}

{{/* The names of a pool's models; a list as JSON. */}}
{{- define "ryzanstein.pool.names" -}}
{{- $names := list -}}
{{- range include "ryzanstein.pool.models" . | fromJsonArray -}}
{{- $names = append $names (include "ryzanstein.model.name" .) -}}
{{- end -}}
{{- toJson $names -}}
{{- end }}

{{/* Whether a pool's pods fetch a model from a hub. Empty or "true". */}}
{{- define "ryzanstein.pool.fetches" -}}
{{- $fetches := "" -}}
{{- range include "ryzanstein.pool.models" . | fromJsonArray -}}
{{- if eq (include "ryzanstein.model.scheme" .) "hf" -}}{{- $fetches = "true" -}}{{- end -}}
{{- end -}}
{{- $fetches -}}
{{- end }}

{{/* How many workers a pod has at the most; 0 without pools of several models. */}}
{{- define "ryzanstein.pools.most" -}}
{{- $most := 0 -}}
{{- range include "ryzanstein.pools" . | fromYaml -}}
{{- $most = max $most (len .models) -}}
{{- end -}}
{{- $most -}}
{{- end }}

{{- define "ryzanstein.model.scheme" -}}
{{- regexFind "^[a-z]*" (ternary "bundled" .model (empty .model)) -}}
{{- end }}

{{/* Without scheme. */}}
{{- define "ryzanstein.model.place" -}}
{{- regexReplaceAll "^[a-z]+://" .model "" -}}
{{- end }}

{{/* The folder that the worker reads. */}}
{{- define "ryzanstein.model.path" -}}
{{- $scheme := include "ryzanstein.model.scheme" . -}}
{{- $place := include "ryzanstein.model.place" . -}}
{{- if eq $scheme "bundled" -}}
/app/models/smollm2-135m-instruct
{{- else if eq $scheme "hf" -}}
{{- /* as `ryzanstein fetch` calls it */ -}}
{{ default "/models" .root }}/{{ $place | trimSuffix "@main" | replace "/" "--" | replace ":" "--" }}
{{- else if eq $scheme "pvc" -}}
{{- regexReplaceAll "^[^/]+" $place (default "/models" .root) -}}
{{- else if eq $scheme "oci" -}}
{{ default "/models" .root }}{{ regexReplaceAll (include "ryzanstein.model.reference" .) $place "$2" }}
{{- else if eq $scheme "hostpath" -}}
{{ default "/models" .root }}
{{- else -}}
{{- $place -}}
{{- end -}}
{{- end }}

{{/* An image with a tag or digest, then perhaps a folder in it. */}}
{{- define "ryzanstein.model.reference" -}}
^(.*(?::[^/:@]+|@sha256:[0-9a-f]{64}))(/.*)?$
{{- end }}

{{- define "ryzanstein.model.name" -}}
{{- if .servedName -}}
{{- .servedName -}}
{{- else if eq (include "ryzanstein.model.scheme" .) "bundled" -}}
smollm2-135m-instruct
{{- else -}}
{{- include "ryzanstein.model.place" . | regexFind "[^/]+/?$" | trimSuffix "/" | splitList "@" | first | splitList ":" | first -}}
{{- end -}}
{{- end }}

{{/*
What all pools serve, one a line of a ConfigMap that routers watch: in their environment, a model that comes or goes would
restart them, and kubelet renews a mounted ConfigMap after a minute only.
*/}}
{{- define "ryzanstein.models" -}}
{{- $names := list -}}
{{- range include "ryzanstein.pools" . | fromYaml -}}
{{- $names = concat $names (include "ryzanstein.pool.names" . | fromJsonArray) -}}
{{- end -}}
{{- $names | uniq | sortAlpha | join "\n" -}}
{{- end }}

{{/* Whether the model is in a volume at /models. Empty or "true". */}}
{{- define "ryzanstein.model.mounted" -}}
{{- if has (include "ryzanstein.model.scheme" .) (list "hf" "pvc" "oci" "hostpath") }}true{{ end -}}
{{- end }}

{{/* That volume, except when it is a claim template: (list $ name pool). */}}
{{- define "ryzanstein.model.volume" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 2 -}}
{{- $scheme := include "ryzanstein.model.scheme" $pool -}}
{{- $place := include "ryzanstein.model.place" $pool -}}
{{- if eq $scheme "pvc" -}}
persistentVolumeClaim: {claimName: {{ regexFind "^[^/]+" $place }}, readOnly: true}
{{- else if eq $scheme "oci" -}}
image:
  reference: {{ include "ryzanstein.model.image" (list $root $pool) }}
  pullPolicy: {{ $root.Values.image.pullPolicy }}
{{- else if eq $scheme "hostpath" -}}
hostPath: {path: {{ $place }}, type: Directory}
{{- else if eq $scheme "hf" -}}
{{- include "ryzanstein.storage.volume" (list $root (index . 1) $pool) -}}
{{- end -}}
{{- end }}

{{/* An OCI model's image, from the mirror if there is one: (list $ pool). */}}
{{- define "ryzanstein.model.image" -}}
{{- $place := include "ryzanstein.model.place" (index . 1) -}}
{{- $reference := regexReplaceAll (include "ryzanstein.model.reference" .) $place "$1" -}}
{{- $registry := regexFind "^[^/]+" $reference -}}
{{- $rest := trimPrefix (printf "%s/" $registry) $reference -}}
{{- if contains "@" $rest -}}
{{- include "ryzanstein.image.reference" (list (index . 0) (dict "registry" $registry "repository" (splitList "@" $rest | first) "digest" (splitList "@" $rest | last))) -}}
{{- else -}}
{{- include "ryzanstein.image.reference" (list (index . 0) (dict "registry" $registry "repository" (splitList ":" $rest | first) "tag" (splitList ":" $rest | last))) -}}
{{- end -}}
{{- end }}

{{/* Where fetched models are kept: (list $ name pool); empty for perPod, whose claims are templates. */}}
{{- define "ryzanstein.storage.volume" -}}
{{- $pool := index . 2 -}}
{{- $storage := $pool.storage -}}
{{- if eq $storage.type "emptyDir" -}}
emptyDir: {sizeLimit: {{ $storage.size }}}
{{- else if eq $storage.type "pvc" -}}
persistentVolumeClaim: {claimName: {{ default (include "ryzanstein.storage.shared" .) $storage.existingClaim }}}
{{- else if eq $storage.type "hostPath" -}}
hostPath: {path: {{ $storage.hostPath }}, type: DirectoryOrCreate}
{{- else if eq $storage.type "ephemeral" -}}
ephemeral:
  volumeClaimTemplate:
    spec:
      {{- include "ryzanstein.storage.claim" $storage | nindent 6 }}
{{- end -}}
{{- end }}

{{/* The claim that a pool's pods share: (list $ pool). */}}
{{- define "ryzanstein.storage.shared" -}}
{{- printf "%s-models" (include "ryzanstein.name" (list (index . 0) "worker" (index . 1))) -}}
{{- end }}

{{/* Whether a pool's StatefulSet makes a claim for each pod. Empty or "true". */}}
{{- define "ryzanstein.storage.perPod" -}}
{{- if and (include "ryzanstein.pool.fetches" .) (eq .storage.type "perPod") }}true{{ end -}}
{{- end }}

{{/* The spec of a claim. */}}
{{- define "ryzanstein.storage.claim" -}}
accessModes: {{ toJson (ternary (list "ReadWriteOnce") .accessModes (has (default "" .type) (list "perPod" "ephemeral"))) }}
{{- with .storageClass }}
storageClassName: {{ . }}
{{- end }}
resources: {requests: {storage: {{ .size }}}}
{{- end }}

{{/* The init container that brings an hf:// model: (list $ pool name). */}}
{{- define "ryzanstein.model.fetch" -}}
{{- $root := index . 0 -}}
{{- $pool := index . 1 -}}
{{- $env := dict "HF_HOME" "/tmp/huggingface" "USER" "ryzanstein" -}}
{{- /* Routers hear how far it is, by Redis. */ -}}
{{- $_ := set $env "RYZANSTEIN_NAMESPACE" (include "ryzanstein.redis.namespace" $root) -}}
{{- $_ := set $env "RYZANSTEIN_SERVED_MODEL_NAME" (include "ryzanstein.model.name" $pool) -}}
{{- $env = merge $env (include "ryzanstein.redis.user" (list $root "worker") | fromYaml) (include "ryzanstein.redis.env" $root | fromYaml) -}}
{{- with $pool.fetch.endpoint -}}
{{- $_ := set $env "HF_ENDPOINT" . -}}
{{- end -}}
{{- with $pool.fetch.tokenSecret -}}
{{- if .name -}}
{{- $_ := set $env "HF_TOKEN" (dict "valueFrom" (dict "secretKeyRef" (dict "name" .name "key" .key))) -}}
{{- end -}}
{{- end -}}
name: {{ index . 2 }}
image: {{ include "ryzanstein.image" (list $root "cli") }}
imagePullPolicy: {{ $root.Values.image.pullPolicy }}
command: [ryzanstein, fetch, {{ include "ryzanstein.model.place" $pool | quote }}, --to, /models]
{{ include "ryzanstein.container" (dict "containerSecurityContext" $pool.containerSecurityContext "resources" $pool.fetch.resources) }}
env:
  {{- include "ryzanstein.env.list" (mergeOverwrite $env (deepCopy $pool.fetch.env)) | trim | nindent 2 }}
volumeMounts:
  - {name: tmp, mountPath: /tmp}
  - {name: models, mountPath: /models}
  {{- include "ryzanstein.redis.mounts" $root | trim | nindent 2 }}
  {{- if include "ryzanstein.redis.tls.used" $root }}
  - {name: tls, mountPath: /etc/ryzanstein/tls/ca.crt, subPath: ca.crt, readOnly: true}
  {{- end }}
{{- end }}
