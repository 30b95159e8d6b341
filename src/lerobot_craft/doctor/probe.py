"""Trying something in a child process: it may abort, hang or be killed, and the doctor still answers.

A probe is a script in `probes/`. It writes one marked JSON line per topic as soon as it knows it, so what was
found before a crash is kept; every other line on its output is a library talking and is ignored.
"""

import json
import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

MARK = "craft-probe "
_PROBES = Path(__file__).parent / "probes"
_REASON_LENGTH = 160


@dataclass(frozen=True)
class ProbeReport:
    """What a probe told, by topic, and how it ended if not by itself.

    A topic is a mapping: the findings, or `error` (one line) and `kind` (the exception's class name).
    """

    topics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    died: str | None = None

    def topic(self, name: str) -> Mapping[str, Any]:
        """The findings on one topic; if the probe died before it came to it, that is the error."""
        return self.topics.get(name, {"error": self.died or "the probe said nothing", "kind": "ProbeDied"})


class Probe:
    """A running probe. Leaving the context kills it if it still runs: Ctrl-C must not leave a child behind."""

    def __init__(self, script: str, *arguments: str, env: Mapping[str, str], timeout_s: float) -> None:
        # -P: neither the current directory nor probes/ may shadow a library. The interpreter is our own.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", str(_PROBES / script), *arguments],
            env=env,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            errors="replace",
        )
        self._timeout_s = timeout_s
        self._deadline = time.monotonic() + timeout_s

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._process.kill()
        self._process.communicate()

    def report(self) -> ProbeReport:
        """Wait for the probe, at most until its deadline, and read what it found."""
        try:
            out, err = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, _ = self._process.communicate()
            return ProbeReport(_read_topics(out), f"gave no answer within {self._timeout_s:g} s")
        return ProbeReport(_read_topics(out), _how_it_died(self._process.returncode, err))


def _read_topics(out: str) -> dict[str, Mapping[str, Any]]:
    lines = [line.removeprefix(MARK) for line in out.splitlines() if line.startswith(MARK)]
    return {topic: finding for line in lines for topic, finding in json.loads(line).items()}


def _how_it_died(returncode: int, err: str) -> str | None:
    if returncode == 0:
        return None
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return one_line(err.strip().rpartition("\n")[2]) or f"ended with exit code {returncode}"


def one_line(text: str) -> str:
    """The first line of an error, short enough for the report."""
    first = text.strip().partition("\n")[0].strip()
    return first if len(first) <= _REASON_LENGTH else f"{first[: _REASON_LENGTH - 3]}..."
