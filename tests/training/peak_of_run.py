"""Run `craft train` and print the peak of its resident memory during its steps, beyond a baseline after start-up.

    python -m tests.training.peak_of_run WARM_UP_FLAGS -- FLAGS

The warm-up is a run of the same kind on a tiny policy: it loads every library, so that the baseline holds them. The
peak is the kernel's own high-water mark, set back before every step from the second on (the first makes the optimizer's
state). Resident memory is what the system really gave, kernels' workspaces included; the profiler's sum of tensors
would repeat what an estimate reckons with. It is only as good as the allocator's return of free memory: start it with
`ENVIRONMENT`, under which each tensor of 64 KiB and more has pages of its own and gives them back at once.
"""

import ctypes
import gc
import json
import sys
from pathlib import Path

ENVIRONMENT = {"MALLOC_MMAP_THRESHOLD_": "65536", "MALLOC_TRIM_THRESHOLD_": "65536", "MALLOC_ARENA_MAX": "1"}


def resident(name):
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{name}:"):
            return int(line.split()[1]) * 1024
    raise ValueError(name)


def main(argv):
    from lerobot_craft.cli import main as craft
    from lerobot_craft.training import loop

    place = argv.index("--")
    assert craft(["train", *argv[:place]]) == 0
    from accelerate.state import AcceleratorState

    AcceleratorState._reset_state(reset_partial_state=True)
    gc.collect()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    baseline, peaks, take_step = resident("VmRSS"), [], loop._take_step

    def watched(session, batches, tracker):
        gc.collect()
        if session.step > 0:
            Path("/proc/self/clear_refs").write_text("5")
        take_step(session, batches, tracker)
        if session.step > 0:
            peaks.append(resident("VmHWM") - baseline)

    loop._take_step = watched
    assert craft(["train", *argv[place + 1 :]]) == 0
    print(json.dumps({"baseline": baseline, "peaks": peaks}))


if __name__ == "__main__":
    main(sys.argv[1:])
