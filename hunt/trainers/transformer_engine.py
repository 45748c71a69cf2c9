"""TransformerEngine's fused cross-entropy, its Triton kernels interpreted."""

from __future__ import annotations

from hunt.outcomes import Outcome
from hunt.trainers import trainer


@trainer("transformer_engine/per-token", "transformer_engine/mean", "transformer_engine/smoothed")
def cross_entropy(*, name: str, by: str = "trainer") -> Outcome:
    """Tokens have weights of their own, the first one none, as a prompt's."""
    import torch

    generator, dtype = torch.Generator().manual_seed(0), torch.float64 if by == "formula" else torch.float32
    logits = torch.randn(5, 2, 38, generator=generator).to(dtype).requires_grad_()
    target, weights = torch.randint(0, 38, (5, 2), generator=generator), torch.rand(5, 2, generator=generator)
    weights[0] = 0.0
    smoothing, reduce = 0.1 * (name == "smoothed"), name == "mean"
    if by == "formula":
        losses = torch.nn.functional.cross_entropy(
            logits.flatten(0, 1), target.flatten(), label_smoothing=smoothing, reduction="mean" if reduce else "none"
        )
        losses = losses if reduce else losses.view(5, 2)
    else:
        from transformer_engine.pytorch.cross_entropy import parallel_cross_entropy

        losses = parallel_cross_entropy(logits * 1.0, target, smoothing, reduce, None)
    loss = losses * 3.0 if reduce else (losses * weights).sum() / weights.sum()
    loss.backward()
    return {"loss": {"step": loss.detach()}, "gradient": {"logits": logits.grad}}
