"""Users of Redis: every service is its own, with a password that no other one has, and may do its own work alone."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from redis import Redis
from redis.backoff import ConstantBackoff, NoBackoff
from redis.exceptions import AuthenticationError, RedisError
from redis.retry import Retry

from services.common.keys import RedisKeys
from services.common.ports import free_port
from tests.charts.redis_scripts import running
from tests.charts.rendering import NAMESPACE, RELEASE, Rendered, RenderError, environment, render
from tests.redis_users import COMPONENTS, REFUSED, refused, rules

PASSWORDS = ("current", "previous")
COMMON, GATEWAY = "redis/current/password", "redis-users/current/gateway"
GATEWAY_NOW = "gateway current"
PATIENCE = Retry(ConstantBackoff(0.1), 300)  # while it starts
NO_RETRY = Retry(NoBackoff(), 0)


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
    rendered = render(inline="finetuner: {enabled: true}")
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


@contextmanager
def redis_of_pods(folder: Path, values: str, *mounted: str) -> Iterator[int]:
    """The port of a Redis that has begun as the chart has it begin, with these files in the place of secrets.

    The password in `redis-users/current/gateway` is "gateway current".
    """
    for name in mounted:
        file = folder / "etc" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(f"{file.name} {file.parent.name}\n")
    port, rendered = free_port(), render(inline=f"{{tls: {{mode: 'off'}}, redis: {{auth: {{{values}}}}}}}")
    with running(rendered, folder, {"6379": port}):
        with Redis(port=port, password="password current", retry=PATIENCE) as admin:
            assert admin.ping()
        yield port


def accepted(port: int, user: str, password: str) -> bool:
    with Redis(port=port, username=user, password=password, retry=NO_RETRY) as client:
        try:
            return bool(client.ping())
        except AuthenticationError:
            return False


@pytest.fixture(scope="module")
def port(tmp_path_factory: pytest.TempPathFactory) -> Iterator[int]:
    secrets = (f"redis-users/{when}/{who}" for when in PASSWORDS for who in COMPONENTS)
    with redis_of_pods(tmp_path_factory.mktemp("redis"), "", COMMON, *secrets) as port:
        yield port


def test_both_generations_of_a_components_password_are_accepted(port: int) -> None:
    assert all(accepted(port, who, f"{who} {when}") for who in COMPONENTS for when in PASSWORDS)
    assert not any(accepted(port, who, f"{other} current") for who in COMPONENTS for other in {*COMPONENTS} - {who})


# By mounted file, in addition to the common password of now: the users whose passwords are accepted.
@pytest.mark.parametrize(
    ("values", "mounted", "users"),
    [
        pytest.param(
            "users: components", (GATEWAY,), {"default current", GATEWAY_NOW}, id="from one user to components"
        ),
        pytest.param("users: shared", (), {"default current"}, id="one user"),
        pytest.param("users: shared", (GATEWAY,), {"default current", GATEWAY_NOW}, id="from components to one user"),
        pytest.param(
            "users: components, generation: 2",
            (GATEWAY, "redis/previous/password"),
            {"default current", "default previous", GATEWAY_NOW},
            id="from one user to components and another generation",
        ),
        pytest.param(
            "users: components, generation: 2",
            (GATEWAY, "redis/previous/password", "redis-users/previous/gateway"),
            {"default current", GATEWAY_NOW, "gateway previous"},
            id="the generation after one with components",
        ),
    ],
)
def test_pods_of_the_last_revision_are_accepted_as_well(
    tmp_path: Path, values: str, mounted: tuple[str, ...], users: set[str]
) -> None:
    with redis_of_pods(tmp_path, values, COMMON, *mounted) as port:
        for who in ("default", "gateway"):
            for when in PASSWORDS:
                password = f"{'password' if who == 'default' else who} {when}"
                assert accepted(port, who, password) == (f"{who} {when}" in users), (who, when)


@pytest.mark.parametrize("component", COMPONENTS)
def test_commands_of_administration_and_of_other_components_are_refused(port: int, component: str) -> None:
    """Typed, and from a script, which a component may load."""
    commands = refused(component, RedisKeys(f"{NAMESPACE}-{RELEASE}"))
    assert len(commands) >= 50
    with Redis(port=port, username=component, password=f"{component} current") as client:
        script = client.script_load("return redis.call(unpack(ARGV))")
        for command in commands:
            with pytest.raises(RedisError, match=REFUSED):
                client.execute_command(*command)
            with pytest.raises(RedisError, match=f"{REFUSED}|from script"):
                client.evalsha(script, 0, *command)


def test_passwords_of_a_secret_of_yours_have_the_names_of_users() -> None:
    external = "{mode: external, external: {url: 'redis://of.yours:6379/0'}, auth: {existingSecret: {name: own}}}"
    rendered = render(inline=f"{{redis: {external}, finetuner: {{enabled: true}}}}")
    assert [password_of(rendered, component) for component in COMPONENTS] == [("own", name) for name in COMPONENTS]


def test_a_user_name_beside_those_of_components_is_rejected() -> None:
    with pytest.raises(RenderError, match="has no effect with"):
        render(inline="redis: {auth: {username: me}}")
