"""Pods and GPUs, by kube-state-metrics, the kubelet and dcgm-exporter: for clusters that have a Prometheus operator."""

from __future__ import annotations

from charts.tools.dashboards.grafana import INTERVAL, Dashboard, graph, runbook

_PODS = 'namespace=~"$namespace",pod=~"$release.*"'

DASHBOARD = Dashboard(
    uid="rz-k8s",
    title="Kubernetes and GPUs",
    rows=(
        (
            "Pods",
            (
                graph(
                    "Not ready",
                    "short",
                    (f'sum by (pod) (kube_pod_status_ready{{{_PODS},condition="false"}}) > 0', "{{pod}}"),
                    about=runbook("pods"),
                ),
                graph(
                    "Waiting, by reason",
                    "short",
                    (
                        f"sum by (pod, reason) (kube_pod_container_status_waiting_reason{{{_PODS}}})",
                        "{{pod}} {{reason}}",
                    ),
                    about=runbook("pods"),
                ),
                graph(
                    "Restarts, last hour",
                    "short",
                    (f"sum by (pod) (increase(kube_pod_container_status_restarts_total{{{_PODS}}}[1h]))", "{{pod}}"),
                    about=runbook("pods"),
                ),
                graph(
                    "Memory of its limit",
                    "percentunit",
                    (
                        f'sum by (pod) (container_memory_working_set_bytes{{{_PODS},container!=""}}) / '
                        f'sum by (pod) (kube_pod_container_resource_limits{{{_PODS},resource="memory"}})',
                        "{{pod}}",
                    ),
                    about="At 1 the container is killed. " + runbook("pods"),
                ),
                graph(
                    "CPU throttled",
                    "percentunit",
                    (
                        f"sum by (pod) (rate(container_cpu_cfs_throttled_periods_total{{{_PODS}}}[{INTERVAL}])) / "
                        f"sum by (pod) (rate(container_cpu_cfs_periods_total{{{_PODS}}}[{INTERVAL}]))",
                        "{{pod}}",
                    ),
                    about="Shows as jitter between tokens; the chart sets no limits. " + runbook("slow-tokens"),
                ),
                graph(
                    "Claims",
                    "percentunit",
                    (
                        'kubelet_volume_stats_used_bytes{namespace=~"$namespace"} / '
                        'kubelet_volume_stats_capacity_bytes{namespace=~"$namespace"}',
                        "{{persistentvolumeclaim}}",
                    ),
                    about="Used share.",
                ),
                graph(
                    "Replicas",
                    "short",
                    (
                        'kube_horizontalpodautoscaler_status_desired_replicas{namespace=~"$namespace"}',
                        "{{horizontalpodautoscaler}} wanted",
                    ),
                    (
                        'kube_horizontalpodautoscaler_status_current_replicas{namespace=~"$namespace"}',
                        "{{horizontalpodautoscaler}} there",
                    ),
                    about="These are also KEDA's scalers. " + runbook("autoscaling"),
                ),
                graph(
                    "Disruptions allowed",
                    "short",
                    (
                        'kube_poddisruptionbudget_status_pod_disruptions_allowed{namespace=~"$namespace"}',
                        "{{poddisruptionbudget}}",
                    ),
                    about="0 for long: a node can't be drained. " + runbook("upgrade-stuck"),
                ),
            ),
        ),
        (
            "GPUs",
            (
                graph(
                    "Utilisation",
                    "percent",
                    (f"avg by (gpu, pod) (DCGM_FI_DEV_GPU_UTIL{{{_PODS}}})", "{{pod}} {{gpu}}"),
                    about=runbook("gpu"),
                ),
                graph(
                    "Memory used",
                    "percentunit",
                    (
                        f"sum by (gpu, pod) (DCGM_FI_DEV_FB_USED{{{_PODS}}}) / "
                        f"(sum by (gpu, pod) (DCGM_FI_DEV_FB_USED{{{_PODS}}}) + "
                        f"sum by (gpu, pod) (DCGM_FI_DEV_FB_FREE{{{_PODS}}}))",
                        "{{pod}} {{gpu}}",
                    ),
                    about="High by design: the KV cache takes what is left.",
                ),
                graph(
                    "Power",
                    "watt",
                    (f"sum by (gpu, pod) (DCGM_FI_DEV_POWER_USAGE{{{_PODS}}})", "{{pod}} {{gpu}}"),
                    about="One that is far below its peers waits for them.",
                ),
                graph(
                    "Temperature",
                    "celsius",
                    (f"max by (gpu, pod) (DCGM_FI_DEV_GPU_TEMP{{{_PODS}}})", "{{pod}} {{gpu}}"),
                    about="Hot GPUs clock down. " + runbook("gpu"),
                ),
                graph(
                    "XID errors",
                    "short",
                    (f"changes(DCGM_FI_DEV_XID_ERRORS{{{_PODS}}}[15m])", "{{pod}} {{gpu}}"),
                    about=runbook("gpu"),
                ),
            ),
        ),
    ),
)
