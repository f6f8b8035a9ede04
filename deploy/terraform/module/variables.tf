variable "name" {
  description = "Name of the release."
  type        = string
  default     = "ryzanstein"

  validation {
    condition     = can(regex("^[a-z]([-a-z0-9]{0,25}[a-z0-9])?$", var.name))
    error_message = "A release's name has 1 to 27 characters of a-z, 0-9 and -, and begins with a letter."
  }
}

variable "namespace" {
  description = "Namespace that it is installed into."
  type        = string
  default     = "ryzanstein"
}

variable "create_namespace" {
  description = "Whether the module makes the namespace."
  type        = bool
  default     = true
}

variable "namespace_labels" {
  description = "More labels of the namespace that the module makes."
  type        = map(string)
  default     = {}
}

variable "chart" {
  description = "The chart: a folder, an archive, an oci:// reference, or its name in chart_repository."
  type        = string
}

variable "chart_repository" {
  description = "URL of the chart's repository; null for folders, archives and oci://."
  type        = string
  default     = null
}

variable "chart_version" {
  description = "Version of the chart; null: the newest, or that of the folder."
  type        = string
  default     = null
}

variable "values" {
  description = "Values of the chart, as in its values.yaml."
  type        = any
  default     = {}
}

variable "values_files" {
  description = "Paths of files of values, e.g. the chart's profiles; `values` outweighs them."
  type        = list(string)
  default     = []
}

variable "timeout_seconds" {
  description = "How long everything may take to become ready: at least the largest startupBudgetSeconds, and the fetching of models."
  type        = number
  default     = 600
}
