"""transformers-accumulation-scale: small models in the real Trainer, one process, micro-batches of different lengths.

The yardstick is computed in float64 from a copy's logits: the mean of the micro-batches' means, or, for what is divided
by ``num_items_in_batch``, the sum over the tokens of the window divided by their number. Ranks, releases, and trainers
of others are in the modules beside this one.
"""

from __future__ import annotations

import copy

import pytest
import torch
from torch.nn import functional

from rlhf_patches.testing import untouched
from tests.harness.by_case import exhaustive_but

transformers = pytest.importorskip("transformers")

from rlhf_patches.patches.transformers import _loss_graph  # noqa: E402

PATCH = "transformers-accumulation-scale"
RULE_COVERAGE = {
    "stay bit for bit the same": "test_what_was_right_keeps_its_bits",
    "minimal scope": "test_where_the_step_divides_nothing_is_read",
    "no side effects": "test_the_trainer_and_its_model_are_only_read",
    "backward compatible": (
        "test_what_was_right_keeps_its_bits",
        "test_hooks_unpack_once",
        "test_accumulation_scale_trainers.py::test_what_is_not_known_is_left_and_said",
        "test_accumulation_scale_distributed.py::test_what_is_divided_by_the_items_keeps_every_bit",
    ),
    "known": ("test_what_was_right_keeps_its_bits", "trl/test_users_code.py::test_only_the_bug_is_repaired"),
    "no new blocking": (
        "because it reads the graph of one rank's loss, after upstream's forward; no lock, no collective"
    ),
    "passes on the very tensor": (
        "test_accumulation_scale_trainers.py::test_what_hands_on_is_divided",
        "test_accumulation_scale_trainers.py::test_what_is_not_known_is_left_and_said",
    ),
    "does not change any other loss": "test_accumulation_scale_trainers.py::test_what_is_not_known_is_left_and_said",
    "that a small configuration builds was trained": "because benchmarks/transformers_accumulation.py writes that page",
}
#: float32 against float64.
TOLERANCE = 2e-6

