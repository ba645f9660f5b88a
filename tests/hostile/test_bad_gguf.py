"""Every way in which a GGUF can be wrong has its own sentence, and leaves nothing behind."""

from __future__ import annotations

import contextlib
import os
import struct
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from llama_expert_pack.pypack.convert.convert import convert
from llama_expert_pack.pypack.errors import ExpertPackError, GGUFError, ReadError
from llama_expert_pack.pypack.gguf.model import read_model
from tests.gguf_bytes import (
    ARRAY,
    BOOL,
    F32,
    GGUF,
    I32,
    STRING,
    U8,
    U16,
    U32,
    T,
    array,
    facts,
    kv,
    moe_tensors,
    split,
    split_keys,
    string,
    text,
    tiny_moe,
)

GOOD = tiny_moe()


def with_tensors(*tensors: T) -> bytes:
    return GGUF(facts(), tensors).build()


def with_kv(*entries: bytes) -> bytes:
    return GGUF([*facts(), *entries], moe_tensors(0)).build()


def raw_kv(key: str, type_id: int, payload: bytes) -> bytes:
    return string(key) + struct.pack("<I", type_id) + payload


def raw_array(key: str, element: int, count: int) -> bytes:
    return raw_kv(key, ARRAY, struct.pack("<IQ", element, count))


BAD_FILES: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "is empty"),
    "html": (b"\n<!DOCTYPE html><html><body>404</body></html>", "is a web page"),
    "lfs-pointer": (b"version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "Git LFS pointer"),
    "other-format": (b"PK\x03\x04" + bytes(100), "is not a GGUF"),
    "too-short": (b"GGUF\x03\0\0\0", "too short"),
    "big-endian": (replace(GOOD, order=">").build(), "big-endian"),
    "version-0": (replace(GOOD, version=0).build(), "version 0"),
    "version-1": (replace(GOOD, version=1).build(), "version 1"),
    "version-4": (replace(GOOD, version=4).build(), "version 4"),
    "cut-in-metadata": (GOOD.build()[:60], "truncated|claims"),
    "cut-in-tensor-table": (GOOD.head()[:-20], "truncated"),
    "cut-in-data": (GOOD.build()[:-100], "truncated or out of range"),
    "tensor-count-overflow": (replace(GOOD, n_tensors=1 << 63).build(), "claims 9223372036854775808 tensors"),
    "kv-count-overflow": (replace(GOOD, n_kv=(1 << 64) - 1).build(), "claims 18446744073709551615 metadata"),
    "tensor-count-too-big": (replace(GOOD, n_tensors=10).build(), "tensor 9"),
    "key-length-overflow": (with_kv(struct.pack("<Q", (1 << 64) - 1)), "claims 18446744073709551615 bytes"),
    "key-empty": (with_kv(kv("", U8, 1)), "is empty"),
    "key-twice": (with_kv(kv("a", U8, 1), kv("a", U8, 2)), "a second 'a'"),
    "key-not-utf8": (with_kv(kv(b"\xff\xfe", U8, 1)), "not UTF-8"),
    "value-length-overflow": (with_kv(raw_kv("a", STRING, struct.pack("<Q", 1 << 62))), "claims"),
    "value-type": (with_kv(raw_kv("a", 13, bytes(8))), "unknown value type 13"),
    "array-element-type": (with_kv(raw_array("a", 99, 1)), "unknown element type 99"),
    "array-of-arrays": (with_kv(raw_array("a", ARRAY, 1)), "unknown element type 9"),
    "array-count-overflow": (with_kv(raw_array("a", U32, 1 << 62)), "claims 4611686018427387904 elements"),
    "strings-count-overflow": (
        with_kv(raw_array("a", STRING, 1 << 61)),
        "claims 2305843009213693952 elements",
    ),
    "string-in-array-overflow": (
        with_kv(raw_array("a", STRING, 2) + string("x") + struct.pack("<Q", 1 << 40)),
        "a string of array 'a' claims 1099511627776 bytes",
    ),
    "alignment-zero": (with_kv(kv("general.alignment", U32, 0)), "power of two, found 0"),
    "alignment-48": (with_kv(kv("general.alignment", U32, 48)), "power of two, found 48"),
    "alignment-float": (with_kv(kv("general.alignment", F32, 32.0)), "power of two, found 32.0"),
    "alignment-text": (with_kv(text("general.alignment", "32")), "power of two, found '32'"),
    "alignment-bool": (with_kv(kv("general.alignment", BOOL, 1)), "power of two, found True"),
    "alignment-huge": (with_kv(kv("general.alignment", U32, 1 << 31)), "truncated or out of range"),
    "tensor-type-unknown": (with_tensors(T("a", (32,), 999, data=bytes(32))), "unknown ggml type 999"),
    "tensor-type-removed": (with_tensors(T("a", (32,), 4, data=bytes(32))), "unknown ggml type 4"),
    "tensor-type-negative": (with_tensors(T("a", (32,), -1, data=bytes(32))), "unknown ggml type 4294967295"),
    "tensor-twice": (with_tensors(T("a", (32,)), T("a", (32,))), "'a' is there twice"),
    "tensors-overlap": (with_tensors(T("a", (32,)), T("b", (32,), offset=64)), "'a' and 'b' overlap"),
    "tensors-same-place": (with_tensors(T("a", (32,)), T("b", (32,), offset=0)), "overlap"),
    "tensor-out-of-range": (with_tensors(T("a", (32,), offset=1 << 40)), "truncated or out of range"),
    "tensor-offset-overflow": (
        with_tensors(T("a", (32,), offset=(1 << 64) - 32)),
        "truncated or out of range",
    ),
    "tensor-misaligned": (with_tensors(T("a", (64,), offset=8)), "misaligned"),
    "tensor-name-empty": (with_tensors(T("", (32,))), "name of 0 bytes"),
    "tensor-name-long": (with_tensors(T("x" * 64, (32,))), "name of 64 bytes"),
    "tensor-name-not-utf8": (with_tensors(T(b"\xff", (32,))), "not UTF-8"),
    "dims-none": (with_tensors(T("a", (), data=b"")), "has 0 dimensions"),
    "dims-five": (with_tensors(T("a", (1, 1, 1, 1, 1))), "has 5 dimensions"),
    "dim-zero": (with_tensors(T("a", (32, 0, 4), data=b"")), "at least 1"),
    "dim-negative": (with_tensors(T("a", (32, -1), data=b"")), "at least 1"),
    "dims-overflow": (with_tensors(T("a", (1 << 62, 4), data=b"")), "overflows 63 bits"),
    "bytes-overflow": (with_tensors(T("a", (1 << 61, 2), data=b"")), "overflows 63 bits"),
    "row-not-whole-blocks": (
        with_tensors(T("a", (100, 4), 12, data=bytes(999))),
        "not a multiple of the 256",
    ),
    "concatenated": (GOOD.build() + GOOD.build(), "follow the last tensor"),
    "one-byte-more": (GOOD.build() + b"\0", "1 bytes follow the last tensor"),
}


