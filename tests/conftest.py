"""Real servers for every test that needs one: nats-server and valkey on free ports, started once per test process.

Several processes share the suite file by file (`make test`): whatever a test makes lies in its own directory, on ports
that `free_port` gave, in servers of its own process.
"""

from __future__ import annotations

import asyncio
import gc
import os
import re
import signal
import socket
import subprocess
import sys
import time
import weakref
from collections.abc import AsyncIterator, Awaitable, Callable, Generator, Iterator
from contextlib import AbstractAsyncContextManager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar, overload

import aiohttp
import hypothesis  # noqa: F401 - before vLLM freezes the heap: what it registers then looks like garbage to it
import pytest
import structlog

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from opentinker.client import AsyncClient
from opentinker.local.embedded import nats_binary, shipped_conf, valkey_binary
from opentinker.local.processes import free_port as free_port  # noqa: PLC0414 - tests import it from here too
from opentinker.shared.messaging.bus import Bus
from opentinker.shared.runtime.service import Context
from opentinker.shared.security.egress import LOOPBACK, VARIABLE
from opentinker.shared.state.store import Store
from tests.support.api import OPERATOR, OPERATOR_FILE, Http, bearing
from tests.support.service_forks import ADDRESS, ForkRoot

if TYPE_CHECKING:
    from tests.support.cluster import Cluster

signal.signal(signal.SIGINT, signal.default_int_handler)
"""A shell without job control starts background commands with Ctrl-C ignored, and every child would inherit that."""


os.environ |= {"OPENTINKER_API_KEY": OPERATOR, "OPENTINKER_ADMIN_KEY_FILE": str(OPERATOR_FILE)}
"""Of our clients and of schedulers, in this process and in those that tests start."""

T = TypeVar("T")
WAIT_S = 90.0
"""Whatever is waited for comes within this time on a machine that has much else to do; it costs nothing if it comes."""

FIGURE = "figure"
LONG = (
    *("test_shared_trainers.py", "test_trainer_groups.py", "test_accessible_states.py", "test_shared_policies.py"),
    *("test_accessibility.py", "test_policy_references.py", "test_one_server.py"),
    *("test_end_to_end_vllm.py", "test_env_service.py", "test_kills.py", "test_isolation.py", "test_live_services.py"),
    *("test_policies.py", "test_publisher_processes.py", "test_scripts.py", "test_matrix.py", "test_engine_vllm.py"),
    *("test_deterministic.py", "test_end_to_end.py", "test_pausing.py", "test_inference_vllm.py", "test_ranks.py"),
    *("test_deterministic_policies.py", "test_rl_learner.py", "test_frozen_seats.py"),
    *("test_reference_pool.py", "test_run.py", "test_engine_vllm_own.py", "test_served.py", "test_supervised_jobs.py"),
    *("test_supervised_ranks.py", "test_schedules.py", "test_engine_vllm_shared.py", "test_service.py", "test_bus.py"),
    *("test_inference.py", "test_inference_lifecycle.py", "test_eval_episodes.py", "test_reconcile_losses.py"),
    "test_learner_options.py",
)
"""Files that start before all others, the longest first, so that one process does not run them alone at the end."""
NIGHTLY = Path(__file__).parent / "nightly"


Figure = Callable[[str], None]


@pytest.fixture
def figure(record_property: Callable[[str, object], None]) -> Figure:
    """Tells a line that the summary of the whole run repeats."""
    return lambda line: record_property(FIGURE, line)


def pytest_terminal_summary(terminalreporter: pytest.TerminalReporter) -> None:
    for report in terminalreporter.stats.get("passed", []):
        for name, line in report.user_properties:
            if name == FIGURE:
                terminalreporter.write_line(line)


