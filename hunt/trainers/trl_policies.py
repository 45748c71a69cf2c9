"""TRL's GRPO where the policy is not the one that has generated: ratios are clipped, and vLLM's are corrected.

The trainer's own method makes a batch of the completions, and computes vLLM's correction from log-probabilities that
`rollout_func` hands over. Those of the old policy, and of the reference, are put into the batch in place of its own:
they would come of a run of several steps.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

from hunt import formulas, policy_formulas, trl_trainer
from hunt.outcomes import Outcome
from hunt.policy_formulas import Limits, Response
from hunt.tiny_text import text
from hunt.trainers import trainer
from hunt.trainers.trl_rollouts import GENERATIONS, LONGEST, Group, Rollouts, groups, rewards

MODES = ("token_truncate", "token_mask", "sequence_truncate", "sequence_mask")
CASES: dict[str, dict[str, Any]] = {
    "dapo": {},
    "delta": {"delta": 1.5, "epsilon_high": 0.3},
    "gspo": {"loss_type": "grpo", "importance_sampling_level": "sequence"},
    "cispo": {"loss_type": "cispo", "epsilon_high": 1.5},
    "sapo": {"loss_type": "sapo"},
    "luspo": {"loss_type": "luspo", "importance_sampling_level": "sequence"},
    "vespo": {"loss_type": "vespo"},
    "k3": {"use_bias_correction_kl": False},
    "k3-corrected": {"use_bias_correction_kl": True},
    **{f"vllm_{mode}": {"vllm_importance_sampling_mode": mode} for mode in MODES},
}
"""Options of the configuration; there is a reference with ``k3``, corrected as DeepSeek-V3.2's (arXiv 2512.02556)."""
BORDER = 1.5
"""Of vLLM's correction."""


def far(group: Group, completion: Sequence[int], own: Any, seed: int) -> Any:
    """Log-probabilities that are others than the policy's own."""
    import torch

    drawn = random.Random(str((seed, group[0], list(completion))))
    return own.detach() + torch.tensor([drawn.gauss(0, 0.5) for _ in completion], dtype=own.dtype)


def responses(model: Any, made: Sequence[Group]) -> list[Response]:
    """Of all completions, with normalized advantages."""
    import torch

    found = []
    for group in made:
        scores = torch.tensor(rewards(group), dtype=torch.float64)
        advantages = (scores - scores.mean()) / (scores.std() + 1e-4)
        for completion, advantage in zip(group[1], advantages, strict=True):
            own = formulas.logprobs(model, group[0], completion)
            others = [far(group, completion, own, seed) for seed in range(3)]
            found.append(Response(own, others[0], advantage.expand(len(own)), *others[1:]))
    return found


def corrections(mode: str, response: Response) -> Any:
    """Ratios of the policy to vLLM: truncated above, or left out there."""
    apart = response.policy.detach() - response.sampled
    ratios = (apart.sum() if mode.startswith("sequence") else apart).exp()
    return ratios.clamp(max=BORDER) if mode.endswith("truncate") else ratios * (ratios <= BORDER)


def vespo(response: Response) -> Any:
    """The ratio of a response, weighted by w^k e^(l (1 - w)), with k and l by the advantage's sign."""
    import torch

    ratio = (response.policy - response.old).sum().exp().detach()
    up = response.advantages >= 0
    power, decay = torch.where(up, 2.0, 3.0).double(), torch.where(up, 3.0, 2.0).double()
    return -(ratio**power) * (decay * (1 - ratio)).exp() * response.advantages * response.policy


def by_formula(case: str, model: Any, made: Sequence[Group]) -> Outcome:
    limits = {
        "delta": Limits(high=0.3, largest=1.5),
        "cispo": Limits(low=float("inf"), high=0.5),
    }.get(case, Limits())
    kinds = {"gspo": "gspo", "luspo": "gspo", "cispo": "cispo", "sapo": "sapo"}
    averages = {"gspo": "seq-mean-token-mean", "sapo": "seq-mean-token-mean", "luspo": "seq-mean-token-sum"}
    losses = []
    for response in responses(model, made):
        loss = vespo(response) if case == "vespo" else policy_formulas.LOSSES[kinds.get(case, "ppo")](response, limits)
        if case.startswith("k3"):
            apart = policy_formulas.divergence("k3", response.policy, response.reference)
            loss = loss + 0.1 * apart * (response.ratios if case == "k3-corrected" else 1)
        if case.startswith("vllm"):
            loss = loss * corrections(case.removeprefix("vllm_"), response)
        losses.append(loss)
    return formulas.outcome(model, policy_formulas.averaged(losses, averages.get(case, "token-mean"), 1.0))


@trainer(*(f"trl/grpo-far-{case}" for case in CASES))
def far_policies(*, name: str, by: str = "trainer") -> Outcome:
    case, made = name.removeprefix("grpo-far-"), groups({})
    exact = trl_trainer.model(dtype="float64")
    if by == "formula":
        return by_formula(case, exact, made)
    keys = [(tuple(group[0]), tuple(completion)) for group in made for completion in group[1]]
    known = dict(zip(keys, responses(exact, made), strict=True))
    given = Rollouts(made, False, False)

    def rollout_func(prompts: Sequence[str], *_: Any) -> dict[str, Any]:
        found = given.rollout_func(prompts)
        pairs = zip(found["prompt_ids"], found["completion_ids"], strict=True)
        return {**found, "logprobs": [known[tuple(one), tuple(other)].sampled.tolist() for one, other in pairs]}

    def around(base: Any) -> Any:
        def scored(self: Any, inputs: Any) -> Any:
            if case.startswith("vllm"):
                self.use_vllm, self._last_loaded_step = True, self.state.global_step
            batch = base._generate_and_score_completions(self, inputs)
            rows = range(len(batch["prompt_ids"]))
            of_rows = [
                known[
                    tuple(batch["prompt_ids"][row][batch["prompt_mask"][row].bool()].tolist()),
                    tuple(batch["completion_ids"][row][batch["completion_mask"][row].bool()].tolist()),
                ]
                for row in rows
            ]
            batch["old_per_token_logps"] = _padded([each.old for each in of_rows], batch)
            if case.startswith("k3"):
                self.beta = 0.1
                batch["ref_per_token_logps"] = _padded([each.reference for each in of_rows], batch)
            return batch

        return type(base.__name__, (base,), {"_generate_and_score_completions": scored})

    options: dict[str, Any] = {"num_generations": GENERATIONS, "max_completion_length": LONGEST, "beta": 0.0}
    options |= {"temperature": 1.0, "remove_unused_columns": False, "loss_type": "dapo", **CASES[case]}
    if case.startswith("vllm"):
        options["vllm_importance_sampling_clip_max"] = BORDER
    return trl_trainer.run(
        "GRPO",
        [{"prompt": text(prompt)} for prompt, _ in made],
        trl_trainer.model,
        {},
        options=options,
        others=lambda: {"reward_funcs": given.reward, "rollout_func": rollout_func},
        around=around,
    )


def _padded(values: Sequence[Any], batch: Any) -> Any:
    """As wide as the completions."""
    import torch

    width = batch["completion_ids"].shape[1]
    return torch.stack([torch.nn.functional.pad(each.float(), (0, width - len(each))) for each in values])
