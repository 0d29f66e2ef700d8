"""The cache in tiers: against a list of tokens kept by hand, and behind a model."""

from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from kvplan.core.tiers import lay_out_tiers
from kvplan.core.workloads import Prefill
from kvplan.errors import DoesNotFitError, UnsupportedFormatError
from kvplan.runtime.dense import LayerAttention
from kvplan.runtime.loading import LoadedModel
from kvplan.runtime.ops import Kernel, load_ops
from kvplan.runtime.scores import prompt_scores
from kvplan.runtime.session import Runtime
from kvplan.runtime.tier_cache import Arrival, TieredLayer, rows_of
from kvplan.runtime.tiered import TieredRuntime, TieredSequence
from kvplan_kernels.cache import AttentionOptions, Batch, LayerCache
from kvplan_kernels.format import CacheFormat, parse
from kvplan_kernels.layout import KVLayout
from kvplan_kernels.outliers import cut, restored
from kvplan_kernels.quantize import dequantize_codes, quantize
from kvplan_kernels.tier_formats import Score, TieredFormat, parse_tiers

HEADS, RATIO, DIM, BLOCK = 2, 2, 32, 16
PROMPT, STEPS = 57, 40
FORMATS = (
    "tiers-w8-25-k8v4+50-k4v2",
    "tiers-w8-20-int8+20-int4+20-int2",
    "tiers-sum-w8-20-16bit",
    "tiers-w8-0-16bit+40-int8",
    "tiers-w8-100-int8",
    "tiers-once-w8-25-16bit",
    "tiers-once-w8-25-k8v4+50-k4v2",
    "tiers-w4-0-int8",
    "tiers-w8-20-int8-o2+30-int4-o1",
)


def stored(values: Tensor, form: CacheFormat, key: bool) -> Tensor:
    """Return what a tier gives back of one token of a head, [dim]."""
    values = values.bfloat16().float()
    tensor = form.key if key else form.value
    if not tensor.quantized:
        return values
    dense, outliers = cut(values[None, None], form.outliers)
    coded = quantize(dense, tensor)
    return restored(dequantize_codes(coded.codes, coded.metadata, tensor), outliers)[0, 0]


@dataclass(eq=False)
class Token:
    key: Tensor
    value: Tensor
    position: int
    since: int
    score: float = 0.0

    def put(self, form: CacheFormat) -> None:
        self.key, self.value = stored(self.key, form, True), stored(self.value, form, False)


class Head:
    """One KV head's tokens in lists, by the words of the documentation."""

    def __init__(self, form: TieredFormat, options: AttentionOptions, sinks: Tensor | None) -> None:
        self.form, self.options, self.sinks = form, options, sinks
        self.tiers: list[list[Token]] = [[] for _ in form.tiers]
        self.prompt = 0

    def fill(self, key: Tensor, value: Tensor, scores: Tensor) -> None:
        tokens = self.prompt = len(key)
        window = tokens - self.form.window_tokens
        first = 0 if self.form.score is Score.SUM else max(0, window)
        held = [Token(key[i], value[i], i, max(i, first), float(scores[i])) for i in range(tokens)]
        held.sort(key=lambda token: (token.position < window, -token.score))
        for tier, length in enumerate(self.form.lengths(tokens)):
            self.tiers[tier], held = held[:length], held[length:]
            for token in self.tiers[tier]:
                token.put(self.form.tiers[tier].form)

    def push(self, key: Tensor, value: Tensor, position: int) -> None:
        coming: Token | None = Token(key, value, position, position)
        lengths = self.form.lengths(position + 1, self.prompt)
        for tier, (held, length) in enumerate(zip(self.tiers, lengths, strict=True)):
            assert coming is not None
            last = position - self.form.window_tokens
            candidates = [token for token in held if tier or token.position <= last]
            if len(held) < length:
                going = None
            else:
                weakest = min(candidates, key=lambda token: self.rank(token, position), default=None)
                if weakest is None or (tier and self.rank(coming, position) <= self.rank(weakest, position)):
                    continue
                going = weakest
                held.remove(weakest)
            coming.put(self.form.tiers[tier].form)
            held.append(coming)
            coming = going
            if coming is None:
                return

    def rank(self, token: Token, position: int) -> float:
        return token.score if self.form.score is Score.SUM else token.score / max(1, position - token.since)

    def attend(self, query: Tensor) -> Tensor:
        """Return the output [query heads, dim], float64; note what tokens received."""
        held = [token for tier in self.tiers for token in tier]
        keys, values = (torch.stack([getattr(token, name) for token in held]).double() for name in ("key", "value"))
        logits = query.double() @ keys.T * self.options.scale
        if self.options.softcap is not None:
            logits = self.options.softcap * torch.tanh(logits / self.options.softcap)
        if self.sinks is not None:
            logits = torch.cat([logits, self.sinks.double()[:, None]], 1)
        weights = logits.softmax(-1)[:, : len(held)]
        for token, given in zip(held, weights.amax(0).tolist(), strict=True):
            token.score += given
        return weights @ values


