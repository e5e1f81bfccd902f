"""Building and measuring on the nodes of a Ray cluster (extra ``cdmpp[ray]``).

Programs are built by tasks on all nodes that were looked at when the run began; a task that is lost with its node runs again
elsewhere. What was built goes through Ray's object store from the node that built to the node that measures. A node measures
that has the resource ``device:NAME``, as many as it has cores for measuring; an actor has each of them, and in it the measuring
process of :mod:`cdmpp.profiler.cpu`, as on one machine. Limits of time are kept on the node, so that no label and no failure
depends on the network or on how busy the driver is.
"""

from __future__ import annotations

import contextlib
import itertools
import logging
import os
import platform
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

from cdmpp.device import Device, get_device
from cdmpp.device.detect import machine_facts
from cdmpp.errors import ProfilerError, UnknownDeviceError, reason
from cdmpp.profiler import machine
from cdmpp.profiler.core_rates import with_clock
from cdmpp.profiler.cpu import CpuConfig, SharedObject
from cdmpp.profiler.engine import Builder, Measured, Running, build_worker
from cdmpp.profiler.machine import Worker, WorkerDied, WorkerLost

logger = logging.getLogger(__name__)

#: Environment variable of a node: its cores for measuring, which Ray does not use, such as ``6,7``.
CORES_VARIABLE = "CDMPP_MEASURING_CORES"
#: Seconds for an address to answer, for nodes to say what they are, and for measuring processes to start.
_ANSWER_S, _PROBE_S, _START_S = 10.0, 90.0, 60.0
#: An empty settings frame of HTTP/2.
_SETTINGS = bytes((0, 0, 0, 4, 0, 0, 0, 0, 0))
#: Tasks that are queued for each core, so that none waits for the driver; and times that one is tried on another node.
_QUEUED, _RETRIES = 2, 3
#: Packages of which all nodes have the same version.
_PACKAGES = ("cdmpp", "ray", "apache-tvm")


def node_command(cores: int, head: str | None = None) -> str:
    """The shell command that makes this machine a node, of the cluster at `head` (HOST:PORT) or as the head of a new one.

    `cores` of its cores are for measuring: Ray and what builds run on the others. ProfilerError if there are too few.
    """
    usable = machine.usable_cores()
    if not 0 <= cores < len(usable):
        raise ProfilerError(f"this machine has {len(usable)} cores: one at least is for Ray and for building")
    building, measuring = usable[: len(usable) - cores], usable[len(usable) - cores :]
    where = f"--address={head}" if head else "--head --port=6379 --include-dashboard=false"
    command = f"taskset -c {_listed(building)} ray start {where} --num-cpus={len(building)} --disable-usage-stats"
    if measuring:
        resource = f'{{"device:{get_device("this-cpu").base}": {cores}}}'
        command = f"{CORES_VARIABLE}={_listed(measuring)} {command} --resources='{resource}'"
    return "RAY_worker_niceness=0 " + command


def _listed(cores: Sequence[int]) -> str:
    return ",".join(map(str, cores))


# -- what runs on a node -------------------------------------------------------------------------------------------


class _Process:
    """A worker process of this node and its limits of time."""

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...], name: str) -> None:
        # A fork server's children import the main module, which is Ray's.
        sys.modules["__main__"].__file__ = None
        self._worker = Worker(target, args, name)

    def answers(self, request: Any, timeout_s: float, *, of_cpu_time: bool = False) -> Iterator[Any]:
        """What it sends until the request is done; at last WorkerDied or TimeoutError, as values, where it ended over it."""
        worker = self._worker
        while not worker.submit(request, True, timeout_s, of_cpu_time=of_cpu_time):
            pass
        message: Any = Running()
        while isinstance(message, Running | Measured):
            if machine.ready([worker], 0.2):
                try:
                    message = worker.receive()
                except WorkerDied as err:
                    message = err
                if isinstance(message, Running):
                    worker.extend(message.timeout_s)
            elif worker.overdue():
                message = TimeoutError()
            else:
                continue
            if isinstance(message, Exception):
                worker.replace()
            yield message
        worker.finished()

    def kill(self) -> None:
        self._worker.kill()


#: The builder of this process of Ray's, by what it was made of: it serves one task after another.
_builders: dict[str, _Process] = {}


