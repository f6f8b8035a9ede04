{{/* Texts that must have a certain form. A schema's error shows the regular expression, and the value, which may hold a password. */}}

{{/* Lists of a value's path, the value, its regular expression, and its form in words; as JSON. */}}
{{- define "ryzanstein.forms" -}}
{{- $forms := list
  (list "fullnameOverride" .Values.fullnameOverride "^([a-z]([-a-z0-9]*[a-z0-9])?)?$" "a letter, then a-z, 0-9 and -, no - at the end")
  (list "redis.keyPrefix" .Values.redis.keyPrefix "^[A-Za-z0-9._:-]*$" "letters, digits, ., _, : and -")
  (list "redis.maxMemory" .Values.redis.maxMemory "^[1-9][0-9]*(Ki|Mi|Gi)$" "a whole number and Ki, Mi or Gi, such as 200Mi")
  (list "redis.external.url" .Values.redis.external.url "^((rediss?)://[^@]+)?$" "redis://host:port/number or rediss://host:port/number, without a user or password")
  (list "tracing.endpoint" .Values.tracing.endpoint "^(https?://[^/:]+:[0-9]+)?$" "http://host:port or https://host:port")
  (list "monitoring.prometheus.retention" .Values.monitoring.prometheus.retention "^[0-9]+(h|d|w|y)$" "a whole number and h, d, w or y, such as 24h")
  (list "monitoring.prometheus.retentionSize" .Values.monitoring.prometheus.retentionSize "^[1-9][0-9]*(MB|GB|TB)$" "a whole number and MB, GB or TB, such as 1500MB")
  (list "monitoring.loki.retention" .Values.monitoring.loki.retention "^[1-9][0-9]*(h|d|w)$" "a whole number and h, d or w, such as 24h") -}}
{{- range $i, $address := .Values.monitoring.prometheus.alertmanagers -}}
{{- $forms = append $forms (list (printf "monitoring.prometheus.alertmanagers[%d]" $i) $address "^[^:/]+:[0-9]+$" "host:port") -}}
{{- end -}}
{{- range $alert, $override := .Values.monitoring.rules.overrides -}}
{{- with $override.for -}}
{{- $forms = append $forms (list (printf "monitoring.rules.overrides.%s.for" $alert) . "^[0-9]+(s|m|h|d)$" "a whole number and s, m, h or d, such as 10m") -}}
{{- end -}}
{{- end -}}
{{- range $target, $digest := .Values.image.digests -}}
{{- $forms = append $forms (list (printf "image.digests.%s" $target) $digest "^(sha256:[0-9a-f]{64})?$" "sha256: and 64 digits of 0-9 and a-f") -}}
{{- end -}}
{{- $printable := "[^\\p{C}\\p{Zl}\\p{Zp}]" -}}
{{- range $name, $pool := include "ryzanstein.pools" . | fromYaml -}}
{{- range $index, $model := include "ryzanstein.pool.models" $pool | fromJsonArray -}}
{{- $where := printf "workers.pools.%s%s" $name (ternary (printf ".models[%d]" $index) "" (not (empty $pool.models))) -}}
{{- $forms = append $forms (list (printf "%s.servedName" $where) $model.servedName (printf "^$|^[^\\p{C}\\p{Z}](%s{0,254}[^\\p{C}\\p{Z}])?$" $printable) "1 to 256 printable characters, no control or format characters, no space at an end") -}}
{{- $forms = append $forms (list (printf "%s.model" $where) $model.model (printf "^%s*$" $printable) "one line of printable characters") -}}
{{- $forms = append $forms (list (printf "%s.model" $where) $model.model (include "ryzanstein.model.forms" .) "empty (the bundled model), hf://org/name[:quantization][@revision], pvc://claim[/path], oci://image[/path], hostpath:///folder or file:///folder, without .. in a path") -}}
{{- end -}}
{{- $forms = append $forms (list (printf "workers.pools.%s.attention" $name) $pool.attention "^(dense|window(\\( *[0-9]{1,9} *, *[0-9]{1,9} *\\))?|top_k(\\( *[0-9]{1,9} *\\))?)$" "dense, window(sinks, window) in tokens, such as window(64, 4096), or top_k(pages) in KV blocks, such as top_k(128)") -}}
{{- $forms = append $forms (list (printf "workers.pools.%s.idleSleep" $name) (include "ryzanstein.env.value" $pool.idleSleep) "^[0-9]{1,9}[smhd]?$" "a whole number of seconds, or of s, m, h or d, such as 5m") -}}
{{- $forms = append $forms (list (printf "workers.pools.%s.storage.hostPath" $name) $pool.storage.hostPath (printf "^(%s)?$" (include "ryzanstein.path.parts" .)) "an absolute path without ..") -}}
{{- end -}}
{{- toJson (concat $forms (include "ryzanstein.quantities" (list "" (omit (.Values | toJson | fromJson) "global")) | fromJsonArray)) -}}
{{- end }}

