"""`pi0_fast_tiny`, `pi0_tiny` and `pi05_tiny`: lerobot's policies, built at the sizes that their config files name.

Configuration, policy and processors of a type are in this one module, with the names by which lerobot finds them: for
`XConfig` it looks for `XPolicy` and for `make_x_pre_post_processors`.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import ModuleType
from typing import Any

from lerobot.configs import PreTrainedConfig
from lerobot.policies.pi0 import modeling_pi0, processor_pi0
from lerobot.policies.pi0.configuration_pi0 import PI0Config
from lerobot.policies.pi0.modeling_pi0 import PI0Policy
from lerobot.policies.pi0_fast import modeling_pi0_fast, processor_pi0_fast
from lerobot.policies.pi0_fast.configuration_pi0_fast import PI0FastConfig
from lerobot.policies.pi0_fast.modeling_pi0_fast import PI0FastPolicy, PI0FastPytorch
from lerobot.policies.pi05 import modeling_pi05, processor_pi05
from lerobot.policies.pi05.configuration_pi05 import PI05Config
from lerobot.policies.pi05.modeling_pi05 import PI05Policy
from lerobot.processor import ActionTokenizerProcessorStep, ProcessorStepRegistry, TokenizerProcessorStep
from lerobot.utils.constants import ACTION_TOKEN_MASK, ACTION_TOKENS
from torch import Tensor

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.sizes import TinySizes, at_sizes, swapped


@PreTrainedConfig.register_subclass("pi0_fast_tiny")
@dataclass
class PI0FastTinyConfig(PI0FastConfig):  # type: ignore[misc]
    """lerobot's `PI0FastConfig` and the sizes to build at.

    Attributes:
        sizes: What to build at; None is lerobot's full size.
        leave_out_padding: Cut a training batch after its longest prompt and its longest chunk; lerobot computes the
            largest possible number of tokens. The same loss, in about half of the time at these sizes.
    """

    sizes: TinySizes | None = field(default_factory=TinySizes)
    leave_out_padding: bool = False


class SmallNetwork(PI0FastPytorch):  # type: ignore[misc]
    """lerobot's network; it decodes from the prompt that it was trained on, and can leave out padding.

    lerobot 0.6.1 trains with <bos> as the first of the causal action tokens, which no word of the prompt sees. It
    decodes with <bos> as the last word of the prompt, which all other words see. A policy with billions of parameters
    copes; a small one would act on prompts that it has never seen.
    """

    _decoding = False

    def forward(self, images: Any, img_masks: Any, tokens: Tensor, masks: Tensor, *actions: Any) -> Any:
        """Lerobot's forward pass; without padding, the prompt is cut after the last word of the longest one."""
        if self.config.leave_out_padding:
            length = _padded_to(masks)
            tokens, masks = tokens[:, :length], masks[:, :length]
        return super().forward(images, img_masks, tokens, masks, *actions)

    def sample_actions_fast(self, *args: Any, **kwargs: Any) -> Tensor:
        """Decode without a cache, as lerobot does."""
        return self._decode(super().sample_actions_fast, *args, **kwargs)

    def sample_actions_fast_kv_cache(self, *args: Any, **kwargs: Any) -> Tensor:
        """Decode with a cache of keys and values, as lerobot does."""
        return self._decode(super().sample_actions_fast_kv_cache, *args, **kwargs)

    def _decode(self, sample: Any, *args: Any, **kwargs: Any) -> Tensor:
        self._decoding = True
        try:
            tokens: Tensor = sample(*args, **kwargs)
            return tokens
        finally:
            self._decoding = False

    def _create_custom_attention_mask_fast(self, segments: Any, pad_masks: Tensor, batch_size: int) -> Tensor:
        mask: Tensor = super()._create_custom_attention_mask_fast(segments, pad_masks, batch_size)
        if self._decoding:
            mask[:, :-1, -1] = False  # the last token is <bos>
        return mask


class PI0FastTinyPolicy(PI0FastPolicy):  # type: ignore[misc]
    """lerobot's `PI0FastPolicy` at other sizes, with `SmallNetwork`; the loss is lerobot's."""

    config_class = PI0FastTinyConfig
    name = "pi0_fast_tiny"

    def __init__(self, config: PI0FastTinyConfig, **kwargs: Any) -> None:
        with (
            at_sizes(modeling_pi0_fast, config.sizes, config.image_resolution[0]),
            swapped(modeling_pi0_fast, {"PI0FastPytorch": SmallNetwork}),
        ):
            super().__init__(config, **kwargs)

    def forward(self, batch: dict[str, Any], *args: Any, **kwargs: Any) -> Any:
        """Lerobot's forward pass; without padding, tokens are cut after the last one of the longest chunk."""
        if self.config.leave_out_padding and batch.get(ACTION_TOKEN_MASK) is not None:
            length = _padded_to(batch[ACTION_TOKEN_MASK])
            batch = {**batch, **{name: batch[name][:, :length] for name in (ACTION_TOKENS, ACTION_TOKEN_MASK)}}
        return super().forward(batch, *args, **kwargs)


