{{/* Whether the chart's Job makes the password. Empty or "true". */}}
{{- define "ryzanstein.secrets.generated" -}}
{{- $auth := .Values.redis.auth -}}
{{- if and .Values.secrets.generate (eq .Values.redis.mode "bundled") $auth.enabled (not $auth.existingSecret.name) }}true{{ end -}}
{{- end }}

{{- define "ryzanstein.secrets.job" -}}
{{- $of := list . "secrets" -}}
{{- $config := include "ryzanstein.config" (list . (dict "resources" .Values.secrets.resources "topologySpread" "none")) | fromYaml -}}
{{- $name := include "ryzanstein.name" $of -}}
backoffLimit: 10
template:
  metadata:
    {{- include "ryzanstein.pod.metadata" (dict "of" $of "config" $config) | nindent 4 }}
  spec:
    {{- include "ryzanstein.pod.spec" (dict "of" $of "config" $config "serviceAccount" $name) | nindent 4 }}
    restartPolicy: OnFailure
    containers:
      - name: secrets
        image: {{ include "ryzanstein.image" (list . "cli") }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        command: [ryzanstein, kube, ensure-secrets]
        args:
          - --namespace={{ .Release.Namespace }}
          - --name={{ include "ryzanstein.redis.secret" . }}
          - --label=app.kubernetes.io/instance={{ .Release.Name }}
        {{- include "ryzanstein.container" $config | nindent 8 }}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
    volumes:
      - {name: tmp, emptyDir: {}}
{{- end }}
