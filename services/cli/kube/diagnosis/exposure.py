"""Finds Services without ready pods, and Ingresses and routes that lead nowhere."""

from __future__ import annotations

from collections.abc import Iterator

from services.cli.kube.diagnosis.finding import Finding
from services.cli.kube.diagnosis.snapshot import ClusterSnapshot, Object, is_ready, labels, name


def findings(snapshot: ClusterSnapshot) -> Iterator[Finding]:
    """Findings about Services, Ingresses and routes of the release."""
    for service in snapshot.own("services"):
        yield from _of_service(snapshot, service)
    for ingress in snapshot.own("ingresses"):
        yield from _of_ingress(snapshot, ingress)
    for route in snapshot.own("httproutes"):
        yield from _of_route(snapshot, route)


def _of_service(snapshot: ClusterSnapshot, service: Object) -> Iterator[Finding]:
    selector = service["spec"].get("selector") or {}
    chosen = [pod for pod in snapshot.all("pods") if selector.items() <= labels(pod).items()]
    where = f"service/{name(service)}"
    if not chosen and _sleeps(snapshot, selector):
        why = "its pool is scaled to zero: requests wait for the worker that they start"
        look = snapshot.kubectl(f"get statefulsets -l {_joined(selector)}")
        yield Finding(where, "without pods", why, (look,), harmless=True)
    elif not any(is_ready(pod) for pod in chosen):
        why = "no pod has the labels that it selects: scaled to zero, or its labels were changed"
        if chosen:
            why = f"none of its {len(chosen)} pods is ready"
        yield Finding(where, "unreachable", why, (snapshot.kubectl(f"get pods -l {_joined(selector)}"),))
    if service["spec"].get("type") == "LoadBalancer" and not _has_address(service):
        why = "its load balancer has no address: nothing in this cluster gives any, or it has not done so yet"
        do = (
            snapshot.kubectl(f"describe service {name(service)}"),
            snapshot.upgrade("--set gateway.service.type=ClusterIP"),
        )
        yield Finding(where, "unreachable", why, do)


def _sleeps(snapshot: ClusterSnapshot, selector: dict[str, str]) -> bool:
    """Whether a Service is a pool's, whose workers are scaled to zero."""
    sets = [each for each in snapshot.own("statefulsets", "worker") if selector.items() <= labels(each).items()]
    return bool(sets) and not any(each["spec"].get("replicas", 1) for each in sets)


def _of_ingress(snapshot: ClusterSnapshot, ingress: Object) -> Iterator[Finding]:
    where = f"ingress/{name(ingress)}"
    if why := snapshot.missing_class("IngressClass", ingress["spec"].get("ingressClassName")):
        yield Finding(where, "unreachable", why, (snapshot.upgrade("--set ingress.className=CLASS"),))
        return
    if _has_address(ingress):
        return
    do = ("kubectl get pods -A | grep -i ingress", snapshot.kubectl(f"describe ingress {name(ingress)}"))
    if served := [other for other in snapshot.all("ingresses anywhere") if _of_one_class(ingress, other)]:
        why = f"its controller has given it no address, but one to {name(served[0])}: does it know this Ingress?"
        yield Finding(where, "unreachable", why, do)
    else:
        why = "its controller gives none, as behind a NodePort or hostPort; it is well if clients get answers there"
        yield Finding(where, "without an address", why, do, harmless=True)


def _has_address(service: Object) -> bool:
    return bool((service.get("status", {}).get("loadBalancer") or {}).get("ingress"))


def _of_one_class(ingress: Object, other: Object) -> bool:
    """Whether another Ingress of the class has an address, so that its controller does give some."""
    return other["spec"].get("ingressClassName") == ingress["spec"].get("ingressClassName") and _has_address(other)


def _of_route(snapshot: ClusterSnapshot, route: Object) -> Iterator[Finding]:
    parents = route.get("status", {}).get("parents") or ()
    if not parents:
        why = "no Gateway has taken it: is there one of that name, and a controller of its class?"
        yield Finding(f"httproute/{name(route)}", "unreachable", why, ("kubectl get gateways -A",))
    for parent in parents:
        for condition in parent.get("conditions") or ():
            if condition["type"] in ("Accepted", "ResolvedRefs") and condition["status"] == "False":
                message = condition.get("message") or condition.get("reason")
                why = f"{parent['parentRef']['name']} does not accept it: {message}"
                yield Finding(
                    f"httproute/{name(route)}",
                    "unreachable",
                    why,
                    (snapshot.kubectl(f"describe httproute {name(route)}"),),
                )


def _joined(selector: dict[str, str]) -> str:
    return ",".join(f"{key}={value}" for key, value in sorted(selector.items()))
