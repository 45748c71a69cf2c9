"""The calls in which the bugs of these patches occur, decided from attributes alone (`rlhf_patches.Condition`)."""

from __future__ import annotations

import sys
from typing import Any

from .. import _released
from . import _kept_weights, _liger_loss, _window, dpo_liger_settings


def part_of_a_generation(self: Any) -> float | bool | None:
    """GRPOTrainer: the factor on the gradient's size, if a generation is not one step's batch; False in evaluation.

    None if a method that computes the gradient is not the release's own.
    """
    if self.loss_type not in _window.COUNTED or not self.model.training:
        return False
    size = float(self.args.gradient_accumulation_steps / self.args.steps_per_generation)
    if size == 1:
        return False
    return None if _window.replaced_in_grpo(self) else size


def masks_truncated(self: Any) -> bool | None:
    """GRPOTrainer: whether truncated completions are masked, and counted; not with Liger's loss.

    None if a method that computes the gradient is not the release's own.
    """
    liger = self.use_liger_kernel if hasattr(self, "use_liger_kernel") else self.use_liger_loss
    if not self.mask_truncated_completions or self.loss_type not in _window.COUNTED or liger:
        return False
    return None if _window.replaced_in_grpo(self) else True


def has_tools(self: Any, inputs: Any) -> bool | None:
    """Whether a batch marks the tokens of tools; None if the loss may mask them itself, or there is none to mask."""
    if inputs.get("tool_mask") is None:
        return False
    return None if _liger_loss.other(self) else True


def micro_batches(self: Any) -> float | bool | None:
    """Online DPO: the factor on the gradient's size; None if the step is not the release's own."""
    steps = _window.undivided(self)
    if steps == 1:
        return False
    return None if _window.replaced_step(self) else float(steps)


def flattened(self: Any, examples: Any) -> bool | None:
    """Whether SFT's batch is one row; None without positions, or if masks or the user choose the labels."""
    if not self.padding_free:
        return False
    chosen = {"completion_mask", "assistant_masks", "labels"} & {*examples[0]}
    return None if chosen or not self.return_position_ids else True


def smooths_with_liger(self: Any, args: Any) -> bool | None:
    """Whether Liger computes the loss that DPO's arguments smooth; None if that code is not the release's own."""
    if args is None or not args.label_smoothing:
        return False
    older = getattr(args, "use_liger_loss", None)  # None: an alias of use_liger_kernel since 0.25
    if not (args.use_liger_kernel if older is None else older):
        return False
    kinds = [args.loss_type] if isinstance(args.loss_type, str) else args.loss_type
    if "sigmoid" not in kinds:
        return False
    own = _released.others(self, "compute_loss", "get_batch_loss_metrics", "_compute_loss_liger", "dpo_loss")
    return None if own else True


def settings_of_liger(args: Any) -> bool | None:
    """Whether Liger has a loss that reads DPO's settings, and they are not its defaults.

    None if that loss is not Liger's own.
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
    """GKDTrainer: the factor on the gradient's size; None in evaluation, and with Liger's or a custom loss."""
    ranks = _window.averaged_over(self)
    if num_items_in_batch is None or ranks == 1:
        return False
    if not self.model.training or self.args.use_liger_kernel or _window.replaced(self, self.generalized_jsd_loss):
        return None
    return 1.0 / ranks


def part_of_micro_batches(self: Any, num_items_in_batch: Any) -> float | bool | None:
    """GOLDTrainer: the factor on the gradient's size; None with Liger's loss or a part of the step of a user's."""
    counted = self.args.gradient_accumulation_steps
    if num_items_in_batch is None or not self.model.training or counted * _window.averaged_over(self) == 1:
        return False
    is_uld = self.use_uld_loss and self.teacher_tokenizer is not None
    loss_of = self.uld_loss_fn if is_uld else self.generalized_jsd_loss
    # known: the release's own loss, as the next line asks; it is a sum if it takes the number that divides it
    is_mean = is_uld or "num_items_in_batch" not in getattr(getattr(loss_of, "__code__", None), "co_varnames", ())
    own = _window.replaced(self, loss_of, *(() if is_mean or counted == 1 else _window.LOADING))
    if own or getattr(self, "use_liger_gkd_loss", False):
        return None
    if not is_mean:
        return float(1 / (counted * _window.averaged_over(self)))
    steps = _window.micro_batches_of_a_mean(self)
    return False if steps == 1 else float(steps)


def on_a_server(self: Any) -> bool:
    """GRPOTrainer: whether a vLLM server generates."""
    return bool(self.use_vllm and self.vllm_mode == "server")


def sleeps(self: Any) -> bool | None:
    """A trainer: False without vLLM's sleep mode; otherwise the steps between generations decide."""
    return None if self.args.use_vllm and self.args.vllm_enable_sleep_mode else False


def engine_sleeps(self: Any) -> bool:
    """VLLMGeneration: whether its engine sleeps between generations."""
    return bool(self.mode == "colocate" and self.enable_sleep_mode)


def casts_the_trained(self: Any) -> bool | None:
    """Whether continuous batching casts the model that is trained; None if it is left as released."""
    # "paged" is the older name of the setting.
    batches = getattr(self, "use_transformers_continuous_batching", None) or getattr(
        self, "use_transformers_paged", None
    )
    if self.use_vllm or not batches or not (self.args.bf16 or self.args.fp16):
        return False
    torch = sys.modules["torch"]
    return _kept_weights.is_rounded(self, self.model, torch.bfloat16 if self.args.bf16 else torch.float16)
