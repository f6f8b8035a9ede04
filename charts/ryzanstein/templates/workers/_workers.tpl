{{/* Ranks of a pool's pod: a worker's, over its pods. */}}
{{- define "ryzanstein.worker.ranks" -}}
{{- ceil (divf (mul (int64 .tensorParallel) (int64 (default 1 .engineArgs.pipeline_parallel_size))) (int64 .nodes)) | int64 -}}
{{- end }}

{{/* GPUs of a pool's pod; 0 on CPU, and where they are claimed. */}}
{{- define "ryzanstein.worker.gpus" -}}
{{- if eq (include "ryzanstein.worker.device" .) "cuda" -}}
{{- ternary 0 (default (include "ryzanstein.worker.ranks" . | int64) .gpu.count) (not (empty .gpu.resourceClaims)) | int64 -}}
{{- else -}}
0
{{- end -}}
{{- end }}

{{/* cpu or cuda, also of the image. */}}
{{- define "ryzanstein.worker.device" -}}
{{- if eq .device "auto" -}}
{{- ternary "cuda" "cpu" (or (gt (int64 .gpu.count) 0) (not (empty .gpu.resourceClaims))) -}}
{{- else -}}
{{- .device -}}
{{- end -}}
{{- end }}

{{/* The target of the image. */}}
{{- define "ryzanstein.worker.image" -}}
{{- printf "worker-%s" (ternary "vllm" (include "ryzanstein.worker.device" .) (eq .engine "vllm")) -}}
{{- end }}

{{/* MiB that a CPU pool's pod takes besides weights and KV cache: the server, and each rank with the workspace of a step.
     services/compute/model/footprint.py has the arithmetic; here the vocabulary and the widths are those of a large model. */}}
{{- define "ryzanstein.worker.overhead" -}}
{{- add 150 (mul 416 (int64 .tensorParallel)) (ternary 176 0 (gt (int64 .tensorParallel) 1)) -}}
{{- end }}

{{/* MiB of its memory limit that are left for weights and KV cache; may be negative. */}}
{{- define "ryzanstein.worker.weights" -}}
{{- sub (div (include "ryzanstein.bytes" .resources.limits.memory | int64) 1048576) (include "ryzanstein.worker.overhead" . | int64) -}}
{{- end }}

{{/* The seconds of idleSleep. */}}
{{- define "ryzanstein.worker.idleSleep" -}}
{{- $text := include "ryzanstein.env.value" .idleSleep -}}
{{- $units := dict "s" 1 "m" 60 "h" 3600 "d" 86400 -}}
{{- mul (regexFind "^[0-9]+" $text | int64) (get $units (regexFind "[smhd]$" $text | default "s")) -}}
{{- end }}

{{/* The ports of a pool's pod by name: those of gRPC and of metrics, in addition to the supervisor's. */}}
{{- define "ryzanstein.worker.ports" -}}
grpc: 50054
{{- range $index, $_ := .models }}
{{- if $index }}
grpc-{{ $index }}: {{ add 50054 $index }}
{{- end }}
metrics-{{ $index }}: {{ add 9101 $index }}
{{- end }}
{{- end }}

