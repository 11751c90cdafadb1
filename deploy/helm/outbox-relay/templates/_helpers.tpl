{{- define "outbox.name" -}}
{{ .Release.Name | trunc 50 | trimSuffix "-" }}
{{- end }}

{{/* Whether the API has a listener: "true" or nothing. */}}
{{- define "outbox.hasApi" -}}
{{- if or .Values.api.admin.enabled .Values.api.receivers.enabled }}true{{ end }}
{{- end }}

{{/* The name of each Deployment with its Service, by its application, as YAML. */}}
{{- define "outbox.deployments" -}}
outbox-relay: {{ include "outbox.name" . }}
{{- if include "outbox.hasApi" . }}
outbox-api: {{ include "outbox.name" . }}-api
{{- end }}
{{- end }}

{{- define "outbox.serviceAccount" -}}
{{- with .Values.serviceAccount }}
{{- .name | default (ternary (include "outbox.name" $) "default" .create) }}
{{- end }}
{{- end }}

{{/* Whether endpoints are applied: "true" or nothing. */}}
{{- define "outbox.hasApply" -}}
{{- with .Values.apply }}
{{- if or .file .configMap .secret }}true{{ end }}
{{- end }}
{{- end }}

{{/* The Secret that has a DSN; takes `root` and `dsn`. */}}
{{- define "outbox.secretOf" -}}
{{ .dsn.secret | default .root.Values.secret.name }}
{{- end }}

{{/* The DSN of each purpose that is not that of the migration, as YAML. */}}
{{- define "outbox.otherDsns" -}}
{{- $purposes := dict "relay" .Values.relay }}
{{- if include "outbox.hasApi" . }}{{ $_ := set $purposes "api" .Values.api }}{{ end }}
{{- if include "outbox.hasApply" . }}{{ $_ := set $purposes "operator" .Values.apply }}{{ end }}
{{- $owner := printf "%s %s" (include "outbox.secretOf" (dict "root" . "dsn" .Values.migration.dsn)) .Values.migration.dsn.key }}
{{- range $purpose, $own := $purposes }}
{{- if ne $owner (printf "%s %s" (include "outbox.secretOf" (dict "root" $ "dsn" $own.dsn)) $own.dsn.key) }}
{{ $purpose }}: {{ toJson $own.dsn }}
{{- end }}
{{- end }}
{{- end }}

{{/* Labels of all that belongs to the release. */}}
{{- define "outbox.partOf" -}}
app.kubernetes.io/part-of: outbox-relay
app.kubernetes.io/instance: {{ .Release.Name | quote }}
{{- end }}

{{/*
What follows takes a workload:

root: the chart
app: its name, such as outbox-relay
own: its values, which come before those of the chart
env: variables that the chart sets
keys: whether it gets the keys of the shared Secret
creates: the addresses of the roles that it creates, by their purposes
volumes, mounts: those of its own, besides the secrets
*/}}

{{/* Labels that select its pods. */}}
{{- define "outbox.selector" -}}
app.kubernetes.io/name: {{ .app }}
app.kubernetes.io/instance: {{ .root.Release.Name | quote }}
{{- end }}

{{- define "outbox.labels" -}}
{{- $own := dict "app.kubernetes.io/version" .root.Chart.AppVersion "app.kubernetes.io/managed-by" .root.Release.Service }}
{{- merge $own (include "outbox.selector" . | fromYaml) (include "outbox.partOf" .root | fromYaml) .root.Values.labels | toYaml }}
{{- end }}

{{/* The Secret and the key of each secret file, as YAML: variables, and the addresses of roles to create. */}}
{{- define "outbox.files" -}}
OUTBOX_DSN: {secret: {{ include "outbox.secretOf" (dict "root" .root "dsn" .own.dsn) | quote }}, key: {{ .own.dsn.key | quote }}}
{{- if .keys }}
{{- range $variable, $key := .root.Values.secret.keys }}
{{ $variable }}: {secret: {{ $.root.Values.secret.name | quote }}, key: {{ $key | quote }}}
{{- end }}
{{- end }}
{{- range $purpose, $dsn := .creates }}
{{ $purpose }}: {secret: {{ include "outbox.secretOf" (dict "root" $.root "dsn" $dsn) | quote }}, key: {{ $dsn.key | quote }}}
{{- end }}
{{- end }}

