"""Every service gets its own certificate, from any issuer, and no other."""

from __future__ import annotations

import pytest

from tests.charts.rendering import NAMESPACE, RELEASE, Rendered, RenderError, environment, render

SERVICES = ("gateway", "router", "coordinator", "worker")
COMPONENTS = {*SERVICES, "admin", "redis"}
DOMAIN = f"{RELEASE}.{NAMESPACE}"
REDIS = f"{RELEASE}-redis.{NAMESPACE}.svc.cluster.local"


def mounted(rendered: Rendered) -> dict[str, str]:
    """The secrets in the folders that services read, by component."""
    actual = {}
    for pod in rendered.pods_of(*SERVICES, "redis"):
        (container,) = pod.containers
        folder = environment(container).get("RYZANSTEIN_TLS_FOLDER", "/etc/ryzanstein/tls")
        (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] == folder]
        (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
        actual[pod.component] = volume["secret"]["secretName"]
    return actual


def test_a_job_makes_certificates_and_may_change_no_other_secret() -> None:
    rendered = render()
    commands = []
    for pod in rendered.pods_of("secrets"):
        (maker,) = [container for container in pod.containers if container["name"] == "certificates"]
        commands.append((maker["command"], maker["args"]))
        assert pod.owner["kind"] in ("Job", "CronJob")
    assert len(commands) == 2
    assert commands[0] == commands[1]
    command, args = commands[0]
    assert command == ["ryzanstein", "kube", "ensure-certificates"]
    options = [arg.removeprefix("--").split("=", 1) for arg in args]
    assert {value for name, value in options if name == "component"} == COMPONENTS
    chosen = dict(options)
    assert (chosen["domain"], chosen["namespace"], chosen["host"]) == (DOMAIN, NAMESPACE, f"redis={REDIS}")
    assert mounted(rendered) == {component: f"{chosen['prefix']}-{component}" for component in COMPONENTS - {"admin"}}
    (role,) = [role for role in rendered.of("Role") if role["metadata"]["name"].endswith("-secrets")]
    (changes,) = [rule for rule in role["rules"] if "update" in rule["verbs"]]
    assert set(changes["resourceNames"]) == {f"{chosen['prefix']}-{name}" for name in COMPONENTS | {"ca"}}


KEDA_BY_ROUTERS = "workers: {defaults: {autoscaling: {mode: keda}}}"


@pytest.mark.parametrize("mode", ["generated", "certManager"])
def test_keda_has_a_certificate_that_routers_know_and_knows_theirs_by_their_address(mode: str) -> None:
    rendered = render(inline=f"{KEDA_BY_ROUTERS}\ntls: {{mode: {mode}}}")
    scaler, authentication = rendered.of("ScaledObject")[0], rendered.of("TriggerAuthentication")[0]
    (trigger,) = scaler["spec"]["triggers"]
    assert trigger["authenticationRef"] == {"name": authentication["metadata"]["name"]}
    parts = {each["parameter"]: (each["name"], each["key"]) for each in authentication["spec"]["secretTargetRef"]}
    secret = f"{mounted(rendered)['router'].removesuffix('router')}keda"
    keys = {"caCert": "ca.crt", "tlsClientCert": "tls.crt", "tlsClientKey": "tls.key"}
    assert parts == {parameter: (secret, key) for parameter, key in keys.items()}
    host = trigger["metadata"]["scalerAddress"].partition(":")[0]
    if mode == "certManager":
        specs = {each["spec"]["secretName"]: each["spec"] for each in rendered.of("Certificate")}
        assert specs[secret]["uris"] == [f"spiffe://{DOMAIN}/keda"]
        assert host in specs[mounted(rendered)["router"]]["dnsNames"]
    else:
        pod, _ = rendered.pods_of("secrets")
        (args,) = [container["args"] for container in pod.containers if container["name"] == "certificates"]
        assert {f"--host=router={host}", "--component=keda"} <= set(args)


@pytest.mark.parametrize("issuer", ["", "corporate"])
def test_cert_manager_issues_certificates(issuer: str) -> None:
    rendered = render(inline=f"tls: {{mode: certManager, certManager: {{issuerRef: {{name: '{issuer}'}}}}}}")
    secrets = mounted(rendered)
    certificates = {each["spec"]["secretName"]: each["spec"] for each in rendered.of("Certificate")}
    for component in secrets:
        spec = certificates[secrets[component]]
        assert spec["uris"] == [f"spiffe://{DOMAIN}/{component}"]
        assert spec["dnsNames"] == [f"{component}.{DOMAIN}", *([REDIS] if component == "redis" else [])]
        assert spec["issuerRef"]["name"] == (issuer or secrets["gateway"].removesuffix("gateway") + "ca")
    issuers = {each["metadata"]["name"] for each in rendered.of("Issuer")}
    assert (spec["issuerRef"]["name"] in issuers) is not bool(issuer)
    assert not [pod for pod in rendered.pods if "certificates" in [container["name"] for container in pod.containers]]


def test_secrets_of_yours() -> None:
    rendered = render(inline="tls: {mode: existing, secretPrefix: own, phase: use}")
    assert mounted(rendered) == {component: f"own-{component}" for component in COMPONENTS - {"admin"}}
    for pod in rendered.pods_of(*SERVICES):
        assert environment(pod.containers[0])["RYZANSTEIN_TLS_PHASE"] == "use"


def test_off_is_plain() -> None:
    """With the phase that charts before had as their default, which `--reuse-values` keeps."""
    for pod in render(inline="tls: {mode: 'off', phase: require}").pods:
        for container in pod.all_containers:
            assert not [name for name in environment(container) if name.startswith("RYZANSTEIN_TLS")]


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ("tls: {mode: existing}", "tls.secretPrefix: tls.mode existing needs your secrets' names"),
        ("tls: {mode: generated, secretPrefix: own}", "tls.secretPrefix: has no effect with tls.mode generated"),
        ("secrets: {generate: false}", "tls.mode: generated needs the Job"),
        ("tls: {mode: 'off', phase: offer}", "tls.phase: has no effect with tls.mode off"),
    ],
)
def test_senseless_values_are_rejected(values: str, message: str) -> None:
    with pytest.raises(RenderError, match=message):
        render(inline=values)


