"""The settings in a run's configuration files, and the known bugs that they exclude with certainty.

Values are not resolved: the value of a shell variable, an interpolation or "auto" cannot be determined, and such a
setting excludes no bug.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from ..definitions.bug import KnownBug
from . import inputs, models, run_script, run_yaml, yaml_nodes
from .inputs import InputError
from .run_yaml import RunConfigError
from .shell import Word

_LARGEST = 2**20
_ABSENT = "absent"
_ZERO, _DEVICE = "zero_optimization", "zero_optimization.offload_optimizer.device"
_STAGE, _FSDP = f"{_ZERO}.stage", "fsdp_config.fsdp_version"
# Other spellings, in accelerate's files and in arguments.
_SAME = {
    "deepspeed_config.zero_stage": f"{_ZERO}.stage",
    "zero_stage": f"{_ZERO}.stage",
    "ds.zero_stage": f"{_ZERO}.stage",  # OpenRLHF's
    "deepspeed_config.gradient_accumulation_steps": "gradient_accumulation_steps",
    "deepspeed_config.offload_optimizer_device": _DEVICE,
    "offload_optimizer_device": _DEVICE,
    f"{_ZERO}.cpu_offload": f"{_ZERO}.offload_optimizer",
    "dispatch_batches": "accelerator_config.dispatch_batches",  # the Trainer's, deprecated
    "split_batches": "accelerator_config.split_batches",
    "use_liger_loss": "use_liger_kernel",  # GRPO's, and others', in TRL before 1.0
}
# ms-swift's names of the DeepSpeed configurations that it contains: the stage and the optimizer's device.
_PRESETS = {f"zero{stage}": (f"{stage}", "none") for stage in range(4)}
_PRESETS |= {f"zero{stage}_offload": (f"{stage}", "cpu") for stage in (2, 3)}
# By accelerate's distributed_type, what is not used.
_WITHOUT = {"multi_gpu": (_STAGE, _FSDP), "no": (_STAGE, _FSDP), "fsdp": (_STAGE,), "deepspeed": (_FSDP,)}
# TRL's parser refuses a key that the trainer's arguments do not have, so these tell the trainer: "grpo" stands for SDPO
# and others like it, too, and "gold" for GOLD.
_OF_TRAINERS = {
    "scale_rewards": "grpo",
    "importance_sampling_level": "grpo",
    "epsilon_high": "grpo|rloo",
    "mask_truncated_completions": "grpo|rloo",
    "num_generations": "grpo|rloo|gold",
}
_LOSSES_OF_GRPO = ("grpo", "bnpo", "dr_grpo", "dapo", "cispo", "luspo", "sapo", "vespo")
_TRLS_MODEL = "model_name_or_path"
_NAMES_A_FILE = ("deepspeed", "deepspeed_config", "deepspeed_config.deepspeed_config_file", "config", "config_file")
_WORDS = {"yes": "true", "on": "true", "no": "false", "off": "false"}


class Setting(NamedTuple):
    """A key set at one place; the value is None if it cannot be determined."""

    key: str
    value: str | None
    place: str


class RunConfig:
    """All files together: a bug is excluded only if every file that sets the key agrees.

    Attributes:
        notes: sentences about parts of the files that cannot be determined.
    """

    def __init__(self, files: Sequence[str]) -> None:
        """Read the files; ``-`` is standard input.

        Raises:
            RunConfigError: a file cannot be read or parsed.
        """
        self.notes: list[str] = []
        self._settings: list[Setting] = []
        self._of_deepspeed: list[str] = []
        self._without: list[Setting] = []
        self._has_arguments = False
        self._all_given = True
        self._given = {os.path.realpath(file) for file in files}
        for file in files:
            self._read(file)

    def excludes(self, patch: KnownBug) -> str:
        """Why the bug cannot affect this run; empty if it may, or if that cannot be determined."""
        for key, values in patch.excluding:
            settings = self._find(key)
            if settings and all(each.value in values for each in settings):
                return "; ".join(dict.fromkeys(map(_sentence, settings)))
        return ""

    def undecided(self, patch: KnownBug) -> str:
        """For a bug that is not excluded: the values of the keys that could exclude it."""
        sentences = []
        for key, _ in patch.excluding:
            sentences += [_sentence(each) for each in self._find(key)] or [f"{key} is not set"] * (key != "trl")
        return "; ".join(dict.fromkeys(sentences)) or "no setting decides whether the bug affects it"

    def _find(self, key: str) -> list[Setting]:
        settings = self._found(key)
        if not settings and key == "trl":
            return self._trainers()
        command = [each for each in self._settings if each.key == "trl"]
        launchers = key.startswith((f"{_ZERO}.", "fsdp_config.")) or key in ("num_processes", "trl", "model_family")
        if not settings and command and all(each.value for each in command) and self._all_given and not launchers:
            return [Setting(key, _ABSENT, f"trl {command[0].value}, {command[0].place}")]  # TRL's own script
        return settings

    def _trainers(self) -> list[Setting]:
        """The trainers of TRL that have the options of the only file with TRL's arguments; none if unknown."""
        files = {_file(each.place) for each in self._settings if each.key == _TRLS_MODEL}
        if len(files) != 1 or self._found("rlhf_type"):
            return []
        trainers, places = set[str](), dict[str, None]()
        for each in self._settings:
            is_loss = each.key == "loss_type" and each.value in _LOSSES_OF_GRPO
            shown = "grpo" if is_loss else _OF_TRAINERS.get(each.key)
            if shown and all(one.value for one in self._found(each.key)):
                trainers = trainers & set(shown.split("|")) if places else set(shown.split("|"))
                places[f"{each.key}, {each.place}"] = None
        return [Setting("trl", trainer, "; ".join(places)) for trainer in sorted(trainers)]

    def _found(self, key: str) -> list[Setting]:
        # A value set as a whole ("offload_optimizer": "auto"), or in a file that was not given, cannot be determined.
        settings = [
            each if each.key == key else Setting(key, None, each.place)
            for each in self._settings
            if each.key == key or each.key == "" or key.startswith(f"{each.key}.")
        ]
        if key.startswith(f"{_ZERO}."):
            without = [file for file in self._of_deepspeed if not any(each.place == file for each in settings)]
            settings += [Setting(key, _ABSENT, file) for file in without]
        launched = any(each.key in ("use_deepspeed", "use_fsdp") for each in self._settings)
        # Without arguments, the trainer may have a DeepSpeed file of its own, whatever accelerate's has.
        if self._has_arguments and not launched:
            settings += [each for each in self._without if each.key == key]
        return settings

    def _read(self, file: str) -> None:
        what = "standard input" if file == "-" else file
        try:
            text = inputs.text(file, _LARGEST)
        except InputError as error:
            raise RunConfigError(str(error)) from error
        options = None
        if text.lstrip()[:1] == "{":
            data = _json(text, what)
            if _ZERO in data:
                self._of_deepspeed.append(what)
            settings = list(_flat(data, "", what))
        elif file.endswith((".yml", ".yaml")):
            settings = list(_of_yaml(text, what))
        else:
            options = run_script.read(text, what, None if file == "-" else Path(file).parent)
            settings = [_setting(key, value, f"{what}:{line}") for key, value, line in options.settings]
            settings += [Setting("", why, what) for why in options.unclear]
            self.notes += options.notes
        if not settings and what not in self._of_deepspeed:
            raise RunConfigError(
                f"{what} contains no settings: expected DeepSpeed's JSON, accelerate's YAML, a trainer's arguments as "
                "YAML or JSON, or a command line with its options"
            )
        is_accelerates = any(each.key in ("distributed_type", "compute_environment") for each in settings)
        for each in settings:
            unused = _WITHOUT.get(each.value or "", ()) if each.key == "distributed_type" else ()
            self._without += [Setting(key, _ABSENT, f"{each.value}, {each.place}") for key in unused]
        self._has_arguments |= not is_accelerates and what not in self._of_deepspeed
        is_script = options is not None
        for each in settings:
            if each.key != "model_family" and (is_script or each.key != "trl"):  # these keys are of this module
                self._add(each, is_accelerates)

    def _add(self, setting: Setting, is_accelerates: bool) -> None:
        key, value, place = setting
        if key == "":
            self.notes.append(f"{place}: {value}; no bug is excluded")
            self._settings.append(Setting("", None, place))
        elif key == "deepspeed" and value in _PRESETS and not os.path.exists(value):
            stage, device = _PRESETS[value]
            self._settings += [Setting(f"{_ZERO}.stage", stage, place), Setting(_DEVICE, device, place)]
        elif key in _NAMES_A_FILE:
            if value is None:
                self._settings.append(Setting(_ZERO, None, place))
            elif value not in ("true", "false"):
                self._named(value, place)
        elif not is_accelerates and (key in ("fsdp", "fsdp_config") or key.startswith(("fsdp_config.", "deepspeed."))):
            # The Trainer's own setting takes precedence over accelerate's.
            self._settings.append(Setting(_ZERO if key.startswith("deepspeed.") else "fsdp_config", None, place))
        elif not is_accelerates and key.startswith("fsdp_"):
            self._settings.append(Setting(f"fsdp_config.{key}", value, place))
        elif key == "nproc_per_node":  # of each machine
            self._settings.append(Setting("num_processes", None, place))
        else:
            self._settings.append(Setting(_SAME.get(key, key), value, place))
        if models.names_one(key):
            self._settings.append(Setting("model_family", models.family(value), place))

    def _named(self, file: str, place: str) -> None:
        folder = os.path.dirname(_file(place))
        with contextlib.suppress(ValueError):  # a NUL in the name
            if {os.path.realpath(path) for path in (file, os.path.join(folder, file))} & self._given:
                return
        self._all_given = False
        self.notes.append(f"{place} names {file}, which was not given: settings that it may contain exclude no bug")
        self._settings += [Setting(key, None, place) for key in (_ZERO, "fsdp_config")]


