"""Names of everything kept in Redis: leases and hints, and nothing else's truth but that of files and batches."""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class RedisKeys:
    """Keys of one installation, all under ``rz:{namespace}:``."""

    namespace: str

    @property
    def workers(self) -> str:
        """Sorted set: worker id -> time of its last beat, seconds since the epoch by Redis's clock."""
        return f"rz:{self.namespace}:workers"

    @property
    def leases(self) -> str:
        """Hash: worker id -> its lease as JSON."""
        return f"rz:{self.namespace}:leases"

    @property
    def leases_version(self) -> str:
        """Grows whenever a lease is new, changed, back after it had ended, or given up."""
        return f"rz:{self.namespace}:leases-version"

    @property
    def worker_events(self) -> str:
        """Channel told a worker's id whenever its lease is new, changed or given up."""
        return f"rz:{self.namespace}:worker-events"

    @property
    def gateways(self) -> str:
        """Sorted set: gateway id -> time of its last beat, seconds since the epoch by Redis's clock."""
        return f"rz:{self.namespace}:gateways"

    def session(self, tenant: str, session: str) -> str:
        """Which worker holds a session. The session's own name is not stored."""
        digest = sha256(session.encode()).hexdigest()[:32]
        return f"rz:{self.namespace}:sess:{tenant or '-'}:{digest}"

    def quota(self, tenant: str, month: str) -> str:
        """Tokens a tenant has used in `month` (yyyymm)."""
        return f"rz:{self.namespace}:quota:{tenant}:{month}"

    def response(self, digest: str) -> str:
        """A cached response of a deterministic request."""
        return f"rz:{self.namespace}:resp:{digest}"

    def kept_response(self, tenant: str, response_id: str) -> str:
        """A response that a client may come back to; with an empty id the prefix of a tenant's."""
        return f"rz:{self.namespace}:kept:{tenant or '-'}:{response_id}"

    def kept_index(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's kept responses -> when they were last used, milliseconds by Redis's clock."""
        return f"rz:{self.namespace}:kept-index:{tenant or '-'}"

    def kept_sizes(self, tenant: str) -> str:
        """Hash: ids of a tenant's kept responses -> bytes, and under `total` their sum."""
        return f"rz:{self.namespace}:kept-sizes:{tenant or '-'}"

    def api_key(self, digest: str) -> str:
        """Hash of an API key -> its tenant as JSON."""
        return f"rz:{self.namespace}:key:{digest}"

    def rate_limit_prefix(self) -> str:
        """Prefix of the rate-limit windows."""
        return f"rz:{self.namespace}:rl"

    @staticmethod
    def member(tenant: str, object_id: str) -> str:
        """How sets of all tenants name a file or a batch."""
        return f"{tenant or '-'}:{object_id}"

    @staticmethod
    def parts(member: str) -> tuple[str, str]:
        """The tenant as in keys, and the id."""
        tenant, _, object_id = member.rpartition(":")
        return tenant, object_id

    @staticmethod
    def usage_field(tenant: str) -> str:
        """The tenant's field in `file_usage`."""
        return f"tenant:{tenant or '-'}"

    def files(self, tenant: str) -> str:
        """Hash: a tenant's published files, id -> JSON."""
        return f"rz:{self.namespace}:files:{tenant or '-'}"

    def file_pieces(self, tenant: str, file_id: str) -> str:
        """List: a file's content."""
        return f"rz:{self.namespace}:file:{self.member(tenant, file_id)}"

    @property
    def file_sizes(self) -> str:
        """Hash: member -> bytes."""
        return f"rz:{self.namespace}:file-sizes"

    @property
    def file_usage(self) -> str:
        """Hash: `total` and each tenant's field -> bytes."""
        return f"rz:{self.namespace}:file-usage"

    @property
    def file_ends(self) -> str:
        """Sorted set: member -> when the file's life is over, by Redis's clock."""
        return f"rz:{self.namespace}:file-ends"

    def batches(self, tenant: str) -> str:
        """Sorted set: a tenant's batches -> when they were made."""
        return f"rz:{self.namespace}:batches:{tenant or '-'}"

    def batch(self, member: str) -> str:
        """Hash: one batch."""
        return f"rz:{self.namespace}:batch:{member}"

    def batch_done(self, member: str) -> str:
        """Bits: the lines of an open batch that have been written."""
        return f"rz:{self.namespace}:batch-done:{member}"

    @property
    def batch_queue(self) -> str:
        """Sorted set: member of each open batch -> from when on anybody may work on it, by Redis's clock."""
        return f"rz:{self.namespace}:batch-queue"

    @property
    def batch_owners(self) -> str:
        """Hash: member -> who works on it."""
        return f"rz:{self.namespace}:batch-owners"
