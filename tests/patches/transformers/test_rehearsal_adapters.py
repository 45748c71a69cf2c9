"""Relations of adapters, of the loss of evaluation and of fused losses: on small models, without a trainer."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch
import transformers
from peft import IA3Config, LoraConfig, get_peft_model

from rlhf_patches.rehearsal import adapters, evaluation, fused

SIZES = {"vocab_size": 8, "hidden_size": 8, "intermediate_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2}
SIZES |= {"num_key_value_heads": 2, "pad_token_id": 0}
TARGETS = ["q_proj", "v_proj"]
RIGHT = {
    "LoRA": LoraConfig(r=2, target_modules=TARGETS),
    "all linear layers": LoraConfig(r=2, target_modules="all-linear"),
    "DoRA": LoraConfig(r=2, target_modules=TARGETS, use_dora=True),
    "a rank-stabilized one": LoraConfig(r=2, target_modules=TARGETS, use_rslora=True),
    "one layer": LoraConfig(r=2, target_modules=TARGETS, layers_to_transform=[1]),
    "a number": LoraConfig(r=2, target_modules=TARGETS, layers_to_transform=1),
    "embeddings": LoraConfig(r=2, target_modules=["embed_tokens", "q_proj"]),
    "a bias": LoraConfig(r=2, target_modules=TARGETS, bias="lora_only"),
    "a head": LoraConfig(r=2, target_modules=TARGETS, modules_to_save=["lm_head"]),
    "IA3": IA3Config(target_modules=["k_proj", "down_proj"], feedforward_modules=["down_proj"]),
    "not trained": LoraConfig(r=2, target_modules=TARGETS, inference_mode=True),
}


def llama():
    torch.manual_seed(0)
    return transformers.LlamaForCausalLM(transformers.LlamaConfig(**SIZES))


def bits(model):
    return {name: (each.detach().clone(), each.requires_grad) for name, each in model.named_parameters()}


@pytest.mark.parametrize("name", RIGHT)
@pytest.mark.parametrize("merges", [False, True])
def test_right_adapters_hold_and_stay_what_they_are(name, merges):
    model = get_peft_model(llama(), RIGHT[name])
    before, random = bits(model), torch.get_rng_state()
    found = adapters.relation(model, merges=merges)
    assert (found.verdict.value, found.text) == ("holds", "")
    after = bits(model)
    assert all(torch.equal(after[each][0], value) and after[each][1] == flag for each, (value, flag) in before.items())
    assert torch.equal(torch.get_rng_state(), random)


@pytest.mark.parametrize("others", [("other",), ("first_stage", "reference")])
def test_adapters_beside_each_other_hold(others):
    model = get_peft_model(llama(), RIGHT["LoRA"], adapter_name="policy")
    for other in others:
        model.add_adapter(other, LoraConfig(r=2, target_modules=["q_proj"], inference_mode=True))
    assert adapters.relation(model).text == ""
    for name, each in model.named_parameters():  # an earlier stage's, which is active too
        each.requires_grad_(".policy." in name)
    model.base_model.set_adapter(["policy", others[0]])
    for name, each in model.named_parameters():
        each.requires_grad_(".policy." in name)
    assert adapters.relation(model).text == ""


def test_an_adapter_that_is_frozen():
    model = get_peft_model(llama(), RIGHT["LoRA"])
    for name, each in model.named_parameters():
        each.requires_grad_("lora_B" in name)  # LoRA-FA
    assert adapters.relation(model).verdict.value == "holds"
    model.requires_grad_(False)
    found = adapters.relation(model)
    assert (found.verdict.value, found.measured) == ("deviates", "default on 4 layers")
    assert found.text == "the active adapter default was made for training, and is frozen"


def test_a_file_with_another_adapter():
    model = get_peft_model(llama(), RIGHT["LoRA"], adapter_name="policy")
    model.add_adapter("reference", RIGHT["LoRA"])
    theirs = model.base_model.model.model.layers[0].self_attn.q_proj.lora_A["reference"].weight
    saved = adapters.saved

    def one_more(*given):
        return {**saved(*given), "stranger": theirs}

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(adapters, "saved", one_more)
        found = adapters.relation(model)
        assert adapters.relation(model, sharded=True).verdict.value == "holds"
    assert found.verdict.value == "deviates"
    assert found.text == "1 of 9 saved tensors of policy belong to reference"


class Mixture(torch.nn.Module):
    """Experts that are modules, as transformers 4 has them."""

    def __init__(self, layers: int = 3, experts: int = 2) -> None:
        super().__init__()
        self.config = SimpleNamespace(num_hidden_layers=layers, num_local_experts=experts)
        self.layers = torch.nn.ModuleList(
            torch.nn.ModuleDict(
                {
                    "experts": torch.nn.ModuleList(torch.nn.Linear(4, 4) for _ in range(experts)),
                    "q": torch.nn.Identity(),
                }
            )
            for _ in range(layers)
        )


@pytest.mark.parametrize(
    ("model", "name", "place"),
    [
        (Mixture(), "layers.2.experts.1", 2),
        (Mixture(), "layers.2.q", None),
        (Mixture(experts=4), "layers.0.experts.3", 0),
    ],
)
def test_where_an_expert_is(model, name, place):
    assert adapters._place(model, name) == place
    model.config.num_hidden_layers += 1  # another model's list
    assert adapters._place(model, name) is None


def test_merges_in_low_precision():
    """Of PEFT as released; its patch's own tests hold the repair."""
    model = get_peft_model(llama().bfloat16(), RIGHT["LoRA"])
    before = bits(model)
    found = adapters.relation(model, merges=True)
    assert found.verdict.value == "deviates"
    assert "each merge and its reverse change the base weights of 4 layers by up to" in found.text
    assert all(torch.equal(each, before[name][0]) for name, (each, _) in bits(model).items())
    assert adapters.relation(model).verdict.value == adapters.relation(model, sharded=True, merges=True).verdict.value
    assert not any(layer.merged for _, layer in adapters._layers(model))


