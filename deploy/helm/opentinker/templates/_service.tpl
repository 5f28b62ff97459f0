{{/*
The pod of a service, in a Deployment or for the launcher:
(dict "root" $ "service" "trainer" "module" "trainer" "image" "compute" "values" POOL "compute" BOOL)
*/}}
{{- define "opentinker.servicePod" -}}
{{- $root := .root -}}
metadata:
  labels:
    {{- include "opentinker.labels" (dict "root" $root "component" .service) | nindent 4 }}
  {{- with $root.Values.podAnnotations }}
  annotations: {{- toYaml . | nindent 4 }}
  {{- end }}
spec:
  serviceAccountName: {{ include "opentinker.name" $root }}{{ if eq .service "scheduler" }}-scheduler{{ end }}
  automountServiceAccountToken: {{ and (eq .service "scheduler") $root.Values.launcher.enabled }}
  enableServiceLinks: false
  terminationGracePeriodSeconds: {{ add $root.Values.drainSeconds 15 }}
  {{- with $root.Values.images.pullSecrets }}
  imagePullSecrets:
    {{- range . }}
    - name: {{ . }}
    {{- end }}
  {{- end }}
  securityContext:
    {{- include "opentinker.pod" $root | nindent 4 }}
    seccompProfile: {{- toYaml (.values.seccompProfile | default (dict "type" "RuntimeDefault")) | nindent 6 }}
  {{- with .values.nodeSelector }}
  nodeSelector: {{- toYaml . | nindent 4 }}
  {{- end }}
  {{- with .values.tolerations }}
  tolerations: {{- toYaml . | nindent 4 }}
  {{- end }}
  topologySpreadConstraints:
    - maxSkew: 1
      topologyKey: kubernetes.io/hostname
      whenUnsatisfiable: ScheduleAnyway
      labelSelector:
        matchLabels:
          {{- include "opentinker.selector" $root | nindent 10 }}
          app.kubernetes.io/component: {{ .service }}
  {{- if ne .service "scheduler" }}
  initContainers:
    # Made by the user of the services: what is not there when it is mounted belongs to root.
    - name: directories
      image: {{ include "opentinker.image" (dict "root" $root "image" .image) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      command: [mkdir, -p, /data/jobs, /data/environments/venvs]
      securityContext:
        {{- include "opentinker.container" $root | nindent 8 }}
      resources: {requests: {cpu: 10m, memory: 16Mi}, limits: {memory: 64Mi}}
      volumeMounts:
        - {name: data, mountPath: /data}
  {{- end }}
  containers:
    - name: {{ .service }}
      image: {{ include "opentinker.image" (dict "root" $root "image" .image) }}
      imagePullPolicy: {{ $root.Values.images.pullPolicy }}
      command: [python, -m, opentinker.services.{{ .module }}]
      securityContext:
        {{- include "opentinker.container" $root | nindent 8 }}
      env:
        - name: OPENTINKER_ADVERTISE_HOST
          valueFrom: {fieldRef: {fieldPath: status.podIP}}
        - name: OPENTINKER_NATS_URL
          value: {{ include "opentinker.natsUrl" $root | quote }}
        - name: OPENTINKER_REDIS_URL
          value: {{ include "opentinker.redisUrl" $root | quote }}
        - name: OPENTINKER_NATS_PASSWORD_FILE
          value: /run/opentinker/access/nats
        - name: OPENTINKER_REDIS_PASSWORD_FILE
          value: /run/opentinker/access/valkey
        - name: OPENTINKER_DATA_DIR
          value: /var/lib/opentinker/data
        - name: OPENTINKER_HEALTH_HOST
          value: 0.0.0.0
        - name: OPENTINKER_HEALTH_PORT
          value: "9100"
        - name: OPENTINKER_DRAIN_S
          value: {{ $root.Values.drainSeconds | quote }}
        {{- if eq .service "scheduler" }}
        - name: OPENTINKER_HTTP_HOST
          value: 0.0.0.0
        - name: OPENTINKER_HTTP_PORT
          value: "8080"
        - name: OPENTINKER_ADMIN_KEY_FILE
          value: /run/opentinker/operator/key
        {{- if $root.Values.oidc.secret }}
        - name: OPENTINKER_OIDC_CLIENT_SECRET_FILE
          value: /run/opentinker/oidc/client-secret
        {{- end }}
        {{- with $root.Values.artifacts }}
        {{- if .url }}
        - name: OPENTINKER_ARTIFACTS_URL
          value: {{ .url | quote }}
        - name: OPENTINKER_ARTIFACTS_S3_ENDPOINT
          value: {{ .endpoint | quote }}
        - name: OPENTINKER_ARTIFACTS_S3_REGION
          value: {{ .region | quote }}
        - name: OPENTINKER_ARTIFACTS_S3_CREDENTIALS_FILE
          value: /run/opentinker/artifacts/credentials
        {{- end }}
        {{- end }}
        {{- if $root.Values.launcher.enabled }}
        - name: OPENTINKER_LAUNCHER
          value: kubernetes
        - name: OPENTINKER_LAUNCHER_PODS
          value: /etc/opentinker/pods
        - name: OPENTINKER_LAUNCHER_OWNER
          value: {{ include "opentinker.name" $root }}-scheduler
        - name: OPENTINKER_LAUNCHER_TRAINERS
          value: {{ $root.Values.launcher.trainers | quote }}
        - name: OPENTINKER_LAUNCHER_ROLLOUT_WORKERS
          value: {{ $root.Values.launcher.rolloutWorkers | quote }}
        - name: OPENTINKER_LAUNCHER_IDLE_S
          value: {{ $root.Values.launcher.idleSeconds | quote }}
        - name: OPENTINKER_LAUNCHER_START_S
          value: {{ $root.Values.launcher.startSeconds | quote }}
        {{- end }}
        {{- with $root.Values.nats.websocketUrl }}
        - name: OPENTINKER_NATS_WEBSOCKET_URL
          value: {{ . | quote }}
        - name: OPENTINKER_NATS_ISSUER_FILE
          value: /run/opentinker/access/issuer
        {{- end }}
        {{- end }}
        {{- if include "opentinker.modelKeys" . }}
        - name: OPENTINKER_MODEL_KEYS_FILE
          value: /run/opentinker/models/keys
        {{- end }}
        {{- if .compute }}
        - name: HF_HOME
          value: /var/cache/huggingface
        {{- with $root.Values.hub }}
        {{- if not .enabled }}
        - name: HF_HUB_OFFLINE
          value: "1"
        {{- end }}
        {{- with .endpoint }}
        - name: HF_ENDPOINT
          value: {{ . | quote }}
        {{- end }}
        {{- if .token.secret }}
        - name: HF_TOKEN_PATH
          value: /run/opentinker/hub/token
        {{- end }}
        {{- end }}
        {{- end }}
        {{- include "opentinker.settings" (dict "root" $root "values" .values) | nindent 8 }}
      ports:
        - {name: health, containerPort: 9100}
        {{- if eq .service "scheduler" }}
        - {name: api, containerPort: 8080}
        {{- end }}
      startupProbe:
        httpGet: {path: /healthz, port: health}
        periodSeconds: 5
        failureThreshold: 60
      livenessProbe:
        httpGet: {path: /healthz, port: health}
        periodSeconds: 10
        timeoutSeconds: 5
        failureThreshold: 6
      readinessProbe:
        httpGet: {path: /readyz, port: health}
        periodSeconds: 5
        timeoutSeconds: 5
      {{- $resources := deepCopy .values.resources }}
      {{- if .values.gpus }}
      {{- $_ := set $resources "limits" (merge (dict $root.Values.gpuResource .values.gpus) ($resources.limits | default dict)) }}
      {{- end }}
      resources: {{- toYaml $resources | nindent 8 }}
      volumeMounts:
        - {name: access, mountPath: /run/opentinker/access, readOnly: true}
        {{- if eq .service "scheduler" }}
        - {name: operator, mountPath: /run/opentinker/operator, readOnly: true}
        {{- if $root.Values.artifacts.url }}
        - {name: artifacts, mountPath: /run/opentinker/artifacts, readOnly: true}
        {{- end }}
        {{- if $root.Values.oidc.secret }}
        - {name: oidc, mountPath: /run/opentinker/oidc, readOnly: true}
        {{- end }}
        {{- if $root.Values.launcher.enabled }}
        - {name: pods, mountPath: /etc/opentinker/pods, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if eq .service "scheduler" }}
        - {name: data, mountPath: /var/lib/opentinker/data}
        {{- else if eq .service "env-worker" }}
        - {name: data, mountPath: /var/lib/opentinker/data/environments, subPath: environments, readOnly: true}
        - {name: data, mountPath: /var/lib/opentinker/data/environments/venvs, subPath: environments/venvs}
        {{- else }}
        - {name: data, mountPath: /var/lib/opentinker/data/jobs, subPath: jobs, readOnly: {{ ne .service "trainer" }}}
        {{- end }}
        {{- if include "opentinker.modelKeys" . }}
        - {name: model-keys, mountPath: /run/opentinker/models, readOnly: true}
        {{- end }}
        - {name: tmp, mountPath: /tmp}
        {{- if .compute }}
        - {name: shm, mountPath: /dev/shm}
        - {name: hub, mountPath: /var/cache/huggingface}
        {{- if $root.Values.hub.token.secret }}
        - {name: hub-token, mountPath: /run/opentinker/hub, readOnly: true}
        {{- end }}
        {{- end }}
        {{- if $root.Values.models.existingClaim }}
        - {name: models, mountPath: /models, readOnly: true}
        {{- end }}
  volumes:
    - name: access
      secret:
        secretName: {{ $root.Values.access.secretPrefix }}-{{ .service }}
        defaultMode: 0440
        items:
          - {key: nats, path: nats}
          - {key: valkey, path: valkey}
          {{- if and (eq .service "scheduler") $root.Values.nats.websocketUrl }}
          - {key: issuer, path: issuer}
          {{- end }}
    {{- if eq .service "scheduler" }}
    - name: operator
      secret:
        secretName: {{ $root.Values.operatorKey.secret }}
        defaultMode: 0440
        items:
          - {key: {{ $root.Values.operatorKey.key }}, path: key}
    {{- if $root.Values.artifacts.url }}
    - name: artifacts
      secret:
        secretName: {{ required "artifacts.credentials.secret is needed with artifacts.url" $root.Values.artifacts.credentials.secret }}
        defaultMode: 0440
        items:
          - {key: {{ $root.Values.artifacts.credentials.key }}, path: credentials}
    {{- end }}
    {{- if $root.Values.oidc.secret }}
    - name: oidc
      secret:
        secretName: {{ $root.Values.oidc.secret }}
        defaultMode: 0440
        items:
          - {key: {{ $root.Values.oidc.key }}, path: client-secret}
    {{- end }}
    {{- if $root.Values.launcher.enabled }}
    - name: pods
      configMap: {name: {{ include "opentinker.name" $root }}-pods}
    {{- end }}
    {{- end }}
    - name: data
      persistentVolumeClaim:
        claimName: {{ $root.Values.data.existingClaim | default (printf "%s-data" (include "opentinker.name" $root)) }}
    {{- if include "opentinker.modelKeys" . }}
    - name: model-keys
      secret:
        secretName: {{ $root.Values.modelKeys.secret }}
        defaultMode: 0440
        items:
          - {key: {{ $root.Values.modelKeys.key }}, path: keys}
    {{- end }}
    - name: tmp
      emptyDir: {}
    {{- if .compute }}
    - name: shm
      emptyDir: {medium: Memory, sizeLimit: {{ $root.Values.sharedMemory }}}
    - name: hub
      {{- with $root.Values.hub.cache }}
      {{- if .existingClaim }}
      persistentVolumeClaim: {claimName: {{ .existingClaim }}}
      {{- else }}
      emptyDir: {sizeLimit: {{ .size }}}
      {{- end }}
      {{- end }}
    {{- with $root.Values.hub.token }}
    {{- if .secret }}
    - name: hub-token
      secret:
        secretName: {{ .secret }}
        defaultMode: 0440
        items:
          - {key: {{ .key }}, path: token}
    {{- end }}
    {{- end }}
    {{- end }}
    {{- if $root.Values.models.existingClaim }}
    - name: models
      persistentVolumeClaim: {claimName: {{ $root.Values.models.existingClaim }}, readOnly: true}
    {{- end }}
{{- end }}

{{/* Not empty for a service that reads the keys of models behind URLs, if there are any. */}}
{{- define "opentinker.modelKeys" -}}
{{- if and .root.Values.modelKeys.secret (has .service (list "scheduler" "rollout-worker")) }}true{{ end }}
{{- end }}

{{/* The pools, as arguments of "opentinker.servicePod" without the root. */}}
{{- define "opentinker.services" -}}
{{- dict
  "scheduler" (dict "service" "scheduler" "module" "scheduler" "image" "light" "values" .Values.scheduler "compute" false)
  "env-worker" (dict "service" "env-worker" "module" "env_worker" "image" "light" "values" .Values.envWorker "compute" false)
  "rollout-worker" (dict "service" "rollout-worker" "module" "rollout_worker" "image" "compute" "values" .Values.rolloutWorker "compute" true)
  "trainer" (dict "service" "trainer" "module" "trainer" "image" "compute" "values" .Values.trainer "compute" true)
  "reference-forward" (dict "service" "reference-forward" "module" "reference_forward" "image" "compute" "values" .Values.referenceForward "compute" true)
| toJson }}
{{- end }}
