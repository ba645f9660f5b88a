"""A forked child: it ends cleanly, may open a model of its own, and gets a sentence for its parent's, which feels nothing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.runtime.packed import run_python, variant
from tests.runtime.test_trace import check

pytestmark = pytest.mark.timeout(300)

# what a child does with what it inherits; it is killed if it hangs
COMMON = """
import functools, gc, multiprocessing, os, shutil, signal, sys, threading, time
import llama_expert_pack, llama_cpp
from llama_expert_pack.pypack.drive.direct_io import pread_into
from llama_expert_pack import UsageError
from llama_expert_pack import find_pack, open_pack
from lab.logits import minimum_budget
from tests.runtime.packed import evaluate, load, loaded, reads

path, trace, stats_path = sys.argv[1:4]
load, loaded = (functools.partial(f, n_gpu_layers=int(sys.argv[4])) for f in (load, loaded))

def child(body):
    # its exit status: 0 if it ended by itself and body raised nothing
    pid = os.fork()
    if pid == 0:
        signal.alarm(100)
        body()
        sys.exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])

def refused(call):
    try:
        call()
    except UsageError as error:
        assert "forked" in str(error) and "\\n" not in str(error), error
    else:
        raise AssertionError("the call returned")

def own_model():
    if llama_cpp.llama_supports_gpu_offload():  # CUDA does not follow into a child
        refused(lambda: load(path))
        return
    own = load(path)
    assert (evaluate(own, [20, 1, 1]) == expected).all()
    assert own.expert_stats().loads > 0
    own.close()

def inherited_model():
    refused(lambda: llm.eval([1]))
    refused(lambda: llm.expert_stats())
    refused(lambda: next(llm.generate([1, 2])))
    refused(lambda: llm.embed("text"))
    refused(lambda: llm.save_state())
    llm.close()
    llm.close()
    refused(lambda: llm.eval([1]))

def cuda():
    llama_cpp.llama_supports_gpu_offload = lambda: True
    refused(lambda: load(path))

def raw_context():
    # who kept a pointer gets what llama_decode returns for a failure; with CUDA, whose context is gone, upstream aborts
    if llama_cpp.llama_supports_gpu_offload():
        return
    tokens = (llama_cpp.llama_token * 1)(1)
    status = llama_cpp.llama_decode(context, llama_cpp.llama_batch_get_one(tokens, 1))
    assert status != 0, status

def busy(is_done):
    # misses and slow reads, over and over, of a model of the same pack in another file
    def slow(fd, buffer, offset):
        time.sleep(0.002)
        return pread_into(fd, buffer, offset)

    pack = find_pack(path)
    other = shutil.copy(path, path + ".other.gguf")
    with loaded(other, expert_pack=pack, expert_cache=minimum_budget(open_pack(pack))) as llm, reads(llm, slow):
        while not is_done():
            llm.reset()
            assert (evaluate(llm, [20, 1, 1]) == expected).all()

def drop():
    global llm
    del llm
    gc.collect()

with_files = load(path)
expected = evaluate(with_files, [20, 1, 1])
with_files.close()
llm = load(path, expert_trace=trace, expert_stats_path=stats_path, expert_stats_interval=1000)
evaluate(llm, [20])
context = llm.ctx
"""
# the parent goes on as if nothing had happened
END = """
assert (evaluate(llm, [1, 1]) == expected).all()
stats = llm.expert_stats()
llm.close()
print(stats.acquires, stats.hits, stats.misses, stats.evictions)
"""


def run(code: str, tmp_path: Path, n_gpu_layers: int = 0) -> None:
    path, trace, stats = variant("type-Q4_K", tmp_path), tmp_path / "a.trace", tmp_path / "stats.json"
    done = run_python(COMMON + code + END, path, trace, stats, n_gpu_layers)
    assert done.returncode == 0 and "Traceback" not in done.stderr, done.stderr[-3000:]
    assert "Exception ignored" not in done.stderr, done.stderr[-3000:]
    acquires, hits, misses, evictions = map(int, done.stdout.split())
    check(trace, (acquires, hits, misses, evictions))
    assert json.loads(stats.read_text())["acquires"] == acquires


CHILDREN = {
    "exits": "lambda: None",
    "raises SystemExit": "lambda: sys.exit(0)",
    "drops the inherited model": "drop",
    "uses the inherited model": "inherited_model",
    "decodes with an inherited pointer": "raw_context",
    "asks for a GPU": "cuda",
    "opens a model of its own": "own_model",
    "does all of that": "lambda: (inherited_model(), own_model(), drop(), own_model())",
    "has a child of its own": "lambda: sys.exit(child(own_model))",
}


@pytest.mark.parametrize("body", CHILDREN.values(), ids=CHILDREN)
def test_a_child(body: str, tmp_path: Path) -> None:
    run(f"assert (status := child({body})) == 0, status\n", tmp_path)


def test_a_child_of_a_process_whose_models_share_a_pack(tmp_path: Path) -> None:
    run(
        """
second = load(path, expert_trace=trace, expert_stats_path=stats_path, expert_stats_interval=1000)

def both_inherited():
    global llm
    inherited_model()
    own_model()
    llm = second
    inherited_model()
    own_model()

