"""Probe: does video decode, and what does torch see?

Video stands beside torch because torchcodec imports it: two seconds once instead of twice. The order is by risk:
pyav needs nothing, torchcodec comes last because a build that does not fit torch can take the process down.
"""

import io
import json
import sys
import warnings
from collections.abc import Callable
from typing import Any

_SIDE = 64  # pixels; the smallest size that every encoder takes
_LEVELS = (0, 80, 160, 240)  # grey values: one frame each
_TOLERANCE = 8  # grey levels; lossy coding moves a flat frame by one or two
# What lerobot writes by default, then one that every FFmpeg build has.
_ENCODERS = ("libsvtav1", "mpeg4")


def main() -> None:
    """Tell each topic as soon as it is known."""
    video: dict[str, bytes] = {}

    def pyav() -> dict[str, Any]:
        import av

        codec, video["mp4"] = _encode()
        _require_levels(_decode_pyav(video["mp4"]))
        return {"version": av.__version__, "codec": codec}

    def torchcodec() -> dict[str, Any]:
        import torchcodec
        from torchcodec.decoders import VideoDecoder

        if "mp4" in video:
            frames = VideoDecoder(video["mp4"])[:]  # (T, 3, H, W)
            _require_levels([float(frame.float().mean()) for frame in frames])
        return {"version": torchcodec.__version__, "ffmpeg": torchcodec.ffmpeg_major_version}

    tell("pyav", pyav)
    tell("torch", see_torch)
    tell("torchcodec", torchcodec)


def tell(topic: str, look: Callable[[], dict[str, Any]]) -> None:
    """Write what `look` finds, or how it fails: a failure here is a finding."""
    try:
        finding = look()
    except Exception as error:
        finding = {"error": str(error) or repr(error), "kind": type(error).__name__}
    sys.stdout.write(f"craft-probe {json.dumps({topic: finding})}\n")
    sys.stdout.flush()


def see_torch() -> dict[str, Any]:
    """The version, the build, the threads and the devices."""
    import torch

    with warnings.catch_warnings(record=True) as caught:  # torch warns here when the driver does not fit it
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


def _encode() -> tuple[str, bytes]:
    import av
    import numpy as np

    codec = next(name for name in _ENCODERS if name in av.codecs_available)
    file = io.BytesIO()
    with av.open(file, "w", format="mp4") as container:
        stream = container.add_stream(codec, rate=10)
        stream.width, stream.height, stream.pix_fmt = _SIDE, _SIDE, "yuv420p"
        for level in _LEVELS:
            pixels = np.full((_SIDE, _SIDE, 3), level, np.uint8)  # (H, W, 3)
            container.mux(stream.encode(av.VideoFrame.from_ndarray(pixels, format="rgb24")))
        container.mux(stream.encode())
    return codec, file.getvalue()


def _decode_pyav(mp4: bytes) -> list[float]:
    import av

    with av.open(io.BytesIO(mp4)) as container:
        return [float(frame.to_ndarray(format="rgb24").mean()) for frame in container.decode(video=0)]


def _require_levels(levels: list[float]) -> None:
    off = [abs(level - expected) for level, expected in zip(levels, _LEVELS, strict=True)]
    if max(off) > _TOLERANCE:
        raise ValueError(f"decoded grey levels {levels} instead of {list(_LEVELS)}")


if __name__ == "__main__":
    main()
