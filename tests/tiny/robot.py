"""A made-up robot with two cameras: features, statistics, smooth actions and batches for the tests of this folder."""

import numpy as np
import torch
from lerobot.configs import FeatureType, PolicyFeature

INSTRUCTIONS = ("push the red block", "open_the drawer", "put it in the green basket")
CHUNK, ACTION_DIM, STATE_DIM, SIDE = 8, 4, 6, 32
CAMERAS = ("observation.images.top", "observation.images.wrist")
STATE = {"observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,))}
INPUTS = {**{camera: PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)) for camera in CAMERAS}, **STATE}
STATE_ONLY = {**STATE, "observation.environment_state": PolicyFeature(FeatureType.ENV, (3,))}
OUTPUTS = {"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))}


def stats():
    """Statistics whose every kind differs, so that a policy that used the wrong one would show."""
    sizes = {"observation.state": STATE_DIM, "observation.environment_state": 3, "action": ACTION_DIM}
    values = {"mean": 0.1, "std": 0.7, "min": -2.0, "max": 2.5, "q01": -1.8, "q99": 2.2}
    return {name: {stat: torch.full((size,), v) for stat, v in values.items()} for name, size in sizes.items()}


def chunks(count=300, seed=0):
    """Smooth action chunks [N, H, A] within the statistics' range."""
    rng = np.random.default_rng(seed)
    time = np.linspace(0, 1, CHUNK)[None, :, None]
    start, speed, bend = rng.normal(size=(3, count, 1, ACTION_DIM)) * np.array([0.6, 0.5, 0.2])[:, None, None, None]
    return np.clip(start + speed * time + bend * np.sin(3 * time), -2, 2.5).astype(np.float32)


def batch(policy_type, size=3, inputs=INPUTS, seed=0):
    """A batch as the data loader gives it, before the preprocessor."""
    generator = torch.Generator().manual_seed(seed)
    steps = (2,) if policy_type == "diffusion" else ()  # it looks at two observations
    observations = {
        name: torch.rand((size, *steps, *feature.shape), generator=generator) for name, feature in inputs.items()
    }
    return {
        **observations,
        "action": torch.from_numpy(chunks(size, seed=seed + 1)),
        "action_is_pad": torch.zeros(size, CHUNK, dtype=torch.bool),
        "task": [INSTRUCTIONS[i % len(INSTRUCTIONS)] for i in range(size)],
    }
