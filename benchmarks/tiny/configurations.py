"""A tiny configuration of any class of configurations, from the names of its settings."""

from __future__ import annotations

import inspect
import re
from collections.abc import Callable
from typing import Any

VOCABULARY = 128
CLASSES = 3

# What a setting becomes whose name matches, the first that does; None: what it is. A size never grows.
TOKENS: tuple[tuple[str, int], ...] = (
    (r"pad_token_id|pad_id|padding_idx", 0),
    (r"bos_token_id|decoder_start_token_id", 1),
    (r"eos_token_id", 2),
    (r"(image|img)_(token|pad|patch).*(id|index)", 4),
    (r"video.*token.*(id|index)", 5),
    (r"audio.*token.*(id|index)", 6),
    (r"vision_start_token_id", 7),
    (r"vision_end_token_id", 8),
    (r"mask_token_id", 9),
    (r".*token_(id|index)", 10),
)
SIZES: tuple[tuple[str, int | None], ...] = (
    (r"type_vocab_size|.*max_2d_position.*|num_labels|num_encoder_blocks|qk_head_dim|num_stages", None),
    (r".*num_feat_extract_layers|.*adapter_layers|num_nextn_predict_layers", None),
    (r".*conv_kernel.*|.*kernel_size.*|.*stride.*|.*conv_pos.*|.*(n_groups|num_groups)", None),
    (r".*(num_mel_bins|num_mels|feature_size|mel_bins|input_feat_per_channel)", None),
    (r".*vocab_size.*", VOCABULARY),
    (r"rotary_dim", 8),
    (r"first_k_dense_replace|n_group|topk_group|.*shared_experts?", 1),
    (r".*(experts_per_tok|experts_per_token|top_?k|topk)|moe_k|num_selected_experts", 2),
    (r".*(num|n).*experts|.*num_expert|.*routed_experts|.*experts_num", 4),
    (r"(linear_|mamba_|ssm_)?num_(key|value)_heads", 4),
    (r".*(kv_heads|key_value_heads|num_kv)|.*query_groups", 2),
    (r".*(heads|n_head|num_head)", 4),
    (r".*(head_dim|head_size|d_kv|key_dim|kv_channels|lora_rank)|.*attention_head_size.*|.*low_rank.*", 8),
    (r".*(layers|n_layer|layer_num|num_blocks|n_block|num_layer|num_hidden_layer|depth)|num_.*blocks", 2),
    (r".*(intermediate_size|ffn_dim|d_ff|ffn_hidden_size|inner_dim|n_inner|mlp_dim|ff_dim|ff_size|d_inner)", 64),
    (r".*feed_?forward.*|.*ffn_size", 64),
    (r".*(max|n).*(positions?|position_embeddings|seq_len|seq_length|sequence_length|ctx)", 64),
    (r".*(sliding_window|attention_window|window)", 64),
    (r".*(image_size|img_size)|input_size", 32),
    (r".*(patch_size|state_size|d_state)", 8),
    (r".*(mrope|mel|channels|state|groups|kernel|conv|patch|num_|rank|max_).*|ssm_.*", None),
    (r".*(hidden_sizes?|d_model|n_embd|embedding_size|projection_size|bottleneck_size|proj_size|_dim|width)|^dim", 32),
    (r".*hidden|hidden_size_per_layer_input", 32),
)
LISTS: tuple[tuple[str, Callable[[list[int]], list[int]]], ...] = (
    (r".*(depths|num_blocks|num_layers|encoder_layers|depth|block_sizes|n_layers)", lambda v: [1] * len(v)),
    (r".*heads", lambda v: [min(2, x) for x in v]),
    (
        r".*(hidden_sizes|embed_dims|embed_dim|dims|widths|hidden_dims|d_model)",
        lambda v: [16 * max(1, round(x / min(v))) for x in v],
    ),
    (r".*(conv_dim|tdnn_dim|res_dims?)", lambda v: [16] * len(v)),
    (r".*eos_token_id", lambda v: [2]),
    (r".*(image_size|img_size)", lambda v: [32] * len(v)),
    (r".*patch_size", lambda v: [8] * len(v)),
)

