"""What grpo_loop_ranks.py trains, for its test, which does not import vLLM."""

from __future__ import annotations

from typing import Any

STEPS = 5
CASES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cooler, accumulated": {"temperature": 0.7, "gradient_accumulation_steps": 2, "steps_per_generation": 1},
    "LoRA": {"lora": True},
    "LoRA, cooler, accumulated": {"lora": True, "temperature": 0.7, "gradient_accumulation_steps": 2},
    "tools": {"tools": True},
    "tools, LoRA, cooler": {"tools": True, "lora": True, "temperature": 0.7},
    "server": {"vllm_mode": "server", "gradient_accumulation_steps": 2},
    "server, LoRA, cooler": {"vllm_mode": "server", "lora": True, "temperature": 0.7},
}
