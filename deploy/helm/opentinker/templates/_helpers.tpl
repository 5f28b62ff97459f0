{{- define "opentinker.name" -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- end }}

{{/* Of everything of this release. */}}
{{- define "opentinker.selector" -}}
app.kubernetes.io/name: opentinker
app.kubernetes.io/instance: {{ .Release.Name }}
{{- end }}

{{/* (dict "root" $ "component" NAME) */}}
{{- define "opentinker.labels" -}}
{{ include "opentinker.selector" .root }}
app.kubernetes.io/component: {{ .component }}
app.kubernetes.io/version: {{ .root.Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .root.Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .root.Chart.Name .root.Chart.Version | quote }}
{{- end }}

{{- define "opentinker.image" -}}
{{- $image := index .root.Values.images .image -}}
{{ $image.repository }}:{{ $image.tag | default .root.Values.images.tag | default .root.Chart.AppVersion }}
{{- end }}

{{- define "opentinker.natsUrl" -}}
{{- if .Values.nats.enabled }}nats://{{ include "opentinker.name" . }}-nats:4222{{ else }}{{ required "nats.url is needed where nats.enabled is false" .Values.nats.url }}{{ end }}
{{- end }}

{{- define "opentinker.redisUrl" -}}
{{- if .Values.redis.enabled }}redis://{{ include "opentinker.name" . }}-redis:6379/0{{ else }}{{ required "redis.url is needed where redis.enabled is false" .Values.redis.url }}{{ end }}
{{- end }}

{{- define "opentinker.container" -}}
allowPrivilegeEscalation: false
readOnlyRootFilesystem: true
capabilities: {drop: [ALL]}
{{- end }}

{{- define "opentinker.pod" -}}
runAsNonRoot: true
runAsUser: 10001
runAsGroup: 10001
fsGroup: 10001
fsGroupChangePolicy: OnRootMismatch
{{- end }}

{{/* Environment of a service from its settings: (dict "root" $ "values" POOL). Those of the pool go before. */}}
{{- define "opentinker.settings" -}}
{{- range $name, $value := mergeOverwrite (deepCopy .root.Values.settings) .values.settings }}
- name: OPENTINKER_{{ upper $name }}
  value: {{ $value | toString | quote }}
{{- end }}
{{- end }}
