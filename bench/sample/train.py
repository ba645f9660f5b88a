"""Trains the sample model and writes it as GGUF: real text, learned routing, 14 MB.

    python -m bench.sample.train --text sample-text.xz --out OUT

Needs torch, tokenizers and gguf; minutes on a GPU, and with --layers, --steps a dry run on a CPU. The text comes from
bench.sample.corpus. OUT gets sample-moe.gguf, sample-moe.reference.json (for bench.sample.fidelity) and
sample-moe.train.jsonl.
"""

from __future__ import annotations

import json
import lzma
import math
import time
from pathlib import Path
from typing import Any

import click
import gguf
import torch
import torch.nn.functional as F
from torch import Tensor

from bench.sample import export, tokenizer
from bench.sample.fidelity import TEXT
from bench.sample.model import Config, Model

VALID_EVERY = 20  # one chapter in so many is kept from training
BALANCE = 0.01  # enough that no expert dies, too little to make all alike


class Windows:
    """Windows of n_ctx tokens: the boundary token, then text from the start of a paragraph on."""

    def __init__(self, chapters: list[list[int]], newline: int, n_ctx: int, device: torch.device) -> None:
        stream = torch.tensor([token for chapter in chapters for token in (0, *chapter)] + [0])
        begins = torch.where((stream[:-1] == newline) | (stream[:-1] == 0))[0]
        self.starts = begins[begins + n_ctx < len(stream)].to(device)
        if not len(self.starts):
            raise ValueError(f"a part of the text is shorter than a window of {n_ctx} tokens: give more text")
        self.stream, self.n_ctx = stream.to(device), n_ctx

    def batch(self, which: Tensor) -> tuple[Tensor, Tensor]:
        """Inputs and targets, each [len(which), context]: the targets are one token later."""
        positions = self.starts[which][:, None] + torch.arange(self.n_ctx + 1, device=which.device)
        window = self.stream[positions]
        window[:, 0] = 0
        return window[:, :-1], window[:, 1:]


