"""The real MegatronKTOTrainer of ms-swift 3.x on a later pipeline stage, tensor-parallel over two gloo ranks.

``--out DIR [CASE ...]``, with a release of ms-swift on sys.path; ``rank<N>.json`` has what each case gave before
apply() of swift-kto-sequence-parallel and after it, and the first one after revert(). A case is five words (WORDS
below) with commas between: packed,last,sequence,kl,longer.

Real: ``forward_step`` and all that it calls, ms-swift's GPTModel, the loss with TRL's KTO, the backward pass. Ours: the
batch, the tensor that the previous stage would have sent, and what cannot exist here: a LayerNorm that knows sequence
parallelism (Apex or TransformerEngine), attention over packed sequences (TransformerEngine), and `megatron.training`'s
two functions.

The yardstick is megatron-core's own GPTModel in float64, without tensor parallelism, one sequence at a time.
"""

from __future__ import annotations

import argparse
import contextlib
import copy
import datetime
import hashlib
import importlib.metadata
import itertools
import json
import traceback
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from tests.harness import megatron_on_cpu

megatron_on_cpu.install()
from tests.harness import absent_packages

absent_packages.install_for_swift()
import megatron.training
import torch
from megatron.core.timers import Timers

# What ms-swift reads everywhere with `get_args()`: its own, and those of the model.
ARGS = SimpleNamespace(
    train_type="full",
    task_type="causal_lm",
    ref_adapter_load=None,
    ref_adapters=None,
    context_parallel_size=1,
    tensor_model_parallel_size=2,
    loss_type="kto",
    beta=0.1,
    desirable_weight=1.0,
    undesirable_weight=1.3,
    position_embedding_type="rope",
    rope_scaling=None,
    rotary_base=10_000,
    max_position_embeddings=64,
    original_max_position_embeddings=None,
    partial_rotary_factor=None,
    multi_latent_attention=False,
    kv_channels=8,
    mlp_padding_free=False,
    distributed_timeout_minutes=2,
    hidden_size=32,
    num_attention_heads=4,
)
TIMERS = Timers(log_level=0, log_option="max")
ALL_GATHER = torch.distributed.all_gather_into_tensor


def all_gather_into_tensor(output: Any, tensor: Any, **kwargs: Any) -> Any:
    """Unlike NCCL, gloo refuses a tensor without dimensions, which the KL is."""
    return ALL_GATHER(output, tensor.reshape(-1) if tensor.dim() == 0 else tensor, **kwargs)


torch.distributed.all_gather_into_tensor = all_gather_into_tensor
megatron.training.get_args = lambda: ARGS
megatron.training.get_timers = lambda: TIMERS

from megatron.core import parallel_state
from megatron.core.models.gpt import GPTModel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.dot_product_attention import DotProductAttention
from megatron.core.transformer.transformer_block import TransformerBlockSubmodules
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.utils import StragglerDetector
from packaging.version import Version
from swift.megatron.model.gpt_model import GPTModel as SwiftGPTModel
from swift.megatron.trainers.kto_trainer import DummyKTOTrainer, MegatronKTOTrainer
from swift.megatron.trainers.utils import get_packed_seq_params
from torch.nn import functional

import rlhf_patches

NAME = "swift-kto-sequence-parallel"
VOCABULARY, LAYERS = 64, 2
PARTS = ("policy", "reference", "policy KL", "reference KL")  # their order in the tensor between the stages
# Lengths of the two samples of the policy's part and of the KL part. They are padded to an even number, and padding
# is all that the collator promises: 5 tokens on each rank, say.
SIZES = {"longer": ((5, 4), (3, 2)), "shorter": ((3, 2), (11, 6)), "equal": ((5, 4), (4, 5))}
WORDS = {
    "layout": (
        "packed",
        "padded",
        "flash",
    ),  # flash: padded, and attention masks by itself, so that no mask has a shape
    "stage": ("last", "middle"),
    "parallel": ("sequence", "tensor", "none"),  # sequence parallelism; without it; tensor parallel size 1
    "kl": ("kl", "no-kl"),
    "sizes": tuple(SIZES),
}
SWIFT = Version(importlib.metadata.version("ms-swift"))


@dataclass(frozen=True)
class Case:
    """One configuration; as text, its words with commas between them."""

    layout: str
    stage: str
    parallel: str
    kl: str
    sizes: str

    def __str__(self) -> str:
        return ",".join(vars(self).values())

    @property
    def ranks(self) -> int:
        return 1 if self.parallel == "none" else 2

    @property
    def parts(self) -> tuple[str, ...]:
        return PARTS if self.kl == "kl" else PARTS[:2]


