"""What ms-swift's trainers do in and after ``null_ref_context``, on a real model with dropout and LoRA.

``--out FOLDER megatron``, or ``--out FOLDER swift.rlhf_trainers.dpo_trainer:DPOTrainer``, on one rank.

In one process, and each time on models made anew from the same seed, it is observed what happens as released, with the
patches applied, and (a part of it) after they were reverted. An older ms-swift is chosen by PYTHONPATH (the folders
``side-by-side`` of the environment).

Real are the trainer's class and its `null_ref_context`, megatron-core's GPTModel or transformers' Qwen2, PEFT, and
ms-swift's own set-up of adapters and LoRA layers. TransformerEngine's linears are megatron-core's native ones (see
`name_native_layers_after_te`), and trainers are made without `__init__`, which would load a model from disk.
"""

from __future__ import annotations

import abc
import argparse
import contextlib
import copy
import functools
import gc
import importlib
import inspect
import itertools
import json
import os
import signal
import threading
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.nn import functional

from rlhf_patches.patches.swift.proofs.small import DROPOUT, HIDDEN, LAYERS, VOCABULARY, Transformers
from tests.harness import absent_packages, megatron_on_cpu

SEQUENCE, BATCH = 16, 2


# -- models, adapters and trainers -----------------------------------------------------------------------------------


@functools.cache
def load_megatron() -> type:
    """Import ms-swift with Megatron; returns a trainer's class."""
    megatron_on_cpu.install()
    absent_packages.install_for_swift()
    name_native_layers_after_te()
    # Before ms-swift is imported: it binds the function.
    training: Any = importlib.import_module("megatron.training")
    training.get_args = lambda: Args.current or Args(lora=True, ref_adapter=False)
    try:
        module = importlib.import_module("swift.megatron.trainers.rlhf_mixin")
        base = module.MegatronRLHFTrainer
    except ModuleNotFoundError:
        module = importlib.import_module("swift.megatron.trainers.dpo_trainer")
        base = module.MegatronDPOTrainer
    return type("Trainer", (base,), {"forward_step": None, "__abstractmethods__": frozenset()})


class Megatron:
    """`MegatronRLHFTrainer`, before 3.9 `MegatronDPOTrainer`, and a GPTModel a pipeline chunk."""

    def __init__(self) -> None:
        self.trainer_class = load_megatron()
        from megatron.core import parallel_state
        from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

        for name, value in {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}.items():
            os.environ.setdefault(name, value)  # no launcher is needed
        torch.distributed.init_process_group("gloo")
        parallel_state.initialize_model_parallel()
        model_parallel_cuda_manual_seed(1234)
        self.targets = ["linear_qkv", "linear_proj", "linear_fc1", "linear_fc2"]

    def make_model(self) -> Any:
        from megatron.core.extensions.transformer_engine import TEColumnParallelLinear, TERowParallelLinear
        from megatron.core.models.gpt import GPTModel
        from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
        from megatron.core.transformer.transformer_config import TransformerConfig

        config = TransformerConfig(
            num_layers=LAYERS,
            hidden_size=HIDDEN,
            num_attention_heads=4,
            hidden_dropout=DROPOUT,
            attention_dropout=DROPOUT,
            use_cpu_initialization=True,
            recompute_granularity="full",
            recompute_method="uniform",
            recompute_num_layers=1,
        )
        layer = get_gpt_layer_local_spec()
        attention, mlp = (getattr(layer.submodules, name).submodules for name in ("self_attention", "mlp"))
        attention.linear_qkv = mlp.linear_fc1 = TEColumnParallelLinear
        attention.linear_proj = mlp.linear_fc2 = TERowParallelLinear
        model = GPTModel(
            config=config,
            transformer_layer_spec=layer,
            vocab_size=VOCABULARY,
            max_sequence_length=SEQUENCE,
            position_embedding_type="rope",
            share_embeddings_and_output_weights=False,
        )
        # As ms-swift's own GPTModel does it: with nothing trainable below, recompute would return no gradient.
        model.embedding.register_forward_hook(
            lambda module, args, output: output.requires_grad_(torch.is_grad_enabled())
        )
        model.prepare_inputs_for_generation = None  # PEFT asks for it
        return model

    def logits(self, model: Any, inputs: torch.Tensor) -> torch.Tensor:
        if hasattr(model, "base_model"):  # PEFT's own forward expects a model of transformers
            model = model.base_model.model
        positions = torch.arange(SEQUENCE).expand_as(inputs)
        above_diagonal = torch.ones(SEQUENCE, SEQUENCE, dtype=torch.bool).triu(1)
        return model(inputs, positions, above_diagonal[None, None])

    def trainer(self, peft_models: list[Any], ref_adapter: bool) -> Any:
        models = [peft_model.base_model.model for peft_model in peft_models]
        return self.make_trainer(Args(lora=True, ref_adapter=ref_adapter), peft_models, models, [])

    def make_trainer(self, args: Args, peft_models: list[Any], models: list[Any], ref_models: list[Any]) -> Any:
        trainer: Any = object.__new__(self.trainer_class)
        trainer.args = args
        trainer.peft_models, trainer.unwrapped_models, trainer.ref_models = peft_models, models, ref_models
        trainer.peft_model, trainer.unwrapped_model = peft_models[0], models[0]
        trainer.ref_model = ref_models[0] if ref_models else None
        return trainer


