"""Everything the checks take from outside, in one value that a test can change."""

import os
import platform
import shutil
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

_TOOLS = ("apt-get", "nvidia-smi")


@dataclass(frozen=True)
class Surroundings:
    """The machine as the checks see it.

    Attributes:
        env: the environment variables.
        system: `Linux`, `Darwin` or `Windows`.
        machine: the processor's architecture.
        python: the interpreter's version.
        is_root: whether system packages can be installed without sudo.
        tools: which of the programs the checks ask about are on the PATH.
        here: the current directory, where outputs go by default.
        home: the user's home, the default place of every cache.
    """

    env: Mapping[str, str]
    system: str
    machine: str
    python: tuple[int, int, int]
    is_root: bool
    tools: frozenset[str]
    here: Path
    home: Path

    @classmethod
    def observe(cls) -> "Surroundings":
        """This process's own surroundings."""
        return cls(
            env=dict(os.environ),
            system=platform.system(),
            machine=platform.machine(),
            python=sys.version_info[:3],
            is_root=hasattr(os, "geteuid") and os.geteuid() == 0,
            tools=frozenset(tool for tool in _TOOLS if shutil.which(tool)),
            here=Path.cwd(),
            home=Path.home(),
        )

    def install_line(self, apt: str, elsewhere: str) -> str:
        """The line that installs system packages here, or a sentence where the package manager is unknown."""
        if "apt-get" in self.tools:
            apt_get = "apt-get" if self.is_root else "sudo apt-get"
            return f"{apt_get} update && {apt_get} install -y {apt}"  # containers come without package lists
        if self.system == "Darwin":
            return f"brew install {elsewhere}"
        return f"install {elsewhere} with this system's package manager"

    def shorten(self, path: Path) -> str:
        """The path with the home directory as `~`, so that a pasted report does not tell the user's name."""
        return str("~" / path.relative_to(self.home)) if path.is_relative_to(self.home) else str(path)
