"""What the watches of all frameworks say of right runs, of several in one process, and of wrong ones.

TRL's are trained: tests/patches/trl/test_watch_right_runs.py. Here each watch is given what its framework has, computed
from the log-probabilities of a policy and of its engine.
"""

from __future__ import annotations

import gc
import importlib
import weakref
from types import SimpleNamespace

import pytest

torch = pytest.importorskip("torch")

from rlhf_patches.patches._rollouts import dropout  # noqa: E402
from tests.harness.two_policies import Trained, of  # noqa: E402

PLAIN = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


class Object(SimpleNamespace):
    """That can be told from others, and referred to weakly, as trainers can."""

    __hash__ = object.__hash__


class Settings(dict):
    """As verl's are: by name, and as attributes."""

    __getattr__ = dict.__getitem__


class Batch:
    """Of rollouts: what trainer and engine say, and which tokens were sampled."""

    def __init__(self, trained, engine, lengths):
        self.tokens, _ = trained.sample(len(lengths), max(lengths))
        self.trainer, self.engine = of(trained.weights, self.tokens), of(engine, self.tokens)
        self.mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]

    def mean(self, values):
        return values[self.mask].mean().item()

    @property
    def kl(self):
        return self.mean(self.engine - self.trainer)

    @property
    def of_sequences(self):
        """The mean over sequences of the magnitude of each one's mean."""
        difference = ((self.trainer - self.engine) * self.mask).sum(1) / self.mask.sum(1)
        return difference.abs().mean().item()


def batches(kind, steps):
    """Of a run whose engine rounds, or has lost what it was sent, or has short completions of a rare prompt."""
    trained, made = Trained(), []
    for step in range(steps):
        engine, lengths = trained.weights.bfloat16().float(), [20] * 16
        if kind.startswith("coarse"):
            size = float(kind.split()[1])
            engine = (trained.weights / size).round() * size
        elif kind == "lost":
            engine = Trained().weights
            trained.update(1.0)
        elif kind == "short" and step >= 10:
            lengths = [200] + [1] * 15
        made.append(Batch(trained, engine, lengths))
        if kind == "short" and step >= 10:  # of the first token the two are 0.1 apart, whichever it is
            made[-1].engine[:, 0] = made[-1].trainer[:, 0] - 0.1
    return made


def verl():
    rollout = Settings(**PLAIN, do_sample=True)
    return Object(config=Settings(actor_rollout_ref=Settings(rollout=rollout)))


def log_verl(watched, trainer, batch, step):
    data = {
        "training/rollout_probs_diff_mean": batch.mean((batch.trainer.exp() - batch.engine.exp()).abs()),
        "rollout_corr/kl": batch.kl,
        "rollout_corr/log_ppl_abs_diff": batch.of_sequences,
    }
    watched.around_fit(lambda: watched.around_log(lambda *_: None, None, (data, step, None), {}), trainer, (), {})


def swift():
    return Object(
        **{"async_generate": False, "multi_turn_scheduler": None, "enable_server_multi_turn": False},
        accelerator=SimpleNamespace(is_main_process=True),
        state=SimpleNamespace(global_step=1),
        request_config=SimpleNamespace(**PLAIN),
        model=torch.nn.Linear(1, 1),
    )


def log_swift(watched, trainer, batch, step):
    trainer.state.global_step = step
    logs = {"rollout_correction/kl": batch.kl, "rollout_correction/log_ppl_abs_diff": batch.of_sequences}
    watched.around_log(lambda *_: None, trainer, (logs, None), {})


def openrlhf():
    settings = {"async_train": False, "vllm_generate_batch_size": None, "rollout_batch_size": 16, "top_p": 1.0}
    return Object(strategy=SimpleNamespace(args=SimpleNamespace(**settings)))


def log_openrlhf(watched, maker, batch, step):
    made = SimpleNamespace(action_log_probs=batch.trainer, rollout_log_probs=batch.engine, action_mask=batch.mask)
    watched.around_make_experience(lambda *_: [made], maker, ([],), {})


class Loop:
    """SkyRL's own."""

    def __init__(self):
        self.cfg = SimpleNamespace(generator=SimpleNamespace(sampling_params=SimpleNamespace(**PLAIN)))
        self.all_metrics, self.global_step = {}, 0

    def train(self): ...


Loop.__module__ = "skyrl.train.trainer"


def log_skyrl(watched, trainer, batch, step):
    trainer.all_metrics, trainer.global_step = {}, step
    metrics = {"policy/rollout_train_logprobs_abs_diff_mean": batch.mean((batch.trainer - batch.engine).abs())}
    watched.around_forward(lambda *_: trainer.all_metrics.update(metrics), trainer, ({"loss_mask": batch.mask},), {})


