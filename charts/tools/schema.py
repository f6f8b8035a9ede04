"""The JSON Schema (draft 7) of values.yaml: strict for our own maps, open for Kubernetes'.

`@schema` may say, besides JSON Schema: `pod: true` (the keys of podDefaults belong here as well), `settings: SERVICE`
(the fields of that service's settings class) and `pools: true` (a map of what workers.defaults has).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import msgspec

from charts.tools.values import Value
from services.common.settings import ServiceSettings
from services.finetuner.settings import FinetunerSettings
from services.gateway.names.route import ModelRoute
from services.gateway.settings import GatewaySettings
from services.router.settings import RouterSettings
from services.worker.pool.settings import OF_A_MODEL
from services.worker.settings import WorkerSettings

Schema = dict[str, Any]

SETTINGS: dict[str, type[ServiceSettings]] = {
    "gateway": GatewaySettings,
    "router": RouterSettings,
    "worker": WorkerSettings,
    "finetuner": FinetunerSettings,
}
# Fields that the chart keeps to itself, or that have a value of another name or at another place.
_ELSEWHERE = {
    *ServiceSettings.model_fields,
    *("gateway_port", "grpc_port", "router_addresses", "api_keys_file", "api_keys", "routes_file"),
    *("router_port", "router_id", "coordinator_address"),
    *("expected_models", "expected_models_config_map", "service_account_folder"),
    *(
        "worker_id",
        "worker_port",
        "revision",
        "served_model_name",
        "node_service",
        "idle_sleep_s",
        "pinned",
        "priority",
        "host_cache_gib",
        "disk_cache_gib",
    ),
    *("finetuner_models", "finetuner_folder", "finetuner_job_template", "finetuner_quantizations"),
}
_TYPES = {bool: "boolean", int: "integer", float: "number", str: "string", list: "array", dict: "object"}
_PYTHONS = ("discriminator", "default", "title")  # keys that help only Python
_ENV: Schema = {
    "type": "object",
    "additionalProperties": {"type": ["string", "number", "boolean", "object", "null"]},
}
_PDB: Schema = {
    "type": "object",
    "additionalProperties": False,
    "properties": {
        "maxUnavailable": {"type": ["integer", "string"]},
        "unhealthyPodEvictionPolicy": {"enum": ["IfHealthyBudget", "AlwaysAllow"]},
    },
}


def build(root: Value) -> Schema:
    """The schema of the whole file."""
    pod = root.child("podDefaults").children
    builder = _Builder({child.key: {"$ref": f"#/definitions/pod-{child.key}"} for child in pod})
    return {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "title": "Values of the chart ryzanstein",
        **builder.of_map(root),
        "definitions": {
            **_routes(),
            "env": _ENV,
            "pdb": _PDB,
            "poolModel": _pool_model(),
            "pool": {
                **builder.of(root.child("workers", "defaults")),
                "description": "As workers.defaults; null removes it.",
                "type": ["object", "null"],
            },
            **{f"pod-{child.key}": builder.of(child) for child in pod},
        },
    }


def _pool_model() -> Schema:
    """One of several models of a pool."""
    settings = _settings("worker")
    own = {key: settings[key] for key in map(_camel, OF_A_MODEL) if key in settings and key != "model"}
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["model"],
        "properties": {
            "model": {"type": "string", "description": "As workers.defaults.model."},
            "servedName": {"type": "string", "description": "As workers.defaults.servedName."},
            "pin": {"type": "boolean", "description": "The worker never sleeps."},
            "priority": {
                **_plain(WorkerSettings.model_json_schema()["properties"]["priority"]),
                "description": "As workers.defaults.priority.",
            },
            "settings": {"type": "object", "additionalProperties": False, "properties": own},
        },
    }


def _routes() -> dict[str, Schema]:
    """Definitions of a route and its parts, which refuse unknown fields as the gateway does."""
    _, definitions = msgspec.json.schema_components([ModelRoute], ref_template="#/definitions/{name}")
    return {name: {**definition, "additionalProperties": False} for name, definition in definitions.items()}


@dataclass(frozen=True)
class _Builder:
    pod: dict[str, Schema]  # references to the keys of podDefaults

    def of(self, value: Value) -> Schema:
        """The schema of a key."""
        schema = self._typed(value)
        return {"description": value.description, **schema} if value.description else schema

    def of_map(self, value: Value) -> Schema:
        """The strict schema of a map of ours."""
        properties = {child.key: self.of(child) for child in value.children}
        if settings := properties.get("settings"):  # without those that have a value of their own next to it
            settings["properties"] = {key: of for key, of in settings["properties"].items() if key not in properties}
        shared = self.pod if value.schema.get("pod") else {}
        return {"type": "object", "additionalProperties": False, "properties": {**shared, **properties}}

    def _typed(self, value: Value) -> Schema:
        added = {key: extra for key, extra in value.schema.items() if key not in ("pod", "settings", "pools")}
        if service := value.schema.get("settings"):
            return {"type": "object", "additionalProperties": False, "properties": _settings(service)}
        if value.schema.get("pools"):  # names are checked by _validate.tpl, whose error is clear
            return {"type": "object", "additionalProperties": {"$ref": "#/definitions/pool"}}
        if "$ref" in added:
            return {"allOf": [added]}  # draft 7 ignores the siblings of a $ref
        if value.ours:
            return {**self.of_map(value), **added}
        return added if "enum" in added else {"type": _TYPES[type(value.default)], **added}


def _settings(service: str) -> Schema:
    """The fields of a settings class by the names that values have: max_body_bytes is maxBodyBytes."""
    schema = SETTINGS[service].model_json_schema()
    models = schema.get("$defs", {})
    return {
        _camel(name): _plain(_inlined(field, models))
        for name, field in schema["properties"].items()
        if name not in _ELSEWHERE
    }


def _inlined(schema: Any, models: Schema) -> Any:
    """With the models that it refers to in their place; no model refers to itself."""
    if isinstance(schema, list):
        return [_inlined(each, models) for each in schema]
    if not isinstance(schema, dict):
        return schema
    if "$ref" in schema:
        return _inlined(models[schema["$ref"].rpartition("/")[2]], models)
    return {key: _inlined(value, models) for key, value in schema.items() if key not in _PYTHONS}


def _camel(name: str) -> str:
    first, *rest = name.split("_")
    return first + "".join(part.capitalize() for part in rest)


def _plain(field: Schema) -> Schema:
    """Without what helps only Python."""
    return {key: value for key, value in field.items() if key not in ("title", "default")}