def layer_of(form: TieredFormat, tokens: int, kernel: str) -> tuple[TieredLayer, list[Batch]]:
    """Return a layer of one sequence with room for *tokens*, its pages handed out in no order."""
    ops, caches, batches = load_ops(kernel, 1), [], []
    noise = torch.Generator().manual_seed(9)
    most = map(max, form.blocks(tokens, BLOCK), form.blocks(tokens, BLOCK, 0))
    for tier, blocks in zip(form.tiers, most, strict=True):
        layout = KVLayout(format=tier.form, kv_heads=HEADS, head_dim=DIM, block_tokens=BLOCK, order=ops.order)
        caches.append(LayerCache.allocate(layout, blocks=max(1, blocks), slots=1))
        table = torch.randperm(max(1, blocks), generator=noise)[None].to(torch.int32)
        nothing = torch.zeros(1, dtype=torch.int32)
        batches.append(Batch(block_tables=table, slots=nothing, lengths=nothing))
    return TieredLayer(form, caches, ops), batches


@pytest.mark.parametrize(
    ("name", "extras", "kernel"),
    [
        *((name, "plain", "cpu") for name in FORMATS),
        *((name, extras, "cpu") for name in FORMATS[:3] for extras in ("softcap", "sinks")),
        *((name, "plain", "reference") for name in FORMATS[:2]),
    ],
)
def test_tokens_lie_where_what_they_received_puts_them(name: str, extras: str, kernel: str) -> None:
    form = parse_tiers(name)
    noise = torch.Generator().manual_seed(len(name))
    tokens = PROMPT + STEPS
    key, value = (2 * torch.randn(HEADS, tokens, DIM, generator=noise) for _ in range(2))
    query = torch.randn(HEADS * RATIO, tokens, DIM, generator=noise)
    options = AttentionOptions(scale=0.5, softcap=4.0 if extras == "softcap" else None)
    sinks = torch.randn(HEADS * RATIO, generator=noise) if extras == "sinks" else None
    attention = LayerAttention(options=options, sink_logits=sinks)
    layer, batches = layer_of(form, tokens, kernel)
    rows = rows_of(batches, HEADS)
    scores = prompt_scores(form, query[:, :PROMPT], key[:, :PROMPT], attention)
    layer.fill(rows, key[:, :PROMPT], value[:, :PROMPT], scores)
    heads = [Head(form, options, None if sinks is None else sinks[RATIO * h : RATIO * (h + 1)]) for h in range(HEADS)]
    for h, head in enumerate(heads):
        head.fill(key[h, :PROMPT], value[h, :PROMPT], scores[h])
    for position in range(PROMPT, tokens):
        before, after = (
            tuple(torch.full((HEADS,), length, dtype=torch.int32) for length in form.lengths(position + late, PROMPT))
            for late in (0, 1)
        )
        arrival = Arrival(positions=torch.full((HEADS,), position), before=before, after=after)
        layer.push(rows, arrival, key[:, position], value[:, position])
        asked = query[:, position].view(HEADS, RATIO, DIM)
        found = layer.attend(rows, after, asked, attention)
        for h, head in enumerate(heads):
            head.push(key[h, position], value[h, position], position)
            expected = head.attend(asked[h])
            assert [len(tier) for tier in head.tiers] == [int(length[h]) for length in after]
            torch.testing.assert_close(found[h].double(), expected, atol=3e-3, rtol=0, msg=f"{position}, head {h}")
    assert int(layer.poisons) == 0


