"""In which calls the bugs of these patches bite, told from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import sys
from typing import Any

from .. import _released
from . import _window, dpo_liger_settings


def part_of_a_generation(self: Any) -> float | bool | None:
    """Of GRPOTrainer: how many times its size the gradient is, where a generation is no step's batch.

    None where what makes the gradient is somebody else's.
    """
    if self.loss_type not in _window.COUNTED:
        return False
    size = float(self.args.gradient_accumulation_steps / self.args.steps_per_generation)
    if size == 1:
        return False
    return None if _window.replaced_in_grpo(self) else size


def masks_truncated(self: Any) -> bool | None:
    """Of GRPOTrainer: whether truncated completions are masked, and counted; not for Liger's loss.

    None where what makes the gradient is somebody else's.
    """
    liger = self.use_liger_kernel if hasattr(self, "use_liger_kernel") else self.use_liger_loss
    if not self.mask_truncated_completions or self.loss_type not in _window.COUNTED or liger:
        return False
    return None if _window.replaced_in_grpo(self) else True


def has_tools(inputs: Any) -> bool:
    """Of a batch: whether it says which tokens are of tools."""
    return "tool_mask" in inputs


def micro_batches(self: Any) -> float | bool | None:
    """Of Online DPO: how many times its size the gradient is; None where the step is somebody else's."""
    steps = _window.undivided(self)
    if steps == 1:
        return False
    return None if _window.replaced_step(self) else float(steps)


def flattened(self: Any, examples: Any) -> bool | None:
    """Of SFT's batch: whether it is one row; None without positions, or where masks or the user choose labels."""
    if not self.padding_free:
        return False
    chosen = {"completion_mask", "assistant_masks", "labels"} & {*examples[0]}
    return None if chosen or not self.return_position_ids else True


def smooths_with_liger(self: Any, args: Any) -> bool | None:
    """Of DPO's arguments: whether Liger has the loss that they want smoothed; None where what computes it is own."""
    if args is None or not args.label_smoothing:
        return False
    older = getattr(args, "use_liger_loss", None)  # None: an alias of the other since 0.25
    if not (args.use_liger_kernel if older is None else older):
        return False
    kinds = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
    if "sigmoid" not in kinds:
        return False
    own = _released.others(self, "compute_loss", "get_batch_loss_metrics", "_compute_loss_liger", "dpo_loss")
    return None if own else True


def settings_of_liger(args: Any) -> bool | None:
    """Of DPO's arguments: whether Liger has a loss that takes settings, which are not its defaults.

    None where that loss is somebody else's.
    """
    if args is None or not args.use_liger_kernel:
        return False
    kinds = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
    if kinds[0] == "discopop":
        asked = args.discopop_tau != 0.05
    elif kinds[0] == "robust":
        asked = 0 < args.label_smoothing < 0.5
    else:
        asked = kinds[0] == "exo_pair" and bool(args.label_smoothing)
    if not asked:
        return False
    loss = getattr(sys.modules.get("trl.trainer.dpo_trainer"), "LigerFusedLinearDPOLoss", None)
    return True if loss is None or dpo_liger_settings.settings(loss, args) else None


def part_of_all_ranks(self: Any, num_items_in_batch: Any) -> float | bool | None:
    """Of GKDTrainer: how many times its size the gradient is; None in evaluation, of Liger's or an own loss."""
    ranks = _window.averaged_over(self)
    if num_items_in_batch is None or ranks == 1:
        return False
    if not self.model.training or self.args.use_liger_kernel or _window.replaced(self, self.generalized_jsd_loss):
        return None
    return 1.0 / ranks


def on_a_server(self: Any) -> bool:
    """Of GRPOTrainer: whether a vLLM server generates."""
    return bool(self.use_vllm and self.vllm_mode == "server")


def sleeps(self: Any) -> bool | None:
    """Of a trainer: False without vLLM's sleep mode; else it is for the steps between generations."""
    return None if self.args.use_vllm and self.args.vllm_enable_sleep_mode else False


def engine_sleeps(self: Any) -> bool:
    """Of VLLMGeneration: whether its engine sleeps between generations."""
    return bool(self.mode == "colocate" and self.enable_sleep_mode)
