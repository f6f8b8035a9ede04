# A pool of GPU nodes for a GKE cluster that is there, and a model of 70 billion parameters on four GPUs each.

variable "project" {
  type = string
}

variable "cluster" {
  description = "Name of the cluster."
  type        = string
}

variable "zone" {
  type = string
}

variable "workers" {
  description = "How many workers, each on a node of its own."
  type        = number
  default     = 2
}

provider "google" {
  project = var.project
  zone    = var.zone
}

data "google_client_config" "current" {}

data "google_container_cluster" "this" {
  name     = var.cluster
  location = var.zone
}

provider "kubernetes" {
  host                   = "https://${data.google_container_cluster.this.endpoint}"
  token                  = data.google_client_config.current.access_token
  cluster_ca_certificate = base64decode(data.google_container_cluster.this.master_auth[0].cluster_ca_certificate)
}

provider "helm" {
  kubernetes = {
    host                   = "https://${data.google_container_cluster.this.endpoint}"
    token                  = data.google_client_config.current.access_token
    cluster_ca_certificate = base64decode(data.google_container_cluster.this.master_auth[0].cluster_ca_certificate)
  }
}

resource "google_container_node_pool" "gpus" {
  name       = "ryzanstein-gpus"
  cluster    = data.google_container_cluster.this.id
  node_count = var.workers

  node_config {
    # Four A100 with 40 GB and NVLink among them.
    machine_type = "a2-highgpu-4g"
    disk_size_gb = 300
    disk_type    = "pd-ssd"
    oauth_scopes = ["https://www.googleapis.com/auth/cloud-platform"]

    guest_accelerator {
      type  = "nvidia-tesla-a100"
      count = 4

      gpu_driver_installation_config {
        gpu_driver_version = "LATEST"
      }
    }

    # Nothing else is placed there.
    taint {
      key    = "nvidia.com/gpu"
      value  = "present"
      effect = "NO_SCHEDULE"
    }
  }
}

module "ryzanstein" {
  source     = "../../module"
  depends_on = [google_container_node_pool.gpus]

  chart           = "${path.module}/../../../../charts/ryzanstein"
  values_files    = ["${path.module}/../../../../charts/ryzanstein/profiles/gpu-tp4.yaml"]
  timeout_seconds = 7200
  values = {
    workers = {
      pools = {
        default = {
          replicas = var.workers
          storage  = { type = "perPod", size = "200Gi", accessModes = ["ReadWriteOnce"] }
        }
      }
    }
  }
}
