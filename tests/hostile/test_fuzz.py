"""Made-up packs, GGUFs, splits and journals, most with all checksums right: each works or is refused in a sentence.

For a few seconds; EXPERT_PACK_FUZZ_S is how many for each kind, EXPERT_PACK_FUZZ_SEED repeats a run.
"""

from __future__ import annotations

import copy
import hashlib
import json
import os
import random
import resource
import shutil
import time
from collections.abc import Callable
from dataclasses import replace
from importlib import import_module
from pathlib import Path

import pytest

from llama_expert_pack.pypack.command.inspect import describe, format_table, to_json
from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.convert.verify import verify
from llama_expert_pack.pypack.errors import ExpertPackError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.ggml_types import GGML_TYPES
from llama_expert_pack.pypack.source.match import check_source
from tests.gguf_bytes import ARRAY, GGUF, STRING, T, array, facts, kv, moe_tensors, split, split_keys, text
from tests.hostile import mutations
from tests.pack_tools import manifest_of, resign
from tests.unit.fake_pack import n_open_files

SECONDS = float(os.environ.get("EXPERT_PACK_FUZZ_S", "2"))
SEED = os.environ.get("EXPERT_PACK_FUZZ_SEED") or str(random.SystemRandom().getrandbits(32))
MODEL = GGUF(facts(n_block=3), [T("output.weight", (32, 8)), *moe_tensors(0), *moe_tensors(1, types=(1, 8, 8))])

Case = Callable[[random.Random, Path], None]
pytestmark = pytest.mark.timeout(120 + 20 * SECONDS)


def works(call: Callable[[], object]) -> bool:
    """Whether it does, or is refused as it should be."""
    try:
        call()
    except ExpertPackError as error:
        assert str(error).isprintable() and len(str(error)) < 5000
        return False
    return True