{{- define "outbox.podMetadata" -}}
{{- $values := merge (deepCopy .own) .root.Values }}
{{- $annotations := deepCopy $values.podAnnotations }}
{{- $versions := list }}
{{- range $variable, $file := include "outbox.files" . | fromYaml }}
  {{- with lookup "v1" "Secret" $.root.Release.Namespace $file.secret }}
    {{- if not (hasKey (.data | default dict) $file.key) }}
      {{- fail (printf "the Secret %q has no key %q with %s" $file.secret $file.key (hasPrefix "OUTBOX_" $variable | ternary (printf "the value of %s" $variable) (printf "the address of the role of the purpose %s" $variable))) }}
    {{- end }}
    {{- $versions = append $versions .metadata.resourceVersion | uniq }}
  {{- end }}
{{- end }}
{{- with $versions }}
  {{- /* Pods read changed files again; an upgrade also restarts them. */}}
  {{- $_ := set $annotations "outbox-relay/secret-versions" (join "," .) }}
{{- end -}}
labels: {{ merge (include "outbox.labels" . | fromYaml) $values.podLabels | toYaml | nindent 2 }}
{{- with $annotations }}
annotations: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "outbox.podSpec" -}}
{{- $values := merge (deepCopy .own) .root.Values -}}
automountServiceAccountToken: false
# Kubernetes would set OUTBOX_RELAY_PORT and others, which are no settings: outbox rejects them.
enableServiceLinks: false
securityContext:
  runAsNonRoot: true
  runAsUser: 65532
  runAsGroup: 65532
  fsGroup: 65532
  seccompProfile: {type: RuntimeDefault}
{{- range $key := list "imagePullSecrets" "nodeSelector" "tolerations" "affinity" "priorityClassName" }}
{{- with get $values $key }}
{{ $key }}: {{ toYaml . | nindent 2 }}
{{- end }}
{{- end }}
{{- with $values.topologySpreadConstraints }}
topologySpreadConstraints:
  {{- $labels := dict "labelSelector" (dict "matchLabels" (include "outbox.selector" $ | fromYaml)) }}
  {{- range . }}
  - {{ (hasKey . "labelSelector") | ternary . (merge (deepCopy .) $labels) | toYaml | nindent 4 }}
  {{- end }}
{{- end }}
volumes:
  - name: secrets
    projected:
      defaultMode: 0440
      sources:
        {{- range $variable, $file := include "outbox.files" . | fromYaml }}
        - secret:
            name: {{ $file.secret | quote }}
            items: [{key: {{ $file.key | quote }}, path: {{ $variable }}}]
        {{- end }}
  {{- with concat (.volumes | default list) $values.extraVolumes }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{- define "outbox.container" -}}
{{- $values := merge (deepCopy .own) .root.Values -}}
image: "{{ .root.Values.image.repository }}:{{ .root.Values.image.tag | default .root.Chart.AppVersion }}"
imagePullPolicy: {{ .root.Values.image.pullPolicy }}
env:
  {{- range $variable, $_ := include "outbox.files" . | fromYaml }}
  {{- if hasPrefix "OUTBOX_" $variable }}
  - {name: {{ $variable }}_FILE, value: /run/secrets/outbox/{{ $variable }}}
  {{- end }}
  {{- end }}
  {{- range $variable, $value := merge (deepCopy (.env | default dict)) .root.Values.settings }}
  - {name: {{ $variable }}, value: {{ kindIs "string" $value | ternary $value (toJson $value) | quote }}}
  {{- end }}
  {{- with $values.extraEnv }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
resources: {{ toYaml $values.resources | nindent 2 }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities: {drop: [ALL]}
volumeMounts:
  - {name: secrets, mountPath: /run/secrets/outbox, readOnly: true}
  {{- with concat (.mounts | default list) $values.extraVolumeMounts }}
  {{- toYaml . | nindent 2 }}
  {{- end }}
{{- end }}

{{/* Of a container that serves `health`; takes nothing. */}}
{{- define "outbox.probes" -}}
# A restart would not repair an unreachable database, so liveness is not readiness.
livenessProbe:
  httpGet: {path: /healthz, port: health}
  initialDelaySeconds: 15
  periodSeconds: 10
  timeoutSeconds: 3
readinessProbe:
  httpGet: {path: /readyz, port: health}
  periodSeconds: 5
  timeoutSeconds: 3
{{- end }}
