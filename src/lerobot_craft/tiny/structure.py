"""The full-size structure of each vision-language-action policy, without its weights and without a download.

Parameters are on the meta device: they have names, shapes and types but no memory, so that code that walks a policy's
modules can be checked against the real thing on any machine.
"""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature
from lerobot.policies import PreTrainedPolicy, get_policy_class, make_policy_config

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.recipes import make_vlm
from lerobot_craft.tiny.sizes import TinySizes
from lerobot_craft.tiny.tokenizers import fit_action_tokenizer, make_text_tokenizer

# HuggingFaceTB/SmolVLM2-500M-Video-Instruct, smolvla's default; the sizes of the pi family are in lerobot's own code.
_SMOLVLM2_500M = TinySizes(
    width=960,
    depth=32,
    mlp_dim=2560,
    num_heads=15,
    num_kv_heads=5,
    head_dim=64,
    vision_width=768,
    vision_depth=12,
    vision_heads=12,
    vision_mlp_dim=3072,
    patch_size=16,
)


def write_config(policy_type: str, directory: Path, cameras: int = 2, **settings: Any) -> Path:
    """Write the `config.json` of a full-size policy, enough for `craft train --estimate --policy.path=DIRECTORY`.

    Args:
        policy_type: pi0_fast, pi0, pi05, smolvla or act.
        directory: Where to; it gets no weights.
        cameras: Of 480 x 640 pixels, which the policy resizes.
        **settings: Fields of the policy's configuration, where they are not to be lerobot's defaults.

    Returns:
        The directory.
    """
    if policy_type != "act":
        _require_known(policy_type)
    if policy_type in _CONFIG_SETTINGS:
        settings = _CONFIG_SETTINGS[policy_type](directory.resolve()) | settings
    images = {f"observation.images.{n}": PolicyFeature(FeatureType.VISUAL, (3, 480, 640)) for n in range(cameras)}
    features = {
        "input_features": {**images, "observation.state": PolicyFeature(FeatureType.STATE, (7,))},
        "output_features": {"action": PolicyFeature(FeatureType.ACTION, (7,))},
    }
    config = make_policy_config(policy_type, **{"device": "cpu", "push_to_hub": False, **features, **settings})
    directory.mkdir(parents=True, exist_ok=True)
    config.save_pretrained(directory)
    return directory


def full_size(policy_type: str) -> PreTrainedPolicy:
    """Build a policy at lerobot's full size on the meta device, with one camera and stand-in tokenizers.

    Args:
        policy_type: pi0_fast, pi0, pi05 or smolvla.

    Returns:
        The policy. It cannot run: there is nothing behind its parameters.
    """
    _require_known(policy_type)
    registered_name = policy_type if policy_type == "smolvla" else f"{policy_type}_tiny"
    with TemporaryDirectory(prefix="craft-structure-") as temporary:
        config = make_policy_config(
            registered_name,
            device="cpu",
            input_features={
                "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, 224, 224)),
                "observation.state": PolicyFeature(FeatureType.STATE, (7,)),
            },
            output_features={"action": PolicyFeature(FeatureType.ACTION, (7,))},
            **_SETTINGS[policy_type](Path(temporary)),
        )
        # Not in the call: lerobot's configs refuse a device they do not know.
        config.device = "meta"
        with torch.device("meta"):
            return get_policy_class(config.type)(config)


def _pi0_fast(assets: Path) -> dict[str, Any]:
    fit_action_tokenizer(assets / "action", np.linspace(-1, 1, 56).reshape(2, 4, 7))
    make_text_tokenizer(assets / "text", ())
    return {"sizes": None, "text_tokenizer_name": str(assets / "text"), "action_tokenizer_name": str(assets / "action")}


def _denoising_pi(assets: Path) -> dict[str, Any]:
    del assets  # these two load no tokenizer of their own
    return {"sizes": None}


def _smolvla(assets: Path) -> dict[str, Any]:
    make_vlm(assets / "vlm", (), _SMOLVLM2_500M, image_size=512, scale_factor=4, vocab_size=49_280)
    return {"vlm_model_name": str(assets / "vlm"), "load_vlm_weights": False}


def _smolvla_config(assets: Path) -> dict[str, Any]:
    return _smolvla(assets) | {"load_vlm_weights": True}


def _act_config(assets: Path) -> dict[str, Any]:
    del assets
    return {"pretrained_backbone_weights": None}  # a checkpoint brings the weights; these would be downloaded


_CONFIG_SETTINGS = {"smolvla": _smolvla_config, "act": _act_config}
_SETTINGS = {"pi0_fast": _pi0_fast, "pi0": _denoising_pi, "pi05": _denoising_pi, "smolvla": _smolvla}


def _require_known(policy_type: str) -> None:
    if policy_type not in _SETTINGS:
        raise CraftError(f"There is no full-size structure of {policy_type!r}; choose one of {', '.join(_SETTINGS)}.")
