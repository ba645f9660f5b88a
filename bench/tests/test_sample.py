"""The trained sample: the kept model is what the training program computed, and the text it came from is read right."""

from __future__ import annotations

import json
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import gguf
import pytest

from bench.demo import SAMPLE
from bench.sample.corpus import book_chapters, r_strings, tidy
from lab.stock import ROOT, environment

REFERENCE = SAMPLE.with_suffix(".reference.json")
kept = pytest.mark.skipif(not SAMPLE.exists(), reason=f"{SAMPLE.name} is not there")


def run(*command: object) -> str:
    done = subprocess.run(
        [sys.executable, "-m", *map(str, command)],
        cwd=ROOT,
        env=environment(stock=False),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@kept
def test_is_small_and_has_routed_experts() -> None:
    assert SAMPLE.stat().st_size <= 16_000_000
    reader = gguf.GGUFReader(SAMPLE)

    def field(name: str) -> object:
        found = reader.get_field(name)
        assert found is not None, name
        return found.contents()

    assert field("general.architecture") == "qwen3moe"
    assert field("qwen3moe.expert_count") == 32
    assert field("qwen3moe.expert_used_count") == 4
    assert field("qwen3moe.block_count") == 8
    experts = [tensor for tensor in reader.tensors if "_exps" in tensor.name]
    assert len(experts) == 3 * 8
    assert all(tensor.shape[2] == 32 for tensor in experts)


@kept
def test_llama_cpp_computes_what_the_training_program_does() -> None:
    found = json.loads(run("bench.sample.fidelity", SAMPLE, REFERENCE))
    assert found["other_ids"] == []
    # the weights are the same; llama.cpp rounds activations to 8 bits before it multiplies
    assert found["difference_mean"] < 0.05
    assert found["difference_max"] < 0.5


@kept
def test_has_learned_its_language() -> None:
    probabilities = json.loads(REFERENCE.read_text())["log_probabilities"]
    assert sum(probabilities) / len(probabilities) > -4  # -8.3 for a guess among 4096 tokens


@kept
def test_is_what_the_demo_runs_and_equals_stock() -> None:
    shown = run("bench.demo", "--tokens", 24)
    assert f"model    {SAMPLE}\n" in shown
    assert ": 256 experts of 8 layers, " in shown
    assert "compare  tokens identical, max |logit difference| 0\n" in shown


def r_chunk(lines: list[str], version: int) -> bytes:
    """A character vector as R's lazy-loading data bases hold it."""
    data = b"X\n" + struct.pack(">iii", version, 0, 0)
    if version == 3:
        data += struct.pack(">i", 5) + b"UTF-8"
    data += struct.pack(">ii", 16, len(lines))
    for line in lines:
        data += struct.pack(">ii", 0x40009, len(line.encode())) + line.encode()
    return struct.pack(">i", len(data)) + zlib.compress(data)


def test_r_character_vectors_of_both_versions(tmp_path: Path) -> None:
    path = tmp_path / "Rdata.rdb"
    novels = [["Chapter 1", "", "It was a café."], ["a", "b"]]
    path.write_bytes(r_chunk(novels[0], 2) + r_chunk(novels[1], 3))
    assert list(r_strings(path)) == novels


def test_bible_markup_leaves_paragraphs_of_plain_text() -> None:
    osis = (
        '<title>Not text</title><div type="x-p" sID="a"/><chapter osisID="X.1" sID="X.1"/>'
        '<w lemma="strong:G1">The</w> <w>beginning</w>,<note placement="foot">a note <reference>1</reference></note> '
        '“<w>he</w> said”.<div type="x-p" eID="a"/> <lg sID="b"/><l>Praise &amp; sing</l> <l>to him</l>'
        '<chapter eID="X.1"/><chapter osisID="X.2" sID="X.2"/><l>Second</l>'
    )
    assert list(book_chapters(osis)) == [['The beginning, "he said".', "Praise & sing to him"], ["Second"]]


def test_text_is_tidied_to_one_ascii_line() -> None:
    assert tidy("  ‘a’\n “b” — c…  ") == "'a' \"b\" -- c..."
