"""Building and measuring on the nodes of a Ray cluster (extra ``cdmpp[ray]``).

Programs are built by tasks on all nodes that were there when the run began, and go through Ray's object store to the node that
measures. That node has the resource ``device:NAME``, whose amount is its number of cores for measuring. Each share of them has
an actor, which runs a measuring process of :mod:`cdmpp.profiler.cpu`. The node itself enforces time limits, so that neither
labels nor failures depend on the network or on how busy the driver is.
"""

from __future__ import annotations

import contextlib
import logging
import os
import platform
import signal
import socket
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from cdmpp.device import Device, get_device
from cdmpp.device.table import machine_facts
from cdmpp.errors import ProfilerError, UnknownDeviceError, reason
from cdmpp.profiler import machine
from cdmpp.profiler.core_rates import with_clock
from cdmpp.profiler.cpu import CpuConfig, SharedObject
from cdmpp.profiler.engine import Builder, Executor, Measured, Running, build_worker
from cdmpp.profiler.machine import Worker, WorkerDied, WorkerLost

logger = logging.getLogger(__name__)

#: Environment variable of a node: the cores (such as ``6,7``) that are for measuring, and that Ray does not use.
CORES_VARIABLE = "CDMPP_MEASURING_CORES"
#: Seconds for an address to answer, for nodes to describe themselves, and for measuring processes to start.
_ANSWER_S, _DESCRIBE_S, _START_S = 10.0, 120.0, 120.0
#: An empty HTTP/2 SETTINGS frame.
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: Build tasks queued for each CPU, so that no CPU waits for the driver; and how often a task is retried on another node.
_QUEUED, _RETRIES = 2, 3


def node_command(cores: int, head: str | None = None) -> str:
    """The shell command that makes this machine a node of the cluster at `head` (HOST:PORT), or the head of a new one. `cores`
    of its cores are for measuring, the others for Ray and builders (ProfilerError if there are too few)."""
    usable = [str(core) for core in machine.usable_cores()]
    if not 0 <= cores < len(usable):
        raise ProfilerError(f"this machine has {len(usable)} cores: one at least is for Ray and for building")
    building, measuring = usable[: len(usable) - cores], usable[len(usable) - cores :]
    where = f"--address={head}" if head else "--head --port=6379 --include-dashboard=false"
    start = f"ray start {where} --num-cpus={len(building)} --disable-usage-stats"
    variables = "RAY_AUTH_MODE=token RAY_worker_niceness=0"
    if measuring:
        variables += f" {CORES_VARIABLE}={','.join(measuring)}"
        start += f""" --resources='{{"device:{get_device("this-cpu").base}": {cores}}}'"""
    return f"{variables} taskset -c {','.join(building)} {start}"


# -- what runs on a node -------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Node:
    """A node's description. ``claims``: devices that it says it has, with the number of cores for measuring on them; ``here``:
    the name of its CPU; ``device``: the device share that was asked for, if that is a share of this CPU."""

    id: str
    name: str
    cpus: float
    claims: Mapping[str, float]
    here: str = ""
    device: Device | None = None
    arch: str = ""
    versions: Mapping[str, str] = field(default_factory=dict)
    machine: Mapping[str, Any] = field(default_factory=dict)


def _described(node: Node, asked: str) -> Node:
    before = machine.usable_cores()
    machine.pin(tuple({*before, *_measuring_cores()}))  # as the machine's CPU has all these cores
    here, device = get_device("this-cpu").base, None
    with contextlib.suppress(UnknownDeviceError):
        device = get_device(asked) if asked else None
    machine.pin(before)
    device = with_clock(device) if device is not None and device.base == here else None
    facts, arch = machine_facts(), platform.machine()
    return replace(node, here=here, device=device, arch=arch, versions=_versions(), machine=facts)


def _versions() -> dict[str, str]:
    return {"python": platform.python_version(), **machine.installed("cdmpp", "ray", "apache-tvm")}


class _Process(Worker):
    """A worker process on this node, which enforces its time limits here."""

    def answers(self, request: Any, timeout_s: float) -> Iterator[Any]:
        """The messages that it sends until the request is done; if it fails, the last one is the exception, as a value."""
        while not self.submit(request, True, timeout_s):
            pass
        message: Any = Running()
        while isinstance(message, Running | Measured):
            if self.connection.poll(0.2):
                try:
                    message = self.receive()
                except (WorkerDied, ProfilerError) as err:
                    message = err
                if isinstance(message, Running):
                    self.extend(message.timeout_s)
            elif self.overdue():
                message = TimeoutError()
            else:
                continue
            if isinstance(message, Exception):
                self.replace()
            yield message
        self.finished()