def assert_refused(path: Path, sentence: str) -> None:
    """Refused by reader and converter, in one line that names the file, with no output left behind."""
    before = sorted(path.parent.iterdir())
    with pytest.raises(GGUFError, match=sentence) as caught:
        read_model(path)
    assert path.name.split("-0000")[0] in str(caught.value)
    assert "\n" not in str(caught.value)
    with pytest.raises(ExpertPackError):
        convert(path)
    assert sorted(path.parent.iterdir()) == before


@pytest.mark.parametrize("name", BAD_FILES)
def test_bad_file(name: str, tmp_path: Path) -> None:
    data, sentence = BAD_FILES[name]
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    assert_refused(path, sentence)


def test_every_cut_is_refused(tmp_path: Path) -> None:
    data = tiny_moe(n_block=1).build()
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    for end in [len(data) - 1, *range(len(data) - 997, 1200, -997), *range(1200, -1, -1)]:
        os.truncate(path, end)
        with pytest.raises(GGUFError):
            read_model(path)


def test_any_byte_of_the_head_changed_never_crashes(tmp_path: Path) -> None:
    """A changed byte is either harmless or refused as a GGUFError, never another exception."""
    model = tiny_moe(n_block=1)
    data = bytearray(model.build())
    path = tmp_path / "model.gguf"
    path.write_bytes(data)
    with open(path, "r+b", buffering=0) as file:
        for i in range(len(model.head())):
            for value in (0, 0x7F, 0xFF, data[i] ^ 1):
                os.pwrite(file.fileno(), bytes([value]), i)
                with contextlib.suppress(GGUFError):
                    read_model(path)
            os.pwrite(file.fileno(), data[i : i + 1], i)
    assert path.read_bytes() == data


def test_not_there(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="does not exist"):
        read_model(tmp_path / "model.gguf")


def test_folder(tmp_path: Path) -> None:
    with pytest.raises(GGUFError, match="is a folder"):
        read_model(tmp_path)


def test_device() -> None:
    with pytest.raises(ReadError, match="is a character device, not a regular file"):
        read_model("/dev/null")


def broken_shards(folder: Path, how: Callable[[list[Path]], Path | None]) -> Path:
    paths = split(GOOD, [3, 3, 3], folder)
    return how(paths) or paths[0]


def swap(paths: list[Path]) -> None:
    second, third = paths[1].read_bytes(), paths[2].read_bytes()
    paths[1].write_bytes(third)
    paths[2].write_bytes(second)


def concatenate(paths: list[Path]) -> Path:
    paths[0].write_bytes(b"".join(p.read_bytes() for p in paths))
    return paths[0]


def without(*missing: int) -> Callable[[list[Path]], None]:
    def apply(paths: list[Path]) -> None:
        for i in missing:
            paths[i].unlink()

    return apply