# What the rules do not find, by model_type.
SETTINGS: dict[str, dict[str, Any]] = {
    "audio-spectrogram-transformer": {"max_length": 64},
    "bamba": {"attn_layer_indices": [1]},
    "beit": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "bit": {"hidden_sizes": [32, 32, 32, 32], "embedding_size": 32, "num_groups": 4},
    "bros": {"hidden_size": 64},
    "cvt": {"depth": [1, 2, 3]},
    "data2vec-vision": {"num_hidden_layers": 4, "out_indices": [0, 1, 2, 3]},
    "donut-swin": {"window_size": 2, "image_size": 64},
    "dots1": {"n_routed_experts": 4, "n_shared_experts": 1},
    "dpt": {"num_hidden_layers": 4, "backbone_out_indices": [0, 1, 2, 3]},
    "efficientnet": {"width_coefficient": 0.25, "depth_coefficient": 0.3, "hidden_dim": 320},
    "gemma3n_text": {"num_kv_shared_layers": 0},
    "gpt_neo": {"attention_types": [[["global"], 2]]},
    "layoutlmv3": {"coordinate_size": 6, "shape_size": 4},
    "levit": {"image_size": 64, "patch_size": 16},
    "lilt": {"hidden_size": 48},
    "mamba2": {"num_heads": 8},
    "mobilevitv2": {"image_size": 64},
    "neomme": {"head_dim": 16},
    "perceiver": {
        "d_latents": 32,
        "num_latents": 8,
        "num_self_attends_per_block": 1,
        "num_cross_attention_heads": 1,
        "max_position_embeddings": 12,
    },
    "pvt": {"image_size": 64},
    "qwen2_5_omni_thinker": {"vision_start_token_id": 7},
    "qwen3_omni_moe_thinker": {"vision_start_token_id": 7},
    "reformer": {"axial_pos_embds": False, "attn_layers": ["local", "local"], "local_attn_chunk_length": 4},
    "swin": {"window_size": 2, "image_size": 64},
    "vjepa2": {"frames_per_clip": 4, "crop_size": 32},
    "xmod": {"default_language": "en_XX"},
}
# By class of model, where those of one configuration differ.
CLASS_SETTINGS: dict[str, dict[str, Any]] = {"ReformerModelWithLMHead": {"is_decoder": True}}
# Their positions are of three parts, whose sizes add up to half a head.
THREE_POSITIONS = re.compile("vl|glm|omni|ocr|qwen3_5|ernie")


def small(name: str, value: Any) -> Any:
    """What a setting of this name and value becomes; None: it is not given."""
    if value is None and name in ("vocab_size", "head_dim", "num_key_value_heads", "num_experts_per_tok"):
        value = 1 << 20
    if name == "use_mamba_kernels":
        return False
    if isinstance(value, float):
        return 0.0 if re.search("drop|_prob$|noise|jitter", name) else None
    if isinstance(value, int) and not isinstance(value, bool):
        for pattern, token in TOKENS:
            if re.fullmatch(pattern, name):
                return token
        for pattern, size in SIZES:
            if re.fullmatch(pattern, name):
                return min(size, value) if size is not None and value > 0 else None
    if isinstance(value, (list, tuple)) and "drop" in name:
        return type(value)(0.0 for _ in value)
    if isinstance(value, (list, tuple)) and value and all(type(item) is int for item in value):
        for pattern, change in LISTS:
            if re.fullmatch(pattern, name):
                return type(value)(change(list(value)))
    return None


def accepted(config_class: type) -> set[str]:
    """The names of the settings that a class of configurations takes."""
    names = set(inspect.signature(config_class).parameters)
    for base in config_class.__mro__:
        names |= set(getattr(base, "__annotations__", {}))
    return names | {"num_labels", "pad_token_id", "bos_token_id", "eos_token_id", "decoder_start_token_id"}


def fewer_layers(default: Any, names: set[str]) -> dict[str, Any]:
    """The first layers of a configuration that lists their types: as many as have one of each."""
    for depth in ("num_hidden_layers", "num_layers", "n_layer", "n_layers"):
        layers = vars(default).get(depth)
        if depth not in names or not isinstance(layers, int) or layers <= 2:
            continue
        lists = {
            name: value
            for name, value in vars(default).items()
            if isinstance(value, list) and len(value) == layers and name in names - {"out_indices", "depths"}
        }
        kinds = [value for value in lists.values() if isinstance(value[0], str)]
        few = max([2, *(value.index(kind) + 1 for value in kinds for kind in set(value))])
        if lists:
            return {depth: few, **{name: value[:few] for name, value in lists.items()}}
    return {}


def tiny(config_class: type, **given: Any) -> Any:
    """A configuration of this class with small sizes, no dropout, and the settings that are given."""
    from transformers import PretrainedConfig

    fixed = {**SETTINGS.get(getattr(config_class, "model_type", ""), {}), **given}
    default = config_class()
    names = accepted(config_class)
    settings: dict[str, Any] = {}
    for name, value in vars(default).items():
        name = name.removeprefix("_")
        if name not in names or name in fixed:
            continue
        if name in ("rope_parameters", "rope_scaling") and THREE_POSITIONS.search(config_class.__module__):
            settings[name] = {**(value or {"type": "default"}), "mrope_section": [2, 1, 1]}
        elif isinstance(value, PretrainedConfig):
            settings[name] = {**tiny(type(value)).to_dict(), "model_type": type(value).model_type}
        elif (made := small(name, value)) is not None:
            settings[name] = made
            queries = name.replace("key_value", "attention")
            if queries != name and value in (None, getattr(default, queries, None)):
                settings[name] = 4  # as many as there are of queries
    settings.update(fewer_layers(default, names - set(fixed)))
    if getattr(default, "pad_token_id", None) is None:
        settings["pad_token_id"] = 0
    config = config_class(**{**settings, **fixed})
    if config.is_encoder_decoder and getattr(config, "decoder_start_token_id", None) is None:
        config.decoder_start_token_id = 1
    return config
