"""Models are loaded from this machine, from safetensors or GGUF, if they fit."""

import json
import os
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import psutil
import pytest
import torch
from gguf import GGUFWriter
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig, LlamaForCausalLM

from kvplan.errors import DoesNotFitError, InputError, KvplanError
from kvplan.runtime.loading import LoadedModel, load_model

HIDDEN, LAYERS, VOCABULARY = 64, 2, 300


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny model as the library saves it, without a tokenizer."""
    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=VOCABULARY, hidden_size=HIDDEN, intermediate_size=96, num_hidden_layers=LAYERS,
        num_attention_heads=2, num_key_value_heads=1, head_dim=32, max_position_embeddings=128,
        pad_token_id=0, bos_token_id=1, eos_token_id=2, tie_word_embeddings=False,
    )  # fmt: skip
    LlamaForCausalLM(config).to(torch.bfloat16).save_pretrained(tmp_path / "model")
    return tmp_path / "model"


@pytest.fixture
def gguf(tmp_path: Path, folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The same model as a GGUF file, and a cache folder of the test's own."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    path = tmp_path / "tiny.gguf"
    write_gguf(path, LlamaForCausalLM.from_pretrained(folder))
    return path


def write_gguf(path: Path, model: Any, leave_out: str = "") -> None:
    writer = GGUFWriter(path, "llama")
    writer.add_context_length(128)
    writer.add_embedding_length(HIDDEN)
    writer.add_block_count(LAYERS)
    writer.add_feed_forward_length(96)
    writer.add_head_count(2)
    writer.add_head_count_kv(1)
    writer.add_rope_dimension_count(32)
    writer.add_key_length(32)
    writer.add_value_length(32)
    writer.add_layer_norm_rms_eps(1e-6)
    writer.add_rope_freq_base(10000.0)
    writer.add_vocab_size(VOCABULARY)
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("smollm")
    writer.add_token_list(["t", "1", "t1", *(f"t{index}" for index in range(3, VOCABULARY))])
    writer.add_token_types([1] * VOCABULARY)
    writer.add_token_merges(["t 1"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    for name, parameter in model.state_dict().items():
        if name != leave_out:
            writer.add_tensor(gguf_name(name), gguf_order(name, parameter.float()).numpy())
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def gguf_name(name: str) -> str:
    parts = {
        "model.embed_tokens": "token_embd", "model.norm": "output_norm", "lm_head": "output", "model.layers": "blk",
        "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k", "self_attn.v_proj": "attn_v",
        "self_attn.o_proj": "attn_output", "post_attention_layernorm": "ffn_norm", "input_layernorm": "attn_norm",
        "mlp.gate_proj": "ffn_gate", "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
    }  # fmt: skip
    for ours, theirs in parts.items():
        name = name.replace(ours, theirs)
    return name


def gguf_order(name: str, tensor: torch.Tensor) -> torch.Tensor:
    """Interleaves the halves that rotary embedding pairs, as the format stores Q and K of this architecture."""
    if "q_proj" not in name and "k_proj" not in name:
        return tensor
    return tensor.view(-1, 2, 16, HIDDEN).transpose(1, 2).reshape(tensor.shape).contiguous()


def test_a_folder_loads_in_its_own_16_bit_type_and_without_tokenizer(folder: Path) -> None:
    loaded = load_model(str(folder))

    assert loaded.model.dtype is torch.bfloat16
    assert loaded.tokenizer is None
    assert loaded.spec.weight_bytes == sum(p.nbytes for p in loaded.model.parameters())
    assert len(loaded.layers) == LAYERS


def test_the_type_of_weights_can_be_asked_for(folder: Path) -> None:
    assert load_model(str(folder), dtype=torch.float32).model.dtype is torch.float32


def test_the_demo_model_loads_with_its_tokenizer() -> None:
    loaded = load_model("demo")

    assert loaded.tokenizer("def")["input_ids"]
    assert loaded.model.dtype is torch.bfloat16


def test_a_gguf_file_is_converted_once_and_kept(
    gguf: Path, folder: Path, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    first = load_model(str(gguf))
    (kept,) = (tmp_path / "cache" / "kvplan").iterdir()
    stamp = (kept / "model.safetensors").stat().st_mtime_ns
    second = load_model(str(gguf))
    expected = load_model(str(folder))

    assert (kept / "model.safetensors").stat().st_mtime_ns == stamp
    assert list((tmp_path / "cache" / "kvplan").iterdir()) == [kept]
    assert first.tokenizer is not None
    for loaded in (first, second):
        assert weights(loaded).keys() == weights(expected).keys()
        assert all(torch.equal(tensor, weights(expected)[name]) for name, tensor in weights(loaded).items())
    assert capfd.readouterr().err == ""


def weights(loaded: LoadedModel) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = loaded.model.state_dict()
    return found


def test_a_gguf_file_without_some_weight_is_refused(gguf: Path, folder: Path) -> None:
    model = LlamaForCausalLM.from_pretrained(folder)
    write_gguf(gguf, model, leave_out="model.layers.1.mlp.up_proj.weight")
    with pytest.raises(InputError, match=r"1 weights are not there: model.layers.1.mlp.up_proj.weight"):
        load_model(str(gguf))


def test_a_changed_gguf_file_is_converted_again(gguf: Path, tmp_path: Path) -> None:
    load_model(str(gguf))
    os.utime(gguf, ns=(1, 1))
    load_model(str(gguf))

    assert len(list((tmp_path / "cache" / "kvplan").iterdir())) == 2


def test_a_cache_folder_that_cannot_be_written_is_named(gguf: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(gguf))
    with pytest.raises(InputError, match="set XDG_CACHE_HOME elsewhere"):
        load_model(str(gguf))

    monkeypatch.setenv("XDG_CACHE_HOME", str(gguf.parent / "cache"))
    assert load_model(str(gguf), cache_conversion=False).spec.parameters
    assert not (gguf.parent / "cache").exists()


def test_pickled_weights_are_not_loaded(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    with pytest.raises(InputError, match="weights"):
        load_model(str(folder))


def test_a_bare_config_is_no_model_to_run(folder: Path) -> None:
    (folder / "model.safetensors").unlink()
    with pytest.raises(InputError, match="a config without weights"):
        load_model(str(folder))


@pytest.mark.parametrize("damage", ["truncated", "missing", "config", "incomplete"])
def test_damaged_files_are_errors_in_one_line(folder: Path, damage: str) -> None:
    weights_file = folder / "model.safetensors"
    if damage == "truncated":
        weights_file.write_bytes(weights_file.read_bytes()[:-100])
    elif damage == "missing":
        shutil.rmtree(folder)
    elif damage == "incomplete":
        tensors = load_file(weights_file)
        del tensors["model.layers.1.mlp.up_proj.weight"]
        save_file(tensors, weights_file, metadata={"format": "pt"})
    else:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        (folder / "config.json").write_text(json.dumps(config | {"num_key_value_heads": 2}), encoding="utf-8")
    with pytest.raises(KvplanError) as caught:
        load_model(str(folder))

    assert "\n" not in str(caught.value)


def test_code_that_comes_with_a_model_is_not_run(folder: Path) -> None:
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    config["auto_map"] = {"AutoModelForCausalLM": "evil.Model", "AutoConfig": "evil.Config"}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    (folder / "evil.py").write_text("raise SystemExit('ran')\n", encoding="utf-8")

    assert type(load_model(str(folder)).model) is LlamaForCausalLM


def test_a_model_beyond_the_memory_is_refused_before_it_is_read(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(psutil, "virtual_memory", lambda: SimpleNamespace(available=100_000))
    with pytest.raises(DoesNotFitError, match=r"loading .* needs about .* KiB, 97.7 KiB of memory is available"):
        load_model(str(folder))
