"""The runtime environment that a Ray driver hands to its workers, made without Ray. Real clusters: tests/cluster."""

from __future__ import annotations

import io
import json
import logging

import pytest

from rlhf_patches import SettingsError, api, cli, ray
from rlhf_patches.engine.engine import Engine
from rlhf_patches.ray import runtime_env, verify
from tests.harness.ray_environment import BARE, HOOK


@pytest.mark.parametrize(
    ("version", "hook_file", "expected"),
    [
        ("2.54.1", "there.pth", None),
        ("2.54.1", None, HOOK),
        ("2.55.0rc1", "there.pth", HOOK),
        ("2.60.0", "there.pth", HOOK),
        ("unknown", "there.pth", HOOK),
    ],
)
def test_a_setup_hook_is_left_out_where_ray_could_not_be_started_again(monkeypatch, version, hook_file, expected):
    monkeypatch.setattr(ray.importlib.metadata, "version", {"ray": version}.__getitem__)
    monkeypatch.setattr(ray.hook_files, "active", lambda: hook_file)
    assert runtime_env().get("worker_process_setup_hook") == expected
    assert runtime_env(runtime_env()) == runtime_env()
    assert runtime_env({"worker_process_setup_hook": "os.getpid"})["worker_process_setup_hook"].runs_ours


def _start_anew(monkeypatch):
    made = Engine()
    for module in (api, ray):
        monkeypatch.setattr(module, "engine", made)


@pytest.fixture(autouse=True)
def _engine(monkeypatch):
    _start_anew(monkeypatch)
    yield
    api.engine.revert()


def test_with_nothing_set_a_nodes_own_choice_is_overridden():
    assert runtime_env() == {"env_vars": BARE, "worker_process_setup_hook": HOOK}


def test_the_base_is_merged_and_left_alone():
    modules = [json]  # Ray takes module objects, which cannot be copied
    base = {"env_vars": {"A": "1"}, "working_dir": None, "py_modules": modules, "config": {"eager_install": False}}
    before = {**base, "env_vars": dict(base["env_vars"])}
    made = runtime_env(base)
    assert made == {**before, "env_vars": {"A": "1", **BARE}, "worker_process_setup_hook": HOOK}
    assert base == before
    assert runtime_env(made) == made, "twice is once"
    assert runtime_env({"env_vars": None})["env_vars"] == BARE


