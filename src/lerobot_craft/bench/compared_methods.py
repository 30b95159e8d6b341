"""The methods that the bench compares; add one by adding an entry to the table.

Each has at most one knob. `craft bench --sweep` tries a knob's grid on tuning scenarios. Tables use the value in this
file, or the one in a sweep's file (`--knobs`). An ablation needs no entry: `--variant` gives a method other flags.
"""

import shlex
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from lerobot_craft.bench.method_definition import Flags, Frames, Knob, Known, Method
from lerobot_craft.errors import CraftError
from lerobot_craft.training.config import CraftConfig
from lerobot_craft.training.methods.method import Method as Trained
from lerobot_craft.training.methods.registry import METHODS as TRAINED

_ALL_FRAMES = 10**9
# As many anchors as new samples in every step: the default of `craft train`, but not of the original CRaFT notes.
_AS_OFTEN: Flags = {"craft.anchor_batch_size": 0, "craft.retention_freq": 1}


def _without_old_data(name: str, **settings: object) -> Callable[[Known], Flags]:
    return lambda known: {"craft.method": name, **{f"craft.{key}": value for key, value in settings.items()}}


def _own(name: str, frames: Frames, flags: Callable[[Known], Flags] | None = None, **options: Any) -> Method:
    """A method of `craft train` as it is: its class says what it is called and which number of it is tried."""
    found = TRAINED[name]
    return Method(name, found.label, frames, flags or _without_old_data(name), _knob(found), **options)


def _knob(method: type[Trained]) -> Knob | None:
    own = method.knob
    return None if own is None else Knob((f"craft.{own.setting}",), own.value, own.grid)


def _with_old_data(known: Known) -> Flags:
    return {"craft.old_dataset.repo_id": known.repo_id, "craft.old_dataset.root": known.root}


def _replay(known: Known) -> Flags:
    frames = _ALL_FRAMES if known.rollouts else known.frames
    return {"craft.method": "er", **_with_old_data(known), "craft.replay_frames": frames}


def _joint(known: Known) -> Flags:
    return _replay(known._replace(frames=_ALL_FRAMES)) | {"craft.replay_ratio": 1.0}


def _ewc(known: Known) -> Flags:
    return {"craft.method": "ewc", **_with_old_data(known), "craft.ewc_samples": known.frames}


def _documents(known: Known) -> Flags:
    """The defaults of the original CRaFT notes, written out."""
    return {
        **_on_old_frames("hidden", known),
        "craft.anchor_batch_size": 16,
        "craft.retention_freq": 5,
        "craft.hidden_layer": "-2",
        "craft.pooling": "mean_image_tokens",
        "craft.loss_type": "mse",
        "craft.lambda_per_task": False,
        "craft.initial_lambda": 1.0,
        "craft.lambda_lr": 0.01,
        "craft.lambda_max": 10.0,
        "craft.epsilon_start": 1.0,
        "craft.epsilon_end": 0.1,
        "craft.epsilon_unit": "absolute",
        "craft.use_grad_projection": True,
        "craft.conflict_threshold": -0.1,
        "craft.projection_mode": "weighted",
    }


def _tokens_hidden(known: Known) -> Flags:
    return {
        **_on_old_frames("hidden", known),
        **_AS_OFTEN,
        "craft.per_token": True,
        "craft.layers_to_save": known.hidden_layers,
        "craft.relative": True,
        "craft.freeze_readout": True,
    }


def _on_old_frames(mode: str, known: Known) -> Flags:
    return {
        "craft.anchor_cache_dir": known.anchors,
        **_with_old_data(known),
        "craft.num_anchors": known.frames,
        "craft.retention_mode": mode,
    }


def _old_frames_alone(mode: str) -> Callable[[Known], Flags]:
    return lambda known: {
        **_on_old_frames(mode, known),
        **_AS_OFTEN,
        "craft.anchor_source": "dataset",
        "craft.num_draws": 1,
    }


def _cross(known: Known) -> Flags:
    return {
        "craft.anchor_cache_dir": known.anchors,
        "craft.old_instructions": known.instructions,
        "craft.num_anchors": 1000,
        "craft.walked_states": 0.0,
        "craft.drawn_states": 0.0,
        "craft.num_draws": 1,
    }


def _recipe(known: Known) -> Flags:
    """CRaFT with its defaults: only what is to be kept is given."""
    if not known.instructions:  # then there are no new frames under old instructions
        return {"craft.anchor_cache_dir": known.anchors, **_with_old_data(known), "craft.num_anchors": known.frames}
    without: Flags = {"craft.anchor_cache_dir": known.anchors, "craft.old_instructions": known.instructions}
    if known.frames == 0:
        return without
    # In addition to the new frames under old instructions, whose number stays the same.
    return {**without, **_with_old_data(known), "craft.old_frames": known.frames}


