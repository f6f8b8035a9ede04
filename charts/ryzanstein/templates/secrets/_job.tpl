{{- define "ryzanstein.secrets.job" -}}
{{- $of := list . "secrets" }}
{{- $config := include "ryzanstein.config" (list . (dict "resources" .Values.secrets.resources "topologySpread" "none")) | fromYaml -}}
backoffLimit: 10
template:
  metadata:
    {{- include "ryzanstein.pod.metadata" (dict "root" . "of" $of "config" $config) | nindent 4 }}
  spec:
    {{- include "ryzanstein.pod.spec" (dict "root" . "of" $of "config" $config "serviceAccount" (include "ryzanstein.name" $of)) | nindent 4 }}
    restartPolicy: OnFailure
    containers:
      - name: secrets
        image: {{ include "ryzanstein.image" (list . "cli") }}
        imagePullPolicy: {{ .Values.image.pullPolicy }}
        command: [ryzanstein, kube, ensure-secrets, --namespace, {{ .Release.Namespace }}, --name, {{ include "ryzanstein.redis.secretName" . }}, --key, password]
        {{- include "ryzanstein.container" $config | nindent 8 }}
        volumeMounts:
          - {name: tmp, mountPath: /tmp}
    volumes:
      - {name: tmp, emptyDir: {}}
{{- end }}