def test_every_variable_of_the_driver(monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    driver = {
        "DISABLE": "trl-*",
        "STRICT": "1",
        "LOG": "warning:all",
        "WATCH": "mine",
        "REPORT": "r.jsonl",
        "PLUGINS": "none",
    }
    for name, value in driver.items():
        monkeypatch.setenv(f"RLHF_PATCHES_{name}", value)
    found = runtime_env()["env_vars"]
    assert found == {
        **BARE,
        **{f"RLHF_PATCHES_{name}": value for name, value in driver.items()},
        "RLHF_PATCHES_REPORT": str(tmp_path / "r.jsonl"),
    }
    assert runtime_env({"env_vars": found})["env_vars"] == found


@pytest.mark.parametrize(
    ("arguments", "variables", "expected"),
    [
        ({}, {}, ("", "")),
        ({}, {"DISABLE": "trl-*"}, ("trl-*", "")),
        ({"only": ["slime-no-*", "verl-no-*"]}, {}, ("", "slime-no-sync-reentry,verl-no-sync-reentry")),
        ({"only": ["slime-no-*", "verl-no-*"]}, {"DISABLE": "slime-no-*"}, ("", "verl-no-sync-reentry")),
        ({"disable": "trl-*"}, {"ONLY": "trl-chunked-nll-zero3,verl-no-*"}, ("", "verl-no-sync-reentry")),
        ({"disable": "trl-*"}, {"ONLY": "verl-no-*"}, ("", "verl-no-*")),
        ({"only": []}, {}, ("*", "")),
        ({"only": "verl-no-*"}, {"DISABLE": "verl-no-*"}, ("*", "")),
    ],
)
def test_what_the_driver_chose_in_code(monkeypatch, arguments, variables, expected):
    for name, value in variables.items():
        monkeypatch.setenv(f"RLHF_PATCHES_{name}", value)
    here = {row.name for row in api.apply(**arguments) if row.status != "disabled"}
    found = runtime_env()["env_vars"]
    assert (found["RLHF_PATCHES_DISABLE"], found["RLHF_PATCHES_ONLY"]) == expected
    # A worker that has these variables chooses the same.
    _start_anew(monkeypatch)
    for name in ("RLHF_PATCHES_DISABLE", "RLHF_PATCHES_ONLY"):
        monkeypatch.setenv(name, found[name])
    assert {row.name for row in api.apply() if row.status != "disabled"} == here


def test_what_was_reverted_is_not_wanted():
    api.apply()
    api.revert(only="verl-no-*")
    assert "verl-no-sync-reentry" not in runtime_env()["env_vars"]["RLHF_PATCHES_ONLY"].split(",")
    api.revert()
    assert runtime_env()["env_vars"]["RLHF_PATCHES_DISABLE"] == "*"


@pytest.mark.parametrize(("strict", "variable", "expected"), [(True, "", "1"), (False, "1", "0"), (None, "1", "1")])
def test_strict(monkeypatch, strict, variable, expected):
    api.apply(strict=strict)
    monkeypatch.setenv("RLHF_PATCHES_STRICT", variable)
    assert runtime_env()["env_vars"]["RLHF_PATCHES_STRICT"] == expected


# --------------------------------------------------------------------------- a base with variables of ours


def test_the_base_wins_where_the_driver_has_chosen_nothing():
    found = runtime_env({"env_vars": {"RLHF_PATCHES_DISABLE": "trl-*", "RLHF_PATCHES_LOG": "debug"}})["env_vars"]
    assert found == {**BARE, "RLHF_PATCHES_DISABLE": "trl-*", "RLHF_PATCHES_LOG": "debug"}


def test_two_choices_that_differ_are_an_error(monkeypatch):
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", "slime-no-*")
    for same in ({"RLHF_PATCHES_DISABLE": "slime-no-sync-reentry"}, {"RLHF_PATCHES_DISABLE": "slime-no-*"}):
        assert runtime_env({"env_vars": same})["env_vars"] == {**BARE, **same}
    with pytest.raises(SettingsError) as caught:
        runtime_env({"env_vars": {"RLHF_PATCHES_DISABLE": "verl-no-*"}})
    for part in (
        "RLHF_PATCHES_DISABLE=verl-no-*",
        "RLHF_PATCHES_DISABLE=slime-no-*",
        "slime-no-sync-reentry, verl-no-sync",
    ):
        assert part in str(caught.value)


def test_a_choice_in_code_that_differs_from_the_bases_is_an_error():
    api.apply(only="slime-no-*")
    with pytest.raises(SettingsError, match="RLHF_PATCHES_ONLY=slime-no-sync-reentry"):
        runtime_env({"env_vars": {"RLHF_PATCHES_ONLY": "verl-no-*"}})


def test_a_copy_of_the_environment_is_no_choice_of_the_bases(monkeypatch):
    """NeMo-RL passes dict(os.environ)."""
    monkeypatch.setenv("RLHF_PATCHES_DISABLE", "slime-no-*")
    api.apply(disable="verl-no-*")
    only = runtime_env({"env_vars": {"RLHF_PATCHES_DISABLE": "slime-no-*"}})["env_vars"]["RLHF_PATCHES_ONLY"].split(",")
    assert "slime-no-sync-reentry" not in only
    assert "verl-no-sync-reentry" not in only
    assert "trl-chunked-nll-zero3" in only


def test_other_variables_that_differ_are_a_warning(monkeypatch, caplog):
    monkeypatch.setenv("RLHF_PATCHES_LOG", "debug")
    with caplog.at_level(logging.WARNING, "rlhf_patches"):
        assert runtime_env({"env_vars": {"RLHF_PATCHES_LOG": "off"}})["env_vars"]["RLHF_PATCHES_LOG"] == "off"
    assert "RLHF_PATCHES_LOG is 'off' in the workers, 'debug' in this process" in caplog.text


@pytest.mark.parametrize(
    ("variables", "base", "message"),
    [
        ({"DISABLE": "slime-no-sink-reentry"}, None, "did you mean 'slime-no-sync-reentry'.* .in this process"),
        ({"DISABEL": "x"}, None, "did you mean 'RLHF_PATCHES_DISABLE'"),
        ({"STRICT": "perhaps"}, None, "RLHF_PATCHES_STRICT is 'perhaps'"),
        ({"LOG": "loud"}, None, "RLHF_PATCHES_LOG is 'loud'"),
        ({"WATCH": "json"}, None, "RLHF_PATCHES_WATCH names json"),
        ({}, {"env_vars": {"RLHF_PATCHES_WATCH": 3}}, "not a string"),
        ({"AUTOLOAD": "0"}, None, "this process has RLHF_PATCHES_AUTOLOAD=0.*DISABLE='[*]'"),
        ({}, {"env_vars": {"RLHF_PATCHES_AUTOLOAD": "off"}}, "the runtime environment has RLHF_PATCHES_AUTOLOAD=off"),
        ({}, {"env_vars": {"RLHF_PATCHES_ONLY": "nothing-like-it"}}, "(?s)is not a patch.*in the runtime environment"),
        ({}, {"env_vars": {"RLHF_PATCHES_STRICT": 1}}, "not a string"),
        ({}, {"env_vars": ["A=1"]}, r"env_vars are \['A=1'\]: expected a dictionary"),
        ({}, [], r"is \[\]: expected a dictionary or a RuntimeEnv"),
    ],
)
def test_what_is_wrong_is_an_error_in_the_driver(monkeypatch, variables, base, message):
    for name, value in variables.items():
        monkeypatch.setenv(f"RLHF_PATCHES_{name}", value)
    with pytest.raises(SettingsError, match=message):
        runtime_env(base)


# ------------------------------------------------------------------------------------------ setup hooks


@pytest.mark.parametrize("field", ["container", "image_uri"])
def test_no_setup_hook_where_ray_would_refuse_one(field):
    assert "worker_process_setup_hook" not in runtime_env({field: "docker.io/me/train"})


def test_a_setup_hook_that_is_there_runs_after_ours(monkeypatch):
    order = []
    monkeypatch.setattr("rlhf_patches.site_hook.setup_ray_worker", lambda: order.append("ours"))
    chained = runtime_env({"worker_process_setup_hook": lambda: order.append("theirs")})
    again = runtime_env(chained)
    assert again["worker_process_setup_hook"] is chained["worker_process_setup_hook"]
    again["worker_process_setup_hook"]()
    assert order == ["ours", "theirs"]
    runtime_env({"worker_process_setup_hook": "os.getpid"})["worker_process_setup_hook"]()
    assert order == ["ours", "theirs", "ours"]


def test_verify_does_not_wait_for_ever():
    """Ray takes None for no limit."""
    with pytest.raises(SettingsError, match="timeout is None: expected seconds"):
        verify([], timeout=None)


def test_bytes_that_are_no_text_are_no_json(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(b"\xff"), encoding="utf-8"))
    assert cli.main(["ray-env", "-"]) == 2
    assert "not JSON ('utf-8' codec can't decode byte 0xff" in capsys.readouterr().err


def test_the_command_with_its_input_closed(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", None)
    assert cli.main(["ray-env", "-"]) == 2
    assert "is not JSON" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("argument", "message"),
    [
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ("[1]", "expected a dictionary"),
        ('{"worker_process_setup_hook": "mine.setup"}', "mine.setup"),
        ('{"env_vars": {"RLHF_PATCHES_ONLY": "trl-chunk-nll-zero3"}}', "did you mean 'trl-chunked-nll-zero3'"),
    ],
    ids=["no JSON", "too deep", "a list", "another hook", "a typo"],
)
def test_the_command_refuses(said, argument, message):
    status, out, err = said("ray-env", argument)
    assert (status, out) == (2, "")
    assert message in err
    assert err.count("\n") == 1
    assert len(err) < 1000
