{{/* Where the services send traces; empty: nowhere. */}}
{{- define "ryzanstein.tracing.endpoint" -}}
{{- if .Values.monitoring.collector.enabled -}}
http://{{ include "ryzanstein.host" (list . "collector") }}:4317
{{- else -}}
{{- include "ryzanstein.tracing.store" . -}}
{{- end -}}
{{- end }}

{{/* Where traces are kept; empty: nowhere. */}}
{{- define "ryzanstein.tracing.store" -}}
{{- if eq .Values.tracing.mode "bundled" -}}
http://{{ include "ryzanstein.host" (list . "jaeger") }}:4317
{{- else if eq .Values.tracing.mode "otlp" -}}
{{- .Values.tracing.endpoint -}}
{{- end -}}
{{- end }}

{{/* Where its programs listen: any address, as a URL spells it. */}}
{{- define "ryzanstein.anywhere" -}}
{{- ternary .Values.bindAddress (printf "[%s]" .Values.bindAddress) (eq .Values.bindAddress "0.0.0.0") -}}
{{- end }}

{{/*
A pod of somebody else's program that watches ours, and its Service: (dict
  "of" (list $ component)   "values" its values   "args" (list argument)   "env" (dict name value)   "ports" (dict name number)
  "probe" (dict "path" "port")   "config" text of its configuration: the pod follows it
  "mounts" (dict path mount)   "volumes" (dict name volume)   "user" of an image that names none   "serviceAccount" of its own).
Losing one costs no request, so its probes are patient.
*/}}
{{- define "ryzanstein.watcher" -}}
{{- $root := index .of 0 -}}
{{- $component := index .of 1 -}}
{{- $config := include "ryzanstein.config" (list $root .values) | fromYaml -}}
{{- if and .user (not $root.Values.openshift) -}}
{{- $_ := set $config "securityContext" (merge $config.securityContext (dict "runAsUser" .user "runAsGroup" .user "fsGroup" .user)) -}}
{{- end -}}
{{- $spec := dict "of" .of "config" $config -}}
{{- with .serviceAccount -}}
{{- $_ := set $spec "serviceAccount" . -}}
{{- end -}}
apiVersion: apps/v1
kind: Deployment
metadata:
  {{- include "ryzanstein.metadata" (dict "of" .of) | nindent 2 }}
spec:
  replicas: 1
  # Its stored data have one owner.
  strategy: {type: Recreate}
  selector:
    matchLabels:
      {{- include "ryzanstein.selectorLabels" .of | nindent 6 }}
  template:
    metadata:
      {{- include "ryzanstein.pod.metadata" (dict "of" .of "config" $config "annotations" (dict "checksum/config" (sha256sum .config))) | nindent 6 }}
    spec:
      {{- include "ryzanstein.pod.spec" $spec | nindent 6 }}
      terminationGracePeriodSeconds: {{ include "ryzanstein.drain.other" $root }}
      containers:
        - name: {{ $component }}
          image: {{ include "ryzanstein.image.reference" (list $root $config.image) }}
          imagePullPolicy: {{ $root.Values.image.pullPolicy }}
          {{- with .args }}
          args:
            {{- toYaml . | nindent 12 }}
          {{- end }}
          {{- include "ryzanstein.container" $config | nindent 10 }}
          ports:
            {{- range $name, $port := .ports }}
            - {name: {{ $name }}, containerPort: {{ $port }}}
            {{- end }}
          startupProbe: {httpGet: {{ toJson .probe }}, periodSeconds: 2, timeoutSeconds: 5, failureThreshold: 90}
          livenessProbe: {httpGet: {{ toJson .probe }}, periodSeconds: 30, timeoutSeconds: 5, failureThreshold: 5}
          readinessProbe: {httpGet: {{ toJson .probe }}, periodSeconds: 10, timeoutSeconds: 5, failureThreshold: 3}
          {{- with include "ryzanstein.env.list" (mergeOverwrite (dict) .env $config.env) | trim }}
          env:
            {{- . | nindent 12 }}
          {{- end }}
          volumeMounts:
            {{- range $path, $mount := merge (dict "/tmp" (dict "name" "tmp")) .mounts $config.extraVolumeMounts }}
            - {{ toYaml (merge (dict "mountPath" $path) $mount) | nindent 14 | trim }}
            {{- end }}
      volumes:
        {{- range $name, $volume := merge (dict "tmp" (dict "emptyDir" dict)) .volumes $config.extraVolumes }}
        - {{ toYaml (merge (dict "name" $name) $volume) | nindent 10 | trim }}
        {{- end }}
---
apiVersion: v1
kind: Service
metadata:
  {{- include "ryzanstein.metadata" (dict "of" .of) | nindent 2 }}
spec:
  selector:
    {{- include "ryzanstein.selectorLabels" .of | nindent 4 }}
  ports:
    {{- range $name, $port := .ports }}
    - {name: {{ $name }}, port: {{ $port }}, targetPort: {{ $name }}}
    {{- end }}
{{- end }}
