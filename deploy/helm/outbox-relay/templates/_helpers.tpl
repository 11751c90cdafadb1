{{- define "outbox.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{- define "outbox.selector" -}}
app.kubernetes.io/name: outbox-relay
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{- define "outbox.labels" -}}
{{ include "outbox.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service | quote }}
{{- end }}

{{/* Of the pods of the relay and of the migration. */}}
{{- define "outbox.pod" -}}
automountServiceAccountToken: false
# Kubernetes would set OUTBOX_RELAY_PORT and others, which are no settings: the relay rejects them.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- with .Values.imagePullSecrets }}
imagePullSecrets: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.nodeSelector }}
nodeSelector: {{ toYaml . | nindent 2 }}
{{- end }}
{{- with .Values.tolerations }}
tolerations: {{ toYaml . | nindent 2 }}
{{- end }}
volumes:
  - name: secrets
    secret:
      secretName: {{ .Values.secret.name | quote }}
      defaultMode: 0440
{{- end }}

{{- define "outbox.container" -}}
image: "{{ .Values.image.repository }}:{{ .Values.image.tag | default .Chart.AppVersion }}"
imagePullPolicy: {{ .Values.image.pullPolicy }}
env:
  - {name: OUTBOX_HEALTH, value: "0.0.0.0:9090"}
  {{- range $variable, $key := .Values.secret.keys }}
  - {name: {{ $variable }}_FILE, value: {{ printf "/run/secrets/outbox/%s" $key | quote }}}
  {{- end }}
  {{- range $variable, $value := .Values.settings }}
  - {name: {{ $variable }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
  {{- end }}
  {{- with .Values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- $bytes := add (int64 .Values.settings.OUTBOX_BUFFER_BYTES_MAX) (mul (ternary 640 384 (or (hasKey .Values.settings "OUTBOX_ADMIN") (hasKey .Values.settings "OUTBOX_RECEIVERS"))) 1048576) }}
{{- $limits := dict "limits" (dict "memory" (printf "%dMi" (div $bytes 1048576))) }}
resources: {{ merge (deepCopy .Values.resources) $limits | toYaml | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: secrets, mountPath: /run/secrets/outbox, readOnly: true}
{{- end }}