def _file(place: str) -> str:
    return place.rpartition(":")[0] or place


def _sentence(setting: Setting) -> str:
    if setting.value == _ABSENT:
        return f"{setting.key} is not set ({setting.place})"
    return f"{setting.key} {f'is {setting.value}' if setting.value else 'cannot be determined'} ({setting.place})"


def _json(text: str, place: str) -> dict[str, Any]:
    try:
        data = json.loads(text, object_pairs_hook=_once)
    except (ValueError, RecursionError) as error:
        raise RunConfigError(f"{place} is not valid JSON: {error}") from error
    return dict(data)


def _once(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    mapping = dict(pairs)
    if len(mapping) < len(pairs):
        raise ValueError("a key occurs twice")
    return mapping


def _flat(data: Mapping[str, Any], prefix: str, place: str) -> Iterator[Setting]:
    for key, value in data.items():
        if isinstance(value, Mapping):
            yield from _flat(value, f"{prefix}{key}.", place)
        else:
            yield _setting(f"{prefix}{key}", value, place)


def _setting(key: str, value: object, place: str) -> Setting:
    named = isinstance(value, str) and (key in _NAMES_A_FILE or models.names_one(key))
    return Setting(key, str(value) if named else _value(value), place)


def _value(value: object) -> str | None:
    """The value as text in lower case; None if it cannot be determined."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, (int, float)):
        return str(int(value)) if math.isfinite(value) and value == int(value) else None
    if not isinstance(value, str) or "$" in value or "`" in value or not value:
        return None
    word = value.strip().lower()
    whole = re.fullmatch(r"(0|[1-9]\d*)\.0+", word)  # 1.0 on a command line is the 1 of a file
    return None if word == "auto" else whole[1] if whole else _WORDS.get(word, word)


def _of_yaml(text: str, place: str) -> Iterator[Setting]:
    try:
        root = yaml_nodes.compose(text, place)
    except yaml_nodes.NotYaml as error:
        raise RunConfigError(str(error)) from error
    if isinstance(root, yaml.SequenceNode):  # .hydra/overrides.yaml
        words = [Word(str(each.value), yaml_nodes.line_of(each)) for each in root.value]
        for key, word, number in run_script.of_words(words):
            yield _setting(key, word, f"{place}:{number}")
    elif isinstance(root, yaml.MappingNode):
        for key, value, number in run_yaml.settings(root, place):
            yield _setting(key, value, f"{place}:{number}")
    elif root is not None:
        raise RunConfigError(f"{yaml_nodes.at(place, root)}: expected a YAML mapping, or a list of overrides")
