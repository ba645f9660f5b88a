from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.policy import DEFAULT_POLICY, POLICIES, make_policy
from llama_expert_pack.pypack.policy.base import Policy
from llama_expert_pack.pypack.policy.freq_age import FreqAge
from llama_expert_pack.pypack.policy.freq_recency import FreqThenRecency
from llama_expert_pack.pypack.policy.lru import Lru
from llama_expert_pack.pypack.replay.policies import REPLAY_POLICIES

Score = Callable[[int, int, int], tuple[Any, Any]]

# (freq, last_use, now) -> what is evicted first, as the rules say it
RULES: dict[type[Policy], Score] = {
    Lru: lambda freq, used, now: (used, freq),
    FreqAge: lambda freq, used, now: (Fraction(freq, now - used + 1), used),
    FreqThenRecency: lambda freq, used, now: (freq, used),
}


@pytest.mark.parametrize("policy", RULES)
@given(data=st.data())
def test_against_the_rule(policy: type[Policy], data: st.DataObject) -> None:
    n_keys = data.draw(st.integers(1, 40))
    wide = data.draw(st.sampled_from([3, 1000]))  # few values: many ties
    now = wide
    freq = np.array(data.draw(st.lists(st.integers(0, wide), min_size=n_keys, max_size=n_keys)), np.int64)
    used = np.array(data.draw(st.lists(st.integers(0, now), min_size=n_keys, max_size=n_keys)), np.int64)
    keys = data.draw(st.lists(st.integers(0, n_keys - 1), unique=True, max_size=n_keys))
    candidates = np.array(keys, np.intp)
    n = data.draw(st.integers(0, len(keys)))

    chosen = policy().victims(candidates, n, freq, used, now).tolist()

    assert len(set(chosen)) == len(chosen) == n
    scores = [RULES[policy](int(freq[key]), int(used[key]), now) for key in keys]
    assert Counter(scores[i] for i in chosen) == Counter(sorted(scores)[:n])


def test_the_rules_differ_where_they_should() -> None:
    # key 0: often, long ago; key 1: once, just now; key 2: a few times, a while ago
    freq, used, now = np.array([50, 1, 3], np.int64), np.array([1, 100, 60], np.int64), 100
    first = {
        name: POLICIES[name]().victims(np.arange(3, dtype=np.intp), 1, freq, used, now).tolist()
        for name in ("lru", "freq-recency", "freq-age")
    }
    assert first == {"lru": [0], "freq-recency": [1], "freq-age": [2]}


def test_names() -> None:
    assert all(type(make_policy(name)) is POLICIES[name] for name in POLICIES)
    assert DEFAULT_POLICY in POLICIES
    with pytest.raises(UsageError, match=r"'fifo'.*freq-age, freq-recency, lru"):
        make_policy("fifo")


@pytest.mark.parametrize("name", ["arc", "slru", "static-hot"])
def test_what_was_never_the_best_is_for_replays_only(name: str) -> None:
    with pytest.raises(UsageError, match=rf"'{name}': choose one of adaptive, aged-lfu, by-budget"):
        make_policy(name)
    assert type(make_policy(name, REPLAY_POLICIES)) is REPLAY_POLICIES[name]
