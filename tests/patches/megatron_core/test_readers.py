"""Who reads the attributes that patches set on objects of a framework: the stack that is installed here is searched."""

from __future__ import annotations

import ast
import sysconfig
from pathlib import Path

from rlhf_patches.definitions import registry
from rlhf_patches.testing import conduct

PACKAGES = ("mcore_bridge", "megatron", "modelopt", "swift", "verl")
"""What reads the weights of a model of megatron-core, and the samplers of ms-swift, that are installed here."""

OWN = {
    *("adapters", "asked", "new", "requests"),  # vllm/watched_requests.py's Engine
    *("average",),  # verl/value_loss.py's Loss
    *("daemon", "limited", "over"),  # math_verify/deadline.py's Deadline, timer and thread
    *("known",),  # vocab_parallel/shared.py's Latest
    *("atexit", "ds_status"),  # trl/zero3.py's finalizer, trl/chunked_head.py's stand-in
    *("compiled", "plain", "sums", "window"),  # transformers/loss_graph.py's Reading
    *("merges",),  # peft/base_weights.py's Kept
    *("settings",),  # transformers/_known_trainer.py's Window
    *("bounds", "layer", "occurs", "packed", "positions", "version"),  # transformers/_document_states.py's own
    *("grad",),  # transformers/_shared_states.py's own tensors
    *("count", "divisor", "generated", "losses", "micro_batches"),  # trl/_generated_count.py's Window
    *("_ds_child_entered", "done"),  # deepspeed/_exact_tables.py's modules, deepspeed/_muon_of_a_step.py's Waiting
    *("is_said", "released"),  # transformers/_router_logits.py's Recorded
    *("buffer_dtype",),  # accelerate/_buffer_policies.py's copies
}
"""Those of objects that the patches have made."""
AS_UPSTREAM = {
    *("active_adapter", "data", "fd", "iteration", "logprobs_mode", "mixed_precision_policy", "optimizer", "training"),
}
"""Those that the release sets itself there, to such a value."""

_BRIDGE = "megatron/bridge/models/conversion"
_FSDP = "megatron/core/distributed/fsdp/src/megatron_fsdp"
_BUFFERS = f"{_FSDP}/param_and_grad_buffer.py:ParamAndGradBuffer._init_optimizer_named_parameters"
READERS = {
    "_rlhf_patches_of_all_ranks": set(),
    "_samples_of_all_ranks": set(),
    "summed_over_divided_heads": set(),
    "tensor_model_parallel": {
        "mcore_bridge/tuners/lora.py:_is_replicated_base",  # False: the base of an adapter is whole on each rank
        f"{_BRIDGE}/model_bridge.py:is_tensor_parallel",
        f"{_BRIDGE}/param_mapping.py:AutoMapping._detect_parallelism_type",
        f"{_BRIDGE}/param_mapping.py:MegatronParamMapping.broadcast_from_pp_rank",
        f"{_BUFFERS}.set_param_attribute_closure.set_param_attribute",
        f"{_FSDP}/utils.py:is_mcore_tensor_model_parallel",
        "megatron/core/resharding/utils.py:extract_param_metadata",
        "megatron/core/ssm/gated_delta_net.py:GatedDeltaNet.__init__",
        "megatron/core/ssm/mamba_mixer.py:MambaMixer.__init__",
        "megatron/core/tensor_parallel/layers.py:",
        "megatron/core/tensor_parallel/layers.py:param_is_not_tensor_parallel_duplicate",  # the norm, which is repaired
        "megatron/core/tensor_parallel/layers.py:set_tensor_model_parallel_attributes",
        "modelopt/torch/nas/plugins/megatron_model_stats.py:mcore_param_count_live",
        "swift/megatron/utils/megatron_lm_utils.py:_set_fsdp_tensor_parallel_attributes",
        "verl/utils/megatron/tensor_parallel.py:is_tensor_parallel_param",
        "verl/utils/megatron_utils.py:broadcast_from_megatron_pp",
        "verl/workers/engine/megatron/delta_export.py:build_export_index",
    },
    "partition_dim": {
        f"{_BRIDGE}/param_mapping.py:AutoMapping._detect_parallelism_type",
        f"{_BRIDGE}/param_mapping.py:MegatronParamMapping.broadcast_from_pp_rank",
        f"{_BUFFERS}.set_param_attribute_closure.set_param_attribute",
        f"{_FSDP}/utils.py:get_mcore_tensor_parallel_partition_dim",
        "megatron/core/optimizer/muon.py:TensorParallelMuon.orthogonalize",
        "megatron/core/resharding/planner.py:_build_descriptors_for_param",
        "megatron/core/resharding/utils.py:extract_param_metadata",
        "megatron/core/tensor_parallel/layers.py:",
        "megatron/core/tensor_parallel/layers.py:set_tensor_model_parallel_attributes",
        "swift/megatron/utils/megatron_lm_utils.py:_set_fsdp_tensor_parallel_attributes",
        "verl/utils/megatron/tensor_parallel.py:get_tensor_parallel_partition_dim",
        "verl/utils/megatron_utils.py:broadcast_from_megatron_pp",
    },
    "partition_stride": {
        f"{_BUFFERS}.set_param_attribute_closure.set_param_attribute",
        "megatron/core/extensions/transformer_engine.py:TEColumnParallelLinear.__init__",
        "megatron/core/extensions/transformer_engine.py:TELayerNormColumnParallelLinear.__init__",
        "megatron/core/resharding/planner.py:_build_descriptors_for_param",
        "megatron/core/resharding/utils.py:extract_param_metadata",
        "megatron/core/tensor_parallel/layers.py:",
        "megatron/core/tensor_parallel/layers.py:set_tensor_model_parallel_attributes",
        "verl/utils/megatron/tensor_parallel.py:get_tensor_parallel_partition_stride",
    },
}
"""By attribute, the functions that read it. Before one is added here, it is read: what does it do with our value?"""


def readers(names):
    """By name, what reads such an attribute, or has its name as a text."""
    found = {name: set() for name in names}
    site = Path(sysconfig.get_paths()["purelib"])
    for file in (file for package in PACKAGES for file in (site / package).rglob("*.py")):
        text = file.read_bytes()
        if any(name.encode() in text for name in names):
            within(ast.parse(text), (), f"{file.relative_to(site)}:", found)
    return found


def within(node, path, file, found):
    if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
        path = (*path, node.name)
    is_read = isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Load)
    name = node.attr if is_read else node.value if isinstance(node, ast.Constant) else None
    if isinstance(name, str) and name in found:
        found[name].add(f"{file}{'.'.join(path)}")
    for child in ast.iter_child_nodes(node):
        within(child, path, file, found)


def test_who_reads_what_patches_write_is_known():
    found = readers([*READERS])
    for name, expected in READERS.items():
        assert found[name] == expected, f"{name}: {sorted(found[name] ^ expected)}"


def test_each_attribute_that_a_patch_sets_is_looked_for():
    written = {name for item in registry.load()[0] for name in conduct.attributes(item.patch)}
    assert written == {*OWN, *AS_UPSTREAM, *READERS}


def test_an_attribute_is_found_however_it_is_set():
    by_name = {item.patch.name: conduct.attributes(item.patch) for item in registry.load()[0]}
    assert by_name["megatron-core-gdn-norm-gradient"] == {"summed_over_divided_heads"}  # by a constant's name
    assert by_name["accelerate-resume-order"] == {"iteration"}