def _padded_to(mask: Tensor) -> int:
    """Length of the longest row of a mask [B, L] whose rows are True until padding begins; at least 1."""
    return max(1, len(mask.any(dim=0).nonzero()))


@ProcessorStepRegistry.register(name="craft_action_tokenizer_processor")
@dataclass
class SavedWholeActionTokenizerStep(ActionTokenizerProcessorStep):  # type: ignore[misc]
    """lerobot's step; its saved configuration holds all that is needed to load it again.

    lerobot 0.6.1 leaves out two fields: a reloaded step would use the Hub's tokenizer and skip 128 ids.
    """

    def get_config(self) -> dict[str, Any]:
        """Return what `__init__` needs, as JSON."""
        return {
            **super().get_config(),
            "fast_skip_tokens": self.fast_skip_tokens,
            "paligemma_tokenizer_name": self.paligemma_tokenizer_name,
        }


def make_pi0_fast_tiny_pre_post_processors(config: PI0FastTinyConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """The pre- and postprocessor of lerobot's pi0_fast, with an action tokenizer step that can be loaded again."""
    with swapped(processor_pi0_fast, {"ActionTokenizerProcessorStep": SavedWholeActionTokenizerStep}):
        pipelines: tuple[Any, Any] = processor_pi0_fast.make_pi0_fast_pre_post_processors(config, dataset_stats)
    return pipelines


@PreTrainedConfig.register_subclass("pi0_tiny")
@dataclass
class PI0TinyConfig(PI0Config):  # type: ignore[misc]
    """lerobot's `PI0Config` and the sizes to build at.

    Attributes:
        sizes: What to build at; None is lerobot's full size.
        text_tokenizer_name: Directory or Hub name of the prompt's tokenizer; lerobot's pi0 leaves no choice.
    """

    sizes: TinySizes | None = field(default_factory=TinySizes)
    text_tokenizer_name: str = "google/paligemma-3b-pt-224"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_eight_heads("pi0", self.sizes)


class PI0TinyPolicy(PI0Policy):  # type: ignore[misc]
    """lerobot's `PI0Policy`; only the sizes differ, forward and loss are lerobot's."""

    config_class = PI0TinyConfig
    name = "pi0_tiny"

    def __init__(self, config: PI0TinyConfig, **kwargs: Any) -> None:
        with at_sizes(modeling_pi0, config.sizes, config.image_resolution[0]):
            super().__init__(config, **kwargs)


def make_pi0_tiny_pre_post_processors(config: PI0TinyConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """The pre- and postprocessor of lerobot's pi0, with the tokenizer that the config names."""
    with _tokenizer(processor_pi0, config.text_tokenizer_name):
        pipelines: tuple[Any, Any] = processor_pi0.make_pi0_pre_post_processors(config, dataset_stats)
    return pipelines


@PreTrainedConfig.register_subclass("pi05_tiny")
@dataclass
class PI05TinyConfig(PI05Config):  # type: ignore[misc]
    """lerobot's `PI05Config` and the sizes to build at.

    Attributes:
        sizes: What to build at; None is lerobot's full size.
        text_tokenizer_name: Directory or Hub name of the prompt's tokenizer; lerobot's pi05 leaves no choice.
    """

    sizes: TinySizes | None = field(default_factory=TinySizes)
    text_tokenizer_name: str = "google/paligemma-3b-pt-224"

    def __post_init__(self) -> None:
        super().__post_init__()
        _require_eight_heads("pi05", self.sizes)


class PI05TinyPolicy(PI05Policy):  # type: ignore[misc]
    """lerobot's `PI05Policy`; only the sizes differ, forward and loss are lerobot's."""

    config_class = PI05TinyConfig
    name = "pi05_tiny"

    def __init__(self, config: PI05TinyConfig, **kwargs: Any) -> None:
        with at_sizes(modeling_pi05, config.sizes, config.image_resolution[0]):
            super().__init__(config, **kwargs)


def make_pi05_tiny_pre_post_processors(config: PI05TinyConfig, dataset_stats: Any = None) -> tuple[Any, Any]:
    """The pre- and postprocessor of lerobot's pi05, with the tokenizer that the config names."""
    with _tokenizer(processor_pi05, config.text_tokenizer_name):
        pipelines: tuple[Any, Any] = processor_pi05.make_pi05_pre_post_processors(config, dataset_stats)
    return pipelines


def _require_eight_heads(policy: str, sizes: TinySizes | None) -> None:
    if sizes is not None and sizes.num_heads != 8:
        raise CraftError(
            f"{policy} has eight heads whatever its config says: sizes.num_heads={sizes.num_heads} cannot run."
        )


@contextmanager
def _tokenizer(module: ModuleType, name: str) -> Iterator[None]:
    """Let lerobot's `processor_pi0` or `processor_pi05` make its prompt with the tokenizer of that name."""

    def step(**kwargs: Any) -> TokenizerProcessorStep:
        return TokenizerProcessorStep(**{**kwargs, "tokenizer_name": name})

    with swapped(module, {"TokenizerProcessorStep": step}):
        yield
