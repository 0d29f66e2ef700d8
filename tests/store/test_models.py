import json
import os
from hashlib import sha256
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import save_file

from kvplan.core.logical import logical_size
from kvplan.core.specs import Evidence, LayerKind
from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.models import find_model, load_model_spec
from kvplan_kernels.format import FloatType, parse

CONFIG = {
    "model_type": "llama", "architectures": ["LlamaForCausalLM"], "num_hidden_layers": 3, "num_attention_heads": 4,
    "num_key_value_heads": 2, "hidden_size": 64, "vocab_size": 5, "max_position_embeddings": 256, "dtype": "bfloat16",
}  # fmt: skip


@pytest.fixture
def folder(tmp_path):
    made = tmp_path / "model"
    made.mkdir()
    (made / "config.json").write_text(json.dumps(CONFIG))
    return made


def save(folder, tensors, name="model.safetensors"):
    save_file({key: np.zeros(shape, kind) for key, (shape, kind) in tensors.items()}, folder / name)


EMBEDDING = {"model.embed_tokens.weight": ((5, 64), np.float16)}
HEAD = {"lm_head.weight": ((5, 64), np.float16)}
NORM = {"model.norm.weight": ((64,), np.float32)}


def test_the_demo_model_is_found():
    spec = load_model_spec("demo")
    assert spec.name == "demo"
    assert spec.weight_bytes == 2 * spec.parameters
    assert {layer.head_dim for layer in spec.layers} == {64}


def test_weights_of_a_folder_are_counted_as_loaded(folder):
    save(folder, {**EMBEDDING, **HEAD, **NORM})
    spec = load_model_spec(folder)
    assert (spec.parameters, spec.weight_bytes) == (5 * 64 * 2 + 64, 2 * (5 * 64 * 2 + 64))
    assert spec.weight_evidence is Evidence.EXACT
    assert spec.name == str(folder)


def test_tied_embeddings_are_counted_once(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "tie_word_embeddings": True}))
    save(folder, {**EMBEDDING, **HEAD, **NORM})
    assert load_model_spec(folder).parameters == 5 * 64 + 64


def test_tables_that_are_no_parameters_are_left_out(folder):
    tables = {"a.rotary_emb.inv_freq": ((32,), np.float32), "h.0.attn.bias": ((1, 1, 8, 8), np.float32),
              "h.0.attn.masked_bias": ((1,), np.float32)}  # fmt: skip
    save(folder, {**NORM, **tables, "h.0.attn.c_attn.bias": ((4,), np.float32)})
    assert load_model_spec(folder).parameters == 64 + 4


def test_packed_weights_count_as_stored_and_say_nothing_of_parameters(folder):
    save(folder, {**NORM, "a.qweight": ((8, 8), np.int32)})
    spec = load_model_spec(folder)
    assert (spec.parameters, spec.weight_bytes) == (None, 2 * 64 + 4 * 64)


def test_shards_are_summed_and_a_missing_one_is_named(folder):
    files = {"model.norm.weight": "model-00001-of-00002.safetensors",
             "model.embed_tokens.weight": "model-00002-of-00002.safetensors"}  # fmt: skip
    save(folder, NORM, files["model.norm.weight"])
    with pytest.raises(InputError, match=r"1 shards and no model\.safetensors\.index\.json"):
        load_model_spec(folder)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))
    with pytest.raises(InputError, match=r"1 of 2 shards are not there: model-00002-of-00002\.safetensors"):
        load_model_spec(folder)
    save(folder, EMBEDDING, files["model.embed_tokens.weight"])
    assert load_model_spec(folder).parameters == 5 * 64 + 64


@pytest.mark.parametrize("names", [{}, {"t": "../other.safetensors"}, {"t": 5}, []])
def test_an_index_that_leads_nowhere_is_refused(folder, names):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(InputError, match="no weight_map"):
        load_model_spec(folder)


def test_a_bare_config_has_geometry_and_no_weights(folder):
    bare = folder / "other.json"
    bare.write_text(json.dumps(CONFIG))
    save(folder, NORM)
    for spec in (load_model_spec(bare), load_model_spec(str(bare))):
        assert (spec.weight_bytes, spec.parameters, len(spec.layers)) == (None, None, 3)
        assert spec.digest == sha256(bare.read_bytes()).hexdigest()


