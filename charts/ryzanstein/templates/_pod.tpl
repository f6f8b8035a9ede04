{{/* Fields that all pods share. */}}

{{/* A component's values over podDefaults: include "ryzanstein.config" (list $ values) | fromYaml. */}}
{{- define "ryzanstein.config" -}}
{{- toYaml (mergeOverwrite (deepCopy (index . 0).Values.podDefaults) (deepCopy (index . 1))) -}}
{{- end }}

{{/* Every pool by name, each over workers.defaults and podDefaults. */}}
{{- define "ryzanstein.pools" -}}
{{- $root := . -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.workers.pools -}}
{{- if not (kindIs "invalid" $pool) -}}
{{- $merged := mergeOverwrite (deepCopy $root.Values.workers.defaults) (deepCopy $pool) -}}
{{- $_ := set $pools $name (include "ryzanstein.config" (list $root $merged) | fromYaml) -}}
{{- end -}}
{{- end -}}
{{- toYaml $pools -}}
{{- end }}

{{/* The metadata of a pod: (dict "of" (list $ component [pool]) "config" component "annotations" map "container" the first). */}}
{{- define "ryzanstein.pod.metadata" -}}
{{- $root := index .of 0 -}}
{{- $annotations := dict "kubectl.kubernetes.io/default-container" (default (index .of 1) .container) -}}
labels:
  {{- /* No version: an upgrade of the chart that changes nothing of a pod restarts nothing. */}}
  {{- toYaml (merge (include "ryzanstein.selectorLabels" .of | fromYaml) .config.labels $root.Values.commonLabels) | nindent 2 }}
annotations:
  {{- toYaml (merge $annotations (default dict .annotations) .config.annotations $root.Values.commonAnnotations) | nindent 2 }}
{{- end }}

{{/*
The head of a pod's spec: (dict "of" (list $ component [pool]) "config" component).
"serviceAccount": one of its own, for the few pods that call the API server; only these get a token.
*/}}
{{- define "ryzanstein.pod.spec" -}}
{{- $root := index .of 0 -}}
{{- $config := .config -}}
# The link of a Service called ryzanstein-gateway would be RYZANSTEIN_GATEWAY_PORT=tcp://…, a setting of ours.
enableServiceLinks: false
automountServiceAccountToken: {{ hasKey . "serviceAccount" }}
serviceAccountName: {{ default (include "ryzanstein.serviceAccountName" $root) .serviceAccount }}
{{- with concat (default list $root.Values.global.imagePullSecrets) $config.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $config.securityContext | nindent 2 }}
# Names of this chart have four dots: asked for once, instead of once for each entry of the search list.
dnsConfig: {options: [{name: ndots, value: "2"}]}
{{- range $key := list "priorityClassName" "runtimeClassName" }}
{{- with get $config $key }}
{{ $key }}: {{ . }}
{{- end }}
{{- end }}
{{- range $key := list "nodeSelector" "tolerations" "affinity" }}
{{- with get $config $key }}
{{ $key }}:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- if ne $config.topologySpread "none" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (eq $config.topologySpread "hard") }}
    labelSelector:
      matchLabels:
        {{- include "ryzanstein.selectorLabels" .of | nindent 8 }}
    {{- if not (has (index .of 1) (list "router" "worker" "redis" "training")) }}
    # A Deployment's new pods come before its old ones go. A StatefulSet's old pod goes first.
    matchLabelKeys: [pod-template-hash]
    {{- end }}
{{- end }}
{{- end }}

{{/* Security and resources of a container. */}}
{{- define "ryzanstein.container" -}}
terminationMessagePolicy: FallbackToLogsOnError
securityContext:
  {{- toYaml .containerSecurityContext | nindent 2 }}
resources:
  {{- toYaml .resources | nindent 2 }}
{{- end }}

{{/*
The pod of one of our services, as a template of a Deployment or StatefulSet: (dict
  "of" (list $ component [pool])   "config" component   "image" target   "module" of Python   "grace" seconds
  "ports" (dict name number)   "probes" as for "ryzanstein.probes"   "env" (dict name value)
  "mounts" (list mount)   "volumes" (list volume)   "initContainers" (list container)   "spec" (dict more fields)).
*/}}
{{- define "ryzanstein.pod" -}}
{{- $root := index .of 0 -}}
metadata:
  {{- include "ryzanstein.pod.metadata" . | nindent 2 }}
spec:
  {{- include "ryzanstein.pod.spec" . | nindent 2 }}
  {{- with .spec }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
  terminationGracePeriodSeconds: {{ .grace }}
  {{- with .initContainers }}
  initContainers:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  containers:
    - name: {{ index .of 1 }}
      image: {{ include "ryzanstein.image" (list $root .image) }}
      imagePullPolicy: {{ $root.Values.image.pullPolicy }}
      command: [python, -m, {{ .module }}]
      {{- include "ryzanstein.container" .config | nindent 6 }}
      ports:
        {{- range $name, $port := merge .ports (dict "metrics" 9100) }}
        - {name: {{ $name }}, containerPort: {{ $port }}}
        {{- end }}
      {{- include "ryzanstein.probes" .probes | nindent 6 }}
      env:
        {{- include "ryzanstein.env" (dict "root" $root "own" (merge (dict) .env (include "ryzanstein.redis.user" .of | fromYaml)) "config" .config) | trim | nindent 8 }}
      volumeMounts:
        - {name: tmp, mountPath: /tmp}
        {{- include "ryzanstein.redis.mounts" $root | trim | nindent 8 }}
        {{- with include "ryzanstein.tls.mounts" $root | trim }}
        {{- . | nindent 8 }}
        {{- end }}
        {{- with .mounts }}
        {{- toYaml . | nindent 8 }}
        {{- end }}
        {{- range $path, $mount := .config.extraVolumeMounts }}
        - {{ toYaml (merge (dict "mountPath" $path) $mount) | nindent 10 | trim }}
        {{- end }}
  volumes:
    - {name: tmp, emptyDir: {}}
    {{- include "ryzanstein.redis.volumes" .of | trim | nindent 4 }}
    {{- with include "ryzanstein.tls.volumes" .of | trim }}
    {{- . | nindent 4 }}
    {{- end }}
    {{- with .volumes }}
    {{- toYaml . | nindent 4 }}
    {{- end }}
    {{- range $name, $volume := .config.extraVolumes }}
    - {{ toYaml (merge (dict "name" $name) $volume) | nindent 6 | trim }}
    {{- end }}
{{- end }}
