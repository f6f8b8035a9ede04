{{/* The settings of each ingress controller that streams need, as annotations. Numbers must be strings. */}}

{{/* Of the Ingress: nothing may be buffered, no stream may time out. */}}
{{- define "ryzanstein.ingress.streams" -}}
{{- $timeout := int64 .Values.ingress.timeoutSeconds -}}
{{- if eq .Values.ingress.controller "nginx" -}}
nginx.ingress.kubernetes.io/proxy-buffering: "off"
nginx.ingress.kubernetes.io/proxy-request-buffering: "off"
nginx.ingress.kubernetes.io/proxy-http-version: "1.1"
nginx.ingress.kubernetes.io/proxy-read-timeout: {{ $timeout | quote }}
nginx.ingress.kubernetes.io/proxy-send-timeout: {{ $timeout | quote }}
# The gateway's own limit, so that its error reaches the client.
nginx.ingress.kubernetes.io/proxy-body-size: {{ default 16777216 .Values.gateway.settings.maxBodyBytes | int64 | quote }}
{{- else if eq .Values.ingress.controller "haproxy" -}}
haproxy.org/timeout-server: "{{ $timeout }}s"
haproxy.org/timeout-tunnel: "{{ $timeout }}s"
{{- end -}}
{{- end }}

{{/* Of the Ingress of /v1/stream: a client comes back to its gateway. */}}
{{- define "ryzanstein.ingress.sticky" -}}
{{- if eq .Values.ingress.controller "nginx" -}}
nginx.ingress.kubernetes.io/affinity: cookie
nginx.ingress.kubernetes.io/affinity-mode: persistent
nginx.ingress.kubernetes.io/session-cookie-name: ryzanstein
{{- else if eq .Values.ingress.controller "haproxy" -}}
haproxy.org/cookie-persistence: ryzanstein
{{- end -}}
{{- end }}

{{/* The same of its Service, where Traefik looks. */}}
{{- define "ryzanstein.ingress.sticky.service" -}}
{{- if eq .Values.ingress.controller "traefik" -}}
traefik.ingress.kubernetes.io/service.sticky.cookie: "true"
traefik.ingress.kubernetes.io/service.sticky.cookie.name: ryzanstein
traefik.ingress.kubernetes.io/service.sticky.cookie.httponly: "true"
{{- end -}}
{{- end }}

{{/* An Ingress: (dict "root" $ "name" component "paths" list "annotations" map, which "own" or ingress.annotations outweigh). */}}
{{- define "ryzanstein.ingress" -}}
{{- $root := .root -}}
{{- $hosts := dict -}}
{{- range $host, $of := $root.Values.ingress.hosts -}}
{{- if not (kindIs "invalid" $of) -}}
{{- $_ := set $hosts $host $of -}}
{{- end -}}
{{- end -}}
{{- $service := include "ryzanstein.name" (list $root .name) -}}
apiVersion: networking.k8s.io/v1
kind: Ingress
metadata:
  {{- include "ryzanstein.metadata" (dict "of" (list $root "gateway") "name" $service
    "annotations" (merge (dict) (ternary .own $root.Values.ingress.annotations (hasKey . "own")) .annotations)) | nindent 2 }}
spec:
  {{- with $root.Values.ingress.className }}
  ingressClassName: {{ . }}
  {{- end }}
  {{- $tls := list }}
  {{- range $host, $of := $hosts }}
  {{- if $of.tlsSecret }}
  {{- $tls = append $tls (dict "hosts" (list $host) "secretName" $of.tlsSecret) }}
  {{- end }}
  {{- end }}
  {{- with $tls }}
  tls:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  rules:
    {{- $paths := .paths }}
    {{- range $host := default (list "") (keys $hosts | sortAlpha) }}
    - {{ with $host }}host: {{ quote . }}
      {{ end }}http:
        paths:
          {{- range $paths }}
          - {path: {{ . }}, pathType: Prefix, backend: {service: {name: {{ $service }}, port: {name: http}}}}
          {{- end }}
    {{- end }}
{{- end }}

{{/* Paths that clients may reach from outside: not metrics, documentation, administration or probes. */}}
{{- define "ryzanstein.paths" -}}
["/v1", "/tokenize", "/detokenize"]
{{- end }}
