{{/* Environment variables: one map by name, so that a name is rendered once and users can override or remove any. */}}

{{/* include "ryzanstein.env" (dict "root" $ "own" map "config" component): common, own, settings, env; less envUnset. */}}
{{- define "ryzanstein.env" -}}
{{- $env := merge .own (include "ryzanstein.env.common" .root | fromYaml) -}}
{{- range $key, $value := .config.settings }}
{{- $_ := set $env (printf "RYZANSTEIN_%s" ($key | snakecase | upper)) (include "ryzanstein.env.value" $value) -}}
{{- end }}
{{- range $name, $value := .config.env }}
{{- $_ := set $env $name $value -}}
{{- end }}
{{- range .config.envUnset }}
{{- $_ := unset $env . -}}
{{- end }}
{{- range $name, $value := $env }}
- name: {{ $name }}
  {{- if kindIs "map" $value }}
  {{- toYaml $value | nindent 2 }}
  {{- else }}
  value: {{ include "ryzanstein.env.value" $value | quote }}
  {{- end }}
{{- end }}
{{- end }}

{{/* Helm reads whole numbers as floats and prints large ones as 1.6e+07. */}}
{{- define "ryzanstein.env.value" -}}
{{- if and (kindIs "float64" .) (eq . (floor .)) -}}
{{- int64 . -}}
{{- else -}}
{{- toString . -}}
{{- end -}}
{{- end }}

{{/* What all services are told. */}}
{{- define "ryzanstein.env.common" -}}
RYZANSTEIN_NAMESPACE: {{ default (printf "%s-%s" .Release.Namespace .Release.Name) .Values.redis.keyPrefix }}
RYZANSTEIN_LOG_LEVEL: {{ .Values.logLevel }}
RYZANSTEIN_HOST: {{ .Values.bindAddress | quote }}
# The pod's address: no DNS entry has to appear before peers can call.
RYZANSTEIN_ADVERTISE_HOST: {valueFrom: {fieldRef: {fieldPath: status.podIP}}}
RYZANSTEIN_METRICS_PORT: "9100"
REDIS_PASSWORD:
  valueFrom:
    secretKeyRef:
      name: {{ include "ryzanstein.redis.secretName" . }}
      key: password
RYZANSTEIN_REDIS_URL: {{ printf "redis://:$(REDIS_PASSWORD)@%s:6379/0" (include "ryzanstein.host" (list . "redis")) }}
{{- end }}

{{- define "ryzanstein.redis.secretName" -}}
{{- printf "%s-redis-auth-%d" (include "ryzanstein.fullname" .) (int .Values.redis.auth.generation) -}}
{{- end }}
