"""The router's loss with PEFT, Trainer, torch.compile and code of one's own: ``--out FOLDER [CASE ...]``."""

from __future__ import annotations

import contextlib
import copy
import functools
import gc
import inspect
import pickle
import sys
import tempfile
import threading
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import transformers
from peft import LoraConfig, get_peft_model
from torch.utils.checkpoint import checkpoint
from transformers import Trainer, TrainerCallback, TrainingArguments, modeling_utils

from rlhf_patches.patches.transformers.proofs import router_loss_reentrant_ranks
from rlhf_patches.patches.transformers.proofs.router_loss_reentrant_ranks import (
    VOCABULARY,
    loss_of,
    made,
    tokens,
    trained,
    wanted_of,
)
from rlhf_patches.patches.transformers.proofs.shared_kv_gradient_ranks import REENTRANT, bits, gradients, off
from rlhf_patches.testing import untouched

OLD = transformers.__version__.startswith("4.")


def checkpointed(family: str = "Mixtral", **more: Any) -> Any:
    model = made(family, **more)
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    return model


def digest(model: Any, **given: Any) -> dict[str, Any]:
    """Of a loss and its gradients, and what a forward changes in the model."""
    touched = ""
    loss_of(model, **given)  # transformers installs hooks in the first call
    try:
        with untouched(model):
            loss_of(model, **given)
    except AssertionError as error:
        touched = str(error)
    loss = loss_of(model, **given)
    loss.backward()
    kinds = sorted({type(each).__name__ for each in _functions(model)})
    return {"bits": bits(model, loss), "touched": touched, "kinds": kinds}


def _functions(model: Any) -> list[Any]:
    found = [vars(each).get("_gradient_checkpointing_func") for each in model.modules()]
    return [each for each in found if each is not None]


def without_gradients() -> dict[str, Any]:
    model = checkpointed()
    with torch.no_grad():
        return {"bits": bits(model, loss_of(model))}


def generated() -> dict[str, Any]:
    model = checkpointed(output_router_logits=not OLD)  # with a cache, 4.57 cannot compute the router's loss
    ids = model.eval().generate(tokens(), max_new_tokens=5, do_sample=False, use_cache=True)
    return {"bits": ids.tolist()}


def qwen3() -> dict[str, Any]:
    sizes = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 2}
    config = transformers.Qwen3Config(**sizes, num_attention_heads=2, num_key_value_heads=1, head_dim=8)
    torch.manual_seed(0)
    model = transformers.Qwen3ForCausalLM(config).train()
    model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    return digest(model)


def own_function(*, on_the_model: bool) -> dict[str, Any]:
    """Checkpointing of one's own, given to the model, or in place of torch's."""

    def own(function: Any, *args: Any, **named: Any) -> Any:
        return checkpoint(function, *args, **named)

    model = made("Mixtral")
    if on_the_model:
        model._set_gradient_checkpointing(True, functools.partial(own, use_reentrant=True))
        return digest(model)
    released, modeling_utils.checkpoint = modeling_utils.checkpoint, own
    try:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    finally:
        modeling_utils.checkpoint = released
    return digest(model)


def offloaded() -> dict[str, Any]:
    """The function; a call needs an accelerator."""
    model = made("Mixtral")
    if "offload" in inspect.signature(getattr(model, "activation_checkpointing_enable", loss_of)).parameters:
        model.activation_checkpointing_enable(REENTRANT, offload=True)
    return {"bits": [type(each).__name__ for each in _functions(model)]}


def two_losses(model: Any) -> torch.Tensor:
    """Both forwards come before the backward pass, as in DPO."""
    return (loss_of(model) + loss_of(model)) / 2


def accumulated(model: Any) -> torch.Tensor:
    (loss_of(model) / 2).backward()
    return loss_of(model) / 2


def two_passes(model: Any) -> torch.Tensor:
    """One graph, twice; half of the gradient each time."""
    loss = loss_of(model) / 2
    loss.backward(retain_graph=True)
    return loss


def with_outputs(model: Any) -> torch.Tensor:
    return loss_of(model, output_hidden_states=True, output_attentions=True)


def outputs() -> dict[str, Any]:
    """What a call returns besides the loss, and for which of it a graph is known."""
    output = checkpointed()(input_ids=tokens(), output_hidden_states=True, output_attentions=True)
    found = {name: [each.detach().tolist() for each in output[name]] for name in ("hidden_states", "attentions")}
    logits = [each.detach().tolist() for each in output.router_logits]
    return {**found, "router_logits": logits, "graph": [each.requires_grad for each in output.router_logits]}


def in_a_thread(model: Any) -> torch.Tensor:
    """The backward pass of half of it."""
    loss = loss_of(model) / 2
    thread = threading.Thread(target=loss.backward)
    thread.start()
    thread.join(60)
    return loss_of(model) / 2


