"""The settings in a YAML configuration file, each with its line. PyYAML parses the file."""

from __future__ import annotations

import re
from collections.abc import Iterator

import yaml

from .yaml_nodes import at, line_of, not_yaml

_WHOLE = re.compile(r"(0|[1-9][0-9]{0,9})(?:\.0)?")
_UNCLEAR = re.compile(r"[-+.0-9].*|~|null|Null|NULL|", re.DOTALL)
_LOADER = yaml.SafeLoader("")  # of no text: for the tags of plain scalars, and merge keys
_MOST_SETTINGS = 10_000  # nested aliases give exponentially many


class RunConfigError(Exception):
    """A configuration file cannot be read; the message names the file, the line and the reason."""


def settings(root: yaml.MappingNode, place: str) -> Iterator[tuple[str, str | int | None, int]]:
    """Each key, joined with dots, with its value and line; the value is None if it is no word or whole number.

    Merge keys (``<<``) and aliases are resolved, as `yaml.safe_load` does. Keys within lists are left out.

    Raises:
        RunConfigError: a key occurs twice or is no plain text, or an alias refers to a mapping that contains it.
    """
    try:
        for number, setting in enumerate(_settings(root, (), (), place), 1):
            if number > _MOST_SETTINGS:
                raise RunConfigError(f"{place} has more than {_MOST_SETTINGS} settings")
            yield setting
    except yaml.YAMLError as error:  # from a merge key
        raise RunConfigError(str(not_yaml(error, place))) from error
    except RecursionError as error:
        raise RunConfigError(f"{place} is nested too deeply") from error


def _settings(
    node: yaml.MappingNode, path: tuple[str, ...], around: tuple[yaml.Node, ...], place: str
) -> Iterator[tuple[str, str | int | None, int]]:
    if any(node is each for each in around):
        raise RunConfigError(f"{at(place, node)}: an alias refers to the mapping that contains it")
    for key, value in _items(node, place).values():
        name = (*path, key.value)
        if isinstance(value, yaml.MappingNode):
            yield from _settings(value, name, (*around, node), place)
        else:
            yield ".".join(name), _scalar(value), line_of(key)


def _items(node: yaml.MappingNode, place: str) -> dict[str, tuple[yaml.ScalarNode, yaml.Node]]:
    """The keys of a mapping, including those of merge keys."""
    own = set[str]()
    for key, _ in node.value:
        if not isinstance(key, yaml.ScalarNode) or key.value in own:
            reason = "the key occurs twice" if isinstance(key, yaml.ScalarNode) else "a key is not plain text"
            raise RunConfigError(f"{at(place, key)}: {reason}")
        own.add(key.value)
    if any(key.tag == "tag:yaml.org,2002:merge" for key, _ in node.value):
        node = yaml.MappingNode(node.tag, [*node.value], node.start_mark, node.end_mark)
        _LOADER.flatten_mapping(node)  # merged keys come first
    return {key.value: (key, value) for key, value in node.value}


def _scalar(node: yaml.Node) -> str | int | None:
    if not isinstance(node, yaml.ScalarNode) or node.style in ("|", ">"):
        return None
    if node.style in ("'", '"'):
        return str(node.value)
    tag = _LOADER.resolve(yaml.ScalarNode, node.value, (True, False))  # type: ignore[no-untyped-call]
    if tag != node.tag:  # an explicit tag
        return None
    number = _WHOLE.fullmatch(node.value)
    if number is not None:
        return int(number[1])
    return None if _UNCLEAR.fullmatch(node.value) else str(node.value)
