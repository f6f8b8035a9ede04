{{/* How services reach Redis, and what the bundled one runs. */}}

{{- define "ryzanstein.redis.url" -}}
{{- if eq .Values.redis.mode "external" -}}
{{- .Values.redis.external.url -}}
{{- else if include "ryzanstein.redis.tls.used" . -}}
rediss://{{ include "ryzanstein.host" (list . "redis") }}:6380/0
{{- else -}}
redis://{{ include "ryzanstein.host" (list . "redis") }}:6379/0
{{- end -}}
{{- end }}

{{/* Whether the bundled one speaks TLS. Empty or "true". */}}
{{- define "ryzanstein.redis.tls" -}}
{{- if and (eq .Values.redis.mode "bundled") (ne .Values.tls.mode "off") }}true{{ end -}}
{{- end }}

{{/* Whether services speak TLS to it: in the first phase it offers TLS only. Empty or "true". */}}
{{- define "ryzanstein.redis.tls.used" -}}
{{- if and (include "ryzanstein.redis.tls" .) (ne (include "ryzanstein.tls.phase" .) "offer") }}true{{ end -}}
{{- end }}

{{/* The ports of the bundled one by name. Two of them: a server's port speaks either plain text or TLS. */}}
{{- define "ryzanstein.redis.ports" -}}
{{- $ports := dict -}}
{{- $tls := include "ryzanstein.redis.tls" . -}}
{{- if or (not $tls) (ne (include "ryzanstein.tls.phase" .) "require") }}{{- $_ := set $ports "redis" 6379 -}}{{ end -}}
{{- if $tls }}{{- $_ := set $ports "redis-tls" 6380 -}}{{ end -}}
{{- toJson $ports -}}
{{- end }}

{{/* A generation of the password that the chart's Job makes: (list $ generation). */}}
{{- define "ryzanstein.redis.generated" -}}
{{- printf "%s-redis-auth-%d" (include "ryzanstein.fullname" (index . 0)) (int64 (index . 1)) -}}
{{- end }}

{{/* The secret that holds the password of now. */}}
{{- define "ryzanstein.redis.secret" -}}
{{- with .Values.redis.auth.existingSecret.name -}}
{{- . -}}
{{- else -}}
{{- include "ryzanstein.redis.generated" (list . .Values.redis.auth.generation) -}}
{{- end -}}
{{- end }}

{{/* The source of a volume with it as a file `password`. */}}
{{- define "ryzanstein.redis.passwordFile" -}}
{{- $key := ternary .Values.redis.auth.existingSecret.key "password" (ne .Values.redis.auth.existingSecret.name "") -}}
{{- toJson (dict "secretName" (include "ryzanstein.redis.secret" .) "items" (list (dict "key" $key "path" "password"))) -}}
{{- end }}

{{/* Whether each component is a user of its own. Empty or "true". */}}
{{- define "ryzanstein.redis.users" -}}
{{- if and .Values.redis.auth.enabled (eq .Values.redis.auth.users "components") }}true{{ end -}}
{{- end }}

{{/* The users then, whatever is enabled: a component that comes later finds its password, and Redis is not restarted for it. */}}
{{- define "ryzanstein.redis.components" -}}
{{- toJson (list "gateway" "router" "coordinator" "worker" "finetuner") -}}
{{- end }}

{{/* A generation of the components' passwords that the chart's Job makes: (list $ generation). */}}
{{- define "ryzanstein.redis.users.generated" -}}
{{- printf "%s-redis-users-%d" (include "ryzanstein.fullname" (index . 0)) (int64 (index . 1)) -}}
{{- end }}

{{/* The secret that holds the components' passwords, each under its name. */}}
{{- define "ryzanstein.redis.users.secret" -}}
{{- default (include "ryzanstein.redis.users.generated" (list . .Values.redis.auth.generation)) .Values.redis.auth.existingSecret.name -}}
{{- end }}