def every_case() -> list[Case]:
    """All that the installed release can do: before 3.12 it packs always. Sizes matter to sequence parallelism only."""
    return [
        case
        for case in itertools.starmap(Case, itertools.product(*WORDS.values()))
        if (case.layout == "packed" or Version("3.12") <= SWIFT)
        and (case.parallel == "sequence" or case.sizes == "longer")
    ]


# ---------------------------------------------------------------------------------------------- the models


class LayerNorm(torch.nn.LayerNorm):
    """Tells megatron-core that each rank sees its own part of the sequence, as Apex' and TransformerEngine's do."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5) -> None:
        super().__init__(hidden_size, eps=eps)
        for parameter in self.parameters():
            parameter.sequence_parallel = config.sequence_parallel


class PackedAttention(DotProductAttention):
    """megatron-core's own attention, called for one sequence of the pack after the other."""

    def forward(
        self, query: Any, key: Any, value: Any, mask: Any, *, packed_seq_params: Any = None, **kwargs: Any
    ) -> Any:
        if packed_seq_params is None:
            return super().forward(query, key, value, mask, **kwargs)
        lengths = packed_seq_params.cu_seqlens_q.diff().tolist()
        samples = zip(*(tensor.unsqueeze(1).split(lengths) for tensor in (query, key, value)), strict=True)
        return torch.cat([super(PackedAttention, self).forward(*sample, None, **kwargs) for sample in samples])


def make_model(kind: type, case: Case, seed: int) -> Any:
    """The same weights at any tensor parallel size: megatron-core initializes the whole and keeps a share."""
    config = TransformerConfig(
        num_layers=LAYERS,
        hidden_size=ARGS.hidden_size,
        num_attention_heads=ARGS.num_attention_heads,
        hidden_dropout=0.0,
        attention_dropout=0.0,
        init_method_std=0.3,  # large, so that what the stage computes depends on its input
        use_cpu_initialization=True,
        tensor_model_parallel_size=parallel_state.get_tensor_model_parallel_world_size(),
        sequence_parallel=case.parallel == "sequence" and kind is SwiftGPTModel,
    )
    layer = get_gpt_layer_local_spec()
    layer.submodules = copy.deepcopy(layer.submodules)
    layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = LayerNorm
    layer.submodules.self_attention.submodules.core_attention = PackedAttention
    torch.manual_seed(seed)
    return kind(
        config=config,
        transformer_layer_spec=TransformerBlockSubmodules([layer] * LAYERS, LayerNorm),
        vocab_size=VOCABULARY,
        max_sequence_length=ARGS.max_position_embeddings,
        pre_process=False,
        post_process=case.stage == "last",
        position_embedding_type="rope",
    )


class Wrapper(torch.nn.Module):
    """Stands where data parallelism and mixed precision wrap the model."""

    def __init__(self, module: Any) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)


# ---------------------------------------------------------------------------------------------- the batch


class Half:
    """The completions, or the KL completions: what `get_batch` gives, and the previous stage's hidden states."""

    def __init__(self, case: Case, lengths: tuple[int, int], seed: int) -> None:
        generator = torch.Generator().manual_seed(seed)
        packed = case.layout == "packed"
        whole = sum(lengths) if packed else max(lengths)
        padding = whole % 2
        self.length = whole + padding
        rows = 1 if packed else 2
        self.labels = torch.full((rows, self.length), -100)
        # (row, start, end): a sequence to itself, padding included
        if packed:
            self.sequences = [
                (0, 0, lengths[0]),
                (0, lengths[0], whole),
                *([(0, whole, self.length)] if padding else []),
            ]
        else:
            self.sequences = [(row, 0, self.length) for row in range(2)]
        position_ids = torch.zeros((rows, self.length), dtype=torch.long)
        for row, start, end in self.sequences:
            position_ids[row, start:end] = torch.arange(end - start)
        for (row, start, _), length in zip(self.sequences, lengths, strict=False):  # padding has no length
            # The first token is the prompt.
            self.labels[row, start + 1 : start + length] = torch.randint(VOCABULARY, (length - 1,), generator=generator)
        self.samples = self.sequences[:2]
        shape = (self.length, rows, ARGS.hidden_size)
        self.hidden = {
            model: torch.randn(shape, generator=generator, dtype=torch.float64) for model in ("policy", "reference")
        }
        labels = self.labels if case.stage == "last" else None
        self.data = {"input_ids": None, "position_ids": position_ids, "labels": labels, "attention_mask": None}
        if packed:
            self.data["packed_seq_params"] = get_packed_seq_params(position_ids)
            self.data["packed_seq_params"].num_samples = 2
        elif case.layout == "padded":
            above_diagonal = torch.ones(self.length, self.length, dtype=torch.bool).triu(1)
            self.data["attention_mask"] = above_diagonal.expand(rows, 1, -1, -1)


