"""What a calibration holds, as the caches of a model take it."""

from collections.abc import Iterable

import torch

from kvplan.core.layouts import formats_of_layers
from kvplan.core.specs import ModelSpec
from kvplan.errors import InputError, UnsupportedFormatError
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.rotary import rotary_parameters
from kvplan.store.calibrations import Calibration, recipe_names
from kvplan_kernels.folding import attention_refusal
from kvplan_kernels.format import CacheFormat, Transform, UnsupportedError
from kvplan_kernels.layer_formats import ModelFormat
from kvplan_kernels.parameters import NOTHING_LEARNED, LayerParameters, check_learned, learned_names


def require_calibration(spec: ModelSpec, form: ModelFormat, calibration: Calibration | None) -> None:
    """Refuse a format that learns from the model and has not.

    Raises:
        InputError: With the command that mends it.
    """
    known = () if calibration is None else calibration.recipes
    missing = [recipe for recipe in recipe_names(form) if recipe not in known]
    if missing:
        what = "there is no calibration" if calibration is None else f"the calibration is without {missing[0]}"
        raise InputError(
            f"format {form} learns from the model first, and {what}",
            hint=f"run `kvplan calibrate {spec.name} -f {form}`",
        )


def require_plain_softmax(loaded: LoadedModel, form: ModelFormat) -> None:
    """Refuse a format that would change what some layer's attention computes.

    Raises:
        UnsupportedFormatError: It would, and why.
    """
    forms = formats_of_layers(loaded.spec, form)
    for layer, (attention, own) in enumerate(zip(loaded.layers, forms, strict=True)):
        capped, sinks = attention.options.softcap is not None, attention.sink_logits is not None
        if (reason := attention_refusal(own, softcap=capped, sink_logits=sinks)) is not None:
            raise UnsupportedFormatError(f"{loaded.spec.name}: {reason}, as that of layer {layer}")


def layer_parameters(
    loaded: LoadedModel, form: ModelFormat, calibration: Calibration | None
) -> tuple[LayerParameters, ...]:
    """Return what *form* has learned of every layer.

    Raises:
        InputError: It has not, or what the file holds does not fit the layer.
        UnsupportedFormatError: The format would change what the model computes.
    """
    require_calibration(loaded.spec, form, calibration)
    require_plain_softmax(loaded, form)
    found = []
    forms = formats_of_layers(loaded.spec, form)
    given = given_parameters(loaded, forms)
    for layer, (spec, own) in enumerate(zip(loaded.spec.layers, forms, strict=True)):
        arrays = {
            name: array
            for recipe in recipe_names(own)
            for name, array in (calibration.recipes[recipe][layer] if calibration is not None else {}).items()
        }
        parameters = LayerParameters({name: torch.from_numpy(array.copy()) for name, array in arrays.items()})
        try:
            for name in learned_names(own):
                check_learned(name, parameters[name], spec.kv_heads, spec.head_dim)
        except UnsupportedError as error:
            hint = f"learn again with `kvplan calibrate {loaded.spec.name} -f {form}`"
            raise InputError(f"calibration of layer {layer}: {error}", hint=hint) from error
        found.append(given[layer] | parameters)
    return tuple(found)


def given_parameters(loaded: LoadedModel, forms: Iterable[CacheFormat]) -> tuple[LayerParameters, ...]:
    """Return what caches of any of *forms* need to know of every layer, and no calibration learns.

    Raises:
        UnsupportedModelError: What a layer does to its keys by position cannot be undone.
    """
    if any(Transform.PREROPE in form.transforms for form in forms):
        return rotary_parameters(loaded)
    return (NOTHING_LEARNED,) * len(loaded.spec.layers)