{{- define "ryzanstein.worker.env" -}}
RYZANSTEIN_WORKER_ID: {valueFrom: {fieldRef: {fieldPath: metadata.name}}}
RYZANSTEIN_NODE: {valueFrom: {fieldRef: {fieldPath: spec.nodeName}}}
RYZANSTEIN_WORKER_PORT: "50054"
{{- if .models }}
{{- $models := list }}
{{- range $index, $model := include "ryzanstein.pool.models" . | fromJsonArray }}
{{- $own := dict "model" (include "ryzanstein.model.path" $model) "served_model_name" (include "ryzanstein.model.name" $model) }}
{{- if $model.pin }}{{- $_ := set $own "pinned" true }}{{ end }}
{{- with $model.priority }}{{- $_ := set $own "priority" (int64 .) }}{{ end }}
{{- range $key, $value := $model.settings }}{{- $_ := set $own (snakecase $key) $value }}{{ end }}
{{- $models = append $models $own }}
{{- end }}
RYZANSTEIN_MODELS: {{ toJson $models | quote }}
{{- else }}
RYZANSTEIN_MODEL: {{ include "ryzanstein.model.path" . | quote }}
RYZANSTEIN_SERVED_MODEL_NAME: {{ include "ryzanstein.model.name" . | quote }}
{{- if .pin }}
RYZANSTEIN_PINNED: "true"
{{- end }}
{{- end }}
{{- if .maxAwake }}
RYZANSTEIN_MAX_AWAKE: {{ int64 .maxAwake }}
{{- end }}
{{- with include "ryzanstein.worker.idleSleep" . | int64 }}
RYZANSTEIN_IDLE_SLEEP_S: {{ . }}
{{- end }}
RYZANSTEIN_TENSOR_PARALLEL: {{ .tensorParallel }}
RYZANSTEIN_DEVICE: {{ include "ryzanstein.worker.device" . }}
RYZANSTEIN_DTYPE: {{ .dtype }}
RYZANSTEIN_KV_TOKENS: {{ int64 .kvTokens }}
RYZANSTEIN_KV_DTYPE: {{ .kvDtype }}
{{- with .hostCache.gib }}
RYZANSTEIN_HOST_CACHE_GIB: {{ . }}
{{- end }}
{{- if ne .diskCache.type "none" }}
RYZANSTEIN_DISK_CACHE: {{ include "ryzanstein.diskCache.folder" . }}
RYZANSTEIN_DISK_CACHE_GIB: {{ .diskCache.gib }}
{{- end }}
RYZANSTEIN_SPECULATION: {{ default "off" .speculation | quote }}
RYZANSTEIN_ATTENTION: {{ .attention | quote }}
RYZANSTEIN_MAX_MODEL_LEN: {{ int64 .maxModelLen }}
RYZANSTEIN_DRAIN_S: {{ .drainSeconds }}
RYZANSTEIN_ENGINE: {{ .engine }}
{{- if and (eq .engine "native") (eq (include "ryzanstein.worker.device" .) "cuda") }}
# The root is read-only, and Triton keeps the kernels that it compiles.
TRITON_CACHE_DIR: /var/cache/triton
{{- end }}
{{- if eq .engine "vllm" }}
RYZANSTEIN_ENGINE_ARGS: {{ toJson .engineArgs | quote }}
{{- if gt (int64 .nodes) 1 }}
RYZANSTEIN_NODES: {{ .nodes }}
RYZANSTEIN_NODE_SERVICE: {{ .host }}
# Where the ranks of this pod are reached by those of the others.
VLLM_HOST_IP: {valueFrom: {fieldRef: {fieldPath: status.podIP}}}
{{- end }}
# The root is read-only, and vLLM, Triton and torch keep what they compile.
VLLM_CACHE_ROOT: /tmp/vllm
TRITON_CACHE_DIR: /tmp/triton
TORCHINDUCTOR_CACHE_DIR: /tmp/inductor
XDG_CACHE_HOME: /tmp/cache
XDG_CONFIG_HOME: /tmp/config
VLLM_NO_USAGE_STATS: "1"
{{- if eq (include "ryzanstein.worker.device" .) "cpu" }}
# Else the ranks of all pods of a node bind themselves to its first cores.
VLLM_CPU_OMP_THREADS_BIND: nobind
{{- end }}
{{- end }}
# The model is a folder here; nothing is asked of the hub.
HF_HUB_OFFLINE: "1"
# Libraries ask for the user's name, which an arbitrary UID does not have.
USER: ryzanstein
{{- end }}

{{/* Where a pool's pods mount the disk of KV blocks. */}}
{{- define "ryzanstein.diskCache.folder" -}}
/var/cache/ryzanstein-kv
{{- end }}

{{/* The size of that disk: the blocks of the pod's workers, a tenth for the files' headers and blocks, and a GiB. */}}
{{- define "ryzanstein.diskCache.size" -}}
{{- printf "%dGi" (int64 (ceil (addf 1 (mulf 1.1 .diskCache.gib (len (include "ryzanstein.pool.models" . | fromJsonArray)))))) -}}
{{- end }}

{{/* Its volume; empty for none. */}}
{{- define "ryzanstein.diskCache.volume" -}}
{{- $size := include "ryzanstein.diskCache.size" . -}}
{{- if eq .diskCache.type "emptyDir" -}}
emptyDir: {sizeLimit: {{ $size }}}
{{- else if eq .diskCache.type "hostPath" -}}
hostPath: {path: {{ required "diskCache.hostPath: type hostPath needs a folder of the node" .diskCache.hostPath }}, type: Directory}
{{- else if eq .diskCache.type "pvc" -}}
persistentVolumeClaim: {claimName: {{ required "diskCache.existingClaim: type pvc needs a claim of yours" .diskCache.existingClaim }}}
{{- else if eq .diskCache.type "ephemeral" -}}
ephemeral:
  volumeClaimTemplate:
    spec:
      {{- include "ryzanstein.storage.claim" (dict "type" "ephemeral" "storageClass" .diskCache.storageClass "size" $size) | nindent 6 }}
{{- end -}}
{{- end }}

