"""The sizes of a tiny policy, and how lerobot's pi modules are made to build at them."""

import inspect
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import wraps
from types import ModuleType
from typing import Any

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
