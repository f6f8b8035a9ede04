{{/* Mutual TLS between services: where certificates come from, and how pods get them. */}}

{{/* What the names of the secrets begin with. */}}
{{- define "ryzanstein.tls.prefix" -}}
{{- ternary .Values.tls.secretPrefix (printf "%s-tls" (include "ryzanstein.fullname" .)) (eq .Values.tls.mode "existing") -}}
{{- end }}

{{/* What the names in certificates have in common. */}}
{{- define "ryzanstein.tls.domain" -}}
{{- printf "%s.%s" .Release.Name .Release.Namespace -}}
{{- end }}

{{/* Who has a certificate: the services, people's tools, and the bundled Redis. */}}
{{- define "ryzanstein.tls.components" -}}
{{- $redis := ternary "redis" "" (eq .Values.redis.mode "bundled") -}}
{{- toJson (without (concat (include "ryzanstein.services" . | fromJsonArray) (list "admin" $redis)) "") -}}
{{- end }}

{{/* Whether the chart's Job makes certificates. Empty or "true". */}}
{{- define "ryzanstein.tls.generated" -}}
{{- if eq .Values.tls.mode "generated" }}true{{ end -}}
{{- end }}

{{- define "ryzanstein.tls.env" -}}
{{- if ne .Values.tls.mode "off" }}
# A folder, looked at every second: a certificate that is renewed needs no restart.
RYZANSTEIN_TLS_FOLDER: /etc/ryzanstein/tls
RYZANSTEIN_TLS_PHASE: {{ .Values.tls.phase }}
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
tls.mode: generated needs the Job that secrets.generate turns off; take certManager or existing
{{- end -}}
{{- if and (eq .mode "off") (ne .phase "require") }}
tls.phase: has no effect with tls.mode off
{{- end -}}
{{- end -}}
{{- end }}
