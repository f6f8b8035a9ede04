{{- define "ryzanstein.redis.config" -}}
redis.conf: |
  bind {{ ternary "* -::*" .Values.bindAddress (eq .Values.bindAddress "0.0.0.0") }}
  port 6379
  dir /data
  protected-mode yes
  aclfile /tmp/users.acl
  tcp-keepalive 60
  timeout 0
  # Leases and sessions are worth more than new ones: a full store refuses, it never evicts.
  maxmemory {{ include "ryzanstein.bytes" .Values.redis.maxMemory }}
  maxmemory-policy noeviction
  save ""
  appendonly {{ ternary "yes" "no" .Values.redis.persistence.enabled }}
# Passwords come from mounted files, so that neither the command line nor this map holds one. The previous generation's
# is accepted as well while clients change over.
start.sh: |
  set -eu
  umask 077
  {
    printf 'user default on sanitize-payload ~* &* +@all'
    for file in /etc/ryzanstein/redis/*/password; do
      [ -f "$file" ] || continue
      hash=$(printf %s "$(cat "$file")" | sha256sum)
      printf ' #%s' "${hash%% *}"
    done
    printf '\n'
  } > /tmp/users.acl
  exec "$(command -v valkey-server || command -v redis-server)" /etc/redis/redis.conf
ping.sh: |
  set -eu
  REDISCLI_AUTH=$(cat /etc/ryzanstein/redis/current/password)
  export REDISCLI_AUTH
  [ "$("$(command -v valkey-cli || command -v redis-cli)" ping)" = PONG ]
{{- end }}

{{/* 200Mi → 209715200. */}}
{{- define "ryzanstein.bytes" -}}
{{- $units := dict "Ki" 1024 "Mi" 1048576 "Gi" 1073741824 -}}
{{- mul (regexFind "^[0-9]+" . | int64) (index $units (regexFind "[KMG]i$" .)) -}}
{{- end }}
