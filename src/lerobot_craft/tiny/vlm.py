"""A local SmolVLM directory for smolvla: configuration, tokenizer and processor, no weights."""

from collections.abc import Iterable
from pathlib import Path

from transformers import SmolVLMConfig, SmolVLMImageProcessor, SmolVLMProcessor
from transformers.models.smolvlm.video_processing_smolvlm import SmolVLMVideoProcessor

from lerobot_craft.errors import CraftError
from lerobot_craft.tiny.sizes import TinySizes
from lerobot_craft.tiny.tokenizers import make_text_tokenizer

_IMAGE_TOKENS = {
    "fake_image_token": "<fake_token_around_image>",
    "image_token": "<image>",
    "global_image_token": "<global-img>",
    "end_of_utterance_token": "<end_of_utterance>",
}


def make_vlm(
    directory: Path,
    instructions: Iterable[str],
    sizes: TinySizes,
    *,
    image_size: int,
    scale_factor: int = 2,
    vocab_size: int | None = None,
) -> None:
    """Make a SmolVLM directory that smolvla's `vlm_model_name` can name, with `load_vlm_weights=False`.

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