{{/*
What an upgrade needs first: pods would wait for a component's password that its secret lacks. Empty unless the secret of the common
password is there: before the first installation, and without a cluster to look at.
*/}}
{{- define "ryzanstein.redis.users.missing" -}}
{{- if and (include "ryzanstein.redis.users" .) (lookup "v1" "Secret" .Release.Namespace (include "ryzanstein.redis.secret" .)) -}}
{{- $name := include "ryzanstein.redis.users.secret" . -}}
{{- $secret := lookup "v1" "Secret" .Release.Namespace $name -}}
{{- $made := include "ryzanstein.secrets.generated" . -}}
{{- $needed := include (ternary "ryzanstein.redis.components" "ryzanstein.services" (eq $made "true")) . | fromJsonArray -}}
{{- $missing := without $needed "" -}}
{{- range keys (default dict $secret.data) -}}{{- $missing = without $missing . -}}{{- end -}}
{{- if and $made $secret $missing -}}
redis.auth.generation: the secret {{ $name }} has no password for {{ join ", " $missing }}; raise the generation by one
{{- else if and $missing (not $made) -}}
redis.auth.users: components need a password under {{ join ", " $missing }} in the secret {{ $name }}
{{- if eq .Values.redis.mode "external" }}, and these users in your Redis (files/redis-users.yaml){{ end }}; take shared to go on with one user for all
{{- end -}}
{{- end -}}
{{- end }}

{{/* The user of a service, as variables: (list $ component [pool]). */}}
{{- define "ryzanstein.redis.user" -}}
{{- if include "ryzanstein.redis.users" (index . 0) }}
RYZANSTEIN_REDIS_USERNAME: {{ index . 1 }}
{{- end }}
{{- end }}

{{- define "ryzanstein.redis.env" -}}
RYZANSTEIN_REDIS_URL: {{ include "ryzanstein.redis.url" . }}
{{- with .Values.redis.auth }}
{{- if .enabled }}
# A file, read at each connect: a password that changes needs no restart.
RYZANSTEIN_REDIS_PASSWORD_FILE: /etc/ryzanstein/redis/password
{{- end }}
{{- with .username }}
RYZANSTEIN_REDIS_USERNAME: {{ . }}
{{- end }}
{{- end }}
{{- if .Values.redis.external.caSecret.name }}
RYZANSTEIN_REDIS_CA_FILE: /etc/ryzanstein/redis-ca/ca.crt
{{- else if include "ryzanstein.redis.tls.used" . }}
RYZANSTEIN_REDIS_CA_FILE: /etc/ryzanstein/tls/ca.crt
{{- end }}
{{- end }}

{{- define "ryzanstein.redis.mounts" -}}
{{- if .Values.redis.auth.enabled }}
- {name: redis-auth, mountPath: /etc/ryzanstein/redis, readOnly: true}
{{- end }}
{{- if .Values.redis.external.caSecret.name }}
- {name: redis-ca, mountPath: /etc/ryzanstein/redis-ca, readOnly: true}
{{- end }}
{{- end }}

{{/* (list $ component [pool]) */}}
{{- define "ryzanstein.redis.volumes" -}}
{{- $root := index . 0 -}}
{{- if include "ryzanstein.redis.users" $root }}
- name: redis-auth
  secret: {secretName: {{ include "ryzanstein.redis.users.secret" $root }}, items: [{key: {{ index . 1 }}, path: password}]}
{{- else if $root.Values.redis.auth.enabled }}
- {name: redis-auth, secret: {{ include "ryzanstein.redis.passwordFile" $root }}}
{{- end }}
{{- with $root.Values.redis.external.caSecret }}
{{- if .name }}
- {name: redis-ca, secret: {secretName: {{ .name }}, items: [{key: {{ .key }}, path: ca.crt}]}}
{{- end }}
{{- end }}
{{- end }}

{{- define "ryzanstein.redis.config" -}}
redis.conf: |
  bind {{ ternary "*" "* -::*" (eq .Values.bindAddress "0.0.0.0") }}
  port {{ get (include "ryzanstein.redis.ports" . | fromJson) "redis" | default 0 }}
  {{- if include "ryzanstein.redis.tls" . }}
  tls-port 6380
  tls-cert-file /etc/ryzanstein/tls/tls.crt
  tls-key-file /etc/ryzanstein/tls/tls.key
  tls-ca-cert-file /etc/ryzanstein/tls/ca.crt
  # Services prove who they are by password.
  tls-auth-clients no
  tls-protocols TLSv1.3
  {{- end }}
  # For the probe, and for people in the pod.
  unixsocket /tmp/redis.sock
  unixsocketperm 700
  dir /data
  protected-mode {{ ternary "yes" "no" .Values.redis.auth.enabled }}
  aclfile /tmp/users.acl
  tcp-keepalive 60
  timeout 0
  # Leases and sessions are worth more than new ones: a full store refuses, it never evicts.
  maxmemory {{ include "ryzanstein.bytes" .Values.redis.maxMemory }}
  maxmemory-policy noeviction
  save ""
  appendonly {{ ternary "yes" "no" .Values.redis.persistence.enabled }}
