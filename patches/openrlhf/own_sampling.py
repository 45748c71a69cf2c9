"""OpenRLHF's multi-turn agents: give each sample its own sampling parameters."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_BEGINS = 'initial_states = {"observation": prompt, "label": label}'
_COPY = "sampling_params = deepcopy(sampling_params)"

PATCH = Patch(
    name="openrlhf-own-sampling",
    summary="the samples of a prompt do not modify each other's sampling parameters",
    harm="wrong data",
    affects_rollouts=True,
    bug="samples of a prompt share one object of sampling parameters, and each sample modifies it",
    when="an agent (`--train.agent_func_path`), several samples per prompt, and observations of several lengths",
    symptom="""\
With a multi-turn agent and several samples per prompt, some samples begin with only a part of their first observation
(the log contains "Truncating to fit within max_length", although there is enough room), or with an observation that
leaves less room than `max_new_tokens`. Values that an environment sets in `states["sampling_params"]`, such as a
temperature, also apply to the other samples of the prompt.""",
    cause="""\
`MultiTurnAgentExecutor.execute` sets `sampling_params.max_tokens` to the remaining length of its own sample at each
turn, and passes the object to the environment. All samples of a prompt share one object, and each computes the maximum
length of its first observation from the current `max_tokens`.""",
    repair="""\
Each sample begins with a copy of the parameters with which the prompt was sent. If all samples of a prompt begin at the
same time with the same observation, and no environment sets parameters, nothing changes.

The patch does not change 0.9.1's environment, which all samples share; since 0.9.1.post1 each sample has its own.""",
    references=("https://github.com/OpenRLHF/OpenRLHF/blob/v0.11.2/openrlhf/utils/agent.py",),
    variants=(
        Variant(
            Guard("openrlhf", ">=0.9.1,<=0.11.2"),
            (
                Rewrite(
                    target="openrlhf.utils.agent:MultiTurnAgentExecutor.execute",
                    pattern=_BEGINS,
                    replacement=f"{_BEGINS}; {_COPY}",
                    alongside=("sampling_params.max_tokens = $LEFT", "deepcopy(sampling_params)"),
                    unless=(_COPY,),
                ),
            ),
        ),
    ),
    obsolete_when="when OpenRLHF copies the parameters before it modifies them; 0.11.2, the newest, does not",
)
