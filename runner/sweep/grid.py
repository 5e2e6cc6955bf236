"""From the words of a sweep to its points, and to the config of each without composing each."""

from __future__ import annotations

import copy
import itertools
from collections.abc import Iterable, Mapping
from pathlib import Path

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Glob
from omegaconf import DictConfig, OmegaConf

from common import paths
from common.errors import UserError
from runner.config import overrides, schema
from runner.config.compose import compose_tree, to_config
from runner.config.hydra_errors import translating_hydra_errors
from runner.engine.config import Config

GridPoint = dict[str, str]  # swept word -> value, as Hydra writes it: 1e-4 and 0.0001 are one point


def split_swept(typed: list[str], conf: Path = paths.CONF_DIR) -> tuple[list[str], dict[str, list[str]], bool]:
    """(words all jobs share, {swept word: values}, whether the values can be counted: an interval is a sampler's business)."""
    with translating_hydra_errors(typed):
        parsed = OverridesParser.create().parse_overrides(typed)
    shared, swept, counted = [], {}, True
    for word, override in zip(typed, parsed, strict=True):
        if not override.is_sweep_override():
            shared.append(word)
        elif isinstance(chosen := override.value(), Glob):
            swept[override.key_or_group] = chosen.filter(schema.config_groups(conf).get(override.key_or_group, []))
            if not swept[override.key_or_group]:
                raise UserError("no option of a group has such a name", word, f"write out the values: {override.key_or_group}=<value>,<value>")
        elif override.is_discrete_sweep():
            key = override.get_key_element()
            swept[key] = canonicalize(key, [str(value) for value in override.sweep_string_iterator()])
        else:
            swept[override.get_key_element()], counted = [override.get_value_string()], False
    return shared, swept, counted


def split_override(word: str) -> tuple[str, str]:
    """One value as `split` gives several."""
    key, equals, _ = word.partition("=")
    with translating_hydra_errors([word]):
        override = OverridesParser.create().parse_override(word)
    return key, override.get_value_element_as_str() if equals else ""


def canonicalize(word: str, values: Iterable[str], known: Iterable[str] = ()) -> list[str]:
    """The values, each in the way of writing it that is `known` or came first; one may stand there twice, in pairs with two others."""
    written: dict[object, str] = {}
    for value in known:
        written.setdefault(overrides.canonical_value(word, value), value)
    return [written.setdefault(overrides.canonical_value(word, value), value) for value in values]


def cartesian_points(swept: Mapping[str, list[str]], zipped: Iterable[str] = ()) -> list[GridPoint]:
    """Every combination; the words of `zipped` go together, first with first, second with second."""
    together = list(zipped)
    if strange := next((word for word in together if word not in swept), None):
        raise UserError("a word that goes in pairs has several values", f"sweep.zip: {strange}", f"give them: {strange}=<value>,<value>")
    if len({len(swept[word]) for word in together}) > 1:
        counts = " ".join(f"{word}={','.join(swept[word])}" for word in together)
        raise UserError("words that go in pairs have the same number of values", counts, "give each the same number, or leave out sweep.zip")
    sets = [[{word: value} for value in values] for word, values in swept.items() if word not in together]
    if together:
        sets.append([dict(zip(together, values, strict=True)) for values in zip(*(swept[word] for word in together), strict=True)])
    found = [{word: value for part in parts for word, value in part.items()} for parts in itertools.product(*sets)]
    return [point for place, point in enumerate(found) if point not in found[:place]]


class PointComposer:
    """Configs of the points of one sweep. Hydra composes once for each choice of groups; plain values are put on top."""

    def __init__(self, shared: list[str], conf: Path = paths.CONF_DIR) -> None:
        self.shared, self.conf = shared, conf
        self._trees: dict[tuple[str, ...], DictConfig] = {}

    @property
    def choices(self) -> list[tuple[str, ...]]:
        """The choices of groups met so far."""
        return list(self._trees)

    def config(self, point: Mapping[str, str]) -> Config:
        """What the job of `point` would train. Raises ValueError(what, where, fix)."""
        return to_config(self.of_the_job(point))

    def of_the_job(self, point: Mapping[str, str]) -> DictConfig:
        """The tree without what is Hydra's."""
        tree = self.tree(point)
        return OmegaConf.masked_copy(tree, [str(key) for key in tree if key != "hydra"])

    def tree(self, point: Mapping[str, str]) -> DictConfig:
        words = [f"{key}={value}" for key, value in point.items()]
        groups = tuple(word for word in words if word.partition("=")[0] in schema.config_groups(self.conf))
        values = [overrides.normalize_int(word) for word in words if word not in groups]
        overrides.check_overrides(values, self.conf)
        if groups not in self._trees:
            self._trees[groups] = compose_tree([*self.shared, *groups], self.conf)
        tree = copy.deepcopy(self._trees[groups])
        with translating_hydra_errors([*self.shared, *words]):
            for override in OverridesParser.create().parse_overrides(values):
                OmegaConf.update(tree, override.key_or_group, override.value(), merge=True)
        return tree


def merge_overrides(words: list[str], more: Iterable[str]) -> list[str]:
    """`words` with those of `more` in place of what they say of the same keys."""
    more = list(more)
    keys = {word.partition("=")[0] for word in more}
    return [*(word for word in words if word.partition("=")[0] not in keys), *more]
