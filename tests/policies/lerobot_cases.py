"""The six policies that CRaFT knows, small, with what their own code says about hidden states and losses."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from lerobot_craft.policies import Batch, Fixed, Layer
from tests.policies.case import PolicyCase

ROWS, CHUNK, ACTION_DIM, STATE_DIM = 3, 8, 4, 5
SIDE = 64  # pixels; at 32 a ResNet leaves one pixel, whose spatial softmax has no gradient
CAMERAS = ("observation.images.top", "observation.images.wrist")
SCENE, SCENE_DIM = "observation.environment_state", 6
INSTRUCTIONS = ("open the drawer", "now close the small red box", "stop")


def build(
    policy_type: str, directory: Path, *, blind: bool = False, **overrides: Any
) -> tuple[Any, Callable[[Any], Batch]]:
    """A small policy of a type with random weights, and its preprocessor. A blind one is told where things are."""
    from lerobot.configs import FeatureType, PolicyFeature, PreTrainedConfig
    from lerobot.policies import get_policy_class, make_pre_post_processors

    from lerobot_craft.tiny.make import make_checkpoint

    sight = {camera: PolicyFeature(FeatureType.VISUAL, (3, SIDE, SIDE)) for camera in CAMERAS}
    if blind:
        sight = {SCENE: PolicyFeature(FeatureType.ENV, (SCENE_DIM,))}
    checkpoint = make_checkpoint(
        policy_type,
        directory,
        input_features={**sight, "observation.state": PolicyFeature(FeatureType.STATE, (STATE_DIM,))},
        output_features={"action": PolicyFeature(FeatureType.ACTION, (ACTION_DIM,))},
        dataset_stats=_stats(),
        instructions=INSTRUCTIONS,
        action_chunks=_smooth_actions(200),
        **overrides,
    )
    config = PreTrainedConfig.from_pretrained(checkpoint)
    config.pretrained_path = checkpoint
    policy = get_policy_class(config.type).from_pretrained(checkpoint, config=config)
    return policy, make_pre_post_processors(config, pretrained_path=str(checkpoint))[0]


def raw_batch(observation_steps: tuple[int, ...] = (), *, blind: bool = False) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(0)
    sight = {camera: torch.rand(ROWS, *observation_steps, 3, SIDE, SIDE, generator=generator) for camera in CAMERAS}
    if blind:
        sight = {SCENE: torch.rand(ROWS, *observation_steps, SCENE_DIM, generator=generator)}
    state = torch.rand(ROWS, *observation_steps, STATE_DIM, generator=generator) * 2 - 1
    return {
        **sight,
        "observation.state": state,
        "action": torch.from_numpy(_smooth_actions(ROWS)),
        "action_is_pad": torch.zeros(ROWS, CHUNK, dtype=torch.bool),
        "task": list(INSTRUCTIONS),
    }


def _stats() -> dict[str, dict[str, Tensor]]:
    unit = {"mean": 0.1, "std": 0.9, "min": -1.0, "max": 1.0, "q01": -1.0, "q99": 1.0}
    sizes = {"observation.state": STATE_DIM, SCENE: SCENE_DIM, "action": ACTION_DIM}
    stats = {name: {stat: torch.full((n,), value) for stat, value in unit.items()} for name, n in sizes.items()}
    image = {"mean": 0.5, "std": 0.3, "min": 0.0, "max": 1.0}
    return stats | {camera: {stat: torch.full((3, 1, 1), v) for stat, v in image.items()} for camera in CAMERAS}


def _smooth_actions(count: int) -> np.ndarray:
    steps = np.random.default_rng(0).normal(size=(count, CHUNK, ACTION_DIM)) * 0.2
    return steps.cumsum(1).clip(-1, 1).astype(np.float32)


@contextmanager
def _sums_of(layers: nn.ModuleList) -> Iterator[list[Tensor]]:
    """Outputs of decoder layers from their last two summands: what enters the second norm, and the MLP's output."""
    residuals: dict[int, Tensor] = {}
    outputs: list[Tensor] = []

    def after_mlp(index: int) -> Any:
        def hook(_module: nn.Module, _args: Any, output: Tensor) -> None:
            if len(outputs) == index:  # checkpointing comes by again
                outputs.append(residuals[index] + output.clone())  # smolvla adds in place

        return hook

    handles = []
    for index, layer in enumerate(layers):
        norm = layer.post_attention_layernorm
        handles.append(norm.register_forward_pre_hook(lambda _m, args, i=index: residuals.setdefault(i, args[0])))
        handles.append(layer.mlp.register_forward_hook(after_mlp(index)))
    yield outputs
    for handle in handles:
        handle.remove()


def _language_layers(policy: Any) -> nn.ModuleList:
    model = policy.model
    if hasattr(model, "vlm_with_expert"):
        return model.vlm_with_expert.vlm.model.text_model.layers
    return model.paligemma_with_expert.paligemma.model.language_model.layers


