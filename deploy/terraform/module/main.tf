# One release of the chart. The cluster, its nodes and the providers' credentials are the caller's.

locals {
  # Later values outweigh earlier ones, key by key.
  values = concat([for path in var.values_files : file(path)], [yamlencode(var.values)])
}

resource "kubernetes_namespace_v1" "this" {
  count = var.create_namespace ? 1 : 0

  metadata {
    name = var.namespace
    labels = merge(
      # Every pod of the chart fits the strictest standard.
      { "pod-security.kubernetes.io/enforce" = "restricted" },
      var.namespace_labels,
    )
  }
}

resource "helm_release" "this" {
  name       = var.name
  namespace  = var.create_namespace ? kubernetes_namespace_v1.this[0].metadata[0].name : var.namespace
  repository = var.chart_repository
  chart      = var.chart
  version    = var.chart_version
  values     = local.values

  # A release that does not become ready is taken back: the old one serves on.
  atomic          = true
  cleanup_on_fail = true
  timeout         = var.timeout_seconds
}
