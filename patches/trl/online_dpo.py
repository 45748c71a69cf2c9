"""Online DPO with vLLM: each prompt's own completions, from the present weights, on every rank of an engine."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

_OLD = "trl.trainer.online_dpo_trainer:OnlineDPOTrainer"
_NEW = "trl.experimental.online_dpo.online_dpo_trainer:OnlineDPOTrainer"
_HELPERS = f"{__package__}._engine_prompts"


def _served(trainer: str, completions: str) -> tuple[Rewrite, ...]:
    """A list of token lists, one for each completion, is what the client's answer has."""
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


_SERVER = ("use_vllm=false|absent", "vllm_mode=colocate")
_COLOCATE = ("use_vllm=false|absent", "vllm_mode=server")

PATCH_SERVER = Patch(
    name="trl-online-dpo-server",
    summary="Online DPO with a vLLM server trains on whole completions, of all prompts",
    harm="wrong data",
    affects_rollouts=True,
    bug="each completion is one token, half of the prompts are dropped, and pairs are of two prompts",
    when='OnlineDPOTrainer with use_vllm and vllm_mode="server"',
    excluded_by=_SERVER,
    symptom="""\
`OnlineDPOTrainer` with a vLLM server trains on completions of one token, which are the first tokens of one completion,
and rewards the same. Of every two prompts one is never generated for. On several ranks it may wait for ever. Until TRL
0.25.1 it ends in `ValueError: too many dimensions 'str'`.""",
    cause="""\
Every other prompt is taken for a copy of the one before, which this trainer does not make. The server's list of
completions is flattened once more, so its tokens are taken for completions; until 0.25.1 it is the whole answer, a
dictionary, that is flattened. And both completions of a prompt are next to each other, where loss and rewards expect
the first ones of all prompts, and then the second ones.""",
    repair="""\
The server is asked for all prompts, its completions are taken as they are, and put in the order that the loss expects,
as in 1.8.0. In the trainer's own process, and without vLLM, nothing changes.""",
    changes_numbers="""\
Since TRL 0.26.0 Online DPO with a vLLM server was trained on single tokens. Nothing of such a run carries over.""",
    references=("https://github.com/huggingface/trl/pull/6228",),
    variants=(
        Variant(Guard("trl", ">=0.23.0,<0.26.0"), _served(_OLD, 'completion_ids["completion_ids"]')),
        Variant(Guard("trl", ">=0.26.0,<1.8.0"), _served(_NEW, "completion_ids")),
    ),
    obsolete_when="when the oldest trl in use is 1.8.0",
)

PATCH_PADDING = Patch(
    name="trl-online-dpo-server-padding",
    summary="Online DPO with a vLLM server does not take padding for tokens of the prompt",
    harm="wrong gradient",
    affects_rollouts=True,
    bug="padding of the shorter prompts is attended to",
    when='OnlineDPOTrainer with use_vllm and vllm_mode="server", and prompts of several lengths in a micro-batch',
    excluded_by=(*_SERVER, "per_device_train_batch_size=1"),
    symptom="""\
`OnlineDPOTrainer` with a vLLM server: log-probabilities of completions whose prompt is shorter than another one of the
batch are those after a row of padding tokens, of the policy and of the reference model. vLLM has sampled without them.
No error.""",
    cause="""\
The prompts are tokenized together, which pads them, and their masks are made of the lengths of what comes out, which
are all the same.""",
    repair="""\
Of each prompt the tokens without padding are taken; masks are then what they are in the trainer's own process. Where
all prompts have one length nothing changes.""",
    changes_numbers="""\
Since TRL 0.26.0 Online DPO with a vLLM server computed log-probabilities after padding wherever prompts had several
lengths. With the patch they are those that vLLM samples from. The first gradients differ by a few percent or more, by
how much padding there was; a model that was trained so has learnt to answer after it.""",
    references=("https://github.com/huggingface/trl/pull/6228",),
    variants=(
        Variant(Guard("trl", ">=0.23.0,<0.26.0"), (_unpadded(_OLD),)),
        Variant(Guard("trl", ">=0.26.0,<=1.16.0"), (_unpadded(_NEW),)),
    ),
    obsolete_when="when the oldest trl in use does not pad there; none released so far does without",
)

PATCH_SLEEP = Patch(
    name="trl-online-dpo-sleep-weights",
    summary="Online DPO with sleep mode generates with the policy's weights in every micro-batch",
    harm="wrong data",
    affects_rollouts=True,
    bug="from the second micro-batch of a step on, completions come from weights that were dropped",
    when='OnlineDPOTrainer with vllm_mode="colocate", vllm_enable_sleep_mode and gradient_accumulation_steps above 1',
    excluded_by=(*_COLOCATE, "vllm_enable_sleep_mode=false|absent", "gradient_accumulation_steps=1"),
    symptom="""\
`OnlineDPOTrainer` with `vllm_mode="colocate"`, `vllm_enable_sleep_mode=True` and accumulation: the completions of all
micro-batches of a step but the first are garbage, such as one token over and over. No error.""",
    cause="""\
Sleep at level 2 drops vLLM's weights, and waking gives memory without values. The policy's are loaded only where the
step is another one than at the last load.""",
    repair="""\
With sleep mode they are loaded before each generation, all of which follow a sleep. Without it nothing changes.

Left alone: a trainer with a `training_step`, `_generate_vllm` or `_generate_vllm_colocate` of your own, on several
ranks with weights sharded by ZeRO-3 or FSDP. There a rank may generate more often than the others, and would wait for
them.""",
    changes_numbers="""\
Since TRL 0.28.0 with sleep mode and accumulation, Online DPO was trained on completions of no model, in all
micro-batches of a step but one. Such a run has to be repeated.""",
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
                    uses={"SLEPT": f"{__package__}._engine_weights:slept"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest trl in use loads after each sleep; none released so far does",
)

PATCH_TOGETHER = Patch(
    name="trl-online-dpo-tensor-parallel",
    summary="Online DPO gives all ranks of one vLLM engine the same prompts",
    harm="wrong data",
    affects_rollouts=True,
    bug="the ranks of one engine compute on different prompts, and wait for ever where these differ in length",
    when='OnlineDPOTrainer with vllm_mode="colocate" and vllm_tensor_parallel_size above 1',
    excluded_by=(*_COLOCATE, "vllm_tensor_parallel_size=1|absent"),
    symptom="""\
`OnlineDPOTrainer` with `vllm_mode="colocate"` and `vllm_tensor_parallel_size` above 1: completions have nothing to do
with their prompts, or the run hangs or ends in an error of shapes within vLLM's collectives.""",
    cause="""\
An engine over several ranks adds up what each of them has computed of a layer, so all have to be given the same
requests. GRPO's trainer gathers the prompts of the ranks; this one gives each rank its own.""",
    repair="""\
The prompts of all ranks of an engine are gathered, each rank generates for all of them, as the engine needs it, and
keeps the completions of its own, as GRPO does. Where an engine has one rank nothing changes.""",
    changes_numbers="""\
Since TRL 0.23.0 Online DPO on an engine of several ranks was trained on completions of a mixture of prompts. Such a run
has to be repeated.""",
    references=("https://github.com/vllm-project/vllm/issues/12071",),
    variants=(
        Variant(Guard("trl", ">=0.23.0,<0.26.0"), (_together(_OLD),)),
        Variant(Guard("trl", ">=0.26.0,<=1.16.0"), (_together(_NEW),)),
    ),
    obsolete_when="when the oldest trl in use gathers prompts there; none released so far does",
)