#: The builder of this Ray process, by the ``repr`` of its :data:`Builder`; it serves one task after another.
_builders: dict[str, _Process] = {}


def _build(builder: Builder, job: Any, timeout_s: float) -> tuple[Any, bytes]:
    """The result of building a job, and the content of its file (runs on a node)."""
    if (key := repr(builder)) not in _builders:
        while _builders:
            _builders.popitem()[1].kill()
        _builders[key] = _Process(build_worker, (builder,), "builder", of_cpu_time=True)
    (built,) = _builders[key].answers(job, timeout_s)
    if not isinstance(built, SharedObject) or not built.path:
        return built, b""
    code = Path(built.path).read_bytes()
    Path(built.path).unlink()
    return built, code


class _Measuring:
    """The actor that runs a measuring process: it has cores of its own, and a folder for the programs of a batch."""

    def __init__(self, threads: int, serve: Callable[..., None], config: CpuConfig, sentinel: Any) -> None:
        self._folder, self._cores = config.work_folder(), _claim_cores(threads)
        sentinel = sentinel and self._here(sentinel)
        self._process = _Process(serve, (config, tuple(sorted(self._cores)), sentinel), "runner")

    def ready(self) -> None:
        """Returns once the actor has started."""

    def measure(self, batch: Sequence[SharedObject], timeout_s: float) -> Iterator[Any]:
        """The measuring process's messages about a batch."""
        here = [self._here(built) for built in batch]
        try:
            yield from self._process.answers(here, timeout_s)
        finally:
            for built in here:
                Path(built.path).unlink(missing_ok=True)

    def _here(self, built: SharedObject) -> SharedObject:
        import ray

        path = self._folder / f"{built.program}.so"
        path.write_bytes(ray.get(built.code))
        return replace(built, path=str(path), code=None)


def _claim_cores(threads: int) -> dict[int, socket.socket]:
    """Cores that no other measuring process of this machine has, each with a socket that holds it until this process ends."""
    claimed: dict[int, socket.socket] = {}
    for core in _measuring_cores():
        holder = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            holder.bind(f"\0cdmpp-core-{core}")  # a name without a file, which the kernel frees when the process ends
            claimed[core] = holder
        if len(claimed) == threads:
            return claimed
    raise ProfilerError(f"fewer than {threads} of the cores {_measuring_cores()} are free ({CORES_VARIABLE})")


def _measuring_cores() -> list[int]:
    named = os.environ.get(CORES_VARIABLE)
    return [int(core) for core in named.split(",")] if named else list(machine.usable_cores())[::-1]


# -- the driver ----------------------------------------------------------------------------------------------------