def name_native_layers_after_te() -> None:
    """Let ms-swift's LoRA find megatron-core's own linear layers under the names of TransformerEngine's.

    Before ms-swift is imported: it binds the names. Its releases up to 3.12 accept no layer of another name.
    """
    # Not `from megatron.core.extensions import`: absent_packages has let megatron-core forget a first copy of it.
    adapter = importlib.import_module("megatron.core.extensions.transformer_engine")
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    class TELinear(torch.nn.Linear, metaclass=abc.ABCMeta):
        def __init__(self, input_size: int, output_size: int, *, bias: bool, **_: Any) -> None:
            super().__init__(input_size, output_size, bias=bias)
            self.use_bias, self.tp_size = bias, 1  # ms-swift prints them

        def forward(self, inputs: torch.Tensor) -> tuple[torch.Tensor, None]:
            return super().forward(inputs), None

    class TEColumnParallelLinear(ColumnParallelLinear):
        parallel_mode = "column"

    class TERowParallelLinear(RowParallelLinear):
        parallel_mode = "row"

    for parallel in (TEColumnParallelLinear, TERowParallelLinear):
        TELinear.register(parallel)
        setattr(adapter, parallel.__name__, parallel)
    vars(adapter)["TELinear"] = TELinear


class Args(types.SimpleNamespace):
    """The Megatron trainers' arguments under the names of all releases (``train_type`` became ``tuner_type``, ...)."""

    current: types.SimpleNamespace | None = None  # what Megatron-LM's get_args returns, which ms-swift 3 calls

    def __init__(self, lora: bool, ref_adapter: bool) -> None:
        super().__init__(
            train_type="lora" if lora else "full",
            tuner_type="lora" if lora else "full",
            ref_adapter_load="a checkpoint" if ref_adapter else None,
            mcore_ref_adapter="a checkpoint" if ref_adapter else None,
            ref_adapters=[],
            mlp_padding_free=False,
        )


family: Megatron | Transformers


def add_lora(model: Any, *names: str) -> Any:
    """The model with LoRA, as ms-swift's `prepare_adapter` does it: 'default' first, and active."""
    from swift.tuners import LoraConfig, Swift

    config = LoraConfig(task_type="CAUSAL_LM", r=4, lora_alpha=8, lora_dropout=DROPOUT, target_modules=family.targets)
    peft_model = Swift.prepare_model(model, config)
    for name in names:
        peft_model.add_adapter(name, copy.deepcopy(config))
        for parameter_name, parameter in peft_model.named_parameters():
            if f".{name}." in parameter_name:
                parameter.requires_grad = False
                if "lora_B" in parameter_name:  # as trained, or the adapter would do nothing
                    torch.nn.init.normal_(parameter, std=0.1)
    return peft_model


