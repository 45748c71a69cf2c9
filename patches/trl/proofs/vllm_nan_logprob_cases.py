"""What vLLM has sampled, as vllm_nan_logprob_ranks.py has it answer."""

from __future__ import annotations

COMPLETIONS = [[11, 12, 13, 1], [21, 22, 1]]
REWARDS = [1.0, -0.5]
# What vLLM has sampled with, minus what it should have been: as of other kernels.
DIFFERENCES = [[0.3, -0.2, 0.9, 0.1], [-0.4, 0.25, 0.6]]
UNSCORED: dict[str, list[tuple[int, int]]] = {"none": [], "one": [(0, 1)], "several": [(0, 0), (0, 2), (1, 2)]}
MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CAP = 2.0