class RayWorker:
    """A builder or a measuring process on a node, as the engine sees it (:class:`~cdmpp.profiler.machine.Worker`). `send`
    sends a request; it returns references to the answer and to its file's content, or a stream of answers and None."""

    def __init__(self, send: Callable[[Any, float], tuple[Any, Any]], actor: Any = None, node: str = "") -> None:
        self._send, self._actor, self.node = send, actor, node
        self.finished()

    def finished(self) -> None:
        self.load: Any = None
        #: Reference to (or stream of) the next message, reference to its file's content, and a message not handled yet.
        self.answer: Any = None
        self._code: Any = None
        self.message: Any = None

    #: The node itself has started another process.
    replace = finished

    def submit(self, request: Any, load: Any, timeout_s: float) -> bool:
        self.answer, self._code = self._send(request, timeout_s)
        self.load = load
        return True

    def fetch(self) -> bool:
        """Take the message that has arrived; False if it says that the time limit was exceeded."""
        import ray

        try:
            stream = isinstance(self.answer, ray.ObjectRefGenerator)
            self.message = ray.get(next(self.answer) if stream else self.answer)
        except ray.exceptions.RayActorError as err:
            logger.info("%s", err)
            self.message = WorkerLost(f"node {self.node} is lost, or what measures there")
        except (ray.exceptions.RayError, StopIteration) as err:
            self.message = WorkerDied(reason(err))
        return not self.overdue()

    def receive(self) -> Any:
        message, self.message = self.message, None
        if isinstance(message, Exception):
            raise message
        if isinstance(message, Measured):
            message.meta["node"] = self.node
        return replace(message, code=self._code) if isinstance(message, SharedObject) else message

    def overdue(self) -> bool:
        return isinstance(self.message, TimeoutError)

    def extend(self, timeout_s: float) -> None:
        """Does nothing: the node extends the limit itself."""

    def kill(self) -> None:
        """Kill its actor, or cancel its task."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor)
        elif self.load is not None:
            ray.cancel(self.answer, force=True)

    close = kill


class RayExecutor(Executor):
    """Builders on nodes, and at most `degree` measuring processes on the nodes that have `device`; see :func:`connect`."""

    local = False

    def __init__(self, nodes: Sequence[Node], device: Any, asked: int | str) -> None:
        import ray

        self._ray: Any = ray
        self._nodes = nodes
        self.device: Device = device
        self._cpus = int(sum(node.cpus for node in nodes))
        if not self._cpus:
            raise ProfilerError("no node of the cluster has a CPU to build on")
        self._where = {"ray.io/node-id": f"in({','.join(node.id for node in nodes)})"}
        shares = sum(self._shares(node) for node in nodes)
        self.degree = shares if asked == "auto" else min(shares, int(asked))

    def _shares(self, node: Node) -> int:
        return 0 if self.device is None else int(node.claims.get(self.device.base, 0) // self.device.share)

    def facts(self) -> dict[str, Any]:
        return {"nodes": [asdict(node) for node in self._nodes]}

    def builder_count(self, asked: int | None) -> int:
        return asked or _QUEUED * self._cpus

    def builders(self, builder: Builder, count: int) -> list[Any]:
        what, build = self._ray.put(builder), self._task(_build, num_returns=2)
        return [RayWorker(lambda job, timeout_s: build.remote(what, job, timeout_s)) for _ in range(count)]

    def _task(self, function: Callable[..., Any], **options: Any) -> Any:
        options |= {"num_cpus": 1, "max_retries": _RETRIES, "scheduling_strategy": "SPREAD"}
        return self._ray.remote(function).options(label_selector=self._where, **options)

    def measurers(self, serve: Callable[..., None], config: Any, sentinel: Any) -> list[Any]:
        resource, threads = f"device:{self.device.base}", int(self.device.share)
        actors: dict[Any, tuple[Any, str]] = {}
        for node in [one for one in self._nodes for _ in range(self._shares(one))][: self.degree]:
            where = {"resources": {resource: threads}, "label_selector": {"ray.io/node-id": node.id}}
            made: Any = self._ray.remote(_Measuring).options(num_cpus=0, **where)
            actor = made.remote(threads, serve, config, sentinel)
            actors[actor.ready.remote()] = actor, node.name
        there, missing = self._ray.wait(list(actors), num_returns=len(actors), timeout=_START_S)
        for started in missing:
            self._ray.kill(actors[started][0])
        if not there:
            raise ProfilerError(f"{resource} is in use: no node gave a core of it within {_START_S:g} s")
        try:
            self._ray.get(there)
        except self._ray.exceptions.RayError as err:
            raise ProfilerError(f"no measuring process on {resource}: {reason(getattr(err, 'cause', err))}") from err
        return [RayWorker(_stream(actor), actor, node) for actor, node in (actors[started] for started in there)]

    def ready(self, workers: list[Any], timeout_s: float) -> list[Any]:
        waiting = {worker.answer: worker for worker in workers if worker.load is not None and worker.message is None}
        there = list(waiting)
        for number, seconds in ((1, timeout_s), (len(waiting), 0)):  # wait for one, then take all that have arrived
            if there:
                there, _ = self._ray.wait(list(waiting), num_returns=number, timeout=seconds, fetch_local=False)
        return [waiting[answer] for answer in there if waiting[answer].fetch()]


def _stream(actor: Any) -> Callable[[Any, float], tuple[Any, None]]:
    measure = actor.measure.options(num_returns="streaming")
    return lambda batch, timeout_s: (measure.remote(batch, timeout_s), None)


def connect(address: str, device: str | Device = "", workers: int | str = "auto") -> RayExecutor:
    """Join the cluster with its head at `address` (HOST:PORT), of which this machine is a node, or make one of this machine
    alone (``local``). A process stays with its cluster until it ends. At most `workers` measuring processes run on shares of
    `device`; for ``"auto"``, as many as nodes have cores for, or one on a local cluster. ProfilerError (one line): Ray is not
    installed, nobody answers, nodes have different versions of Python, Ray, cdmpp or TVM, no node has the device, or a node
    that claims to have it has another one."""
    # Ray reads this when it is imported. A head uses a token by itself if there is one; a process that joins has to be told.
    if "ray" not in sys.modules and (Path.home() / ".ray/auth_token").exists():
        os.environ.setdefault("RAY_AUTH_MODE", "token")
    try:
        import ray
    except ImportError as err:
        raise ProfilerError("a cluster needs Ray: install cdmpp[ray]") from err
    name = device if isinstance(device, str) else device.name
    with contextlib.suppress(UnknownDeviceError):  # another node may know the device
        if name:
            known = get_device(device)
            if known.kind != "cpu":
                raise ProfilerError(f"{known.name} is a {known.kind}: on a cluster cdmpp measures on CPUs")
            name = known.name
    if not ray.is_initialized():
        _join(address)
    nodes = checked(_nodes(name), name)
    asked = 1 if address == "local" and workers == "auto" else workers
    return RayExecutor(nodes, next((node.device for node in nodes if node.device is not None), None), asked)


def _join(address: str) -> None:
    import ray

    given: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    host, _, port = address.rpartition(":")
    if address == "local":
        os.environ |= {"RAY_USAGE_STATS_ENABLED": "0", "RAY_worker_niceness": "0"}
        cores = len(machine.usable_cores())
        resources = {f"device:{get_device('this-cpu').base}": cores}
        given |= {"num_cpus": cores, "resources": resources, "include_dashboard": False}
    elif not host or not port.isdecimal():
        raise ProfilerError(f"--ray takes HOST:PORT of a cluster's head, or local; got {address!r}")
    else:
        try:
            with socket.create_connection((host, int(port)), _ANSWER_S) as connection:
                # Ray would wait for minutes for an answer. A gRPC server answers this frame with its own settings.
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
                if "RAY_USE_TLS" not in os.environ and connection.recv(9)[3:4] != _SETTINGS[3:4]:
                    raise OSError("something else does")
        except OSError as err:
            raise ProfilerError(f"no Ray cluster answers at {address}: {reason(err)}") from err
    handler = signal.getsignal(signal.SIGTERM)
    try:
        ray.init(**given)
    except Exception as err:  # a RuntimeError, a ConnectionError, or one of Ray's own
        hint = " (has this machine the cluster's ~/.ray/auth_token?)" if isinstance(err, ConnectionError) else ""
        raise ProfilerError(f"cannot join the Ray cluster at {address}: {reason(err)[:500]}{hint}") from err
    finally:
        with contextlib.suppress(ValueError):  # outside the main thread, where Ray left it as it was
            signal.signal(signal.SIGTERM, handler)


def _nodes(asked: str) -> list[Node]:
    """All nodes, as they describe themselves; ProfilerError if one cannot do so."""
    import ray

    found, answers = [], []
    for row in [row for row in ray.nodes() if row["Alive"]]:
        named, resources = row["NodeName"] != row["NodeManagerAddress"], row["Resources"]
        claims = {r.removeprefix("device:"): n for r, n in resources.items() if r.startswith("device:")}
        name = row["NodeName"] if named else row["NodeManagerHostname"]
        found.append(Node(row["NodeID"], name, resources.get("CPU", 0.0), claims))
        describe = ray.remote(_described).options(num_cpus=0, label_selector={"ray.io/node-id": row["NodeID"]})
        answers.append(describe.remote(found[-1], asked))
    for i, node in enumerate(found):
        try:
            found[i] = ray.get(answers[i], timeout=_DESCRIBE_S)
        except ray.exceptions.RayError as err:
            raise ProfilerError(f"node {node.name} cannot run cdmpp: {reason(getattr(err, 'cause', err))}") from err
    return found


def checked(nodes: Sequence[Node], asked: str) -> list[Node]:
    """The nodes to use for a device: those with the architecture of the nodes that have it; for ``""``, of this machine."""
    here = _versions()
    for node in nodes:
        for package in {**here, **node.versions}:
            mine, other = (versions.get(package, "not installed") for versions in (here, node.versions))
            if mine != other:
                why = "programs are the same only where versions are"
                raise ProfilerError(f"{package} is {other} on node {node.name}, and {mine} here: {why}")
    if not asked:
        return [node for node in nodes if node.arch == platform.machine()]
    base = next((node.device.base for node in nodes if node.device is not None), asked.partition("@")[0])
    claiming = [node for node in nodes if base in node.claims]
    for node in claiming:
        if node.device is None:
            raise ProfilerError(f"node {node.name} claims to have device:{base}, and is {node.here}")
        if node.claims[base] < node.device.share:
            raise ProfilerError(f"{node.device.name}: node {node.name} has {node.claims[base]:g} cores for measuring")
        model = claiming[0]
        if differences := model.device and model.device.differences(node.device):
            both = f"nodes {model.name} and {node.name} both claim to have device:{base}"
            raise ProfilerError(f"{both}, and differ in {', '.join(differences)}: name one of them otherwise")
    if not claiming:
        there = ", ".join(sorted({f"device:{claim}" for node in nodes for claim in node.claims})) or "none"
        raise ProfilerError(
            f"no node has the resource device:{base}; of this kind the cluster has {there} "
            "(cdmpp devices --measuring-cores N gives the command that starts a node)"
        )
    kept = [node for node in nodes if node.arch == claiming[0].arch]
    return [node if node in claiming else replace(node, device=None) for node in kept]
