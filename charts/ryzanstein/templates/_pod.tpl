{{/* What all pods share. */}}

{{/* A component's settings over podDefaults: include "ryzanstein.config" (list $ component) | fromYaml. */}}
{{- define "ryzanstein.config" -}}
{{- toYaml (mergeOverwrite (deepCopy (index . 0).Values.podDefaults) (deepCopy (index . 1))) -}}
{{- end }}

{{/* Every pool by name, each over workers.defaults and podDefaults. */}}
{{- define "ryzanstein.pools" -}}
{{- $root := . -}}
{{- $pools := dict -}}
{{- range $name, $pool := .Values.workers.pools }}
{{- if $pool }}
{{- $merged := mergeOverwrite (deepCopy $root.Values.workers.defaults) (deepCopy $pool) -}}
{{- $_ := set $pools $name (include "ryzanstein.config" (list $root $merged) | fromYaml) -}}
{{- end }}
{{- end }}
{{- toYaml $pools -}}
{{- end }}

{{/* The metadata of a pod template: (dict "root" $ "of" (list $ component [pool]) "config" component "annotations" map). */}}
{{- define "ryzanstein.pod.metadata" -}}
labels:
  {{- /* No version: an upgrade that changes nothing else restarts nothing. */}}
  {{- toYaml (merge (include "ryzanstein.selectorLabels" .of | fromYaml) .config.labels .root.Values.commonLabels) | nindent 2 }}
annotations:
  {{- toYaml (merge (dict "kubectl.kubernetes.io/default-container" (index .of 1)) (default dict .annotations) .config.annotations .root.Values.commonAnnotations) | nindent 2 }}
{{- end }}

{{/*
The head of a pod's spec: (dict "root" $ "of" (list $ component [pool]) "config" component).
"serviceAccount": one of its own, for the few pods that talk to the API server; only these get a token.
*/}}
{{- define "ryzanstein.pod.spec" -}}
{{- $config := .config -}}
# A Service named ryzanstein-gateway would become RYZANSTEIN_GATEWAY_PORT=tcp://…, a setting of ours.
enableServiceLinks: false
automountServiceAccountToken: {{ hasKey . "serviceAccount" }}
serviceAccountName: {{ default (include "ryzanstein.serviceAccountName" .root) .serviceAccount }}
{{- with concat .root.Values.global.imagePullSecrets $config.imagePullSecrets }}
imagePullSecrets:
  {{- toYaml . | nindent 2 }}
{{- end }}
securityContext:
  {{- toYaml $config.securityContext | nindent 2 }}
# Names of this chart have four dots: asked once, instead of once for each entry of the search list.
dnsConfig: {options: [{name: ndots, value: "2"}]}
{{- with $config.priorityClassName }}
priorityClassName: {{ . }}
{{- end }}
{{- with $config.nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $config.tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $config.affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- if ne $config.topologySpread "none" }}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: {{ ternary "DoNotSchedule" "ScheduleAnyway" (eq $config.topologySpread "hard") }}
    # Compares pods of one revision, so that a rollout spreads anew.
    matchLabelKeys: [{{ ternary "pod-template-hash" "controller-revision-hash" (has (index .of 1) (list "gateway" "coordinator")) }}]
    labelSelector:
      matchLabels:
        {{- include "ryzanstein.selectorLabels" .of | nindent 8 }}
{{- end }}
{{- end }}

{{/* Security and resources of a container. */}}
{{- define "ryzanstein.container" -}}
securityContext:
  {{- toYaml .containerSecurityContext | nindent 2 }}
resources:
  {{- toYaml .resources | nindent 2 }}
{{- end }}