def test_the_weights_of_a_bare_config_are_predicted_or_it_says_why_not(folder):
    config = folder / "config.json"
    spec = load_model_spec(config)
    assert (spec.weight_bytes, spec.has_weights) == (None, False)
    assert spec.weights_unknown.startswith(f"{config}: has no intermediate_size")
    config.write_text(json.dumps({**CONFIG, "intermediate_size": 128}))
    spec = load_model_spec(folder)
    assert (spec.weight_bytes, spec.weight_evidence) == (2 * spec.parameters, Evidence.PREDICTED)
    assert (spec.has_weights, spec.weights_unknown, spec.draft_weight_bytes) == (False, "", 0)


def test_what_model_optimizer_says_beside_a_config_is_read(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "intermediate_size": 128}))
    plain = load_model_spec(folder)
    said = {"quantization": {"quant_algo": "FP8", "exclude_modules": ["lm_head"]}}
    (folder / "hf_quant_config.json").write_text(json.dumps(said))
    quantized = load_model_spec(folder)
    assert quantized.parameters == plain.parameters
    assert quantized.weight_bytes < plain.weight_bytes
    (folder / "hf_quant_config.json").write_text("{}")
    with pytest.raises(InputError, match=r"hf_quant_config\.json: has no quantization"):
        load_model_spec(folder)


def test_the_digest_changes_with_config_and_with_weights(folder):
    digests = {load_model_spec(folder).digest}
    save(folder, NORM)
    digests.add(load_model_spec(folder).digest)
    save(folder, {**NORM, **EMBEDDING})
    digests.add(load_model_spec(folder).digest)
    (folder / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": 4}))
    digests.add(load_model_spec(folder).digest)
    assert len(digests) == 4


def test_a_gguf_file_counts_two_bytes_for_every_parameter(write_gguf):
    path = write_gguf()
    spec = load_model_spec(path)
    assert (spec.parameters, spec.weight_bytes) == (5 * 64 + 64 * 64, 2 * (5 * 64 + 64 * 64))
    assert spec.float_type is FloatType.BF16
    assert [(layer.kind, layer.kv_heads, layer.head_dim) for layer in spec.layers] == [(LayerKind.FULL, 2, 16)] * 3
    assert (spec.query_heads, spec.hidden_size, spec.vocab_size, spec.context_tokens) == (4, 64, 5, 256)
    assert spec.architecture == "LlamaForCausalLM"
    assert find_model(path.parent) == path


GEMMA = {"block_count": 4, "context_length": 8192, "embedding_length": 64, "attention.head_count": 4,
         "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
         "attention.sliding_window": 512}  # fmt: skip


def test_a_gguf_file_has_the_windows_of_its_architecture(write_gguf):
    spec = load_model_spec(write_gguf(GEMMA, architecture="gemma2"))
    assert [layer.window_tokens for layer in spec.layers] == [512, None, 512, None]
    assert {layer.head_dim for layer in spec.layers} == {32}


def test_a_mixture_of_experts_in_a_llama_file_is_mixtral(write_gguf):
    keys = {**GEMMA, "expert_count": 8}
    del keys["attention.sliding_window"]
    assert load_model_spec(write_gguf(keys)).architecture == "MixtralForCausalLM"


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"attention.kv_lora_rank": 512}, "llama.attention.kv_lora_rank says latent attention"),
        ({"attention.head_count_kv": [2, 1, 2, 1]}, "llama.attention.head_count_kv says layers or heads of several"),
        ({"attention.value_length": 16}, "llama.attention.value_length says"),
        ({"attention.novelty": 1}, "llama.attention.novelty says something of attention that kvplan does not read"),
        ({"ssm.state_size": 16}, "llama.ssm.state_size says layers with a recurrent state"),
        ({"attention.shared_kv_layers": 2}, "llama.attention.shared_kv_layers says"),
    ],
)
def test_gguf_keys_that_shape_the_cache_otherwise_are_refused_by_name(write_gguf, change, says):
    keys = {key: value for key, value in GEMMA.items() if key != "attention.sliding_window"}
    with pytest.raises(UnsupportedModelError) as caught:
        load_model_spec(write_gguf({**keys, **change}))
    assert says in str(caught.value)