def log_nemo_rl(watched, logger, batch, step):
    def shifted(values):
        return torch.cat([torch.zeros(len(values), 1), values.float()], 1)

    named = {"prev_logprobs": batch.trainer, "generation_logprobs": batch.engine, "token_mask": batch.mask}
    data = {name: shifted(values) for name, values in named.items()} | {"sample_mask": torch.ones(len(batch.mask))}
    watched.around_masking(lambda *_: None, None, (data,), {})
    watched.around_log_metrics(lambda *_: None, logger, ({"max_seq_mult_prob_error": 1.0}, step, "train"), {})


FRAMEWORKS = {
    "verl": (verl, log_verl, "coarse 1.0"),
    "swift": (swift, log_swift, "coarse 1.0"),
    "openrlhf": (openrlhf, log_openrlhf, "coarse 0.25"),
    "skyrl": (Loop, log_skyrl, "coarse 0.25"),
    "nemo_rl": (Object, log_nemo_rl, "coarse 0.25"),
}


@pytest.fixture
def watched_of(caplog):
    """A framework's watch, which has seen nothing yet, and the lines that are said."""

    def started(framework, module="_watched_rollouts"):
        watched = importlib.import_module(f"rlhf_patches.patches.{framework}.{module}")
        for figure in watched.FIGURES:
            figure.start_anew()
        return watched, lambda: [each.getMessage() for each in caplog.records if each.levelname == "WARNING"]

    return started


def run(watched, framework, kind, steps=12):
    make, log, _ = FRAMEWORKS[framework]
    trainer = make()
    for step, batch in enumerate(batches(kind, steps)):
        log(watched, trainer, batch, step)
    assert watched.observed()["log-probabilities"]["worst"] > 0, "it is looked at"
    return weakref.ref(trainer)


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_nothing_is_said_of_engines_that_round(watched_of, framework):
    """Nor of a second trainer in the process whose engine rounds more than was usual in the first; none is kept."""
    watched, said = watched_of(framework)
    trainers = [run(watched, framework, kind) for kind in ("rounded", FRAMEWORKS[framework][2], "rounded")]
    worst = watched.observed()["log-probabilities"]["worst"]
    assert 0.03 < worst < 0.1, "unusual in the first"
    assert said() == []
    gc.collect()
    assert [each() for each in trainers] == [None] * 3


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_weights_that_are_lost_are_said_once_of_each_trainer(watched_of, framework):
    watched, said = watched_of(framework)
    for times in (1, 2):
        run(watched, framework, "lost")
        assert len(said()) == times
    assert all("trainer and engine differ by" in line for line in said())


@pytest.mark.parametrize("framework", FRAMEWORKS)
def test_short_completions_count_by_their_tokens(watched_of, framework):
    """Whose mean over sequences is ten times and more that over tokens, which is the figure."""
    made = batches("short", 12)[-1]
    by_tokens = made.mean((made.trainer - made.engine).abs())
    assert made.of_sequences > 10 * by_tokens > 0
    watched, said = watched_of(framework)
    run(watched, framework, "short")
    assert said() == []
    assert watched.observed()["log-probabilities"]["worst"] <= by_tokens * (1 + 1e-5)


class Adapted(torch.nn.Module):
    """A layer with LoRA, as PEFT has it."""

    def __init__(self, p):
        super().__init__()
        self.lora_dropout = torch.nn.ModuleDict({"default": torch.nn.Dropout(p)})


class Functional(torch.nn.Module):
    """As transformers' attention has it."""

    attention_dropout = 0.1

    def __init__(self, p):
        super().__init__()
        self.attention_dropout = p


@pytest.mark.parametrize(
    ("layers", "usual"),
    [
        ([torch.nn.Dropout(0.1)], True),
        ([Functional(0.1)], True),
        ([Adapted(0.1)], False),
        ([Adapted(0.1), torch.nn.Dropout(0.1)], True),
        ([Adapted(0.1), torch.nn.Dropout(0.0), Functional(0.0)], False),
        ([torch.nn.Dropout(0.0), Functional(0.0), Adapted(0.0)], None),
        ([torch.nn.Dropout(0.1).eval(), Functional(0.1).eval()], None),
        ([torch.nn.Linear(1, 1)], None),
    ],
)
def test_dropout_that_is_active(layers, usual):
    """Of the model itself, or of adapters alone."""
    found = dropout.active(torch.nn.Sequential(*layers))
    assert (None if found is None else found.usual) is usual
    if found is not None:
        assert found.says.startswith(f"Dropout of {'the model' if usual else 'LoRA'} is active (p 0.1)")


@pytest.mark.parametrize("dropped", [True, False])
def test_dropout_in_swift(watched_of, dropped):
    """A mean that grows with an adapter is told where nothing is dropped."""
    watched, said = watched_of("swift")
    trainer = swift()
    trainer.model = Adapted(0.1 if dropped else 0.0)
    for step in range(11):
        logs = {"rollout_correction/kl": 0.001 if step < 10 else 0.05}
        watched.around_log(lambda *_: None, trainer, (logs, None), {})
    assert len(said()) == (not dropped)


