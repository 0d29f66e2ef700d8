"""The demo model before training: a Llama whose weights already look a token up and copy what followed it.

The circuit is an induction head (Olsson et al. 2022, "In-context Learning and Induction Heads") written by hand,
because it did not emerge from random weights within seven million tokens. The residual stream has two halves: the
first holds the token itself, the second receives the token before it. Layer 0 attends one position back and moves
that token into the second half; layer 1 matches the current token against the second halves and copies the token
that follows the match.
"""

import math
from dataclasses import dataclass

import torch
from transformers import LlamaConfig, LlamaForCausalLM

WIDTH = 128
HALF = WIDTH // 2
LAYERS = 4
FEED_FORWARD = 384
QUERY_HEADS = 4
KV_HEADS = 2
HEAD_SIZE = 64
POSITIONS = 4096
ROPE_BASE = 1e6


@dataclass(frozen=True)
class Strengths:
    """How strongly the written weights speak over the untrained rest; set by trial on retrieval."""

    position_peak: float = 9.0
    position_pairs: int = 8
    match: float = 12.0
    copied: float = 4.0
    noise: float = 0.02
    longest_match: int = 2048


def build_model(vocabulary: int, strengths: Strengths, seed: int) -> LlamaForCausalLM:
    """Make the model in float32; with `noise` zero it has the circuit and nothing else."""
    torch.manual_seed(seed)
    model = LlamaForCausalLM(model_config(vocabulary))
    generator = torch.Generator().manual_seed(seed + 1)
    with torch.no_grad():
        _quieten(model, strengths.noise)
        _write_embeddings(model, generator)
        _write_previous_token_head(model, strengths)
        _write_match_head(model, strengths, generator)
    return model


def model_config(vocabulary: int) -> LlamaConfig:
    """Describe the architecture: what a Hugging Face Llama needs to know, and nothing kvplan adds."""
    return LlamaConfig(
        vocab_size=vocabulary,
        hidden_size=WIDTH,
        intermediate_size=FEED_FORWARD,
        num_hidden_layers=LAYERS,
        num_attention_heads=QUERY_HEADS,
        num_key_value_heads=KV_HEADS,
        head_dim=HEAD_SIZE,
        max_position_embeddings=POSITIONS,
        rope_parameters={"rope_type": "default", "rope_theta": ROPE_BASE},
        attention_bias=True,
        tie_word_embeddings=True,
        rms_norm_eps=1e-5,
        bos_token_id=0,
        eos_token_id=0,
        pad_token_id=0,
    )


def _quieten(model: LlamaForCausalLM, noise: float) -> None:
    """Leave weights that read the stream random and small, and clear those that write to it."""
    for name, weight in model.named_parameters():
        if "norm" in name:
            continue
        reads = any(part in name for part in ("q_proj.weight", "k_proj.weight", "v_proj.weight", "gate", "up_proj"))
        writes = "o_proj.weight" in name or "down_proj" in name
        scale = noise if reads else noise / math.sqrt(2 * LAYERS) if writes else 0.0
        weight.copy_(torch.randn_like(weight) * scale)


def _write_embeddings(model: LlamaForCausalLM, generator: torch.Generator) -> None:
    """Give each token a random unit vector in the first half; embeddings are tied, so it is read out there too."""
    embedding = model.model.embed_tokens.weight
    directions = torch.randn(embedding.shape[0], HALF, generator=generator)
    embedding[:, :HALF] += directions / directions.norm(dim=1, keepdim=True)


def _angles_per_token() -> torch.Tensor:
    """Rotation of each of the 32 RoPE pairs from one position to the next, in radians."""
    return ROPE_BASE ** -(torch.arange(0, HEAD_SIZE, 2).float() / HEAD_SIZE)


def _write_previous_token_head(model: LlamaForCausalLM, strengths: Strengths) -> None:
    """Biases alone make query head 0 of layer 0 peak one position back; its values fill the second half."""
    attention = model.model.layers[0].self_attn
    pairs, peak = strengths.position_pairs, strengths.position_peak
    angles = _angles_per_token()[:pairs]
    second = HEAD_SIZE // 2
    attention.q_proj.bias[:pairs] += peak * torch.cos(angles)
    attention.q_proj.bias[second : second + pairs] -= peak * torch.sin(angles)
    attention.k_proj.bias[:pairs] += peak
    # The norm before attention scales a unit vector to length sqrt(WIDTH); the values undo that.
    attention.v_proj.weight[:HALF, :HALF] += torch.eye(HALF) / math.sqrt(WIDTH)
    attention.o_proj.weight[HALF:, :HALF] += torch.eye(HALF)


def _write_match_head(model: LlamaForCausalLM, strengths: Strengths, generator: torch.Generator) -> None:
    """Query head 0 of layer 1 compares the token with each position's previous token and copies what it finds.

    It compares on the RoPE pairs that turn by less than one radian over `longest_match` tokens, so that the match
    hardly depends on how far back the key lies.
    """
    attention = model.model.layers[1].self_attn
    slow = (_angles_per_token() * strengths.longest_match < 1.0).nonzero().flatten()
    rows = torch.cat([slow, slow + HEAD_SIZE // 2])
    rotation, _ = torch.linalg.qr(torch.randn(HALF, HALF, generator=generator))
    projection = rotation[: len(rows)] * math.sqrt(strengths.match)
    attention.q_proj.weight[rows, :HALF] += projection
    attention.k_proj.weight[rows, HALF:] += projection
    attention.v_proj.weight[:HALF, :HALF] += torch.eye(HALF) / math.sqrt(WIDTH / 2)
    attention.o_proj.weight[:HALF, :HALF] += strengths.copied * torch.eye(HALF)
