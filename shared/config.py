"""One settings class for every service; `settings_sources.py` reads them."""

from __future__ import annotations

import os
import re
import socket
import uuid
from pathlib import Path
from typing import Annotated, Literal, TypeGuard

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator

from opentinker.shared.login_settings import LOOPBACK_HOSTS, LoginSettings, from_json, split_commas
from opentinker.shared.notification_settings import NotificationSettings
from opentinker.shared.prices import PriceSettings
from opentinker.shared.security.egress import networks
from opentinker.shared.security.model_keys import MODEL_KEY_SERVICES, read_model_keys
from opentinker.shared.security.sandbox_settings import SandboxSettings
from opentinker.shared.security.secrets import AWS, password_in, read_access, read_password, read_secret
from opentinker.shared.tenant_limits import TenantLimits

_STORE = re.compile(r"(file://)?/[^\0]+|s3://[a-z0-9][a-z0-9.-]{1,61}[a-z0-9](/[\w!.*'()/-]*)?")
_ENDPOINT = re.compile(r"https?://[^/@\s?#]+/?")
ORIGIN = re.compile(r"https?://(\[[0-9a-f:]+\]|[a-z0-9.-]+)(:[0-9]{1,5})?")
"""Origin of a page, as browsers write it."""


class Settings(SandboxSettings, NotificationSettings, PriceSettings, LoginSettings, BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, use_attribute_docstrings=True)

    nats_url: str = "nats://127.0.0.1:4222"
    """`nats://HOST:PORT` of the NATS server."""
    redis_url: str = "redis://127.0.0.1:6379/0"
    """URL of a Redis-compatible server."""
    nats_replicas: Literal[1, 3, 5] = 1
    """Servers of a NATS cluster that keep each stream; with 3 one of them may be lost, with 5 two. Only the scheduler
    uses it."""
    nats_password_file: Path | None = None
    """A file with the password of this service's NATS user, which is called as the service unless nats_url says
    otherwise. `opentinker up` makes one per service. None: the server asks for none, or nats_url has it."""
    redis_password_file: Path | None = None
    """The same for Redis."""
    nats_websocket_url: Annotated[str, Field(pattern=r"^(wss?://[^/\s@]+:[0-9]+(/\S*)?)?$")] = ""
    """URL of nats-server's WebSocket listener, as browsers reach it: `ws://HOST:PORT`, `wss://HOST:PORT` behind TLS.
    Users who may read a job get credentials for its live streams there; empty: no live streams. For a listener on all
    addresses, `0.0.0.0`, the host name of the API request is substituted."""
    nats_issuer_file: Path | None = None
    """A file with the seed of the nkey that signs those credentials for nats-server, whose configuration has the public
    half: `opentinker up` and `opentinker access` make both. Goes with nats_websocket_url."""
    stream_credential_s: Annotated[float, Field(ge=1, le=86400)] = 900.0
    """How long such a credential for live streams is valid; connections that were opened with it end with it."""
    nats_websocket_origins: list[str] = []
    """Pages that may use that listener, `https://HOST[:PORT]`, in addition to those of the API itself; in an
    environment variable, with commas. `opentinker up` configures nats-server with it."""
    data_dir: Path = Path("data")
    """Job directories and checkpoints; the same path on every machine of a deployment."""
    artifacts_url: str = ""
    """Where what jobs leave behind is kept, by tenant: a directory (`/mnt/artifacts`), or `s3://BUCKET/PREFIX` of an
    S3-compatible object store. Default: data_dir/artifacts, which shares its bytes with data_dir/jobs. See
    docs/artifacts.md."""
    artifacts_s3_endpoint: str = ""
    """URL of the object store, `https://...`; default: Amazon's for the region."""
    artifacts_s3_region: str = "us-east-1"
    """As the object store names it."""
    artifacts_s3_credentials_file: Path | None = None
    """A file of two lines: access key id, secret access key. Default: AWS_ACCESS_KEY_ID and AWS_SECRET_ACCESS_KEY of
    the scheduler's environment."""
    worker_id: str = ""
    """Name of this process's slot, which outlives it: a process that starts under the name replaces the previous one,
    so no two may have it at a time. Default: service, host and a random part, a slot for this process alone."""
    http_host: str = "127.0.0.1"
    """Address on which the scheduler's API listens."""
    http_port: Annotated[int, Field(ge=0, le=65535)] = 8080
    """Port of the scheduler's API."""
    http_origins: list[str] = []
    """Pages of other sites, `https://HOST[:PORT]`, that may ask the API, with a key that somebody gives them; in an
    environment variable, with commas. `opentinker up` and `opentinker access` let them use NATS' listener too."""
    auth: bool = True
    """Whether the API requires keys. Without keys every client is an operator: http_host must be a loopback address,
    and requests from pages of other sites are refused."""
    admin_key_file: Path | None = None
    """A file with an operator's key, which the scheduler registers when it starts; `opentinker keys init FILE` writes
    one. Needed until an operator has a key. `opentinker up` keeps one in its data_dir."""
    key_env: Annotated[str, Field(pattern="^[a-z0-9]{1,16}$")] = "local"
    """Name of this deployment in its keys, ot_local_...: keys of others are refused without looking them up."""
    http_rate: Annotated[float, Field(gt=0)] = 500.0
    """Requests a second per key, or per address without a key, with bursts of twice as many. Further requests are
    answered with 429."""
    http_connections: Annotated[int, Field(gt=0)] = 4096
    """At once, of all clients."""
    http_connections_per_address: Annotated[int, Field(gt=0)] = 1024
    """At once, of one client. Behind a proxy all come from its address."""
    http_body_s: Annotated[float, Field(gt=0, le=3600)] = 10.0
    """Time for a request's body, or for each part of an upload; then the answer is 408."""
    health_host: str = "127.0.0.1"
    """Address on which each process says how it is."""
    health_port: Annotated[int, Field(ge=0, le=65535)] = 0
    """/healthz, /readyz and /metrics of this process; 0 takes a free port."""
    log_level: Literal["debug", "info", "warning", "error"] = "info"
    """The least that is logged."""
    log_format: Literal["json", "console"] = "json"
    """A line of JSON for each event, or coloured words for a terminal."""
    heartbeat_s: Annotated[float, Field(gt=0)] = 1.0
    """How often a worker says that it is there."""
    worker_ttl_s: Annotated[float, Field(gt=0, validate_default=True)] = 5.0
    """A worker without a heartbeat for this time is dead and its leases are given away. At least twice heartbeat_s."""
    drain_s: Annotated[float, Field(ge=0)] = 20.0
    """How long a service may finish its work after SIGTERM."""
    cancel_grace_s: Annotated[float, Field(ge=0)] = 3.0
    """Time that a trainer or rollout worker has to release a job that was cancelled or lost while its model was
    loading; then its process re-executes itself unconditionally. A checkpoint being written at that moment is lost, the
    one before it is not. See docs/operating.md."""
    tenants: dict[str, TenantLimits] = {}
    """By tenant, its weight and quotas; `*` is for those that are not named. In a file `[tenants.acme]` with
    `weight = 2.0`, `running_jobs = 4`...; in an environment variable the same as JSON. See docs/scheduling.md."""
    submission_check_timeout_s: Annotated[float, Field(ge=1, le=600)] = 40.0
    """Longest time for checking what a submitted spec refers to (environment, files, adapters, checkpoints). A
    submission that takes longer is answered with 503 and can be repeated."""
    inference_idle_s: Annotated[float, Field(gt=0)] | None = None
    """An inference job without serving.idle_s ends when it has been idle for this time; one with serving.sleep_s this
    long after it fell asleep. None: it runs until it is completed or cancelled."""
    inference_lend_s: Annotated[float, Field(ge=0)] = 120.0
    """An inference job that has been idle for this long goes to sleep when a job of the same or a higher priority
    waits for a rollout worker that it holds; the next request wakes it. 0: it keeps its workers."""
    queue_reserve_after_s: Annotated[float, Field(ge=0)] = 300.0
    """After this time a waiting job is no longer passed by others that fit into gaps: workers that become free are kept
    for it, up to its needs."""
    queue_preempt_after_s: Annotated[float, Field(ge=0)] = 5.0
    """Time that a job waits before jobs of lower priority are preempted for it..."""
    queue_min_run_s: Annotated[float, Field(ge=0)] = 60.0
    """...and those must have run for this time, so that each makes progress between two preemptions."""
    queue_gang_s: Annotated[float, Field(ge=0)] = 15.0
    """A job that lost a worker and gets none in its place goes back to the queue after this time, if another waits for
    what it still holds."""
    queue_retry_s: Annotated[float, Field(gt=0)] = 2.0
    """After the second loss in a row without progress a job waits for this time before the next try, twice as long
    after each further loss, a minute at most."""
    take_back_s: Annotated[float, Field(ge=0)] = 30.0
    """A lent rollout worker that is reclaimed may finish its groups for this time; then they go to other workers of the
    job."""
    launcher: Literal["none", "process", "kubernetes"] = "none"
    """How the scheduler gets a trainer or rollout worker where a job finds none that is free: it starts a process on
    its own machine, or a pod. none: the workers are those that others start. See docs/scheduling.md."""
    launcher_trainers: Annotated[int, Field(ge=0)] = 1
    """Maximum number at a time, in addition to those started by others."""
    launcher_rollout_workers: Annotated[int, Field(ge=0)] = 1
    """The same for rollout workers."""
    launcher_idle_s: Annotated[float, Field(gt=0)] = 300.0
    """Workers started by the launcher end after this time without a job."""
    launcher_start_s: Annotated[float, Field(gt=0)] = 300.0
    """A worker without a heartbeat within this time is ended and started again after a pause. For pods this includes
    pulling images."""
    launcher_access: Path | None = None
    """With `process`: the folder of `opentinker access`, whose files name the passwords of what is started."""
    launcher_pods: Path | None = None
    """With `kubernetes`: a directory with a Pod in trainer.json and one in rollout-worker.json. Name, labels, owner and
    the settings worker_id and idle_exit_s are put into it."""
    launcher_api: Annotated[str, Field(pattern="^https?://[^ /]+$")] = "https://kubernetes.default.svc"
    """With `kubernetes`: where its API server is."""
    launcher_account: Path = Path("/var/run/secrets/kubernetes.io/serviceaccount")
    """A directory with `token`, `namespace` and, for https, `ca.crt`, as Kubernetes gives it to pods."""
    launcher_owner: Annotated[str, Field(pattern="^([a-z0-9][a-z0-9-]{0,40})?$")] = ""
    """With `kubernetes`: the Deployment that owns the pods, which go with it; it also stands in their names."""
    idle_exit_s: Annotated[float, Field(gt=0)] | None = None
    """A trainer or rollout worker ends after this time without a job. For workers that a launcher starts again."""
    advertise_host: str = "127.0.0.1"
    """Address under which other processes reach this one (a trainer's weight group and ranks). It is listened on alone,
    but for names that others may know by another address of this machine: those of several, or of 127.0.1.1."""
    max_ranks: Annotated[int, Field(ge=0, le=64)] = 0
    """Ranks of one job that a trainer takes, on GPUs at most one each; a job with more is shared by several. 0: any."""
    bank_jobs: Annotated[int, Field(ge=0, le=64)] = 0
    """Jobs with resources.trainer = 'shared' that a trainer trains at a time, on one base model in one process; it
    takes no others then. 0: it trains one job at a time, alone. See docs/shared-trainers.md."""
    bank_tokens: Annotated[int, Field(ge=64, le=1_048_576)] = 8192
    """With bank_jobs: tokens of one forward and backward pass, of all jobs in it; no trajectory may be longer."""
    bank_measures: bool = False
    """With bank_jobs: when a base is loaded, measure how many adapters fit into memory beside each other, with the
    largest pass over one and over two, as a base on a GPU always does. That takes seconds for small models and minutes
    for large ones on a CPU. Off: there is room for one adapter of each job, or for max_adapters models of a Tinker
    server."""
    swap_timeout_s: Annotated[float, Field(gt=0)] = 8.0
    """For each phase of a weight swap: joining the group, the transfer, and what the engine does with it (pause, load,
    resume); the last two may take the time for their bytes at 50 MB/s on top, loading also that for those of the base
    that an adapter is merged into. A rollout worker that takes longer is left out and tried again later; if no worker
    gets a version several times in a row, the job fails."""
    warm_engine_s: Annotated[float, Field(ge=0, le=86_400)] = 300.0
    """Time for which a rollout worker keeps the vLLM engine of its last RL job, with its memory, for a job with the
    same base and the same limits of the engine. 0: an engine ends with its job."""
    preload: bool = True
    """Import heavy libraries (torch, vllm) before the first job instead of when it comes."""
    env_sessions: Annotated[int, Field(gt=0)] = 512
    """Concurrent sessions of an env worker."""
    env_children: Annotated[int, Field(ge=0)] = 2
    """Processes of an env worker for environments that block or are sandboxed. Each plays one environment of one job; a
    job that has none yet gets one even where all are taken, up to four times as many in all."""
    env_sessions_per_child: Annotated[int, Field(gt=0)] = 8
    """Sessions that share one such process; it plays one call at a time."""
    env_import_timeout_s: Annotated[float, Field(gt=0, le=3600)] = 120.0
    """For the import of an environment's module, the check of its config, and before that the start of the process, or
    the installation of an upload, that plays it. An episode's own time, rollout.episode_timeout_s, begins after it."""
    env_modules: bool = False
    """Allow environments named `module:Class`, importable by the env worker (operator-written code)."""
    env_tool_commands: bool = False
    """Allow jobs to name programs that the env worker starts as MCP servers, under its own user."""
    env_interpreters: dict[str, Path] = {}
    """By environment, the Python of a virtual environment that has its library, where that and what is installed here
    cannot be together: `gem = "/opt/gem/bin/python"`; in an environment variable `gem=/opt/gem/bin/python`, more with
    commas. It also needs msgspec, numpy and pydantic."""
    env_egress_allow: list[str] = []
    """Networks, e.g. `10.1.0.0/16`, that environments, and rollout workers for seats with a url, may reach by a URL of
    a job although they are not public; in an environment variable, with commas. The scheduler checks the latter URLs,
    so it needs the setting too. `opentinker up` and `run` on loopback allow loopback."""
    model_keys_file: Path | None = None
    """A TOML file with keys for models behind URLs that play seats: `[NAME]` with `key`, `url` and `tenants`. The
    scheduler and rollout workers read it, no other service. See docs/security.md."""
    upload_mb: Annotated[int, Field(gt=0)] = 32
    """Size of an uploaded environment, unpacked."""
    upload_venv_mb: Annotated[int, Field(gt=0)] = 8192
    """Size of the virtual environment made from its lock."""
    upload_tenant_mb: Annotated[int, Field(gt=0, validate_default=True)] = 32768
    """Size of all uploaded environments of a tenant, with their virtual environments. At least upload_mb. Beyond it,
    and beyond the next one, old versions that no job plays are removed, oldest first; then pushes are refused."""
    upload_tenant_versions: Annotated[int, Field(gt=0)] = 1000
    """Versions of all uploaded environments of a tenant."""
    harbor_sandbox: Literal["bubblewrap", "docker"] = "bubblewrap"
    """Where the sandboxes of Harbor tasks come from: bubblewrap on root file systems of this machine, without network
    and without Docker; or containers of the Docker engine on this machine, which builds any Dockerfile. Sets belong to
    the one with which they were added."""
    harbor_roots: dict[str, Path] = {}
    """By image of a Harbor task's Dockerfile, its root file system: a directory, or a tar of one (`docker export`):
    `"node:22" = "/srv/roots/node22.tar"`; a name without a tag stands for all tags. In an environment variable
    `node:22=/srv/roots/node22.tar`, more with commas. Other tasks of ubuntu, debian and python get this machine's /usr,
    read-only, with a small /etc."""
    harbor_memory_mb: Annotated[int, Field(ge=64)] = 4096
    """Memory that a Harbor task may ask for; a task that asks for more is refused."""
    harbor_disk_mb: Annotated[int, Field(ge=1)] = 10240
    """Disk that a Harbor task may ask for, likewise."""
    harbor_processes: Annotated[int, Field(ge=8)] = 128
    """Processes and threads of one sandbox of a Harbor task."""
    harbor_warm: Annotated[int, Field(ge=0, le=256)] = 4
    """Sandboxes of Harbor tasks that each env worker starts before they are asked for, after the first of a task."""
    reference_memory_gb: Annotated[float, Field(gt=0)] = 8.0
    """Weights of frozen models that reference-forward holds at most; the least recently used go first."""
    reference_tokens_per_batch: Annotated[int, Field(gt=0)] = 16384
    """Tokens of a reference-forward's forward pass, of groups of all jobs together; a longer trajectory is alone."""
    reference_device: Literal["cpu", "cuda"] = "cpu"
    """Where its models are; `reference_memory_gb` is memory of this device."""

    @field_validator("artifacts_url")
    @classmethod
    def _names_a_store(cls, url: str) -> str:
        if url and not _STORE.fullmatch(url):
            raise ValueError("must be an absolute path, file:///PATH or s3://BUCKET/PREFIX")
        return url

    @field_validator("artifacts_s3_endpoint")
    @classmethod
    def _is_an_address(cls, url: str) -> str:
        if url and not _ENDPOINT.fullmatch(url):
            raise ValueError("must be http://HOST:PORT or https://HOST, without a password")
        return url

    @model_validator(mode="after")
    def _of_an_object_store(self) -> Settings:
        for name in ("artifacts_s3_endpoint", "artifacts_s3_region", "artifacts_s3_credentials_file"):
            value = getattr(self, name)
            if value != type(self).model_fields[name].default and not self.artifacts_url.startswith("s3://"):
                raise ValueError(f"{name} = {value} is not used: artifacts_url is no s3://BUCKET/PREFIX")
        return self

    @model_validator(mode="after")
    def _nobody_from_outside(self) -> Settings:
        if self.http_host not in LOOPBACK_HOSTS and not self.auth:
            raise ValueError(f"http_host = {self.http_host} is for other machines too: there auth = false is refused")
        if self.http_origins and not self.auth:
            raise ValueError(f"http_origins = {', '.join(self.http_origins)} would be operators: auth = false")
        return self

    @property
    def stream_origins(self) -> tuple[str, ...]:
        """Return all pages that may use a NATS listener of other machines; none: every page may."""
        named = self.nats_websocket_origins
        return (*named, *self.http_origins) if named else ()

    @model_validator(mode="after")
    def _streams_are_whole(self) -> Settings:
        if bool(self.nats_websocket_url) != (self.nats_issuer_file is not None):
            raise ValueError("nats_websocket_url and nats_issuer_file go together: set both or none")
        return self

    @model_validator(mode="after")
    def _launcher_is_whole(self) -> Settings:
        """Refuse settings that only another launcher would use."""
        of = {"process": ("launcher_access",), "kubernetes": ("launcher_pods", "launcher_owner")}
        for launcher, names in of.items():
            if launcher != self.launcher and (found := [name for name in names if getattr(self, name)]):
                raise ValueError(f"{found[0]} is for launcher = {launcher}, which is {self.launcher}")
        if self.launcher == "kubernetes" and self.launcher_pods is None:
            raise ValueError("launcher = kubernetes needs launcher_pods: what to start")
        return self

    @property
    def artifact_directory(self) -> Path | None:
        """None: artifacts are in an object store."""
        if self.artifacts_url.startswith("s3://"):
            return None
        place = self.artifacts_url.removeprefix("file://")
        return Path(place) if place else self.data_dir / "artifacts"

    @property
    def secret_files(self) -> list[Path]:
        """Files with keys and passwords, and directories of such."""
        files = (self.nats_password_file, self.redis_password_file, self.nats_issuer_file, self.admin_key_file)
        places = (self.artifacts_s3_credentials_file, self.model_keys_file, self.launcher_access, self.launcher_account)
        logins = (self.smtp_password_file, self.oidc_client_secret_file)
        return [place for place in (*files, *places, *logins) if place is not None]

    def password(self, field: Literal["nats_password_file", "redis_password_file", "nats_issuer_file"]) -> str:
        """Empty if there is no such file. Raises SpecError."""
        path: Path | None = getattr(self, field)
        return "" if path is None else read_password(path, field)

    def secrets(self, service: str) -> list[str]:
        """Return all secrets of a process of this service, which must not appear in logs. Raises SpecError."""
        found = [self.password("nats_password_file"), self.password("redis_password_file")]
        found += [password_in(self.nats_url), password_in(self.redis_url)]
        found.append(self.password("nats_issuer_file"))
        if self.admin_key_file is not None:
            found.append(read_password(self.admin_key_file, "admin_key_file"))
        if self.artifacts_s3_credentials_file is not None:
            found.append(read_access(self.artifacts_s3_credentials_file)[1])
        if service in MODEL_KEY_SERVICES:
            found += [key.key for key in read_model_keys(self.model_keys_file).values()]
        if service == "scheduler" and self.smtp_password_file is not None:
            found.append(read_secret(self.smtp_password_file, "smtp_password_file"))
        if service == "scheduler" and self.oidc_issuer:
            found.append(self.client_secret())
        if self.artifacts_url.startswith("s3://"):
            found += [os.environ.get(name, "") for name in AWS[1:]]  # only the scheduler's process must have them
        return [secret for secret in found if secret]

    @field_validator("nats_websocket_origins", "http_origins", mode="before")
    @classmethod
    def _origins(cls, given: object) -> object:
        texts = split_commas(given)
        if _is_texts(texts) and (wrong := [text for text in texts if not ORIGIN.fullmatch(text)]):
            raise ValueError(f"{wrong[0]} is no https://HOST[:PORT]")
        return texts

    @field_validator("env_egress_allow", mode="before")
    @classmethod
    def _networks(cls, given: object) -> object:
        return networks(given) if isinstance(given, str) or _is_texts(given) else given

    @field_validator("tenants", mode="before")
    @classmethod
    def _tenants(cls, given: object) -> object:
        return from_json(given, example='{"*": {"running_jobs": 4}}')

    @field_validator("env_interpreters", "harbor_roots", mode="before")
    @classmethod
    def _pairs(cls, given: object) -> object:
        if not isinstance(given, str):
            return given
        pairs = [part.partition("=") for part in split_commas(given)]
        if not all(name and path for name, _, path in pairs):
            raise ValueError("must be NAME=PATH, several with commas")
        return {name.strip(): path.strip() for name, _, path in pairs}

    @field_validator("upload_tenant_mb")
    @classmethod
    def _holds_one(cls, tenant_mb: int, others: ValidationInfo) -> int:
        """A package that may be pushed has room."""
        one_mb = others.data.get("upload_mb", 0)
        if tenant_mb < one_mb:
            raise ValueError(f"must be at least upload_mb ({one_mb})")
        return tenant_mb

    @field_validator("worker_ttl_s")
    @classmethod
    def _outlasts_a_beat(cls, ttl_s: float, others: ValidationInfo) -> float:
        """One late heartbeat is no death."""
        beat_s = others.data.get("heartbeat_s", 0.0)
        if ttl_s < 2 * beat_s:
            raise ValueError(f"must be at least twice heartbeat_s ({beat_s}), or living workers pass for dead")
        return ttl_s


def _is_texts(given: object) -> TypeGuard[list[str]]:
    return isinstance(given, list) and all(isinstance(part, str) for part in given)


def worker_name(settings: Settings, service: str) -> str:
    return settings.worker_id or f"{service}-{socket.gethostname()}-{uuid.uuid4().hex[:6]}"
