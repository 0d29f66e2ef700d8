"""A model as the user names it to what kvplan needs to know of it; nothing is loaded and nothing fetched."""

import os
import re
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

from kvplan.core.specs import Evidence, ModelSpec
from kvplan.errors import InputError, MissingPartError, UnsupportedModelError
from kvplan.store.configs import Geometry, read_geometry
from kvplan.store.files import JSON_BYTES_MAX, decode_object, read_file
from kvplan.store.safetensors import SafetensorsHeader, StoredTensor, read_safetensors_header
from kvplan.store.stated_cache import read_stated_cache
from kvplan_kernels.format import FloatType

DEMO: Final = "demo"
FLOAT_BYTES: Final = 2
"""Models run in 16 bits here, whatever their floats were saved in."""

_HUB_ID: Final = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*(?:/[A-Za-z0-9][A-Za-z0-9._-]*)?")
_FLOAT_DTYPES: Final = ("F64", "F32", "F16", "BF16")
_EIGHT_BIT_DTYPES: Final = ("F8_E4M3", "F8_E5M2")
_NO_PARAMETER: Final = re.compile(
    r"rope_freqs\.weight|rope_factors_\w+\.weight|.*(?:inv_freq|position_ids|masked_bias)"
)
"""Tables that files carry and the model computes for itself."""


def load_model_spec(name: str | Path, *, runtime: bool = True, weights: bool = True) -> ModelSpec:
    """Return what kvplan needs to know of the model *name*.

    Weights are counted as loaded: two bytes for every floating-point parameter, whatever it was saved in, tied
    embeddings once; tensors of other types as they are stored. For a GGUF file, whose weights the runtime dequantizes
    to bf16, that is two bytes for every element of its tensors. The shapes are the file's, so the count is exact.
    Without files they are predicted from the config, so far as it tells them.

    Args:
        name: `demo`, a folder with config.json, a GGUF file, a config.json, or the id of a model in the local Hugging
            Face cache.
        runtime: Whether to refuse a model that kvplan's runtime does not hold; its size can be counted all the same.
        weights: Whether to predict the weights of a config without files; without it they stay unknown.

    Raises:
        InputError: There is no such model here, or its files cannot be read.
        UnsupportedModelError: Its cache is of a kind that is not counted, or that the runtime does not hold.
    """
    path = find_model(name)
    if path.suffix.lower() == ".gguf":
        spec = _from_gguf(str(name), path)
    else:
        spec = _from_config(str(name), path / "config.json" if path.is_dir() else path, predicted=weights)
    refusal = next((layer.runtime_refusal for layer in spec.layers if layer.runtime_refusal), "")
    if runtime and refusal:
        hint = "`kvplan size` counts its logical bytes"
        raise UnsupportedModelError(f"kvplan's runtime does not hold this cache: {refusal}", where=str(name), hint=hint)
    return spec


def find_model(name: str | Path) -> Path:
    """Return the folder, GGUF file or config.json that *name* stands for; raises as `load_model_spec` does."""
    if str(name) == DEMO:
        return _demo_folder()
    if not str(name).isprintable() or str(name) in ("", "."):
        raise InputError(f"{str(name)[:200]!r} names no model", hint=f"{DEMO} is one to try")
    path = Path(name).expanduser() if str(name).startswith("~") else Path(name)
    try:
        folder, exists = path.is_dir(), path.exists()
    except (OSError, ValueError) as error:
        raise InputError(f"model {str(name)[:200]!r} is neither a path nor an id") from error
    if folder:
        return _in_folder(path)
    if exists:
        return _file(path)
    if _HUB_ID.fullmatch(str(name)) and path.suffix not in (".gguf", ".json"):
        return _in_hub_cache(str(name))
    raise InputError("no such file or folder", where=str(name))


def _demo_folder() -> Path:
    try:
        from kvplan_profiles import demo_model_path
    except ImportError as error:
        raise MissingPartError("the demo model is not installed", hint="reinstall kvplan") from error
    return demo_model_path()