def _vla_full_pass(policy: Any, batch: Batch) -> dict[Layer, Tensor]:
    with _sums_of(_language_layers(policy)) as outputs:
        policy.forward(dict(batch))
    return {Layer("", index): hidden for index, hidden in enumerate(outputs)}


def _act_full_pass(policy: Any, batch: Batch) -> dict[Layer, Tensor]:
    outputs: list[Tensor] = []
    handles = [
        layer.register_forward_hook(lambda _m, _a, output: outputs.append(output.transpose(0, 1)))
        for layer in policy.model.encoder.layers
    ]
    policy.forward(dict(batch))
    for handle in handles:
        handle.remove()
    return {Layer("", index): hidden for index, hidden in enumerate(outputs)}


def _diffusion_full_pass(policy: Any, batch: Batch) -> dict[Layer, Tensor]:
    outputs: list[Tensor] = []
    shared = policy.diffusion.rgb_encoder
    encoders = shared if isinstance(shared, nn.ModuleList) else [shared]
    handles = [encoder.register_forward_hook(lambda _m, _a, output: outputs.append(output)) for encoder in encoders]
    policy.forward(dict(batch))
    for handle in handles:
        handle.remove()
    if len(outputs) == 1:
        outputs = list(outputs[0].unflatten(0, (ROWS * 2, len(CAMERAS))).unbind(1))
    return {Layer("", 0): torch.cat([output.unflatten(0, (ROWS, 2)) for output in outputs], dim=1)}


def _flow_loss(policy: Any, batch: Batch) -> tuple[Tensor, Fixed]:
    torch.manual_seed(0)
    loss = policy.forward(dict(batch))[0]
    torch.manual_seed(0)
    actions = policy.prepare_action(batch)
    noise = policy.model.sample_noise(actions.shape, actions.device)
    time = policy.model.sample_time(len(actions), actions.device)
    x_t = time[:, None, None] * noise + (1 - time[:, None, None]) * actions
    return loss, {"x_t": x_t, "time": time, "actions": actions}


def _token_loss(policy: Any, batch: Batch) -> tuple[Tensor, Fixed]:
    return policy.forward(dict(batch))[0], {}


def _act_loss(policy: Any, batch: Batch) -> tuple[Tensor, Fixed]:
    return torch.tensor(policy.forward(dict(batch))[1]["l1_loss"]), {}  # in eval mode it is the whole loss


def _diffusion_loss(policy: Any, batch: Batch) -> tuple[Tensor, Fixed]:
    torch.manual_seed(0)
    loss = policy.forward(dict(batch))[0]
    torch.manual_seed(0)
    scheduler = policy.diffusion.noise_scheduler
    noise = torch.randn(batch["action"].shape)
    timestep = torch.randint(0, scheduler.config.num_train_timesteps, (ROWS,))
    return loss, {"noisy_actions": scheduler.add_noise(batch["action"], noise, timestep), "timestep": timestep}


def _vla(policy_type: str, loss: Any, name: str = "", outside: int = 0, **overrides: Any) -> PolicyCase:
    return PolicyCase(
        name or policy_type,
        partial(build, policy_type, **overrides),
        raw_batch,
        _vla_full_pass,
        loss,
        bfloat16={} if policy_type == "smolvla" else {"dtype": "bfloat16"},
        tokens_outside_spans=outside,
    )


def _act(name: str, outside: int, blind: bool = False, **overrides: Any) -> PolicyCase:
    make, batch = partial(build, "act", blind=blind, **overrides), partial(raw_batch, blind=blind)
    return PolicyCase(name, make, batch, _act_full_pass, _act_loss, tokens_outside_spans=outside)


def _diffusion(name: str, **overrides: Any) -> PolicyCase:
    # A crop, since it is what makes train mode random.
    make = partial(build, "diffusion", crop_shape=(56, 56), **overrides)
    return PolicyCase(name, make, partial(raw_batch, (2,)), _diffusion_full_pass, _diffusion_loss)


CASES = (
    _vla("pi0_fast", _token_loss),
    _vla("pi0", _flow_loss),
    _vla("pi05", _flow_loss),
    _vla("smolvla", _flow_loss),
    # Half as many expert layers, the markers of images, and a prefix padded on the right.
    _vla(
        "smolvla",
        _flow_loss,
        name="smolvla-options",
        outside=3 * len(CAMERAS),
        num_expert_layers=2,
        self_attn_every_n_layers=-1,  # lerobot's default has no room for fewer expert layers
        add_image_special_tokens=True,
        prefix_length=40,
    ),
    _act("act", outside=1),  # the latent
    _act("act-options", outside=2, blind=True, pre_norm=True, n_decoder_layers=2),  # the latent and the scene
    _diffusion("diffusion"),
    _diffusion("diffusion-options", prediction_type="sample", use_separate_rgb_encoder_per_camera=True),
)
