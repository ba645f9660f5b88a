"""Changes to structured values: numbers at their limits, names that nearly fit, parts missing, twice or swapped."""

from __future__ import annotations

import random
from typing import Any

NUMBERS = (0, 1, 2, 3, 4, 31, 32, 255, 256, 4095, 4096, 65535, 65536, *(1 << n for n in range(20, 65, 4)))
TAILS = ("\n", "\0", " ", "x", "\u0661", "\x1b[31m", "/..", "'", '"', "é" * 40)


def number(rng: random.Random, value: int = 0) -> int:
    return rng.choice((rng.choice(NUMBERS), rng.choice(NUMBERS) - 1, -1, value + 1, value - 1, 2 * value, -value))


def text(rng: random.Random, value: str) -> str:
    place = rng.randrange(len(value) + 1)
    return rng.choice(
        (
            "",
            value + rng.choice(TAILS),
            value[:place] + rng.choice(TAILS) + value[place:],
            value[:place] + value[place + 1 :],
            value[:place] + rng.choice("01234exps.gate_up-") + value[place + 1 :],
            value * 3,
        )
    )


def shuffled(rng: random.Random, values: list[Any]) -> list[Any]:
    """One missing, twice, or two swapped."""
    if not values:
        return [0]
    out = list(values)
    i, j = rng.randrange(len(out)), rng.randrange(len(out))
    how = rng.randrange(3)
    if how == 0:
        del out[i]
    elif how == 1:
        out.insert(j, out[i])
    else:
        out[i], out[j] = out[j], out[i]
    return out


def json_value(rng: random.Random, value: Any) -> Any:
    """The value with one thing in it changed, however deep."""
    if rng.random() < 0.03:
        return rng.choice((None, True, 1.5, "", [], {}, -1))
    if isinstance(value, bool):
        return not value
    if isinstance(value, int):
        return number(rng, value)
    if isinstance(value, str):
        return text(rng, value)
    if isinstance(value, list):
        if not value or rng.random() < 0.2:
            return shuffled(rng, value)
        place = rng.randrange(len(value))
        return [json_value(rng, item) if i == place else item for i, item in enumerate(value)]
    key = rng.choice(list(value))
    how = rng.random()
    if how < 0.05:
        return {k: v for k, v in value.items() if k != key}
    if how < 0.1:
        return {**value, text(rng, key): value[key]}
    return {**value, key: json_value(rng, value[key])}


def some_bytes(rng: random.Random, data: bytes) -> bytes:
    """Bits flipped, cut off, or something behind it."""
    how = rng.randrange(4)
    if how == 0 or not data:
        return data[: rng.randrange(len(data) + 1)]
    if how == 1:
        return data + bytes(rng.choice((1, 32, 4096)))
    out = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        out[rng.randrange(len(out))] ^= 1 << rng.randrange(8)
    return bytes(out)
