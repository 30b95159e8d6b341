"""What a policy of each type is made of, small or at full size: its assets on disk and its configuration.

The full-size structure of each vision-language-action policy, without its weights and without a download.

Parameters are on the meta device: they have names, shapes and types but no memory, so that code that walks a policy's
modules can be checked against the real thing on any machine.
"""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import numpy as np
import torch
from lerobot.configs import FeatureType, NormalizationMode, PolicyFeature
from lerobot.lerobot_types import TransitionKey
from lerobot.policies import PreTrainedPolicy, get_policy_class, make_policy_config
from lerobot.processor import NormalizerProcessorStep, create_transition
from lerobot.utils.constants import ACTION
from numpy.typing import ArrayLike
from transformers import PreTrainedTokenizerFast, SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.pi import TinySizes
from lerobot_craft.tiny.tokenizers import fit_action_tokenizer, make_text_tokenizer

Stats = Mapping[str, Mapping[str, Any]]

_IMAGE_SIDE = 28  # pixels; with patches of 14 an image is four tokens
_SPARE_PROMPT_TOKENS = 8
# pi0_fast writes the state into the prompt in 256 bins of [-1, 1], so what it is normalised to must end there.
_TO_UNIT_RANGE = {
    "VISUAL": NormalizationMode.IDENTITY,
    "STATE": NormalizationMode.MIN_MAX,
    "ACTION": NormalizationMode.MIN_MAX,
}
_IMAGE_TOKENS = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


@dataclass(frozen=True)
class Ingredients:
    """What a checkpoint is made from; `make_checkpoint` documents the fields."""

    assets: Path
    input_features: dict[str, PolicyFeature]
    output_features: dict[str, PolicyFeature]
    dataset_stats: Stats
    instructions: tuple[str, ...]
    action_chunks: ArrayLike | None
    sizes: TinySizes
    chunk_size: int
    overrides: Mapping[str, Any]

    @property
    def action_dim(self) -> int:
        """Dimensions of an action."""
        return int(self.output_features[ACTION].shape[0])

    @property
    def state_dim(self) -> int:
        """Dimensions of the state; 0 without one."""
        return sum(int(f.shape[0]) for f in self.input_features.values() if f.type is FeatureType.STATE)

    @property
    def has_images(self) -> bool:
        """Whether there is a camera."""
        return any(feature.type is FeatureType.VISUAL for feature in self.input_features.values())

    def image_side(self, setting: str) -> int:
        """Side in pixels of the square images that the network sees; `setting` is the config field that says so."""
        if setting in self.overrides and self.overrides[setting] is None:  # images go in as they are
            return next(int(f.shape[-1]) for f in self.input_features.values() if f.type is FeatureType.VISUAL)
        height, width = self.overrides.get(setting, (_IMAGE_SIDE, _IMAGE_SIDE))
        if height != width:
            raise CraftError(f"{setting}={(height, width)}: these networks take square images only.")
        return int(height)

    def normalised_chunks(self) -> torch.Tensor:
        """The action chunks [N, H, A] as the policy will see them."""
        if self.action_chunks is None:
            raise CraftError("pi0_fast needs action_chunks [N, H, A]: its action tokenizer is fitted on them.")
        mapping = self.overrides.get("normalization_mapping", _TO_UNIT_RANGE)
        step = NormalizerProcessorStep(features=self.output_features, norm_map=mapping, stats=dict(self.dataset_stats))
        chunks = torch.from_numpy(np.array(self.action_chunks, dtype=np.float32))
        normalised: torch.Tensor = step(create_transition(action=chunks))[TransitionKey.ACTION]
        return normalised


def pi0_fast(made_from: Ingredients) -> dict[str, Any]:
    """pi0_fast: a language model that writes FAST action tokens."""
    fast = fit_action_tokenizer(made_from.assets / "action_tokenizer", made_from.normalised_chunks())
    text = made_from.assets / "text_tokenizer"
    tokenizer = make_text_tokenizer(text, made_from.instructions, num_action_tokens=fast.vocab_size)
    # <bos>, "Action", ":", " ", at worst one token per coefficient, "|".
    max_action_tokens = 5 + made_from.chunk_size * made_from.action_dim
    return {
        **_pi(made_from, tokenizer),
        "tokenizer_max_length": _prompt_length(made_from, tokenizer, state_in_prompt=True),
        "text_tokenizer_name": str(text),
        "action_tokenizer_name": str(made_from.assets / "action_tokenizer"),
        "fast_skip_tokens": 0,
        "max_action_tokens": max_action_tokens,
        "max_decoding_steps": max_action_tokens - 1,
        "validate_action_token_prefix": False,
        "normalization_mapping": dict(_TO_UNIT_RANGE),
    }


