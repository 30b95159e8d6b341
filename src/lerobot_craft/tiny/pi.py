"""`pi0_fast_tiny`, `pi0_tiny` and `pi05_tiny`: lerobot's policies, built at the sizes that their config files name.

Configuration, policy and processors of a type are in this one module, with the names by which lerobot finds them: for
`XConfig` it looks for `XPolicy` and for `make_x_pre_post_processors`.

lerobot's pi modules have fixed sizes in their constructors; `at_sizes` makes them build at others.
"""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import wraps
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

# What lerobot's pi modules call in their constructors; pi0_fast has no action expert and so lacks the last.
_CONSTRUCTORS = ("get_gemma_config", "PaliGemmaForConditionalGenerationWithPiGemma", "PiGemmaForCausalLM")
# All threads share a module's names: two policies that are built at the same time must not see each other's.
_one_at_a_time = threading.RLock()


@dataclass(frozen=True)
class TinySizes:
    """Widths and depths of a tiny policy; the defaults give 300 to 600 thousand parameters.

    Attributes:
        width: Width of the language model's residual stream.
        depth: Layers of the language model and of the action expert.
        mlp_dim: Hidden width of the language model's MLPs.
        num_heads: Query heads. lerobot's pi0 and pi05 reshape to eight heads whatever the config says.
        num_kv_heads: Key and value heads.
        head_dim: Width of a head.
        expert_width: Width of the action expert (pi0, pi05, smolvla).
        expert_mlp_dim: Hidden width of the action expert's MLPs (pi0, pi05; smolvla derives its own).
        vocab_size: Rows of the embedding. `make_checkpoint` sets it to the tokenizer's size.
        vision_width: Width of the image tower.
        vision_depth: Layers of the image tower.
        vision_heads: Heads of the image tower.
        vision_mlp_dim: Hidden width of the image tower's MLPs.
        patch_size: Side of an image patch in pixels.
    """

    width: int = 64
    depth: int = 4
    mlp_dim: int = 128
    num_heads: int = 8
    num_kv_heads: int = 1
    head_dim: int = 16
    expert_width: int = 32
    expert_mlp_dim: int = 64
    vocab_size: int = 1024
    vision_width: int = 32
    vision_depth: int = 2
    vision_heads: int = 2
    vision_mlp_dim: int = 64
    patch_size: int = 14

    def __post_init__(self) -> None:
        for name, value in vars(self).items():
            if value < 1:
                raise CraftError(f"TinySizes.{name} is {value}: a size is at least 1.")
        if self.head_dim % 2:
            raise CraftError(f"TinySizes.head_dim is {self.head_dim}: rotary embeddings need an even number.")
        if self.num_heads % self.num_kv_heads:
            raise CraftError(f"TinySizes: {self.num_heads} heads cannot share {self.num_kv_heads} key and value heads.")
        if self.vision_width % self.vision_heads:
            raise CraftError(f"TinySizes: {self.vision_width} does not divide into {self.vision_heads} vision heads.")


@contextmanager
def swapped(module: ModuleType, replacements: dict[str, Any]) -> Iterator[None]:
    """Give names of a lerobot module other values inside the block; the former ones return, also after an error.

    Blocks may be nested; blocks of other threads wait.

    Args:
        module: The module whose globals change.
        replacements: The new value of each name. A name the module does not have is an `AttributeError`.
    """
    with _one_at_a_time:
        before = {name: getattr(module, name) for name in replacements}
        try:
            for name, value in replacements.items():
                setattr(module, name, value)
            yield
        finally:
            for name, value in before.items():
                setattr(module, name, value)


@contextmanager
def at_sizes(module: ModuleType, sizes: TinySizes | None, image_size: int) -> Iterator[None]:
    """Let lerobot's `modeling_pi0`, `modeling_pi05` or `modeling_pi0_fast` build at `sizes` inside the block.

    Only the constructors that the module calls are swapped, for ones that shrink their configuration first.

    Args:
        module: lerobot's modeling module.
        sizes: What to build at; None builds at lerobot's own full size, with nothing swapped.
        image_size: Side in pixels of the images that the policy resizes to.
    """
    # In a nested block the module holds the outer block's constructors: unwrap back to lerobot's.
    full_size = {name: inspect.unwrap(getattr(module, name)) for name in _CONSTRUCTORS if hasattr(module, name)}
    if sizes is None:
        with swapped(module, full_size):
            yield
        return
    shrink: dict[str, Callable[..., Any]] = {
        "get_gemma_config": lambda original: _gemma_at(sizes, original),
        "PaliGemmaForConditionalGenerationWithPiGemma": lambda original: _paligemma_at(sizes, image_size, original),
        "PiGemmaForCausalLM": lambda original: _expert_at(sizes, original),
    }
    with swapped(module, {name: shrink[name](original) for name, original in full_size.items()}):
        yield


def _gemma_at(sizes: TinySizes, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original)
    def get_gemma_config(variant: str) -> Any:
        config = original(variant)
        expert = variant == "gemma_300m"
        config.width = sizes.expert_width if expert else sizes.width
        config.mlp_dim = sizes.expert_mlp_dim if expert else sizes.mlp_dim
        config.depth = sizes.depth
        config.num_heads, config.num_kv_heads, config.head_dim = sizes.num_heads, sizes.num_kv_heads, sizes.head_dim
        return config

    return get_gemma_config


def _paligemma_at(sizes: TinySizes, image_size: int, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original, updated=())
    def build(config: Any) -> Any:
        text, vision = config.text_config, config.vision_config
        text.vocab_size = config._vocab_size = config.vocab_size = sizes.vocab_size
        text.pad_token_id = 0
        # lerobot feeds embeddings, never this token; it only has to exist in the smaller vocabulary.
        config.image_token_index = sizes.vocab_size - 1
        vision.hidden_size, vision.num_hidden_layers = sizes.vision_width, sizes.vision_depth
        vision.num_attention_heads, vision.intermediate_size = sizes.vision_heads, sizes.vision_mlp_dim
        vision.image_size, vision.patch_size = image_size, sizes.patch_size
        vision.projection_dim = text.hidden_size
        return original(config=config)

    return build


def _expert_at(sizes: TinySizes, original: Callable[..., Any]) -> Callable[..., Any]:
    @wraps(original, updated=())
    def build(config: Any) -> Any:
        config.vocab_size, config.pad_token_id = sizes.vocab_size, 0
        return original(config=config)

    return build


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
