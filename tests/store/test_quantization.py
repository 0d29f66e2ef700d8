"""What a config's quantization_config says of each weight."""

import re

import pytest

from kvplan.core.weights import FLOAT16, Weight, WeightFormat, WeightKind
from kvplan.errors import InputError, UnsupportedModelError
from kvplan.store.architectures import ARCHITECTURES
from kvplan.store.keys import Keys
from kvplan.store.quantization import ModuleNames, read_quantization

Q = Weight(name="layers.10.self_attn.q_proj", rows=256, columns=512, kind=WeightKind.LINEAR)
EXPERT = Weight(name="layers.3.mlp.experts.0.up_proj", rows=256, columns=512, copies=8, kind=WeightKind.EXPERT)
HEAD = Weight(name="lm_head", rows=1000, columns=512, kind=WeightKind.HEAD)
NORM = Weight(name="layers.10.input_layernorm", rows=512)
GROUP = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32, "symmetric": True}


def read(quantization, **config):
    config = {"model_type": "llama", "quantization_config": quantization, **config}
    return read_quantization(config, Keys(config, "config.json", "llama", ARCHITECTURES["llama"]))


def nbytes(quantization, weight=Q, **config):
    return read(quantization, **config).format_of(weight).nbytes(weight)


def compressed(weights, **more):
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "config_groups": groups, **more}


ELEMENTS = 256 * 512