start.sh: |
  # Passwords come from mounted files: no command line and no ConfigMap holds one. The last generation's is accepted as
  # well, while its clients change over.
  set -eu
  umask 077
  user() { # NAME RULES FILE...
    printf 'user %s on sanitize-payload %s' "$1" "$2"
    shift 2
    for file in "$@"; do
      [ -f "$file" ] || continue
      hash=$(printf %s "$(cat "$file")" | sha256sum)
      printf ' #%s' "${hash%% *}"
    done
    printf '\n'
  }
  common=/etc/ryzanstein/redis/*/password
  {{- if include "ryzanstein.redis.users" . }}
  # Services had their own passwords in the last generation already: none of them needs its common one.
  [ ! -f /etc/ryzanstein/redis-users/previous/gateway ] || common=/etc/ryzanstein/redis/current/password
  {{- end }}
  {
    user default '~* &* +@all{{ ternary "" " nopass" .Values.redis.auth.enabled }}' $common
    {{- if .Values.redis.auth.enabled }}
    {{- $rules := .Files.Get "files/redis-users.yaml" | replace "NAMESPACE" (include "ryzanstein.redis.namespace" .) | fromYaml }}
    {{- range include "ryzanstein.redis.components" . | fromJsonArray }}
    user {{ . }} '{{ get $rules . }}' /etc/ryzanstein/redis-users/*/{{ . }}
    {{- end }}
    {{- end }}
  } > /tmp/users.acl
  {{- if include "ryzanstein.redis.tls" . }}
  # The server reads a renewed certificate on request.
  folder=/etc/ryzanstein/tls
  sums() { cat $folder/tls.crt $folder/tls.key $folder/ca.crt | sha256sum; }
  renew() {
    [ "$(sh /etc/redis/ask.sh config set tls-cert-file $folder/tls.crt tls-key-file $folder/tls.key tls-ca-cert-file $folder/ca.crt)" = OK ]
  }
  {
    used=$(sums)
    while sleep 5 && kill -0 $$ 2>/dev/null; do  # until the server ends
      if [ "$(sums)" != "$used" ] && renew; then used=$(sums); fi
    done
  } &
  {{- end }}
  exec "$(command -v valkey-server || command -v redis-server)" /etc/redis/redis.conf
ask.sh: |
  # A command to the server from within its pod, whatever its ports speak.
  set -eu
  {{- if .Values.redis.auth.enabled }}
  REDISCLI_AUTH=$(cat /etc/ryzanstein/redis/current/password)
  export REDISCLI_AUTH
  {{- end }}
  exec "$(command -v valkey-cli || command -v redis-cli)" -s /tmp/redis.sock "$@"
ping.sh: |
  [ "$(sh /etc/redis/ask.sh ping)" = PONG ]
{{- end }}

{{/* Its claim, outside the StatefulSet: persistence may be switched in a running release, a StatefulSet's own claims never. */}}
{{- define "ryzanstein.redis.claim" -}}
{{- printf "data-%s-0" (include "ryzanstein.name" (list . "redis")) -}}
{{- end }}

{{/* Whether the release's StatefulSet makes this claim, as earlier charts had it; then it goes on to. Empty or "true". */}}
{{- define "ryzanstein.redis.claims" -}}
{{- $there := lookup "apps/v1" "StatefulSet" .Release.Namespace (include "ryzanstein.name" (list . "redis")) -}}
{{- if dig "spec" "volumeClaimTemplates" list $there }}true{{ end -}}
{{- end }}

{{- define "ryzanstein.redis.storage" -}}
{{- toYaml (merge (dict "accessModes" (list "ReadWriteOnce")) .Values.redis.persistence) -}}
{{- end }}

{{/* The prefix of the names of all keys, after "rz:". */}}
{{- define "ryzanstein.redis.namespace" -}}
{{- default (printf "%s-%s" .Release.Namespace (include "ryzanstein.fullname" .)) .Values.redis.keyPrefix -}}
{{- end }}

{{/* 200Mi → 209715200 */}}
{{- define "ryzanstein.bytes" -}}
{{- $units := dict "" 1 "k" 1e3 "M" 1e6 "G" 1e9 "T" 1e12 "P" 1e15 "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 "Ti" 1099511627776 "Pi" 1125899906842624 -}}
{{- printf "%.0f" (mulf (regexFind "^[0-9.]+" . | float64) (index $units (regexFind "[A-Za-z]*$" .))) -}}
{{- end }}