def pi0(made_from: Ingredients) -> dict[str, Any]:
    """pi0: a language model beside an action expert that denoises chunks."""
    return _denoising_pi(made_from, state_in_prompt=False)


def pi05(made_from: Ingredients) -> dict[str, Any]:
    """pi05: pi0 with the state in the prompt."""
    return _denoising_pi(made_from, state_in_prompt=True)


def smolvla(made_from: Ingredients) -> dict[str, Any]:
    """smolvla: a small vision-language model whose layers an action expert attends to."""
    _require_images(made_from, "smolvla")
    sizes = made_from.sizes
    side = made_from.image_side("resize_imgs_with_padding")
    make_vlm(made_from.assets / "vlm", made_from.instructions, sizes, image_size=side)
    return {
        **_chunks(made_from),
        "max_state_dim": max(made_from.state_dim, 1),
        "max_action_dim": made_from.action_dim,
        "resize_imgs_with_padding": (side, side),
        "vlm_model_name": str(made_from.assets / "vlm"),
        "load_vlm_weights": False,
        "num_vlm_layers": sizes.depth,
        "expert_width_multiplier": sizes.expert_width / sizes.width,
        "num_steps": 4,
        # The language model is random here: nothing in it is worth freezing.
        "freeze_vision_encoder": False,
        "train_expert_only": False,
    }


def act(made_from: Ingredients) -> dict[str, Any]:
    """act: a small transformer behind a ResNet-18 without pretrained weights."""
    _require_scene(made_from, "act")
    sizes = made_from.sizes
    return {
        **_chunks(made_from),
        "pretrained_backbone_weights": None,
        "dim_model": sizes.width,
        "n_heads": sizes.num_heads,
        "dim_feedforward": sizes.mlp_dim,
        "n_encoder_layers": sizes.depth,
        "n_vae_encoder_layers": 2,
        "latent_dim": 8,
    }


