"""verl's rollout correction: rejected responses are no part of their group's statistics."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Variant, Wrap

_MODULE = "verl.trainer.ppo.core_algos"
_OURS = f"{__package__}._rejected:of_kept"
_READ = "0.6.0 to 0.9.1"
_FORMS = {
    "compute_grpo_outcome_advantage": {"369d6302a2c61313": _READ},
    "compute_grpo_vectorized_outcome_advantage": {
        "3c44ab8b8e5a45da": "0.6.0 to 0.7.0",
        "158ca27f014a8428": "0.7.1",
        "1d4a17a7956e3461": "0.8.0.dev0 to 0.9.1",
    },
    "compute_rloo_outcome_advantage": {"d9a2b1893065ae17": _READ},
    "compute_reinforce_plus_plus_baseline_outcome_advantage": {"d263f64959ffec34": _READ},
}

PATCH = Patch(
    name="verl-rejected-in-group",
    summary="responses that rollout correction has rejected do not move the baseline of their group",
    harm="wrong gradient",
    bug="responses that are rejected, and so not trained, still count in their group's mean and standard deviation",
    when="rollout_rs, or a veto up to 0.7.0, and adv_estimator grpo, rloo or reinforce_plus_plus_baseline",
    # Without rollout_rs, 0.6.1 and 0.7.0 reject by rollout_token_veto_threshold.
    excluded_by=("algorithm.adv_estimator=gae|remax|opo|reinforce_plus_plus",),
    symptom="""\
verl 0.6.1 to 0.9.1 with `algorithm.rollout_correction.rollout_rs`, or 0.6.1 and 0.7.0 with
`rollout_token_veto_threshold`: a response that is rejected gets an empty response mask, but its reward still moves the
advantages of the other responses to the same prompt. With the rewards 1, 0 and 0, and a rejected response with the
reward 5, the first response has the advantage -0.21 in GRPO; without the rejected one it is 1.15. No error.""",
    cause="""\
Rollout correction changes `response_mask` before advantages are computed. The estimators sum rewards without the mask,
and multiply by the mask at the end.""",
    repair="""\
The patch gives each response without a token that counts a group of its own, in `grpo`, `grpo_vectorized`, `rloo` and
`reinforce_plus_plus_baseline`. Mean and standard deviation are then those of the responses that are kept. A response
that is kept alone has verl's own baseline for a group of one, 0. `gdpo` calls the function of `grpo`.

Batches in which no response is rejected stay bit for bit what they are. So do groups without a rejected response, and
batches whose prompts are not named as verl's trainers name them. Responses of which some tokens are rejected count as
before. `gpg`, `rloo_vectorized` and `grpo_passk` have the bug too, and stay as released.

Not repaired: `rollout_correction.bypass_mode`. There the actor rejects, after the advantages are computed.""",
    contested="#6362 and #6375 were closed, #6452 is open; a mean that counts rejected responses is a baseline, too",
    changes_numbers="""\
With the patch the advantages of a group in which responses are rejected are those of a smaller group. They are
comparable with earlier runs only where nothing is rejected.""",
    references=(
        "https://github.com/verl-project/verl/pull/6452",
        "https://github.com/verl-project/verl/pull/6375",
    ),
    variants=(
        Variant(
            Guard("verl", ">=0.6.1,<=0.9.1"),
            tuple(Wrap(f"{_MODULE}:{name}", _OURS, fingerprints=forms) for name, forms in _FORMS.items()),
        ),
    ),
    obsolete_when="when verl leaves rejected responses out of their groups; 0.9.1, the newest, does not",
    conditions=tuple(Condition(f"{_MODULE}:{name}") for name in _FORMS),
)
