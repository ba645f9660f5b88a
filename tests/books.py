"""What must hold of the cache's tables at any time."""

from __future__ import annotations

from llama_expert_pack.pypack.placement.cache import ExpertCache
from llama_expert_pack.pypack.placement.slots import NONE


def wrong_books(cache: ExpertCache) -> list[str]:
    """What is inconsistent, one sentence each; empty if all is well. At rest or not."""
    with cache._lock:
        return [*_wrong_slots(cache), *_wrong_keys(cache)]


def _wrong_slots(cache: ExpertCache) -> list[str]:
    wrong: list[str] = []
    pool_of_key = [
        pool
        for pool, layer in zip(cache.layer_pool.tolist(), cache._layers, strict=True)
        for _ in range(layer.n_expert)
    ]
    for pool_index, pool in enumerate(cache._pools):
        for slot in pool._slots.tolist():
            key = int(cache.owner[slot])
            if key != NONE and pool_of_key[key] != pool_index:
                wrong.append(f"slot {slot} of pool {pool_index} holds key {key}, which belongs to another pool")
            elif key != NONE and cache.reserved_slot[key] != slot:
                wrong.append(f"slot {slot} holds key {key}, whose place is {cache.reserved_slot[key]}")
    return wrong


def _wrong_keys(cache: ExpertCache) -> list[str]:
    wrong: list[str] = []
    for key, (place, published) in enumerate(zip(cache.reserved_slot.tolist(), cache.slot_of.tolist(), strict=True)):
        if place != NONE and not (0 <= place < cache.n_slots and cache.owner[place] == key):
            wrong.append(f"key {key} has place {place}, which it does not own")
        if published != NONE and published != place:
            wrong.append(f"key {key} is published in slot {published}, but its place is {place}")
    return wrong
