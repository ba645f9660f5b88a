"""The table of options, and what comes from it."""

from __future__ import annotations

import inspect
from pathlib import Path
from typing import Any

import pytest

from llama_expert_pack.pypack.errors import UsageError
from llama_expert_pack.pypack.policy import POLICIES
from llama_expert_pack.pypack.values.flags import flag_help, flag_off, flag_variable, values_of_flags, with_flags
from llama_expert_pack.pypack.values.option_tables import flag_table, keyword_lines, keyword_table, with_keywords
from llama_expert_pack.pypack.values.options import OPTIONS, ExpertOptions

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize(("page", "table"), [("README.md", keyword_table()), ("docs/SERVER.md", flag_table())])
def test_the_tables_of_the_documentation_are_these(page: str, table: str) -> None:
    said = f"{page} needs these lines (python -m llama_expert_pack.pypack.values.option_tables prints them):\n{table}"
    assert table in (ROOT / page).read_text(), said


def test_defaults_are_values_that_pass_the_checks() -> None:
    for name, option in OPTIONS.items():
        assert option.kind.check(name, option.default) == option.default == getattr(ExpertOptions(), name)
    assert ExpertOptions().expert_policy in POLICIES


def test_every_option_is_said_in_each_form() -> None:
    assert len({option.flag for option in OPTIONS.values()}) == len(OPTIONS)
    for name, option in OPTIONS.items():
        assert option.flag.startswith("--expert-") and flag_variable(option).startswith("LLAMA_ARG_EXPERT_")
        assert (flag_off(option) is None) == (option.hint != "") and "{" not in flag_help(option)
        assert with_flags(f"lower {name}.") == f"lower {option.flag}."
        assert f"        {name}: " in keyword_lines("        ")


def test_the_signature_has_the_keywords_where_help_looks() -> None:
    @with_keywords
    def init(self: object, model_path: str, **others: Any) -> None: ...

    parameters = list(inspect.signature(init).parameters.values())
    assert [parameter.name for parameter in parameters] == ["self", "model_path", *OPTIONS, "others"]
    for parameter in parameters[2:-1]:
        assert parameter.kind is inspect.Parameter.KEYWORD_ONLY
        assert parameter.default == OPTIONS[parameter.name].default


def test_texts_of_flags() -> None:
    given = {
        "--expert-pack": "auto", "--expert-direct-io": "off", "--expert-stage-slots": "7", "--expert-stats-file": "x",
        "--expert-stats-interval": "2.5", "--expert-cache": "20GiB", "--expert-read-splits": "many",
    }  # fmt: skip
    assert values_of_flags(given) == {
        "expert_pack": True, "expert_direct_io": False, "expert_stage_slots": 7, "expert_stats_path": "x",
        "expert_stats_interval": 2.5, "expert_cache": "20GiB", "expert_read_splits": "many",
    }  # fmt: skip
    assert values_of_flags({"--expert-pack": "none"}) == {"expert_pack": None}


@pytest.mark.parametrize(
    ("given", "message"),
    [
        ({"expert_cache": "much"}, "expert_cache would have no effect without expert_pack"),
        ({"expert_cache": 1, "expert_trace": "x", "expert_pack": False}, "expert_cache, expert_trace would have no"),
        ({"expert_pack": True, "expert_stats_interval": 1}, "would have no effect without expert_stats_path: give"),
        ({"expert_pack": True, "expert_stats_path": "x", "expert_stats_interval": "1m"}, "above 0, not '1m'"),
        ({"expert_pack": 0}, "expert_pack must be the path of a file, not 0"),
    ],
)
def test_what_is_refused(given: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=message):
        ExpertOptions.checked(given)


def test_values_that_mean_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("a.json")
    same: dict[str, list[Any]] = {
        "expert_cache": ["1GiB", "1G", 1 << 30, float(1 << 30), "1073741824"],
        "expert_cache_reserve": ["0%", 0, "0"],
        "expert_stats_path": ["a.json", "./a.json", tmp_path / "a.json", "link"],
        "expert_stats_interval": [3, 3.0],
        "expert_trace": [None],
    }
    other: dict[str, list[Any]] = {
        "expert_cache": ["auto", "60%", "1GB", "100%"],
        "expert_cache_reserve": ["1%", 1],
        "expert_stats_path": ["b.json", None],
        "expert_stats_interval": [4],
        "expert_trace": ["a.json"],
    }
    for name, values in same.items():
        meanings = [ExpertOptions(**{name: OPTIONS[name].kind.check(name, value)}).meanings() for value in values]
        assert all(meaning == meanings[0] for meaning in meanings)
        for value in other[name]:
            assert ExpertOptions(**{name: OPTIONS[name].kind.check(name, value)}).meanings() != meanings[0]
    before = ExpertOptions(expert_trace="a.trace").meanings()
    (tmp_path / "folder").mkdir()
    monkeypatch.chdir("folder")
    assert ExpertOptions(expert_trace="a.trace").meanings() != before