def _file(path: Path) -> Path:
    if path.suffix.lower() == ".gguf" or path.suffix == ".json":
        return path
    hint = "give the folder with its config.json" if path.suffix == ".safetensors" else f"{DEMO} is one to try"
    raise InputError("is no model: a GGUF file or a config.json is one", where=str(path), hint=hint)


def _in_folder(folder: Path) -> Path:
    if (folder / "config.json").is_file():
        return folder
    found = sorted(folder.glob("*.gguf"))
    if len(found) == 1:
        return found[0]
    if found:
        raise InputError(f"holds {len(found)} GGUF files", where=str(folder), hint=f"name one, as {found[0]}")
    raise InputError("holds no config.json and no GGUF file", where=str(folder))


def _hub_cache() -> Path:
    """Return where Hugging Face's libraries keep what they fetched (huggingface_hub, "Environment variables")."""
    cache = os.environ.get("HF_HUB_CACHE") or os.environ.get("HUGGINGFACE_HUB_CACHE")
    if cache:
        return Path(cache).expanduser()
    home = os.environ.get("HF_HOME")
    if home:
        return Path(home).expanduser() / "hub"
    return Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache").expanduser() / "huggingface" / "hub"


def _in_hub_cache(name: str) -> Path:
    folder = _hub_cache() / ("models--" + name.replace("/", "--"))
    snapshots = [path.parent for path in sorted(folder.glob("snapshots/*/config.json"))]
    main = folder / "refs" / "main"
    revision = read_file(main, limit_bytes=4096).decode("ascii", "replace").strip() if main.is_file() else ""
    chosen = [path for path in snapshots if path.name == revision] or snapshots
    if not chosen:
        message = f"model {name!r} is no file here and not in the Hugging Face cache {_hub_cache()}"
        raise InputError(message, hint=f"fetch it with `hf download {name}`")
    if len(chosen) > 1:
        message = f"model {name!r} has {len(chosen)} revisions in the cache and none is main"
        raise InputError(message, hint=f"name the folder of one, as {chosen[0]}")
    return chosen[0]


def _spec(name: str, geometry: Geometry, digest: str) -> ModelSpec:
    return ModelSpec(
        name=name,
        digest=digest,
        architecture=geometry.architecture,
        layers=geometry.layers,
        query_heads=geometry.query_heads,
        hidden_size=geometry.hidden_size,
        vocab_size=geometry.vocab_size,
        context_tokens=geometry.context_tokens,
        weight_evidence=Evidence.EXACT,
        float_type=geometry.float_type,
        draft_layers=geometry.draft_layers,
    )


def _from_config(name: str, path: Path, *, predicted: bool) -> ModelSpec:
    data = read_file(path, limit_bytes=JSON_BYTES_MAX)
    config = decode_object(path, data)
    geometry = read_geometry(config, str(path))
    headers = (
        [read_safetensors_header(file) for file in _weight_files(path.parent)] if path.name == "config.json" else []
    )
    digest = sha256(data)
    for header in headers:
        digest.update(header.header_bytes)
    stated = read_stated_cache({**_beside(path), **config}, str(path))
    spec = replace(_spec(name, geometry, digest.hexdigest()), stated_cache=stated)
    if not headers and not predicted:
        return replace(spec, weights_unknown="they were not asked for")
    if not headers:
        return _with_predicted(spec, {**_beside(path), **config}, geometry, str(path))
    tensors = _loaded(headers, tied=geometry.tied)
    return replace(spec, weight_bytes=sum(map(_loaded_bytes, tensors)), parameters=_parameters(tensors))


def _beside(path: Path) -> dict[str, Any]:
    """Return what Model Optimizer says in a file of its own of how it quantized the weights of a config.json."""
    file = path.parent / "hf_quant_config.json"
    if path.name != "config.json" or not file.is_file():
        return {}
    said = decode_object(file, read_file(file, limit_bytes=JSON_BYTES_MAX)).get("quantization")
    if not isinstance(said, dict):
        raise InputError("has no quantization", where=str(file))
    return {"quantization_config": {"quant_method": "modelopt", **said}}


