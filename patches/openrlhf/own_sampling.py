"""OpenRLHF's agents of several turns: each sample has sampling parameters of its own."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_BEGINS = 'initial_states = {"observation": prompt, "label": label}'
_COPY = "sampling_params = deepcopy(sampling_params)"

PATCH = Patch(
    name="openrlhf-own-sampling",
    summary="the samples of a prompt do not write to one another's sampling parameters",
    harm="wrong data",
    affects_rollouts=True,
    bug="samples of a prompt share sampling parameters that each of them writes to",
    when="an agent (`--train.agent_func_path`), several samples per prompt, and observations of several lengths",
    symptom="""\
With an agent of several turns and several samples per prompt, some samples begin with a part of their first observation
only, "Truncating to fit within max_length", though it leaves room enough; or with one that leaves less than
`max_new_tokens`. What an environment sets in `states["sampling_params"]`, a temperature say, is in force for the other
samples of the prompt too.""",
    cause="""\
`MultiTurnAgentExecutor.execute` sets `sampling_params.max_tokens` to what is left in its own sample at each turn, and
hands the object to the environment. All samples of a prompt are given the same one, and each computes how long its
first observation may be from the `max_tokens` that it finds.""",
    repair="""\
Each sample begins with a copy of the parameters, as the prompt was sent with. Where all samples of a prompt begin
with the same observation at once and no environment sets parameters, nothing changes.

Left alone: 0.9.1's environment, which all samples share; since 0.9.1.post1 each has one of its own.""",
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
    obsolete_when="when OpenRLHF copies the parameters before it writes to them; 0.11.2, the newest, does not",
)
