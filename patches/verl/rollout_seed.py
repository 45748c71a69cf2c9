"""verl's reproducible rollouts: use one seed per sample, not one per replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_REPEATED = "det-"
"""The prefix of request ids that are the same in every run; other ids identify no sample."""


def seed_of(replicas: int, server: Any, request: Any, prompt: Iterable[int]) -> int:
    """The seed of a request, below 2**31.

    Args:
        replicas: the replica's seed for all requests.
        server: its ``global_steps`` counts the updates of its weights.
        request: the sample's id, for example ``det-17``, or the result of `named` for it.
        prompt: its tokens; a further turn, or an interruption, adds tokens.
    """
    if not (isinstance(request, str) and request.startswith(_REPEATED)):
        return replicas
    step = getattr(server, "global_steps", None)
    named = f"{replicas}/{step}/{request}/{list(prompt)}"
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big") >> 1


def shares_its_seed(self: Any, sampling_params: Any, request_id: Any) -> bool | None:
    """Whether a request gets a seed that its prompt's other samples have; None for one sample, and for other ids."""
    if not self.config.full_determinism or "seed" in sampling_params or sampling_params.get("temperature") == 0:
        return False
    several = self.config.n > 1 and isinstance(request_id, str) and request_id.startswith(_REPEATED)
    return True if several else None


def named(request: str, sample: Mapping[str, Any]) -> str:
    """The id of a sample's requests.

    Args:
        request: ``det-`` and the sample's position in its batch; the V1 trainer sets no position, so it is always 0.
        sample: the agent loop's data of the sample. In V1 ``session_id`` counts a prompt's samples, ``index`` is the
            prompt's row in the data set, and ``global_steps`` is the step that the sample is for.
    """
    if not request.startswith(_REPEATED) or "session_id" not in sample:
        return request
    return "-".join([request, *(str(sample.get(each)) for each in ("global_steps", "index", "session_id"))])


def _names(loop: str, request: str) -> Rewrite:
    return Rewrite(
        target=f"verl.experimental.agent_loop.{loop}.run",
        pattern=request,
        replacement=f"$NAMED({request}, kwargs)",
        uses={"NAMED": f"{__name__}:{named.__name__}"},
    )


_SEED = Rewrite(
    target="verl.workers.rollout.vllm_rollout.vllm_async_server:vLLMHttpServer.generate",
    pattern='sampling_params.setdefault("seed", self.replica_rank + self.config.seed)',
    replacement=(
        'sampling_params.setdefault("seed", '
        "$SEED_OF(self.replica_rank + self.config.seed, self, request_id, prompt_ids))"
    ),
    uses={"SEED_OF": f"{__name__}:{seed_of.__name__}"},
)
_ONE_TURN = _names("single_turn_agent_loop:SingleTurnAgentLoop", 'f"det-{priority}"')
_TOOLS = _names(
    "tool_agent_loop:ToolAgentLoop", "self._make_request_id(priority, self.rollout_config.full_determinism)"
)

PATCH = Patch(
    name="verl-rollout-seed",
    summary="with rollout.full_determinism each sample of a prompt is drawn with its own seed",
    harm="wrong data",
    affects_rollouts=True,
    bug="samples of one prompt are equal, token by token, so GRPO's advantages are 0",
    when="vLLM rollouts with rollout.full_determinism=True, and more than one sample per prompt",
    excluded_by=("actor_rollout_ref.rollout.full_determinism=false|absent",),
    symptom="""\
With `rollout.full_determinism=True` the samples of a prompt on one replica are equal. With one replica all `n` samples
are equal, so GRPO's advantages and its gradient are 0 and the reward does not rise. With several replicas there are at
most as many different samples as replicas. Samples of different prompts, and of one prompt in later steps, use the same
random numbers. There is no error.""",
    cause="""\
`vLLMHttpServer.generate` gives each request the seed `replica_rank + rollout.seed`. vLLM draws the tokens of a request
that has a seed from a separate generator, so requests with the same prompt and seed return the same tokens.""",
    repair="""\
The seed of a request becomes a hash of that seed, the step of the weights, the request's id, and the prompt's tokens,
which distinguish turns. verl builds the id from the sample's position in the batch. verl's default trainer
(`trainer.use_v1`) sets no position, so the id of every sample is `det-0`. For this trainer the patch adds the step, the
row's `index` in the data set and the number of the sample within its prompt to the id, so that the router also spreads
the samples over the replicas. The seed is the same in every run, as before. A seed that a caller has set stays, and so
does the seed of a request whose id is not verl's own for such runs. Without `full_determinism` nothing changes. Not
repaired: SGLang's deterministic inference, which is another setting; conversations with tools in 0.9.0, whose ids are
random; rows with the same prompt and no `index`, which draw equal samples.""",
    changes_numbers="""\
With `rollout.full_determinism=True`, verl 0.9.0 and 0.9.1 trained on samples that were equal. With the patch samples
are different, so a run is reproducible with the patch, but does not reproduce its results without the patch.""",
    references=(
        "https://github.com/verl-project/verl/pull/6572",
        "https://github.com/verl-project/verl-omni/pull/60",
    ),
    variants=(
        Variant(Guard("verl", ">=0.9.0,<0.9.1"), (_SEED, _ONE_TURN), independent=True),
        Variant(Guard("verl", ">=0.9.1,<=0.9.1"), (_SEED, _ONE_TURN, _TOOLS), independent=True),
    ),
    obsolete_when="when the oldest verl in use contains the fix",
    conditions=(Condition(_SEED.target, f"{__name__}:{shares_its_seed.__name__}"),),
)