def lora_trainer(ref_adapter: bool = False, chunks: int = 1) -> Any:
    """A policy with LoRA, in training mode, that serves as the reference."""
    torch.manual_seed(1234)
    names = ["ref_adapter"] if ref_adapter else []
    return family.trainer([add_lora(family.make_model(), *names).train() for _ in range(chunks)], ref_adapter)


def policies(trainer: Any) -> list[Any]:
    """The policy's PEFT models: one, or one a pipeline chunk."""
    return trainer.peft_models if isinstance(family, Megatron) else [trainer.model]


@contextlib.contextmanager
def reference(trainer: Any) -> Iterator[list[Any]]:
    """The trainer's own context; the models that it names, which do their pass in it."""
    Args.current = getattr(trainer, "args", None)
    with trainer.null_ref_context() as models:
        if models is None:  # without Megatron
            models = [trainer.model]
        yield models if isinstance(models, list) else [models]  # one model, in Megatron's before 3.9


# -- measuring ---------------------------------------------------------------------------------------------------


def batch(rows: int | None = None) -> torch.Tensor:
    generator = torch.Generator().manual_seed(7)
    return torch.randint(VOCABULARY, (rows or BATCH, SEQUENCE + 1), generator=generator)


def logps(model: Any, rows: int | None = None) -> torch.Tensor:
    """Token log-probabilities [batch, sequence] of one fixed batch."""
    tokens = batch(rows)
    inputs, targets = tokens[:, :-1], tokens[:, 1:]
    return functional.log_softmax(family.logits(model, inputs), dim=-1).gather(-1, targets[..., None]).squeeze(-1)


def reference_logps(trainer: Any) -> torch.Tensor:
    with torch.no_grad(), reference(trainer) as models:
        return logps(models[0])


def in_float64(peft_model: Any, adapter: str | None, rows: int | None = None) -> torch.Tensor:
    """What the reference has to be, from the weights: no adapter layers, no dropout, float64.

    The adapter is merged into the weights, ``W + 2 B A`` (alpha 8 over rank 4).
    """
    plain = family.make_model().double().eval()
    state, merged = peft_model.base_model.model.state_dict(), {}
    for name in plain.state_dict():
        if name.endswith("_extra_state"):
            continue
        stem, _, kind = name.rpartition(".")
        merged[name] = state[name if name in state else f"{stem}.base_layer.{kind}"]
        if adapter and kind == "weight" and f"{stem}.lora_A.{adapter}.weight" in state:
            a, b = (state[f"{stem}.lora_{which}.{adapter}.weight"].double() for which in "AB")
            merged[name] = merged[name].double() + 2 * b @ a
    missing, unexpected = plain.load_state_dict(merged, strict=False)
    assert not unexpected
    assert all(name.endswith("_extra_state") for name in missing), missing
    with torch.no_grad():
        return logps(plain, rows)


def far(one: torch.Tensor, other: torch.Tensor) -> float:
    return (one.double() - other.double()).abs().max().item()


def kl(policy: torch.Tensor, reference: torch.Tensor) -> float:
    """The estimate that GRPO uses, of KL(policy, reference), averaged over tokens."""
    difference = reference - policy
    return (difference.exp() - difference - 1).mean().item()


def flags(models: list[Any]) -> dict[str, list[Any]]:
    """Everything that a reference pass might leave changed."""

    def adapters(module: Any) -> list[str]:
        active = getattr(module, "active_adapter", [])  # one name or several; both mean the same
        return [active] if isinstance(active, str) else active

    modules = [module for model in models for module in model.modules()]
    return {
        "training": [module.training for module in modules],
        "active": [adapters(module) for module in modules],
        "disabled": [getattr(module, "disable_adapters", False) for module in modules],
        "trainable": [parameter.requires_grad for model in models for parameter in model.parameters()],
    }