{{/* A pool's additions to its pods: mounts, volumes, init containers, fields of the spec. (list $ name pool) */}}
{{- define "ryzanstein.worker.parts" -}}
{{- $pool := index . 2 -}}
{{- $gpu := eq (include "ryzanstein.worker.device" $pool) "cuda" -}}
{{- $compiles := and $gpu (eq $pool.engine "native") -}}
{{- $shm := or $gpu (eq $pool.engine "vllm") -}}
{{- $models := include "ryzanstein.pool.models" $pool | fromJsonArray -}}
{{- $volumes := dict -}}
{{- range $models -}}
{{- if include "ryzanstein.model.mounted" . }}{{- $_ := set $volumes .volume . -}}{{ end -}}
{{- end -}}
{{- $tuned := hasKey (include "ryzanstein.finetuner.pools" (index . 0) | fromYaml) (index . 1) -}}
mounts:
{{- if $tuned }}
  - {name: finetuning, mountPath: {{ include "ryzanstein.finetuner.folder" . }}, readOnly: true}
{{- end }}
{{- range $volume, $model := $volumes }}
  - {name: {{ $volume }}, mountPath: {{ $model.root }}, readOnly: true}
{{- end }}
{{- if ne $pool.diskCache.type "none" }}
  - {name: kv-cache, mountPath: {{ include "ryzanstein.diskCache.folder" $pool }}}
{{- end }}
{{- if $shm }}
  - {name: shm, mountPath: /dev/shm}
{{- end }}
{{- if $compiles }}
  - {name: compiled, mountPath: /var/cache/triton}
{{- end }}
volumes:
{{- if $tuned }}
  - {{ include "ryzanstein.finetuner.volume" (index . 0) | nindent 4 | trim }}
{{- end }}
{{- range $volume, $model := $volumes }}
{{- with include "ryzanstein.model.volume" (list (index $ 0) (index $ 1) $model) }}
  - name: {{ $volume }}
    {{- . | nindent 4 }}
{{- end }}
{{- end }}
{{- with include "ryzanstein.diskCache.volume" $pool }}
  - name: kv-cache
    {{- . | nindent 4 }}
{{- end }}
{{- if $shm }}
  # NCCL, and what vLLM's processes say to each other, need more than the 64 MiB of a container; counts as its memory.
  - {name: shm, emptyDir: {medium: Memory, sizeLimit: {{ $pool.sharedMemory.sizeLimit }}}}
{{- end }}
{{- if $compiles }}
  - {name: compiled, emptyDir: {sizeLimit: {{ $pool.compiledKernels.sizeLimit }}}}
{{- end }}
initContainers:
{{- $count := 0 }}
{{- range $models }}
{{- if eq (include "ryzanstein.model.scheme" .) "hf" }}
  - {{ include "ryzanstein.model.fetch" (list (index $ 0) . (ternary (printf "fetch-%d" $count) "fetch" (gt $count 0))) | nindent 4 | trim }}
{{- $count = add1 $count }}
{{- end }}
{{- end }}
spec:
{{- with $pool.gpu.resourceClaims }}
  resourceClaims:
    {{- toYaml . | nindent 4 }}
{{- end }}
{{- end }}

{{/* Whether pods write to claims, which belong to root until fsGroup lets a group write. Empty or "true". */}}
{{- define "ryzanstein.worker.fills" -}}
{{- $fetched := and (include "ryzanstein.pool.fetches" .) (has .storage.type (list "pvc" "perPod" "ephemeral")) -}}
{{- if or $fetched (has .diskCache.type (list "pvc" "ephemeral")) }}true{{ end -}}
{{- end }}

{{/* The pool with its GPUs among the resources, and a group that may write to its claims: (list $ pool). */}}
{{- define "ryzanstein.worker.config" -}}
{{- $pool := deepCopy (index . 1) -}}
{{- $gpus := include "ryzanstein.worker.gpus" $pool | int64 -}}
{{- if $gpus -}}
{{- $_ := mergeOverwrite $pool (dict "resources" (dict "limits" (dict $pool.gpu.resourceName $gpus))) -}}
{{- end -}}
{{- if and (include "ryzanstein.worker.fills" $pool) (not (index . 0).Values.openshift) -}}
{{- $_ := set $pool "securityContext" (merge $pool.securityContext (dict "fsGroup" 10001)) -}}
{{- end -}}
{{- with $pool.gpu.resourceClaims -}}
{{- $claims := list -}}
{{- range . -}}
{{- $claims = append $claims (dict "name" .name) -}}
{{- end -}}
{{- $_ := set $pool.resources "claims" $claims -}}
{{- end -}}
{{- toYaml $pool -}}
{{- end }}
