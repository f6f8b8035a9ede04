"""Settings of authentication: keys, bearer tokens, and the administration of keys."""

from __future__ import annotations

from pathlib import Path
from typing import Self

from pydantic import Field, field_validator, model_validator

from services.common.settings import PREFIX, ServiceSettings


class AccessSettings(ServiceSettings):
    """Settings of keys, bearer tokens and administration."""

    tenancy: bool = Field(default=False, description="Require API keys and apply their limits")
    api_keys_file: str = Field(default="", description="JSON file of tenants by hashed key")
    api_keys: str = Field(default="", repr=False, description="The same JSON, inline")
    admin_port: int = Field(
        default=0, ge=0, le=65535, description="Port of the administration of keys (`ryzanstein keys`); 0 is off"
    )
    admin_host: str = Field(
        default="127.0.0.1",
        description="Address that the administration's port listens on; a pod's loopback is reached by "
        "`kubectl port-forward`",
    )
    admin_token: str = Field(
        default="", repr=False, description="Bearer token that may administrate, besides administrators' keys"
    )
    admin_token_file: str = Field(default="", description="File with the token instead; read at start")
    jwt_issuer: str = Field(
        default="", description="URL of an OpenID Connect issuer whose bearer tokens are accepted; empty: none are"
    )
    jwt_audience: str = Field(default="", description="Audience that tokens must name in `aud`; needed with an issuer")
    jwt_jwks_url: str = Field(
        default="", description="URL of the issuer's keys; default: the one in its discovery document"
    )
    jwt_tenant_claim: str = Field(default="sub", description="Claim that names the tenant")
    jwt_limits: str = Field(
        default="{}", description="Limits of each tenant that comes by a token, as JSON: the fields of a key"
    )

    @field_validator("jwt_issuer", "jwt_jwks_url")
    @classmethod
    def _url_of_issuer(cls, url: str) -> str:
        if url and not url.startswith(("https://", "http://127.0.0.1", "http://localhost")):
            raise ValueError("must start with https:// (http:// on this machine only)")
        return url

    @model_validator(mode="after")
    def _complete(self) -> Self:
        if self.admin_token and self.admin_token_file:
            raise ValueError(f"{PREFIX}ADMIN_TOKEN and {PREFIX}ADMIN_TOKEN_FILE: set one of them")
        if self.jwt_issuer and not self.jwt_audience:
            raise ValueError(f"{PREFIX}JWT_ISSUER needs {PREFIX}JWT_AUDIENCE: tokens for other services are no keys")
        if self.jwt_issuer and not self.tenancy:
            raise ValueError(f"{PREFIX}JWT_ISSUER needs {PREFIX}TENANCY=true: without it no request needs a token")
        return self

    def read_admin_token(self) -> str:
        """The administrator's token; empty: none. Raises OSError for a file that cannot be read."""
        return Path(self.admin_token_file).read_text().strip() if self.admin_token_file else self.admin_token