def left_behind(trainer: Any, act: Callable[[], None]) -> list[str]:
    """Which kinds of flags differ after ``act``, on the policy's models."""
    models = policies(trainer)
    before = flags(models)
    with contextlib.suppress(Interrupted, ValueError):
        act()
    return [kind for kind, value in flags(models).items() if value != before[kind]]


class Interrupted(Exception):
    """What a test raises within the context."""


# -- observations, each on models of its own -------------------------------------------------------------------------


def two_passes() -> dict[str, Any]:
    """A fresh adapter does nothing yet (B is zero): the policy is the reference, and their KL divergence is 0."""
    trainer = lora_trainer()
    first, second = reference_logps(trainer), reference_logps(trainer)
    (model,) = policies(trainer)
    model.eval()
    with torch.no_grad():
        policy = logps(model)
    return {
        "passes differ by": far(first, second),
        "KL of the policy against itself": kl(policy, first),
        "off float64 by": far(first, in_float64(policies(trainer)[0], None)),
    }


def two_passes_of_the_reference_adapter() -> dict[str, Any]:
    trainer = lora_trainer(ref_adapter=True)
    (model,) = policies(trainer)
    first, second = reference_logps(trainer), reference_logps(trainer)
    return {
        "passes differ by": far(first, second),
        "off float64 by": far(first, in_float64(model, "ref_adapter")),
        "off the model without it by": far(first, in_float64(model, None)),
    }


def checkpointed_forwards() -> dict[str, Any]:
    """Calls of megatron-core's `checkpoint` in a reference pass, and in a training step that follows it."""
    from megatron.core import tensor_parallel

    trainer = lora_trainer()
    calls, original = [], tensor_parallel.checkpoint

    def counted(*args: Any) -> Any:
        calls.append(args)
        return original(*args)

    tensor_parallel.checkpoint = counted
    try:
        reference_logps(trainer)
        in_reference = len(calls)
        logps(policies(trainer)[0]).sum().backward()
    finally:
        tensor_parallel.checkpoint = original
    return {"in the reference pass": in_reference, "in the training step": len(calls) - in_reference}


def trained_after_an_exception() -> dict[str, Any]:
    """Which adapters get a gradient in the training step after an exception within the context."""
    trainer = lora_trainer(ref_adapter=True)
    with contextlib.suppress(Interrupted), torch.no_grad(), reference(trainer):
        raise Interrupted
    (model,) = policies(trainer)
    logps(model).sum().backward()
    norms = {"default": 0.0, "ref_adapter": 0.0}
    for name, parameter in model.named_parameters():
        for adapter in norms:
            if f".{adapter}." in name and parameter.grad is not None:
                norms[adapter] += parameter.grad.double().norm().item() ** 2
    return {adapter: norm**0.5 for adapter, norm in norms.items()}


def enter(trainer: Any, *, interrupted: bool = False) -> Callable[[], None]:
    def act() -> None:
        with reference(trainer):
            if interrupted:
                raise Interrupted

    return act


def refuse_eval_mode(module: Any) -> None:
    def setattr_(self: Any, name: str, value: Any) -> None:
        if name == "training" and not value:
            raise Interrupted
        torch.nn.Module.__setattr__(self, name, value)

    module.__class__ = type("Refusing", (type(module),), {"__setattr__": setattr_})