def _remembered(**changes: object) -> Callable[[Known], Flags]:
    """CRaFT on a policy with a memory, which needs no other input."""
    return lambda known: {
        "policy.path": known.memory,
        "craft.memory": "auto",
        **{f"craft.{name}": value for name, value in changes.items()},
    }


def _recipe_with(**changes: object) -> Callable[[Known], Flags]:
    return lambda known: _recipe(known) | {f"craft.{name}": value for name, value in changes.items()}


def _lora(known: Known) -> Flags:
    return {
        "craft.method": "naive",
        "peft.method_type": "LORA",
        "peft.target_modules": r".*(language_model|text_model|lm_expert).*_proj",
        "peft.full_training_modules": "[]",
    }


_REPLAY = _own("er", "some", _replay, source="dataset")
_STRENGTH = _knob(TRAINED["craft"])
_FLOORED = Knob(("craft.initial_lambda", "craft.lambda_min"), 3.0, (1.0, 3.0, 10.0))  # the original notes have no floor

METHODS = {
    method.name: method
    for method in (
        _own("naive", "none"),
        Method("joint", "joint training (all old data)", "all", _joint, source="dataset"),
        _REPLAY,
        replace(_REPLAY, name="er_long", label="replay, twice the steps", length=2),  # as much compute as CRaFT
        Method("hidden_documents", "CRaFT, pooled hidden states (documents)", "some", _documents, source="dataset"),
        Method("hidden_tokens", "CRaFT, hidden states per token", "some", _tokens_hidden, _FLOORED, source="dataset"),
        Method(
            "token_ce",
            "CRaFT, the teacher's tokens",
            "some",
            _old_frames_alone("token_ce"),
            _FLOORED,
            policies=("pi0_fast",),
            source="dataset",
        ),
        Method("action", "CRaFT, actions", "some", _old_frames_alone("action"), _STRENGTH, source="dataset"),
        Method(
            "cross",
            "CRaFT, actions without old frames",
            "none",
            _cross,
            _STRENGTH,
            needs_instructions=True,
            source="cross",
        ),
        _own("craft", "any", _recipe, source="both"),
        Method("craft_memory", "CRaFT, a memory", "some", _remembered(), _STRENGTH, source="both", remembers=True),
        Method(
            "craft_budget",
            "CRaFT, a memory and a budget",
            "some",
            _remembered(),
            Knob(("craft.epsilon_end",), 0.2, (0.05, 0.1, 0.2, 0.5, 1.0)),
            source="both",
            remembers=True,
        ),
        Method(
            "craft_memory_fixed",
            "CRaFT, a memory, fixed multiplier",
            "some",
            _remembered(),
            Knob(("craft.initial_lambda", "craft.lambda_min", "craft.lambda_max"), 3.0, (0.3, 1.0, 3.0, 10.0)),
            source="both",
            remembers=True,
        ),
        Method(
            "craft_fixed",
            "CRaFT, fixed multiplier",
            "any",
            _recipe,
            Knob(("craft.initial_lambda", "craft.lambda_max"), CraftConfig.initial_lambda, (0.3, 1.0, 3.0, 10.0)),
            source="both",
        ),
        Method(
            "craft_ascent",
            "CRaFT, primal-dual ascent",
            "any",
            _recipe_with(dual_rule="ascent", initial_lambda=1.0, lambda_min=0.0),
            Knob(("craft.lambda_lr",), 0.1, (0.01, 0.1, 1.0)),
            source="both",
        ),
        _own("lwf", "none", _without_old_data("lwf", num_anchors=1000, num_draws=1)),
        _own("l2sp", "none"),
        _own("ewc", "some", _ewc, source="dataset"),
        _own("merge", "none", checkpoint="merged/alpha_{value:.2f}/pretrained_model"),
        Method(
            "frozen_vision",
            "frozen vision tower",
            "none",
            lambda known: {"craft.method": "naive", "policy.freeze_vision_encoder": True},
            policies=("smolvla",),
        ),
        _own("freeze", "none", _without_old_data("freeze", freeze="readout")),
        Method(
            "lora",
            "LoRA",
            "none",
            _lora,
            Knob(("peft.r",), 16, (4, 16, 64)),
            policies=("smolvla", "pi0_fast"),  # its modules are a language model's
        ),
    )
}


def method_named(name: str) -> Method:
    """One of `METHODS`, or one with other flags: `craft --craft.retention_freq=2`."""
    name, *flags = shlex.split(name)
    if name not in METHODS:
        raise CraftError(f"--methods: {name} is not in the bench: choose among {', '.join(METHODS)}")
    return METHODS[name].with_flags(flags)