def test_the_prompts_scores_are_what_its_tokens_received() -> None:
    noise = torch.Generator().manual_seed(4)
    key = torch.randn(HEADS, 90, DIM, generator=noise)
    query = torch.randn(HEADS * RATIO, 90, DIM, generator=noise)
    attention = LayerAttention(options=AttentionOptions(scale=0.5))
    logits = 0.5 * query.double().view(HEADS, RATIO, 90, DIM) @ key.double()[:, None].transpose(2, 3)
    weights = logits.masked_fill(torch.ones(90, 90).triu(1).bool(), -torch.inf).softmax(-1).amax(1)
    for name, expected in (
        ("tiers-sum-w8-20-16bit", weights.sum(1)),
        ("tiers-w8-20-16bit", weights[:, -8:].sum(1)),
    ):
        found = prompt_scores(parse_tiers(name), query, key, attention)
        torch.testing.assert_close(found.double(), expected, atol=1e-4, rtol=0)
    pooled = prompt_scores(parse_tiers("tiers-once-w8-20-16bit"), query, key, attention).double()
    plain = weights[:, -8:].sum(1)[:, :82]
    for token in range(82):
        near = plain[:, max(0, token - 3) : token + 4].amax(1)
        torch.testing.assert_close(pooled[:, token], near, atol=1e-4, rtol=0)


def serve(
    loaded: LoadedModel, name: str, *, slots: int = 2, tokens: int = 160, kernel: Kernel = Kernel.CPU
) -> TieredRuntime:
    form = parse_tiers(name)
    most = map(max, form.blocks(tokens, BLOCK), form.blocks(tokens, BLOCK, 0))
    blocks = tuple(slots * count for count in most)
    return TieredRuntime(loaded, form, block_tokens=BLOCK, blocks=blocks, slots=slots, kernel=kernel, threads=1)


def ids(count: int, seed: int = 0) -> list[int]:
    found: list[int] = torch.randint(3, 199, (count,), generator=torch.Generator().manual_seed(seed)).tolist()
    return found


@pytest.mark.parametrize("family", ["Qwen2", "Phi3"])
@pytest.mark.parametrize("name", ["tiers-100-16bit", "tiers-sum-w8-30-16bit+70-16bit", "tiers-once-w8-100-16bit"])
def test_tiers_that_drop_nothing_in_16_bits_are_the_cache_in_16_bits(
    build: Callable[..., LoadedModel], family: str, name: str
) -> None:
    loaded = build(family)
    tiered, plain = serve(loaded, name), Runtime(loaded, parse("bf16"), block_tokens=BLOCK, blocks=20, slots=2)
    fed = torch.tensor([ids(30, seed=1)])
    logits = []
    for server in (tiered, plain):
        sequence = server.prefill(ids(70)).sequence
        logits.append(server.step([sequence], fed))
    torch.testing.assert_close(logits[0], logits[1], atol=2e-3, rtol=0)


@pytest.mark.parametrize("name", ["tiers-w16-25-k8v4+50-k4v2", "tiers-sum-w16-20-16bit", "tiers-once-w16-25-int8"])
def test_a_chunk_reads_what_single_tokens_read(build: Callable[..., LoadedModel], name: str) -> None:
    server = serve(build("Llama"), name)
    fed = torch.tensor([ids(24, seed=1)])
    sequences = [server.prefill(ids(70)).sequence for _ in range(2)]
    whole = server.step([sequences[0]], fed)
    single = torch.cat([server.step([sequences[1]], token) for token in fed.split(1, dim=1)], dim=1)
    torch.testing.assert_close(whole, single, atol=1e-4, rtol=0)


