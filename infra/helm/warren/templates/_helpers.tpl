{{- define "warren.name" -}}
{{- $name := .Release.Name -}}
{{- if not (contains "warren" $name) }}{{ $name = printf "%s-warren" $name }}{{ end -}}
{{- $name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{- define "warren.labels" -}}
app.kubernetes.io/name: warren
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* Those of pods: a new version of the chart alone must not replace them. */}}
{{- define "warren.podLabels" -}}
app.kubernetes.io/name: warren
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
{{- end }}

{{- define "warren.monitoringLabels" -}}
{{ include "warren.labels" . }}
{{- with .Values.monitoring.labels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{- define "warren.gatewaySelector" -}}
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: gateway
{{- end }}

{{/* The labels of a pool's pods, given the root and the pool's name. */}}
{{- define "warren.poolSelector" -}}
app.kubernetes.io/instance: {{ .root.Release.Name }}
app.kubernetes.io/component: worker
warren/pool: {{ .pool }}
{{- end }}

{{/* The labels that the cluster operator gives to RabbitMQ's pods and Services. */}}
{{- define "warren.rabbitmqSelector" -}}
app.kubernetes.io/name: {{ include "warren.name" . }}-rabbitmq
app.kubernetes.io/component: rabbitmq
{{- end }}

{{/* Pods with these labels run on different nodes if that is possible. */}}
{{- define "warren.spread" -}}
topologySpreadConstraints:
  - maxSkew: 1
    topologyKey: kubernetes.io/hostname
    whenUnsatisfiable: ScheduleAnyway
    labelSelector:
      matchLabels:
        {{- . | nindent 8 }}
{{- end }}

{{- define "warren.image" -}}
{{- $images := .root.Values.images -}}
{{- with $images.registry }}{{ trimSuffix "/" . }}/{{ end -}}
{{ .image }}:{{ .tag | default $images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "warren.brokerSecret" -}}
{{- .Values.broker.existingSecret | default (printf "%s-broker" (include "warren.name" .)) -}}
{{- end }}

{{- define "warren.gatewaySecret" -}}
{{- .Values.gateway.existingSecret | default (printf "%s-gateway" (include "warren.name" .)) -}}
{{- end }}

{{/* Variables for a map of settings: max_requests: 8 is WARREN_MAX_REQUESTS. Whole numbers of values are floats to Helm. */}}
{{- define "warren.settings" -}}
{{- range $name, $value := . }}
{{- if kindIs "slice" $value }}
{{- $value = join "," $value }}
{{- else if and (kindIs "float64" $value) (eq $value (floor $value)) }}
{{- $value = int64 $value }}
{{- end }}
- name: WARREN_{{ upper $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}

{{/* Refuse settings that would be replaced, given the chart's own ones and those of the user by their place. */}}
{{- define "warren.refuseReplaced" -}}
{{- $instead := dict
    "port" "gateway.service.port"
    "broker" "broker.existingSecret"
    "secret" "gateway.existingSecret"
    "keys_file" "apiKeys.existingSecret"
    "allow_anonymous" "apiKeys.allowAnonymous"
    "database_url" "gateway.databaseSecret"
    "drain_grace_s" "drainSeconds of the gateway or of the pool"
    "model" "model of the pool"
    "device" "gpus of the pool"
    "engine" "engine.kind of the pool"
    "engine_url" "engine.port of the pool" }}
{{- range $place, $settings := .given }}
{{- range $name, $_ := $settings }}
{{- if hasKey $.own $name }}
{{- $what := ternary (printf "set %s instead" (get $instead $name)) "the chart sets it" (hasKey $instead $name) }}
{{- fail (printf "%s.%s has no effect: %s" $place $name $what) }}
{{- end }}
{{- end }}
{{- end }}
{{- end }}

{{/* The settings that the user gave for gateways. */}}
{{- define "warren.gatewaySettings" -}}
{{- mergeOverwrite (deepCopy .Values.settings) (deepCopy .Values.gateway.settings) | toJson -}}
{{- end }}

{{/* Whether gateways have a database of their own choice; empty if not. */}}
{{- define "warren.hasDatabase" -}}
{{- $settings := include "warren.gatewaySettings" . | fromJson -}}
{{- if or .Values.gateway.databaseSecret $settings.database_url }}true{{ end -}}
{{- end }}

{{/* Whether gateways have a common storage of files; empty if not. */}}
{{- define "warren.hasStorage" -}}
{{- if (include "warren.gatewaySettings" . | fromJson).files_url }}true{{ end -}}
{{- end }}

{{/* The name that clients use for a worker's model, which is the label of its metrics. */}}
{{- define "warren.servedName" -}}
{{- $model := .model -}}
{{- if or (hasPrefix "/" $model) (hasSuffix ".gguf" $model) }}{{ $model = base $model | trimSuffix ".gguf" }}
{{- else }}{{ $model = regexReplaceAll "@.*$" $model "" }}{{ end -}}
{{- .served_name | default $model -}}
{{- end }}

{{- define "warren.podSecurity" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
seccompProfile:
  type: RuntimeDefault
{{- end }}

{{- define "warren.containerSecurity" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities:
  drop: [ALL]
{{- end }}

{{- define "warren.placement" -}}
{{- with .nodeSelector }}
nodeSelector:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .tolerations }}
tolerations:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- with .affinity }}
affinity:
  {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}
