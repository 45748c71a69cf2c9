"""The log-probabilities of a reference that a second run takes, and those in float64: ``--out FOLDER [CASE...]``.

Each case before apply() of trl-precompute-cache, after it, and after revert(); in a folder of its own, in which a first
run with other settings has been.
"""

from __future__ import annotations

import copy
import itertools
import os
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import trl
from accelerate import PartialState
from datasets import Dataset, load_from_disk

from rlhf_patches.patches.trl.proofs import small
from rlhf_patches.proving import states

NAME = "trl-precompute-cache"
END: dict[str, Any] = {"truncation_mode": "keep_end"}
CASES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "DPO, max_length": ({**END, "max_length": 8}, {**END, "max_length": 12}),
    "DPO, truncation_mode": ({**END, "max_length": 8}, {"max_length": 8}),
    "DPO, ld_alpha": ({"max_length": None}, {"max_length": None, "ld_alpha": 0.3}),
    "DPO, default mode": ({"max_length": 8}, {"max_length": 12}),
    "DPO, equal": ({**END, "max_length": 8, "ld_alpha": 0.3},) * 2,
    "KTO, max_length": ({"max_length": 8}, {"max_length": 12}),
}


def pairs() -> Dataset:
    """Prompts of five words, and answers of four to twelve."""
    drawn = random.Random(0)

    def words(count: int) -> str:
        return " ".join(f"w{drawn.randrange(96)}" for _ in range(count))

    lengths = [(drawn.randint(4, 12), drawn.randint(4, 12)) for _ in range(6)]
    return Dataset.from_list(
        [{"prompt": words(5), "chosen": f" {words(one)}", "rejected": f" {words(other)}"} for one, other in lengths]
    )


def labeled() -> Dataset:
    """The same with one answer, which is wanted or not."""
    rows = list(pairs())
    return Dataset.from_list(
        [{"prompt": row["prompt"], "completion": row["chosen"], "label": bool(at % 2)} for at, row in enumerate(rows)]
    )


def made(kind: str, folder: Path, settings: dict[str, Any], kinds: Any = None, **more: Any) -> Any:
    """A trainer on the data set of a folder, with a reference of other weights than the policy."""
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    owner: Any = trl if hasattr(trl, f"{kind}Trainer") and kind != "KTO" else _kto()
    config = getattr(owner, f"{kind}Config")(
        **{
            **small.STEPS,
            "output_dir": str(folder / "trainer"),
            "per_device_train_batch_size": 2,
            "precompute_ref_log_probs": True,
            **settings,
        }
    )
    return (kinds or getattr(owner, f"{kind}Trainer"))(
        model=small.model(),
        ref_model=reference(),
        args=config,
        train_dataset=load_from_disk(str(folder / "data")),
        processing_class=small.tokenizer(),
        **more,
    )


def _kto() -> Any:
    try:
        from trl.experimental import kto
    except ImportError:
        return trl
    return kto if "experimental" in kto.KTOTrainer.__module__ else trl


def reference() -> Any:
    model = small.model()
    with torch.no_grad():
        model.get_output_embeddings().weight.normal_()
    return model


def log_probability(exact: Any, row: dict[str, Any], answer: str, settings: dict[str, Any]) -> torch.Tensor:
    """Of each token of an answer, in float64, after truncation."""
    ids = row["prompt_ids"] + row[answer]
    kept = range(len(ids))
    if length := settings.get("max_length"):
        kept = kept[-length:] if settings.get("truncation_mode") == "keep_end" else kept[:length]
    tokens = torch.tensor([ids[kept.start : kept.stop]])
    with torch.no_grad():
        logits = exact(input_ids=tokens, use_cache=False).logits[0, :-1]
    found = logits.log_softmax(-1).gather(-1, tokens[0, 1:, None])[:, 0]
    return found[max(len(row["prompt_ids"]) - kept.start - 1, 0) :]


def exact_of(dataset: Any, settings: dict[str, Any]) -> dict[str, list[float]]:
    """By column, the sums of the answers' log-probabilities; of DPO's rest of a longer answer a part."""
    exact = copy.deepcopy(reference()).double().eval()
    found: dict[str, list[float]] = {}
    part = settings.get("ld_alpha")
    for row in dataset:
        answers = [name for name in ("chosen_ids", "rejected_ids", "completion_ids") if name in row]
        tokens = [log_probability(exact, row, name, settings) for name in answers]
        shared = min(map(len, tokens)) if part is not None else None
        for name, each in zip(answers, tokens, strict=True):
            total = each.sum() if shared is None else each[:shared].sum() + part * each[shared:].sum()
            found.setdefault(name, []).append(float(total))
    return found


COLUMNS = {
    "chosen_ids": ("ref_chosen_logps",),
    "rejected_ids": ("ref_rejected_logps",),
    "completion_ids": ("ref_logps", "reference_logps"),
}


_count = itertools.count()


def fresh(kind: str, out: Path) -> Path:
    """A folder with a data set of a new fingerprint, for all ranks."""
    folder = out / f"data-{next(_count)}"
    os.environ.pop("ACCELERATE_USE_DEEPSPEED", None)
    with PartialState(cpu=True).main_process_first():
        if not folder.exists():
            (labeled() if kind == "KTO" else pairs()).save_to_disk(str(folder / "data"))
    return folder


def run(case: str, out: Path, make: Callable[..., Any] = made) -> dict[str, Any]:
    """What the second run takes, after a first one with other settings."""
    kind = case.partition(",")[0]
    first, second = CASES[case]
    folder = fresh(kind, out)
    make(kind, folder, first)
    return taken(make(kind, folder, second).train_dataset, second, folder)


def taken(dataset: Any, second: dict[str, Any], folder: Path) -> dict[str, Any]:
    """How far a run's log-probabilities are from its own settings' in float64, and how many files are there."""
    error, values = 0.0, []
    for name, right in exact_of(dataset, second).items():
        (column,) = (each for each in COLUMNS[name] if each in dataset.column_names)
        found = [float(value) for value in dataset[column]]
        values += found
        error = max(error, *(abs(one - other) for one, other in zip(found, right, strict=True)))
    return {"error": error, "values": values, "files": len(stored(folder))}


def stored(folder: Path) -> list[str]:
    """The files of log-probabilities: by name where they are, by their columns where the names are like others."""
    found = []
    for path in (folder / "data").glob("cache-*"):
        if path.suffix == ".npz" or any("logps" in name for name in Dataset.from_file(str(path)).column_names):
            found.append(path.name)
    return sorted(found)


def main() -> None:
    parser = states.parser()
    parser.add_argument("cases", nargs="*", default=[*CASES])
    options = parser.parse_args()
    states.report_cases(
        NAME, lambda cases: {case: run(case, options.out) for case in cases}, options.cases, options.out
    )


if __name__ == "__main__":
    main()