@pytest.mark.parametrize("name", ["tiers-w16-25-k8v4+50-k4v2", "tiers-once-w16-25-int8"])
def test_sequences_of_a_batch_are_as_alone(build: Callable[..., LoadedModel], name: str) -> None:
    server = serve(build("Llama"), name)
    prompts, fed = (ids(75), ids(10, seed=2)), torch.tensor([ids(20, seed=1), ids(20, seed=3)])
    alone = []
    for prompt, row in zip(prompts, fed, strict=True):
        sequence = server.prefill(prompt).sequence
        alone.append(server.step([sequence], row[None]))
        server.free(sequence)
    held = [server.prefill(prompt).sequence for prompt in prompts]
    torch.testing.assert_close(server.step(held, fed), torch.cat(alone), atol=1e-4, rtol=0)


def test_kernels_agree_behind_a_model(build: Callable[..., LoadedModel]) -> None:
    loaded, fed = build("Llama"), torch.tensor([ids(20, seed=1)])
    logits = []
    for kernel in (Kernel.REFERENCE, Kernel.CPU):
        server = serve(loaded, "tiers-w16-25-k8v4+50-k4v2", kernel=kernel)
        logits.append(server.step([server.prefill(ids(70)).sequence], fed))
    torch.testing.assert_close(logits[0], logits[1], atol=3e-2, rtol=0)


def test_a_prompt_can_go_through_the_tiers(build: Callable[..., LoadedModel]) -> None:
    server = serve(build("Llama"), "tiers-100-16bit")
    whole = server.prefill(ids(70)).logits
    chunked = server.prefill(ids(70), Prefill.THROUGH_CACHE, max_batched_tokens=20)
    torch.testing.assert_close(chunked.logits, whole, atol=2e-3, rtol=0)
    assert chunked.sequence.length == 70


@pytest.mark.parametrize("name", FORMATS)
def test_bytes_are_those_of_the_tensors(build: Callable[..., LoadedModel], name: str) -> None:
    loaded = build("Llama")
    tokens = 150
    layout = lay_out_tiers(loaded.spec, parse_tiers(name), BLOCK)
    blocks = layout.blocks(tokens)
    server = TieredRuntime(loaded, parse_tiers(name), block_tokens=BLOCK, blocks=blocks, slots=1)
    assert server.nbytes == layout.sequence_bytes(tokens)
    sequence = server.prefill(ids(tokens)).sequence
    assert [pool.free_blocks for pool in server.pools] == [0] * len(blocks)
    server.free(sequence)
    assert [pool.free_blocks for pool in server.pools] == list(blocks)


def test_a_full_cache_refuses_and_stays_as_it_was(build: Callable[..., LoadedModel]) -> None:
    loaded, form = build("Llama"), parse_tiers("tiers-w16-25-int8+50-int4")
    server = TieredRuntime(loaded, form, block_tokens=BLOCK, blocks=form.blocks(80, BLOCK), slots=2)
    sequence = server.prefill(ids(80)).sequence
    with pytest.raises(DoesNotFitError):
        server.prefill(ids(80))
    with pytest.raises(DoesNotFitError):
        step_on(server, sequence, 60)
    held = server.lengths(sequence, sequence.length)
    assert tuple(part.length for part in sequence.parts) == held
    server.free(sequence)
    assert server.prefill(ids(80)).sequence.length == 80


def step_on(server: TieredRuntime, sequence: TieredSequence, tokens: int) -> None:
    for _ in range(tokens):
        server.step([sequence], torch.tensor([[5]]))


@pytest.mark.parametrize("family", ["Mistral", "Gemma2", "GptOss"])
def test_layers_that_slide_are_refused(build: Callable[..., LoadedModel], family: str) -> None:
    with pytest.raises(UnsupportedFormatError, match="looks at its newest 24 tokens"):
        serve(build(family), "tiers-20-16bit")


def test_poisoned_groups_are_counted(build: Callable[..., LoadedModel]) -> None:
    loaded = build("Llama")
    with torch.no_grad():
        loaded.model.model.layers[1].self_attn.v_proj.weight.mul_(1e8)
    server = serve(loaded, "tiers-w16-25-int8+50-int4")
    assert server.prefill(ids(40)).spent.poisoned_groups > 0
