"""Online DPO with vLLM: every rank trains on completions of its own prompts, sampled with the current weights."""

from __future__ import annotations

from rlhf_patches import Condition, Guard, Patch, Rewrite, Variant

_OLD = "trl.trainer.online_dpo_trainer:OnlineDPOTrainer"
_NEW = "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer"
_HELPERS = f"{__package__}._engine_prompts"
_WEIGHTS = f"{__package__}._engine_weights"


def _served(trainer: str, completions: str) -> tuple[Rewrite, ...]:
    """The client returns a list of token lists, one per completion."""
    server = f"{trainer}._generate_vllm_server"
    return (
        Rewrite(server, "all_prompts[:: self.num_generations]", "all_prompts"),
        Rewrite(server, "all_images[:: self.num_generations]", "all_images"),
        Rewrite(
            server,
            "[[comp_id] for prompt_completions in completion_ids for comp_id in prompt_completions]",
            completions,
        ),
        Rewrite(
            server,
            "return completion_ids, prompt_ids",
            "return $BLOCKS(completion_ids), $BLOCKS(prompt_ids)",
            unless=("completion_ids[0::2] + completion_ids[1::2]",),
            uses={"BLOCKS": f"{_HELPERS}:in_blocks"},
        ),
    )


def _unpadded(trainer: str) -> Rewrite:
    return Rewrite(
        f"{trainer}._generate_vllm_server",
        'prompt_inputs["input_ids"]',
        "$UNPADDED(prompt_inputs)",
        uses={"UNPADDED": f"{_HELPERS}:unpadded"},
    )


def _together(trainer: str) -> Rewrite:
    return Rewrite(
        f"{trainer}._generate_vllm_colocate",
        "self.llm.generate(vllm_inputs, self.generation_config, use_tqdm=False)",
        "$TOGETHER(self, vllm_inputs, gather_object)",
        uses={"TOGETHER": f"{_HELPERS}:generated_together"},
    )


def _conditions(method: str, predicate: str = "") -> tuple[Condition, ...]:
    return tuple(Condition(f"{trainer}.{method}", predicate) for trainer in (_OLD, _NEW))


_OTHERS = "trl=sft|dpo|grpo|kto|reward|rloo|gold"
_SERVER = ("use_vllm=false|absent", "vllm_mode=colocate", _OTHERS)
_COLOCATE = ("use_vllm=false|absent", "vllm_mode=server", _OTHERS)

PATCH_SERVER = Patch(
    name="trl-online-dpo-server",
    summary="Online DPO with a vLLM server trains on whole completions of all prompts",
    harm="wrong data",
    affects_rollouts=True,
    bug="each completion is one token, half of the prompts are dropped, and pairs mix two prompts",
    when='OnlineDPOTrainer with use_vllm and vllm_mode="server"',
    excluded_by=_SERVER,
    symptom="""\
`OnlineDPOTrainer` with a vLLM server trains on completions of one token each, and computes rewards for them. These
tokens are the first ones of a single completion. It generates nothing for one of every two prompts. On several ranks
the run may hang. TRL up to 0.25.1 raises `ValueError: too many dimensions 'str'`.""",
    cause="""\
The trainer treats every second prompt as a copy of the previous prompt, but this trainer makes no copies. It flattens
the server's list of completions once more, so it treats tokens as completions; up to 0.25.1 it flattens the whole
answer, a dictionary. It also places both completions of a prompt next to each other, while the loss and the rewards
expect the first completions of all prompts, then the second ones.""",
    repair="""\
The patch sends all prompts to the server, uses the completions that the server returns, and puts them in the order
that the loss expects, as 1.8.0 does. In the trainer's own process, and without vLLM, nothing changes.""",
    changes_numbers="""\
Since TRL 0.26.0, Online DPO with a vLLM server trained on single tokens. Discard such a run.""",
    references=("https://github.com/huggingface/trl/pull/6228",),
    variants=(
        Variant(Guard("trl", ">=0.23.0,<0.26.0"), _served(_OLD, 'completion_ids["completion_ids"]')),
        Variant(Guard("trl", ">=0.26.0,<1.8.0"), _served(_NEW, "completion_ids")),
    ),
    obsolete_when="when the oldest trl in use is 1.8.0",
    conditions=_conditions("_generate_vllm_server", f"{_HELPERS}:asks_a_server"),
)

