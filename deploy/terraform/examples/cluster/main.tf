# On a cluster that a kubeconfig names: the default model, with an ingress.

variable "kubeconfig" {
  type    = string
  default = "~/.kube/config"
}

variable "host" {
  description = "The name that clients call."
  type        = string
}

provider "kubernetes" {
  config_path = var.kubeconfig
}

provider "helm" {
  kubernetes = {
    config_path = var.kubeconfig
  }
}

module "ryzanstein" {
  source = "../../module"

  chart        = "${path.module}/../../../../charts/ryzanstein"
  values_files = ["${path.module}/../../../../charts/ryzanstein/profiles/ha.yaml"]
  values = {
    ingress = {
      enabled    = true
      className  = "nginx"
      controller = "nginx"
      hosts      = { (var.host) = {} }
    }
  }
}

output "grafana" {
  value = module.ryzanstein.grafana
}
