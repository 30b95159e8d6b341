"""`craft` in processes of their own that need not import lerobot first: each is a fork of one that did.

Importing lerobot takes far longer than a short run. A fork is a process like any other: it can be killed, limited and
waited for. Run as a module this is the process that forks; `WarmProcess` is its other end.
"""

import atexit
import contextlib
import functools
import gc
import importlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
import warnings
from pathlib import Path

import pytest
from draccus.wrappers import docstring

from lerobot_craft.errors import CraftError

ROOT = Path(__file__).parents[1]  # where `tests` is imported from
_GRACE_S = 5.0  # for ranks whose peer has failed, to say what they have to say
# Whenever flags are parsed, draccus looks for the help of each in the sources: most of that time, and always the same.
docstring.get_attribute_docstring = functools.cache(docstring.get_attribute_docstring)
OFFLINE = {"HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}


def environment(**changes: str) -> dict[str, str]:
    """For a command that must find the package `tests`, and no network."""
    search = os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")]))
    return {**os.environ, **OFFLINE, "PYTHONPATH": search, **changes}


class Command:
    """A `craft` that runs; `log` gets everything that it says."""

    def __init__(self, pid: int, log: Path) -> None:
        self.pid, self.log = pid, log
        self.exit_code = None  # negative: the signal that ended it

    def poll(self):
        """The exit code, or None while it runs."""
        if self.exit_code is None and (found := _exit_file(self.log)).exists():
            self.exit_code = int(found.read_text())
        return self.exit_code

    def wait(self):
        while self.poll() is None:
            time.sleep(0.002)
        return self.exit_code

    def send_signal(self, number: int) -> None:
        """To it and to what it started, as a terminal does."""
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):  # it ended just now
                os.killpg(self.pid, number)


def rank_log(log: Path, rank: int) -> Path:
    """What a rank says."""
    return log.with_name(f"{log.name}.{rank}") if rank else log


def free_port() -> int:
    """A port of this machine that nobody listens at."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _first_failure(commands: list[Command]) -> int:
    """The first exit code that is not 0, or 0. As torchrun does, end the others when one has failed."""
    failed, until = 0, None
    while left := [command for command in commands if command.poll() is None]:
        if until is not None and time.monotonic() > until:
            for command in left:
                command.send_signal(signal.SIGKILL)
        for command in commands:
            if command.exit_code and not failed:
                failed, until = command.exit_code, time.monotonic() + _GRACE_S
        time.sleep(0.002)
    return failed or next((command.exit_code for command in commands if command.exit_code), 0)


class WarmProcess:
    """Has imported lerobot, and runs commands, also several at a time."""

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
        prepare: tuple[str, ...] = (),
        variables: dict[str, str] | None = None,
    ) -> Command:
        """Start `craft ARGV`.

        Args:
            argv: After `craft`.
            log: Gets what it prints; each command has its own.
            largest_file: No file may grow beyond so many bytes (`ulimit -f`).
            prepare: `module:function` that the process calls first, and its arguments: how a fault gets in.
            variables: Of the environment.
        """
        _exit_file(log).unlink(missing_ok=True)
        request = {
            "argv": argv,
            "log": str(log),
            "largest_file": largest_file,
            "prepare": prepare,
            "variables": variables or {},
        }
        self._process.stdin.write(json.dumps(request) + "\n")
        return Command(int(self._process.stdout.readline()), log)

    def run(
        self, argv: list[str], log: Path, ranks: int = 1, variables: dict[str, str] | None = None, **options
    ) -> int:
        """Start a command and wait for its exit code; of several ranks, the first that is not 0.

        Ranks find each other as those of torchrun do. All but the first say what they say into `rank_log`.
        """
        if ranks == 1:
            return self.start(argv, log, variables=variables, **options).wait()
        return _first_failure(self.start_ranks(argv, log, ranks, variables, **options))

    def start_ranks(
        self, argv: list[str], log: Path, ranks: int, variables: dict[str, str] | None = None, **options
    ) -> list[Command]:
        """Start all ranks of a command."""
        world = {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
        meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
        started = []
        for rank in range(ranks):
            own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
            known = {**(variables or {}), **world, **meeting, **own}
            started.append(self.start(argv, rank_log(log, rank), variables=known, **options))
        return started

    def close(self) -> None:
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


def _exit_file(log: Path) -> Path:
    return log.with_name(f"{log.name}.exit")


@pytest.fixture(scope="session")
def warm_process(tmp_path_factory):
    """Runs `craft` in processes of their own, without the wait for lerobot's import."""
    process = WarmProcess(CRAFT_HOME=str(tmp_path_factory.mktemp("craft_home")))
    yield process
    process.close()


def _run(argv: list[str], log: str, largest_file: int | None, prepare: list, variables: dict[str, str]) -> int:
    import resource

    from lerobot_craft.cli import main

    os.setsid()
    os.environ |= variables
    signal.signal(signal.SIGINT, signal.default_int_handler)
    output = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    os.dup2(output, 1)
    os.dup2(output, 2)
    if largest_file is not None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, largest_file))
    sys.argv = ["craft", *argv]
    if prepare:
        module, _, function = prepare[0].partition(":")
        getattr(importlib.import_module(module), function)(*prepare[1:])
    return main(argv)


def _say(number: int) -> None:
    sys.stdout.write(f"{number}\n")
    sys.stdout.flush()


def _serve() -> int:
    """Forks for each line of standard input; in a fork it returns the command's exit code."""
    import lerobot.policies.smolvla.modeling_smolvla
    import lerobot.scripts.lerobot_train  # noqa: F401

    import lerobot_craft.tiny.pi
    import lerobot_craft.training.run  # noqa: F401
    from lerobot_craft.lerobot_api.train_config import parse_train_config

    with contextlib.suppress(CraftError):  # it says what is missing, and has read the help of every flag
        parse_train_config(["--policy.type=smolvla"])
    warnings.filterwarnings("ignore", message=".*fork", category=DeprecationWarning)  # an allocator's thread: it can
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in pytest closes our input: that ends this process
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for those that watch
    gc.freeze()  # what is here already needs no look in every fork
    for line in sys.stdin:
        if os.fork():
            continue
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        command = os.fork()
        if command == 0:
            return _run(**json.loads(line))
        _watch(command, Path(json.loads(line)["log"]))
    return 0


def _watch(command: int, log: Path) -> None:
    """Say the command's number, and leave its exit code beside its log: in a process for each, so that many can run."""
    _say(command)
    code = os.waitstatus_to_exitcode(os.waitpid(command, 0)[1])
    written = log.with_name(f"{log.name}.exit.tmp")
    written.write_text(str(code))
    written.replace(_exit_file(log))
    os._exit(0)


def _leave(exit_code: int) -> None:
    """As `sys.exit`, without taking apart every module of lerobot: that takes longer than a short command."""
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


if __name__ == "__main__":
    _leave(_serve())