SHAPE = {"block_count": 4, "context_length": 8192, "embedding_length": 64, "attention.head_count": 4}
SSM = {"ssm.conv_kernel": 4, "ssm.inner_size": 128, "ssm.state_size": 16, "ssm.time_step_rank": 8}
FAMILIES = {
    "deepseek2": (
        {**SHAPE, "attention.head_count_kv": 1, "attention.q_lora_rank": 24, "attention.kv_lora_rank": 512,
         "rope.dimension_count": 64, "attention.key_length": 576, "attention.value_length": 512,
         "attention.key_length_mla": 192, "attention.value_length_mla": 128}, 4 * 576 * 2, 0),
    "qwen3next": (
        {**SHAPE, **SSM, "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
         "ssm.group_count": 4, "full_attention_interval": 4},
        2 * 2 * 32 * 2, 3 * ((2 * 4 * 16 + 128) * 3 * 2 + 128 * 16 * 4)),
    "gemma3n": (
        {**SHAPE, "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
         "attention.sliding_window": 512, "attention.sliding_window_pattern": [True, False, True, False],
         "attention.shared_kv_layers": 2}, 2 * 2 * 32 * 2, 2 * 2 * 32 * 2 * 512),
    "gemma4": (
        {**SHAPE, "attention.head_count_kv": [2, 1, 2, 1], "attention.key_length": 64, "attention.value_length": 64,
         "attention.key_length_swa": 32, "attention.value_length_swa": 32, "attention.sliding_window": 512,
         "attention.sliding_window_pattern": [True, False, True, False], "attention.shared_kv_layers": 2},
        2 * 1 * 64 * 2, 2 * 2 * 32 * 2 * 512),
    "llama4": (
        {**SHAPE, "context_length": 16384, "attention.head_count_kv": 2, "attention.key_length": 32,
         "attention.value_length": 32}, 2 * 2 * 32 * 2, 3 * 2 * 2 * 32 * 2 * 8192),
    "lfm2": (
        {**SHAPE, "attention.head_count_kv": [0, 2, 0, 2], "shortconv.l_cache": 3},
        2 * 2 * 2 * 16 * 2, 2 * 64 * 2 * 2),
    "granitehybrid": (
        {**SHAPE, **SSM, "attention.head_count_kv": [0, 0, 2, 0], "ssm.group_count": 2},
        2 * 2 * 16 * 2, 3 * ((128 + 2 * 2 * 16) * 3 * 2 + 128 * 16 * 4)),
    "falcon-h1": (
        {**SHAPE, **SSM, "attention.head_count_kv": 2, "attention.key_length": 32, "attention.value_length": 32,
         "ssm.group_count": 2}, 4 * 2 * 2 * 32 * 2, 4 * ((128 + 2 * 2 * 16) * 3 * 2 + 128 * 16 * 4)),
    "jamba": (
        {**SHAPE, **SSM, "attention.head_count_kv": [0, 2, 0, 0]},
        2 * 2 * 16 * 2, 3 * (128 * 3 * 2 + 128 * 16 * 4)),
    "nemotron_h": (
        {**SHAPE, **SSM, "attention.head_count_kv": [0, 0, 2, 0], "feed_forward_length": [0, 96, 0, 0],
         "attention.key_length": 32, "attention.value_length": 32, "ssm.group_count": 2},
        2 * 2 * 32 * 2, 2 * ((128 + 2 * 2 * 16) * 3 * 2 + 128 * 16 * 4)),
    "glm-dsa": (
        {**SHAPE, "attention.head_count_kv": 1, "attention.kv_lora_rank": 512, "rope.dimension_count": 64,
         "attention.key_length": 576, "attention.value_length": 512, "attention.indexer.head_count": 32,
         "attention.indexer.key_length": 128, "attention.indexer.top_k": 2048, "nextn_predict_layers": 1},
        3 * (576 + 128) * 2, 0),
    "mamba": ({**SHAPE, **SSM, "attention.head_count": 0}, 0, 4 * (128 * 3 * 2 + 128 * 16 * 4)),
    "mamba2": (
        {**SHAPE, **SSM, "attention.head_count": 0, "ssm.group_count": 2},
        0, 4 * ((128 + 2 * 2 * 16) * 3 * 2 + 128 * 16 * 4)),
}  # fmt: skip


