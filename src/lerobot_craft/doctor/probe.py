"""Trying something in a child process: it may abort, hang or be killed, and the doctor still answers.

This file is both sides. The parent starts it as a script with the name of a group of topics; the child imports nothing
from craft. The child writes one marked JSON line for each topic as soon as it knows it, so that findings survive a
crash. Every other line of its output comes from a library and is ignored.
"""

import io
import json
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import TracebackType
from typing import Any, Self

from lerobot_craft.lerobot_api import ordinary_priority

_MARK = "craft-probe "
_REASON_LENGTH = 160

# What the child decodes.
_SIDE = 64  # pixels; the smallest size that every encoder takes
_LEVELS = (0, 80, 160, 240)  # grey values: one frame each
_TOLERANCE = 8  # grey levels; lossy coding moves a flat frame by one or two
# What lerobot writes by default, then one that every FFmpeg build has.
_ENCODERS = ("libsvtav1", "mpeg4")

# What the child renders.
_SCENE = """
<mujoco>
  <worldbody>
    <light pos="0 0 3"/>
    <geom type="sphere" size="1" rgba="1 0 0 1"/>
  </worldbody>
</mujoco>
"""


@dataclass(frozen=True)
class ProbeReport:
    """What a probe found, by topic, and how it ended if not by itself.

    A topic is a mapping: the findings, or `error` (one line) and `kind` (the exception's class name).
    """

    topics: Mapping[str, Mapping[str, Any]] = field(default_factory=dict)
    died: str | None = None

    def topic(self, name: str) -> Mapping[str, Any]:
        """The findings on one topic; if the probe died before it reached the topic, that is the error."""
        return self.topics.get(name, {"error": self.died or "the probe said nothing", "kind": "ProbeDied"})


