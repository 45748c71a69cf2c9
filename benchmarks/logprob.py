"""Vocab-parallel token log-probabilities: SkyRL's releases, two ways to repair them, Megatron's losses, and ours.

``python benchmarks/logprob.py`` (``make benchmarks`` runs it). Two gloo ranks, one thread each, each with half of the
vocabulary. SkyRL's releases are those beside the environment's own (tests/environments/side-by-side). "streaming" is
0.3.0 with one float32 buffer for the gradient, as SkyRL's pull request 1806 describes it; "unsafe in place" overwrites
the saved logits, whatever else may hold them, as 1543 does. Both are written here, from these descriptions.

With ``--entropy`` log-probabilities and entropies, in one loss: verl's functions as its engine calls them, ms-swift's,
slime's (``SLIME_CLONE`` names a clone), and ours, where "log-prob" is that of their weighted sum.

A step is forward and backward. Extra memory is what the allocator hands out at once beyond the logits, in multiples of
the logits. Implementations take turns in each round; times are medians over the rounds, in multiples of ours.
"""

from __future__ import annotations

import argparse
import importlib.metadata
import importlib.util
import json
import os
import runpy
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
RELEASES = ("0.2.0", "0.3.0")
ENTROPY = 0.25  # the weight of the entropies


def on_each_rank(options: argparse.Namespace) -> None:
    import torch

    from rlhf_patches.patches._vocab_parallel import counters
    from rlhf_patches.patches._vocab_parallel.logprob import token_logprobs
    from tests.harness import upstream_logprob
    from tests.harness.token_reference import counted_all_reduces, made, peak_memory, reference

    torch.set_num_threads(1)
    torch.distributed.init_process_group("gloo")
    rank, group = torch.distributed.get_rank(), torch.distributed.group.WORLD
    functions: dict[str, Callable[..., Any]] = {}
    for version, file in upstream_logprob.find().items():
        if version in RELEASES:
            functions[version] = upstream_logprob.load(file, group).ChunkedDistributedLogprob.apply
    functions |= {"streaming": chunked(in_place=False), "unsafe in place": chunked(in_place=True)}
    functions |= cross_entropies(group)
    functions["ours"] = lambda logits, target, start, end, chunk, group, _: token_logprobs(
        logits, target, start, end, group, chunk_size=chunk
    )
    if options.entropy:
        functions = with_entropies(group)
    dtype, results = getattr(torch, options.dtype), []

    if rank == 0:
        print(
            f"{options.dtype} logits, batch 1, {options.rounds} rounds, torch {torch.__version__}\n"
            "sequence  vocabulary  chunk  implementation    extra memory        all-reduces         time    "
            "largest error\n"
            "          per rank           (logits)          forward  backward   forward  backward           "
            "log-prob  gradient",
            flush=True,
        )
    for sequence, vocabulary, chunk in cases(options):
        torch.manual_seed(0)
        whole = (torch.randn(1, sequence, 2 * vocabulary) * 3).to(dtype)
        values = whole[..., rank * vocabulary : (rank + 1) * vocabulary].contiguous()
        target, weights = torch.randint(0, 2 * vocabulary, (1, sequence)), torch.randn(1, sequence)
        few = min(sequence, 64)  # tokens do not depend on each other: these stand for all
        of_entropy = ENTROPY * weights[:, :few] if options.entropy else None
        exact = reference(whole[:, :few], target[:, :few], weights[:, :few], of_entropy)
        value = exact[0] + ENTROPY * exact[1] if options.entropy else exact[0]
        of_part = exact[2][..., rank * vocabulary : (rank + 1) * vocabulary]
        del whole
        bounds = (rank * vocabulary, (rank + 1) * vocabulary, chunk, group)
        keep = Kept(few)
        times: dict[str, list[float]] = {name: [] for name in functions}
        measured: dict[str, dict[str, Any]] = {name: {} for name in functions}
        for number in range(options.rounds + 1):
            names = list(functions)
            for name in names if number % 2 else reversed(names):
                logits = made(values, keep)
                counters.reset()
                torch.distributed.barrier()
                if number:
                    started = time.perf_counter()
                    log_probs = functions[name](logits, target, *bounds, False)
                    del logits
                    (log_probs * weights).sum().backward()
                    times[name].append(time.perf_counter() - started)
                else:  # a warm-up, slowed down by the measurements
                    with counted_all_reduces() as forward, peak_memory() as of_forward:
                        log_probs = functions[name](logits, target, *bounds, False)
                    del logits
                    loss = (log_probs * weights).sum()
                    with counted_all_reduces() as backward, peak_memory() as of_backward:
                        loss.backward()
                    measured[name] = {
                        "forward": of_forward.bytes / values.nbytes,
                        "backward": of_backward.bytes / values.nbytes,
                        "collectives": (len(forward), len(backward)),
                        "log-prob": (log_probs.detach()[:, :few].double() - value).abs().max().item(),
                        "gradient": (keep.gradient.double() - of_part).abs().max().item(),
                    }
                    if name == "ours":
                        assert counters.observed() == {"backward in place": 1}
        for name in functions:
            row = measured[name]
            row["time"] = statistics.median(a / b for a, b in zip(times[name], times["ours"], strict=True))
            row |= {"sequence": sequence, "vocabulary": vocabulary, "chunk": chunk, "name": name}
            row["seconds"] = statistics.median(times[name])
            results.append(row)
            if rank == 0:
                collectives = "  ".join(f"{number:7d}" for number in row["collectives"])
                print(
                    f"{sequence:8d}  {vocabulary:10d}  {chunk:5d}  {name:16s}  {row['forward']:7.2f}  "
                    f"{row['backward']:8.2f}   {collectives}   {row['time']:6.2f}   {row['log-prob']:.1e}   "
                    f"{row['gradient']:.1e}",
                    flush=True,
                )
    if rank == 0 and options.results:
        Path(options.results).write_text(json.dumps(results))
    torch.distributed.barrier()
    os._exit(0)