VOCABULARY, CLASSES = 32, 3
SMALL = {"vocab_size": VOCABULARY, "hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
SMALL |= {"num_attention_heads": 2, "num_labels": CLASSES, "pad_token_id": 0}
STILL = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
EXPERTS = {"num_key_value_heads": 2, "num_local_experts": 4, "output_router_logits": True, "router_aux_loss_coef": 0.5}


def t5():
    shape = {"vocab_size": VOCABULARY, "d_model": 16, "d_kv": 8, "d_ff": 16, "num_layers": 1, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(
        transformers.T5Config(**shape, decoder_start_token_id=0, dropout_rate=0.0)
    )


def bert(head):
    return lambda: getattr(transformers, f"BertFor{head}")(transformers.BertConfig(**SMALL, **STILL))


def llama(head, **options):
    return lambda: getattr(transformers, f"LlamaFor{head}")(transformers.LlamaConfig(**SMALL, **options))


def mixtral():
    config = transformers.MixtralConfig(**SMALL, **EXPERTS)
    config._experts_implementation = "eager"  # others have no float64
    return transformers.MixtralForCausalLM(config)


def tokens(row):
    return row["input_ids"]


def with_prompt(row):
    return [-100, -100, *row["input_ids"][2:]]


def one_class(row):
    return row["input_ids"][0] % CLASSES


def numbers(row):
    return [0.1 * token for token in row["input_ids"][:CLASSES]]


def class_of_each(row):
    return [token % CLASSES for token in row["input_ids"]]


def of_tokens(logits, labels):
    return functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum"), (labels != -100).sum()


def shifted(logits, labels):
    return of_tokens(logits[:, :-1], labels[:, 1:])


def of_samples(logits, labels):
    return functional.cross_entropy(logits, labels, reduction="sum"), len(labels)


def squares(logits, labels):
    return (logits - labels).square().sum(), labels.numel()


# By case: the model, a row's labels, and sum and number of what a micro-batch's loss is the mean of.
MEANS = {
    "T5": (t5, with_prompt, of_tokens),
    "BERT, masked LM": (bert("MaskedLM"), with_prompt, of_tokens),
    "BERT, classes": (bert("SequenceClassification"), one_class, of_samples),
    "Llama, regression": (llama("SequenceClassification", problem_type="regression"), numbers, squares),
    "Llama, a class for each token": (llama("TokenClassification", classifier_dropout=0.0), class_of_each, of_tokens),
}
WINDOWS = {"Llama": (llama("CausalLM"), with_prompt, shifted), "Mixtral": (mixtral, with_prompt, shifted)}
CASES = MEANS | WINDOWS
LENGTHS = (7, 5, 6, 5, 7, 3, 6)  # the last window has three micro-batches
STEPS = 4


@pytest.fixture(scope="module")
def rows():
    generator = torch.Generator().manual_seed(0)
    return [{"input_ids": torch.randint(3, VOCABULARY, (n,), generator=generator).tolist()} for n in LENGTHS]


class Kept(transformers.TrainerCallback):
    """The gradient before each step."""

    def __init__(self, model):
        self.model, self.gradients = model, []

    def on_pre_optimizer_step(self, *_args, **_kwargs):
        parameters = self.model.named_parameters()
        self.gradients.append({name: p.grad.clone() for name, p in parameters if p.grad is not None})


def trainer_of(make, labels, rows, tmp_path, *, steps=STEPS, kind=None, compute_loss_func=None, **options):
    torch.manual_seed(1)
    model = make()
    arguments = transformers.TrainingArguments(
        str(tmp_path),
        per_device_train_batch_size=1,
        gradient_accumulation_steps=steps,
        num_train_epochs=1,
        learning_rate=0.0,
        max_grad_norm=0.0,
        logging_steps=1,
        save_strategy="no",
        report_to="none",
        use_cpu=True,
        disable_tqdm=True,
        train_sampling_strategy="sequential",
        **options,
    )
    return (kind or transformers.Trainer)(
        model=model,
        args=arguments,
        train_dataset=[{**row, "labels": labels(row)} for row in rows],
        data_collator=transformers.default_data_collator,
        callbacks=[Kept(model)],
        compute_loss_func=compute_loss_func,
    )


def trained(*arguments, **options):
    """The gradients of each step, and what was logged."""
    trainer = trainer_of(*arguments, **options)
    trainer.train()
    kept = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Kept))
    return kept.gradients, [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


def wanted(case, rows):
    """The same by definition, in float64."""
    make, labels, terms = CASES[case]
    torch.manual_seed(1)
    model = make().double()
    gradients, losses = [], []
    for window in (rows[start : start + STEPS] for start in range(0, len(rows), STEPS)):
        found, parts = [], []
        for row in window:
            inputs = {"input_ids": torch.tensor([row["input_ids"]]), "labels": torch.tensor([labels(row)])}
            outputs = model(**inputs)
            expected = inputs["labels"].double() if terms is squares else inputs["labels"]
            found.append(terms(outputs.logits, expected))
            parts.append(outputs.get("aux_loss"))
        if case in MEANS:
            loss = sum(total / number for total, number in found) / len(window)
        else:
            loss = sum(total for total, _ in found) / sum(number for _, number in found)
        if parts[0] is not None:
            loss = loss + 0.5 * sum(parts) / len(window)
        model.zero_grad()
        loss.backward()
        gradients.append({name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None})
        losses.append(loss.item())
    return gradients, losses


def size(gradient):
    return torch.cat([each.double().flatten() for each in gradient.values()]).norm()


def off_by(found, reference):
    difference = {name: found[name].double() - reference[name] for name in reference}
    return size(difference) / size(reference)


@pytest.mark.parametrize("case", exhaustive_but(MEANS, "T5", "BERT, classes"))
def test_a_mean_is_divided_by_the_micro_batches(apply_patch, rows, tmp_path, case):
    """Of a full window of four micro-batches, and of the last, of three."""
    make, labels, _ = CASES[case]
    reference, losses = wanted(case, rows)
    released, logged = trained(make, labels, rows, tmp_path)
    assert [float(size(a) / size(b)) for a, b in zip(released, reference, strict=True)] == pytest.approx([4, 3])
    assert [a / b for a, b in zip(logged, losses, strict=True)] == pytest.approx([4, 3])
    apply_patch(PATCH)
    found, logged = trained(make, labels, rows, tmp_path)
    assert max(off_by(a, b) for a, b in zip(found, reference, strict=True)) < TOLERANCE
    assert logged == pytest.approx(losses, rel=TOLERANCE)


class Stream(torch.utils.data.IterableDataset):
    def __init__(self, rows):
        self.rows = rows

    def __iter__(self):
        return iter(self.rows)


def test_the_rest_of_a_stream_is_divided_by_its_own_number(apply_patch, rows, tmp_path):
    """It has no step of its own: its gradient is added to that of the next epoch's first window."""
    case = "BERT, classes"
    (whole, rest), _ = wanted(case, rows)
    apply_patch(PATCH)
    trainer = trainer_of(*CASES[case][:2], rows, tmp_path, max_steps=2)
    trainer.train_dataset = Stream(trainer.train_dataset)
    trainer.train()
    kept = next(each for each in trainer.callback_handler.callbacks if isinstance(each, Kept))
    reference = {name: each + whole[name] for name, each in rest.items()}
    assert max(map(off_by, kept.gradients, (whole, reference))) < TOLERANCE


def test_a_mixtures_auxiliary_loss_counts_once(apply_patch, rows, tmp_path):
    make, labels, _ = CASES["Mixtral"]
    reference, losses = wanted("Mixtral", rows)
    released, logged = trained(make, labels, rows, tmp_path)
    assert min(off_by(a, b) for a, b in zip(released, reference, strict=True)) > 0.1
    assert min(a - b for a, b in zip(logged, losses, strict=True)) > 0.9
    apply_patch(PATCH)
    found, logged = trained(make, labels, rows, tmp_path)
    assert max(off_by(a, b) for a, b in zip(found, reference, strict=True)) < TOLERANCE
    assert logged == pytest.approx(losses, rel=TOLERANCE)


def summed(outputs, labels, num_items_in_batch):
    return shifted(outputs.logits, labels)[0] / num_items_in_batch


RIGHT = {
    "Llama": {},
    "label smoothing": {"label_smoothing_factor": 0.1},
    "compute_loss_func": {"compute_loss_func": summed},
    "bfloat16": {"bf16": True},
    "checkpoints": {"gradient_checkpointing": True},
}


@pytest.mark.parametrize("case", exhaustive_but(RIGHT, "Llama", "label smoothing"))
def test_what_was_right_keeps_its_bits(apply_patch, rows, tmp_path, case, caplog):
    """With a window of three micro-batches, which divides nothing without a rounding; and nothing is said."""
    make, labels, _ = CASES["Llama"]
    released = trained(make, labels, rows, tmp_path, **RIGHT[case])
    if case == "Llama":
        assert off_by(released[0][1], wanted(case, rows)[0][1]) < TOLERANCE
    apply_patch(PATCH)
    caplog.clear()
    found = trained(make, labels, rows, tmp_path, **RIGHT[case])
    assert_equal(found, released)
    assert not [record for record in caplog.records if PATCH in record.getMessage()]


def assert_equal(found, released):
    assert found[1] == released[1]
    for one, other in zip(found[0], released[0], strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in one)


@pytest.mark.parametrize(("case", "steps", "options"), [("T5", 1, {}), ("T5", 4, {"declared": True})])
def test_where_the_step_divides_nothing_is_read(apply_patch, rows, tmp_path, monkeypatch, case, steps, options):
    """One micro-batch on one rank, and a trainer that says what its loss is."""
    make, labels, _ = CASES[case]
    kind = type("Declared", (transformers.Trainer,), {"loss_is_scaled_for_ga": options.get("declared")})
    released = trained(make, labels, rows, tmp_path, steps=steps, kind=kind)
    apply_patch(PATCH)
    monkeypatch.setattr(_loss_graph, "read", lambda *_args, **_kwargs: pytest.fail("the graph was read"))
    assert_equal(trained(make, labels, rows, tmp_path, steps=steps, kind=kind), released)


@pytest.mark.parametrize("case", exhaustive_but(["T5", "Llama", "Mixtral"], "T5"))
def test_the_trainer_and_its_model_are_only_read(apply_patch, rows, tmp_path, case):
    make, labels, _ = CASES[case]
    trainer = trainer_of(make, labels, rows, tmp_path)
    trainer.train()
    apply_patch(PATCH)
    batch = {name: torch.tensor([value]) for name, value in trainer.train_dataset[0].items()}
    before = copy.deepcopy(batch)
    trainer.model.requires_grad_(requires_grad=True)
    with untouched(trainer, batch, changes=("*.accelerator*",)):
        trainer.training_step(trainer.model, batch, torch.tensor(9))
    assert all(torch.equal(batch[name], before[name]) for name in before)


def test_after_revert_it_is_as_released(apply_patch, rows, tmp_path):
    from rlhf_patches.testing import in_process

    make, labels, _ = CASES["T5"]
    released = trained(make, labels, rows, tmp_path)
    with in_process.applied(PATCH):
        assert trained(make, labels, rows, tmp_path)[1] != released[1]
    assert_equal(trained(make, labels, rows, tmp_path), released)


class Once:
    """Hooks that offload a tensor, and give it back once."""

    def __init__(self):
        self.kept, self.unpacked = {}, 0

    def pack(self, tensor):
        self.kept[len(self.kept)] = tensor
        return len(self.kept) - 1

    def unpack(self, place):
        self.unpacked += 1
        tensor, self.kept[place] = self.kept[place], None
        assert tensor is not None, "unpacked twice"
        return tensor


@pytest.mark.parametrize("case", exhaustive_but(["T5", "Llama"], "T5"))
def test_hooks_unpack_once(apply_patch, rows, tmp_path, case):
    """Activation offloading gives back a tensor to the backward pass alone, and the gradient is right with it."""
    make, labels, _ = CASES[case]
    hooks = Once()

    apply_patch(PATCH)
    with torch.autograd.graph.saved_tensors_hooks(hooks.pack, hooks.unpack):
        found, _ = trained(make, labels, rows, tmp_path)
    assert hooks.unpacked > 0
    assert off_by(found[0], wanted(case, rows)[0][0]) < TOLERANCE


# -- the reader


def leaf(*shape):
    return torch.ones(shape or (3,), requires_grad=True)


ITEMS = torch.tensor(7)
GIVEN = _loss_graph.Items(ITEMS)
OTHER = torch.tensor(7)
HIDDEN = {"means": {1.0}, "plain": False}


def entropy(reduction):
    return functional.cross_entropy(leaf(2, 3), torch.tensor([0, 2]), reduction=reduction)


@pytest.mark.parametrize(
    ("made", "expected"),
    [
        (lambda: entropy("sum") / ITEMS, {"window": True}),
        (lambda: (entropy("none") / ITEMS).sum() * 2, {"window": True}),
        (lambda: entropy("sum") / ITEMS.detach(), {"window": True}),
        (lambda: entropy("sum"), {"sums": True}),
        (lambda: 0.5 * entropy("mean"), {"means": {0.5}}),
        (lambda: entropy("none").mean() - entropy("mean"), {"means": {1.0, -1.0}, "plain": False}),
        (lambda: entropy("sum") / ITEMS + entropy("mean"), {"window": True, "means": {1.0}}),
        (lambda: entropy("sum") / OTHER, {**HIDDEN, "hidden": {_loss_graph.BY_A_TENSOR}}),
        (lambda: entropy("sum") / ITEMS.float(), {**HIDDEN, "hidden": {_loss_graph.BY_A_TENSOR}}),
        (lambda: entropy("sum") / 7, {"unclear": {"NllLoss"}}),
        (
            lambda: entropy("sum") / torch.tensor(7.0, dtype=torch.bfloat16),
            {**HIDDEN, "hidden": {_loss_graph.BY_A_TENSOR}},
        ),
        (lambda: entropy("mean") * ITEMS, {**HIDDEN, "hidden": {_loss_graph.BY_A_TENSOR}}),
        (lambda: leaf(2, 3).exp().sum(1).mean(), {"means": {1.0}, "plain": False}),
        (lambda: leaf(2, 3).exp().mean(1).sum(), {"sums": True}),
        (lambda: torch.stack([entropy("mean"), entropy("mean")]).sum(), {"means": {1.0}, "plain": False}),
        (lambda: functional.softplus(leaf().sum()), {"unclear": {"Softplus"}}),
        (lambda: leaf().relu().sum(), {"unclear": {"Relu"}, "hidden": {"Relu"}}),
        (lambda: (leaf() * leaf()).sum(), {"unclear": {"Mul of two tensors"}, "hidden": {"Mul of two tensors"}}),
    ],
)
def test_terms_are_read(made, expected):
    """A tensor of the same value is not the number of items, and neither is anything that was computed from it."""
    found = vars(_loss_graph.read(made(), GIVEN))
    assert found == vars(_loss_graph.Reading(**expected))


def test_a_part_is_found_with_its_weight():
    part = leaf().exp().sum()
    loss = 3 * (entropy("sum") / ITEMS - part * 0.5)
    reading = _loss_graph.read(loss, GIVEN, parts=[_loss_graph.origin(part)])
    assert reading.window
    assert reading.parts == {0: -1.5}


def test_a_loss_of_many_terms_is_not_read_to_its_end():
    assert _loss_graph.read(sum(entropy("mean") for _ in range(300)), GIVEN).unclear
