"""The bytes of a trace, and what a reader refuses."""

from __future__ import annotations

import lzma
import os
import struct
import tracemalloc
from pathlib import Path

import numpy as np
import pytest

from llama_expert_pack.pypack.command.heat import draw_heat, use_counts
from llama_expert_pack.pypack.errors import TraceError, UsageError
from llama_expert_pack.pypack.format.layout import Layer
from llama_expert_pack.pypack.trace.content import MEMORY_FACTOR
from llama_expert_pack.pypack.trace.format import (
    END_BYTES,
    Kind,
    TraceEnd,
    decode_header,
    encode_header,
)
from llama_expert_pack.pypack.trace.trace import Trace, read_trace
from tests.trace_tools import encode, encode_end, encode_record

LAYERS = (Layer(0, 0, "exps", 4, 0, 4096, ()), Layer(1, 3, "exps", 3, 4, 8192, ()))
RECORDS = b"".join(
    [
        encode_record(0, Kind.SLOTS, 0, 2, [0]),
        encode_record(1, Kind.SLOTS, 0, 2, [0]),
        encode_record(0, Kind.ACQUIRE, 0, 2, [3, 1]),
        encode_record(1, Kind.ACQUIRE, 0, 6, [0, 1, 2]),
        encode_record(1, Kind.FETCH, 0, 2, [0, 1]),
        encode_record(1, Kind.FETCH, 0, 1, [2]),
        encode_record(1, Kind.READ_FAILED, 0, 0, [2]),
        encode_record(0, Kind.ACQUIRE, 1, 2, [1, 2]),
        encode_record(1, Kind.AHEAD, 1, 0, [0, 2]),
    ]
)
END = TraceEnd(acquires=3, hits=1, misses=6, evictions=2, failures=1)
HEADER = encode_header(LAYERS, 2, "lru")
TRACE = HEADER + RECORDS + encode_end(RECORDS, END)

GOLDEN = (
    "4c58505452414345" "02000000" "60000000" "02000000" "02000000"
    "6c7275" + 29 * "00" + "00000000" "{header_crc}"
    "04000000" "00000000" "0010000000000000"
    "03000000" "03000000" "0020000000000000"
    "0000" "0100" "00000000" "02000000" "01000000" "0000"
    "0100" "0100" "00000000" "02000000" "01000000" "0000"
    "0000" "0000" "00000000" "02000000" "02000000" "0300" "0100"
    "0100" "0000" "00000000" "06000000" "03000000" "0000" "0100" "0200"
    "0100" "0200" "00000000" "02000000" "02000000" "0000" "0100"
    "0100" "0200" "00000000" "01000000" "01000000" "0200"
    "0100" "0300" "00000000" "00000000" "01000000" "0200"
    "0000" "0000" "01000000" "02000000" "02000000" "0100" "0200"
    "0100" "0500" "01000000" "00000000" "02000000" "0000" "0200"
    "ffff" "0400" "00000000" "{records_crc}" "18000000"
    "ae00000000000000" "0300000000000000" "0100000000000000" "0600000000000000" "0200000000000000" "0100000000000000"
)  # fmt: skip


def written(folder: Path, data: bytes) -> Path:
    path = folder / "x.trace"
    path.write_bytes(data)
    return path


def test_golden_bytes() -> None:
    assert TRACE.hex() == GOLDEN.format(header_crc="b0236e9b", records_crc="0bede45e")


def test_what_is_read_and_written_again(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TRACE))
    assert (trace.policy, trace.top_k, trace.layers, trace.end) == ("lru", 2, LAYERS, END)
    assert trace.event(3).tolist() == [0, 1, 2] and trace.keys()[-4:].tolist() == [1, 2, 4, 6]
    assert trace.only_acquires().layer.tolist() == [0, 1, 0]
    assert trace.only_acquires().ids.tolist() == [3, 1, 0, 1, 2, 1, 2]
    assert [(pool.layers, pool.n_slots, pool.n_per_token) for pool in trace.recorded_pools()] == [
        ((0,), 2, 2),
        ((1,), 2, 2),
    ]
    assert encode(trace) == TRACE


def with_records(records: bytes, n_acquires: int = 3) -> bytes:
    return HEADER + records + encode_end(records, END._replace(acquires=n_acquires))


