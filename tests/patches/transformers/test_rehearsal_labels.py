"""What a rehearsal reads of a micro-batch's tokens, and the reference loss: without a model."""

from __future__ import annotations

import pytest
import torch

from rlhf_patches.rehearsal import formula, labels, pieces, ranks
from rlhf_patches.rehearsal.relation import Verdict

END, START, SPACE = 9, 8, 7


class Tokenizer:
    eos_token_id, bos_token_id = END, START

    @staticmethod
    def decode(numbers):
        return " ".join("\n" if number == SPACE else f"w{number}" for number in numbers)


def read(**inputs):
    return labels.read({name: torch.tensor(value) for name, value in inputs.items()}, Tokenizer())


@pytest.mark.parametrize(
    ("answer", "twice", "verdict"),
    [
        ([3, 4, END], 0, "holds"),
        ([3, END, END], 1, "deviates"),
        ([END, SPACE, END], 1, "deviates"),  # "<|im_end|>\n<|im_end|>"
        ([END, 4, END], 0, "holds"),  # two turns
        ([3, 4, 5], 0, "holds"),
    ],
)
def test_answers_that_end_twice(answer, twice, verdict):
    found = read(input_ids=[[1, 2, *answer]], completion_mask=[[0, 0, 1, 1, 1]])
    assert (found.end_twice, found.relation().verdict.value) == (twice, verdict)


def test_one_of_two_answers_that_end_twice_is_a_note():
    found = read(input_ids=[[1, END, END], [1, 2, END]], labels=[[-100, END, END], [-100, 2, END]])
    assert (found.end_once, found.end_twice, found.relation().verdict.value) == (2, 1, "note")


def test_padding_with_a_label_and_two_start_tokens_are_notes():
    found = read(
        input_ids=[[START, START, 3, END, END]],
        labels=[[-100, -100, 3, END, END]],
        attention_mask=[[1, 1, 1, 1, 0]],
    )
    assert (found.padding_trained, found.begin_twice, found.end_twice, found.labels) == (1, 1, 0, 2)
    relation = found.relation()
    assert relation.verdict.value == "note"
    assert relation.text == (
        "1 padding token; 1 of 1 end tokens have a label; 1 padding token has a label; "
        "1 of 1 rows begin with the start token twice"
    )


def test_a_prompts_turns_need_no_label():
    """The end token of a user's turn is none of an answer."""
    found = read(input_ids=[[1, END, 3, END]], labels=[[-100, -100, 3, END]])
    assert (found.ends, found.ends_trained) == (1, 1)
    assert read(input_ids=[[1, END, 3, END]], labels=[[-100, -100, 3, -100]]).relation().verdict.value == "note"


def test_preferences_of_trl_before_0_29():
    found = read(
        prompt_input_ids=[[0, 1], [1, 2]],
        prompt_attention_mask=[[0, 1], [1, 1]],
        chosen_input_ids=[[3, END], [4, END]],
        chosen_attention_mask=[[1, 1], [1, 1]],
        rejected_input_ids=[[3, 4, END], [5, END, 0]],
        rejected_attention_mask=[[1, 1, 1], [1, 1, 0]],
    )
    assert (found.rows, found.labels, found.ends_trained, found.without_labels) == (4, 9, 4, 0)
    assert found.pieces == (("w0", "padding"), ("w1", "read"), (f"w3 w{END}", "label"), ("w0", "padding"))


def test_a_tools_tokens_are_not_trained_on():
    found = read(
        prompt_ids=[[1]],
        prompt_mask=[[1]],
        completion_ids=[[3, 4, END]],
        completion_mask=[[1, 1, 1]],
        tool_mask=[[1, 0, 1]],
    )
    assert found.labels == 2
    assert found.pieces == (("w1", "read"), ("w3", "label"), ("w4", "read"), (f"w{END}", "label"))


def test_what_says_nothing_of_what_is_trained():
    assert read(input_ids=[[1, 2]]) is None
    assert labels.read([1], Tokenizer()) is None


# -- shares of generations


def of(tokens, size, totals):
    return ranks.Mine(own=torch.zeros(len(tokens), 1), generations=ranks.Generations(size, tuple(tokens), totals))


@pytest.mark.parametrize(
    ("of_ranks", "shares"),
    [
        ([of([1.0, 3.0], 2, (4.0, 4.0))], [0.25, 0.75]),
        ([of([1.0, 3.0], 2, (99.0, 99.0))], [0.25, 0.75]),  # the run's number is not what is right
        ([of([1.0, 3.0, 2.0, 2.0], 2, (4.0,) * 4)], [0.125, 0.375, 0.25, 0.25]),
        ([of([1.0, 3.0], 4, (8.0, 8.0))], [0.25, 0.75]),  # half of a generation: its number is the run's
        ([of([1.0], 1, (4.0,)), of([3.0], 1, (4.0,))], [0.25, 0.75]),
        ([of([0.0], 1, (4.0,)), of([4.0], 1, (4.0,))], [0.0, 1.0]),  # all of one rank's are cut off
    ],
)
def test_shares_of_generations(of_ranks, shares):
    assert ranks.laws(of_ranks) == {"the mean over the generation's tokens": pytest.approx(shares)}


# -- the formula


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_the_cross_entropy_is_torchs(smoothing):
    """float64 on both sides: rounding alone."""
    generator = torch.Generator().manual_seed(1)
    logits = torch.randn(2, 5, 11, generator=generator, dtype=torch.float64)
    wanted = torch.randint(0, 11, (2, 5), generator=generator)
    wanted[0, 2] = -100
    expected = torch.nn.functional.cross_entropy(
        logits[:, :-1].flatten(0, 1), wanted[:, 1:].flatten(), label_smoothing=smoothing
    )
    assert formula.cross_entropy(logits, wanted, smoothing) == pytest.approx(float(expected), rel=1e-12)


def test_a_loss_of_labels_that_are_shifted_twice_deviates():
    generator = torch.Generator().manual_seed(1)
    logits, wanted = torch.randn(1, 6, 11, generator=generator), torch.randint(0, 11, (1, 6), generator=generator)
    twice = formula.cross_entropy(logits[:, :-1], wanted[:, 1:])
    right = formula.cross_entropy(logits, wanted)
    assert formula.judge(right, right, 1e-7).verdict.value == "holds"
    assert formula.judge(twice, right, 1e-7).verdict.value == "deviates"


@pytest.mark.parametrize(("name", "units"), [(pieces.ROWS, "rows"), (pieces.DOCUMENTS, "documents")])
def test_a_mean_names_what_a_micro_batch_was_split_into(name, units):
    own = torch.eye(2)
    judged = pieces.judge(name, ranks.Mine(used=own.mean(0), own=own), noise=1e-7)
    assert judged.verdict is Verdict.HOLDS
    assert judged.text == f"the mean over {units} (noise 1e-07)"
