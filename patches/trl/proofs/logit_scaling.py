"""SFT's own output head, for models whose forward scales or caps their logits."""

from __future__ import annotations

from collections.abc import Iterator

from rlhf_patches.proving.proof import Case, Proof, Reports, Row

_NAME = "trl-logit-scaling"
_GRANITE = Case("trl", _NAME, "SFT of Granite", "SFTTrainer, chunked_nll, GraniteForCausalLM: loss of the first step")
_CAPPED = Case("trl", _NAME, "SFT of RecurrentGemma", "SFTTrainer, RecurrentGemmaForCausalLM: loss of the first step")


def rows(reports: Reports) -> Iterator[Row]:
    """Granite before 1.15.0, and RecurrentGemma in all releases."""
    (report,) = reports
    for case, model in ((_GRANITE, "Granite"), (_CAPPED, "RecurrentGemma")):
        before, after = (report[state][model] for state in ("before", "after"))
        without, with_it = (f"loss {found['loss']:.3f}" for found in (before, after))
        own = f"{after['own loss']:.3f} in float64"
        is_right = after["gradient"] < 1e-5
        words = (without, with_it, f"the model's own: {own}")
        was_right = before["gradient"] < 1e-5
        yield Row(
            case, report["version"], without, with_it, own, is_right and not was_right, words, was_right and is_right
        )


PROOF = Proof((_GRANITE, _CAPPED), rows, seconds=20, arguments=("Granite", "RecurrentGemma"))
