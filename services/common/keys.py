"""Names of all keys in Redis.

Redis owns files, batches and fine-tuning jobs; everything else there is a lease or can be lost.
"""

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
        """Number that grows whenever a lease is new, changed, renewed after its end, or given up."""
        return f"rz:{self.namespace}:leases-version"

    @property
    def worker_events(self) -> str:
        """Channel that gets a worker's id whenever its lease is new, changed or given up."""
        return f"rz:{self.namespace}:worker-events"

    @property
    def gateways(self) -> str:
        """Sorted set: gateway id -> time of its last beat, seconds since the epoch by Redis's clock."""
        return f"rz:{self.namespace}:gateways"

    def session(self, tenant: str, session: str) -> str:
        """Binding of a session to a worker. Redis gets a digest of the session's name only."""
        digest = sha256(session.encode()).hexdigest()[:32]
        return f"rz:{self.namespace}:sess:{tenant or '-'}:{digest}"

    def quota(self, tenant: str, month: str) -> str:
        """Tokens a tenant has used in `month` (yyyymm)."""
        return f"rz:{self.namespace}:quota:{tenant}:{month}"

    def response(self, digest: str) -> str:
        """A cached response of a deterministic request."""
        return f"rz:{self.namespace}:resp:{digest}"

    def kept_response(self, tenant: str, response_id: str) -> str:
        """A stored response that clients can refer to; with an empty id, the prefix of all of a tenant's."""
        return f"rz:{self.namespace}:kept:{tenant or '-'}:{response_id}"

    def kept_index(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's stored responses -> time of last use, milliseconds of Redis's clock."""
        return f"rz:{self.namespace}:kept-index:{tenant or '-'}"

    def kept_sizes(self, tenant: str) -> str:
        """Hash: ids of a tenant's stored responses -> bytes; `total` -> their sum."""
        return f"rz:{self.namespace}:kept-sizes:{tenant or '-'}"

    @property
    def adapters(self) -> str:
        """Hash: name of each adapter that was loaded while the installation ran -> its description as JSON."""
        return f"rz:{self.namespace}:adapters"

    def api_key(self, digest: str) -> str:
        """Hash of an API key -> its tenant as JSON."""
        return f"rz:{self.namespace}:key:{digest}"

    @property
    def issued_keys(self) -> str:
        """Hash: id of an issued API key -> its record as JSON."""
        return f"rz:{self.namespace}:issued-keys"

    def rate_limit_prefix(self) -> str:
        """Prefix of the rate-limit windows."""
        return f"rz:{self.namespace}:rl"

    @staticmethod
    def member(tenant: str, object_id: str) -> str:
        """The name of a file or a batch in sets that span tenants."""
        return f"{tenant or '-'}:{object_id}"

    @staticmethod
    def parts(member: str) -> tuple[str, str]:
        """Split a member into the tenant, as in keys, and the id."""
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
        """Sorted set: member -> when the file expires, by Redis's clock."""
        return f"rz:{self.namespace}:file-ends"

    def batches(self, tenant: str) -> str:
        """Sorted set: a tenant's batches -> when they were created."""
        return f"rz:{self.namespace}:batches:{tenant or '-'}"

    def batch(self, member: str) -> str:
        """Hash: one batch."""
        return f"rz:{self.namespace}:batch:{member}"

    def batch_done(self, member: str) -> str:
        """Bitmap: the lines of an open batch whose results are written."""
        return f"rz:{self.namespace}:batch-done:{member}"

    @property
    def batch_queue(self) -> str:
        """Sorted set: member of each open batch -> when any gateway may take it over, by Redis's clock."""
        return f"rz:{self.namespace}:batch-queue"

    @property
    def batch_owners(self) -> str:
        """Hash: member -> the gateway that works on it."""
        return f"rz:{self.namespace}:batch-owners"

    def tuning_jobs(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's fine-tuning jobs -> when they were created."""
        return f"rz:{self.namespace}:tuning-jobs:{tenant or '-'}"

    def tuning_job(self, member: str) -> str:
        """Hash: one fine-tuning job."""
        return f"rz:{self.namespace}:tuning-job:{member}"

    def tuning_events(self, member: str) -> str:
        """List: a fine-tuning job's events as JSON."""
        return f"rz:{self.namespace}:tuning-events:{member}"

    def tuning_checkpoints(self, member: str) -> str:
        """List: a fine-tuning job's checkpoints as JSON."""
        return f"rz:{self.namespace}:tuning-checkpoints:{member}"

    @property
    def tuning_queue(self) -> str:
        """Sorted set: member of each open fine-tuning job -> when anyone may take it over, by Redis's clock."""
        return f"rz:{self.namespace}:tuning-queue"

    @property
    def tuning_owners(self) -> str:
        """Hash: member -> the gateway or fine-tuner that works on it."""
        return f"rz:{self.namespace}:tuning-owners"

    @property
    def tuners(self) -> str:
        """Hash: fine-tuner -> what it can train, as JSON."""
        return f"rz:{self.namespace}:tuning-tuners"