for body in (both_inherited, drop, lambda: None):
    assert (status := child(body)) == 0, (body, status)
assert (evaluate(second, [20, 1, 1]) == expected).all()
assert (status := child(lambda: [own_model() for _ in range(2)])) == 0, status
second.close()
assert (status := child(inherited_model)) == 0, status
""",
        tmp_path,
    )


def test_a_fork_while_other_threads_load_and_wait_for_a_load(tmp_path: Path) -> None:
    run(
        """
done, failed = threading.Event(), []

def load_more():
    try:
        while not done.is_set():
            with loaded(path, expert_trace=trace, expert_stats_path=stats_path, expert_stats_interval=1000) as more:
                assert (evaluate(more, [20, 1, 1]) == expected).all()
    except BaseException as error:
        failed.append(error)

threads = [threading.Thread(target=load_more) for _ in range(2)]
for thread in threads:
    thread.start()
for body in 4 * (inherited_model, drop, lambda: None):  # a load needs locks of llama.cpp's that the other thread may hold
    assert (status := child(body)) == 0, (body, status)
done.set()
for thread in threads:
    thread.join()
assert not failed, failed
""",
        tmp_path,
    )


def test_a_child_that_ends_as_the_script_ends(tmp_path: Path) -> None:
    run(
        """
pid = os.fork()
if pid == 0:
    signal.alarm(100)
    own_model()
    raise SystemExit
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
        tmp_path,
    )


def test_a_child_keeps_no_file_locked(tmp_path: Path) -> None:
    """The parent closes, and opens again with the same files, while the child lives on."""
    run(
        """
end, parent_is_done = os.pipe()
pid = os.fork()
if pid == 0:
    signal.alarm(100)
    os.close(parent_is_done)
    os.read(end, 1)
    os._exit(0)
llm.close()
llm = load(path, expert_trace=trace, expert_stats_path=stats_path)
evaluate(llm, [20])
os.close(parent_is_done)
assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
""",
        tmp_path,
    )


def test_several_threads(tmp_path: Path) -> None:
    """OpenMP keeps its threads between two computations; a child has none of them."""
    run(
        """
parent = os.getpid()
two = {"n_threads": 2, "n_threads_batch": 2}
def own_model_with_two():
    if llama_cpp.llama_supports_gpu_offload() and os.getpid() != parent:
        return
    with loaded(path, **two) as own:
        assert (evaluate(own, [20, 1, 1]) == expected).all()

llm.close()
own_model_with_two()
for _ in range(3):
    assert (status := child(own_model_with_two)) == 0, status
    own_model_with_two()
llm = load(path, expert_trace=trace, expert_stats_path=stats_path)
evaluate(llm, [20])
""",
        tmp_path,
    )


def test_multiprocessing(tmp_path: Path) -> None:
    run(
        """
context = multiprocessing.get_context("fork")
for target in (own_model, inherited_model, drop):
    process = context.Process(target=target)
    process.start()
    process.join(100)
    assert process.exitcode == 0, (target, process.exitcode)
with context.Pool(2) as pool:
    pool.apply(own_model)
""",
        tmp_path,
    )


def test_fork_while_another_thread_reads(tmp_path: Path) -> None:
    """Whatever lock is held and whatever read is under way: the children have nothing of it, the parent all."""
    run(
        """
done, failed = threading.Event(), []

def read():
    try:
        busy(done.is_set)
    except BaseException as error:
        failed.append(error)

thread = threading.Thread(target=read)
thread.start()
for body in 4 * (own_model, inherited_model, drop, lambda: None):
    assert (status := child(body)) == 0, (body, status)
done.set()
thread.join()
assert not failed, failed
""",
        tmp_path,
    )


def test_signals_and_garbage_collection_in_a_child_of_a_busy_process(tmp_path: Path) -> None:
    """A decode has Python's handlers put aside and garbage kept; a child of another thread is in no decode."""
    run(
        """
def interrupted():
    assert gc.isenabled()
    try:
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(10)
    except KeyboardInterrupt:
        return
    raise AssertionError("Ctrl-C got lost")

statuses = []

def forking():
    while len(statuses) < 20:
        pid = os.fork()
        if pid == 0:
            signal.alarm(100)
            try:
                interrupted()
            except BaseException:
                os._exit(1)
            os._exit(0)
        statuses.append(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))

thread = threading.Thread(target=forking)
thread.start()
busy(lambda: not thread.is_alive())
assert set(statuses) == {0}, statuses
""",
        tmp_path,
    )


def test_a_child_has_none_of_the_slots_bytes(tmp_path: Path) -> None:
    """Shared pages that a direct read is writing to would be copied at the next access, and the read lost on one side."""
    run(
        """
provider = llm._provider
held = [(layer.index, int(slot)) for layer in provider._pack.layers
        for slot in provider.cache.slot_of[layer.first_key:][:layer.n_expert] if slot >= 0]
slots = [provider.host_memory(layer, slot) for layer, slot in held]
assert slots and all(any(slot) for slot in slots)

def look():
    assert not any(any(slot) for slot in slots)

assert child(look) == 0
assert all(any(slot) for slot in slots)
""",
        tmp_path,
    )