def diffusion(made_from: Ingredients) -> dict[str, Any]:
    """diffusion: a small U-Net behind a ResNet-18 without pretrained weights; `chunk_size` is its horizon."""
    _require_scene(made_from, "diffusion")
    sizes = made_from.sizes
    if made_from.chunk_size % 4:
        raise CraftError(
            f"diffusion halves its horizon twice: chunk_size={made_from.chunk_size} is not divisible by 4."
        )
    return {
        "horizon": made_from.chunk_size,
        "n_obs_steps": 2,
        "n_action_steps": made_from.chunk_size - 1,  # of a horizon that starts at the earlier observation
        "drop_n_last_frames": 0,
        "pretrained_backbone_weights": None,
        "use_group_norm": True,
        "use_separate_rgb_encoder_per_camera": False,
        "down_dims": (sizes.width // 2, sizes.width),
        "diffusion_step_embed_dim": sizes.width,
        "num_inference_steps": 10,
    }


# lerobot's name of each type's configuration, and its recipe.
RECIPES: dict[str, tuple[str, Callable[[Ingredients], dict[str, Any]]]] = {
    "pi0_fast": ("pi0_fast_tiny", pi0_fast),
    "pi0": ("pi0_tiny", pi0),
    "pi05": ("pi05_tiny", pi05),
    "smolvla": ("smolvla", smolvla),
    "act": ("act", act),
    "diffusion": ("diffusion", diffusion),
}


def _chunks(made_from: Ingredients) -> dict[str, Any]:
    return {"chunk_size": made_from.chunk_size, "n_action_steps": made_from.chunk_size}


def _pi(made_from: Ingredients, tokenizer: PreTrainedTokenizerFast) -> dict[str, Any]:
    _require_images(made_from, "the pi family")
    side = made_from.image_side("image_resolution")
    if side % made_from.sizes.patch_size:
        raise CraftError(f"image_resolution={side} is not a multiple of sizes.patch_size={made_from.sizes.patch_size}.")
    return {
        **_chunks(made_from),
        "sizes": replace(made_from.sizes, vocab_size=len(tokenizer)),
        "max_state_dim": max(made_from.state_dim, 1),
        "max_action_dim": made_from.action_dim,
        "image_resolution": (side, side),
    }


def _denoising_pi(made_from: Ingredients, state_in_prompt: bool) -> dict[str, Any]:
    text = made_from.assets / "text_tokenizer"
    tokenizer = make_text_tokenizer(text, made_from.instructions)
    return {
        **_pi(made_from, tokenizer),
        "tokenizer_max_length": _prompt_length(made_from, tokenizer, state_in_prompt),
        "text_tokenizer_name": str(text),
        "num_inference_steps": 4,
    }


def _prompt_length(made_from: Ingredients, tokenizer: PreTrainedTokenizerFast, state_in_prompt: bool) -> int:
    """Tokens of the longest prompt, with some to spare: lerobot cuts a longer one off, and the state stands last."""
    prompts = [f"Task: {text}, State:;\nAction: " for text in (*made_from.instructions, "")]
    # A state below its range is bin -1, which is two tokens.
    state = 2 * made_from.state_dim if state_in_prompt else 0
    return max(len(tokenizer.encode(prompt)) for prompt in prompts) + state + _SPARE_PROMPT_TOKENS


def _require_images(made_from: Ingredients, who: str) -> None:
    if not made_from.has_images:
        raise CraftError(f"{who} needs at least one camera: add an observation.images.* feature of type VISUAL.")


def _require_scene(made_from: Ingredients, who: str) -> None:
    if not made_from.has_images and "observation.environment_state" not in made_from.input_features:
        raise CraftError(f"{who} needs a camera or observation.environment_state among its input features.")


def make_vlm(
    directory: Path,
    instructions: Iterable[str],
    sizes: TinySizes,
    *,
    image_size: int,
    scale_factor: int = 2,
    vocab_size: int | None = None,
) -> None:
    """Make a SmolVLM directory for smolvla's `vlm_model_name`: config, tokenizer and processor, no weights.

    Args:
        directory: Where to save.
        instructions: Instructions whose words get a token.
        sizes: What to build at, except for `vocab_size`.
        image_size: Side of the images in pixels.
        scale_factor: Patches are folded into one image token in squares of this side.
        vocab_size: Rows of the embedding; as many as the tokenizer has tokens if None.
    """
    side = image_size // sizes.patch_size
    if image_size % sizes.patch_size or side % scale_factor:
        raise CraftError(
            f"smolvla cannot see {image_size} px: the side must hold a multiple of {scale_factor} patches of "
            f"{sizes.patch_size} px. Choose another resize_imgs_with_padding or sizes.patch_size."
        )
    tokenizer = make_text_tokenizer(directory, instructions, extra_special_tokens=_IMAGE_TOKENS)
    config = SmolVLMConfig(
        vision_config={
            "hidden_size": sizes.vision_width,
            "intermediate_size": sizes.vision_mlp_dim,
            "num_hidden_layers": sizes.vision_depth,
            "num_attention_heads": sizes.vision_heads,
            "image_size": image_size,
            "patch_size": sizes.patch_size,
        },
        text_config={
            "model_type": "llama",
            "hidden_size": sizes.width,
            "intermediate_size": sizes.mlp_dim,
            "num_hidden_layers": sizes.depth,
            "num_attention_heads": sizes.num_heads,
            "num_key_value_heads": sizes.num_kv_heads,
            "head_dim": sizes.head_dim,
            "vocab_size": vocab_size or len(tokenizer),
            "rms_norm_eps": 1e-5,
            "pad_token_id": tokenizer.pad_token_id,
            "attention_bias": False,
        },
        scale_factor=scale_factor,
        image_token_id=tokenizer.convert_tokens_to_ids(_IMAGE_TOKENS["image_token"]),
        pad_token_id=tokenizer.pad_token_id,
    )
    config.save_pretrained(directory)
    SmolVLMProcessor(
        image_processor=SmolVLMImageProcessor(),
        tokenizer=tokenizer,
        video_processor=SmolVLMVideoProcessor(),
        image_seq_len=(side // scale_factor) ** 2,
    ).save_pretrained(directory)


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


def _full_denoising_pi(assets: Path) -> dict[str, Any]:
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
_SETTINGS = {"pi0_fast": _pi0_fast, "pi0": _full_denoising_pi, "pi05": _full_denoising_pi, "smolvla": _smolvla}


def _require_known(policy_type: str) -> None:
    if policy_type not in _SETTINGS:
        raise CraftError(f"There is no full-size structure of {policy_type!r}; choose one of {', '.join(_SETTINGS)}.")
