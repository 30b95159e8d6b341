"""A session in the words of `run.json`."""

import dataclasses
from collections.abc import Sequence
from datetime import UTC, datetime

from lerobot_craft import __version__
from lerobot_craft.errors import CraftError
from lerobot_craft.teacher.fingerprint import identity
from lerobot_craft.training.anchoring.several import mode_of
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.records.lines import budget_unit
from lerobot_craft.training.records.run_file import AnchorsHeld, Held, RunFile, Took
from lerobot_craft.training.records.summary import Peak, Timing
from lerobot_craft.training.session import Session


def describe(session: Session, craft: CraftConfig, tasks: Sequence[str]) -> RunFile:
    """What is known before the first step; `craft` as the method has settled it."""
    if session.origin is None:
        raise CraftError("a run without CRaFT is lerobot-train, which keeps no record of this kind")
    cfg, anchors = session.cfg, session.method.old_anchors
    return RunFile(
        craft_version=__version__,
        created=datetime.now(UTC).isoformat(timespec="seconds"),
        command=session.command,
        method=craft.method,
        mode=None if anchors is None else mode_of(anchors),
        policy=cfg.policy.type,
        dataset=cfg.dataset.repo_id,
        old_datasets=[name for name, _ in session.craft.old_dataset.addresses("craft.old_dataset")],
        steps=cfg.steps,
        batch_size=session.step_frames,
        teacher=session.origin.path,
        fingerprint=identity(session.origin.fingerprint),
        tasks=list(tasks),
        budget_unit=budget_unit(craft) if session.method.has_multipliers else None,
        conflict_threshold=craft.conflict_threshold,
        anchors=None if anchors is None else AnchorsHeld(anchors.source, anchors.num_anchors, anchors.stored_bytes),
        costs=_held(session),
        measured_on=None if session.probe is None else session.probe.measured_on,
        memory=[] if session.carried is None else session.carried.lines(),
    )


def ended(run: RunFile, session: Session, timing: Timing, peak: Peak) -> RunFile:
    """The same after the last step."""
    took = Took(**dataclasses.asdict(timing), **{f"{name}_bytes": n for name, n in dataclasses.asdict(peak).items()})
    return dataclasses.replace(run, costs=_held(session), end_step=session.step, took=took)


def _held(session: Session) -> list[Held]:
    return [Held(cost.what, cost.bytes) for cost in session.method.costs()]