@pytest.mark.parametrize(
    ("quantization", "expected"),
    [
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, ELEMENTS + 2 * 4 * 4),
        ({"quant_method": "fp8"}, ELEMENTS + 8),
        ({"quant_method": "fbgemm_fp8"}, ELEMENTS + 256 * 4),
        ({"quant_method": "modelopt", "quant_algo": "FP8"}, ELEMENTS + 8),
        ({"quant_algo": "NVFP4"}, ELEMENTS // 2 + ELEMENTS // 16 + 8),
        (compressed({"num_bits": 4, "type": "float", "group_size": 16}), ELEMENTS // 2 + ELEMENTS // 16 + 8),
        (compressed({"num_bits": 4, "type": "float", "group_size": 32}), ELEMENTS // 2 + ELEMENTS // 32),
        (compressed({"num_bits": 8, "type": "int", "strategy": "channel"}), ELEMENTS + 256 * 4),
        (compressed(GROUP), ELEMENTS // 2 + ELEMENTS // 32 * 2),
        (compressed(GROUP | {"symmetric": False}), ELEMENTS // 2 + ELEMENTS // 32 * 5 // 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, ELEMENTS // 2 + ELEMENTS // 128 * 5 // 2),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "desc_act": True},
         ELEMENTS // 2 + ELEMENTS // 128 * 5 // 2 + 512 * 4),
        ({"quant_method": "gptq", "bits": 8, "group_size": -1}, ELEMENTS + 256 * 3),
        ({"quant_method": "awq", "bits": 4, "group_size": 128}, ELEMENTS // 2 + ELEMENTS // 128 * 5 // 2),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, ELEMENTS // 2 + ELEMENTS // 64 * 4),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_use_double_quant": True},
         ELEMENTS // 2 + ELEMENTS // 64),
        ({"quant_method": "bitsandbytes", "load_in_8bit": True}, ELEMENTS + 256 * 4),
    ],
)  # fmt: skip
def test_a_matrix_takes_its_codes_and_their_scales(quantization, expected):
    assert nbytes(quantization) == expected
    assert nbytes(quantization, NORM) == 2 * 512
    assert nbytes(quantization, EXPERT) == 8 * expected


def test_a_model_without_quantization_is_in_16_bits():
    assert nbytes(None) == 2 * ELEMENTS


def test_mxfp4_is_of_experts_alone():
    assert nbytes({"quant_method": "mxfp4"}) == 2 * ELEMENTS
    assert nbytes({"quant_method": "mxfp4"}, EXPERT) == 8 * (ELEMENTS // 2 + ELEMENTS // 32)


def test_experts_of_a_type_of_their_own_are_told_apart():
    fp8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    assert nbytes(fp8, EXPERT, expert_dtype="fp4") == 8 * (ELEMENTS // 2 + ELEMENTS // 32)
    assert nbytes(fp8, expert_dtype="fp4") == nbytes(fp8)
    with pytest.raises(UnsupportedModelError, match="expert_dtype says experts in 'int3'"):
        read(fp8, expert_dtype="int3")


def test_the_output_embedding_is_quantized_only_where_it_is_named():
    for plain in ({"quant_method": "fp8"}, compressed(GROUP), {"quant_method": "gptq", "bits": 4, "group_size": 128}):
        assert read(plain).format_of(HEAD) == FLOAT16
    assert read({"quant_method": "gptq", "bits": 4, "group_size": 128, "lm_head": True}).format_of(HEAD).bits == 4
    named = {"quant_method": "modelopt", "quantized_layers": {"lm_head": {"quant_algo": "NVFP4"}}}
    assert read(named).format_of(HEAD).bits == 4


@pytest.mark.parametrize(
    "pattern",
    ["model.layers.10.self_attn.q_proj", "model.language_model.layers.10.self_attn*", "layers.10", "q_proj",
     "model.layers.*.self_attn", "*.self_attn.*", "re:.*self_attn.*", "re:model\\.layers\\.10\\..*", "self_attn"],
)  # fmt: skip
def test_modules_are_named_in_every_spelling(pattern):
    assert Q.name in ModuleNames([pattern])
    assert EXPERT.name not in ModuleNames([pattern])


@pytest.mark.parametrize("pattern", ["model.layers.1", "layers.10.self_attn.q", "proj", "re:self_attn", "mlp.gate"])
def test_a_part_of_a_name_names_nothing(pattern):
    assert Q.name not in ModuleNames([pattern])
    assert EXPERT.name not in ModuleNames([pattern])


def test_layers_of_several_formats_each_have_their_own():
    mixed = {"quant_method": "modelopt", "quantized_layers": {
        "model.layers.3.mlp.experts": {"quant_algo": "NVFP4"},
        "model.layers.10.self_attn.q_proj": {"quant_algo": "FP8"},
    }}  # fmt: skip
    found = read(mixed)
    assert [found.format_of(one).bits for one in (Q, EXPERT)] == [8, 4]
    assert found.format_of(Weight(name="layers.9.mlp.up_proj", rows=1, kind=WeightKind.LINEAR)) == FLOAT16


@pytest.mark.parametrize(
    ("quantization", "error", "message"),
    [
        ({"quant_method": "quark"}, UnsupportedModelError, "weights stored by 'quark'"),
        ({"quant_method": "modelopt", "quant_algo": "W3"}, UnsupportedModelError, "weights stored by 'W3'"),
        (compressed({"num_bits": 3, "strategy": "group"}), UnsupportedModelError, "3 bits of int by group"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128, "dynamic": {"+:.*": {"bits": 8}}},
         UnsupportedModelError, "layers in several bits"),
        ({"quant_method": "fp8", "weight_block_size": [128]}, InputError, "it is two numbers of features"),
        ({"quant_method": "fp8", "modules_to_not_convert": 5}, InputError, "no list of modules"),
        ({"quant_method": "compressed-tensors"}, InputError, "config_groups is no object"),
        (compressed(GROUP, ignore=["re:("]), InputError, "no regular expression"),
        ({"quant_method": "bitsandbytes"}, InputError, "neither load_in_4bit nor load_in_8bit"),
        ({"quant_method": "gptq", "bits": "x", "group_size": 128}, InputError, "says bits 'x'"),
        ([1], InputError, "it is an object"),
    ],
)  # fmt: skip
def test_what_cannot_be_read_is_named(quantization, error, message):
    with pytest.raises(error, match=re.escape(message)):
        read(quantization)


def test_a_group_begun_has_a_scale():
    form = WeightFormat(bits=4, group_rows=1, group_columns=32, scale_bits=16)
    assert form.nbytes(Weight(name="w", rows=3, columns=33)) == -(-3 * 33 * 4 // 8) + 3 * 2 * 2
