"""Training of the demo model: a fixed number of tokens, in an order that the seed fixes."""

import math
import random
import sys
import time

import torch
from transformers import LlamaForCausalLM

from demo_model.rows import UNSCORED, Row, RowSource

TOKENS_A_STEP = 2048
ROW_LENGTHS = (256, 512, 1024, 2048)
# Short rows first, because they teach text fastest; then long ones, without which the match blurs at 2,048 tokens.
EARLY_SHARES = (0.70, 0.20, 0.05, 0.05)
LATE_SHARES = (0.25, 0.20, 0.25, 0.30)
LATE_FROM = 0.55
NEEDLE_SHARE = 0.3
PEAK_RATE = 4e-3
WARM_UP_STEPS = 40
REPORT_EVERY = 100


def train(model: LlamaForCausalLM, rows: RowSource, steps: int, seed: int) -> None:
    """Train in bfloat16 autocast with AdamW and a cosine rate; progress goes to standard error."""
    chooser = random.Random(seed)
    optimizer = torch.optim.AdamW(_groups(model), lr=PEAK_RATE, betas=(0.9, 0.95), fused=True)
    model.train()
    started = time.perf_counter()
    smoothed = 0.0
    for step in range(steps):
        for group in optimizer.param_groups:
            group["lr"] = learning_rate(step, steps)
        batch = _batch(rows, chooser, EARLY_SHARES if step < LATE_FROM * steps else LATE_SHARES)
        loss = _loss(model, batch)
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        smoothed = loss.item() if step == 0 else 0.98 * smoothed + 0.02 * loss.item()
        if step % REPORT_EVERY == REPORT_EVERY - 1:
            seconds = time.perf_counter() - started
            print(f"step {step + 1}/{steps}  loss {smoothed:.3f}  {seconds:.0f} s", file=sys.stderr, flush=True)
    model.eval()


def learning_rate(step: int, steps: int) -> float:
    """Rise over the warm-up, then fall along a half cosine to a fiftieth of the peak."""
    if step < WARM_UP_STEPS:
        return PEAK_RATE * (step + 1) / WARM_UP_STEPS
    done = (step - WARM_UP_STEPS) / max(1, steps - WARM_UP_STEPS)
    return PEAK_RATE * (0.02 + 0.98 * 0.5 * (1 + math.cos(math.pi * done)))


def _groups(model: LlamaForCausalLM) -> list[dict[str, object]]:
    """Decay the feed-forward matrices only: decay would wear the written heads away."""
    decayed = [p for name, p in model.named_parameters() if ".mlp." in name]
    others = [p for name, p in model.named_parameters() if ".mlp." not in name]
    return [{"params": decayed, "weight_decay": 0.05}, {"params": others, "weight_decay": 0.0}]


def _batch(rows: RowSource, chooser: random.Random, shares: tuple[float, ...]) -> list[Row]:
    length = chooser.choices(ROW_LENGTHS, shares)[0]
    batch = []
    for _ in range(TOKENS_A_STEP // length):
        needles = chooser.random() < NEEDLE_SHARE
        batch.append(rows.needle_row(length) if needles else rows.text_row(length))
    return batch


def _loss(model: LlamaForCausalLM, batch: list[Row]) -> torch.Tensor:
    """Weighted mean cross-entropy in nats; the output layer runs in bfloat16, the softmax in float32."""
    ids = torch.stack([row.ids for row in batch])
    targets = torch.stack([row.targets for row in batch]).flatten()
    weights = torch.stack([row.weights for row in batch]).flatten()
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=ids, use_cache=False).logits
    losses = torch.nn.functional.cross_entropy(
        logits.float().flatten(0, 1), targets, ignore_index=UNSCORED, reduction="none"
    )
    counted = weights * (targets != UNSCORED)
    return (losses * counted).sum() / counted.sum()
