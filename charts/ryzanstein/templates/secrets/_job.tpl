{{/* Whether the chart's Job makes the password. Empty or "true". */}}
{{- define "ryzanstein.secrets.generated" -}}
{{- $auth := .Values.redis.auth -}}
{{- if and .Values.secrets.generate (eq .Values.redis.mode "bundled") $auth.enabled (not $auth.existingSecret.name) }}true{{ end -}}
{{- end }}

{{/* Whether anything is made in the cluster: the password, or certificates. Empty or "true". */}}
{{- define "ryzanstein.secrets.made" -}}
{{- if or (include "ryzanstein.secrets.generated" .) (include "ryzanstein.tls.generated" .) }}true{{ end -}}
{{- end }}

{{- define "ryzanstein.secrets.job" -}}
{{- $of := list . "secrets" -}}
{{- $config := include "ryzanstein.config" (list . (dict "resources" .Values.secrets.resources "topologySpread" "none")) | fromYaml -}}
{{- $name := include "ryzanstein.name" $of -}}
backoffLimit: 10
template:
  metadata:
    {{- $first := ternary "secrets" "certificates" (not (empty (include "ryzanstein.secrets.generated" .))) }}
    {{- include "ryzanstein.pod.metadata" (dict "of" $of "config" $config "container" $first) | nindent 4 }}
  spec:
    {{- include "ryzanstein.pod.spec" (dict "of" $of "config" $config "serviceAccount" $name) | nindent 4 }}
    restartPolicy: OnFailure
    containers:
      {{- if include "ryzanstein.tls.generated" . }}
      {{- include "ryzanstein.tls.container" . | nindent 6 }}
      {{- end }}
      {{- if include "ryzanstein.secrets.generated" . }}
      {{- $passwords := list (list "secrets" (include "ryzanstein.redis.secret" .) (list "password")) }}
      {{- if include "ryzanstein.redis.users" . }}
      {{- $passwords = append $passwords (list "users" (include "ryzanstein.redis.users.secret" .) (include "ryzanstein.redis.components" . | fromJsonArray)) }}
      {{- end }}
      {{- range $passwords }}
      - name: {{ index . 0 }}
        image: {{ include "ryzanstein.image" (list $ "cli") }}
        imagePullPolicy: {{ $.Values.image.pullPolicy }}
        command: [ryzanstein, kube, ensure-secrets]
        args:
          - --namespace={{ $.Release.Namespace }}
          - --name={{ index . 1 }}
          {{- range index . 2 }}
          - --key={{ . }}
          {{- end }}
          - --label=app.kubernetes.io/instance={{ $.Release.Name }}
        {{- include "ryzanstein.container" $config | nindent 8 }}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
      {{- end }}
      {{- end }}
    volumes:
      - {name: tmp, emptyDir: {}}
{{- end }}
