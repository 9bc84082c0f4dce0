"""Eight simulated devices for every test and example of this package, and faster compilation.

Tests and the processes that they start see no GPU, unless they are marked ``gpu``. A run of tests fails if it leaves
processes, listening ports, network namespaces, shared memory, temporary folders or the logs of jobs behind.
"""

import contextlib
import gc
import multiprocessing.forkserver
import multiprocessing.util
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from pathlib import Path

# LLVM optimises less; XLA's operations, collectives and memory stay the same. Tests compile thousands of programs, each
# of which runs for a moment.
_PINNED = {"JAX_PLATFORMS": "cpu", "CUDA_VISIBLE_DEVICES": "", "JAX_DISABLE_MOST_OPTIMIZATIONS": "true"}
_GIVEN = {name: os.environ.get(name) for name in _PINNED}
os.environ.update(_PINNED)  # before JAX is imported

import jax  # noqa: E402
import numpy as np  # noqa: E402
import pytest  # noqa: E402

from jaxddp.mesh import simulate_devices  # noqa: E402

# One module of LLVM for each program, not one for each of 32 threads: a fifth less time of processors.
_FLAGS = "--xla_cpu_parallel_codegen_split_count=1"
if jax.__version_info__ < (0, 11):
    # XLA's older code generator for CPUs compiles in half the time; later versions have dropped the flag.
    _FLAGS += " --xla_cpu_use_fusion_emitters=false"
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {_FLAGS}".strip()
gc.set_threshold(100_000, 20, 100)  # traces make many objects and few cycles
simulate_devices(8)
# A shell makes its background jobs ignore Ctrl-C, nohup a hang-up, and so does all that they start; tests send both.
for number, handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, signal.SIG_DFL)):
    if signal.getsignal(number) is signal.SIG_IGN:
        signal.signal(number, handler)


@pytest.hookimpl(tryfirst=True)  # before xdist starts its processes
def pytest_cmdline_main(config):
    """Tests of GPUs run in one process, so that nothing runs beside what they time."""
    if "gpu" in config.option.markexpr and "not gpu" not in config.option.markexpr:
        config.option.numprocesses, config.option.dist = 0, "no"


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """File by file, but what runs ranks of torch in one process: eight ranks there import torch for half a minute."""
    from xdist.scheduler import LoadFileScheduling

    class ByFile(LoadFileScheduling):
        def _split_scope(self, nodeid):
            return "ranks" if nodeid.startswith(("torchref/", "parity_tests/")) else super()._split_scope(nodeid)

    is_default = config.option.dist == "loadfile" and "not full" in config.option.markexpr
    return ByFile(config, log) if is_default else None


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Gives the GPUs back to tests of them, without preallocation: both frameworks' processes use them in turn."""
    with pytest.MonkeyPatch.context() as patch:
        if item.get_closest_marker("gpu") is not None:
            for name, value in (_GIVEN | {"XLA_PYTHON_CLIENT_PREALLOCATE": "false"}).items():
                patch.delenv(name, raising=False) if value is None else patch.setenv(name, value)
        return (yield)


@pytest.fixture
def optimized():
    """Machine code as users get it, for tests of its speed or vectorisation."""
    jax.config.update("jax_disable_most_optimizations", False)
    yield
    jax.config.update("jax_disable_most_optimizations", True)


@pytest.fixture
def x64():
    """For files and tests that compute in float64, where only the order of sums differs."""
    with jax.enable_x64(True):
        yield


@pytest.fixture(scope="session")
def model():
    """Loss, parameters and a batch of the tiny transformer: 24 sequences of 16 tokens."""
    from jaxddp.models import build

    tokens = np.random.default_rng(0).integers(0, 64, (24, 17), dtype=np.int32)
    return *build("tiny"), {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


# What a run of tests leaves behind

_SESSION = "JAXDDP_TEST_SESSION"  # in the environment of every process of a run, whoever its parent becomes
_ENDING_S = 5.0  # for what is still ending
_STAY = ("multiprocessing.resource_tracker", "munged")  # the latter is the machine's, for SLURM
_FOLDERS = ("jaxddp-*", "torchref-*", "torchelastic_*")


def pytest_configure(config):
    if not config.pluginmanager.has_plugin("leftovers"):  # several packages have this hook
        config.pluginmanager.register(Leftovers(config), "leftovers")
        config.pluginmanager.register(Samples(), "samples")
        # Many tests compile the same programs. Each process has a folder of its own: files are not written at once.
        jax.config.update("jax_compilation_cache_dir", tempfile.mkdtemp(prefix="compiled-"))
        jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)


class Samples:
    """Of a test with the mark ``sample``, leaves the cases to ``-m full`` whose every value has met an earlier one."""

    @pytest.hookimpl(tryfirst=True)  # before pytest selects by marks
    def pytest_collection_modifyitems(self, items):
        met = set()
        for item in items:
            if item.get_closest_marker("sample") is not None:
                test = item.nodeid.partition("[")[0]
                values = {(test, name, repr(value)) for name, value in item.callspec.params.items()}
                if values <= met:
                    item.add_marker(pytest.mark.full)
                met |= values


