"""verl's reproducible rollouts: one seed for each sample, not one for each replica."""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping
from typing import Any

from rlhf_patches import Guard, Patch, Rewrite, Variant

_REPEATED = "det-"
"""What request ids begin with that are the same in every run; another one names nothing."""


def seed_of(replicas: int, server: Any, request: Any, prompt: Iterable[int]) -> int:
    """The seed of a request, below 2**31.

    Args:
        replicas: what the replica has for all requests.
        server: whose ``global_steps`` says how often its weights were updated.
        request: what names the sample, ``det-17`` say, or what `named` makes of that.
        prompt: its tokens; with another turn, or after an interruption, there are more.
    """
    if not (isinstance(request, str) and request.startswith(_REPEATED)):
        return replicas
    step = getattr(server, "global_steps", None)
    named = f"{replicas}/{step}/{request}/{list(prompt)}"
    return int.from_bytes(hashlib.sha256(named.encode()).digest()[:4], "big") >> 1


def named(request: str, sample: Mapping[str, Any]) -> str:
    """The id of a sample's requests.

    Args:
        request: ``det-`` and the sample's place in its batch, which the trainer of V1 gives none: 0 of all of them.
        sample: what the agent loop has of it. In V1 the ``session_id`` counts a prompt's samples, ``index`` is its row
            of the data set, and ``global_steps`` the step that it is for.
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
    summary="with rollout.full_determinism the samples of a prompt are drawn with seeds of their own",
    harm="wrong data",
    affects_rollouts=True,
    bug="samples of one prompt are the same, token by token, so that GRPO's advantages are 0",
    when="vLLM rollouts with rollout.full_determinism=True, and more than one sample of a prompt",
    excluded_by=("actor_rollout_ref.rollout.full_determinism=false|absent",),
    symptom="""\
With `rollout.full_determinism=True` the samples of a prompt that go to one replica are equal: with one replica all `n`
of them, so GRPO's advantages and its gradient are 0 and the reward does not rise. With several replicas there are no
more different samples than replicas. Samples of different prompts, and of one prompt in later steps, are drawn with the
same random numbers. No error.""",
    cause="""\
`vLLMHttpServer.generate` gives each request the seed `replica_rank + rollout.seed`. vLLM draws the tokens of a request
that has a seed from a generator of its own, so what has the same prompt and seed is the same.""",
    repair="""\
The seed of a request is a hash of that seed, the step of the weights, the request's id, and the prompt's tokens, which
tell turns apart. verl makes the id of the sample's place in the batch. The trainer that it runs by default
(`trainer.use_v1`) gives samples no place, and all of them are `det-0`: there the step, the row's `index` in the data
set and the number of the sample among its prompt's come into the id, so that the router spreads them over the replicas,
too. It is the same in every run, as before. A seed that a caller has set stays, as does that of a request whose id is
not verl's own for such runs. Without `full_determinism` nothing changes. Not repaired: SGLang's deterministic
inference, another setting; conversations with tools in 0.9.0, whose ids are random; rows that have the same prompt and
no `index` draw the same.""",
    changes_numbers="""\
With `rollout.full_determinism=True` runs of verl 0.9.0 and 0.9.1 trained on samples that were the same. With the patch
they are drawn anew, so a run can be repeated with the patch, and not with its numbers from before.""",
    references=(
        "https://github.com/verl-project/verl/pull/6572",
        "https://github.com/verl-project/verl-omni/pull/60",
    ),
    variants=(
        Variant(Guard("verl", ">=0.9.0,<0.9.1"), (_SEED, _ONE_TURN), independent=True),
        Variant(Guard("verl", ">=0.9.1,<=0.9.1"), (_SEED, _ONE_TURN, _TOOLS), independent=True),
    ),
    obsolete_when="when the oldest verl in use has it repaired",
)
