"""The settings of a run's command line, alone or in a script: options and Hydra's overrides, each with its line."""

from __future__ import annotations

import itertools
import os
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

from . import shell
from .run_yaml import RunConfigError
from .shell import Command, Word

_OVERRIDE = re.compile(r"\+{0,2}([A-Za-z_][\w/@-]*(?:\.[\w-]+)+)=(.*)", re.DOTALL)
# Commands that never start a run, by their first words.
_PREPARING = re.compile(
    r"(?:set|cd|export|unset|ulimit|mkdir|echo|printf|sleep|source|\.|module|tee|cat|ls|rm|cp|mv|ln|chmod|touch|pwd"
    r"|true|false|:|exit|return|wait|trap|kill|pkill|killall|test|read|shift|getopts|local|let|break|continue|date"
    r"|hostname|nproc|which|command|type|grep|awk|sed|head|tail|cut|tr|wc|sort|seq|find|dirname|basename|realpath"
    r"|readlink|wget|curl|tar|unzip|git|apt|apt-get|nvidia-smi|ps|df|free|lsof|pushd|popd|mapfile|readarray|shopt"
    r"|conda (?:activate|deactivate|install)|mamba (?:activate|install)|wandb|huggingface-cli|hf|modelscope|gsutil|aws"
    r"|(?:pip[\d.]*|(?:python[\d.]* -m |uv )pip) .*|uv (?:sync|venv|add)|ray (?:start|stop|status)"
    r"|vllm serve|trl vllm-serve|python[\d.]* -m (?:vllm\.entrypoints\.|sglang\.launch_server).*)(?: .*)?",
    re.DOTALL,
)


class Options(NamedTuple):
    """What a script gives to its run.

    Attributes:
        settings: key, value and line; the value is None if it cannot be determined.
        unclear: sentences about options that cannot be known, so that no setting of any file is certain.
        notes: other sentences for the user.
    """

    settings: tuple[tuple[str, str | None, int], ...]
    unclear: tuple[str, ...]
    notes: tuple[str, ...]


def read(text: str, place: str, folder: Path | None) -> Options:
    """The options of the commands that may be the run. With several, a setting counts if each command has it.

    Raises:
        RunConfigError: the script cannot be parsed.
    """
    try:
        script = shell.read(text, folder)
    except shell.ShellError as error:
        raise RunConfigError(f"{place} {error}") from error
    stray = [command for command in script.commands if re.match(r"-|.*[^\\]=", command.words[0].text)]
    runs = [command for command in script.commands if command not in stray and not _prepares(command)]
    of_runs = [[*_of_trl(command), *of_words(command.words)] for command in runs]
    settings = [setting for each in of_runs for setting in each]
    if script.not_understood and not settings:
        raise RunConfigError(f"{place}:{script.not_understood[0]}: not a valid shell command")
    keys = dict.fromkeys(key for key, _, _ in settings)
    for command, each in zip(runs, of_runs, strict=True):
        settings += [(key, None, command.line) for key in keys if key not in {key for key, _, _ in each}]
    unclear = [
        f"line {line} is not a valid shell command: give the run's own command alone"
        for line in script.not_understood[:1]
    ]
    unclear += dict.fromkeys(
        f"{word.text:.50} may add options: replace it by its value, or give {_resolved(command)}"
        for command in runs
        for word in command.words[1:]
        if not word.single or re.fullmatch(r"@\S+", word.text)
    )
    notes = [
        f"{place}:{command.line}: {command.words[0].text:.50} begins a command of its own, so the run does not get it: "
        "a comment or a line without a backslash ends the command before it"
        for command in stray
    ]
    if len(runs) > 1:
        lines = ", ".join(str(command.line) for command in runs[:9])
        notes.append(f"{place} has {len(runs)} commands (lines {lines}): a setting counts if each of them has it")
    return Options(tuple(settings), tuple(unclear), tuple(notes))


def _resolved(command: Command) -> str:
    """What has a run's options after everything is resolved."""
    if any(_OVERRIDE.fullmatch(word.text) for word in command.words):
        return "the `.hydra/overrides.yaml` of the run's output"
    return "the options that the run has saved as YAML or JSON"


def _prepares(command: Command) -> bool:
    words = [word.text for word in command.words]
    return _PREPARING.fullmatch(" ".join([os.path.basename(words[0]), *words[1:]])) is not None


def _of_trl(command: Command) -> Iterator[tuple[str, str | None, int]]:
    """The trainer of TRL's own command (``trl grpo``), as the key ``trl``."""
    for first, second in itertools.pairwise(command.words):
        if os.path.basename(first.text) == "trl" and first.known and re.fullmatch(r"[a-z]+", second.text):
            yield "trl", second.text, second.line
            return


def of_words(words: Sequence[Word]) -> Iterator[tuple[str, str | None, int]]:
    """Options (``--key value``, ``--key=value``, ``--key``) and Hydra's overrides (``a.b=value``)."""
    number = 0
    while number < len(words):
        word = words[number]
        number += 1
        override = _OVERRIDE.fullmatch(word.text)
        if word.text.startswith("--") and len(word.text) > 2:
            key, sign, value = word.text[2:].partition("=")
            known = word.known
            if not sign:
                following = words[number] if number < len(words) else Word("", 0)
                takes_it = following.text and not re.match(r"-[^\d.]", following.text) and following.single
                value = following.text if takes_it and not _OVERRIDE.fullmatch(following.text) else "true"
                known = known and (following.known or value == "true")
                number += value is following.text
            yield key.replace("-", "_"), value if known else None, word.line
        elif override is not None:
            yield override[1], override[2] if word.known else None, word.line
