"""`--set KEY=VALUE` of `ryzanstein up`: the settings of services that have no option of their own."""

from __future__ import annotations

from collections.abc import Container, Iterable

from services.cli.errors import CommandError
from services.cli.options import option_parameters
from services.cli.stack.options import StackOptions, pair, variable
from services.finetuner.settings import FinetunerSettings
from services.gateway.settings import GatewaySettings
from services.kv_coordinator.settings import CoordinatorSettings
from services.router.settings import RouterSettings
from services.worker.settings import WorkerSettings

_SERVICES = (GatewaySettings, RouterSettings, CoordinatorSettings, WorkerSettings, FinetunerSettings)
_NOT_HERE = {
    "advertise_host",
    "metrics_port",
    "tls_folder",
    "tls_phase",
}  # one value cannot serve processes of one host


def read_settings(given: Iterable[str], own: Container[str]) -> dict[str, str]:
    """The environment of settings as KEY=VALUE; the services check the values. Raises :class:`CommandError`.

    `own`: the variables that the installation sets itself.
    """
    names = {name for settings in _SERVICES for name in settings.model_fields} - _NOT_HERE
    names -= {each.name for each in option_parameters(StackOptions)}
    known = sorted(name for name in names if variable(name) not in own)
    environment = {}
    for text in given:
        key, value = pair("--set", text, "max_running=16")
        if key not in known:
            raise CommandError(f"--set {key}: expected a setting without an option of its own: {', '.join(known)}")
        environment[variable(key)] = value
    return environment