def fuzz(folder: Path, case: Case) -> None:
    """Runs the case again and again, in an empty folder each time."""
    end = time.monotonic() + SECONDS
    n_files, memory_kib, n_cases = n_open_files(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss, 0
    while time.monotonic() < end or n_cases < 10:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir()
        try:
            case(random.Random(f"{SEED}-{n_cases}"), folder)
        except BaseException as error:
            error.add_note(f"seed {SEED}, case {n_cases}") if hasattr(error, "add_note") else print(SEED, n_cases)
            raise
        n_cases += 1
    assert n_open_files() == n_files
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - memory_kib < 512 << 10


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model and its pack."""
    path = MODEL.write(tmp_path_factory.mktemp("good") / "model.gguf")
    return convert(path, safety_margin_bytes=0).path


def test_packs(good: Path, tmp_path: Path) -> None:
    def case(rng: random.Random, folder: Path) -> None:
        pack = Path(shutil.copy(good, folder))
        shutil.copy(manifest_of(good), folder)
        model = good.with_name("model.gguf")
        assert works(lambda: open_pack(pack))
        parts = rng.sample(("manifest", "header", "index", "bytes", "text"), rng.randint(1, 2))

        def change_manifest(manifest: dict[str, object]) -> None:
            changed = mutations.json_value(rng, copy.deepcopy(manifest))
            manifest.clear()
            manifest.update(changed if isinstance(changed, dict) else {"changed": changed})

        def change_header(fields: list[int]) -> None:
            place = rng.randrange(1, 10)
            fields[place] = mutations.number(rng, fields[place]) % (1 << (32 if place < 5 else 64))

        def change_index(entries: list[list[int]]) -> None:
            entry, place = rng.choice(entries), rng.randrange(4)
            entry[place] = mutations.number(rng, entry[place]) % (1 << (32 if place < 2 else 64))

        resign(
            pack,
            manifest=change_manifest if "manifest" in parts else None,
            header=change_header if "header" in parts else None,
            index=change_index if "index" in parts else None,
        )
        for part, path in (("bytes", pack), ("text", manifest_of(pack))):
            if part in parts:
                path.write_bytes(mutations.some_bytes(rng, path.read_bytes()))
        if works(lambda: describe(pack)):
            assert format_table(describe(pack)) and to_json(describe(pack))
            works(lambda: check_source(open_pack(pack), model))
            works(lambda: verify(pack, deep=True, source=model, jobs=1))

    fuzz(tmp_path / "case", case)


def changed_model(rng: random.Random, model: GGUF) -> GGUF:
    """One thing in the head is another."""
    kvs, tensors = list(model.kv), [replace(tensor) for tensor in model.tensors]
    how = rng.randrange(5)
    if how == 0:
        kvs = mutations.shuffled(rng, kvs)
    elif how == 1:
        key = rng.choice(
            ("general.alignment", "general.name", "general.architecture", "split.count", "test.block_count")
        )
        kvs = [*(entry for entry in kvs if key.encode() not in entry), changed_kv(rng, key)]
    elif how == 2:
        tensors = mutations.shuffled(rng, tensors)
    else:
        tensor = rng.choice(tensors)
        what = rng.randrange(4)
        if what == 0:
            tensor.name = mutations.text(rng, str(tensor.name))
        elif what == 1:
            ne = mutations.shuffled(rng, [*tensor.ne, mutations.number(rng, 4)])
            tensor.ne = [max(-1, min(n, (1 << 63) - 1)) for n in ne]
        elif what == 2:
            tensor.type = rng.choice((0, 1, 2, 8, 12, 30, 39, 99))
        else:
            tensor.offset = mutations.number(rng, 4096) % (1 << 64)
    return replace(model, kv=kvs, tensors=tensors)


def changed_kv(rng: random.Random, key: str) -> bytes:
    type_id = rng.randrange(13)
    if type_id == STRING:
        return text(key, mutations.text(rng, "name") * rng.choice((1, 1, 5000)))
    if type_id == ARRAY:
        return array(key, 4, [rng.randrange(1 << 32) for _ in range(rng.randrange(4))])
    return kv(key, type_id, rng.randrange(100))


def file_of(model: GGUF) -> bytes:
    """Head and data as its tensors claim, up to 1 MiB."""
    place, tensors = 0, []
    for tensor in model.tensors:
        is_known = tensor.type in GGML_TYPES and min(tensor.ne, default=0) > 0
        tensors.append(replace(tensor, offset=place if tensor.offset is None else tensor.offset))
        place += -(-min(tensor.size_bytes, 1 << 40) // 32) * 32 if is_known else 0
    head = replace(model, tensors=tensors).head()
    return head + bytes(-len(head) % 32) + (bytes(range(256)) * (1 << 12))[: min(place, 1 << 20)]


def check_model(path: Path) -> None:
    """What is converted can be opened, belongs to the model, and has its bytes."""
    for old in path.parent.glob("model.expert-pack*"):
        old.unlink()
    works(lambda: describe(path))
    if works(lambda: convert(path, jobs=1, safety_margin_bytes=0)):
        pack = path.with_name("model.expert-pack")
        verify(pack, deep=True, source=path, jobs=1)
        check_source(open_pack(pack), path)
        assert format_table(describe(pack)) and to_json(describe(pack))
    else:
        assert not list(path.parent.glob("*.manifest.json"))


def test_ggufs(tmp_path: Path) -> None:
    def case(rng: random.Random, folder: Path) -> None:
        model = MODEL
        for _ in range(rng.randint(0, 3)):
            model = changed_model(rng, model)
        data = file_of(model)
        if rng.random() < 0.3:
            head = len(model.head()) if model is MODEL else 500
            data = mutations.some_bytes(rng, data[:head]) + data[head:]
        path = folder / "model.gguf"
        path.write_bytes(data)
        check_model(path)

    fuzz(tmp_path / "case", case)


def test_splits(tmp_path: Path) -> None:
    def case(rng: random.Random, folder: Path) -> None:
        paths = split(MODEL, [2, 4, 3], folder)
        for _ in range(rng.randint(0, 2)):
            number, other = rng.randrange(3), rng.randrange(3)
            how = rng.randrange(5)
            if how == 0 and paths[other].exists():
                paths[number].write_bytes(paths[other].read_bytes())
            elif how == 1:
                paths[number].unlink(missing_ok=True)
            elif how == 2 and paths[number].exists():
                paths[number].write_bytes(mutations.some_bytes(rng, paths[number].read_bytes()))
            elif how == 3:
                values = [number, 3, 9]
                values[rng.randrange(3)] = rng.randrange(12)
                start = (0, 2, 6)[number]
                keys = [*(MODEL.kv if number == 0 else ()), *split_keys(*values)]
                GGUF(keys, MODEL.tensors[start : start + (2, 4, 3)[number]]).write(paths[number])
            elif paths[number].exists():
                paths[number].rename(folder / rng.choice(("model-00001-of-00002.gguf", "model-00004-of-00003.gguf")))
        for path in (paths[0], rng.choice(paths)):
            if path.exists():
                check_model(path)

    fuzz(tmp_path / "case", case)


class Stopped(BaseException):
    pass


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with what a conversion has left that was stopped after the first of its layers."""
    path = MODEL.write(tmp_path_factory.mktemp("stopped") / "model.gguf")
    module = import_module("llama_expert_pack.pypack.convert.convert")
    with pytest.MonkeyPatch.context() as patch:
        real = module.write_atomically

        def write(*args: object) -> None:
            real(*args)
            raise Stopped

        patch.setattr(module, "CHECKPOINT_INTERVAL_S", 0)
        patch.setattr(module, "write_atomically", write)
        with pytest.raises(Stopped):
            convert(path, jobs=1, safety_margin_bytes=0)
    return path


def test_journals(stopped: Path, tmp_path: Path) -> None:
    def case(rng: random.Random, folder: Path) -> None:
        for path in stopped.parent.iterdir():
            shutil.copy2(path, folder)
        partial, model = folder / "model.expert-pack.partial", folder / "model.gguf"
        path = folder / "model.expert-pack.partial.json"
        journal = json.loads(path.read_text())
        n_entries = 4
        if rng.random() < 0.7:
            journal["layers_done"] = rng.choice((0, 1, 2, 3, mutations.number(rng, 1)))
            n_entries = rng.choice((0, 4, 8, 12))
        if rng.random() < 0.5:
            with open(partial, "r+b") as file:
                file.seek(4096 + rng.randrange(320))
                file.write(bytes([rng.randrange(256)]))
        if rng.random() < 0.2:
            os.truncate(partial, rng.choice((0, 4096, 10_000, partial.stat().st_size - 1, 1 << 20)))
        journal["index_sha256"] = hashlib.sha256(partial.read_bytes()[4096 : 4096 + 40 * n_entries]).hexdigest()
        if rng.random() < 0.2:
            journal = mutations.json_value(rng, journal)
        data = json.dumps(journal).encode()
        path.write_bytes(mutations.some_bytes(rng, data) if rng.random() < 0.1 else data)
        if rng.random() < 0.2:
            partial.rename(folder / "model.expert-pack")
        if works(lambda: convert(model, jobs=1, safety_margin_bytes=0)):
            pack = folder / "model.expert-pack"
            check_source(open_pack(pack), model)
            works(lambda: verify(pack, deep=True, source=model, jobs=1))  # a forged digest shows here
        works(lambda: convert(model, jobs=1, safety_margin_bytes=0))
        assert not convert(model, jobs=1, safety_margin_bytes=0, restart=True, force=True).reused
        verify(folder / "model.expert-pack", deep=True, source=model, jobs=1)

    fuzz(tmp_path / "case", case)