def pytest_configure(config: pytest.Config) -> None:
    """Have the processes of xdist share what they fork services of."""
    if config.getoption("numprocesses", None):  # of xdist's controller
        root = ForkRoot()
        os.environ[ADDRESS] = root.address
        config.add_cleanup(root.close)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Leave out tests/nightly where nobody asks for it: each process would import it to deselect it."""
    return True if collection_path == NIGHTLY and config.option.markexpr == "not nightly" else None


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark what is in tests/nightly, before pytest deselects by markers, and sort."""
    for item in items:
        if item.path.is_relative_to(NIGHTLY):
            item.add_marker(pytest.mark.nightly)
    items.sort(key=lambda item: LONG.index(item.path.name) if item.path.name in LONG else len(LONG))


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """Have the collector rest while test files are imported, which would take twice as long, and let it pass by the
    million objects of these imports afterwards: 0.6 s each time."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.collect()
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True)
def logging() -> None:
    """Keeps what services of this process log out of the output of commands that run in it. Tracebacks are plain: to
    print all locals of the frames takes a second, in which a scheduler loses its leadership."""
    structlog.reset_defaults()
    plain = structlog.dev.ConsoleRenderer(exception_formatter=structlog.dev.plain_traceback)
    processors = [*structlog.get_config()["processors"][:-1], plain]
    structlog.configure(processors=processors, logger_factory=structlog.PrintLoggerFactory(sys.__stderr__))


def wait_port(port: int, process: subprocess.Popen[bytes], host: str = "127.0.0.1") -> None:
    deadline = time.monotonic() + WAIT_S
    while time.monotonic() < deadline:
        assert process.poll() is None, f"server exited with {process.returncode}"
        try:
            socket.create_connection((host, port), 0.2).close()
            return
        except OSError:
            time.sleep(0.01)
    raise TimeoutError(f"nothing listens on port {port}")


async def soon(awaitable: Awaitable[T]) -> T:
    """Its result, or TimeoutError."""
    return await asyncio.wait_for(awaitable, WAIT_S)


@overload
async def until(
    read: Callable[[], Awaitable[T]], holds: Callable[[T], object] = bool, timeout_s: float = WAIT_S
) -> T: ...
@overload
async def until(read: Callable[[], T], holds: Callable[[T], object] = bool, timeout_s: float = WAIT_S) -> T: ...
async def until(read: Callable[[], Any], holds: Callable[[Any], object] = bool, timeout_s: float = WAIT_S) -> Any:
    """Wait until `read()`, awaited if it is a coroutine, satisfies `holds`, and return it.

    Assert afterwards only what the condition itself has seen: another state that usually comes with it may come later.
    """
    deadline = time.monotonic() + timeout_s
    while True:
        value = read()
        if asyncio.iscoroutine(value):
            value = await value
        if holds(value):
            return value
        assert time.monotonic() < deadline, f"not true within {timeout_s} s: {value!r} of {read}"
        await asyncio.sleep(0.02)


class Server:
    """A server process that a test may kill and start again on the same port with the same data."""

    def __init__(self, argv: list[str], port: int, url: str) -> None:
        self.argv, self.port, self.url = argv, port, url
        self.start()

    def start(self) -> None:
        self.process = subprocess.Popen(self.argv, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        wait_port(self.port, self.process)

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()


def nats_conf(directory: Path, port: int, *, max_file_store: str = "", **changes: str) -> Path:
    """The shipped configuration with a port and a store of the test's own; `changes` replace other values in it."""
    text = shipped_conf("nats.conf").read_text()
    if max_file_store:
        text = text.replace("jetstream {", f"jetstream {{\n  max_file_store: {max_file_store}")
    values = {"port": str(port), "store_dir": f'"{directory}/js"', **changes}
    for name, value in values.items():
        text, found = re.subn(rf"^( *{name}: *)\S+", rf"\g<1>{value}", text, flags=re.MULTILINE)
        assert found == 1, f"deploy/nats.conf has no {name}"
    conf = directory / "nats.conf"
    conf.write_text(text)
    return conf


def start_nats(directory: Path, sync_interval: str = "2m", **changes: str) -> Server:
    """`sync_interval` as nats-server has it by default: most tests do not need what survives a power cut."""
    port = free_port()
    conf = nats_conf(directory, port, sync_interval=sync_interval, **changes)
    return Server([str(nats_binary()), "-c", str(conf)], port, f"nats://127.0.0.1:{port}")


