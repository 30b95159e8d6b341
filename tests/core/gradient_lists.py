"""Random gradient lists for property tests, and the long vectors that they stand for."""

import torch
from hypothesis import strategies as st

SHAPES = [(3,), (2, 4), (1,), (5, 1, 2)]


def gradients(seed, scale=1.0, missing=(), dtype=torch.float64):
    """One gradient per shape; those at the `missing` places are None."""
    generator = torch.Generator().manual_seed(seed)
    drawn = [scale * torch.randn(s, generator=generator, dtype=torch.float64) for s in SHAPES]
    return [None if i in missing else g.to(dtype) for i, g in enumerate(drawn)]


def vector(grads):
    """The list as one float64 vector; None is zeros."""
    return torch.cat(
        [
            torch.zeros(torch.Size(s).numel(), dtype=torch.float64) if g is None else g.detach().double().flatten()
            for g, s in zip(grads, SHAPES, strict=True)
        ]
    )


def clone(grads):
    return [None if g is None else g.clone() for g in grads]


seeds = st.integers(0, 10_000)
scales = st.floats(1e-6, 1e6)
lambdas = st.floats(0, 100)
thresholds = st.floats(-1, 0)
missing_places = st.sets(st.integers(0, len(SHAPES) - 1), max_size=len(SHAPES) - 1)


@st.composite
def gradient_pairs(draw, dtype=torch.float64):
    """(t, r), with gaps, of any angle: r is turned towards or against t by a random amount."""
    t = gradients(draw(seeds), draw(scales), draw(missing_places), dtype)
    r = gradients(draw(seeds), draw(scales), draw(missing_places), dtype)
    turn = draw(st.floats(-2, 2))
    ratio = vector(r).norm() / vector(t).norm()
    turned = [
        y if x is None or y is None else (y.double() + turn * ratio * x.double()).to(dtype)
        for x, y in zip(t, r, strict=True)
    ]
    return t, turned