def tokenized(text: str, n_vocab: int) -> tuple[Any, list[list[int]], list[list[int]]]:
    """Tokenizer, chapters to train on, chapters to validate on."""
    learned = tokenizer.train(text, n_vocab)
    chapters = [chapter.strip() + "\n" for chapter in text.split("\n\n")]
    ids = [encoded.ids for encoded in learned.encode_batch(chapters)]
    return (
        learned,
        [chapter for i, chapter in enumerate(ids) if i % VALID_EVERY != VALID_EVERY // 2],
        ids[VALID_EVERY // 2 :: VALID_EVERY],
    )


def loss_of(model: Any, windows: Windows, which: Tensor, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
    """Cross entropy in nats a token, and the balance loss and shares that the model gives."""
    inputs, targets = windows.batch(which)
    with torch.autocast(device.type, torch.bfloat16, enabled=device.type == "cuda"):
        logits, balance, shares = model(inputs)
    return F.cross_entropy(logits.flatten(0, 1).float(), targets.flatten()), balance, shares


@torch.no_grad()
def validate(model: Model, windows: Windows, n_batch: int, device: torch.device) -> tuple[float, Tensor]:
    """Mean loss over evenly spread windows, and each expert's share (n_layer, n_expert)."""
    model.eval()
    spread = torch.linspace(0, len(windows.starts) - 1, 4 * n_batch, device=device).long()
    results = [loss_of(model, windows, which, device) for which in spread.split(n_batch)]
    model.train()
    return float(torch.stack([r[0] for r in results]).mean()), torch.stack([r[2] for r in results]).mean(0)


def optimizer_of(model: Model, lr: float, fused: bool) -> torch.optim.Optimizer:
    """AdamW, whose decay leaves norms alone; ``fused``: the variant that wants a GPU."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() == 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    return torch.optim.AdamW(groups, lr=lr, betas=(0.9, 0.95), fused=fused)


def train(
    model: Model,
    compiled: bool,
    windows: Windows,
    valid: Windows,
    log: Any,
    *,
    steps: int,
    minutes: float,
    n_batch: int,
    lr: float,
) -> None:
    """Leaves in the model the weights with the lowest validation loss."""
    device = windows.stream.device
    run = torch.compile(model) if compiled else model
    optimizer = optimizer_of(model, lr, fused=device.type == "cuda")
    random = torch.Generator(device).manual_seed(1)
    best, best_loss, start = model.state_dict(), math.inf, time.perf_counter()
    step, done = 0, 0.0
    while done < 1:
        done = max((step + 1) / steps, (time.perf_counter() - start) / 60 / minutes)
        for group in optimizer.param_groups:
            group["lr"] = lr * min((step + 1) / 100, 0.05 + 0.95 * (1 + math.cos(math.pi * min(done, 1))) / 2)
        which = torch.randint(len(windows.starts), (n_batch,), generator=random, device=device)
        loss, balance, _ = loss_of(run, windows, which, device)
        optimizer.zero_grad(set_to_none=True)
        (loss + BALANCE * balance).backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        step += 1
        if step % 100 == 0 or done >= 1:
            valid_loss, shares = validate(model, valid, n_batch, device)
            if valid_loss < best_loss:
                best_loss, best = valid_loss, {name: t.clone() for name, t in model.state_dict().items()}
            seconds = time.perf_counter() - start
            log(
                step=step,
                tokens=step * n_batch * windows.n_ctx,
                seconds=round(seconds, 2),
                loss=float(loss.detach()),
                valid_loss=valid_loss,
                balance=float(balance.detach()),
                share_max=float(shares.max()),
                share_min=float(shares.min()),
                tokens_per_s=round(step * n_batch * windows.n_ctx / seconds),
            )
    model.load_state_dict(best)


def quantize(model: Model, expert_type: str) -> None:
    """Replaces the weights by those that the GGUF holds, to measure what they lose."""
    for _, parameter, kind, data in export.weights(model, expert_type):
        values = torch.from_numpy(gguf.quants.dequantize(data, kind).copy())
        parameter.data.copy_(values.reshape(parameter.shape))


@torch.no_grad()
def reference(model: Model, learned: Any) -> dict[str, Any]:
    """What bench.sample.fidelity compares llama.cpp with, computed on the CPU in float32."""
    torch.set_float32_matmul_precision("highest")
    model.eval()
    ids = torch.tensor([0, *learned.encode(TEXT).ids])
    probabilities = model(ids[None, :-1])[0][0].double().log_softmax(-1).gather(1, ids[1:, None])
    return {
        "tokens": [{"text": text, "ids": learned.encode(text).ids} for text in tokenizer.SAMPLES],
        "text": TEXT,
        "log_probabilities": [round(value, 6) for value in probabilities[:, 0].tolist()],
    }


@torch.no_grad()
def sample(model: Model, learned: Any, prompt: str, n_tokens: int, temperature: float) -> str:
    """The prompt with ``n_tokens`` more: the likeliest at temperature 0, else drawn, the same for each call."""
    model.eval()
    device = next(model.parameters()).device
    random = torch.Generator(device).manual_seed(1)
    ids = torch.tensor([[0, *learned.encode(prompt).ids]], device=device)
    for _ in range(n_tokens):
        logits = model(ids[:, -model.c.n_ctx :])[0][0, -1].float()
        if temperature == 0:
            token = logits.argmax()[None]
        else:
            token = torch.multinomial((logits / temperature).softmax(-1), 1, generator=random)
        ids = torch.cat((ids, token[None]), 1)
    model.train()
    return str(learned.decode(ids[0].tolist()))


@click.command(help=(__doc__ or "").split("\n", maxsplit=1)[0])
@click.option("--text", "text_path", type=click.Path(exists=True, dir_okay=False, path_type=Path), required=True)
@click.option("--out", type=click.Path(file_okay=False, path_type=Path), required=True, help="Folder for the results.")
@click.option("--steps", default=2500, show_default=True, type=click.IntRange(1))
@click.option("--minutes", default=4.0, show_default=True, help="Training ends at the first of both limits.")
@click.option("--batch", "n_batch", default=32, show_default=True, type=click.IntRange(1), help="Windows a step.")
@click.option("--lr", default=1.5e-3, show_default=True)
@click.option("--dropout", default=Config.dropout, show_default=True)
@click.option("--layers", default=Config.n_layer, show_default=True, type=click.IntRange(1))
@click.option("--context", default=Config.n_ctx, show_default=True, type=click.IntRange(8), help="Tokens in a window.")
@click.option("--vocab", default=Config.n_vocab, show_default=True, type=click.IntRange(300))
@click.option("--type", "expert_type", default="Q4_0", show_default=True, help="Type of the experts, or F32 for all.")
@click.option("--compile/--no-compile", "compiled", default=False, help="torch.compile: faster after a minute.")
@click.option("--seed", default=1, show_default=True)
@click.option("--sample", "n_sample", default=100, show_default=True, help="Tokens of the texts printed at the end.")
def main(
    text_path: Path,
    out: Path,
    steps: int,
    minutes: float,
    n_batch: int,
    lr: float,
    dropout: float,
    layers: int,
    context: int,
    vocab: int,
    expert_type: str,
    compiled: bool,
    seed: int,
    n_sample: int,
) -> None:
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    torch.manual_seed(seed)
    torch.set_float32_matmul_precision("high")
    out.mkdir(parents=True, exist_ok=True)
    text = lzma.decompress(text_path.read_bytes()).decode()
    learned, to_train, to_validate = tokenized(text, vocab)
    newline = learned.encode("\n").ids[0]
    windows = Windows(to_train, newline, context, device)
    valid = Windows(to_validate, newline, context, device)
    model = Model(Config(n_vocab=vocab, n_ctx=context, n_layer=layers, dropout=dropout)).to(device)
    n_weights = sum(p.numel() for p in model.parameters())
    print(f"{device}, {n_weights:,} weights, {len(windows.stream):,} tokens, {len(valid.stream):,} to validate")

    with (out / "sample-moe.train.jsonl").open("w") as file:

        def log(**values: Any) -> None:
            line = json.dumps(values)
            print(line, flush=True)
            file.write(line + "\n")

        train(model, compiled, windows, valid, log, steps=steps, minutes=minutes, n_batch=n_batch, lr=lr)
        path = out / "sample-moe.gguf"
        export.write(path, model, learned, expert_type)
        before, _ = validate(model, valid, n_batch, device)
        quantize(model, expert_type)
        after, shares = validate(model, valid, n_batch, device)
        log(valid_loss=before, quantized_valid_loss=after, file_bytes=path.stat().st_size, shares=shares.tolist())
    expected = json.dumps(reference(model.cpu(), learned), indent=1, ensure_ascii=False)
    (out / "sample-moe.reference.json").write_text(expected + "\n")
    model.to(device)
    for prompt in ("In the beginning", "It was a", "She was"):
        for temperature in (0.0, 0.8):
            print(f"--- {temperature}: {sample(model, learned, prompt, n_sample, temperature)}")


if __name__ == "__main__":
    main()
