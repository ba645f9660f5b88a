"""The replay with host memory beside the device: one cache of both, and what is used more goes up."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from click.testing import CliRunner

from llama_expert_pack.pypack.command.cli import cli
from llama_expert_pack.pypack.policy.lru import Lru
from llama_expert_pack.pypack.policy.pool import Pool
from llama_expert_pack.pypack.replay.engine import Acquires, _Run, replay
from llama_expert_pack.pypack.trace.trace import Trace
from tests.unit.test_replay import STORED, make_trace

N_EXPERTS, N_DEVICE, N_HOST = 200, 40, 60


def skewed_trace(n_tokens: int) -> Trace:
    """Two layers; first every expert once, in order, then ten favourites of each, which came too late for the device."""
    random = np.random.default_rng(1)
    acquires: list[tuple[int, list[int]]] = []
    for token in range(n_tokens):
        for layer in (0, 1):
            if token < 40:
                acquires.append((layer, [token, 40 + token]))
            else:
                acquires.append((layer, sorted({int(random.integers(60, 70)), int(random.integers(0, 80))})))
    trace = make_trace([(N_EXPERTS // 2, 4096)] * 2, acquires)
    return replace(trace, step=np.repeat(np.arange(n_tokens), 2))


def pools(n_host: int, n_spare: int) -> list[Pool]:
    return [Pool(4096, (0, 1), N_EXPERTS, 0, N_DEVICE - n_spare + n_host, 0, 4, n_host, n_spare)]


def test_both_hold_what_one_cache_of_their_sum_would() -> None:
    acquires = Acquires(skewed_trace(400))
    both = replay(acquires, pools(N_HOST, 4), Lru())
    one = replay(acquires, [Pool(4096, (0, 1), N_EXPERTS, 0, N_DEVICE - 4 + N_HOST, 0, 4)], Lru())
    assert (both.hits, both.misses, both.evictions) == (one.hits, one.misses, one.evictions)
    assert one.host_hits == 0 < both.host_hits < both.hits


def test_favourites_go_up_a_few_at_a_time() -> None:
    acquires = Acquires(skewed_trace(400))
    host_hits = {}
    for n_spare in (0, 1, 8):
        run = _Run(acquires, pools(N_HOST + n_spare, n_spare), Lru())  # as many slots each time
        run.all()
        assert run._tiers is not None
        host_hits[n_spare] = run.counts.host_hits
        assert (run._tiers.n_up > 0) == (run._tiers.n_down > 0) == (n_spare > 0)
        assert abs(run._tiers.n_up - run._tiers.n_down) <= n_spare
        n_in_host = int(run._tiers.in_place[: N_DEVICE + N_HOST].sum())
        assert N_HOST <= n_in_host <= N_HOST + 2 * n_spare, "as much lies there as before, but for spare blocks"
    assert max(host_hits[1], host_hits[8]) < 0.7 * host_hits[0]


@pytest.mark.parametrize("name", ["sample.trace.xz"])
def test_the_table_shows_hits_in_host_memory(name: str, tmp_path: Path) -> None:
    arguments = ["replay", str(STORED / name), "--policy", "lru", "--budgets", "15%", "--out", str(tmp_path)]
    without = CliRunner().invoke(cli, arguments)
    found = CliRunner().invoke(cli, [*arguments, "--ram", "15%"])
    assert without.exit_code == found.exit_code == 0
    assert "(0." in found.output and "(0." not in without.output
    none = CliRunner().invoke(cli, [*arguments, "--ram", "0%"])
    assert none.exit_code == 0 and "(0." not in none.output, "as without"
    huge = CliRunner().invoke(cli, [*arguments, "--ram", "100TiB"])
    assert huge.exit_code == 0 and "| in tokens' experts | 8.0 |" in huge.output, "no more than there are"
    small = CliRunner().invoke(cli, ["replay", str(STORED / name), "--budgets", "0%,1B"])
    assert small.exit_code == 1 and "none of the budgets 0%,1B holds" in small.output
    wrong = CliRunner().invoke(cli, [*arguments, "--ram", "much"])
    assert wrong.exit_code == 1 and "--ram must be a size" in wrong.output