LABEL = [True, False]  # desirable, undesirable


def make_halves(case: Case) -> dict[str, Half]:
    """With the second seed the KL is above 0 everywhere; `kto_loss` checks it."""
    lengths, kl_lengths = SIZES[case.sizes]
    return {"policy": Half(case, lengths, 1), "KL": Half(case, kl_lengths, 36)}


def half_of(part: str) -> str:
    return "KL" if part.endswith("KL") else "policy"


def gradient_for(case: Case, shape: Any) -> Any:
    """What a next stage would send back for the policy's part."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(3), dtype=torch.float64)


# ---------------------------------------------------------------------------------------------- the yardstick


def expect(case: Case) -> dict[str, Any]:
    """Outputs of the parts, loss, and gradients; needs tensor parallel size 1."""
    halves = make_halves(case)
    models = {name: make_model(GPTModel, case, seed).double() for seed, name in enumerate(("policy", "reference"))}
    source = halves["policy"].hidden["policy"].clone().requires_grad_()
    outputs = {}
    for part in case.parts:
        name, half = part.partition(" ")[0], halves[half_of(part)]
        hidden = source if part == "policy" else half.hidden[name]
        pieces: dict[int, torch.Tensor] = {}
        for row, start, end in half.sequences:
            models[name].set_input_tensor(hidden[start:end, row : row + 1])
            result = models[name](None, torch.arange(end - start)[None], None)
            if case.stage == "last":
                labels = half.labels[row : row + 1, start:end]
                result = functional.cross_entropy(result.transpose(1, 2), labels, reduction="none")
            pieces.setdefault(row, []).append(result)
        along_sequence, along_batch = (1, 0) if case.stage == "last" else (0, 1)
        outputs[part] = torch.cat([torch.cat(row, along_sequence) for row in pieces.values()], along_batch)
    loss = None
    if case.stage == "last":
        loss = kto_loss(case, halves, outputs)
        loss.backward()
    else:
        outputs["policy"].backward(gradient_for(case, outputs["policy"].shape))
    weights = {name: parameter.detach() for name, parameter in models["policy"].named_parameters()}
    gradients = {name: parameter.grad for name, parameter in models["policy"].named_parameters()}
    return {
        "outputs": {part: output.detach() for part, output in outputs.items()},
        "loss": loss,
        "input gradient": source.grad,
        "weights": weights,
        "gradients": gradients,
    }


def kto_loss(case: Case, halves: dict[str, Half], outputs: dict[str, Any]) -> Any:
    """Equation 7 of the KTO paper (arXiv 2402.01306)."""

    def ratios(suffix: str) -> Any:
        samples = halves["KL" if suffix else "policy"].samples
        policy, reference = (
            torch.stack([-outputs[name + suffix][row, start:end].sum() for row, start, end in samples])
            for name in ("policy", "reference")
        )
        return policy - reference

    kl = ratios(" KL").mean().detach().clamp(min=0) if case.kl == "kl" else 0.0
    if case.kl == "kl":
        assert kl > 0, "a KL of 0 would hide a wrong one"
    (chosen, rejected) = ratios("")
    losses = (
        ARGS.desirable_weight * (1 - torch.sigmoid(ARGS.beta * (chosen - kl))),
        ARGS.undesirable_weight * (1 - torch.sigmoid(ARGS.beta * (kl - rejected))),
    )
    return torch.stack(losses).mean()


# ---------------------------------------------------------------------------------------------- the trainer


class Divides(MegatronKTOTrainer):
    """A user's own repair."""

    @staticmethod
    def _get_input_tensor(input_tensor: Any, is_KL: bool, is_ref: bool, length: Any, dim: int) -> Any:
        if dim == 0 and ARGS.sequence_parallel:
            length = length // ARGS.tensor_model_parallel_size
        return MegatronKTOTrainer._get_input_tensor(input_tensor, is_KL, is_ref, length, dim)