@pytest.mark.parametrize("architecture", sorted(FAMILIES))
def test_a_gguf_file_of_another_kind_of_cache_is_sized_and_not_run(write_gguf, architecture):
    keys, growth, fixed = FAMILIES[architecture]
    path = write_gguf(keys, architecture=architecture)
    size = logical_size(load_model_spec(path, runtime=False), parse("bf16"), 8192)
    assert (size.growth_bytes_per_token, size.fixed_bytes_per_sequence) == (growth, fixed)
    with pytest.raises(UnsupportedModelError, match=r"runtime does not hold this cache: .*; `kvplan size` counts"):
        load_model_spec(path)


@pytest.mark.parametrize(
    ("architecture", "change", "error", "says"),
    [
        ("mamba2", {"ssm.inner_size": 129}, InputError, "ssm.inner_size 129 is no multiple of mamba2.ssm.time_step_"),
        ("qwen3next", {"nextn_predict_layers": 1}, UnsupportedModelError, "multi-token prediction among the others"),
        ("deepseek2", {"attention.indexer.top_k": 8}, UnsupportedModelError, "indexer.top_k says"),
        ("lfm2", {"attention.head_count_kv": [0, 2, 1, 0]}, InputError, "layers of 1 and of 2 KV heads"),
        ("lfm2", {"attention.head_count_kv": [0, 2]}, InputError, "must be a list of 4 numbers, one a layer"),
        ("lfm2", {"shortconv.l_cache": 0}, InputError, "lfm2.shortconv.l_cache is '0'"),
        ("gemma4", {"attention.head_count_kv": [2, 1, 1, 1]}, InputError, "layers of one kind with several numbers"),
        ("gemma4", {"attention.value_length_swa": 8}, UnsupportedModelError, "value_length_swa says layers or heads"),
        ("jamba", {"ssm.inner_size": 100}, InputError, "ssm.inner_size 100 is no multiple of jamba.embedding_length"),
        ("glm-dsa", {"nextn_predict_layers": 9}, InputError, "nextn_predict_layers is '9' of '4' layers"),
    ],
)
def test_a_family_in_a_gguf_file_is_read_whole_or_refused(write_gguf, architecture, change, error, says):
    with pytest.raises(error) as caught:
        load_model_spec(write_gguf({**FAMILIES[architecture][0], **change}, architecture=architecture), runtime=False)
    assert says in str(caught.value)


def test_heads_listed_by_layer_are_read_where_they_agree(write_gguf):
    keys = {key: value for key, value in GEMMA.items() if key != "attention.sliding_window"}
    spec = load_model_spec(write_gguf({**keys, "attention.head_count_kv": [2, 2, 2, 2]}))
    assert {layer.kv_heads for layer in spec.layers} == {2}


def test_an_unknown_gguf_architecture_is_unsupported(write_gguf):
    with pytest.raises(UnsupportedModelError, match="architecture 'rwkv9' is not known"):
        load_model_spec(write_gguf(architecture="rwkv9"))


def test_a_gguf_file_that_is_a_part_or_has_no_weights_is_refused(write_gguf):
    with pytest.raises(InputError, match="one part of a model"):
        load_model_spec(write_gguf(extra={"split.count": 3}))
    with pytest.raises(InputError, match="holds no weights"):
        load_model_spec(write_gguf(tensors=False))