def test_structured_outputs_in_skyrl(watched_of):
    """Which are settings that it hands on without a name of its own."""
    watched, said = watched_of("skyrl")
    trainer = Loop()
    trainer.cfg.generator.sampling_params.additional_kwargs = {"structured_outputs": {"regex": "a|b"}}
    for step, batch in enumerate(batches("lost", 2)):
        log_skyrl(watched, trainer, batch, step)
    assert (said(), watched.observed()) == ([], {})


SLIME = {
    "sampled": ("slime.rollout.sglang_rollout.generate_rollout", {}, 20, 0.01),
    "sampled asynchronously": ("slime.rollout.fully_async_rollout.generate_rollout_fully_async", {}, 20, 0.01),
    "SFT": ("slime.rollout.sft_rollout.generate_rollout", {}, 200, 2.0),
    "from a file": ("slime.rollout.forge_load.generate_rollout", {}, 200, 2.0),
    "from a file, to debug": (
        "slime.rollout.sglang_rollout.generate_rollout",
        {"load_debug_rollout_data": "rollout.pt"},
        200,
        2.0,
    ),
    "nothing": ("slime.rollout.sleep_rollout.sleep", {}, 200, 2.0),
    "one's own": ("mine.generate", {}, 200, 2.0),
    "too long": ("slime.rollout.sglang_rollout.generate_rollout", {}, 21, 2.0),
}


@pytest.mark.parametrize("case", SLIME)
def test_slime_has_sampled_what_is_looked_at(watched_of, case):
    function, changed, length, difference = SLIME[case]
    watched, said = watched_of("slime")
    settings = {"rollout_function_path": function, "rollout_max_response_len": 20, "colocate": True}
    settings |= {"custom_generate_function_path": None, "load_debug_rollout_data": None}
    settings |= {"rollout_temperature": 1.0, "rollout_top_p": 1.0, "rollout_top_k": -1, **changed}
    args = SimpleNamespace(**settings)
    samples = [SimpleNamespace(response_length=each) for each in (3, length)]
    watched.around_rollout(lambda *_: None, None, (0, args, samples, {}, 1.0), {})
    metrics = {"train/train_rollout_logprob_abs_diff": difference, "train/step": 0}
    watched.around_log(lambda *_: None, None, (args, metrics, "train/step"), {})
    assert len(said()) == (2 if case == "too long" else 0)
    assert bool(watched.observed()) is (case.startswith("sampled") or case == "too long")


ONLINE_DPO = {
    "taken apart": ({}, [[5, 6], [0, 5]], 1),
    "an end of the generation's": ({"ends": [7, 1]}, [[5, 6], [0, 5]], 0),
    "a form": ({"structured_outputs": "a|b"}, [[5, 6], [0, 5]], 0),
    "a form of an older release": ({"guided_decoding": "a|b"}, [[5, 6], [0, 5]], 0),
    "a stop": ({"stop_token_ids": [7]}, [[5, 6], [0, 5]], 0),
    "the context may be full": ({}, [[5, 6], [5, 7]], 0),
    "the context may be full, padded": ({}, [[0, 6], [0, 7]], 0),
}


@pytest.mark.parametrize("case", ONLINE_DPO)
def test_online_dpo_with_completions_of_one_token(watched_of, case):
    """Whose prompts may be padded on the left."""
    changed, prompts, lines = ONLINE_DPO[case]
    changed = dict(changed)
    watched, said = watched_of("trl", "_watched_online_dpo")
    trainer = Object(
        model=SimpleNamespace(generation_config=SimpleNamespace(eos_token_id=changed.pop("ends", 1))),
        generation_config=SimpleNamespace(**{"max_tokens": 8, **changed}),
        processing_class=SimpleNamespace(eos_token_id=1, pad_token_id=0),
        state=SimpleNamespace(global_step=0),
    )
    result = [[7]] * 4, prompts * 2
    assert watched.around_generate(lambda *_: result, trainer, (prompts,), {}) is result
    assert len(said()) == lines
    assert watched.observed()["long-completions"]["values"] == 1


@pytest.mark.parametrize("asked", [True, False])
def test_each_engine_of_a_process_is_one_run(watched_of, asked):
    """vLLM's, of which each has lost its adapter, or neither."""
    watched, said = watched_of("vllm", "_watched_requests")
    for worker in (Object(), Object()):
        for _ in range(4):
            watched.around_add_lora(lambda *_: True, worker, (SimpleNamespace(lora_tensors={}),), {})
            requests = [SimpleNamespace(lora_request="an adapter" if asked else None)]
            output = SimpleNamespace(scheduled_new_reqs=requests)
            watched.around_execute_model(lambda *_: None, worker, (output,), {})
    assert len(said()) == (0 if asked else 2)
