"""Writes a synthetic mixture-of-experts GGUF that llama.cpp loads and runs.

    python -m lab.make_model demo.gguf --preset demo --tokenizer models/ggml-vocab-llama-spm.gguf
    python -m lab.make_model dsv4.gguf --preset dsv4 --layers 8
    python -m lab.make_model k3.gguf --preset k3 --dry-run

The weights are random, the shapes, types and metadata are those of the architecture. The same arguments give
the same bytes.
"""

from __future__ import annotations

import os
import shutil
from collections import Counter
from dataclasses import replace
from pathlib import Path

import click

from lab.presets import PRESETS
from lab.synth.blocks import WEIGHT_TYPES
from lab.synth.gguf_out import read_kv, tokenizer_size
from lab.synth.kimi_k3 import is_full_attention
from lab.synth.model import tensors, write_model
from lab.synth.pack_size import blocks, is_expert, payload_bytes
from lab.synth.shape import Shape

Size = int | float | str | None


def make_model(
    path: Path,
    preset: str,
    *,
    seed: int = 1,
    n_shards: int = 1,
    tokenizer: Path | None = None,
    type: str | None = None,
    latent: int | None = None,
    **sizes: Size,
) -> Path:
    """Writes a preset's model, with sizes as for resized(); returns its first file.

    `tokenizer` is a GGUF whose tokenizer is copied; without it the model has llama.cpp's "test" tokenizer.
    """
    if tokenizer:
        sizes["n_vocab"] = tokenizer_size(read_kv(tokenizer, "tokenizer."))
    shape = resized(PRESETS[preset], type=type, latent=latent, **sizes)
    return write_model(path, shape, seed=seed, n_shards=n_shards, tokenizer=tokenizer)


def resized(shape: Shape, *, type: str | None = None, latent: int | None = None, **sizes: Size) -> Shape:
    """The shape with other sizes (fields of Shape; None keeps one) and one type for all expert weights.

    ValueError for sizes that cannot be: a row that does not fill blocks, more experts used than there are.
    """
    given = {name: value for name, value in sizes.items() if value is not None}
    shape = replace(shape, **given)  # type: ignore[arg-type]
    if latent:
        if "n_latent" not in shape.extra:
            raise ValueError(f"{shape.arch} has no latent experts: leave out --latent")
        shape = replace(shape, extra={**shape.extra, "n_latent": latent})
    if type:
        shape = replace(shape, expert_types={role: (type,) for role in shape.expert_types})
    if shape.n_layer <= len(shape.dense_layers):
        shape = replace(shape, dense_layers=shape.dense_layers[: shape.n_layer - 1])
    if isinstance(shape.n_expert_used, int) and not 0 < shape.n_expert_used <= shape.n_expert:
        raise ValueError(f"--top-k must be 1 to {shape.n_expert}, the number of experts, not {shape.n_expert_used}")
    if shape.arch == "kimi-k3" and not any(map(is_full_attention, range(shape.n_layer))):
        raise ValueError(f"--layers must be 4 at least, not {shape.n_layer}: without full attention llama.cpp aborts")
    for tensor in tensors(shape):
        _ = tensor.n_bytes  # refuses rows that do not fill blocks
    return shape


def describe(shape: Shape) -> str:
    """What the model and its pack will take on the disk."""
    all_tensors = tensors(shape)
    total = sum(tensor.n_bytes for tensor in all_tensors)
    n_expert_bytes = sum(tensor.n_bytes for tensor in all_tensors if is_expert(tensor))
    lines = [
        f"architecture   {shape.arch}, {shape.n_layer} layers, top-{shape.n_expert_used} of {shape.n_expert}",
        f"GGUF           {total:,} bytes ({total / 1e9:.2f} GB)",
        f"resident       {total - n_expert_bytes:,} bytes ({(total - n_expert_bytes) / 1e9:.2f} GB)",
    ]
    for (n_experts, n_bytes), n_layers in Counter(blocks(shape)).items():
        lines.append(f"blocks         {n_layers} layers x {n_experts} experts x {n_bytes:,} bytes")
    lines.append(f"pack payload   {payload_bytes(shape):,} bytes ({payload_bytes(shape) / 1e9:.2f} GB)")
    return "\n".join(lines)


def check_space(path: Path, shape: Shape) -> None:
    """Raises click.ClickException if the model does not fit the disk."""
    needed = sum(tensor.n_bytes for tensor in tensors(shape))
    free = shutil.disk_usage(path.resolve().parent).free
    if needed > free:
        raise click.ClickException(
            f"{path}: the model needs {needed / 1e9:.1f} GB and the disk has {free / 1e9:.1f} GB free; "
            "write it elsewhere or pass fewer --layers or --experts"
        )


@click.command(help=__doc__.split("\n", 1)[0] if __doc__ else None)
@click.argument("out", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--preset", type=click.Choice(list(PRESETS)), default="demo", show_default=True)
@click.option("--layers", "n_layer", type=click.IntRange(1), help="Number of blocks.")
@click.option("--experts", "n_expert", type=click.IntRange(2), help="Experts of a layer.")
@click.option("--top-k", "n_expert_used", type=click.IntRange(1), help="Experts that a token uses.")
@click.option("--n-embd", type=click.IntRange(32), help="Width of the residual stream.")
@click.option("--n-ff-exp", type=click.IntRange(32), help="Inner width of an expert.")
@click.option("--n-ff", type=click.IntRange(32), help="Inner width of a dense layer.")
@click.option("--heads", "n_head", type=click.IntRange(1), help="Attention heads.")
@click.option("--latent", type=click.IntRange(32), help="Width that Kimi-K3's experts work in.")
@click.option("--vocab", "n_vocab", type=click.IntRange(16), help="Tokens, without --tokenizer.")
@click.option("--type", type=click.Choice(list(WEIGHT_TYPES)), help="One type for all expert weights.")
@click.option("--trunk-type", type=click.Choice(list(WEIGHT_TYPES)), help="Type of the resident weights.")
@click.option("--router-spread", type=click.FloatRange(0, 1), help="0: no favourite experts.")
@click.option(
    "--tokenizer",
    type=click.Path(exists=True, dir_okay=False, path_type=Path),
    help="GGUF whose tokenizer is copied, such as llama.cpp's models/ggml-vocab-*.gguf.",
)
@click.option("--seed", type=click.IntRange(0), default=1, show_default=True)
@click.option("--shards", "n_shards", type=click.IntRange(1, 99999), default=1, show_default=True)
@click.option("--jobs", type=click.IntRange(1), default=os.cpu_count() or 1, show_default=True, help="Processes.")
@click.option("--dry-run", is_flag=True, help="Only print what it would take.")
def main(
    out: Path,
    preset: str,
    tokenizer: Path | None,
    seed: int,
    n_shards: int,
    jobs: int,
    dry_run: bool,
    type: str | None,
    latent: int | None,
    **sizes: Size,
) -> None:
    try:
        if tokenizer:
            sizes["n_vocab"] = tokenizer_size(read_kv(tokenizer, "tokenizer."))
        shape = resized(PRESETS[preset], type=type, latent=latent, **sizes)
        click.echo(describe(shape))
        if dry_run:
            return
        check_space(out, shape)
        written = write_model(out, shape, seed=seed, n_shards=n_shards, tokenizer=tokenizer, jobs=jobs)
        click.echo(f"wrote          {written}")
    except (ValueError, OSError) as error:
        raise click.ClickException(str(error)) from error


if __name__ == "__main__":
    main()