def copied(model: Any) -> torch.Tensor:
    twin = copy.deepcopy(model)
    loss_of(twin).backward()
    for mine, its in zip(model.parameters(), twin.parameters(), strict=True):
        mine.grad = its.grad
    return torch.zeros((), requires_grad=True)


def pickled() -> dict[str, Any]:
    layer = checkpointed().model.layers[0]
    return {"bits": type(pickle.loads(pickle.dumps(layer._gradient_checkpointing_func))).__name__}


def in_bfloat16(autocast: bool) -> dict[str, Any]:
    """The gradient, compared with that of the other checkpointing at the same precision."""

    def gradient(checkpointing: dict[str, Any]) -> Any:
        model = made("Mixtral")
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model = model if autocast else model.to(torch.bfloat16)
        with torch.autocast("cpu", torch.bfloat16) if autocast else contextlib.nullcontext():
            loss = loss_of(model)
        loss.backward()
        return gradients(model)

    wanted = {name: each for name, each in gradient({"use_reentrant": False}).items() if each.norm() > 0}
    found = {name: each for name, each in gradient(REENTRANT).items() if name in wanted}
    return {"gradient": off(found, wanted), "parameters": len(wanted)}


def with_lora(checkpointing: dict[str, Any] | None) -> Any:
    model = made("Qwen3Moe")
    torch.manual_seed(2)
    config = LoraConfig(r=2, target_modules=["q_proj", "k_proj", "v_proj"], init_lora_weights=False)
    adapted = get_peft_model(model, config)
    if checkpointing is not None:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs=checkpointing)
        model.enable_input_require_grads()
    return adapted.train()


def lora() -> dict[str, Any]:
    model, wanted = with_lora(REENTRANT), wanted_of(with_lora(None))
    loss_of(model).backward()
    return {"gradient": off(gradients(model), wanted), "parameters": len(wanted)}


class Keep(TrainerCallback):
    """Records the gradients before the step."""

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, model: Any = None, **_: Any) -> None:
        self.found = gradients(model)


def by_trainer(family: str = "GptOss") -> dict[str, Any]:
    """A step of two batches; with checkpointing as the release has it by default, and in 5.x as asked for."""
    asked = {} if OLD else {"gradient_checkpointing_kwargs": REENTRANT}

    def gradient(**more: Any) -> Any:
        keep = Keep()
        rows = [{"input_ids": row, "labels": row} for row in tokens().repeat(2, 1)]
        with tempfile.TemporaryDirectory() as folder:
            arguments = TrainingArguments(
                folder, max_steps=1, per_device_train_batch_size=2, gradient_accumulation_steps=2, max_grad_norm=0,
                report_to=[], use_cpu=True, save_strategy="no", disable_tqdm=True, seed=0, **more,
            )  # fmt: skip
            Trainer(made(family), arguments, train_dataset=rows, callbacks=[keep]).train()
        return keep.found

    wanted = {name: each for name, each in gradient().items() if each.norm() > 0}
    found = {name: each for name, each in gradient(gradient_checkpointing=True, **asked).items() if name in wanted}
    return {"gradient": off(found, wanted), "parameters": len(wanted)}


def vision() -> dict[str, Any]:
    """Qwen3-VL MoE on text alone; one of its two layers is dense."""
    sizes = {name: router_loss_reentrant_ranks.SIZES[name] for name in SIZES_OF_TEXT}
    vision: dict[str, Any] = {
        "depth": 1,
        "hidden_size": 16,
        "intermediate_size": 16,
        "num_heads": 2,
        "out_hidden_size": 16,
    }
    vision |= {"deepstack_visual_indexes": [0], "initializer_range": 0.3}
    sizes |= {"mlp_only_layers": [0], "rope_scaling": {"rope_type": "default", "mrope_section": [2, 1, 1]}}

    def model() -> Any:
        config = transformers.Qwen3VLMoeConfig(text_config=sizes, vision_config=vision)
        for each in (config, config.text_config):
            each._attn_implementation = each._experts_implementation = "eager"
        config.text_config.router_aux_loss_coef = 0.5
        torch.manual_seed(0)
        return transformers.Qwen3VLMoeForConditionalGeneration(config).train()

    def loss(one: Any) -> torch.Tensor:
        output = one(input_ids=tokens(), labels=tokens(), output_router_logits=True)
        return output.loss + 0 * output.logits.sum()

    (wide := model().double())
    loss(wide).backward()
    wanted = {name: each for name, each in gradients(wide).items() if each.norm() > 0}
    mine = model()
    mine.gradient_checkpointing_enable(gradient_checkpointing_kwargs=REENTRANT)
    loss(mine).backward()
    found = {name: each for name, each in gradients(mine).items() if name in wanted}
    return {"gradient": off(found, wanted), "parameters": len(wanted)}