def encode_header_of(n_layers: int, n_most: int) -> bytes:
    """As no writer makes it: one layer has n_most experts, the others have one."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("llama_expert_pack.pypack.trace.format.MAX_TABLE", 1 << 40)
        sizes = [n_most] + [1] * (n_layers - 1)
        return encode_header([Layer(i, i, "exps", n, 0, 4096, ()) for i, n in enumerate(sizes)], 2, "lru")


def counted(records: bytes) -> bytes:
    """The trace with an end mark that counts right."""
    bare = HEADER + records
    n_acquires = n_ids = at = 0
    while at < len(records):
        _, kind, _, _, n = struct.unpack_from("<HHIII", records, at)
        n_acquires, n_ids = n_acquires + (kind == Kind.ACQUIRE), n_ids + n * (kind == Kind.ACQUIRE)
        at += 16 + 2 * n
    return bare + encode_end(records, TraceEnd(n_acquires, 0, n_ids, 0, 0))


BAD = {
    "no trace": (b"GGUF" + TRACE[4:], "is not an expert trace"),
    "empty": (b"", "is not an expert trace"),
    "version": (TRACE[:8] + b"\3" + TRACE[9:], "has trace version 3, this package reads 1 and 2"),
    "kind of the end": (with_records(encode_record(0, Kind.END, 0, 0, [1])), "no record of kind 4"),
    "stays": (with_records(encode_record(0, Kind.AHEAD, 0, 2, [1])), "a layer that there is not"),
    "ahead into few slots": (counted(RECORDS[:36] + encode_record(1, Kind.AHEAD, 0, 0, [0, 1, 2])), "more slots than"),
    "layers": (TRACE[:16] + b"\3" + TRACE[17:], "the header is damaged"),
    "short header": (HEADER[:70], "the header is damaged"),
    "policy": (TRACE[:24] + b"x" + TRACE[25:], "its checksum does not match"),
    "no end": (HEADER + RECORDS, "has no end mark"),
    "cut": (TRACE[:-10], "has no end mark"),
    "half a record": (TRACE[:120], "has no end mark"),
    "flipped bit": (TRACE[:140] + bytes([TRACE[140] ^ 1]) + TRACE[141:], "another checksum"),
    "a part is missing": (HEADER + RECORDS[18:] + TRACE[-END_BYTES:], "another checksum"),
    "kind": (with_records(encode_record(0, 9, 0, 0, [1])), "no record of kind 9"),
    "layer": (with_records(encode_record(2, Kind.ACQUIRE, 0, 1, [1])), "names layer 2 of 2"),
    "expert": (with_records(encode_record(1, Kind.ACQUIRE, 0, 1, [3])), "does not have"),
    "twice": (with_records(encode_record(1, Kind.ACQUIRE, 0, 1, [1, 1])), "an expert twice"),
    "no ids": (with_records(encode_record(1, Kind.ACQUIRE, 0, 1, [])), "has no ids"),
    "fetch": (with_records(encode_record(1, Kind.FETCH, 0, 2, [1])), "more experts than it names"),
    "acquires": (with_records(RECORDS, 4), "3 acquires of 4"),
    "too long": (with_records(struct.pack("<HHIII", 0, 0, 0, 1, 1 << 30)), "longer than the trace"),
    "no layers": (encode_header(LAYERS, 0, "lru"), "record it again"),
    "odd": (with_records(RECORDS + b"x"), "is damaged"),
    "escapes": (encode_header(LAYERS, 2, "\x1b[2J") + TRACE[96:], r"b'\\x1b\[2J' can't be the name of a cache policy"),
    "pairs": (with_records(encode_record(0, Kind.ACQUIRE, 0, 1, [1, 2])), "more experts than pairs"),
    "several failed": (with_records(encode_record(0, Kind.READ_FAILED, 0, 0, [1, 2])), "has one id has several"),
    "several arenas": (with_records(encode_record(0, Kind.SLOTS, 0, 2, [1, 2])), "has one id has several"),
    "hits": (HEADER + RECORDS + encode_end(RECORDS, END._replace(hits=2)), "name 7 experts, but hits and misses are 8"),
    "no slots yet": (counted(RECORDS[36:56] + RECORDS), "uses slots of a layer that has none"),
    "slots of one layer": (counted(RECORDS[:18] + RECORDS[36:]), "uses slots of a layer that has none"),
    "no slots since it woke": (counted(RECORDS + RECORDS[:18] + RECORDS[56:]), "uses slots of a layer"),
    "too many slots": (counted(encode_record(0, Kind.SLOTS, 0, 5, [0])), "a pool of 4 experts has 5 to 5 slots"),
    "zero slots": (counted(encode_record(0, Kind.SLOTS, 0, 0, [0])), "a pool of 4 experts has 0 to 0 slots"),
    "2^32 slots": (counted(encode_record(0, Kind.SLOTS, 0, 0xFFFFFFFF, [0])), "a pool of 4 experts has 4294967295"),
    "fetch into few slots": (counted(RECORDS[:36] + encode_record(0, Kind.FETCH, 0, 1, [0, 1, 2])), "more slots than"),
    "huge": (encode_header_of(65535, 65536), "65535 layers of up to 65536 experts are more than the 4194304"),
    "huge, uneven": (encode_header_of(65535, 300), "more than the 4194304"),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_traces_are_refused_with_one_sentence(name: str, tmp_path: Path) -> None:
    data, message = BAD[name]
    path = written(tmp_path, data)
    with pytest.raises(TraceError, match=message) as refused:
        read_trace(path)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


@pytest.mark.parametrize("n_bytes", range(0, len(RECORDS) + 1, 3))
def test_a_cut_trace_gives_its_complete_records(n_bytes: int, tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, HEADER + RECORDS[:n_bytes]), allow_cut=True)
    whole = read_trace(written(tmp_path, TRACE))
    assert trace.end is None
    n = len(trace.kind)
    assert trace.kind.tolist() == whole.kind[:n].tolist()
    assert trace.ids.tolist() == whole.ids[: whole.start[n]].tolist()
    assert 16 * n + 2 * len(trace.ids) <= n_bytes


def test_compressed_traces(tmp_path: Path) -> None:
    path = tmp_path / "x.trace.xz"
    path.write_bytes(lzma.compress(TRACE))
    assert read_trace(path).ids.tolist() == read_trace(written(tmp_path, TRACE)).ids.tolist()
    path.write_bytes(lzma.compress(TRACE)[:-9])
    with pytest.raises(TraceError, match=r"x.trace.xz is not a whole xz file"):
        read_trace(path)


def test_compressed_to_nearly_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams one after another are one file: 64 MiB of right records that take next to no room, often."""
    records = RECORDS[36:56] * 200_000
    path = tmp_path / "x.trace.xz"
    path.write_bytes(lzma.compress(HEADER + records, preset=0) + lzma.compress(records, preset=0) * 64)
    tracemalloc.start()
    with pytest.raises(TraceError, match=r"x.trace.xz holds more than the \d+ MiB that can be read here"):
        read_trace(path, allow_cut=True)
    assert tracemalloc.get_traced_memory()[1] < 200 << 20
    tracemalloc.stop()