def traces() -> dict[str, list[str]]:
    """What each way through the context leaves behind."""
    found = {}
    for ref_adapter in (False, True):
        kind = "reference adapter" if ref_adapter else "adapter disabled"
        for interrupted in (False, True):
            for chunks in (1, 2) if isinstance(family, Megatron) else (1,):
                trainer = lora_trainer(ref_adapter, chunks)
                # Kept out of training by a user: part of the model, and part of an adapter.
                for model in policies(trainer):
                    next(module for module in model.modules() if isinstance(module, torch.nn.ModuleList))[0].eval()
                    for name, parameter in model.named_parameters():
                        if ".lora_A.default." in name:
                            parameter.requires_grad = False
                how = "an exception" if interrupted else "a pass"
                found[f"{kind}, {chunks} chunks, {how}"] = left_behind(trainer, enter(trainer, interrupted=interrupted))
        trainer = lora_trainer(ref_adapter)
        other = family.trainer(policies(trainer), ref_adapter)

        def nested(trainer: Any = trainer, other: Any = other) -> None:
            with reference(trainer), reference(other), reference(trainer):
                raise Interrupted

        found[f"{kind}, two trainers' contexts nested, an exception"] = left_behind(trainer, nested)
    trainer = lora_trainer()
    refuse_eval_mode(next(module for module in policies(trainer)[0].modules() if isinstance(module, torch.nn.Dropout)))
    found["adapter disabled, a module refuses eval mode"] = left_behind(trainer, enter(trainer))
    if isinstance(family, Megatron):
        # An exception while entering, when the first chunk's adapter is switched already.
        peft_models = [add_lora(family.make_model(), "ref_adapter"), add_lora(family.make_model())]
        trainer = family.trainer(peft_models, ref_adapter=True)
        found["reference adapter, missing in the second chunk"] = left_behind(trainer, enter(trainer))
    return found


def within_nested_contexts() -> dict[str, Any]:
    """In the outer context, after the inner one was left, the pass is still the reference's."""
    trainer = lora_trainer()
    for name, parameter in policies(trainer)[0].named_parameters():
        if ".lora_B." in name:
            torch.nn.init.normal_(parameter, std=0.1)  # a policy that has moved away from its reference
    with torch.no_grad(), reference(trainer) as models:
        with reference(trainer):
            pass
        after_inner = logps(models[0])
    return {"off float64 by": far(after_inner, in_float64(policies(trainer)[0], None))}


def modes_within() -> dict[str, list[int]]:
    """How many modules are in training mode within the context: of the reference models, and of the others.

    Without Megatron, the trainer's own model (PEFT's, around the rest) is one of the others.
    """
    megatron = isinstance(family, Megatron)
    chunks = 2 if megatron else 1
    trainers = {
        "adapter disabled": lora_trainer(chunks=chunks),
        "reference adapter": lora_trainer(ref_adapter=True, chunks=chunks),
    }
    if isinstance(family, Megatron):
        policy, references = [family.make_model() for _ in "12"], [family.make_model().eval() for _ in "12"]
        references[0].decoder.layers[0].train()  # a mistake must not put dropout into the reference
        trainers["full"] = family.make_trainer(Args(lora=False, ref_adapter=False), policy, policy, references)
    found = {}
    for kind, trainer in trainers.items():
        with reference(trainer) as models:
            inside = {id(module) for model in models for module in model.modules()}
            inside -= {id(getattr(trainer, "model", None))}
            everything = [*policies(trainer), *(trainer.ref_models if megatron else [])]
            training = [id(module) for model in everything for module in model.modules() if module.training]
            found[kind] = [sum(m in inside for m in training), sum(m not in inside for m in training)]
    return found


# -- contexts that overlap -------------------------------------------------------------------------------------------


