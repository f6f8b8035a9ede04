{{/* Fine-tuning: what the fine-tuner, its trainings and the workers share, and the Job of a training. */}}

{{/* Where all of them mount the claim, under the same path: results are loaded by their paths. */}}
{{- define "ryzanstein.finetuner.folder" -}}
/finetuning
{{- end }}

{{- define "ryzanstein.finetuner.claim" -}}
{{- default (include "ryzanstein.name" (list . "finetuning")) .Values.finetuner.storage.existingClaim -}}
{{- end }}

{{- define "ryzanstein.finetuner.volume" -}}
name: finetuning
persistentVolumeClaim: {claimName: {{ include "ryzanstein.finetuner.claim" . }}}
{{- end }}

{{/* The pools whose models are trained, by name; none if there is no fine-tuner. */}}
{{- define "ryzanstein.finetuner.pools" -}}
{{- $tuned := dict -}}
{{- if .Values.finetuner.enabled -}}
{{- range $name, $pool := include "ryzanstein.pools" . | fromYaml -}}
{{- if has $name $.Values.finetuner.pools }}{{- $_ := set $tuned $name $pool -}}{{ end -}}
{{- end -}}
{{- end -}}
{{- toYaml $tuned -}}
{{- end }}

{{/* Where a training finds the model of a pool; several pools' volumes are next to each other there: (list name pool). */}}
{{- define "ryzanstein.finetuner.path" -}}
{{- $path := include "ryzanstein.model.path" (index . 1) -}}
{{- if include "ryzanstein.model.mounted" (index . 1) -}}
{{- $path = regexReplaceAll "^/models" $path (printf "/models/%s" (index . 0)) -}}
{{- end -}}
{{- $path -}}
{{- end }}

{{/* A component's values, with a group that may write to the claim: (list $ values). */}}
{{- define "ryzanstein.finetuner.config" -}}
{{- $config := include "ryzanstein.config" . | fromYaml -}}
{{- if not (index . 0).Values.openshift -}}
{{- $_ := set $config "securityContext" (merge $config.securityContext (dict "fsGroup" 10001)) -}}
{{- end -}}
{{- toYaml $config -}}
{{- end }}

{{- define "ryzanstein.finetuner.env" -}}
{{- $models := dict -}}
{{- range $name, $pool := include "ryzanstein.finetuner.pools" . | fromYaml -}}
{{- $_ := set $models (include "ryzanstein.model.name" $pool) (include "ryzanstein.finetuner.path" (list $name $pool)) -}}
{{- end -}}
RYZANSTEIN_FINETUNER_MODELS: {{ toJson $models | quote }}
RYZANSTEIN_FINETUNER_FOLDER: {{ include "ryzanstein.finetuner.folder" . }}
RYZANSTEIN_FINETUNER_JOB_TEMPLATE: /etc/ryzanstein/finetuner/job.json
RYZANSTEIN_FINETUNER_QUANTIZATIONS: {{ ternary "none,nf4" "none" (eq .Values.finetuner.job.device "cuda") }}
# Kubernetes tries again itself; a Job that ends without a step is the end of it.
RYZANSTEIN_FINETUNER_ATTEMPTS: "1"
# Nothing else runs in a training's container.
RYZANSTEIN_FINETUNER_NICE: "0"
{{- end }}

{{/* The template of a training's Job: the fine-tuner adds a name, arguments and the UID of the owner. */}}
{{- define "ryzanstein.finetuner.job" -}}
{{- $of := list . "training" -}}
{{- $job := .Values.finetuner.job -}}
{{- $config := include "ryzanstein.finetuner.config" (list . $job) | fromYaml -}}
{{- range $config.envUnset }}{{- $_ := set $config.env . nil -}}{{ end -}}
{{- if eq $job.device "cuda" -}}
{{- $_ := mergeOverwrite $config (dict "resources" (dict "limits" (dict $job.gpu.resourceName (int64 $job.gpu.count)))) -}}
{{- end -}}
apiVersion: batch/v1
kind: Job
metadata:
  name: {{ include "ryzanstein.name" $of }}
  namespace: {{ .Release.Namespace }}
  labels:
    {{- toYaml (merge (include "ryzanstein.labels" $of | fromYaml) $job.jobLabels) | nindent 4 }}
  {{- with .Values.commonAnnotations }}
  annotations:
    {{- toYaml . | nindent 4 }}
  {{- end }}
  # With the release, its Jobs go.
  ownerReferences:
    - {apiVersion: apps/v1, kind: Deployment, name: {{ include "ryzanstein.name" (list . "finetuner") }}}