SIZES_OF_TEXT: tuple[str, ...] = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
SIZES_OF_TEXT += ("num_key_value_heads", "head_dim", "num_experts", "num_experts_per_tok", "moe_intermediate_size")
SIZES_OF_TEXT += ("decoder_sparse_step", "initializer_range", "use_cache")


def compiled(model: Any) -> torch.Tensor:
    torch._dynamo.reset()
    return loss_of(torch.compile(model, backend="aot_eager"))


def compiled_whole() -> dict[str, Any]:
    """In one graph, where the release can."""
    found = []
    for is_asked in (False, True):
        torch._dynamo.reset()
        model = checkpointed(output_router_logits=is_asked)
        try:
            whole = torch.compile(model, backend="aot_eager", fullgraph=True)
            (loss := loss_of(whole)).backward()
            found.append(bits(model, loss))
        except Exception as error:
            found.append(type(error).__name__)
    return {"bits": found}


@contextlib.contextmanager
def _without_collection() -> Iterator[None]:
    gc.collect()
    gc.disable()
    try:
        yield
    finally:
        gc.enable()


def kept() -> dict[str, Any]:
    """Whether a step's logits are still there after it, and after a forward alone."""
    model = checkpointed()
    loss_of(model).backward()
    with _without_collection():
        found = []
        for is_trained in (True, False):
            output = model(input_ids=tokens(), labels=tokens())
            logits = [weakref.ref(each) for each in output.router_logits]
            if is_trained:
                output.loss.backward()
            del output
            found.append(sum(each() is not None for each in logits))
    return {"kept": found}


def modes() -> dict[str, Any]:
    """Whether gradients were on, for each run of a layer; and whether hooks and collectors are as before."""
    seen: list[bool] = []
    model = checkpointed()
    for layer in model.model.layers:
        layer.self_attn.register_forward_pre_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    loss = loss_of(model)
    hooks = [len(each._forward_hooks) for each in model.modules()]
    loss.backward()
    is_left = [len(each._forward_hooks) for each in model.modules()] == hooks
    capturing = sys.modules.get("transformers.utils.output_capturing")
    return {"runs": seen, "left": is_left and (capturing is None or capturing._active_collector.get() is None)}


def fails() -> dict[str, Any]:
    """The run in the backward pass raises; the next step is right."""
    model = checkpointed()
    loss = loss_of(model)
    hooks = [len(each._forward_hooks) for each in model.modules()]

    def raises(*_: Any) -> None:
        raise KeyError("own")

    handle = model.model.layers[0].post_attention_layernorm.register_forward_pre_hook(raises)
    raised = ""
    try:
        loss.backward()
    except KeyError as error:
        raised = str(error)
    handle.remove()
    model.zero_grad()
    left = [len(each._forward_hooks) for each in model.modules()] == hooks
    loss = loss_of(model)
    loss.backward()
    return {"raised": raised, "left": left, "bits": bits(model, loss)}


CASES: dict[str, Callable[[], dict[str, Any]]] = {
    **router_loss_reentrant_ranks.cases(),
    "LoRA": lora,
    "Trainer": by_trainer,
    "vision": vision,
    "dense first": functools.partial(trained, "Qwen3Moe", mlp_only_layers=(0,)),
    "torch's default": functools.partial(trained, "Mixtral", {"preserve_rng_state": True}),
    "two losses": functools.partial(trained, "Mixtral", call=two_losses),
    "accumulated": functools.partial(trained, "Mixtral", call=accumulated),
    "two passes": functools.partial(trained, "Mixtral", call=two_passes),
    "with outputs": functools.partial(trained, "Mixtral", call=with_outputs),
    "thread": functools.partial(trained, "Mixtral", call=in_a_thread),
    "copied": functools.partial(trained, "Mixtral", call=copied),
    "compiled": functools.partial(trained, "Mixtral", call=compiled),
    "bfloat16": functools.partial(in_bfloat16, False),
    "autocast": functools.partial(in_bfloat16, True),
    "outputs": outputs,
    "evaluation": lambda: digest(checkpointed().eval()),
    "no gradients": without_gradients,
    "generated": generated,
    "not asked": lambda: digest(checkpointed(output_router_logits=False)),
    "Qwen3": qwen3,
    "own function": functools.partial(own_function, on_the_model=True),
    "own in place": functools.partial(own_function, on_the_model=False),
    "offload": offloaded,
    "pickled": pickled,
    "compiled whole": compiled_whole,
    "touched": lambda: digest(checkpointed()),
    "kept": kept,
    "modes": modes,
    "fails": fails,
}


def main() -> None:
    router_loss_reentrant_ranks.main(CASES)
