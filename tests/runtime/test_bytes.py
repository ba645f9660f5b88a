"""Experts come from the pack: the GGUF's copies are neither read nor mapped in, and memory stays in its budget."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest

from lab.make_model import make_model
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.gguf.model import read_model
from llama_expert_pack.pypack.source.discover import find_layers
from llama_expert_pack.pypack.source.match import find_pack
from tests.runtime.packed import evaluate, loaded, provider_of, run_python, tokens_at, variant

BATCHES = [40, 1, 1, 7]
MIB = 1 << 20


def expert_ranges(path: Path) -> list[tuple[Path, int, int]]:
    """(file, offset, length) of every tensor that is in the pack."""
    model = read_model(path)
    tensors = [model.tensors[role.tensor] for layer in find_layers(model) for role in layer.roles]
    return [(model.shards[t.file_id].path, t.offset, t.size_bytes) for t in tensors]


@pytest.mark.parametrize("use_mmap", [True, False])
@pytest.mark.parametrize("name", ["type-Q4_K", "expert-biases", "gate-up", "two-groups", "split-by-tensor", "no-gate"])
def test_garbage_in_place_of_the_experts_changes_nothing(
    name: str, use_mmap: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The model does not look at the GGUF's experts. Who checks that the pack fits it does: that is left out here."""
    monkeypatch.setattr("llama_expert_pack.pypack.source.match.expert_difference", lambda *_: None)
    path = variant(name, tmp_path)
    with loaded(path, use_mmap=use_mmap) as llm:
        expected = evaluate(llm, BATCHES)
    for file, offset, length in expert_ranges(path):
        with file.open("r+b") as out:
            out.seek(offset)
            out.write(b"\xa5" * length)
    with loaded(path, use_mmap=use_mmap) as llm:
        assert (evaluate(llm, BATCHES) == expected).all()


LOAD_AND_RUN = """
import json, sys
from pathlib import Path
from llama_expert_pack import Llama

def status(field):
    lines = Path("/proc/self/status").read_text().splitlines()
    return next(int(line.split()[1]) * 1024 for line in lines if line.startswith(field + ":"))

def read_so_far():
    return next(int(line.split()[1]) for line in Path("/proc/self/io").read_text().splitlines() if "rchar" in line)

options = json.loads(sys.argv[2])
before = {"rss": status("VmRSS"), "rchar": read_so_far()}
options |= {"n_ctx": 256, "n_batch": 64, "n_threads": 1, "n_threads_batch": 1, "verbose": False}
llm = Llama(sys.argv[1], expert_pack=True, **options)
loaded = read_so_far()
for n in json.loads(sys.argv[3]):
    llm.eval([(7 * i + i * i) % llm.n_vocab() for i in range(llm.n_tokens, llm.n_tokens + n)])
maps = [line for line in Path("/proc/self/smaps").read_text().splitlines()]
resident, here = 0, False
for line in maps:
    first = line.split()[0]
    if "-" in first and not first.endswith(":"):
        here = line.endswith(".gguf")
    elif here and first == "Rss:":
        resident += int(line.split()[1]) * 1024
stats = llm.expert_stats()
print(json.dumps({"peak": status("VmHWM") - before["rss"], "load_reads": loaded - before["rchar"],
    "run_reads": read_so_far() - loaded, "mapped_resident": resident, "read_bytes": stats.read_bytes,
    "evictions": stats.evictions}))
llm.close()
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """174 MiB of experts beside 25 MiB of trunk."""
    path = tmp_path_factory.mktemp("bytes") / "model.gguf"
    make_model(path, "demo", n_layer=6)
    convert(path)
    return path


def sizes(path: Path) -> tuple[int, int]:
    """Bytes of the experts and of all else in the GGUF."""
    experts = sum(length for _, _, length in expert_ranges(path))
    return experts, path.stat().st_size - experts


def measure(path: Path, batches: list[int], **options: object) -> dict[str, int]:
    run = run_python(LOAD_AND_RUN, path, json.dumps(options), json.dumps(batches))
    assert run.returncode == 0, run.stderr[-2000:]
    found: dict[str, int] = json.loads(run.stdout)
    return found


def test_without_mmap_only_the_trunk_is_read_from_the_model(model: Path) -> None:
    n_expert_bytes, n_trunk_bytes = sizes(model)
    found = measure(model, BATCHES, use_mmap=False, expert_cache="64MiB")
    # the trunk; its head for the fingerprint and for llama.cpp; the pack's index; Python modules
    assert n_trunk_bytes <= found["load_reads"] < n_trunk_bytes + 8 * MIB < n_trunk_bytes + n_expert_bytes
    assert found["run_reads"] <= found["read_bytes"] + MIB
    assert found["mapped_resident"] == 0


def test_with_mmap_the_experts_are_not_mapped_in(model: Path) -> None:
    """Not even read ahead from the page cache, which holds the file that was just written."""
    n_expert_bytes, n_trunk_bytes = sizes(model)
    found = measure(model, BATCHES, expert_cache="64MiB")
    assert found["load_reads"] < 8 * MIB
    # the kernel maps up to 64 KiB around a page that is touched, at both ends of every tensor
    slack = 2 * 65536 * len(read_model(model).tensors)
    assert 0 < found["mapped_resident"] <= n_trunk_bytes + slack < n_trunk_bytes + n_expert_bytes


def test_locking_memory_does_not_lock_the_experts(model: Path) -> None:
    """Stock locks a mapping from the file's start on; the experts in it must not come along."""
    _, n_trunk_bytes = sizes(model)
    found = measure(model, [64], expert_cache="32MiB", use_mlock=True)
    assert found["mapped_resident"] == 0
    assert found["load_reads"] < n_trunk_bytes + 8 * MIB


