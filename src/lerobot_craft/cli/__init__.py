"""The command `craft`: finds the verb and passes it the remaining arguments unchanged.

Only the standard library is imported here, and a verb's module only if that verb runs, so that `craft --help` answers
before torch loads. The top level parses no verb's flags, because some verbs use draccus, which has its own grammar.

A new verb is one line in `VERBS` and one file `cli/<verb>.py` with `run(argv) -> exit code`.
Errors name settings; a verb whose flags have other names than `--setting` says so (`flags.spelled`).

Exit codes: 0 success; 1 the verb ran and the answer is no; 2 wrong command line or input. As a shell reports signals:
130 interrupted; 143 a training saved and stopped on SIGTERM; 141 the reader of our output closed the pipe.
"""

import difflib
import importlib
import os
import select
import sys
from collections.abc import Sequence
from typing import NamedTuple

from lerobot_craft import __version__
from lerobot_craft.errors import CraftError
from lerobot_craft.lerobot_api import quiet_video

INTERRUPTED = 130
READER_LEFT = 141


class Verb(NamedTuple):
    """The module of a verb's `run`, and its line in `craft --help`."""

    module: str
    summary: str


VERBS = {
    "cache": Verb("lerobot_craft.cli.cache", "keep what the teacher makes of chosen inputs: build, info, verify"),
    "remember": Verb("lerobot_craft.cli.remember", "put frames of tasks that a policy can do into its checkpoint"),
    "train": Verb("lerobot_craft.cli.train", "fine-tune as lerobot-train does, and keep what the policy could do"),
    "eval": Verb("lerobot_craft.cli.eval", "success of checkpoints on tasks, as a matrix with intervals"),
    "listen": Verb(
        "lerobot_craft.cli.listen", "does the policy still tell its instructions apart? no simulator needed"
    ),
    "demo": Verb("lerobot_craft.cli.demo", "forgetting and its cure in a simulator, end to end, while you wait"),
    "bench": Verb("lerobot_craft.cli.bench", "compare methods in simulation: what each keeps, learns and costs"),
    "report": Verb("lerobot_craft.cli.report", "turn results into one HTML page to look at and to send"),
    "doctor": Verb("lerobot_craft.cli.doctor", "say whether this machine is ready, and what to type if it is not"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run `craft` on `argv` (None: the process's arguments) and return the exit code."""
    try:
        try:
            return _dispatch(list(sys.argv[1:] if argv is None else argv))
        finally:
            # Here, because a closed pipe cannot be caught at interpreter exit.
            sys.stdout.flush()
    except CraftError as error:
        print(f"craft: {error.told('--{}'.format)}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        if not _reader_left():
            raise  # another pipe broke, such as a data worker's: a real fault, so keep the traceback
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return READER_LEFT


def _dispatch(argv: list[str]) -> int:
    if not argv:
        # A line without a verb is incomplete: a script must not see success.
        print(_help(), file=sys.stderr)
        return 2
    name, *rest = argv
    if name in ("-h", "--help"):
        print(_help())
        return 0
    if name == "--version":
        print(f"craft {__version__}")
        return 0
    if name not in VERBS:
        raise CraftError(_unknown(name))
    quiet_video()  # for every verb: opening a dataset would otherwise print pages of log
    exit_code: int = importlib.import_module(VERBS[name].module).run(rest)
    return exit_code


def _help() -> str:
    width = max(map(len, VERBS))
    verbs = "\n".join(f"  {name:<{width}}  {verb.summary}" for name, verb in VERBS.items())
    return f"""usage: craft VERB [options]

Constrained retention fine-tuning: teach a LeRobot policy a new task without losing the old ones.

verbs:
{verbs}

options:
  -h, --help  show this and exit; `craft VERB --help` shows the options of a verb
  --version   show the version and exit"""


def _unknown(name: str) -> str:
    kind, known, dashes = ("option", ("help", "version"), "--") if name.startswith("-") else ("verb", VERBS, "")
    near = difflib.get_close_matches(name.lstrip("-"), known, n=1)  # dashes would make all options similar
    advice = f"did you mean `craft {dashes}{near[0]}`?" if near else "`craft --help` lists what there is."
    return f"unknown {kind} {name!r}: {advice}"


def _reader_left() -> bool:
    """Whether the reader of standard output has closed it (`craft doctor | head -1`)."""
    if not hasattr(select, "poll"):
        return True  # Windows cannot poll pipes
    poller = select.poll()
    poller.register(sys.stdout.fileno(), 0)
    return any(event & select.POLLERR for _, event in poller.poll(0))
