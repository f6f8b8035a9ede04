output "url" {
  description = "Where the gateway answers within the cluster."
  value       = "http://${local.fullname}-gateway.${helm_release.this.namespace}.svc"
}

output "grafana" {
  description = "The command that brings the bundled Grafana to http://127.0.0.1:3000."
  value       = "kubectl -n ${helm_release.this.namespace} port-forward service/${local.fullname}-grafana 3000"
}

output "namespace" {
  description = "Where it is installed."
  value       = helm_release.this.namespace
}

locals {
  # As the chart names its objects.
  fullname = strcontains(var.name, "ryzanstein") ? var.name : "${var.name}-ryzanstein"
}