def rename_first(paths: list[Path]) -> Path:
    return paths[0].rename(paths[0].with_name("model.gguf"))


def rewrite(index: int, **changes: int) -> Callable[[list[Path]], None]:
    def apply(paths: list[Path]) -> None:
        values = {"no": index, "count": 3, "n_tensors": 9} | changes
        keys = split_keys(values["no"], values["count"], values["n_tensors"])
        kvs = [*(GOOD.kv if index == 0 else ()), *keys]
        GGUF(kvs, GOOD.tensors[3 * index : 3 * index + 3]).write(paths[index])

    return apply


def write_second(*entries: bytes, tensors: slice = slice(3, 6)) -> Callable[[list[Path]], None]:
    def apply(paths: list[Path]) -> None:
        GGUF(entries, GOOD.tensors[tensors]).write(paths[1])

    return apply


BAD_SHARDS: dict[str, tuple[Callable[[list[Path]], Path | None], str]] = {
    "missing-second": (without(1), "-00002-of-00003.gguf is missing"),
    "missing-both": (without(1, 2), "and 1 more is missing"),
    "swapped": (swap, "is named shard 2 of 3, but is shard 3 of 3"),
    "concatenated": (concatenate, "follow the last tensor"),
    "later-as-first": (lambda p: p[1], "shard 2 of 3, not the first: give model-00001-of-00003.gguf"),
    "renamed-first": (rename_first, "not named NAME-00001-of-00003.gguf"),
    "misnumbered": (rewrite(1, no=0), "is named shard 2 of 3, but is shard 1 of 3"),
    "count-of-other": (rewrite(2, count=4), "is named shard 3 of 3, but is shard 3 of 4"),
    "count-of-first": (rewrite(0, count=4), "not named NAME-00001-of-00004.gguf"),
    "tensor-count": (rewrite(0, n_tensors=10), "hold 9 tensors, but split.tensors.count says 10"),
    "no-split-no": (write_second(kv("split.count", U16, 3)), "split.no must be a whole number, found None"),
    "split-no-text": (write_second(text("split.no", "1")), "split.no must be a whole number, found '1'"),
    "split-no-negative": (write_second(kv("split.no", I32, -1)), "split.no must be a whole number, found -1"),
    "tensor-in-two": (
        write_second(*split_keys(1, 3, 9), tensors=slice(0, 3)),
        "is also in model-00001-of-00003",
    ),
    "second-cut": (
        lambda p: (p[1].write_bytes(p[1].read_bytes()[:-9]), None)[1],
        "truncated or out of range",
    ),
    "second-html": (lambda p: (p[1].write_bytes(b"<html></html>" * 9), None)[1], "is a web page"),
}


@pytest.mark.parametrize("name", BAD_SHARDS)
def test_bad_shards(name: str, tmp_path: Path) -> None:
    how, sentence = BAD_SHARDS[name]
    assert_refused(broken_shards(tmp_path, how), sentence)


def test_shard_name_without_split_metadata(tmp_path: Path) -> None:
    path = GOOD.write(tmp_path / "model-00001-of-00002.gguf")
    assert_refused(path, "named as shard 1 of 2 but its metadata has no split.count")


BAD_MODELS: dict[str, tuple[GGUF, str]] = {
    "dense": (
        GGUF(facts("llama"), [T("blk.0.ffn_up.weight", (64, 32))]),
        "no routed experts .dense model, architecture 'llama'.",
    ),
    "no-tensors": (GGUF(facts()), "no routed experts"),
    "only-biases": (GGUF(facts(), [T("blk.0.ffn_up_exps.bias", (64, 4))]), "no routed experts"),
    "one-tensor-an-expert": (
        GGUF(facts(), [T(f"blk.0.ffn_up.{e}.weight", (64, 32)) for e in range(4)]),
        "keeps each expert in its own tensor",
    ),
    "expert-counts-differ": (
        GGUF(
            facts(),
            [T("blk.0.ffn_up_exps.weight", (64, 32, 4)), T("blk.0.ffn_down_exps.weight", (32, 64, 5))],
        ),
        "has 4 experts but 'blk.0.ffn_down_exps.weight' has 5",
    ),
}


@pytest.mark.parametrize("name", BAD_MODELS)
def test_model_that_cannot_be_packed(name: str, tmp_path: Path) -> None:
    model, sentence = BAD_MODELS[name]
    path = model.write(tmp_path / "model.gguf")
    with pytest.raises(GGUFError, match=sentence):
        convert(path)
    assert list(tmp_path.iterdir()) == [path]


def test_array_with_kept_values_is_bounded(tmp_path: Path) -> None:
    """Long numeric arrays are passed over, short ones are kept."""
    model = GGUF([*facts(), array("short", U16, range(1024)), array("long", U16, range(1025))], moe_tensors(0))
    metadata = read_model(model.write(tmp_path / "model.gguf")).metadata
    assert metadata["short"] == tuple(range(1024))
    assert "long" not in metadata
