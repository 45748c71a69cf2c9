"""The patches in a Ray cluster's workers, which the driver's `apply` does not affect.

    ray.init(runtime_env=rlhf_patches.ray.runtime_env())     # or runtime_env({"env_vars": ..., "working_dir": ...})
    rlhf_patches.ray.verify(actors)

Only `verify` imports Ray: a runtime environment can be made without Ray.
"""

from __future__ import annotations

import importlib.metadata
import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from datetime import timedelta
from typing import Any

from . import autoload, settings, site_hook
from .definitions import registry
from .engine.engine import Asked, engine
from .engine.log import logger
from .runs import comparison, hook_files
from .runs.comparison import VerifyError, differences
from .runs.processes import Process
from .settings import PREFIX, SettingsError

__all__ = ["VerifyError", "runtime_env", "verify"]

_HOOK = "worker_process_setup_hook"
# Not in this module, which imports the engine: a worker that imports no framework does not load it.
_OURS = "rlhf_patches.site_hook.setup_ray_worker"
# Fields that Ray accepts only together with env_vars and config.
_ALONE = ("container", "image_uri")
_CHOICE = (PREFIX + "DISABLE", PREFIX + "ONLY", PREFIX + "ENABLE")
_NAMED = 4  # named actors of a large group


def runtime_env(base: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Return a Ray runtime environment whose workers get the patches that this process applies or would apply.

    It has RLHF_PATCHES_AUTOLOAD=1, every other RLHF_PATCHES_* variable of this process, and the selection of
    ``apply(only=..., disable=..., strict=...)``, so call it after `apply`. It also has a ``worker_process_setup_hook``,
    which runs before the hook of ``base``: for workers without a site hook, and so that a worker without this package
    fails instead of running unpatched. The hook is left out with Ray before 2.55 if this environment has a site hook:
    engines that start Ray again within a worker would fail. This function can itself be the RAY_RUNTIME_ENV_HOOK.

    Args:
        base: the rest of the runtime environment, a dictionary or a `ray.runtime_env.RuntimeEnv`; it is not changed.
            RLHF_PATCHES_* in its ``env_vars`` take precedence, with a warning if this process has another value.

    Returns:
        a new dictionary. It always has DISABLE, ONLY, ENABLE, PLUGINS and STRICT, so a node's own environment has no
        effect.

    Raises:
        SettingsError: a variable of this process or of ``base`` is invalid or disables the hook, or both select
            different patches.
    """
    made = _copied(base)
    env_vars: dict[str, str] = made["env_vars"]
    asked = engine.asked()
    inherited = {name: value for name, value in os.environ.items() if name.startswith(PREFIX)}
    # Some frameworks copy their whole environment into the runtime environment: that is not a separate selection.
    own = {k: v for k, v in env_vars.items() if k.startswith(PREFIX) and inherited.get(k, "") != v}
    if any(name in own for name in _CHOICE):
        own.update({name: env_vars.get(name, "") for name in _CHOICE})
    for where, variables in (("this process", inherited), ("the runtime environment", own)):
        _validate(where, variables, asked.names, asked.hint)

    wanted = {
        PREFIX + "STRICT": "",
        PREFIX + "PLUGINS": "",
        **inherited,
        **_choice(asked),
        PREFIX + "AUTOLOAD": "1",
    }
    if asked.strict is not None:
        wanted[PREFIX + "STRICT"] = str(int(asked.strict))
    if wanted.get(PREFIX + "REPORT"):
        wanted[PREFIX + "REPORT"] = os.path.abspath(wanted[PREFIX + "REPORT"])  # a worker has another directory
    watched = settings.split(wanted.get(PREFIX + "WATCH", ""))
    watched += [name for name in autoload.watch_list(registry.load()[0]) if name not in watched]
    if watched:
        wanted[PREFIX + "WATCH"] = ",".join(watched)
    if _CHOICE[0] in own:
        _compare_choices(asked, wanted, own)
    for name in own:
        if name not in _CHOICE and wanted.get(name, own[name]) not in (own[name], ""):
            logger().warning("%s is %r in the workers, %r in this process", name, own[name], wanted[name])
    env_vars.update({**wanted, **own})

    if any(made.get(field) for field in _ALONE):
        logger().info("the runtime environment names a container, so its workers need the site hook in the image")
    elif _nested_init_fails() and hook_files.active() and made.get(_HOOK) in (None, _OURS):
        made.pop(_HOOK, None)
    else:
        made[_HOOK] = _chained(made.get(_HOOK))
    return made


def _nested_init_fails() -> bool:
    """Whether this Ray rejects the environment of a worker with a setup hook if the worker starts Ray with it.

    vLLM's engines do so. Observed up to Ray 2.54.1, not from 2.55.0 on (ray #61473).
    """
    from packaging.version import InvalidVersion, Version

    try:
        return Version(importlib.metadata.version("ray")) < Version("2.55.0.dev0")
    except (importlib.metadata.PackageNotFoundError, InvalidVersion):
        return False


def verify(
    actors: Mapping[str, Any] | Iterable[Any], timeout: float | timedelta = 60.0, driver: bool = False
) -> dict[str, dict[str, Any]]:
    """Check that a group of actors has the same patches. The actors' classes need no change.

    The call waits in each actor's queue behind earlier calls. A patch whose framework an actor has not imported yet
    counts as applied, because it will be.

    Args:
        actors: actor handles, or a mapping from labels to handles.
        timeout: seconds, or a timedelta, for all actors together.
        driver: whether this process must also have the same patches.

    Returns:
        each process by label, with the fields of `rlhf_patches.runs.processes.Process`, ``node_id`` and
        ``actor_name``.

    Raises:
        VerifyError: the actors differ; or an actor is dead, does not answer in time, has no rlhf_patches, or has the
            patches off. The message names every such actor, its host and its process.
        SettingsError: ``actors`` is empty or has other objects, or ``timeout`` is invalid.
    """
    limit = settings.seconds(timeout)
    import ray
    from ray.exceptions import GetTimeoutError, RayActorError, RayError

    handles = dict(actors) if isinstance(actors, Mapping) else {f"actors[{i}]": a for i, a in enumerate(actors)}
    if not handles:
        raise SettingsError("there are no actors to verify")
    for label, handle in handles.items():
        if not hasattr(getattr(handle, "__ray_call__", None), "remote"):
            raise SettingsError(f"{label} is {handle!r}: expected the handle of a Ray actor")
    probe = _probe()
    answers = {label: handle.__ray_call__.remote(probe) for label, handle in handles.items()}
    ray.wait(list(answers.values()), num_returns=len(answers), timeout=limit)
    states: dict[str, dict[str, Any]] = {}
    problems: list[str] = []
    for label, answer in answers.items():
        who = f"{label} {handles[label]!r}"
        try:
            state = ray.get(answer, timeout=0)
        except GetTimeoutError:
            problems.append(f"{who} has not answered within {limit:g} s: it is busy, or still starting")
        except RayActorError as error:
            problems.append(f"{who} cannot be called: {type(error).__name__}: {error}")
        except RayError as error:
            cause = getattr(error, "cause", None) or error
            problems.append(f"{who} failed to answer: {type(cause).__name__}: {cause}")
        else:
            where = f"{who} (host {state['host']}, pid {state['pid']}, node {state['node_id'][:8]})"
            if "missing" in state:
                problems.append(f"{where} has no rlhf_patches: {state['missing']}, in {state['executable']}")
            elif not state["active"]:
                problems.append(f"{where} has rlhf_patches, but it is off: {_ADVICE}")
            else:
                states[where] = state
    if driver:
        states["this process"] = this_process()
        if not states["this process"]["active"]:
            problems.append("this process has not called apply()")
    difference = _differences(states)
    if difference:
        problems.append(f"patches differ:\n{difference}")
    if problems:
        raise VerifyError("\n".join([f"not all of these {len(handles)} actors have the same patches:", *problems]))
    return states


_ADVICE = "start Ray with ray.init(runtime_env=rlhf_patches.ray.runtime_env()); an actor keeps its initial environment"


def _copied(base: Mapping[str, Any] | None) -> dict[str, Any]:
    if base is not None and not isinstance(base, Mapping):
        raise SettingsError(f"the runtime environment is {base!r}: expected a dictionary or a RuntimeEnv")
    made = dict(base or {})
    env_vars = made.get("env_vars") or {}
    if not isinstance(env_vars, Mapping):
        raise SettingsError(f"the runtime environment's env_vars are {env_vars!r}: expected a dictionary")
    made["env_vars"] = dict(env_vars)
    return made


def _validate(where: str, variables: Mapping[str, str], names: tuple[str, ...], hint: str) -> None:
    """Check that the variables are valid, and do not disable the patches."""
    try:
        settings.from_environment(names, hint, variables)
        settings.log_level(variables)
        off = PREFIX + "AUTOLOAD" in variables and not settings.truth("AUTOLOAD", variables)
    except SettingsError as error:
        raise SettingsError(f"{error} (in {where})") from None
    except AttributeError as error:  # not a string; Ray would also reject it
        text = f"{where} has an RLHF_PATCHES_* variable that is not a string: {dict(variables)}"
        raise SettingsError(text) from error
    if off:
        raise SettingsError(
            f"{where} has RLHF_PATCHES_AUTOLOAD={variables[PREFIX + 'AUTOLOAD']}, but runtime_env() enables the "
            "patches: remove one of the two. To run without patches, set RLHF_PATCHES_DISABLE='*'"
        )


def _choice(asked: Asked) -> dict[str, str]:
    """Return the values of DISABLE, ONLY and ENABLE for the patches that this process applies."""
    disable, only, enable = _CHOICE
    as_set = {name: os.environ.get(name, "") for name in _CHOICE}
    named = settings.split(as_set[enable])
    as_set[enable] = ",".join([*named, *(name for name in asked.named if name not in named)]) or as_set[enable]
    effective = _effective(asked, as_set)
    if asked.chosen is None or set(effective) <= set(asked.chosen):
        return as_set
    effective = [name for name in effective if name in asked.chosen]
    return {disable: "" if effective else "*", only: ",".join(effective), enable: as_set[enable]}


def _effective(asked: Asked, variables: Mapping[str, str]) -> list[str]:
    chosen = settings.from_environment(asked.names, environment=variables)
    return [
        name
        for name in asked.names
        if not (chosen.switched_off(name) or chosen.unasked(name, asked.contested.get(name, "")))
    ]


def _compare_choices(asked: Asked, wanted: Mapping[str, str], own: Mapping[str, str]) -> None:
    here, there = ({name: variables[name] for name in _CHOICE} for variables in (wanted, own))
    differing = set(_effective(asked, here)) ^ set(_effective(asked, there))
    if differing and any(here.values()):
        raise SettingsError(
            f"the runtime environment has {_assignments(there)}, but this process selects patches like "
            f"{_assignments(here)}: they differ in {', '.join(sorted(differing))}. Remove the variables from the "
            "runtime environment, or select the same patches"
        )


def _assignments(variables: Mapping[str, str]) -> str:
    return ", ".join(f"{name}={value}" for name, value in variables.items() if value) or "no selection"


def _chained(theirs: Callable[[], Any] | str | None) -> Callable[[], Any] | str:
    """Return our hook, followed by the existing hook."""
    if theirs is None or theirs == _OURS or getattr(theirs, "runs_ours", False):
        return theirs or _OURS

    # A nested function is pickled by value, so Ray can run it without our package and report what is missing. It must
    # not use this module's globals.
    def ours_first(ours: str = _OURS, theirs: Any = theirs) -> None:
        import importlib

        def loaded(path: str) -> Any:
            module, _, name = path.rpartition(".")
            return getattr(importlib.import_module(module), name)

        loaded(ours)()
        (loaded(theirs) if isinstance(theirs, str) else theirs)()

    ours_first.runs_ours = True  # type: ignore[attr-defined]
    return ours_first


def this_process() -> dict[str, Any]:
    """Describe this process in plain values. If the site hook still waits for a framework, load the engine now.

    Returns:
        an `rlhf_patches.runs.processes.Process` without a rank, and ``active`` (False: `apply` was not called).

    Raises:
        SettingsError: a variable of this process is invalid.
        PatchError: strict mode and a refused or failed patch.
    """
    site_hook.load_now()
    process = comparison.own_process(None, engine)
    return {**comparison.to_dict(process), "active": engine.asked().chosen is not None}


def _differences(states: Mapping[str, Mapping[str, Any]]) -> str | None:
    processes = [comparison.from_dict(state) for state in states.values()]
    labels = {id(process): label for process, label in zip(processes, states, strict=True)}

    def who(members: Sequence[Process]) -> str:
        more = f" and {len(members) - _NAMED} more" if len(members) > _NAMED else ""
        return ", ".join(labels[id(process)] for process in members[:_NAMED]) + more

    return differences(processes, who)


def _probe() -> Callable[[Any], dict[str, Any]]:
    """Return the function that each actor runs. Like the hook above it is pickled by value."""

    def state_of(actor: Any) -> dict[str, Any]:
        import os
        import socket
        import sys

        import ray

        context = ray.get_runtime_context()
        identity = {"node_id": context.get_node_id(), "actor_name": context.get_actor_name() or ""}
        try:
            from rlhf_patches.ray import this_process
        except ImportError as error:
            missing = {"missing": str(error), "executable": sys.executable}
            return {"host": socket.gethostname(), "pid": os.getpid(), **identity, **missing}
        return {**this_process(), **identity}

    return state_of
