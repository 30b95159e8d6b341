"""`craft` in processes of their own that need not import lerobot first: each is a fork of one that did.

Importing lerobot takes far longer than a short run. A fork is a process like any other: it can be killed, limited and
waited for. Run as a module this is the process that forks; `WarmProcess` is its other end.
"""

import json
import os
import select
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]  # where `tests` is imported from
_GRACE_S = 5.0  # for ranks whose peer has failed, to say what they have to say
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def environment(**changes: str) -> dict[str, str]:
    """For a command that must find the package `tests`, and no network."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **OFFLINE, "PYTHONPATH": search, **changes}


class Command:
    """A `craft` that runs; `log` gets everything that it says."""

    def __init__(self, parent: subprocess.Popen, log: Path) -> None:
        self._parent, self.log = parent, log
        self.pid = int(parent.stdout.readline())
        self.exit_code = None  # negative: the signal that ended it

    def poll(self):
        """The exit code, or None while it runs."""
        if self.exit_code is None and select.select([self._parent.stdout], [], [], 0)[0]:
            self.exit_code = int(self._parent.stdout.readline())
        return self.exit_code

    def wait(self):
        while self.poll() is None:
            time.sleep(0.002)
        return self.exit_code

    def send_signal(self, number: int) -> None:
        """To it and to what it started, as a terminal does."""
        if self.poll() is None:
            os.killpg(self.pid, number)


class WarmProcess:
    """Has imported lerobot, and runs one command at a time."""

    def __init__(self, **changes: str) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-m", "tests.warm_process"],
            env=environment(**changes),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            bufsize=1,
        )

    def start(
        self,
        argv: list[str],
        log: Path,
        largest_file: int | None = None,
        ranks: int = 1,
        env: dict[str, str] | None = None,
    ) -> Command:
        """Start `craft ARGV`; no file may grow beyond `largest_file` bytes (`ulimit -f`).

        With several `ranks` there are as many processes, which find each other as those of torchrun do. The others
        say what they say into files beside `log`: `rank_log`.
        """
        order = {"argv": argv, "log": str(log), "largest_file": largest_file, "ranks": ranks, "env": env or {}}
        json.dump(order, self._process.stdin)
        self._process.stdin.write("\n")
        return Command(self._process, log)

    def run(self, argv: list[str], log: Path, **options) -> int:
        """Start a command and wait for its exit code; of several ranks, the first that is not 0."""
        return self.start(argv, log, **options).wait()

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory):
    """Runs `craft` in processes of their own, without the wait for lerobot's import."""
    process = WarmProcess(CRAFT_HOME=str(tmp_path_factory.mktemp("craft_home")))
    yield process
    process.close()


def rank_log(log: Path, rank: int) -> Path:
    """What a rank says."""
    return log.with_name(f"{log.name}.{rank}") if rank else log


def _run(argv: list[str], log: str, largest_file: int | None, env: dict[str, str]) -> int:
    import resource

    from lerobot_craft.cli import main

    os.environ.update(env)
    os.setsid()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["craft", *argv]
    return main(argv)


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _serve() -> int:
    """Forks for each line of standard input; in a fork it returns the command's exit code."""
    import lerobot.policies.smolvla.modeling_smolvla
    import lerobot.scripts.lerobot_train  # noqa: F401

    import lerobot_craft.tiny.modeling_pi0_fast_tiny
    import lerobot_craft.training.run  # noqa: F401

    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # an allocator's thread: it can
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in pytest closes our input: that ends this process
    for line in sys.stdin:
        order = json.loads(line)
        ranks, log, env = order.pop("ranks"), Path(order.pop("log")), order.pop("env")
        meeting = _meeting(ranks) if ranks > 1 else {}
        children = []
        for rank in range(ranks):
            child = os.fork()
            if child == 0:
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)} if ranks > 1 else {}
                return _run(**order, log=str(rank_log(log, rank)), env={**env, **meeting, **own})
            children.append(child)
        _say(children[0])
        _say(_wait_for(children))
    return 0


def _meeting(ranks: int) -> dict[str, str]:
    """What torchrun tells its processes, but for their own numbers."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    return {**world, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def _wait_for(children: list[int]) -> int:
    """The first exit code that is not 0, or 0. As torchrun does, end the others when one has failed."""
    left, failed, until = set(children), 0, None
    while left:
        if until is not None and time.monotonic() > until:
            for child in left:
                os.kill(child, signal.SIGKILL)
        for child in sorted(left):
            pid, status = os.waitpid(child, os.WNOHANG)
            if pid == 0:
                continue
            left.remove(child)
            code = os.waitstatus_to_exitcode(status)
            if code != 0 and failed == 0:
                failed, until = code, time.monotonic() + _GRACE_S
        time.sleep(0.002)
    return failed


if __name__ == "__main__":
    sys.exit(_serve())
