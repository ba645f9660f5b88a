"""A pack that changes while it is open, and a drive that begins to lie: no wrong logits without an error, none afterwards."""

from __future__ import annotations

import mmap
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from lab.logits import minimum_budget
from llama_expert_pack import Llama
from llama_expert_pack.pypack.errors import DecodeError
from llama_expert_pack.pypack.format.pack import open_pack
from llama_expert_pack.pypack.source.match import find_pack
from tests.books import wrong_books
from tests.runtime.packed import bits, evaluate, loaded, provider_of, variant

BATCHES = [20, 7, 1, 1, 13, 1, 1]
LOADS_MAX = 3000  # one read in 256 at least is checked again


def data_of(pack: Path) -> tuple[int, bytes]:
    """Where the blocks begin, and their bytes."""
    start = open_pack(pack).layers[0].data_offset
    return start, pack.read_bytes()[start:]


def overwrite(pack: Path, start: int, data: bytes) -> None:
    with open(pack, "r+b") as file:
        file.seek(start)
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def damaged(data: bytes) -> bytes:
    """Each expert has the bytes of another: weights that compute, and no NaN that would give them away."""
    return data[len(data) // 5 :] + data[: len(data) // 5]


def once_more(llm: Llama) -> np.ndarray:
    llm.reset()
    return evaluate(llm, BATCHES)


def first_error(llm: Llama, expected: np.ndarray, must_match_till_then: bool) -> str:
    """Evaluates until it fails."""
    enough = llm.expert_stats().loads + LOADS_MAX
    while llm.expert_stats().loads < enough:
        llm.reset()
        try:
            found = evaluate(llm, BATCHES)
        except DecodeError as error:
            if must_match_till_then:
                assert (bits(llm) == expected[: llm.n_tokens]).all()
            return str(error)
        if must_match_till_then:
            assert (found == expected).all()
    raise AssertionError("nothing was noticed")


@pytest.mark.parametrize("verify", ["first", "every", "off"])
@pytest.mark.parametrize("direct_io", [True, False])
def test_a_pack_that_is_overwritten_while_open_fails_decodes_until_it_is_right_again(
    verify: str, direct_io: bool, tmp_path: Path
) -> None:
    overwrite_while_open(tmp_path, expert_verify=verify, expert_direct_io=direct_io)


def overwrite_while_open(folder: Path, **options: Any) -> None:
    path = variant("type-Q4_K", folder)
    pack = find_pack(path)
    start, data = data_of(pack)
    with loaded(path, expert_cache=minimum_budget(open_pack(pack)), **options) as llm:
        expected = once_more(llm)
        overwrite(pack, start, damaged(data))
        assert "has checksum" in first_error(llm, expected, must_match_till_then=True)
        overwrite(pack, start, data)
        for _ in range(3):
            assert (once_more(llm) == expected).all()
        assert wrong_books(provider_of(llm).cache) == []


def test_a_pack_that_is_only_touched_fails_nothing(tmp_path: Path) -> None:
    path = variant("type-Q4_K", tmp_path)
    pack = find_pack(path)
    with loaded(path, expert_cache=minimum_budget(open_pack(pack))) as llm:
        expected = once_more(llm)
        os.utime(pack)
        for _ in range(3):
            assert (once_more(llm) == expected).all()
        assert llm.expert_stats().failures == 0


@contextmanager
def lying(pack: Path, start: int, data: bytes) -> Iterator[Callable[[bool], None]]:
    """A drive that gives other bytes when it is told to, of a file that nobody has written to since it was opened.

    The page cache stands in for it: pages that were written through a mapping before stay writable there, and what is
    stored in them later changes no time of the file. For readers without direct I/O.
    """
    with open(pack, "r+b") as file, mmap.mmap(file.fileno(), 0) as pages:
        pages[start:] = data

        def lie(on: bool) -> None:
            pages[start:] = damaged(data) if on else data

        yield lie


def test_a_drive_that_begins_to_lie_is_noticed_and_what_it_gave_is_forgotten(tmp_path: Path) -> None:
    lie_while_open(tmp_path)


def lie_while_open(folder: Path, **options: Any) -> None:
    path = variant("type-Q4_K", folder)
    pack = find_pack(path)
    start, data = data_of(pack)
    half = open_pack(pack).payload_bytes // 2
    with (
        lying(pack, start, data) as lie,
        loaded(path, expert_cache=max(half, minimum_budget(open_pack(pack))), expert_direct_io=False, **options) as llm,
    ):
        expected = once_more(llm)
        before = pack.stat()
        lie(True)
        assert pack.stat().st_ctime_ns == before.st_ctime_ns  # or the other way to notice it is tested
        why = first_error(llm, expected, must_match_till_then=False)
        assert "came back with other bytes" in why or "has checksum" in why
        lie(False)
        for _ in range(3):
            assert (once_more(llm) == expected).all()
        assert wrong_books(provider_of(llm).cache) == []