def make_trainer(case: Case, halves: dict[str, Half], reference: Any, kind: Any) -> Any:
    """A real one without its `__init__`, which would load a model: with what `forward_step` and the loss read."""
    trainer = object.__new__(kind)
    ARGS.calculate_KL = case.kl == "kl"
    ARGS.padding_free = case.layout == "packed"
    # On one rank too: the patch must do nothing there.
    ARGS.sequence_parallel = case.parallel != "tensor"
    ARGS.tensor_model_parallel_size = case.ranks
    trainer.args = ARGS
    trainer.mcore_013 = True
    trainer.ref_models = [reference]
    trainer.stimer = StragglerDetector()
    trainer.dummy_kto_trainer = DummyKTOTrainer(ARGS)
    kl_data = halves["KL"].data if case.kl == "kl" or Version("3.12") > SWIFT else {}
    batch = [{**halves["policy"].data, "label": LABEL}, dict(kl_data)]
    trainer.get_batch = lambda data_iterator, vp_stage=None: batch
    return trainer


@contextlib.contextmanager
def on_stage(case: Case) -> Any:
    """The second of three stages, for those who ask; else the only one, which is the last."""
    set_size, set_rank = (
        parallel_state.set_pipeline_model_parallel_world_size,
        parallel_state.set_pipeline_model_parallel_rank,
    )
    if case.stage == "middle":
        set_size(3)
        set_rank(1)
    try:
        yield
    finally:
        set_size(None)
        set_rank(None)


def share(case: Case, whole: Any) -> Any:
    """What this rank holds of hidden states."""
    if case.parallel != "sequence":
        return whole
    return whole.chunk(case.ranks)[parallel_state.get_tensor_model_parallel_rank()]


def step(case: Case, expected: dict[str, Any], kind: Any = MegatronKTOTrainer) -> dict[str, Any]:
    """forward_step, the loss and the backward pass; compared with the yardstick."""
    halves = make_halves(case)
    policy, reference = (make_model(SwiftGPTModel, case, seed) for seed in range(2))
    reference.requires_grad_(False).eval()
    report: dict[str, Any] = {"failure": None, "decoder inputs": []}

    def observe(name: str) -> Any:
        return lambda decoder, args: report["decoder inputs"].append([name, list(decoder.input_tensor.shape)])

    policy.decoder.register_forward_pre_hook(observe("policy"))
    reference.decoder.register_forward_pre_hook(observe("reference"))
    sent = [share(case, halves[half_of(part)].hidden[part.partition(" ")[0]]) for part in case.parts]
    report["right inputs"] = [list(part.shape) for part in sent]
    received = torch.cat(sent).float().requires_grad_()
    policy.set_input_tensor(received)
    trainer = make_trainer(case, halves, reference, kind)
    try:
        with on_stage(case):
            output, loss_func = trainer.forward_step(iter(()), Wrapper(Wrapper(policy)))
        report["output"] = list(output.shape)
        loss = loss_func(output)[0] if case.stage == "last" else None
        if loss is not None:
            loss.backward()
        else:
            gradient = share(case, gradient_for(case, expected["outputs"]["policy"].shape)).float()
            output.backward(functional.pad(gradient, (0, 0, 0, 0, 0, len(output) - len(gradient))))
    except Exception as error:
        frames = [frame for frame in traceback.extract_tb(error.__traceback__) if "/megatron/" in frame.filename]
        report["failure"] = f"{type(error).__name__}: {error}"
        report["log"] = traceback.format_exc()
        report["failed in"] = f"{Path(frames[-1].filename).name}:{frames[-1].name}"
        return report
    gradients = {name: gradient_of(case, parameter) for name, parameter in policy.named_parameters()}
    everything = [output, received.grad, *gradients.values(), *([] if loss is None else [loss])]
    report["digest"] = hashlib.sha256(b"".join(t.detach().numpy().tobytes() for t in everything)).hexdigest()
    report["errors"] = errors(case, halves, expected, output, loss, received.grad, gradients, policy)
    return report


def gradient_of(case: Case, parameter: Any) -> Any:
    """Summed over the ranks where each has seen its part of the sequence only, as megatron-core does after a step."""
    gradient = parameter.grad
    if case.parallel == "sequence" and getattr(parameter, "sequence_parallel", False):
        torch.distributed.all_reduce(gradient, group=parallel_state.get_tensor_model_parallel_group())
    return gradient