def _build(builder: Builder, job: Any, timeout_s: float) -> tuple[Any, bytes]:
    """What was built, and the content of its file (runs on a node)."""
    key = repr(builder)
    if key not in _builders:
        for other in _builders.values():
            other.kill()
        _builders.clear()
        _builders[key] = _Process(build_worker, (builder,), "builder")
    (built,) = _builders[key].answers(job, timeout_s, of_cpu_time=True)
    if not isinstance(built, SharedObject) or not built.path:
        return built, b""
    path = Path(built.path)
    code = path.read_bytes()
    path.unlink()
    return built, code


def _call(function: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
    return [function(item) for item in items]


class _Measuring:
    """The actor of a measuring process: cores of its own, and a folder for the programs of a batch."""

    def __init__(
        self,
        node: str,
        threads: int,
        serve: Callable[..., None],
        config: CpuConfig,
        sentinel: SharedObject | None,
        code: bytes,
    ) -> None:
        self._node, self._folder = node, config.work_folder()
        self._claimed = _claim_cores(threads)
        cores = tuple(sorted(self._claimed))
        sentinel = None if sentinel is None else self._here(sentinel, code)
        self._process = _Process(serve, (config, cores, sentinel), f"runner-{_listed(cores)}")

    def node(self) -> str:
        return self._node

    def measure(self, batch: Sequence[SharedObject], timeout_s: float, *codes: bytes) -> Iterator[Any]:
        """Messages of the measuring process about a batch."""
        here = [self._here(built, code) for built, code in zip(batch, codes, strict=True)]
        try:
            for message in self._process.answers(here, timeout_s):
                if isinstance(message, Measured):
                    message.meta["node"] = self._node
                yield message
        finally:
            for built in here:
                Path(built.path).unlink(missing_ok=True)

    def _here(self, built: SharedObject, code: bytes) -> SharedObject:
        path = self._folder / f"{built.program}.so"
        path.write_bytes(code)
        return replace(built, path=str(path))


def _claim_cores(threads: int) -> dict[int, socket.socket]:
    """Cores that no other measuring process of this machine has, with what holds them until this process ends."""
    claimed: dict[int, socket.socket] = {}
    for core in _measuring_cores():
        holder = socket.socket(socket.AF_UNIX)
        with contextlib.suppress(OSError):
            holder.bind(f"\0cdmpp-core-{core}")  # a name without a file, which the kernel gives up with the process
            claimed[core] = holder
        if len(claimed) == threads:
            return claimed
    there = os.environ.get(CORES_VARIABLE, "none")
    raise ProfilerError(f"fewer than {threads} cores for measuring are free: {CORES_VARIABLE} names {there}")


def _measuring_cores() -> list[int]:
    named = os.environ.get(CORES_VARIABLE)
    return list(machine.usable_cores())[::-1] if named is None else [int(core) for core in named.split(",")]


@dataclass(frozen=True)
class Node:
    """What a node says of itself; ``device`` is the CPU's share that was asked for, if the node is that device."""

    id: str
    name: str
    cpus: float
    #: Devices that it claims to have -> cores for measuring.
    claims: Mapping[str, float]
    versions: Mapping[str, str]
    arch: str
    machine: Mapping[str, Any]
    here: str
    device: Device | None


def _facts(asked: str) -> dict[str, Any]:
    """Of this node, for :class:`Node`."""
    before = machine.usable_cores()
    machine.pin(tuple({*before, *_measuring_cores()}))  # the machine has them all
    try:
        here, device = get_device("this-cpu"), None
        with contextlib.suppress(UnknownDeviceError):
            device = get_device(asked) if asked else None
    finally:
        machine.pin(before)
    return {
        "versions": _versions(),
        "arch": platform.machine(),
        "machine": machine_facts(),
        "here": here.base,
        "device": with_clock(device) if device is not None and device.base == here.base else None,
    }


def _versions() -> dict[str, str]:
    found = {"python": platform.python_version()}
    for package in _PACKAGES:
        with contextlib.suppress(metadata.PackageNotFoundError):
            found[package] = metadata.version(package)
    return found


# -- the driver ----------------------------------------------------------------------------------------------------


class RayWorker:
    """A builder or a measuring process on a node, as the engine sees it (:class:`~cdmpp.profiler.machine.Worker`).

    `send` gives a reference to the answer to a request, and one to its file; or a stream of answers.
    """

    def __init__(self, send: Callable[[Any, float], tuple[Any, Any]], actor: Any = None, node: str = "") -> None:
        self._send, self._actor, self.node = send, actor, node
        self.load: Any = None
        self._answer: Any = None
        self._code: Any = None
        self._message: Any = None

    def submit(self, request: Any, load: Any, timeout_s: float, *, of_cpu_time: bool = False) -> bool:
        self._answer, self._code = self._send(request, timeout_s)
        self.load = load
        return True

    def pending(self) -> Any:
        """What its next message will be known by; None where the last one is not dealt with, or none is due."""
        return None if self.load is None or self._message is not None else self._answer

    def fetch(self) -> bool:
        """Take the message that is there; False where it says that the limit was passed."""
        import ray

        try:
            stream = isinstance(self._answer, ray.ObjectRefGenerator)
            message = ray.get(next(self._answer) if stream else self._answer)
            if isinstance(message, SharedObject) and message.status == "ok":
                message = replace(message, code=self._code)
        except ray.exceptions.RayActorError as err:
            message = WorkerLost(f"{self.node} is lost: {_first_line(err)}")
        except (ray.exceptions.RayError, StopIteration) as err:
            message = WorkerDied(_first_line(err))
        self._message = message
        return not isinstance(message, TimeoutError)

    def receive(self) -> Any:
        message, self._message = self._message, None
        if isinstance(message, Exception) and not isinstance(message, ProfilerError):
            raise message
        return message

    def overdue(self) -> bool:
        return isinstance(self._message, TimeoutError)

    def extend(self, timeout_s: float) -> None:
        """The node does it."""

    def finished(self) -> None:
        self.load = self._answer = self._code = self._message = None

    replace = finished  # so has the node done

    def kill(self) -> None:
        """Give up what it does."""
        import ray

        if self._actor is not None:
            ray.kill(self._actor)
        elif self.load is not None:
            ray.cancel(self._answer, force=True)
        self.finished()

    close = kill


def _first_line(err: BaseException) -> str:
    lines = [line.strip() for line in str(err).splitlines() if line.strip()]
    return next((line for line in reversed(lines) if line.startswith("The actor died")), (lines or [repr(err)])[0])[
        :300
    ]


class RayExecutor:
    """Builders on nodes, and measuring processes on those of them that have `device`; see :func:`connect`."""

    local = False

    def __init__(self, nodes: Sequence[Node], device: Device | None, asked: int | str) -> None:
        self.nodes, self._device = nodes, device
        cpus = int(sum(node.cpus for node in nodes))
        if not cpus:
            raise ProfilerError("no node of the cluster has a CPU to build on")
        self._cpus = cpus
        self._ids = f"in({','.join(node.id for node in nodes)})"
        #: Measuring processes at most.
        self.degree = 0
        if device is not None:
            self.degree = sum(int(node.claims.get(device.base, 0) // device.share) for node in nodes)
            if asked != "auto":
                self.degree = min(self.degree, int(asked))

    @property
    def device(self) -> Device:
        """What is measured on, as its node describes it."""
        assert self._device is not None
        return self._device

    def nodes_json(self) -> list[dict[str, Any]]:
        """The nodes as JSON values, to be kept with what they measured."""
        left_out = ("id", "device")
        return [{key: value for key, value in asdict(node).items() if key not in left_out} for node in self.nodes]

    def builder_count(self, asked: int | None) -> int:
        return asked or _QUEUED * self._cpus

    def builders(self, builder: Builder, count: int) -> list[Any]:
        import ray

        what, build = ray.put(builder), self._task(_build, num_returns=2)
        return [RayWorker(lambda job, timeout_s: build.remote(what, job, timeout_s)) for _ in range(count)]

    def _task(self, function: Callable[..., Any], **options: Any) -> Any:
        import ray

        where = {"scheduling_strategy": "SPREAD", "label_selector": {"ray.io/node-id": self._ids}}
        return ray.remote(function).options(num_cpus=1, max_retries=_RETRIES, **where, **options)

    def measurers(self, serve: Callable[..., None], config: Any, sentinel: Any) -> list[Any]:
        import ray

        resource, threads = f"device:{self.device.base}", int(self.device.share)
        code = b"" if sentinel is None else sentinel.code
        actors: list[Any] = []
        for node in self.nodes:
            where = {"resources": {resource: threads}, "label_selector": {"ray.io/node-id": node.id}}
            actor: Any = ray.remote(_Measuring).options(num_cpus=0, max_concurrency=1, **where)
            for _ in range(int(node.claims.get(self.device.base, 0)) // threads):
                if len(actors) < self.degree:
                    actors.append(actor.remote(node.name, threads, serve, config, _without_code(sentinel), code))
        started = {actor.node.remote(): actor for actor in actors}
        there, missing = ray.wait(list(started), num_returns=len(actors), timeout=_START_S)
        for reference in missing:
            ray.kill(started[reference])
        if not there:
            raise ProfilerError(f"{resource} is in use: no node gave a core of it within {_START_S:g} s")
        try:
            return [_measurer(started[reference], ray.get(reference)) for reference in there]
        except ray.exceptions.RayError as err:
            cause = getattr(err, "cause", None)
            raise ProfilerError(f"no measuring process on {resource}: {reason(cause or err)}") from err

    def ready(self, workers: list[Any], timeout_s: float) -> list[Any]:
        import ray

        pending = {worker.pending(): worker for worker in workers}
        pending.pop(None, None)
        if not pending:
            return []
        there, _ = ray.wait(list(pending), timeout=timeout_s, fetch_local=False)
        there, _ = (
            ray.wait(list(pending), num_returns=len(pending), timeout=0, fetch_local=False) if there else ([], [])
        )
        return [worker for worker in map(pending.get, there) if worker is not None and worker.fetch()]

    def map(self, function: Callable[[Any], Any], items: Iterable[Any], chunksize: int = 1) -> Iterator[Any]:
        """As that of :class:`concurrent.futures.Executor`."""
        import ray

        call, left = self._task(_call), iter(items)
        chunks = iter(lambda: list(itertools.islice(left, chunksize)), [])
        for answer in [call.remote(function, chunk) for chunk in chunks]:
            yield from ray.get(answer)


def _measurer(actor: Any, node: str) -> RayWorker:
    def send(batch: Sequence[SharedObject], timeout_s: float) -> tuple[Any, None]:
        codes = [built.code for built in batch]
        stream = actor.measure.options(num_returns="streaming")
        return stream.remote([_without_code(built) for built in batch], timeout_s, *codes), None

    return RayWorker(send, actor, node)


def _without_code(built: Any) -> Any:
    return built and replace(built, code=None)


@contextlib.contextmanager
def connect(address: str, device: str | Device = "", workers: int | str = "auto") -> Iterator[RayExecutor]:
    """A cluster that this machine is a node of, by HOST:PORT of its head; or ``local``, a cluster of this machine alone.

    It has `workers` measuring processes on shares of `device` at most: as many as its nodes have cores for, or one on a local
    cluster, for ``"auto"``. ProfilerError (one line) where Ray is not installed, nobody answers, nodes have different versions
    of Python, Ray, cdmpp or TVM, no node has the device, or one that claims it is another.
    """
    try:
        import ray
    except ImportError as err:
        raise ProfilerError("a cluster needs Ray: install cdmpp[ray]") from err
    name = device if isinstance(device, str) else device.name
    with contextlib.suppress(UnknownDeviceError):  # of another node, perhaps
        known = get_device(name) if name else None
        if known is not None and known.kind != "cpu":
            raise ProfilerError(f"{known.name} is a {known.kind}: on a cluster cdmpp measures on CPUs")
        name = known.name if known is not None else ""
    ours = not ray.is_initialized()
    if ours:
        _initialise(address)
    try:
        nodes = _checked(_nodes(name), name)
        if address == "local" and workers == "auto":
            workers = 1
        yield RayExecutor(nodes, next((node.device for node in nodes if node.device is not None), None), workers)
    finally:
        if ours:
            ray.shutdown()


def _initialise(address: str) -> None:
    import ray

    given: dict[str, Any] = {"address": address, "log_to_driver": False, "logging_level": logging.ERROR}
    if address == "local":
        os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
        os.environ.setdefault("RAY_worker_niceness", "0")
        cores = len(machine.usable_cores())
        here = get_device("this-cpu").base
        given |= {"num_cpus": cores, "resources": {f"device:{here}": cores}, "include_dashboard": False}
    else:
        host, _, port = address.rpartition(":")
        if not host or not port.isdecimal():
            raise ProfilerError(f"--ray takes HOST:PORT of a cluster's head, or local; got {address!r}")
        try:
            with socket.create_connection((host, int(port)), _ANSWER_S) as connection:
                # Ray would wait for minutes for an answer. What speaks gRPC answers this with its own settings.
                connection.sendall(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + _SETTINGS)
                if "RAY_USE_TLS" not in os.environ and connection.recv(9)[3:4] != _SETTINGS[3:4]:
                    raise OSError("something else does")
        except OSError as err:
            raise ProfilerError(f"no Ray cluster answers at {address}: {reason(err)}") from err
    main = threading.current_thread() is threading.main_thread()
    handler = signal.getsignal(signal.SIGTERM) if main else None
    try:
        ray.init(**given)
    except Exception as err:  # a RuntimeError, a ConnectionError, or one of Ray's own
        raise ProfilerError(f"cannot join the Ray cluster at {address}: {reason(err)[:500]}") from err
    finally:
        if handler is not None:
            signal.signal(signal.SIGTERM, handler)


def _nodes(asked: str) -> list[Node]:
    """What all nodes say; ProfilerError for one that does not."""
    import ray

    alive = [node for node in ray.nodes() if node["Alive"]]
    task = ray.remote(_facts)
    answers = {
        node["NodeID"]: task.options(num_cpus=0, label_selector={"ray.io/node-id": node["NodeID"]}).remote(asked)
        for node in alive
    }
    found = []
    for node in alive:
        named, held = node["NodeName"] != node["NodeManagerAddress"], node["Resources"]
        name = node["NodeName"] if named else node["NodeManagerHostname"]
        claims = {r.removeprefix("device:"): n for r, n in held.items() if r.startswith("device:")}
        try:
            facts = ray.get(answers[node["NodeID"]], timeout=_PROBE_S)
        except ray.exceptions.RayError as err:
            cause = getattr(err, "cause", None) or err
            raise ProfilerError(f"node {name} cannot run cdmpp: {_first_line(cause)}") from err
        found.append(Node(node["NodeID"], name, held.get("CPU", 0.0), claims, **facts))
    return found


def _checked(nodes: Sequence[Node], asked: str) -> list[Node]:
    """The nodes to use: those of the architecture of the ones that have the device asked for, if any."""
    first, here = nodes[0], _versions()
    for node in nodes:
        for package in {**here, **node.versions}:
            mine, other = here.get(package), node.versions.get(package)
            if mine != other:
                raise ProfilerError(
                    f"node {node.name} has {package} {other or 'not installed'}, this machine {mine or 'not'}: "
                    "programs are the same only where versions are"
                )
    if not asked:
        return [node for node in nodes if node.arch == first.arch]
    base = next((node.device.base for node in nodes if node.device is not None), asked.partition("@")[0])
    claiming = [node for node in nodes if base in node.claims]
    for node in claiming:
        if node.device is None:
            raise ProfilerError(f"node {node.name} claims to have device:{base}, and is {node.here}")
        share, cores = node.device.share, node.claims[base]
        if cores < share:
            raise ProfilerError(
                f"node {node.name} has {cores:g} cores for measuring, {node.device.name} needs {share:g}"
            )
        model = claiming[0]
        assert model.device is not None
        if differences := model.device.differences(node.device):
            raise ProfilerError(
                f"nodes {model.name} and {node.name} both claim to have device:{base}, and differ in "
                f"{', '.join(differences)}: name one of them otherwise"
            )
    if not claiming:
        there = sorted({f"device:{claim}" for node in nodes for claim in node.claims}) or ["none"]
        raise ProfilerError(
            f"no node has the resource device:{base}; of this kind the cluster has {', '.join(there)} "
            "(cdmpp devices --measuring-cores N gives the command that starts a node)"
        )
    return [
        replace(node, device=node.device if node in claiming else None)
        for node in nodes
        if node.arch == claiming[0].arch
    ]