def overlapping() -> dict[str, dict[str, Any]]:
    """Enter A, enter B, leave A, leave B, in one thread and in two; then a step of training."""
    found = {}
    for kinds in itertools.product((False, True), repeat=2):
        for number in (1, 2):
            models = policies(lora_trainer(ref_adapter=True))
            for name, parameter in models[0].named_parameters():
                if ".lora_B.default." in name:
                    torch.nn.init.normal_(parameter, std=0.1)  # a policy that has moved away from its reference
            a, b = (reference(family.trainer(models, kind)) for kind in kinds)
            before = flags(models)
            with contextlib.ExitStack() as stack:
                threads = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(number)]
                first, last = threads[0], threads[-1]
                first.submit(a.__enter__).result()
                (model, *_) = last.submit(b.__enter__).result()
                with torch.no_grad():
                    both = logps(model)
                    first.submit(a.__exit__, None, None, None).result()
                    one = logps(model)
                last.submit(b.__exit__, None, None, None).result()
            wanted = in_float64(models[0], "ref_adapter" if kinds[1] else None)
            observed = {
                "off float64 by": max(far(both, wanted), far(one, wanted)),
                "left behind": [kind for kind, value in flags(models).items() if value != before[kind]],
            }
            loss = logps(models[0]).sum()
            if loss.requires_grad:
                loss.backward()
            observed["gradients"] = sum(parameter.grad is not None for parameter in models[0].parameters())
            names = " then ".join("reference adapter" if kind else "adapter disabled" for kind in kinds)
            found[f"{names}, {number} threads"] = observed
    return found


def an_inner_context_of_another_kind() -> dict[str, float]:
    """The pass in the outer context, once the inner one was left."""
    found = {}
    for outer in (False, True):
        models = policies(lora_trainer(ref_adapter=True))
        with torch.no_grad(), reference(family.trainer(models, outer)) as (model, *_):
            with reference(family.trainer(models, not outer)):
                pass
            after_inner = logps(model)
        wanted = in_float64(models[0], "ref_adapter" if outer else None)
        found["reference adapter" if outer else "adapter disabled"] = far(after_inner, wanted)
    return found


def an_inner_context_that_fails() -> dict[str, Any]:
    """There is no reference adapter; the outer context does without."""
    trainer = lora_trainer()
    models = policies(trainer)
    before, failed = flags(models), False
    with torch.no_grad(), reference(trainer) as (model, *_):
        try:
            with reference(family.trainer(models, True)):
                pass
        except ValueError:
            failed = True
        after_inner = logps(model)
    return {
        "failed": failed,
        "off float64 by": far(after_inner, in_float64(models[0], None)),
        "left behind": [kind for kind, value in flags(models).items() if value != before[kind]],
    }


def two_models() -> list[str]:
    """What is left behind in one model while the context of another is open still."""
    one, other = lora_trainer(), lora_trainer()
    before, context = flags(policies(one)), reference(one)
    context.__enter__()
    with reference(other):
        context.__exit__(None, None, None)
        return [kind for kind, value in flags(policies(one)).items() if value != before[kind]]


def an_abandoned_context() -> dict[str, Any]:
    """One that nobody leaves: what it leaves behind once it is gone, and whether it keeps the model alive."""
    trainer = lora_trainer()
    (model,) = policies(trainer)
    before = flags([model])
    model.context = reference(trainer)
    model.context.__enter__()
    with reference(trainer):
        pass
    del model.context
    left = [kind for kind, value in flags([model]).items() if value != before[kind]]
    model.context = reference(trainer)
    model.context.__enter__()
    alive = weakref.ref(model)
    del trainer, model
    gc.collect()
    return {"left behind": left, "keeps the model": alive() is not None}


def forked_while_another_thread_enters() -> int:
    """The exit status of a child that enters a context of its own."""
    trainer, other = lora_trainer(), lora_trainer()
    reached, go_on = threading.Event(), threading.Event()

    def wait(self: Any, name: str, value: Any) -> None:
        if name == "training" and not reached.is_set():
            reached.set()
            go_on.wait()
        torch.nn.Module.__setattr__(self, name, value)

    dropout = next(module for module in policies(other)[0].modules() if isinstance(module, torch.nn.Dropout))
    dropout.__class__ = type("Waiting", (type(dropout),), {"__setattr__": wait})

    def enter_other() -> None:
        with reference(other):
            reached.set()  # as released, nothing sets the mode

    thread = threading.Thread(target=enter_other)
    thread.start()
    reached.wait()
    child = os.fork()
    if not child:
        signal.alarm(20)
        with reference(trainer):
            os._exit(0)
    go_on.set()
    thread.join()
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