def test_a_model_without_adapters_has_no_row():
    assert adapters.relation(llama()) is None


# -- the loss of evaluation


class Evaluates:
    def __init__(self, made):
        self.made, self.eval_dataset = made, None

    def prediction_step(self, model, inputs, prediction_loss_only):
        assert prediction_loss_only
        assert not model.training
        return self.made


def test_the_loss_of_evaluation():
    model = torch.nn.Sequential(torch.nn.Dropout(), torch.nn.BatchNorm1d(2).eval())
    with evaluation.mode(model):
        assert evaluation.loss(Evaluates((torch.tensor(2.0), None, None)), model, {}) == 2.0
        assert evaluation.loss(Evaluates((None, None, None)), model, {}) is None
    assert [each.training for each in model.modules()] == [True, True, False]
    assert not evaluation.planned(Evaluates(None))
    for found, own, verdict in ((1.0, 1.0, "holds"), (1.00002, 1.0, "deviates"), (2.0, 1.0, "deviates")):
        assert evaluation.judge(found, own, 1e-7).verdict.value == verdict
    assert evaluation.judge(1.00002, 1.0, 1e-5).verdict.value == "holds"
    assert evaluation.judge(4.0, 2.0, 1e-7).measured == "2.000 x"


# -- fused losses


def test_a_fused_loss_is_held_to_the_plain_one():
    plain = torch.tensor([1.0, 2.0, -2.0], dtype=torch.float64)
    assert fused.judge(plain * (1 + 1e-6), plain, 1e-7).verdict.value == "holds"
    found = fused.judge(plain * 0.6, plain, 1e-7)
    assert (found.verdict.value, found.measured) == ("deviates", "0.4")
    assert "(a part of 0.600)" in found.text
    assert fused.judge(plain, plain.clone(), 1e-7).verdict.value == "not checked"
    assert fused.judge(plain.flip(0), plain, 1e-7).verdict.value == "deviates"
    assert fused.judge(plain * 0.99, plain, 4e-3).verdict.value == "holds"


def test_the_switch_of_a_fused_loss_is_put_back():
    class Trainer:
        def compute_loss(self):
            return "Liger's" if self.use_liger_kernel else "plain"

    trainer = Trainer()
    trainer.use_liger_kernel = True
    assert fused.used(trainer)
    with fused.without(trainer):
        assert trainer.compute_loss() == "plain"
    assert trainer.use_liger_kernel is True
    assert "Trainer's loss is not known" in fused.unknown(trainer)
    trainer.use_liger_kernel = False
    assert not fused.used(trainer)
