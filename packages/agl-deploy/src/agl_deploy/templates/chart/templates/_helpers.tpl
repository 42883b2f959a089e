{{/* The beginning of every name: the release's, short enough for what is appended, and never a digit first. */}}
{{- define "agl.name" -}}
{{- $name := .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- if regexMatch "^[a-z]" $name }}{{ $name }}{{ else }}agl-{{ $name }}{{ end -}}
{{- end }}

{{- define "agl.labels" -}}
app.kubernetes.io/name: agl
app.kubernetes.io/instance: {{ include "agl.name" . }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ .Chart.Name }}-{{ .Chart.Version }}
{{- end }}

{{/* What selects the pods of a part; takes a list of the root and the part's name. */}}
{{- define "agl.selector" -}}
app.kubernetes.io/name: agl
app.kubernetes.io/instance: {{ include "agl.name" (index . 0) }}
app.kubernetes.io/component: {{ index . 1 }}
{{- end }}

{{- define "agl.podLabels" -}}
{{ include "agl.selector" . }}
{{- with (index . 0).Values.podLabels }}
{{ toYaml . }}
{{- end }}
{{- end }}

{{/* The database's URL without its password, which is in the secret. */}}
{{- define "agl.store" -}}
{{- if .Values.postgresql.bundled }}postgresql://agl@{{ include "agl.name" . }}-postgres/agl{{ else }}{{ .Values.postgresql.url }}{{ end -}}
{{- end }}

{{- define "agl.gateway" -}}
{{ include "agl.name" . }}-gateway
{{- end }}

{{/* The name by which programs outside of the namespace, such as KEDA, ask the gateway. */}}
{{- define "agl.gatewayHost" -}}
{{ include "agl.gateway" . }}.{{ .Release.Namespace }}.svc
{{- end }}

{{/* An image; takes a list of the root and the part's name. */}}
{{- define "agl.image" -}}
{{- $images := (index . 0).Values.images -}}
{{- printf "%s%s-%s:%s" $images.prefix $images.name (index . 1) (toString $images.tag) | quote -}}
{{- end }}

{{/* Variables from the secret; takes a list of the root and the names. */}}
{{- define "agl.secrets" -}}
{{- $root := index . 0 -}}
{{- range index . 1 }}
- name: {{ . }}
  valueFrom:
    secretKeyRef:
      name: {{ $root.Values.secret }}
      key: {{ . }}
{{- end }}
{{- end }}

{{/* What every pod has; takes a list of the root, the user's id, and the part's values for where it may run. */}}
{{- define "agl.pod" -}}
{{- $root := index . 0 -}}
{{- $user := index . 1 -}}
{{- $part := index . 2 -}}
serviceAccountName: {{ include "agl.name" $root }}
automountServiceAccountToken: false
enableServiceLinks: false
{{- with $root.Values.images.pullSecrets }}
imagePullSecrets:
{{- range . }}
  - name: {{ . }}
{{- end }}
{{- end }}
securityContext:
  runAsNonRoot: true
  runAsUser: {{ $user }}
  runAsGroup: {{ $user }}
  fsGroup: {{ $user }}
  seccompProfile:
    type: RuntimeDefault
{{- with $part.nodeSelector }}
nodeSelector: {{- toYaml . | nindent 2 }}
{{- end }}
{{- with $part.tolerations }}
tolerations: {{- toYaml . | nindent 2 }}
{{- end }}
{{- end }}

{{- define "agl.container" -}}
imagePullPolicy: {{ .Values.images.pullPolicy }}
securityContext:
  allowPrivilegeEscalation: false
  readOnlyRootFilesystem: true
  capabilities:
    drop: [ALL]
{{- end }}