def _with_predicted(spec: ModelSpec, config: dict[str, Any], geometry: Geometry, where: str) -> ModelSpec:
    """Return *spec* with the weights that the config describes, or with why it does not say what they take."""
    from kvplan.store.weights import predict_weights

    try:
        weights = predict_weights(config, geometry, where)
    except (InputError, UnsupportedModelError) as error:
        return replace(spec, weights_unknown=str(error))
    return replace(
        spec,
        weight_bytes=weights.model.nbytes,
        weight_evidence=Evidence.PREDICTED,
        parameters=weights.model.parameters,
        draft_weight_bytes=None if weights.drafts is None else weights.drafts.nbytes,
    )


def _weight_files(folder: Path) -> list[Path]:
    """Return the safetensors files that make up the model in *folder*: one, or those that the index names."""
    single, index = folder / "model.safetensors", folder / "model.safetensors.index.json"
    if single.is_file():
        return [single]
    if not index.is_file():
        shards = sorted(folder.glob("model-*-of-*.safetensors"))
        if shards:
            hint = "fetch the folder whole"
            raise InputError(f"has {len(shards)} shards and no {index.name}", where=str(folder), hint=hint)
        return []
    shard_of: Any = decode_object(index, read_file(index, limit_bytes=JSON_BYTES_MAX)).get("weight_map")
    if not isinstance(shard_of, dict) or not shard_of or not all(_is_file_name(name) for name in shard_of.values()):
        raise InputError("has no weight_map from tensors to files", where=str(index))
    files = [folder / name for name in sorted(set(shard_of.values()))]
    missing = [file.name for file in files if not file.is_file()]
    if missing:
        hint = "fetch the folder whole"
        raise InputError(
            f"{len(missing)} of {len(files)} shards are not there: {missing[0]}", where=str(folder), hint=hint
        )
    return files


def _is_file_name(name: Any) -> bool:
    return isinstance(name, str) and name == Path(name).name and "\0" not in name


def _loaded(headers: list[SafetensorsHeader], *, tied: bool) -> list[StoredTensor]:
    """Return the tensors that become parameters, each once."""
    tensors = {tensor.name: tensor for header in headers for tensor in header.tensors}
    if tied and any("embed" in name or "wte" in name for name in tensors):
        tensors.pop("lm_head.weight", None)
    return [tensor for tensor in tensors.values() if not _is_mask(tensor) and not _NO_PARAMETER.fullmatch(tensor.name)]


def _is_mask(tensor: StoredTensor) -> bool:
    """Whether *tensor* is the triangular mask that old GPT-2 files carry as a four-dimensional bias."""
    return tensor.name.endswith(".attn.bias") and len(tensor.shape) == 4


def _loaded_bytes(tensor: StoredTensor) -> int:
    return tensor.elements * FLOAT_BYTES if tensor.dtype in _FLOAT_DTYPES else tensor.nbytes


def _parameters(tensors: list[StoredTensor]) -> int | None:
    """Return the number of parameters, None where some are packed several to an element."""
    if any(tensor.dtype not in _FLOAT_DTYPES + _EIGHT_BIT_DTYPES for tensor in tensors):
        return None
    return sum(tensor.elements for tensor in tensors)


def _from_gguf(name: str, path: Path) -> ModelSpec:
    from kvplan.store.gguf import read_gguf_header
    from kvplan.store.gguf_configs import gguf_config

    header = read_gguf_header(path)
    geometry = read_geometry(gguf_config(path, header), str(path))
    parameters = sum(tensor.elements for tensor in header.tensors if not _NO_PARAMETER.fullmatch(tensor.name))
    if not parameters:
        raise InputError("holds no weights", where=str(path), hint="give the GGUF file of the model itself")
    spec = _spec(name, geometry, sha256(header.header_bytes).hexdigest())
    return replace(
        spec,
        parameters=parameters,
        weight_bytes=parameters * FLOAT_BYTES,
        stored_weight_bytes=sum(tensor.nbytes for tensor in header.tensors),
        float_type=FloatType.BF16,
    )
