{{/* How long pods may take to end, in one place. */}}

{{/* Gateway: not ready but accepting (endpoints are removed), then streams finish, then 15 s to close and export. */}}
{{- define "ryzanstein.drain.gateway" -}}
{{- with .Values.gateway.drain }}{{ add .delaySeconds .streamSeconds 15 }}{{ end -}}
{{- end }}

{{/* Worker, given its pool: requests go on, the rest is handed over, 2 s for the streams, then the ranks end. */}}
{{- define "ryzanstein.drain.worker" -}}
{{- add .drainSeconds 15 -}}
{{- end }}
