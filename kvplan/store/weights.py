"""The weights that a config describes, where no weight files are: predicted from geometry and quantization."""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Final

from kvplan.core.specs import LayerSpec
from kvplan.core.weights import Weight, WeightCount, WeightKind, count_weights
from kvplan.errors import UnsupportedModelError
from kvplan.store.configs import Geometry, language_keys
from kvplan.store.keys import Keys
from kvplan.store.quantization import read_quantization
from kvplan.store.weight_hybrids import HYBRIDS
from kvplan.store.weight_mixtures import MIXTURES
from kvplan.store.weight_parts import Place, linear, other, vocabulary
from kvplan.store.weight_rules import DENSE, WeightRule
from kvplan.store.weight_towers import tower_weights

WEIGHTS = {**DENSE, **MIXTURES, **HYBRIDS}
"""The rule of each model type whose weights are known."""


_DRAFTING: Final = (
    "num_nextn_predict_layers",
    "mtp_num_hidden_layers",
    "num_mtp_modules",
    "mtp_num_layers",
    "num_mtp_layers",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class PredictedWeights:
    """What a config's weights come to.

    Attributes:
        model: All but those that draft.
        drafts: Those of the layers for multi-token prediction; None where the config has some that are not known.
    """

    model: WeightCount
    drafts: WeightCount | None


def predict_weights(config: Mapping[str, Any], geometry: Geometry, where: str) -> PredictedWeights:
    """Return what the weights come to that *config*, read from *where*, describes; *geometry* is what it says else.

    Floats take two bytes, as everywhere: norms, routers and states' parameters that some files keep in 32 bits too.

    Raises:
        UnsupportedModelError: The family's weights are not known, or how they are quantized.
        InputError: A key is missing or cannot be.
    """
    keys = language_keys(config, where)
    quantization = read_quantization(config, keys)
    beside = read_quantization(config, keys, language=False)
    stored = [(weight, quantization.format_of(weight)) for weight in model_weights(keys, geometry)]
    stored += [(weight, beside.format_of(weight)) for weight in tower_weights(config, keys)]
    drafts = draft_weights(keys, geometry)
    return PredictedWeights(
        model=count_weights(stored),
        drafts=None if drafts is None else count_weights([(one, quantization.format_of(one)) for one in drafts]),
    )


def model_weights(keys: Keys, geometry: Geometry) -> list[Weight]:
    """Return the weights of the language model that *keys* describe."""
    rule = _rule(keys)
    layers = geometry.layers[:: rule.per_block]
    outside = Place(keys=keys, index=0, name="", spec=layers[0], layers=len(layers))
    weights = list(rule.outer(outside))
    rows = outside.width(vocabulary)
    if not geometry.tied:
        weights += linear(outside, rule.head, rows, outside.width(rule.head_width), kind=WeightKind.HEAD)
    if outside.flag(rule.head_bias):
        weights.append(other(outside, rule.head, rows))
    weights += _layers(rule, outside, rule.stem, 0, layers)
    return weights


def draft_weights(keys: Keys, geometry: Geometry) -> list[Weight] | None:
    """Return the weights of the layers that draft, what they share with the model left out; None where unknown."""
    rule, specs = _rule(keys), geometry.draft_layers
    if not specs:
        return None if any(keys.get(key) for key in _DRAFTING) else []
    if rule.draft is None:
        return None
    count = len(geometry.layers)
    outside = Place(keys=keys, index=count, name="", spec=specs[0], layers=count)
    weights = list(rule.draft_outer(outside)) if rule.draft_outer else []
    first = 0 if rule.draft_stem else count
    weights += _layers(rule, outside, rule.draft_stem or rule.stem, first, specs, drafts=True)
    return weights


def _layers(
    rule: WeightRule, outside: Place, stem: str, first: int, specs: Sequence[LayerSpec], *, drafts: bool = False
) -> Iterator[Weight]:
    for number, spec in enumerate(specs):
        place = Place(
            keys=outside.keys, index=outside.index + number, name=f"{stem}.{first + number}.", spec=spec,
            layers=outside.layers,
        )  # fmt: skip
        yield from rule.layer(place)
        if drafts and rule.draft:
            yield from rule.draft(place)


def _rule(keys: Keys) -> WeightRule:
    if keys.type not in WEIGHTS:
        raise UnsupportedModelError(
            f"the weights of model_type {keys.type} are not known",
            where=keys.where,
            hint="name a model with its weights",
        )
    return WEIGHTS[keys.type]