def start_valkey(directory: Path, appendfsync: str = "everysec") -> Server:
    """`appendfsync` as Valkey has it by default: while the disk is slow it answers before it has written, and forgets
    that when it is killed."""
    port = free_port()
    argv = [str(valkey_binary()), "--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory)]
    return Server(
        [*argv, "--appendonly", "yes", "--appendfsync", appendfsync, "--save", ""], port, f"redis://127.0.0.1:{port}/0"
    )


@pytest.fixture(scope="session")
def nats_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_nats(tmp_path_factory.mktemp("nats"))
    yield server
    server.kill()


@pytest.fixture(scope="session")
def valkey_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    server = start_valkey(tmp_path_factory.mktemp("valkey"))
    yield server
    server.kill()


@pytest.fixture
def own_server(tmp_path: Path) -> Iterator[Server]:
    """A NATS server of the test's own, to be killed."""
    server = start_nats(tmp_path)
    yield server
    server.kill()


@pytest.fixture
def small_server(tmp_path: Path) -> Iterator[Server]:
    """A NATS server whose store is soon full."""
    server = start_nats(tmp_path, max_file_store="2MB")
    yield server
    server.kill()


@pytest.fixture
def loopback_allowed(monkeypatch: pytest.MonkeyPatch) -> None:
    """Environments behind URLs may be on this machine."""
    monkeypatch.setenv(VARIABLE, ",".join(LOOPBACK))


@pytest.fixture
async def bus(nats_server: Server) -> AsyncIterator[Bus]:
    async with Bus.connect(nats_server.url, "test") as bus:
        await bus.ensure_streams()
        yield bus


@pytest.fixture
async def store(valkey_server: Server) -> AsyncIterator[Store]:
    async with Store.connect(valkey_server.url, "test") as store:
        await store.redis.flushdb()
        yield store


@pytest.fixture
def system(request: pytest.FixtureRequest, cluster: Cluster) -> Iterator[Cluster]:
    """The module's one cluster; a test that fails shows what its services said."""
    failed = request.session.testsfailed
    yield cluster
    if request.session.testsfailed > failed:
        cluster.show()


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny random Qwen3 of the quick start (2.4M parameters, float32)."""
    from examples.models.make_tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def small(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same with 0.1M parameters, for what needs no size: a step of training takes a third."""
    from examples.models.make_tiny import make_tiny

    return make_tiny(tmp_path_factory.mktemp("models") / "small", hidden_size=64, layers=2)


@pytest.fixture(scope="module")
def quiet_end() -> Iterator[None]:
    """vLLM leaves the contexts of its sockets to the collector, which would complain outside of any test.

    pyzmq's own context stays: its thread releases what was sent without a copy, in later files of this process too.
    """
    import zmq
    from zmq.utils import garbage

    made: weakref.WeakSet[zmq.Context[zmq.Socket[bytes]]] = weakref.WeakSet()
    make = zmq.Context.__init__

    def noted(self: zmq.Context[zmq.Socket[bytes]], *args: Any, **options: Any) -> None:
        make(self, *args, **options)
        if type(self) is zmq.Context:
            made.add(self)

    zmq.Context.__init__ = noted  # type: ignore[method-assign]
    yield
    zmq.Context.__init__ = make  # type: ignore[method-assign]
    for context in made:
        if not context.closed and context is not garbage.gc._context:
            context.destroy(linger=0)


# --- a scheduler in this process ------------------------------------------------------------------------------------


NewContext = Callable[..., AbstractAsyncContextManager[Context]]


@pytest.fixture
def new_context(nats_server: Server, valkey_server: Server, store: Store, tmp_path: Path) -> NewContext:
    """Connect a service to the servers, its name first ("scheduler-0"); options are settings. Job directories lie in
    `tmp_path / "data"`."""
    from tests.support.scheduling import context

    def connect(worker: str = "scheduler-0", **settings: Any) -> AbstractAsyncContextManager[Context]:
        return context(nats_server, valkey_server, worker, tmp_path / "data", **settings)

    return connect


@pytest.fixture
async def ctx(new_context: NewContext) -> AsyncIterator[Context]:
    """The surroundings of a scheduler."""
    async with new_context() as ctx:
        yield ctx


@pytest.fixture
async def url(ctx: Context) -> AsyncIterator[str]:
    """Of the scheduler that runs in `ctx`."""
    from tests.support.scheduling import scheduler

    async with scheduler(ctx) as url:
        yield url


@pytest.fixture
async def client(url: str) -> AsyncIterator[AsyncClient]:
    async with AsyncClient(url, wait_s=WAIT_S) as client:
        yield client


@pytest.fixture
async def http(url: str) -> AsyncIterator[Http]:
    async with aiohttp.ClientSession(headers=bearing()) as session:
        yield Http(session, url)


@pytest.fixture
async def api(url: str) -> AsyncIterator[Http]:
    """The same without a key."""
    async with aiohttp.ClientSession() as session:
        yield Http(session, url)