@pytest.fixture
def hub(tmp_path, monkeypatch):
    """A hub cache with a function that puts a model's revision into it."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE", "XDG_CACHE_HOME"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "hf"))

    def put(revision, *, main=False, layers=3):
        model = tmp_path / "hf" / "hub" / "models--org--name"
        (model / "snapshots" / revision).mkdir(parents=True)
        (model / "snapshots" / revision / "config.json").write_text(json.dumps({**CONFIG, "num_hidden_layers": layers}))
        if main:
            (model / "refs").mkdir()
            (model / "refs" / "main").write_text(revision)

    return put


def test_an_id_is_looked_up_in_the_local_cache(hub):
    hub("abc", layers=5)
    assert len(load_model_spec("org/name").layers) == 5
    assert load_model_spec("org/name").name == "org/name"


def test_of_several_revisions_main_is_taken(hub):
    hub("abc", layers=5)
    hub("def", layers=6, main=True)
    assert len(load_model_spec("org/name").layers) == 6


def test_several_revisions_without_main_are_refused(hub):
    hub("abc")
    hub("def")
    with pytest.raises(InputError, match="2 revisions in the cache and none is main; name the folder of one"):
        load_model_spec("org/name")


def test_an_id_that_is_not_in_the_cache_says_how_to_get_it(hub):
    with pytest.raises(InputError, match=r"not in the Hugging Face cache .*; fetch it with `hf download org/other`"):
        load_model_spec("org/other")


def test_a_path_wins_over_an_id(hub, folder, monkeypatch):
    hub("abc", layers=9)
    monkeypatch.chdir(folder.parent)
    Path("org").mkdir()
    folder.rename("org/name")
    assert len(load_model_spec("org/name").layers) == 3


@pytest.mark.parametrize(
    ("name", "says"),
    [
        ("", "'' names no model; demo is one to try"),
        (".", "names no model"),
        ("..", "holds no config.json"),
        ("a b", "a b: no such file or folder"),
        ("missing.gguf", "missing.gguf: no such file or folder"),
        ("./missing", "no such file or folder"),
        ("a/b/c", "no such file or folder"),
        ("x\0y", r"'x\x00y' names no model"),
        ("x" * 5000, "neither a path nor an id"),
        ("notes.txt", "is no model: a GGUF file or a config.json is one"),
        ("w.safetensors", "give the folder with its config.json"),
        ("empty.json", "empty.json: is empty"),
        ("list.json", "is JSON but no object"),
        ("broken.json", "broken.json:3: is no JSON"),
        ("latin.json", "latin.json:1: is no JSON: a byte is not UTF-8"),
        ("deep.json", "nested too deep"),
        ("digits.json", "too many digits"),
        ("two", "holds 2 GGUF files; name one"),
    ],
)  # fmt: skip
def test_what_is_no_model_is_refused_in_one_line(hub, tmp_path, monkeypatch, name, says):
    monkeypatch.chdir(tmp_path)
    files = {
        "notes.txt": b"x", "w.safetensors": b"x", "empty.json": b"", "list.json": b"[]", "latin.json": b'{"a": "\xe9"}',
        "broken.json": b'{"a": 1,\n"b": 2,\n"c" 3}', "deep.json": b"[" * 10**5, "digits.json": b"9" * 5000,
        "two/a.gguf": b"x", "two/b.gguf": b"x",
    }  # fmt: skip
    for file, data in files.items():
        Path(file).parent.mkdir(exist_ok=True)
        Path(file).write_bytes(data)
    with pytest.raises(InputError) as caught:
        load_model_spec(name)
    assert says in str(caught.value)
    assert "\n" not in str(caught.value)


def test_infinity_in_a_config_is_taken(folder):
    (folder / "config.json").write_text(json.dumps({**CONFIG, "time_step_limit": [0.0, float("inf")]}))
    assert len(load_model_spec(folder).layers) == 3


def test_neither_torch_nor_numpy_is_needed(folder):
    import subprocess
    import sys

    code = (
        "import sys; from kvplan.store import budgets, journal, models, profiles, workloads\n"
        "models.load_model_spec(sys.argv[1]); models.load_model_spec('demo')\n"
        "print([name for name in ('torch', 'numpy', 'transformers', 'gguf', 'yaml') if name in sys.modules])"
    )
    command = [sys.executable, "-c", code, str(folder)]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=os.environ)
    assert run.stdout == "[]\n"