def errors(
    case: Case,
    halves: dict[str, Half],
    expected: dict[str, Any],
    output: Any,
    loss: Any,
    input_gradient: Any,
    gradients: dict[str, Any],
    policy: Any,
) -> dict[str, float | str]:
    """How far each is from the yardstick, in units of the yardstick's largest value; a word where shapes differ."""

    def error(found: Any, wanted: Any) -> float | str:
        if found.shape != wanted.shape:
            return f"{list(found.shape)} instead of {list(wanted.shape)}"
        return float((found.detach() - wanted).abs().max() / wanted.abs().max())

    def parameter_share(parameter: Any, whole: Any) -> Any:
        if not getattr(parameter, "tensor_model_parallel", False):
            return whole
        return whole.chunk(case.ranks, parameter.partition_dim)[parallel_state.get_tensor_model_parallel_rank()]

    last = case.stage == "last"
    wanted_parts = [
        expected["outputs"][part] if last else share(case, expected["outputs"][part]) for part in case.parts
    ]
    dim = 1 if last else 0
    found: dict[str, float | str] = {}
    if output.shape[dim] != sum(part.shape[dim] for part in wanted_parts):
        found["outputs"] = error(output, torch.cat(wanted_parts, dim))
    else:
        pieces = output.split([part.shape[dim] for part in wanted_parts], dim)
        for part, piece, wanted in zip(case.parts, pieces, wanted_parts, strict=True):
            # megatron-core gives some number where the label is none, and the loss ignores it.
            piece = piece.masked_fill(halves[half_of(part)].labels == -100, 0) if last else piece
            found[f"output of {part}"] = error(piece, wanted)
    if loss is not None:
        found["loss"] = error(loss, expected["loss"])
    wanted = torch.zeros_like(input_gradient, dtype=torch.float64)
    own = share(case, expected["input gradient"])
    wanted[: len(own)] = own
    found["gradient of the input"] = error(input_gradient, wanted)
    # Each tensor in units of the largest gradient: those that should be 0 have no scale of their own.
    scale = max(gradient.abs().max() for gradient in expected["gradients"].values())
    found["gradients of the policy"] = 0.0
    for name, parameter in policy.named_parameters():
        assert torch.equal(parameter, parameter_share(parameter, expected["weights"][name]).float()), name
        wanted = parameter_share(parameter, expected["gradients"][name])
        found["gradients of the policy"] = max(
            found["gradients of the policy"], float((gradients[name] - wanted).abs().max() / scale)
        )
    return found


# ---------------------------------------------------------------------------------------------- running


@contextlib.contextmanager
def tensor_parallel(ranks: int) -> Any:
    parallel_state.initialize_model_parallel(ranks)
    model_parallel_cuda_manual_seed(1)
    yield
    parallel_state.destroy_model_parallel()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("cases", nargs="*", help="all, if none is named")
    options = parser.parse_args()
    cases = [Case(*text.split(",")) for text in options.cases] or every_case()
    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo", timeout=datetime.timedelta(minutes=2))
    rank = torch.distributed.get_rank()
    with tensor_parallel(1):
        expected = {case: expect(case) for case in cases}

    def run(kind: Any = MegatronKTOTrainer, cases: list[Case] = cases) -> dict[str, Any]:
        results = {}
        for ranks in {case.ranks for case in cases}:
            with tensor_parallel(ranks):
                results.update({str(case): step(case, expected[case], kind) for case in cases if case.ranks == ranks})
        return results

    repaired = [case for case in cases if case.parallel == "sequence"]

    function = MegatronKTOTrainer.forward_step
    code = function.__code__
    report: dict[str, Any] = {
        "versions": {name: importlib.metadata.version(name) for name in ("ms-swift", "megatron-core", "trl", "torch")},
        "before": run(),
        "own repair before": run(Divides, repaired),
    }
    report["status"] = rlhf_patches.apply(only=[NAME])[NAME].status.value
    report["after"] = run()
    report["own repair"] = run(Divides, repaired)
    rlhf_patches.revert(only=[NAME])
    report["reverted"] = run(cases=cases[:1])
    report["own code again"] = MegatronKTOTrainer.forward_step is function and function.__code__ is code
    options.out.mkdir(parents=True, exist_ok=True)
    (options.out / f"rank{rank}.json").write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
