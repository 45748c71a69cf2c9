"""The gradient of eight micro-batches, for transformers' classes: ``python benchmarks/transformers_accumulation.py``.

Every class of transformers' auto mappings whose forward takes labels is built from a tiny configuration (tiny/), and
the real ``transformers.Trainer`` makes a step with eight samples: in eight micro-batches of one (of two, where a batch
norm needs them), and in one. The reference is a plain loop over the same micro-batches in the same order:
``model(**batch)`` without ``num_items_in_batch``, and the mean of the losses, all in float32; their sum where the loss
of a batch is one (CTC, where it is configured so). Every sample has as many labels, so the mean over the micro-batches
is the mean over the step's labels; and the reference has the micro-batches of the step, so what mixes the samples of a
batch (batch norm, the routers' loss) is in both. Dropout is off.

It does so for the installed transformers and for 4.57.6 beside it (``nox`` puts it there), without the patch
transformers-accumulation-scale and with it, in processes that are forked for each family of models: one that crashes or
hangs loses its own line. From the lines it writes docs/transformers-accumulation.md. The steps can be had alone:
``run --out LINES`` measures the release that is imported, ``page LINES...`` writes the page.
"""

from __future__ import annotations

import argparse
import gc
import inspect
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import time
import traceback
import warnings
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tiny.configurations import CLASS_SETTINGS, CLASSES, accepted, tiny
from tiny.samples import Maker, task_of

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "transformers-accumulation.md"
OLDER = Path(sys.executable).parents[1] / "side-by-side" / "transformers-4.57"
PATCH = "transformers-accumulation-scale"
STEPS = 8
LARGEST = 30_000_000  # weights: what is larger is not tiny
# Of the gradient's norm. Eight float32 gradients are added in the same order, and eight is a power of two: what differs
# is at most the rounding of the losses' divisions.
TOLERANCE = 1e-5

# ----------------------------------------------------------------------------------------------------------- the jobs

REGRESSION = {"num_labels": 1, "problem_type": "regression"}
REGRESSION3 = {"num_labels": 3, "problem_type": "regression"}
MULTI = {"num_labels": 3, "problem_type": "multi_label_classification"}
HEADS = ("Bart", "Bert", "DebertaV2", "Electra", "GPT2", "Llama", "Mistral", "ModernBert", "Qwen3", "Roberta", "T5")
# Settings under which a class is trained once more.
VARIANTS: dict[str, dict[str, dict[str, Any]]] = {
    **{
        f"{name}ForSequenceClassification": {
            "regression": {"settings": REGRESSION},
            "regression, 3 labels": {"settings": REGRESSION3},
            "multi-label": {"settings": MULTI},
        }
        for name in HEADS
    },
    "ViTForImageClassification": {
        "regression, 3 labels": {"settings": REGRESSION3},
        "multi-label": {"settings": MULTI},
    },
    **{
        f"{name}ForCTC": {f"reduction {how}": {"settings": {"ctc_loss_reduction": how}} for how in ("mean", "sum")}
        for name in ("Hubert", "Wav2Vec2", "WavLM")
    },
    **{
        name: {"label smoothing": {"smoothing": "shifted"}}
        for name in ("GPT2LMHeadModel", "LlamaForCausalLM", "MambaForCausalLM", "Qwen3ForCausalLM")
    },
    **{
        name: {"label smoothing": {"smoothing": "as they are"}}
        for name in ("BertForMaskedLM", "LlamaForTokenClassification")
    },
    **{
        name: {"label smoothing": {"smoothing": "as they are", "decoder": True}}
        for name in ("BartForConditionalGeneration", "T5ForConditionalGeneration")
    },
}


def families(wanted: list[str] | None) -> list[list[dict[str, Any]]]:
    """The jobs, those of one model_type together, whose modules are imported once."""
    from transformers.models.auto import modeling_auto
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    found: dict[str, tuple[str, list[str]]] = {}
    for name in sorted(vars(modeling_auto)):
        if name.startswith("MODEL_FOR_") and name.endswith("_MAPPING_NAMES"):
            for kind, classes in getattr(modeling_auto, name).items():
                for cls in classes if isinstance(classes, (list, tuple)) else [classes]:
                    found.setdefault(cls, (kind, []))[1].append(name)
    made: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for cls, (kind, mappings) in found.items():
        if wanted and not any(re.fullmatch(pattern, cls) for pattern in wanted):
            continue
        task = task_of(mappings)
        variants: dict[str, dict[str, Any]] = {"": {}, **VARIANTS.get(cls, {})}
        if task in ("causal LM", "seq2seq LM") and "output_router_logits" in accepted(CONFIG_MAPPING[kind]):
            coefficients = accepted(CONFIG_MAPPING[kind]) & {"router_aux_loss_coef", "aux_loss_coef"}
            settings = {"output_router_logits": True, **dict.fromkeys(coefficients, 0.5)}
            variants["router's loss, 0.5"] = {"settings": settings}
        for variant, more in variants.items():
            made[kind].append({"class": cls, "task": task, "variant": variant, **more})
    return list(made.values())