class Leftovers:
    """Looks for what tests left, at the end of a run; the processes of xdist look at their own ports."""

    def __init__(self, config):
        self.is_worker, self.found = hasattr(config, "workerinput"), []
        if self.is_worker:
            return
        self.namespaces, self.shared_memory = _names("/run/netns"), _names("/dev/shm")
        self.logs = _logs_of_jobs()
        os.environ.setdefault("PYTEST_DEBUG_TEMPROOT", tempfile.gettempdir())  # what pytest keeps stays where it was
        self.folder = Path(tempfile.mkdtemp(prefix="tests-of-jaxddp-"))
        os.environ |= {_SESSION: str(os.getpid()), "TMPDIR": str(self.folder)}
        os.environ["HYPOTHESIS_STORAGE_DIRECTORY"] = str(self.folder / "hypothesis")
        tempfile.tempdir = None  # is read again
        # With what multiprocessing keeps there up to its own end.
        multiprocessing.util.Finalize(None, shutil.rmtree, (self.folder, True), exitpriority=-200)

    @pytest.hookimpl(trylast=True)  # after xdist's processes have ended
    def pytest_sessionfinish(self, session):
        launch = sys.modules.get("torchref.launch")
        if launch is not None and launch.shared_pool.cache_info().currsize:
            launch.shared_pool().close()  # it would end with the interpreter
            multiprocessing.forkserver._forkserver._stop()  # so would this
        deadline = time.monotonic() + _ENDING_S
        while (found := self.look()) and time.monotonic() < deadline:
            time.sleep(0.2)
        if self.is_worker:
            session.config.workeroutput["leftovers"] = found
            return
        self.found += found
        if self.found and session.exitstatus in (0, 5):
            session.exitstatus = 1
        for pid in _processes():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    @pytest.hookimpl(optionalhook=True)
    def pytest_testnodedown(self, node):
        self.found += getattr(node, "workeroutput", {}).get("leftovers", [])

    def pytest_terminal_summary(self, terminalreporter):
        if self.found:
            terminalreporter.write_line(f"ERROR: tests left behind: {'; '.join(self.found)}", red=True)

    def look(self):
        ports = [f"listening port {port}" for port in _listening_ports()]
        if self.is_worker:
            return ports
        folders = [path.name for pattern in _FOLDERS for path in self.folder.glob(pattern)]
        namespaces = [name for name in _names("/run/netns") - self.namespaces if _is_abandoned(name)]
        shared_memory = _names("/dev/shm") - self.shared_memory
        shared_memory -= _mapped(shared_memory) if shared_memory else set()
        return [
            *ports,
            *(f"process {pid} ({command})" for pid, command in _processes().items()),
            *(f"temporary folder {name}" for name in folders),
            *(f"network namespace {name}" for name in namespaces),
            *(f"/dev/shm/{name}" for name in shared_memory),
            *map(str, _logs_of_jobs() - self.logs),
        ]


def _names(folder):
    return set(os.listdir(folder)) if os.path.isdir(folder) else set()


def _logs_of_jobs():
    """Folders that jobs without ``--log-dir`` make under the current one."""
    return {*Path("runs").glob("job-*"), *Path("runs").glob("launch")}


def _read(path):
    with contextlib.suppress(OSError):  # a process that has ended
        return path.read_bytes()
    return b""


def _processes():
    """Commands of the processes of this run, by process id, without this one and what stays."""
    this, variable, found = os.getpid(), f"{_SESSION}={os.environ[_SESSION]}".encode(), {}
    for path in Path("/proc").glob("[0-9]*"):
        if variable not in _read(path / "environ").split(b"\0"):
            parent = _read(path / "stat").rpartition(b")")[2].split()[:2]
            if parent[:1] == [b"Z"] or parent[1:] != [str(this).encode()]:  # a child that was forked has no variables
                continue
        command = _read(path / "cmdline").replace(b"\0", b" ").decode(errors="replace").strip()
        if command and int(path.name) != this and not any(one in command for one in _STAY):
            found[int(path.name)] = " ".join(command.split())[:200]
    return found


def _listening_ports():
    """TCP ports at which this process listens."""
    mine = {os.readlink(path) for path in Path("/proc/self/fd").iterdir() if path.is_symlink()}
    tables = [_read(Path("/proc/self/net", name)).decode() for name in ("tcp", "tcp6")]
    rows = [row.split() for table in tables for row in table.splitlines()]
    return sorted(int(row[1].rpartition(":")[2], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in mine)


def _is_abandoned(namespace):
    """Whether a namespace is one of a lab's whose process has ended: labs of other runs have theirs."""
    prefix, _, rest = namespace.partition(".")
    return prefix == "jaxddp-lab" and not os.path.exists(f"/proc/{rest.partition('.')[0]}")


def _mapped(names):
    """Files of /dev/shm that a process has mapped, of another run, as none of this one is left."""
    maps = b"".join(_read(path) for path in Path("/proc").glob("[0-9]*/maps"))
    return {name for name in names if f"/dev/shm/{name}".encode() in maps}


# Damaged files


@contextlib.contextmanager
def soon(name, longest_s, hangs_s=30):
    """Fails if what is done within takes longer, in time of processors, as others may be busy; or if it hangs."""

    def fail(*_):
        raise AssertionError(f"{name} hangs")

    before, start = signal.signal(signal.SIGALRM, fail), time.process_time()
    signal.alarm(hangs_s)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)
    assert time.process_time() - start < longest_s, f"{name} takes long"


# Processes


def free_port(host="127.0.0.1"):
    with socket.create_server((host, 0), family=socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
        return probe.getsockname()[1]


def run_python(code, *arguments, **environment):
    """What a program prints, which must end well."""
    command = [sys.executable, "-c", code, *map(str, arguments)]
    done = subprocess.run(command, env=os.environ | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


def is_alive(pid):
    """Whether a process is there and no zombie."""
    return _read(Path(f"/proc/{pid}/stat")).rpartition(b")")[2].split()[:1] not in ([], [b"Z"])


def wait_for(condition, timeout_s=50.0):
    deadline_s = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline_s, "it did not happen in time"
        time.sleep(0.01)
