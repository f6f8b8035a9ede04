{{/* How long pods may take to end, in one place. */}}

{{/* Gateway: not ready but accepting (endpoints are removed), then requests finish, then 15 s to close and export. */}}
{{- define "ryzanstein.drain.gateway" -}}
{{- add .Values.gateway.drain.delaySeconds .Values.gateway.drain.streamSeconds 15 -}}
{{- end }}

{{/* Worker, given its pool: requests go on, the rest is handed over, 2 s for their streams, then the ranks end. */}}
{{- define "ryzanstein.drain.worker" -}}
{{- add .drainSeconds 15 -}}
{{- end }}

{{/* A ceiling for what carries no streams: it ends in 2 s. */}}
{{- define "ryzanstein.drain.other" -}}30{{- end }}