class Kept:
    """The gradient of the first tokens: it is checked, and the whole would be memory."""

    gradient: Any = None

    def __init__(self, tokens: int) -> None:
        self.tokens = tokens

    def __call__(self, gradient: Any) -> None:
        self.gradient = gradient[:, : self.tokens].clone()


def cases(options: argparse.Namespace) -> list[tuple[int, int, int]]:
    """Sequence, vocabulary and chunk, each swept with the other two at their first value."""
    sequences, vocabularies, chunks = options.sequences, options.vocabularies, options.chunks
    found = [(sequence, vocabularies[0], chunks[0]) for sequence in sequences]
    found += [(sequences[0], vocabulary, chunks[0]) for vocabulary in vocabularies[1:]]
    return found + [(sequences[0], vocabularies[0], chunk) for chunk in chunks[1:]]


def cross_entropies(group: Any) -> dict[str, Callable[..., Any]]:
    """megatron-core's two, as released. Without a compiler: the fused one is compiled, and faster, on a GPU."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.fusions.fused_cross_entropy import fused_vocab_parallel_cross_entropy
    from megatron.core.tensor_parallel import vocab_parallel_cross_entropy

    torch.compiler.set_stance("force_eager")
    parallel_state.initialize_model_parallel(tensor_model_parallel_size=torch.distributed.get_world_size(group))
    return {
        "megatron-core": lambda logits, target, *_: -vocab_parallel_cross_entropy(logits, target),
        "its fused one": lambda logits, target, *_: -fused_vocab_parallel_cross_entropy(logits, target, group),
    }


def with_entropies(group: Any) -> dict[str, Callable[..., Any]]:
    """Log-probabilities and entropies, each framework's own way, added up."""
    import types

    from verl import __version__
    from verl.utils.megatron import tensor_parallel as verl

    from rlhf_patches.patches._vocab_parallel.logprob import minus_cross_entropy

    def of_verl(logits: Any, target: Any, *_: Any) -> Any:
        copy = logits.clone()
        entropy = verl.vocab_parallel_entropy(logits)
        return verl.vocab_parallel_log_probs_from_logits(copy, target) + ENTROPY * entropy

    spec = importlib.util.find_spec("swift")
    assert spec is not None
    assert spec.origin is not None
    # The file alone: the packages around it want TransformerEngine.
    file = Path(spec.origin).parent / "megatron" / "trainers" / "vocab_parallel_utils.py"
    swift = runpy.run_path(str(file))["compute_logps_and_entropy_from_logits"]

    def of_swift(logits: Any, target: Any, *_: Any) -> Any:
        log_probs, entropy = swift(logits, target, compute_entropy=True)
        return log_probs + ENTROPY * entropy

    found: dict[str, Callable[..., Any]] = {
        f"verl {__version__}": of_verl,
        f"ms-swift {importlib.metadata.version('ms-swift')}": of_swift,
    }
    if clone := os.environ.get("SLIME_CLONE"):
        show = ["git", "-C", clone, "show", "HEAD:slime/utils/ppo_utils.py"]
        slime = types.ModuleType("slime_ppo_utils")
        exec(subprocess.run(show, capture_output=True, text=True, check=True).stdout, slime.__dict__)

        def of_slime(logits: Any, target: Any, *_: Any) -> Any:
            log_probs, entropy = slime.calculate_log_probs_and_entropy(
                logits.squeeze(0), target.squeeze(0), group, with_entropy=True
            )
            return (log_probs.squeeze(-1) + ENTROPY * entropy).unsqueeze(0)

        found["slime main"] = of_slime

    def ours(logits: Any, target: Any, *_: Any) -> Any:
        log_probs, entropy = minus_cross_entropy(logits, target, group, with_entropy=True)
        return log_probs + ENTROPY * entropy.to(logits.dtype)

    return found | {"ours": ours}


