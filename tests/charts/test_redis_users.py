"""`redis.auth.users: components`: every service is its own user of Redis, with a password that no other one has."""

from __future__ import annotations

import pytest

from tests.charts.rendering import Rendered, RenderError, environment, render
from tests.redis_users import COMPONENTS, rules

COMPONENT_USERS = "redis: {auth: {users: components}}"


def password_of(rendered: Rendered, component: str) -> tuple[str, str]:
    """The secret and the key of the password that a service reads."""
    (pod,) = rendered.pods_of(component)
    file = environment(pod.containers[0])["RYZANSTEIN_REDIS_PASSWORD_FILE"]
    (mount,) = [each for each in pod.containers[0]["volumeMounts"] if each["mountPath"] == file.rpartition("/")[0]]
    (volume,) = [each for each in pod.spec["volumes"] if each["name"] == mount["name"]]
    (item,) = volume["secret"]["items"]
    assert item["path"] == file.rpartition("/")[2]
    return volume["secret"]["secretName"], item["key"]


def test_each_service_is_a_user_of_its_own() -> None:
    rendered = render(inline=COMPONENT_USERS)
    (config,) = [each for each in rendered.of("ConfigMap") if "start.sh" in each["data"]]
    for component in COMPONENTS:
        (pod,) = rendered.pods_of(component)
        variables = environment(pod.containers[0])
        assert variables["RYZANSTEIN_REDIS_USERNAME"] == component
        secret, key = password_of(rendered, component)
        assert key == component
        wanted = " ".join(rules(component, variables["RYZANSTEIN_NAMESPACE"]))
        assert f"user {component} '{wanted}' /etc/ryzanstein/redis-users/*/{component}\n" in config["data"]["start.sh"]
    (redis,) = rendered.pods_of("redis")
    (users,) = [each for each in redis.spec["volumes"] if each["name"] == "users"]
    assert users["secret"]["secretName"] == secret
    (job,) = [pod for pod in rendered.pods_of("secrets") if pod.owner["kind"] == "Job"]
    (maker,) = [each for each in job.containers if each["name"] == "users"]
    assert f"--name={secret}" in maker["args"]
    assert {f"--key={component}" for component in COMPONENTS} <= set(maker["args"])
    (role,) = [each for each in rendered.of("Role") if each["metadata"]["name"].endswith("-secrets")]
    assert secret in [name for rule in role["rules"] if rule["verbs"] == ["get"] for name in rule["resourceNames"]]


def test_passwords_of_yours() -> None:
    external = "{mode: external, external: {url: 'redis://of.yours:6379/0'}, auth: {users: components, %s}}"
    rendered = render(inline=f"redis: {external % 'existingSecret: {name: own}'}")
    assert [password_of(rendered, component) for component in COMPONENTS] == [("own", name) for name in COMPONENTS]


@pytest.mark.parametrize(
    ("auth", "said"),
    [
        ("{enabled: false, users: components}", "redis.auth.users: components need redis.auth.enabled"),
        ("{users: components, username: me}", "redis.auth.username: has no effect with redis.auth.users components"),
    ],
)
def test_what_makes_no_sense_is_refused(auth: str, said: str) -> None:
    with pytest.raises(RenderError, match=said):
        render(inline=f"redis: {{auth: {auth}}}")