PATCH_PADDING = Patch(
    name="trl-online-dpo-server-padding",
    summary="Online DPO with a vLLM server does not treat padding as tokens of the prompt",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="the model attends to the padding of the shorter prompts",
    when='OnlineDPOTrainer with use_vllm and vllm_mode="server", and prompts of several lengths in a micro-batch',
    excluded_by=(*_SERVER, "per_device_train_batch_size=1"),
    symptom="""\
`OnlineDPOTrainer` with a vLLM server: if a prompt is shorter than another prompt of the batch, the policy and the
reference model compute the log-probabilities of its completions after padding tokens. vLLM samples without padding. No
error.""",
    cause="""\
The trainer tokenizes the prompts together, which pads them. It builds the masks from the padded lengths, which are all
equal.""",
    repair="""\
The patch removes the padding from each prompt; the masks then equal those of the trainer's own process. Where all
prompts have one length nothing changes.""",
    changes_numbers="""\
Since TRL 0.26.0, Online DPO with a vLLM server computed the log-probabilities with padding tokens before the
completions wherever prompts had several lengths. With the patch the log-probabilities are those that vLLM samples from.
The first gradients differ by a few percent or more, depending on the amount of padding; a model trained without the
patch has learned to answer prompts that are followed by padding.""",
    references=("https://github.com/huggingface/trl/pull/6228",),
    variants=(
        Variant(Guard("trl", ">=0.23.0,<0.26.0"), (_unpadded(_OLD),)),
        Variant(Guard("trl", ">=0.26.0,<=1.16.0"), (_unpadded(_NEW),)),
    ),
    obsolete_when="when the oldest trl in use does not pad there; all releases so far do",
    conditions=_conditions("_generate_vllm_server"),
)

PATCH_SLEEP = Patch(
    name="trl-online-dpo-sleep-weights",
    summary="Online DPO with sleep mode generates with the policy's weights in every micro-batch",
    harm="wrong data",
    affects_rollouts=True,
    bug="from the second micro-batch of a step on, vLLM generates with weights that it has dropped",
    when='OnlineDPOTrainer with vllm_mode="colocate", vllm_enable_sleep_mode and gradient_accumulation_steps above 1',
    excluded_by=(*_COLOCATE, "vllm_enable_sleep_mode=false|absent", "gradient_accumulation_steps=1"),
    symptom="""\
`OnlineDPOTrainer` with `vllm_mode="colocate"`, `vllm_enable_sleep_mode=True` and gradient accumulation: in every
micro-batch of a step except the first, completions are meaningless, such as one token over and over. No error.""",
    cause="""\
Sleep at level 2 drops vLLM's weights, and waking allocates memory without values. The trainer loads the policy's
weights only if the optimizer step differs from that of the last load.""",
    repair="""\
With sleep mode the patch loads the weights before each generation, since each generation follows a sleep. Without
sleep mode nothing changes.

The patch does not change a trainer with its own `training_step`, `_generate_vllm` or `_generate_vllm_colocate` on
several ranks with weights sharded by ZeRO-3 or FSDP. There one rank may generate more often than the others, and would
wait for them.""",
    changes_numbers="""\
Since TRL 0.28.0 with sleep mode and gradient accumulation, Online DPO trained on completions of no model from the
second micro-batch of each step on. Repeat such a run.""",
    references=(
        "https://github.com/huggingface/trl/issues/5312",
        "https://github.com/vllm-project/vllm/issues/29341",
    ),
    variants=(
        Variant(
            Guard("trl", ">=0.28.0,<=1.16.0"),
            (
                Rewrite(
                    f"{_NEW}._generate_vllm_colocate",
                    "self.state.global_step != self._last_loaded_step",
                    "$SLEPT(self) or self.state.global_step != self._last_loaded_step",
                    alongside=("self.llm.sleep(level=2)",),
                    unless=("_llm_weights_sleeping",),
                    uses={"SLEPT": f"{_WEIGHTS}:slept"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use loads after each sleep; no release so far does",
    conditions=(Condition(f"{_NEW}._generate_vllm_colocate", f"{_WEIGHTS}:generates_with_dropped_weights"),),
)

PATCH_TOGETHER = Patch(
    name="trl-online-dpo-tensor-parallel",
    summary="Online DPO gives all ranks of one vLLM engine the same prompts",
    harm="wrong data",
    affects_rollouts=True,
    bug="the ranks of one engine compute on different prompts, and hang if these differ in length",
    when='OnlineDPOTrainer with vllm_mode="colocate" and vllm_tensor_parallel_size above 1',
    excluded_by=(*_COLOCATE, "vllm_tensor_parallel_size=1|absent"),
    symptom="""\
`OnlineDPOTrainer` with `vllm_mode="colocate"` and `vllm_tensor_parallel_size` above 1: completions are unrelated to
their prompts, or the run hangs or raises a shape error within vLLM's collectives.""",
    cause="""\
An engine with tensor parallelism sums the partial results of a layer over its ranks, so all ranks need the same
requests. GRPO's trainer gathers the prompts of the ranks; this trainer gives each rank its own prompts.""",
    repair="""\
The patch gathers the prompts of all ranks of an engine. Each rank generates for all of them, as the engine needs it,
and keeps the completions of its own prompts, as GRPO does. Where an engine has one rank nothing changes.""",
    changes_numbers="""\
Since TRL 0.23.0, Online DPO on an engine of several ranks trained on completions of mixed prompts. Repeat such a
run.""",
    references=("https://github.com/vllm-project/vllm/issues/12071",),
    variants=(
        Variant(Guard("trl", ">=0.23.0,<0.26.0"), (_together(_OLD),)),
        Variant(Guard("trl", ">=0.26.0,<=1.16.0"), (_together(_NEW),)),
    ),
    obsolete_when="when the oldest trl in use gathers prompts there; no release so far does",
    conditions=_conditions("_generate_vllm_colocate", f"{_HELPERS}:one_engine_per_rank"),
)
