"""`redis.auth.users: components`: every service is its own user of Redis, with a password that no other one has."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import ConstantBackoff
from redis.retry import Retry

from services.common.ports import free_port
from tests.charts.rendering import Rendered, RenderError, environment, render
from tests.redis_users import COMPONENTS, SERVER, rules

PASSWORDS = ("current", "previous")
PATIENCE = Retry(ConstantBackoff(0.1), 300)  # while it starts
COMPONENT_USERS = "{redis: {auth: {users: components}}, finetuner: {enabled: true}}"
PLAIN = "{tls: {mode: 'off'}, redis: {auth: {users: components}}, finetuner: {enabled: true}}"


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


def test_redis_starts_with_these_users(tmp_path: Path) -> None:
    """The script and the configuration as they are, but for the folders of a pod."""
    (config,) = [each for each in render(inline=PLAIN).of("ConfigMap") if "start.sh" in each["data"]]
    for name in ("redis/current/password", *(f"redis-users/{when}/{who}" for when in PASSWORDS for who in COMPONENTS)):
        file = tmp_path / "etc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{file.name} {file.parent.name}\n")
    port = free_port()
    places = {"/etc/ryzanstein": tmp_path / "etc", "/etc/redis/": f"{tmp_path}/", "/tmp/users": tmp_path / "users"}
    for name in ("redis.conf", "start.sh"):
        text = config["data"][name].replace("6379", str(port)).replace("dir /data", f"dir {tmp_path}")
        for place, instead in places.items():
            text = text.replace(place, str(instead))
        (tmp_path / name).write_text(text)
    environment = {"PATH": f"{Path(str(SERVER)).parent}:{os.environ['PATH']}"}
    with subprocess.Popen(["sh", tmp_path / "start.sh"], stdout=subprocess.DEVNULL, env=environment) as redis:
        try:
            for who in COMPONENTS:
                for when in PASSWORDS:
                    with Redis(port=port, username=who, password=f"{who} {when}", retry=PATIENCE) as client:
                        assert client.ping()
        finally:
            redis.kill()


def test_passwords_of_yours() -> None:
    external = "{mode: external, external: {url: 'redis://of.yours:6379/0'}, auth: {users: components, %s}}"
    values = f"{{redis: {external % 'existingSecret: {name: own}'}, finetuner: {{enabled: true}}}}"
    rendered = render(inline=values)
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
