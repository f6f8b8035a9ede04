{{/* Mutual TLS between services: where certificates come from, and how pods get them. */}}

{{/* The prefix of the names of the secrets. */}}
{{- define "ryzanstein.tls.prefix" -}}
{{- ternary .Values.tls.secretPrefix (printf "%s-tls" (include "ryzanstein.fullname" .)) (eq .Values.tls.mode "existing") -}}
{{- end }}

{{/* The common part of the names in certificates. */}}
{{- define "ryzanstein.tls.domain" -}}
{{- printf "%s.%s" .Release.Name .Release.Namespace -}}
{{- end }}

{{/* Whether KEDA calls routers, with a certificate. Empty or "true". */}}
{{- define "ryzanstein.keda.certified" -}}
{{- if and (ne .Values.tls.mode "off") (has "keda-routers" (include "ryzanstein.scale.modes" . | fromJsonArray)) }}true{{ end -}}
{{- end }}

{{/* Components with a certificate: the services, people's tools, the bundled Redis, and KEDA where it calls routers. */}}
{{- define "ryzanstein.tls.components" -}}
{{- $redis := ternary "redis" "" (eq .Values.redis.mode "bundled") -}}
{{- $keda := ternary "keda" "" (not (empty (include "ryzanstein.keda.certified" .))) -}}
{{- toJson (without (concat (include "ryzanstein.services" . | fromJsonArray) (list "admin" $redis $keda)) "") -}}
{{- end }}

{{/* Whether the chart's Job makes certificates. Empty or "true". */}}
{{- define "ryzanstein.tls.generated" -}}
{{- if eq .Values.tls.mode "generated" }}true{{ end -}}
{{- end }}

{{/* The phase of TLS on servers and clients. "auto" is decided once for all objects: pods come and go between two looks. */}}
{{- define "ryzanstein.tls.phase" -}}
{{- if eq .Values.tls.phase "auto" -}}
{{- $_ := set .Values.tls "phase" (include "ryzanstein.tls.next" .) -}}
{{- end -}}
{{- .Values.tls.phase -}}
{{- end }}

{{/*
The phase that loses nothing: one further than the pod that is furthest behind, pods that are about to end included.
Nothing runs before the first installation, and nothing is seen without a cluster.
*/}}
{{- define "ryzanstein.tls.next" -}}
{{- $seen := list -}}
{{- if .Release.IsUpgrade -}}
{{- $components := include "ryzanstein.tls.components" . | fromJsonArray -}}
{{- range lookup "v1" "Pod" .Release.Namespace "" | dig "items" list -}}
{{- $labels := default dict .metadata.labels -}}
{{- $ours := and (eq (get $labels "app.kubernetes.io/name") $.Chart.Name) (eq (get $labels "app.kubernetes.io/instance") $.Release.Name) -}}
{{- if and $ours (has (get $labels "app.kubernetes.io/component") $components) (not (has .status.phase (list "Succeeded" "Failed"))) -}}
{{- $seen = append $seen (include "ryzanstein.tls.seen" .spec) -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- if has "plain" $seen -}}offer{{- else if has "offer" $seen -}}use{{- else -}}require{{- end -}}
{{- end }}

{{/* The phase of a pod that runs, by its spec; "plain" without certificates, empty for Redis, which has no more than them. */}}
{{- define "ryzanstein.tls.seen" -}}
{{- $seen := "plain" -}}
{{- range .volumes -}}
{{- if eq .name "tls" }}{{- $seen = "" -}}{{ end -}}
{{- end -}}
{{- if not $seen -}}
{{- range (first .containers).env -}}
{{- if eq .name "RYZANSTEIN_TLS_PHASE" }}{{- $seen = .value -}}{{ end -}}
{{- end -}}
{{- end -}}
{{- $seen -}}
{{- end }}

{{- define "ryzanstein.tls.env" -}}
{{- if ne .Values.tls.mode "off" }}
# A folder, looked at every second: a certificate that is renewed needs no restart.
RYZANSTEIN_TLS_FOLDER: /etc/ryzanstein/tls
RYZANSTEIN_TLS_PHASE: {{ include "ryzanstein.tls.phase" . }}
{{- end }}
{{- end }}

{{- define "ryzanstein.tls.mounts" -}}
{{- if ne .Values.tls.mode "off" }}
- {name: tls, mountPath: /etc/ryzanstein/tls, readOnly: true}
{{- end }}
{{- end }}

{{/* (list $ component) */}}
{{- define "ryzanstein.tls.volumes" -}}
{{- $root := index . 0 -}}
{{- if ne $root.Values.tls.mode "off" }}
- {name: tls, secret: {secretName: {{ include "ryzanstein.tls.prefix" $root }}-{{ index . 1 }}}}
{{- end }}
{{- end }}

{{/* The container that makes certificates and renews them. */}}
{{- define "ryzanstein.tls.container" -}}
- name: certificates
  image: {{ include "ryzanstein.image" (list . "cli") }}
  imagePullPolicy: {{ .Values.image.pullPolicy }}
  command: [ryzanstein, kube, ensure-certificates]
  args:
    - --namespace={{ .Release.Namespace }}
    - --prefix={{ include "ryzanstein.tls.prefix" . }}
    - --domain={{ include "ryzanstein.tls.domain" . }}
    - --label=app.kubernetes.io/instance={{ .Release.Name }}
    {{- range include "ryzanstein.tls.components" . | fromJsonArray }}
    - --component={{ . }}
    {{- end }}
    {{- if include "ryzanstein.redis.tls" . }}
    - --host=redis={{ include "ryzanstein.host" (list . "redis") }}
    {{- end }}
    {{- if include "ryzanstein.keda.certified" . }}
    - --host=router={{ include "ryzanstein.host" (list . "router") }}
    {{- end }}
  {{- $config := include "ryzanstein.config" (list . (dict "resources" .Values.secrets.resources)) | fromYaml }}
  {{- include "ryzanstein.container" $config | nindent 2 }}
  volumeMounts:
    - {name: tmp, mountPath: /tmp}
{{- end }}

{{- define "ryzanstein.validate.tls" -}}
{{- with .Values.tls -}}
{{- if and (eq .mode "existing") (not .secretPrefix) }}
tls.secretPrefix: tls.mode existing needs your secrets' names, PREFIX-gateway, PREFIX-router and so on
{{- end -}}
{{- if and .secretPrefix (ne .mode "existing") }}
tls.secretPrefix: has no effect with tls.mode {{ .mode }}; take existing
{{- end -}}
{{- if and (eq .mode "generated") (not $.Values.secrets.generate) }}
tls.mode: generated needs the Job that secrets.generate turns off; take certManager, existing or off
{{- end -}}
{{- if and (eq .mode "off") (has .phase (list "offer" "use")) }}
tls.phase: has no effect with tls.mode off
{{- end -}}
{{- end -}}
{{- end }}
