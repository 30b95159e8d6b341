"""Small real checkpoints, and a way to damage them."""

from pathlib import Path

import torch
from safetensors.torch import load_file, save_file

ACTION_DIM, STATE_DIM, ENVIRONMENT_DIM = 2, 3, 2


def dataset_stats():
    dims = {"observation.state": STATE_DIM, "observation.environment_state": ENVIRONMENT_DIM, "action": ACTION_DIM}
    return {name: {"mean": torch.full((n,), 0.5), "std": torch.full((n,), 2.0)} for name, n in dims.items()}


def save_act(directory: Path) -> Path:
    """ACT by lerobot's own classes without cameras: 8 thousand parameters, saved as `lerobot-train` saves."""
    from lerobot.configs import FeatureType, PolicyFeature
    from lerobot.policies.act.configuration_act import ACTConfig
    from lerobot.policies.act.modeling_act import ACTPolicy
    from lerobot.policies.factory import make_pre_post_processors

    sizes = {"dim_model": 16, "n_heads": 2, "dim_feedforward": 32, "latent_dim": 4}
    config = ACTConfig(
        device="cpu",
        push_to_hub=False,
        chunk_size=4,
        n_action_steps=4,
        n_encoder_layers=1,
        n_vae_encoder_layers=1,
        input_features={
            "observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,)),
            "observation.environment_state": PolicyFeature(FeatureType.ENV, (ENVIRONMENT_DIM,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        **sizes,
    )
    ACTPolicy(config).save_pretrained(directory)
    for processor in make_pre_post_processors(config, dataset_stats=dataset_stats()):
        processor.save_pretrained(directory)
    return directory


def edit_tensors(file: Path, change) -> None:
    """Write the file anew after `change` had its tensors, a dict, in hand."""
    tensors = {name: tensor.clone() for name, tensor in load_file(file).items()}
    change(tensors)
    save_file(tensors, file)


def save_vla(policy_type: str, directory: Path) -> Path:
    """A vision-language-action policy by lerobot's own classes at a few hundred thousand parameters."""
    import numpy as np
    from lerobot.configs import FeatureType, PolicyFeature

    from lerobot_craft.tiny.make import make_checkpoint

    bounds = {"mean": 0.0, "std": 1.0, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}
    dims = {"observation.state": STATE_DIM, "action": ACTION_DIM}
    return make_checkpoint(
        policy_type,
        directory,
        input_features={
            "observation.images.top": PolicyFeature(FeatureType.VISUAL, (3, 32, 32)),
            "observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,)),
        },
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        dataset_stats={
            name: {stat: torch.full((n,), value) for stat, value in bounds.items()} for name, n in dims.items()
        },
        instructions=["open the drawer", "close the drawer"],
        action_chunks=np.random.default_rng(0).uniform(-1, 1, (64, 8, ACTION_DIM)).cumsum(1) / 8,
    )
