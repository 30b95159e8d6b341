"""From a sequence of hidden states to the retained vectors: docs/method.md, equations (7) to (10).

The caller says which tokens are image, language, state or action (`TokenSpans`, taken from the model itself). The pad
mask says which are real. Nothing here guesses a number of image tokens.
"""

from dataclasses import dataclass
from typing import Literal, NamedTuple, get_args

import torch
from torch import Tensor

from lerobot_craft.core.precision import widen

Pooling = Literal["mean_image_tokens", "mean_masked", "last_token", "cls_token", "vision_mean+text_last", "none"]
Span = tuple[int, int]  # [start, stop) along the token dimension


@dataclass(frozen=True)
class TokenSpans:
    """Position of each modality in the token sequence; omitted if the policy does not have it."""

    image: tuple[Span, ...] = ()  # one per camera
    language: Span | None = None
    state: Span | None = None
    action: Span | None = None

    def __post_init__(self) -> None:
        for name in ("language", "state", "action"):
            _check_span(name, getattr(self, name) or (0, 0))
        for camera in self.image:
            _check_span("image", camera)


class Pooled(NamedTuple):
    """Pooled vectors, and which of them come from at least one real token."""

    features: Tensor  # [B, D], [B, 2, D] (vision_mean+text_last) or [B, T, D] (none)
    valid: Tensor  # boolean, features.shape[:-1]


def identify_image_tokens(spans: TokenSpans, num_tokens: int, device: torch.device | None = None) -> Tensor:
    """Boolean [T]: True where a position belongs to a camera.

    Args:
        spans: Positions of the cameras' tokens, as the model reports them.
        num_tokens: T.
        device: Device of the result.
    """
    if not spans.image:
        raise ValueError("this policy reports no image tokens: choose a pooling other than image means")
    is_image = torch.zeros(num_tokens, dtype=torch.bool, device=device)
    for start, stop in spans.image:
        _check_inside("image", stop, num_tokens)
        is_image[start:stop] = True
    return is_image


def pool_hidden_states(hidden: Tensor, mask: Tensor, pooling: Pooling, spans: TokenSpans) -> Pooled:
    """Pool [B, T, D] hidden states over real tokens.

    Args:
        hidden: [B, T, D], any floating dtype. Means are taken in float32.
        mask: Boolean [B, T], False at padding and at the tokens of missing cameras.
        pooling: `mean_image_tokens` (7), `mean_masked` (8), `last_token` and `cls_token` (9: the last and the first
            real token), `vision_mean+text_last` (10: both, stacked) or `none` (every token, also those not `valid`).
        spans: Positions of the modalities.

    Returns:
        `features` [B, D], [B, 2, D] (`vision_mean+text_last`) or [B, T, D] (`none`); boolean `valid`, without D.
    """
    if mask.shape != hidden.shape[:2]:
        raise ValueError(f"mask {tuple(mask.shape)} must have one entry per token of hidden {tuple(hidden.shape)}")
    mask = mask.to(torch.bool)
    num_tokens = hidden.shape[1]
    match pooling:
        case "mean_image_tokens":
            return _mean(hidden, mask & identify_image_tokens(spans, num_tokens, mask.device))
        case "mean_masked":
            return _mean(hidden, mask)
        case "last_token":
            return _pick(hidden, mask, last=True)
        case "cls_token":
            return _pick(hidden, mask, last=False)
        case "vision_mean+text_last":
            vision = _mean(hidden, mask & identify_image_tokens(spans, num_tokens, mask.device))
            text = _pick(hidden, mask & _is_language(spans, num_tokens, mask.device), last=True)
            return Pooled(
                torch.stack((vision.features, text.features), dim=1),
                torch.stack((vision.valid, text.valid), dim=1),
            )
        case "none":
            return Pooled(hidden, mask)
    raise ValueError(f"pooling must be one of {', '.join(get_args(Pooling))}; got {pooling!r}")


def _mean(hidden: Tensor, chosen: Tensor) -> Pooled:
    count = chosen.sum(dim=1)  # [B]
    kept = widen(hidden).masked_fill(~chosen.unsqueeze(-1), 0)  # filled, not multiplied: NaN in padding must not leak
    return Pooled(kept.sum(dim=1) / count.clamp_min(1).unsqueeze(-1), count > 0)


def _pick(hidden: Tensor, chosen: Tensor, *, last: bool) -> Pooled:
    positions = torch.arange(hidden.shape[1], device=hidden.device)
    if last:
        index = torch.where(chosen, positions, -1).amax(dim=1).clamp_min(0)
    else:
        index = torch.where(chosen, positions, hidden.shape[1]).amin(dim=1).clamp_max(hidden.shape[1] - 1)
    valid = chosen.any(dim=1)
    token = widen(hidden[torch.arange(len(hidden), device=hidden.device), index])
    return Pooled(token.masked_fill(~valid.unsqueeze(-1), 0), valid)


def _is_language(spans: TokenSpans, num_tokens: int, device: torch.device) -> Tensor:
    if spans.language is None:
        raise ValueError("this policy reports no language tokens: choose a pooling without text_last")
    start, stop = spans.language
    _check_inside("language", stop, num_tokens)
    positions = torch.arange(num_tokens, device=device)
    return (positions >= start) & (positions < stop)


def _check_span(name: str, span: Span) -> None:
    start, stop = span
    if not 0 <= start <= stop:
        raise ValueError(f"{name} span {span} must satisfy 0 <= start <= stop")


def _check_inside(name: str, stop: int, num_tokens: int) -> None:
    if stop > num_tokens:
        raise ValueError(f"{name} tokens end at {stop}, but the sequence has only {num_tokens}")