@pytest.mark.parametrize("suffix", ["", ".xz"])
def test_more_than_there_is_memory_for(suffix: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("llama_expert_pack.pypack.trace.content.host_memory_free", lambda: 1 << 20)
    path = tmp_path / f"x.trace{suffix}"
    data = HEADER + RECORDS * 1000
    path.write_bytes(lzma.compress(data) if suffix else data)
    with pytest.raises(TraceError, match=r"x.trace.* holds more than the 0 MiB that can be read here"):
        read_trace(path, allow_cut=True)


def test_what_reading_takes(tmp_path: Path) -> None:
    """As much as the limit counts with, for records of few ids and of many."""
    wide = (Layer(0, 0, "exps", 4096, 0, 4096, ()),)
    for layers, record in ((LAYERS, RECORDS[56:78]), (wide, encode_record(0, Kind.ACQUIRE, 0, 4096, range(4096)))):
        records = record * ((4 << 20) // len(record))
        path = written(tmp_path, encode_header(layers, 2, "lru") + records)
        tracemalloc.start()
        trace = read_trace(path, allow_cut=True)
        use_counts(trace)
        peak = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        assert peak < MEMORY_FACTOR * path.stat().st_size


@pytest.mark.timeout(30)
def test_a_fifo_or_a_folder_is_no_trace(tmp_path: Path) -> None:
    os.mkfifo(tmp_path / "x.trace")
    with pytest.raises(TraceError, match=r"x.trace: the trace can't be read: it is a FIFO, not a regular file"):
        read_trace(tmp_path / "x.trace")
    with pytest.raises(TraceError, match="the trace can't be read: Is a directory"):
        read_trace(tmp_path)


def test_sessions_of_a_server_that_slept(tmp_path: Path) -> None:
    woken = encode_record(1, Kind.SLOTS, 0, 3, [0]) + encode_record(0, Kind.SLOTS, 0, 4, [0])
    records = RECORDS + woken + RECORDS[36:56]
    trace = read_trace(written(tmp_path, counted(records)))
    assert trace.session_starts() == [0, 9]
    assert [pool.n_slots for pool in trace.recorded_pools(0, 9)] == [2, 2]
    assert [(pool.layers, pool.n_slots) for pool in trace.recorded_pools(9, 12)] == [((1,), 3), ((0,), 4)]
    assert encode(trace) == counted(records)


def test_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(TraceError, match=r"no.trace: the trace can't be read: No such file"):
        read_trace(tmp_path / "no.trace")


def test_models_that_do_not_fit_into_a_trace() -> None:
    with pytest.raises(TraceError, match="up to 65536 experts"):
        encode_header([LAYERS[0], Layer(1, 1, "exps", 65537, 4, 4096, ())], 2, "lru")
    with pytest.raises(TraceError, match="300 layers of up to 65536"):
        encode_header([Layer(i, i, "exps", 65536, 0, 4096, ()) for i in range(300)], 2, "lru")
    with pytest.raises(TraceError, match="top-1099511627776: run it without a trace"):
        encode_header(LAYERS, 2**40, "lru")
    with pytest.raises(TraceError, match="blocks up to 4294967296"):
        encode_header([Layer(0, 2**32, "exps", 4, 0, 4096, ())], 2, "lru")
    assert decode_header(HEADER, "x")[1] == len(HEADER) == 96


def made_by_nobody(folder: Path) -> Trace:
    records = RECORDS[36:56]
    return read_trace(
        written(folder, encode_header(LAYERS, 2, "") + records + encode_end(records, TraceEnd(1, 0, 0, 0, 0)))
    )


def test_a_trace_without_a_run_has_no_counters_and_no_pools(tmp_path: Path) -> None:
    trace = made_by_nobody(tmp_path)
    assert trace.end is None and trace.event(0).tolist() == [3, 1]
    with pytest.raises(TraceError, match="its pools are not known"):
        trace.recorded_pools()


def test_heat_counts_and_pictures(tmp_path: Path) -> None:
    trace = read_trace(written(tmp_path, TRACE))
    expected = [[0, 2, 1, 1], [1, 1, 1, np.nan]]
    np.testing.assert_array_equal(use_counts(trace), expected)
    draw_heat(trace, tmp_path / "heat.png")
    draw_heat(trace, tmp_path / "heat.svg", ranked=True)
    assert (tmp_path / "heat.png").read_bytes()[:4] == b"\x89PNG"
    assert b"<svg" in (tmp_path / "heat.svg").read_bytes()
    with pytest.raises(UsageError, match=r"a .png or .svg file"):
        draw_heat(trace, tmp_path / "heat.txt")
    with pytest.raises(UsageError, match="can't be written: No such file"):
        draw_heat(trace, tmp_path / "no" / "heat.svg")
    draw_heat(trace, tmp_path / "heat.svg")  # over a picture


@pytest.mark.timeout(60)
def test_a_picture_never_replaces_a_trace(tmp_path: Path) -> None:
    path = tmp_path / "t.svg"
    path.write_bytes(TRACE)
    (tmp_path / "link.svg").symlink_to("t.svg")
    (tmp_path / "hard.svg").hardlink_to(path)
    (tmp_path / "other.svg").write_bytes(TRACE)
    os.mkfifo(tmp_path / "fifo.svg")
    trace = read_trace(path)
    for name in ("t", "link", "hard"):
        with pytest.raises(UsageError, match=f"{name}.svg: the heat map is the same file as the trace"):
            draw_heat(trace, tmp_path / f"{name}.svg")
    with pytest.raises(UsageError, match=r"other.svg: .*something else than a picture, which would be lost"):
        draw_heat(trace, tmp_path / "other.svg")
    with pytest.raises(UsageError, match=r"fifo.svg: .*it is a FIFO"):
        draw_heat(trace, tmp_path / "fifo.svg")
    assert path.read_bytes() == (tmp_path / "other.svg").read_bytes() == TRACE


def test_the_name_of_a_trace_is_only_text(tmp_path: Path) -> None:
    path = tmp_path / "a\x1b]0;$\\frac$.trace"
    path.write_bytes(TRACE)
    draw_heat(read_trace(path), tmp_path / "heat.svg")
    assert b"\x1b" not in (tmp_path / "heat.svg").read_bytes()


def test_more_pools_than_a_replay_has_tables_for(tmp_path: Path) -> None:
    """By sizes of blocks, and by devices."""
    message = r"x.trace has 4000 pools and 24000 experts: more than 16777216 pairs"
    many = [Layer(i, i, "exps", 6, 0, 4096 * (i + 1), ()) for i in range(4000)]
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, encode_header(many, 2, "lru")), allow_cut=True)
    alike = [Layer(i, i, "exps", 6, 0, 4096, ()) for i in range(4000)]
    slots = b"".join(encode_record(i, Kind.SLOTS, 0, 2, [i]) for i in range(4000))
    with pytest.raises(TraceError, match=message):
        read_trace(written(tmp_path, encode_header(alike, 2, "lru") + slots), allow_cut=True)
