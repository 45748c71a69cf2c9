"""The family of a model on the Hub, by names of which it is sure; other names, and local folders, tell nothing."""

from __future__ import annotations

import os
import re

_SIZE = r"\d+(?:\.\d+)?b"
# As transformers' `model_type`. Mixtures of experts (Qwen3-30B-A3B), vision models (Qwen2.5-VL-7B) and reward models
# have names that these do not match.
_FAMILIES = {
    "qwen2": rf"qwen/qwen2(?:\.5)?(?:-math|-coder)?-{_SIZE}(?:-instruct)?(?:-1m|-awq|-gptq-int\d)?"
    rf"|qwen/qwq-32b|deepseek-ai/deepseek-r1-distill-qwen-{_SIZE}",
    "qwen3": r"qwen/qwen3-(?:0\.6|1\.7|4|8|14|32)b(?:-base|-instruct-2507|-thinking-2507|-awq)?",
    "llama": rf"meta-llama/(?:llama-2-{_SIZE}(?:-chat)?(?:-hf)?|llama-3\.3-70b-instruct"
    r"|(?:meta-)?llama-3(?:\.[12])?-(?:1|3|8|70|405)b(?:-instruct)?)"
    rf"|huggingfacetb/smollm2?-(?:135m|360m|1\.7b)(?:-instruct)?"
    rf"|tinyllama/tinyllama-1\.1b-chat-v\d\.\d|deepseek-ai/deepseek-r1-distill-llama-{_SIZE}",
    "mistral": r"mistralai/mistral-7b(?:-instruct)?-v0\.[123]",
}
_KEY = re.compile(
    r"(?:.*[._])?(?:model_name_or_path|model_name|model_path|model\.path|model_id|pretrain)"
    r"|(?:.*\.)?(?:(?:teacher|student|ref|reference|reward|critic|judge|draft)_)?models?"
)
_NO_MODEL = re.compile(r"(?:push_to_)?hub_model_id|.*tokenizer.*")


def names_one(key: str) -> bool:
    """Whether a key may name a model that the run loads: the policy, a critic, a teacher."""
    return _KEY.fullmatch(key) is not None and _NO_MODEL.fullmatch(key) is None


def family(name: str | None) -> str | None:
    """The family of a model; None if its name does not tell it with certainty."""
    if name is None or os.path.exists(name):
        return None
    return next((each for each, names in _FAMILIES.items() if re.fullmatch(names, name, re.IGNORECASE)), None)
