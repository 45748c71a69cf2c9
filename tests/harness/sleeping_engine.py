"""In place of a vLLM engine with sleep mode, whose allocator is CUDA's: real samples from weights that can be lost.

As read in vLLM 0.32.0 (`LLM`, `Executor.sleep` and `wake_up`, `Worker.sleep` and `wake_up`, `reload_weights`): level 2
keeps a copy of buffers alone; waking gives memory back by tag, and a tag that does not sleep is a warning; what is
written to weights that sleep is lost; `reload_weights` reads the checkpoint that the engine was made from.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Iterable
from types import SimpleNamespace
from typing import Any

import torch

logger = logging.getLogger(__name__)
TAGS = ("weights", "kv_cache")


class SamplingParams:
    """What a trainer asks for; of it the number of tokens and the temperature count."""

    def __init__(self, **settings: Any) -> None:
        self.n, self.max_tokens, self.temperature = 1, 4, 1.0
        vars(self).update(settings)


class LLM:
    """An engine on a checkpoint's folder, in float64.

    Args:
        model: the folder.
        enable_sleep_mode: without it `sleep` raises, as vLLM's allocator does.
        seed: of the samples.
    """

    def __init__(self, model: str, enable_sleep_mode: bool = False, seed: int = 0, **_: Any) -> None:
        from transformers import AutoModelForCausalLM

        self.checkpoint, self.sleep_mode = model, enable_sleep_mode
        self.weights = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float64).eval()
        self.sleeping: set[str] = set()
        self.buffers: dict[str, torch.Tensor] = {}
        self.calls: list[str] = []
        """Loads, reloads and generations, in order."""
        self.sampler = torch.Generator().manual_seed(seed)
        inner = SimpleNamespace(load_weights=self._load_weights)
        worker = SimpleNamespace(model_runner=SimpleNamespace(model=inner))
        self.llm_engine = SimpleNamespace(model_executor=SimpleNamespace(driver_worker=worker))

    def sleep(self, level: int = 1) -> None:
        if not self.sleep_mode:
            raise RuntimeError("sleep mode is not enabled")
        if "weights" in self.sleeping:
            logger.warning("already sleeping")
            return
        if level == 2:
            self.buffers = {name: buffer.clone() for name, buffer in self.weights.named_buffers()}
            self._drop()
        self.sleeping |= set(TAGS)

    def wake_up(self, tags: list[str] | None = None) -> None:
        if any(tag not in self.sleeping for tag in tags or ()):
            logger.warning("a tag is not sleeping")
            return
        woken = set(tags or TAGS)
        self.sleeping -= woken
        if "weights" in woken:
            for name, buffer in self.weights.named_buffers():
                if name in self.buffers:
                    buffer.copy_(self.buffers[name])

    def collective_rpc(self, method: str) -> None:
        if method != "reload_weights":
            raise AttributeError(method)
        self.calls.append("reload")
        self._write(type(self.weights).from_pretrained(self.checkpoint, dtype=torch.float64).named_parameters())

    def reset_prefix_cache(self) -> None:
        self.calls.append("load")

    def generate(self, prompts: list[Any], sampling_params: SamplingParams, use_tqdm: bool = True) -> list[Any]:
        self.calls.append("generate")
        return [self._request(prompt, sampling_params) for prompt in prompts]

    def _request(self, prompt: Any, wanted: SamplingParams) -> Any:
        given = list(prompt["prompt_token_ids"]) if isinstance(prompt, dict) else tokens_of(prompt)
        return SimpleNamespace(prompt_token_ids=given, outputs=[self._sampled(given, wanted) for _ in range(wanted.n)])

    def _sampled(self, given: list[int], wanted: SamplingParams) -> Any:
        """A completion. Of weights that are NaN it is the first word of the vocabulary, as vLLM's is."""
        tokens: list[int] = []
        logprobs = []
        for _ in range(wanted.max_tokens):
            with torch.no_grad():
                scores = self.weights(torch.tensor([given + tokens])).logits[0, -1] / wanted.temperature
            found = scores.log_softmax(-1)
            lost = bool(found.isnan().any())
            token = 0 if lost else int(torch.multinomial(found.exp(), 1, generator=self.sampler))
            tokens.append(token)
            logprobs.append({token: SimpleNamespace(logprob=float(found[token]), rank=1)})
            if token == 1:
                break
        return SimpleNamespace(token_ids=tokens, logprobs=logprobs, text="")

    def _load_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        self._write((name, value.detach()) for name, value in weights)

    def _write(self, weights: Iterable[tuple[str, torch.Tensor]]) -> None:
        own = dict(self.weights.named_parameters())
        with torch.no_grad():
            for name, value in weights:
                if "weights" not in self.sleeping:
                    own[name].copy_(value)

    def _drop(self) -> None:
        with torch.no_grad():
            for value in (*self.weights.parameters(), *self.weights.buffers()):
                value.fill_(float("nan"))

    def distance(self, policy: Any) -> float:
        """The largest difference of a weight from the policy's; NaN where weights are lost."""
        own = dict(self.weights.named_parameters())
        found = [(own[name] - value.detach().double()).abs().max() for name, value in policy.named_parameters()]
        return float(torch.stack(found).max())


def tokens_of(text: str) -> list[int]:
    """As small.py's tokenizer has them."""
    return [int(word[1:]) + 3 for word in text.split()]


def logprobs(policy: Any, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """Of a completion's tokens by the policy itself, in float64, at temperature 1."""
    exact = copy.deepcopy(policy).double().eval()
    with torch.no_grad():
        scores = exact(torch.tensor([prompt + tokens])).logits[0, len(prompt) - 1 : -1]
    return scores.log_softmax(-1)[range(len(tokens)), tokens]