{{/* Parts of a path, each of which is empty, or anything but "..". */}}
{{- define "ryzanstein.path.parts" -}}
(/(\.?|\.?[^./][^/]*|\.\.[^/]+))+
{{- end }}

{{- define "ryzanstein.model.forms" -}}
{{- $parts := include "ryzanstein.path.parts" . -}}
{{- $name := "[^/@:.][^/@:]*" -}}
^$|^(hf://{{ $name }}/{{ $name }}(:[^/@:]+)?(@[^/@]+)?|pvc://[^/.][^/]*({{ $parts }})?|oci://[^/]+{{ $parts }}|(hostpath|file)://{{ $parts }})$
{{- end }}

{{/* The forms of the quantities in a map of values: (list path map). Numbers of bytes have no thousandths. */}}
{{- define "ryzanstein.quantities" -}}
{{- $path := index . 0 -}}
{{- $number := "^\\+?([0-9]+(\\.[0-9]*)?|\\.[0-9]+)" -}}
{{- $bytes := list (printf "%s([eE][-+]?[0-9]+|[kMGTPE]|[KMGTPE]i)?$" $number) "a number of bytes, alone or with k, M, G, T, P, E, Ki, Mi, Gi, Ti, Pi or Ei, such as 512Mi" -}}
{{- $amount := list (printf "%s([eE][-+]?[0-9]+|[numkMGTPE]|[KMGTPE]i)?$" $number) "a number, alone or with m for thousandths, such as 2, 0.5 or 500m" -}}
{{- $forms := list -}}
{{- range $key, $value := index . 1 -}}
{{- $here := list $path $key | compact | join "." -}}
{{- if kindIs "map" $value -}}
{{- if and (has $key (list "requests" "limits")) (hasSuffix "resources" $path) -}}
{{- range $resource, $quantity := $value -}}
{{- if not (kindIs "invalid" $quantity) -}}
{{- $form := ternary $bytes $amount (or (has $resource (list "memory" "storage" "ephemeral-storage")) (hasPrefix "hugepages-" $resource)) -}}
{{- $forms = append $forms (concat (list (printf "%s.%s" $here $resource) $quantity) $form) -}}
{{- end -}}
{{- end -}}
{{- else -}}
{{- $forms = concat $forms (include "ryzanstein.quantities" (list $here $value) | fromJsonArray) -}}
{{- end -}}
{{- else if and (not (kindIs "invalid" $value)) (or (eq $key "sizeLimit") (and (eq $key "size") (regexMatch "(storage|persistence)$" $path))) -}}
{{- $forms = append $forms (concat (list $here $value) $bytes) -}}
{{- end -}}
{{- end -}}
{{- toJson $forms -}}
{{- end }}

{{- define "ryzanstein.validate.forms" -}}
{{- range include "ryzanstein.forms" . | fromJsonArray -}}
{{- if not (regexMatch (index . 2) (toString (index . 1))) }}
{{ index . 0 }}: it should be {{ index . 3 }}
{{- end -}}
{{- end -}}
{{- end }}
