"""Checks of video decoding. lerobot takes torchcodec where it loads and pyav otherwise."""

import re
from collections.abc import Mapping
from typing import Any

from lerobot_craft.doctor.check import Check, Status
from lerobot_craft.doctor.probe import one_line
from lerobot_craft.doctor.software import INSTALL, installing
from lerobot_craft.doctor.surroundings import Surroundings


def check_pyav(pyav: Mapping[str, Any], torchcodec: Mapping[str, Any]) -> Check:
    """A video made in memory comes back right through pyav. Without pyav and torchcodec there is no video at all."""
    if "error" not in pyav:
        return Check("pyav", Status.OK, f"{pyav['version']}, encodes and decodes ({pyav['codec']})")
    status = Status.MISSING if "error" in torchcodec else Status.WARN
    if pyav.get("kind") == "ModuleNotFoundError":
        return Check("pyav", status, "not installed: no video can be written", INSTALL)
    remedy = installing("pip install --force-reinstall av CRAFT")
    return Check("pyav", status, f"does not work: {one_line(pyav['error'])}", remedy)


def check_torchcodec(torchcodec: Mapping[str, Any], surroundings: Surroundings) -> Check:
    """The same video through torchcodec, the faster decoder; lerobot does without it."""
    if "error" not in torchcodec:
        value = f"{torchcodec['version']}, decodes with FFmpeg {torchcodec['ffmpeg']}"
        return Check("torchcodec", Status.OK, value)
    if torchcodec.get("kind") == "ModuleNotFoundError":
        value = f"{one_line(torchcodec['error'])}; pyav decodes instead, slower"
        return Check("torchcodec", Status.WARN, value, INSTALL)
    reason = loading_failure(torchcodec["error"])
    if reason is None:
        value = "finds no FFmpeg libraries; pyav decodes instead, slower"
        return Check("torchcodec", Status.WARN, value, surroundings.install_line(apt="ffmpeg", elsewhere="ffmpeg"))
    remedy = installing("pip install --upgrade torch torchcodec CRAFT")
    return Check("torchcodec", Status.WARN, f"does not work: {one_line(reason)}; pyav decodes instead", remedy)


def loading_failure(error: str) -> str | None:
    """Why torchcodec did not load, in one line; None if all it lacks is FFmpeg.

    Its message holds one traceback per FFmpeg release it knows, and all but one of them only say that this
    release is not installed. The line that says anything else is the reason.
    """
    causes = re.findall(r"^\s*(?:\w+Error): (?!Could not load this library)(.*)", error, flags=re.MULTILINE)
    if not causes:
        return error
    return next((cause for cause in causes if not re.search(r"lib(av|sw)\w+", cause)), None)