class Probe:
    """A running child. Leaving the context kills it if it still runs: Ctrl-C must not leave a child behind.

    Args:
        topics: `torch_and_video` or `render`: see `main`.
        env: The child's environment.
        timeout_s: When to give up, counted from the start.
        script: Another script to run; for tests.
    """

    def __init__(self, topics: str, *, env: Mapping[str, str], timeout_s: float, script: str = __file__) -> None:
        # -P: neither the current directory nor this one may shadow a library. The interpreter is our own.
        self._process = subprocess.Popen(  # noqa: S603
            [sys.executable, "-P", script, topics],
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
        """Wait for the child, at most until its deadline, and read what it found."""
        try:
            out, err = self._process.communicate(timeout=max(0.0, self._deadline - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            out, _ = self._process.communicate()
            return ProbeReport(_read_topics(out), f"gave no answer within {self._timeout_s:g} s")
        return ProbeReport(_read_topics(out), _how_it_died(self._process.returncode, err))


def one_line(text: str) -> str:
    """The first line of an error, short enough for the report."""
    first = text.strip().partition("\n")[0].strip()
    return first if len(first) <= _REASON_LENGTH else f"{first[: _REASON_LENGTH - 3]}..."


def _read_topics(out: str) -> dict[str, Mapping[str, Any]]:
    lines = [line.removeprefix(_MARK) for line in out.splitlines() if line.startswith(_MARK)]
    return {topic: finding for line in lines for topic, finding in json.loads(line).items()}


def _how_it_died(returncode: int, err: str) -> str | None:
    if returncode == 0:
        return None
    if returncode < 0:
        return f"was killed by {signal.Signals(-returncode).name}"
    return one_line(err.strip().rpartition("\n")[2]) or f"ended with exit code {returncode}"


def main(topics: str) -> None:
    """In the child: look at a group of topics.

    Video is in one group with torch because torchcodec imports torch: two seconds once instead of twice. The order is
    by risk: pyav needs nothing; torchcodec comes last because a build that does not fit torch can kill the process.
    """
    if topics == "render":
        _write("render", render())  # its errors end the process: a back-end that fails may leave it unusable
        return
    video: dict[str, bytes] = {}

    def pyav() -> dict[str, Any]:
        import av

        codec, video["mp4"] = encode()
        require_levels(decode_pyav(video["mp4"]))
        return {"version": av.__version__, "codec": codec}

    def torchcodec() -> dict[str, Any]:
        import torchcodec
        from torchcodec.decoders import VideoDecoder

        if "mp4" in video:
            frames = VideoDecoder(video["mp4"])[:]  # (T, 3, H, W)
            require_levels([float(frame.float().mean()) for frame in frames])
        return {"version": torchcodec.__version__, "ffmpeg": torchcodec.ffmpeg_major_version}

    _tell("pyav", pyav)
    _tell("torch", see_torch)
    _tell("torchcodec", torchcodec)


def _tell(topic: str, look: Callable[[], dict[str, Any]]) -> None:
    """Write what `look` finds, or how it fails: a failure here is a finding."""
    try:
        finding = look()
    except Exception as error:
        finding = {"error": str(error) or repr(error), "kind": type(error).__name__}
    _write(topic, finding)


def _write(topic: str, finding: dict[str, Any]) -> None:
    sys.stdout.write(f"{_MARK}{json.dumps({topic: finding})}\n")
    sys.stdout.flush()


def see_torch() -> dict[str, Any]:
    """The version, the build, the threads and the devices."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns here if the driver does not fit it
        warnings.simplefilter("always")
        cuda = torch.cuda.is_available()
    devices = []
    for index in range(torch.cuda.device_count() if cuda else 0):
        properties = torch.cuda.get_device_properties(index)
        with torch.cuda.device(index):
            bf16 = torch.cuda.is_bf16_supported(including_emulation=False)
        devices.append({"name": properties.name, "memory_bytes": properties.total_memory, "bf16": bf16})
    return {
        "version": torch.__version__,
        "cuda_build": torch.version.cuda,
        "hip_build": torch.version.hip,
        "cuda_devices": devices,
        "cuda_complaint": str(caught[0].message) if caught else None,
        "mps": torch.backends.mps.is_available(),
        "threads": torch.get_num_threads(),
    }


def encode() -> tuple[str, bytes]:
    """The encoder that was used, and a small video in memory with one flat frame for each grey level."""
    import av
    import numpy as np

    codec = next(name for name in _ENCODERS if name in av.codecs_available)
    file = io.BytesIO()
    with ordinary_priority(), av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = _SIDE, _SIDE, "yuv420p"
        for level in _LEVELS:
            pixels = np.full((_SIDE, _SIDE, 3), level, np.uint8)  # (H, W, 3)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return codec, file.getvalue()


def decode_pyav(mp4: bytes) -> list[float]:
    """The mean grey level of each frame."""
    import av

    with av.open(io.BytesIO(mp4)) as container:
        return [float(frame.to_ndarray(format="rgb24").mean()) for frame in container.decode(video=0)]


def require_levels(levels: list[float]) -> None:
    """Raise if the decoded frames are not those that were encoded."""
    off = [abs(level - expected) for level, expected in zip(levels, _LEVELS, strict=True)]
    if max(off) > _TOLERANCE:
        raise ValueError(f"decoded grey levels {levels} instead of {list(_LEVELS)}")


def render() -> dict[str, Any]:
    """The contrast of one rendered sphere, with the back-end of MUJOCO_GL. A broken one may paint every pixel alike."""
    import mujoco

    model = mujoco.MjModel.from_xml_string(_SCENE)
    data = mujoco.MjData(model)
    mujoco.mj_forward(model, data)
    with mujoco.Renderer(model, _SIDE, _SIDE) as renderer:
        renderer.update_scene(data)
        pixels = renderer.render()  # (H, W, 3)
    return {"contrast": int(pixels.max()) - int(pixels.min())}


if __name__ == "__main__":
    main(sys.argv[1])