# ---------------------------------------------------------------------------------------------------------- gradients


class Samples(list[Any]):
    """What Trainer reads, and in which order."""

    def __init__(self, rows: list[dict[str, Any]]) -> None:
        super().__init__(rows)
        self.order: list[int] = []

    def __getitem__(self, index: Any) -> Any:
        self.order.append(index)
        return super().__getitem__(index)


def gradient(model: Any) -> Any:
    import torch

    weights = list(model.parameters())
    return torch.cat([(torch.zeros_like(w) if w.grad is None else w.grad.detach()).double().flatten() for w in weights])


def loss_of(model: Any, batch: dict[str, Any], smoothing: str | None) -> Any:
    """The mean over this batch."""
    import torch

    if smoothing is None:
        out = model(**batch)
        return out["loss"] if isinstance(out, dict) else out[0]
    labels = batch["labels"]
    logits = model(**{name: value for name, value in batch.items() if name != "labels"})["logits"]
    if smoothing == "shifted":
        logits, labels = logits[:, :-1], labels[:, 1:]
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), label_smoothing=0.1)


def reference(model: Any, samples: list[dict[str, Any]], size: int, smoothing: str | None) -> Any:
    """The gradient of the mean of the micro-batches' losses."""
    import torch

    model.train()
    model.zero_grad(set_to_none=True)
    for start in range(0, len(samples), size):
        rows = samples[start : start + size]
        batch = {name: torch.stack([row[name] for row in rows]) for name in rows[0]}
        (loss_of(model, batch, smoothing) / (len(samples) // size)).backward()
    return gradient(model)


def trained(
    model: Any, samples: list[dict[str, Any]], size: int, smoothing: str | None, folder: str
) -> tuple[Any, list[int]]:
    """The gradient that Trainer has before its optimizer's step, and the order in which it took the samples."""
    from transformers import Trainer, TrainerCallback, TrainingArguments

    seen: list[Any] = []

    class Reader(TrainerCallback):  # type: ignore[misc]
        def on_pre_optimizer_step(self, *_: Any, **__: Any) -> None:
            seen.append(gradient(model))

    arguments = TrainingArguments(
        output_dir=folder,
        use_cpu=True,
        per_device_train_batch_size=size,
        gradient_accumulation_steps=len(samples) // size,
        max_steps=1,
        learning_rate=0.0,
        optim="sgd",
        max_grad_norm=0.0,
        label_smoothing_factor=0.1 if smoothing else 0.0,
        report_to="none",
        save_strategy="no",
        logging_strategy="no",
        disable_tqdm=True,
        remove_unused_columns=False,
    )
    data = Samples(samples)
    trainer = Trainer(model=model, args=arguments, train_dataset=data, callbacks=[Reader()])
    model.zero_grad(set_to_none=True)
    trainer.train()
    (made,) = seen
    return made, data.order


# ---------------------------------------------------------------------------------------------------------- one class


def build(job: dict[str, Any], cls: Any) -> Any:
    """The model, which has no dropout."""
    import torch

    two = job["task"] in ("question answering", "pretraining", "next sentence")
    given = {"num_labels": 2 if two else CLASSES, **CLASS_SETTINGS.get(cls.__name__, {}), **job.get("settings", {})}
    config = tiny(cls.config_class, **given)
    size = 0
    try:
        with torch.device("meta"):
            size = sum(weight.numel() for weight in cls(config).parameters())
    except Exception:  # some look at their weights while they are made
        pass
    if size > LARGEST:
        raise ValueError("no tiny configuration: too many weights")
    torch.manual_seed(0)
    model = cls(config).float()
    for module in model.modules():
        if isinstance(module, torch.nn.modules.dropout._DropoutNd):
            module.p = 0.0
    return model


def measure(job: dict[str, Any], folder: str, patched: bool) -> dict[str, Any]:
    """The line of a job."""
    import transformers

    cls = getattr(transformers, job["class"])
    names = inspect.signature(cls.forward).parameters
    if "labels" not in names and "start_positions" not in names:
        return {**job, "status": "none", "reason": "its forward takes no labels"}
    if job["task"] is None:
        return {**job, "status": "none", "reason": "its labels are lists, or pairs of images"}
    doing = "built"
    try:
        model = build(job, cls)
        doing = "trained, by the plain loop"
        maker = Maker(cls, model.config, job["task"])
        size, samples = usable(model, maker, job)
        doing = "trained, by Trainer"
        return {**job, "status": "trained", **compared(model, samples, size, job, folder, patched)}
    except Exception as error:
        if os.environ.get("TRACE"):
            traceback.print_exc()
        lines = [line for line in str(error).splitlines() if line.strip()] or [""]
        where = traceback.extract_tb(error.__traceback__)[-1]
        said = f"{type(error).__name__}: {lines[-1].strip()}"
        return {
            **job,
            "status": "failed",
            "reason": f"not {doing}: {said}",
            "where": f"{where.filename}:{where.lineno}",
        }


def usable(model: Any, maker: Maker, job: dict[str, Any]) -> tuple[int, list[dict[str, Any]]]:
    """The size of a micro-batch that the model can be trained with, and the samples of a step."""
    samples = maker.make(STEPS, job.get("decoder", False))
    try:
        reference(model, samples[:1], 1, job.get("smoothing"))
    except ValueError as error:
        if "Expected more than 1 value per channel" not in str(error):  # what a batch norm says
            raise
        return 2, maker.make(2 * STEPS)
    return 1, samples


def compared(
    model: Any, samples: list[dict[str, Any]], size: int, job: dict[str, Any], folder: str, patched: bool
) -> dict[str, Any]:
    """The figures of a job."""
    import torch

    smoothing = job.get("smoothing")
    buffers = {name: value.clone() for name, value in model.named_buffers()}

    def step(size: int) -> tuple[Any, list[int]]:
        for name, value in model.named_buffers():  # the batch norms' means
            if name in buffers:
                value.data.copy_(buffers[name])
        torch.manual_seed(0)
        return trained(model, samples, size, smoothing, folder)

    many, order = step(size)
    once, _ = step(len(samples))
    expected = reference(model, [samples[index] for index in order], size, smoothing)
    if job["task"] == "CTC" and model.config.ctc_loss_reduction == "sum":
        expected *= STEPS
    norm = float(expected.norm())
    if not 0 < norm < float("inf"):
        raise ValueError(f"the gradient's norm is {norm}")
    row = {"size": size, "ratio": float(many.norm()) / norm, "once": float(once.norm()) / norm}
    row["error"] = float((many - expected).norm()) / norm
    if patched:
        import rlhf_patches

        report = rlhf_patches.apply(only=[PATCH])
        if report[PATCH].status.value != "applied":
            raise RuntimeError(f"the patch is not applied: {report[PATCH]}")
        fixed, _ = step(size)
        fixed_once, _ = step(len(samples))
        rlhf_patches.revert()
        row["patched"] = float(fixed.norm()) / norm
        row["patched_error"] = float((fixed - expected).norm()) / norm
        row["same"] = torch.equal(fixed, many)
        row["same_once"] = torch.equal(fixed_once, once)
    return row


# ------------------------------------------------------------------------------------------------------------ the run


def child(jobs: list[dict[str, Any]], write: int, patched: bool) -> None:
    """Run these jobs, and write a line for each; what hangs or dies is the parent's to see."""
    if not os.environ.get("TRACE"):
        quiet = os.open(os.devnull, os.O_WRONLY)
        os.dup2(quiet, 1)
        os.dup2(quiet, 2)
    with tempfile.TemporaryDirectory() as folder:
        for job in jobs:
            gc.freeze()  # Trainer collects garbage at its end: not what is here already
            start = time.perf_counter()
            row = measure(job, folder, patched)
            data = (json.dumps({**row, "seconds": round(time.perf_counter() - start, 2)}) + "\n").encode()
            while data:
                data = data[os.write(write, data) :]


def run(out: str, wanted: list[str] | None, patched: bool, workers: int, limit: float) -> None:
    """Measure the release that is imported; a line per job, in the order in which they end."""
    warnings.simplefilter("ignore")
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    with tempfile.TemporaryDirectory() as folder, open(os.devnull, "w") as null:
        stdout, sys.stdout = sys.stdout, null
        measure({"class": "LlamaForCausalLM", "task": "causal LM"}, folder, patched)  # what every family needs
        sys.stdout = stdout
    gc.collect()
    waiting = sorted(families(wanted), key=len)
    count = sum(map(len, waiting))
    begin, done, running = time.perf_counter(), 0, {}
    with open(out, "w") as lines:

        def keep(row: dict[str, Any]) -> None:
            nonlocal done
            done += 1
            lines.write(json.dumps({"release": transformers.__version__, **row}) + "\n")
            lines.flush()
            if sys.stderr.isatty():
                print(f"\r{transformers.__version__}: {done} of {count}", end="", file=sys.stderr, flush=True)

        while waiting or running:
            while waiting and len(running) < workers:
                jobs = waiting.pop()
                read, write = os.pipe()
                pid = os.fork()
                if not pid:
                    try:
                        child(jobs, write, patched)
                    finally:
                        os._exit(0)
                os.close(write)
                running[read] = Family(pid, jobs)
            for read in select.select(list(running), [], [], 1.0)[0]:
                data = os.read(read, 1 << 20)
                for row in running[read].rows(data):
                    keep(row)
                if not data:
                    running[read].lost = "its process died"
            for read, family in list(running.items()):
                if time.perf_counter() - family.since > limit:
                    os.kill(family.pid, signal.SIGKILL)
                    family.lost = f"no result within {limit:.0f} s"
                if family.lost:
                    os.waitpid(family.pid, 0)
                    os.close(read)
                    del running[read]
                    if family.jobs:
                        keep({**family.jobs[0], "status": "failed", "reason": family.lost})
                    if family.jobs[1:]:
                        waiting.append(family.jobs[1:])
    print(f"\ntransformers {transformers.__version__}: {done} lines in {time.perf_counter() - begin:.0f} s")


class Family:
    """A process, and the jobs of which it has not written the line."""

    def __init__(self, pid: int, jobs: list[dict[str, Any]]) -> None:
        self.pid, self.jobs = pid, jobs
        self.since = time.perf_counter()
        self.lost = ""
        self.rest = b""

    def rows(self, data: bytes) -> Iterator[dict[str, Any]]:
        *lines, self.rest = (self.rest + data).split(b"\n")
        for line in lines:
            self.jobs = self.jobs[1:]
            self.since = time.perf_counter()
            yield json.loads(line)


# ----------------------------------------------------------------------------------------------------------- the page

HEAD = f"""# The gradient of eight micro-batches, class by class

<!-- Generated by `python benchmarks/transformers_accumulation.py`; do not edit. -->

The real `Trainer` trained each class of transformers' auto mappings for one step with {STEPS} micro-batches, without
and with [{PATCH}](patches/{PATCH}.md). Each
class was built from a tiny configuration, if that was possible. Training ran on a CPU in float32.

Each ratio is the norm of the gradient divided by that of the reference. The reference is a plain loop over the same
micro-batches, without `num_items_in_batch`. It averages the losses, or adds them if the loss of a batch is a sum. All
samples have the same number of labels, so the average is also the mean over the step's labels. A ratio is written as
1.000 only if the whole gradient differs from the reference by less than {TOLERANCE:.5f} of its norm. The bits are the
*same* if the gradients with and without the patch are equal bit for bit, both for the step of {STEPS} micro-batches and
for the same samples in one micro-batch.

Other ratios: with the routers' loss, a part of the gradient is {STEPS} times too large. 0.9 is a loss that leaves out a
label that `Trainer` counts. 0.125 is a loss that is a sum, which transformers 4 divides by the steps. The patch is not
for these two. Question answering has no `labels`, so `num_items_in_batch` is not passed. Models with batch norm have
micro-batches of two samples, the others of one. Models of images and text are trained on text, unless their forward
needs an image.
"""


def page(files: list[str]) -> str:
    rows = [json.loads(line) for file in files for line in Path(file).read_text().splitlines()]
    releases: dict[str, list[dict[str, Any]]] = defaultdict(list)
    for row in sorted(rows, key=lambda row: (row["class"].lower(), row["variant"])):
        releases[row["release"]].append(row)
    return "\n".join([HEAD, *summary(releases), *(line for each in releases.items() for line in section(*each))]) + "\n"


def as_released(row: dict[str, Any]) -> str:
    return shown(row["ratio"], row["error"])


def with_patch(row: dict[str, Any]) -> str:
    return shown(row["patched"], row["patched_error"])


def shown(ratio: float, error: float) -> str:
    """A ratio, marked where it is one by its length alone."""
    text = f"{ratio:.3f}"
    return f"{text}, another direction" if text == "1.000" and error > TOLERANCE else text


def bits(row: dict[str, Any]) -> str:
    return (
        "same" if row["same"] and row["same_once"] else "changed" if row["same_once"] else "changed, of one batch too"
    )


def summary(releases: dict[str, list[dict[str, Any]]]) -> Iterator[str]:
    yield "| transformers | classes | lines | as released 1.000 | 8.000 | another | with the patch 1.000 | another |"
    yield "| --- | --- | --- | --- | --- | --- | --- | --- |"
    for release, rows in releases.items():
        made = [row for row in rows if row["status"] == "trained"]
        ratios, fixed = [as_released(row) for row in made], [with_patch(row) for row in made]
        one, eight, right = ratios.count("1.000"), ratios.count("8.000"), fixed.count("1.000")
        yield (
            f"| {release} | {len({row['class'] for row in made})} | {len(made)} | {one} | {eight} | "
            f"{len(made) - one - eight} | {right} | {len(made) - right} |"
        )
    yield ""
    for release, rows in releases.items():
        ones = [row for row in rows if row["status"] == "trained" and as_released(row) == "1.000"]
        same = sum(bits(row) == "same" for row in ones)
        yield f"{release}: of the {len(ones)} lines with 1.000 as released, {same} are the same bits with the patch."
        yield ""


def section(release: str, rows: list[dict[str, Any]]) -> Iterator[str]:
    made = [row for row in rows if row["status"] == "trained"]
    titles = {"8.000": "8.000 as released", "1.000": "1.000 as released", "": "Others as released"}
    for key, title in titles.items():
        lines: dict[tuple[str, ...], list[str]] = defaultdict(list)
        for row in made:
            if (as_released(row) if as_released(row) in titles else "") == key:
                task = row["task"] + (f": {row['variant']}" if row["variant"] else "")
                lines[task, as_released(row), with_patch(row), bits(row)].append(row["class"])
        if lines:
            yield f"## transformers {release}: {title.lower() if not key else title}"
            yield ""
            yield "| task | number | as released | with the patch | bits | classes |"
            yield "| --- | --- | --- | --- | --- | --- |"
            for (task, ratio, fixed, same), names in sorted(lines.items()):
                yield f"| {task} | {len(names)} | {ratio} | {fixed} | {same} | {', '.join(names)} |"
            yield ""
    left: dict[str, list[str]] = defaultdict(list)
    for row in rows:
        if row["status"] != "trained":
            reason = re.sub(r"[<>`]", "", re.sub(r"\d+", "#", row["reason"]).replace("|", "/"))[:140]
            reason = reason.replace("[", "\\[")  # no link
            left[reason].append(row["class"] + (f" ({row['variant']})" if row["variant"] else ""))
    yield f"## transformers {release}: not measured"
    yield ""
    yield "| reason | number | classes |"
    yield "| --- | --- | --- |"
    for reason, names in sorted(left.items(), key=lambda item: (-len(item[1]), item[0])):
        yield f"| {reason} | {len(names)} | {', '.join(names)} |"
    yield ""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("command", nargs="?", choices=("all", "run", "page"), default="all")
    parser.add_argument("lines", nargs="*", help="for page: what run has written")
    parser.add_argument("--out", default="lines.jsonl", help="for run: where the lines go")
    parser.add_argument("--only", nargs="*", help="classes, as regular expressions")
    parser.add_argument("--released", action="store_true", help="without the patch alone")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--limit", type=float, default=60.0, help="seconds for one class")
    options = parser.parse_args()
    if options.command == "run":
        run(options.out, options.only, not options.released, options.workers, options.limit)
    elif options.command == "page":
        PAGE.write_text(page(options.lines))
    else:
        with tempfile.TemporaryDirectory() as folder:
            files = []
            for number, path in enumerate((None, OLDER)):
                files.append(f"{folder}/{number}.jsonl")
                paths = [str(path)] if path else []
                paths += [os.environ["PYTHONPATH"]] if os.environ.get("PYTHONPATH") else []
                command = [sys.executable, __file__, "run", "--out", files[-1], "--workers", str(options.workers)]
                subprocess.run(command, env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)}, check=True)
            PAGE.write_text(page(files))
    if options.command != "run":
        print(f"{PAGE.relative_to(ROOT)} is written")


if __name__ == "__main__":
    main()
