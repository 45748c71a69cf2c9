"""Real vLLM on a CPU, in the process that asks it, and a small model that both it and transformers load.

vLLM's CPU backend packs the weights of linear layers and throws the originals away, so no weight could be updated. For
that alone there is a stand-in: layers keep their weights and are computed by torch.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

SETTINGS = {
    "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
    "VLLM_CPU_KVCACHE_SPACE": "1",
    "VLLM_LOGGING_LEVEL": "ERROR",
    "VLLM_NO_USAGE_STATS": "1",
    "HF_HUB_OFFLINE": "1",
    "TRANSFORMERS_VERBOSITY": "error",
    "TOKENIZERS_PARALLELISM": "false",
}


def keep_weights() -> None:
    """Put the stand-in in the place of the backend's packed layers."""
    import torch
    from vllm.model_executor.layers import linear, utils, vocab_parallel_embedding

    def plain(layer: Any, remove_weight: bool) -> None:
        layer.cpu_linear = torch.nn.functional.linear

    for module in (utils, linear, vocab_parallel_embedding):
        module.dispatch_cpu_unquantized_gemm = plain


def checkpoint(
    folder: Path, spread: float = 0.5, tokenizer: Any = None, likely: Mapping[int, float] | None = None
) -> str:
    """Write two layers of Qwen 2 with heads of 32 (the fewest that the backend knows) and its tokenizer.

    Args:
        folder: where.
        spread: of the initial weights; the wider, the further its log-probabilities are from those of any token.
        tokenizer: None for small.py's.
        likely: of some tokens, how many times as large their weights in the head are: they are sampled more often.

    Returns:
        the folder.
    """
    import torch
    from transformers import Qwen2Config, Qwen2ForCausalLM

    from rlhf_patches.patches.trl.proofs import small

    tokenizer = tokenizer or small.tokenizer()
    torch.manual_seed(0)
    config = Qwen2Config(
        vocab_size=max(128, len(tokenizer)),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=2,
        num_key_value_heads=1,
        max_position_embeddings=128,
        initializer_range=spread,
        bos_token_id=None,
        eos_token_id=1,
        pad_token_id=0,
    )
    model = Qwen2ForCausalLM(config)
    with torch.no_grad():
        for token, times in (likely or {}).items():
            model.lm_head.weight[token] *= times
    model.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    return str(folder)


def exact(model: Any, prompt: Sequence[int], completion: Sequence[int], temperature: float = 1.0) -> list[float]:
    """The log-probability of each token of a completion, by transformers' model, which is in float64."""
    import torch

    assert model.dtype is torch.float64
    with torch.no_grad():
        logits = model(torch.tensor([[*prompt, *completion]])).logits[0, len(prompt) - 1 : -1]
    logprobs = (logits / temperature).log_softmax(-1)
    return logprobs.gather(-1, torch.tensor(completion)[:, None])[:, 0].tolist()
