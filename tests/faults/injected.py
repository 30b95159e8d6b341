"""Faults that a process brings upon itself, at the same place in every run: for `WarmProcess.start(prepare=)`.

Each function is called in the process of the command, before `craft` itself.
"""

import atexit
import ctypes
import os
import signal
import socket
import sys
import time
from pathlib import Path

# What Python tells its audit hooks of the file system. Bytes that are written are not among it: see `kill_in_line`.
_OPERATIONS = {"os.mkdir", "os.remove", "os.rename", "os.rmdir", "os.symlink", "os.truncate"}
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
_LOOKUPS = {"socket.getaddrinfo", "socket.gethostbyname"}
_CALLS = {"socket.connect", "socket.sendto", "socket.sendmsg"}
_LINES = ("metrics.jsonl", "lambda_history.csv")


def kill_before_operation(directory: str, number: int) -> None:
    """SIGKILL before the n-th operation (from 0) that changes something in `directory`."""
    left = number

    def count(event: str, arguments: tuple) -> None:
        nonlocal left
        if _changes(event, arguments, directory):
            if left == 0:
                die()
            left -= 1

    sys.addaudithook(count)


def count_operations(directory: str, report: str) -> None:
    """Leave in the file `report` how many operations `kill_before_operation` can choose from."""
    seen = 0

    def count(event: str, arguments: tuple) -> None:
        nonlocal seen
        seen += _changes(event, arguments, directory)

    sys.addaudithook(count)
    atexit.register(lambda: Path(report).write_text(str(seen)))


def kill_before_link(number: int) -> None:
    """SIGKILL before the n-th link (from 1) is made: a checkpoint has its name, and `last` is on the one before."""
    left = number

    def count(event: str, _: tuple) -> None:
        nonlocal left
        if event == "os.symlink":
            left -= 1
            if left == 0:
                die()

    sys.addaudithook(count)


def kill_around_step(step: int, after: bool) -> None:
    """SIGKILL right before or right after the optimizer's n-th step (from 1) of this process."""
    from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

    left = step

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            die()

    (register_optimizer_step_post_hook if after else register_optimizer_step_pre_hook)(count)


def signal_in_forward(number: int, call: int) -> None:
    """A signal to this process in the policy's n-th forward pass (from 1) on samples of the new task."""
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    calls, forward = 0, SmolVLAPolicy.forward

    def counted(self, *arguments, **options):
        nonlocal calls
        calls += 1
        if calls == call:
            os.kill(os.getpid(), number)
        return forward(self, *arguments, **options)

    SmolVLAPolicy.forward = counted


def kill_in_line(number: int) -> None:
    """SIGKILL in the middle of the n-th line (from 0) of the files of numbers: half of it is on the disk."""
    write, left = os.write, number

    def half(descriptor: int, data: bytes) -> int:
        nonlocal left
        if Path(f"/proc/self/fd/{descriptor}").resolve().name in _LINES:
            if left == 0:
                write(descriptor, bytes(data)[: len(data) // 2])
                die()
            left -= 1
        return write(descriptor, data)

    os.write = half


def not_finite(where: str, value: str, call: int) -> None:
    """Multiply the n-th (from 1) task loss, drift of anchors or gradient of a tensor by `value`: nan or inf."""
    from lerobot.policies.smolvla.modeling_smolvla import SmolVLAPolicy

    from lerobot_craft.training.methods import constrained

    calls, factor = 0, float(value)
    forward, drift = SmolVLAPolicy.forward, constrained.student_drift

    def is_due() -> bool:
        nonlocal calls
        calls += 1
        return calls == call

    def poisoned_forward(self, *arguments, **options):
        loss, rest = forward(self, *arguments, **options)
        if is_due():
            if where == "task loss":
                return loss * factor, rest
            trained = next(parameter for parameter in self.parameters() if parameter.requires_grad)
            hook = trained.register_hook(lambda gradient: (hook.remove(), gradient * factor)[1])
        return loss, rest

    def poisoned_drift(*arguments, **options):
        found = drift(*arguments, **options)
        return found * factor if is_due() else found

    if where == "retention loss":
        constrained.student_drift = poisoned_drift
    else:
        SmolVLAPolicy.forward = poisoned_forward


def raise_around_step(step: int) -> None:
    """An error of the program itself, right before the optimizer's n-th step (from 1)."""
    from torch.optim.optimizer import register_optimizer_step_pre_hook

    left = step

    def count(*_: object) -> None:
        nonlocal left
        left -= 1
        if left == 0:
            raise RuntimeError("a fault of this rank alone")

    register_optimizer_step_pre_hook(count)


def clock_goes_back(by: float) -> None:
    """Every look at the clock finds it earlier than the one before, and the first one `by` seconds before the truth."""
    shown = time.time() - by

    def earlier() -> float:
        nonlocal shown
        shown -= 10
        return shown

    time.time = earlier
    time.time_ns = lambda: int(earlier() * 1e9)


def no_internet(report: str) -> None:
    """Looking up and calling another machine raise; `report` gets a line for each try: a caught error is seen too.

    A socket alone calls nobody: urllib3 opens one when it is imported, to learn whether the machine knows IPv6.
    As if nobody had set HF_HUB_OFFLINE, which the tests set for everything else.
    """
    import huggingface_hub.constants

    huggingface_hub.constants.HF_HUB_OFFLINE = False

    def refuse(event: str, arguments: tuple) -> None:
        if event in _LOOKUPS or (event in _CALLS and arguments[0].family != socket.AF_UNIX):
            with Path(report).open("a") as file:
                file.write(f"{event} {arguments[1:]}\n")
            raise OSError(f"{event}: there is no internet here")

    sys.addaudithook(refuse)


def mount_read_only(directory: str) -> None:
    """From here on, and for this process alone, nothing below `directory` can be written; needs no privileges."""
    user = os.getuid()
    os.unshare(os.CLONE_NEWUSER | os.CLONE_NEWNS)
    Path("/proc/self/setgroups").write_text("deny")
    Path("/proc/self/uid_map").write_text(f"0 {user} 1")
    libc = ctypes.CDLL(None, use_errno=True)
    here, read_only, remount, bind, recursive, private = directory.encode(), 1, 32, 4096, 16384, 1 << 18
    for source, target, flags in (
        (b"none", b"/", recursive | private),
        (here, here, bind),
        (here, here, bind | remount | read_only),
    ):
        if libc.mount(source, target, None, flags, None):
            raise OSError(ctypes.get_errno(), "mount")


def slow_save(seconds: float) -> None:
    """Every checkpoint takes so long, and says that it began."""
    from lerobot_craft.training import loop

    def save(*_: object, **__: object) -> None:
        print("saving slowly", flush=True)
        time.sleep(seconds)

    loop.save = save


def die() -> None:
    """What no process survives, and of which it is not told."""
    os.kill(os.getpid(), signal.SIGKILL)


def _changes(event: str, arguments: tuple, directory: str) -> bool:
    writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & _WRITES
    if not writes and event not in _OPERATIONS:
        return False
    return any(isinstance(path, str | os.PathLike) and os.fspath(path).startswith(directory) for path in arguments)