# -- the trainer's own use of it, without Megatron -------------------------------------------------------------------


def rows_at_once() -> dict[str, Any]:
    """GRPO's reference pass by the trainer's own method: batches of 1 in training and of 8 in evaluation, 6 rows."""
    rows = 6
    trainer = lora_trainer()
    (model,) = policies(trainer)
    trainer.__class__ = importlib.import_module(trainer.__module__.replace("dpo_trainer", "grpo_trainer")).GRPOTrainer
    trainer.args = types.SimpleNamespace(per_device_train_batch_size=1, per_device_eval_batch_size=8, report_to=[])
    trainer.template = types.SimpleNamespace(padding_free=False, sequence_parallel_size=1)
    trainer.dynamic_num_samples, trainer.is_multimodal, trainer.temperature = True, False, 1.0
    trainer.model_kwarg_keys = ["logits_to_keep"]
    tokens = batch(rows)
    inputs = {"input_ids": tokens, "attention_mask": torch.ones_like(tokens)}
    method = trainer._get_per_token_logps_and_entropies
    if "grpo_batch" in inspect.signature(method).parameters:  # since 4.5
        from swift.rl_core.data import GRPOBatch

        nothing = torch.zeros(rows, SEQUENCE)
        signals = GRPOBatch(nothing, nothing, torch.full((rows,), SEQUENCE), logits_to_keep=SEQUENCE)
        arguments: tuple[Any, ...] = (inputs, signals)
    else:
        arguments = ({**inputs, "logits_to_keep": SEQUENCE},)
    calls: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: calls.append(len(kwargs["input_ids"])), with_kwargs=True
    )

    def run(*, in_context: bool) -> tuple[torch.Tensor, list[int]]:
        calls.clear()
        with torch.no_grad(), reference(trainer) if in_context else contextlib.nullcontext():
            found = method(model, *arguments)[0]
        return found, list(calls)

    first, in_training = run(in_context=True)
    second, _ = run(in_context=True)
    model.eval()
    policy, _ = run(in_context=False)
    _, in_evaluation = run(in_context=True)
    return {
        "in training": in_training,
        "in evaluation": in_evaluation,
        "passes differ by": far(first, second),
        "KL of the policy against itself": kl(policy, first),
        "off float64 by": far(first, in_float64(model, None, rows)),
    }


REVERTED = (two_passes, trained_after_an_exception, modes_within)
"""What is observed after revert(), too."""
OBSERVATIONS = (
    *REVERTED,
    two_passes_of_the_reference_adapter,
    traces,
    within_nested_contexts,
    overlapping,
)
PATCHED = (
    an_inner_context_of_another_kind,
    an_inner_context_that_fails,
    two_models,
    an_abandoned_context,
    forked_while_another_thread_enters,
)
"""What only the patch promises."""


def prepare(trainer: str) -> None:
    """Import the frameworks for ``megatron``, or for a trainer given as ``module:class``."""
    megatron_on_cpu.install()
    absent_packages.install_for_swift()
    global family
    family = Megatron() if trainer == "megatron" else Transformers(trainer)


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("trainer")
    options = parser.parse_args()
    trainer = options.trainer
    torch.set_num_threads(1)
    prepare(trainer)
    both = [*OBSERVATIONS, checkpointed_forwards if trainer == "megatron" else rows_at_once]

    import rlhf_patches

    def observe(observations: Sequence[Callable[[], Any]]) -> dict[str, Any]:
        return {observation.__name__: observation() for observation in observations}

    found = {"released": observe(both)}
    found["report"] = rlhf_patches.apply().to_flat_dict(prefix="")
    found["patched"] = observe([*both, *PATCHED])
    rlhf_patches.revert()
    found["reverted"] = observe(REVERTED)
    (options.out / "rank0.json").write_text(json.dumps(found, indent=1))
