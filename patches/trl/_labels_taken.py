"""Whether ``Trainer`` has taken the labels out of SFT's batch, so the forward pass has counted nothing."""

from __future__ import annotations

import sys
from typing import Any


def taken(self: Any, model: Any, inputs: Any) -> bool:
    """Whether the step raises as released, and does not with the patch."""
    return self.args.loss_type == "chunked_nll" and "labels" in inputs and _from_logits(self, model)


def counted(self: Any, model: Any, outputs: Any) -> bool:
    """Whether to read the forward pass's own counts, which raises where there are none."""
    return hasattr(outputs, "num_valid_tokens") or not _from_logits(self, model)


def _from_logits(self: Any, model: Any) -> bool:
    """Whether the loss is computed from logits: by the user's function, or by smoothing labels that are shifted."""
    if self.compute_loss_func is not None:
        return True
    return self.label_smoother is not None and _shifts(model)


def _shifts(model: Any) -> bool:
    """Whether transformers shifts this model's labels: it asks for the name of the class within DDP and PEFT."""
    from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

    modules = model._modules  # torch.compile's wrapper hands other attributes through
    model = modules.get("module", model)
    peft = sys.modules.get("peft")
    if peft is not None and isinstance(model, peft.PeftModel):
        model = model.base_model.model
    # known: transformers itself decides by this name
    return type(model).__name__ in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values()