def chunked(in_place: bool) -> Callable[..., Any]:
    """Log-probabilities in chunks as SkyRL computes them, with one buffer for the gradient, or with none."""
    import torch

    def normalized(logits: torch.Tensor, group: Any) -> torch.Tensor:
        maximum = logits.amax(-1, keepdim=True)
        torch.distributed.all_reduce(maximum, op=torch.distributed.ReduceOp.MAX, group=group)
        shifted = logits - maximum
        total = shifted.exp().sum(-1, keepdim=True)
        torch.distributed.all_reduce(total, group=group)
        return shifted - total.log()

    class Chunked(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, logits: Any, target: Any, start: int, end: int, chunk: int, group: Any, _: Any) -> Any:
            ctx.chunk, ctx.group = chunk, group
            outside = (target < start) | (target >= end)
            local = (target - start).masked_fill(outside, 0)
            ctx.save_for_backward(logits, local, outside)
            found = []
            for some, index, mask in zip(*(x.split(chunk, 1) for x in (logits, local, outside)), strict=True):
                log_probs = normalized(some.float(), group).gather(-1, index[..., None])[..., 0].masked_fill(mask, 0.0)
                torch.distributed.all_reduce(log_probs, group=group)
                found.append(log_probs)
            return torch.cat(found, dim=1)

        @staticmethod
        def backward(ctx: Any, incoming: Any) -> Any:
            logits, local, outside = ctx.saved_tensors
            result = logits.detach() if in_place else torch.empty_like(logits, dtype=torch.float32)
            everything = (result, logits, local, outside, incoming)
            for out, some, index, mask, weight in zip(*(x.split(ctx.chunk, 1) for x in everything), strict=True):
                gradient = normalized(some.float(), ctx.group).exp_().neg_().mul_(weight[..., None])
                gradient.scatter_add_(-1, index[..., None], weight.masked_fill(mask, 0.0)[..., None])
                out.copy_(gradient)
            return result, *[None] * 6

    return Chunked.apply


def plot(results: list[dict[str, Any]], file: str) -> None:
    """Memory and time against the sequence length."""
    try:
        import matplotlib
    except ImportError:
        sys.exit("--plot needs matplotlib: pip install matplotlib")
    matplotlib.use("svg")
    import matplotlib.pyplot as plt

    first = results[0]
    rows = [row for row in results if all(row[key] == first[key] for key in ("vocabulary", "chunk"))]
    figure, (memory, seconds) = plt.subplots(1, 2, figsize=(10, 3.8))
    for name in dict.fromkeys(row["name"] for row in rows):
        mine = [row for row in rows if row["name"] == name]
        label = f"SkyRL {name}" if name in RELEASES else name
        sequences = [row["sequence"] for row in mine]
        memory.plot(sequences, [row["backward"] for row in mine], "o-", label=label)
        seconds.plot(sequences, [row["seconds"] for row in mine], "o-", label=label)
    memory.set(xlabel="tokens", ylabel="extra memory in backward / logits", xscale="log", ylim=(0, None))
    seconds.set(xlabel="tokens", ylabel="seconds, forward and backward", xscale="log", yscale="log")
    for axes in (memory, seconds):
        axes.set_xticks(sorted({row["sequence"] for row in rows}), minor=False)
        axes.set_xticklabels(sorted({row["sequence"] for row in rows}))
        axes.minorticks_off()
        axes.grid(alpha=0.3)
    memory.legend()
    figure.suptitle(f"{first['vocabulary']} columns per rank, chunks of {first['chunk']}, two ranks, CPU")
    figure.tight_layout()
    plt.rcParams["svg.hashsalt"] = "logprob"  # the same file for the same figures
    figure.savefig(file, metadata={"Date": None})


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--sequences", type=int, nargs="+", default=[1024, 256, 4096])
    parser.add_argument("--vocabularies", type=int, nargs="+", default=[16_384, 4096], help="columns on each rank")
    parser.add_argument("--chunks", type=int, nargs="+", default=[64, 1024])
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--entropy", action="store_true", help="log-probabilities and entropies: frameworks' and ours")
    parser.add_argument("--plot", metavar="FILE.svg", help="memory and time against the sequence length")
    parser.add_argument("--results", help=argparse.SUPPRESS)
    options = parser.parse_args()
    os.environ["KINETO_LOG_LEVEL"] = "5"
    if "RANK" in os.environ:
        on_each_rank(options)
    from torch.distributed.run import main as torchrun

    with tempfile.TemporaryDirectory() as folder:
        results = Path(folder) / "results.json"
        command = ["--standalone", "--nproc-per-node", "2", __file__, *sys.argv[1:], "--results", str(results)]
        torchrun(command)
        if options.plot:
            plot(sorted(json.loads(results.read_text()), key=lambda row: row["sequence"]), options.plot)
            print(f"wrote {options.plot}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