def test_the_gateway_serves_tls_to_clients_without_a_proxy() -> None:
    rendered = render(inline="gateway: {tls: {secretName: of-clients}, service: {port: 443}}")
    (pod,) = rendered.pods_of("gateway")
    (container,) = pod.containers
    variables = environment(container)
    folders = {variables[f"RYZANSTEIN_GATEWAY_TLS_{part}"].rpartition("/")[0] for part in ("CERTIFICATE", "KEY")}
    (mount,) = [mount for mount in container["volumeMounts"] if mount["mountPath"] in folders]
    (volume,) = [volume for volume in pod.spec["volumes"] if volume["name"] == mount["name"]]
    assert volume["secret"]["secretName"] == "of-clients"
    assert container["readinessProbe"]["httpGet"]["scheme"] == "HTTPS"
    services = {each["metadata"]["name"]: each["spec"]["ports"][0] for each in rendered.of("Service")}
    for name in (f"{RELEASE}-gateway", f"{RELEASE}-gateway-grpc"):
        assert services[name]["appProtocol"] == "https"
    (test,) = rendered.pods_of("test")
    assert environment(test.containers[0])["BASE_URL"].startswith("https://")
    for route in ("ingress: {enabled: true}", "httpRoute: {enabled: true, parents: {public: {}}}"):
        with pytest.raises(RenderError, match=r"gateway.tls.secretName: behind \w+ TLS ends there"):
            render(inline=f"{{gateway: {{tls: {{secretName: a}}}}, {route}}}")
