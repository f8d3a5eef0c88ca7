{{/* Name of the namespaced objects of a release; names of cluster-wide objects contain it. */}}
{{- define "elasticjob.name" -}}
{{- if contains .Chart.Name .Release.Name -}}
{{- .Release.Name | trunc 40 | trimSuffix "-" -}}
{{- else -}}
{{- printf "%s-%s" .Release.Name .Chart.Name | trunc 40 | trimSuffix "-" -}}
{{- end -}}
{{- end -}}

{{/* Name of cluster-wide objects. Releases of one name in two namespaces must not share a ClusterRole. */}}
{{- define "elasticjob.clusterName" -}}
{{- printf "%s:%s" .Release.Namespace (include "elasticjob.name" .) -}}
{{- end -}}

{{- define "elasticjob.selector" -}}
app.kubernetes.io/name: elasticjob
app.kubernetes.io/instance: {{ .Release.Name }}
app.kubernetes.io/component: operator
{{- end -}}

{{- define "elasticjob.labels" -}}
{{ include "elasticjob.selector" . }}
app.kubernetes.io/version: {{ .Chart.AppVersion | quote }}
app.kubernetes.io/managed-by: {{ .Release.Service }}
helm.sh/chart: {{ printf "%s-%s" .Chart.Name .Chart.Version }}
{{- end -}}

{{- define "elasticjob.serviceAccount" -}}
{{- if .Values.serviceAccount.create -}}
{{- .Values.serviceAccount.name | default (include "elasticjob.name" .) -}}
{{- else -}}
{{- .Values.serviceAccount.name | default "default" -}}
{{- end -}}
{{- end -}}

{{- define "elasticjob.image" -}}
{{- if .Values.image.digest -}}
{{- printf "%s@%s" .Values.image.repository .Values.image.digest -}}
{{- else -}}
{{- printf "%s:%s" .Values.image.repository (.Values.image.tag | default .Chart.AppVersion) -}}
{{- end -}}
{{- end -}}

{{/* Name of the Secret with the certificate of the metrics. */}}
{{- define "elasticjob.metricsSecret" -}}
{{- .Values.metrics.secure.certificateSecret | default (printf "%s-metrics-tls" (include "elasticjob.name" .)) -}}
{{- end -}}

{{- define "elasticjob.subject" -}}
- kind: ServiceAccount
  name: {{ include "elasticjob.serviceAccount" . }}
  namespace: {{ .Release.Namespace }}
{{- end -}}
