"""TRL's SFT trainer, with a model for each way that packing and the last layer can go wrong."""

from __future__ import annotations

from typing import Any

from hunt import formulas, hf_trainer, trl_trainer
from hunt.outcomes import Outcome
from hunt.trainers import trainer

FAMILIES = {
    "sft": "Llama",
    "sft-mixtral": "Mixtral",  # an auxiliary loss
    "sft-gpt_oss": "GptOss",  # attention with sinks
    "sft-recurrent_gemma": "RecurrentGemma",  # bounded logits
    "sft-modernbert_decoder": "ModernBertDecoder",  # a head of several layers
    "sft-mamba": "Mamba",  # a state in place of attention
    "sft-qwen3_5": "Qwen3_5",  # linear attention beside full attention
    "sft-gpt2": "GPT2",  # absolute positions
    "sft-granite": "Granite",  # scaled logits
}
RECURRENT = {  # linear attention, Mamba-2, Mamba, short convolutions
    f"sft-{family.lower()}": family
    for family in ("Qwen3Next", "OlmoHybrid", "Bamba", "FalconH1", "NemotronH", "Jamba", "Lfm2")
}
FAMILIES |= RECURRENT


@trainer("trl/sft", takes=trl_trainer.COMMON | {"others", "padding"})
@trainer(*(f"trl/{name}" for name in FAMILIES if name != "sft" and name not in RECURRENT), takes=trl_trainer.STEPS)
@trainer(*(f"trl/{name}" for name in RECURRENT))
def sft(
    *,
    name: str,
    by: str = "trainer",
    packing: bool = False,
    padding_free: bool = False,
    chunked: bool = False,
    **settings: Any,
) -> Outcome:
    made = hf_trainer.rows(rows=settings.get("rows", 8), others=settings.get("others", 0))
    if by == "formula":
        model = trl_trainer.model(FAMILIES[name], dtype="float64")
        scores = [formulas.logprobs(model, row["input_ids"][:1], row["input_ids"][1:]) for row in made]
        return formulas.outcome(model, -sum(each.sum() for each in scores) / sum(map(len, scores)))
    rows = [
        {"input_ids": row["input_ids"], "completion_mask": [int(row["counts"])] * len(row["input_ids"])} for row in made
    ]
    options = {
        "max_length": 64 if packing else None,  # which padding-free batches are not cut to
        "completion_only_loss": True,
        "packing": packing,
        "padding_free": padding_free,
        "pad_to_multiple_of": 16 if settings.get("padding") else None,
        "loss_type": "chunked_nll" if chunked else "nll",
    }
    return trl_trainer.run(
        "SFT", rows, lambda **chosen: trl_trainer.model(FAMILIES[name], **chosen), settings, options=options
    )