@pytest.mark.parametrize("use_mmap", [True, False])
def test_peak_memory_is_trunk_and_cache(use_mmap: bool, model: Path) -> None:
    n_expert_bytes, n_trunk_bytes = sizes(model)
    cache_bytes, fixed_bytes = 32 * MIB, 64 * MIB  # compute buffers, KV cache, readers' buffers
    found = measure(model, [64, 64, *[1] * 16], use_mmap=use_mmap, expert_cache=cache_bytes)
    assert found["evictions"] > 0
    assert found["peak"] <= n_trunk_bytes + cache_bytes + fixed_bytes < n_expert_bytes + n_trunk_bytes


def test_the_model_may_be_a_link_and_lie_elsewhere(tmp_path: Path) -> None:
    """The pack is matched by content, native's registration by file: neither depends on the path's spelling."""
    path = variant("type-Q4_K", tmp_path)
    with loaded(path) as llm:
        expected = evaluate(llm, BATCHES)
    link = tmp_path / "elsewhere" / "other.gguf"
    link.parent.mkdir()
    link.symlink_to(path)
    with loaded(link, expert_pack=find_pack(path)) as llm:
        assert (evaluate(llm, BATCHES) == expected).all()
    copy = tmp_path / "copy.gguf"
    shutil.copy(path, copy)
    path.unlink()
    with loaded(copy, expert_pack=find_pack(path)) as llm:
        assert (evaluate(llm, BATCHES) == expected).all()
        assert llm.expert_stats().loads > 0


def test_the_expert_bytes_of_a_slot_are_the_packs(tmp_path: Path) -> None:
    path = variant("mixed-between-layers", tmp_path)
    pack = open_pack(find_pack(path))
    with loaded(path) as llm:
        llm.eval(tokens_at(0, 60))
        provider = provider_of(llm)
        with pack.path.open("rb") as file:
            n_checked = 0
            for layer in pack.layers:
                for expert in range(layer.n_expert):
                    slot = int(provider.cache.slot_of[layer.first_key + expert])
                    if slot < 0:
                        continue
                    file.seek(pack.offset(layer.index, expert))
                    found = provider.host_memory(layer.index, slot)
                    assert found is not None and file.read(layer.block_bytes) == found.tobytes()
                    n_checked += 1
        assert n_checked == llm.expert_stats().loads > 0