spec:
  backoffLimit: {{ $job.backoffLimit }}
  # Never two trainings in one folder.
  podReplacementPolicy: Failed
  podFailurePolicy:
    rules:
      # The user's data; and a pod that was asked to end, and wrote a checkpoint (services/finetuner/training/messages.py).
      - {action: FailJob, onExitCodes: {containerName: training, operator: In, values: [42]}}
      - {action: Ignore, onExitCodes: {containerName: training, operator: In, values: [43]}}
      - {action: Ignore, onPodConditions: [{type: DisruptionTarget, status: "True"}]}
  template:
    metadata:
      {{- include "ryzanstein.pod.metadata" (dict "of" $of "config" $config) | nindent 6 }}
    spec:
      {{- include "ryzanstein.pod.spec" (dict "of" $of "config" $config) | nindent 6 }}
      restartPolicy: Never
      terminationGracePeriodSeconds: {{ $job.graceSeconds }}
      containers:
        - name: training
          image: {{ include "ryzanstein.image" (list . (printf "finetuner-%s" $job.device)) }}
          imagePullPolicy: {{ .Values.image.pullPolicy }}
          command: [python, -m, services.finetuner.training]
          {{- include "ryzanstein.container" $config | nindent 10 }}
          env:
            {{- include "ryzanstein.env.list" (mergeOverwrite (include "ryzanstein.training.env" . | fromYaml) $config.env) | trim | nindent 12 }}
          volumeMounts:
            - {name: tmp, mountPath: /tmp}
            - {name: finetuning, mountPath: {{ include "ryzanstein.finetuner.folder" . }}}
            {{- range $name, $pool := include "ryzanstein.finetuner.pools" . | fromYaml }}
            {{- if include "ryzanstein.model.mounted" $pool }}
            - {name: model-{{ $name }}, mountPath: /models/{{ $name }}, readOnly: true}
            {{- end }}
            {{- end }}
            {{- range $path, $mount := $config.extraVolumeMounts }}
            - {{ toYaml (merge (dict "mountPath" $path) $mount) | nindent 14 | trim }}
            {{- end }}
      volumes:
        - {name: tmp, emptyDir: {}}
        - {{ include "ryzanstein.finetuner.volume" . | nindent 10 | trim }}
        {{- range $name, $pool := include "ryzanstein.finetuner.pools" . | fromYaml }}
        {{- if include "ryzanstein.model.mounted" $pool }}
        - name: model-{{ $name }}
          {{- include "ryzanstein.model.volume" (list $ $name $pool) | nindent 10 }}
        {{- end }}
        {{- end }}
        {{- range $name, $volume := $config.extraVolumes }}
        - {{ toYaml (merge (dict "name" $name) $volume) | nindent 10 | trim }}
        {{- end }}
{{- end }}

{{- define "ryzanstein.training.env" -}}
# Its words go to a file of this name.
JOB_UID: {valueFrom: {fieldRef: {fieldPath: "metadata.labels['batch.kubernetes.io/controller-uid']"}}}
HF_HUB_OFFLINE: "1"
# Libraries ask for the user's name, which an arbitrary UID does not have.
USER: ryzanstein
{{- end }}

{{- define "ryzanstein.validate.finetuner" -}}
{{- if .Values.finetuner.enabled -}}
{{- $pools := include "ryzanstein.pools" . | fromYaml -}}
{{- if not .Values.finetuner.pools }}
finetuner.pools: name the pools whose models may be trained
{{- end -}}
{{- range $name := .Values.finetuner.pools -}}
{{- $pool := get $pools $name -}}
{{- if not $pool }}
finetuner.pools: there is no pool {{ $name }}; the pools are {{ keys $pools | sortAlpha | join ", " }}
{{- else -}}
{{- if $pool.models }}
finetuner.pools: pool {{ $name }} has several models; a model that is trained has a pool of its own
{{- end -}}
{{- if ne $pool.engine "native" }}
finetuner.pools: trainings are for the native engine; pool {{ $name }} has {{ $pool.engine }}
{{- end -}}
{{- if and (eq (include "ryzanstein.model.scheme" $pool) "hf") (ne $pool.storage.type "pvc") }}
finetuner.pools: a training does not see the model of pool {{ $name }} in a volume of type {{ $pool.storage.type }}; set workers.pools.{{ $name }}.storage.type to pvc
{{- end -}}
{{- $sources := toString (default "" ($pool.settings).adapterSources) -}}
{{- if and $sources (not (contains (include "ryzanstein.finetuner.folder" $) $sources)) }}
workers.pools.{{ $name }}.settings.adapterSources: leaves out {{ include "ryzanstein.finetuner.folder" $ }}, where the results of fine-tuning are
{{- end -}}
{{- end -}}
{{- end -}}
{{- end -}}
{{- end }}
