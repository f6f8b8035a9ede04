"""Names of all keys in Redis.

Redis owns files, batches, fine-tuning jobs and live routes; everything else there is a lease or can be lost.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import sha256


@dataclass(frozen=True, slots=True)
class JobKeys:
    """Keys of one kind of job; a job's member names its tenant and its id."""

    indexes: str  # prefix of the tenants' indexes
    jobs: str  # prefix of the jobs
    queue: str  # sorted set: member of each open job -> when any owner may take it over, by Redis's clock
    owners: str  # hash: member -> the process that works on it

    def index(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's jobs -> when they were created."""
        return f"{self.indexes}{tenant or '-'}"

    def job(self, member: str) -> str:
        """Hash: one job."""
        return self.jobs + member


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

    def spent(self, tenant: str, month: str) -> str:
        """Cost of a tenant's requests in `month` (yyyymm), in billionths of the currency."""
        return f"rz:{self.namespace}:spent:{tenant}:{month}"

    def usage(self, width: str, start: int) -> str:
        """Hash: what requests used in the bucket of time that begins at `start`: account and counter -> sum."""
        return f"rz:{self.namespace}:usage:{width}:{start}"

    def usage_writer(self, writer: str) -> str:
        """Number of the last batch of counts that a gateway has written, or of the only one of a fine-tuning job."""
        return f"rz:{self.namespace}:usage-writer:{writer}"

    def response(self, digest: str) -> str:
        """A cached response of a deterministic request."""
        return f"rz:{self.namespace}:resp:{digest}"

    def kept_response(self, tenant: str, response_id: str) -> str:
        """A stored response or conversation; with an empty id, the prefix of all of a tenant's."""
        return f"rz:{self.namespace}:kept:{tenant or '-'}:{response_id}"

    def kept_index(self, tenant: str) -> str:
        """Sorted set: ids of a tenant's stored responses and conversations -> last use, ms of Redis's clock."""
        return f"rz:{self.namespace}:kept-index:{tenant or '-'}"

    def kept_sizes(self, tenant: str) -> str:
        """Hash: ids of a tenant's stored responses and conversations -> bytes; `total` -> their sum."""
        return f"rz:{self.namespace}:kept-sizes:{tenant or '-'}"

    @property
    def background_jobs(self) -> JobKeys:
        """Keys of responses that are made in the background."""
        rz = f"rz:{self.namespace}"
        return JobKeys(f"{rz}:kept-jobs:", f"{rz}:kept-job:", f"{rz}:kept-queue", f"{rz}:kept-owners")

    @property
    def adapters(self) -> str:
        """Hash: name of each adapter that was loaded while the installation ran -> its description as JSON."""
        return f"rz:{self.namespace}:adapters"

    @property
    def cards(self) -> str:
        """Hash: model -> its card, compressed. It outlives the model's workers."""
        return f"rz:{self.namespace}:cards"

    @property
    def card_digests(self) -> str:
        """Hash: model -> digest of its card."""
        return f"rz:{self.namespace}:card-digests"

    @property
    def card_times(self) -> str:
        """Sorted set: model -> when its card was written."""
        return f"rz:{self.namespace}:card-times"

    def start_durations(self, model: str) -> str:
        """JSON: by stage, the seconds from it to serving of a model's last starts."""
        return f"rz:{self.namespace}:starts:{model}"

    def download(self, model: str) -> str:
        """JSON: bytes of a model's download that are there, and of all. It expires seconds after the last report."""
        return f"rz:{self.namespace}:download:{model}"

    def api_key(self, digest: str) -> str:
        """Hash of an API key -> its tenant as JSON."""
        return f"rz:{self.namespace}:key:{digest}"

    @property
    def issued_keys(self) -> str:
        """Hash: id of an issued API key -> its record as JSON."""
        return f"rz:{self.namespace}:issued-keys"

    @property
    def routes(self) -> str:
        """Hash: name of each live route -> the route with its version as JSON."""
        return f"rz:{self.namespace}:routes"

    @property
    def routes_version(self) -> str:
        """Number of changes of live routes."""
        return f"rz:{self.namespace}:routes-version"

    @property
    def route_changes(self) -> str:
        """List: the last changes of live routes as JSON, the newest first."""
        return f"rz:{self.namespace}:routes-changes"

    @property
    def canaries(self) -> str:
        """Hash: name of a route -> its last canary as JSON."""
        return f"rz:{self.namespace}:routes-canaries"

    @property
    def canary_lock(self) -> str:
        """The gateway that judges canaries now."""
        return f"rz:{self.namespace}:routes-canary-lock"

    def canary_tally(self, version: int) -> str:
        """Hash: sums over compared sequences, since the version of the route."""
        return f"rz:{self.namespace}:routes-canary-tally:{version}"

    @property
    def request_log(self) -> str:
        """Stream: lengths, arrivals and hashes of requests that were answered, from which capacity is planned."""
        return f"rz:{self.namespace}:request-log"

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

    @property
    def batch_jobs(self) -> JobKeys:
        """Keys of batches."""
        rz = f"rz:{self.namespace}"
        return JobKeys(f"{rz}:batches:", f"{rz}:batch:", f"{rz}:batch-queue", f"{rz}:batch-owners")

    def batch_done(self, member: str) -> str:
        """Bitmap: the lines of an open batch whose results are written."""
        return f"rz:{self.namespace}:batch-done:{member}"

    @property
    def tuning_jobs(self) -> JobKeys:
        """Keys of fine-tuning jobs."""
        rz = f"rz:{self.namespace}"
        return JobKeys(f"{rz}:tuning-jobs:", f"{rz}:tuning-job:", f"{rz}:tuning-queue", f"{rz}:tuning-owners")

    def tuning_events(self, member: str) -> str:
        """List: a fine-tuning job's events as JSON."""
        return f"rz:{self.namespace}:tuning-events:{member}"

    def tuning_checkpoints(self, member: str) -> str:
        """List: a fine-tuning job's checkpoints as JSON."""
        return f"rz:{self.namespace}:tuning-checkpoints:{member}"

    @property
    def tuners(self) -> str:
        """Hash: fine-tuner -> what it can train, as JSON."""
        return f"rz:{self.namespace}:tuning-tuners"
