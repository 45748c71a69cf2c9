"""In which calls the bugs of the patches of Muon occur, decided from attributes and shapes alone."""

from __future__ import annotations

from typing import Any

from .. import _released
from . import muon_split_matrices


def has_matrices(self: Any) -> bool | None:
    """Whether a `MuonWithAuxAdam` steps on matrices, which no ZeRO optimizer has orthogonalized.

    None for a user's subclass, which may have done so itself.
    """
    found = any(param.dim() > 1 for group in self.param_groups if group["use_muon"] for param in group["params"])
    # known: only a class defined in that module has this name; a subclass defined elsewhere is a user's
    return None if found and type(self).__module__ != "deepspeed.runtime.zero.muon.muon_optimizer" else found


def orthogonalizes_parts(self: Any, params_to_release: Any) -> bool | None:
    """Whether ZeRO-3 with Muon takes parameters' gradients of a later micro-batch, or from a bucket of another kind.

    None for a subclass.
    """
    if not getattr(self, "use_muon", False):
        return False
    using = [self.sub_groups_using_muon[self.grad_position[self.get_param_id(param)][0]] for param in params_to_release]
    if not any(using):
        return False
    large = sum(param.ds_numel for param in params_to_release) > self.reduce_bucket_size
    if self.micro_step_id == 0 and not large and self.contiguous_gradients:
        return False
    # known: only a class defined in that module has this name; MiCS and a user's subclass are defined elsewhere
    return True if type(self).__module__ == "deepspeed.runtime.zero.stage3" else None


def keeps_one_momentum(self: Any, tensor_list: Any) -> bool | None:
    """Whether a rank's partition of a group has several matrices for Muon; None if a user's function stages momenta."""
    if len(tensor_list) < 2 or not self._is_muon_group(tensor_list):
        return False
    own = _released.others(self, "_muon_staging_momentum", "_is_muon_group", packages=("deepspeed",))
    return None if own else True


def looks_flat(config_class: Any, model: Any) -> bool:
    """Whether Muon is configured for a model that trains matrices whose own shape does not show, as of `zero.Init`.

    LoRA freezes these, and trains matrices of its own.
    """
    if config_class.optimizer_name != "muon":
        return False
    return any(
        parameter.requires_grad
        and parameter.ndim < 2 <= len(getattr(parameter, "ds_shape", ()))
        and not any(word in name.lower() for word in ("embed", "lm_head"))
        for name, parameter in model.named_parameters()
    )


def is_on_the_cpu(self: Any) -> bool | None:
    """Whether a step of ZeRO-1 or 2 trains matrices for Muon on the CPU; None for a subclass, as ZenFlow's."""
    if not self.cpu_offload or not _is_muon(self.optimizer):
        return False
    if not any(getattr(param, "use_muon", False) for group in self.bit16_groups for param in group):
        return False
    # known: only a class defined in that module has this name; a subclass is defined elsewhere
    return True if type(self).__module__ == "deepspeed.runtime.zero.stage_1_and_2" else None


def averages_a_split_matrix(self: Any, communication_data_type: Any) -> bool | None:
    """Whether a bucket has a matrix for Muon that belongs to several ranks; None for a user's class or function."""
    if not self.reduce_scatter or self.cpu_offload or not _is_muon(self.optimizer):
        return False
    found = any(
        len(self.param_to_partition_ids[group][number]) > 1
        and getattr(self.bit16_groups[group][place], "use_muon", False)
        for group, place, number in self.ipg_buckets[communication_data_type].params
    )
    return None if found and not muon_split_matrices.needs_whole(self) else found


def _is_muon(optimizer: Any) -> bool:
    """As DeepSpeed asks."""
    # known: DeepSpeed's own test, by which it runs Muon for a user's class, too
    return "muon" in type(optimizer).__name__.lower()
