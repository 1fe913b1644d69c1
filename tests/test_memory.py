"""bench/memory.py: the simulated allocator, the trace, and what was published."""

from argparse import Namespace

import pytest
from made_up import CPU, setup_of

from bench.common import UserError
from bench.memory import GB, MIB, Allocator, DoesNotFit, load, predict, simulate, trace
from bench.scripts import Scripts
from bench.study import all_studies

PUBLISHED = {  # reserved GB on an A100 at batch 8, by the rung; 2 and 4 have the memory of 1 and 3
    0: 26.2617, 1: 26.2422, 3: 26.2422, 5: 13.7871, 6: 11.5645, 7: 5.9004}


@pytest.fixture(scope="module")
def scripts():
    return Scripts()


@pytest.fixture
def script(scripts, tmp_path):
    def write(name: str):
        path = tmp_path / "script.py"
        path.write_bytes(scripts.text(name))
        return path

    return write


# ---- The allocator


@pytest.mark.parametrize(("sizes", "reserved"), [
    ([1], 2 * MIB),
    ([MIB], 2 * MIB),
    ([MIB, MIB], 2 * MIB),
    ([MIB] * 3, 4 * MIB),
    ([MIB + 1], 20 * MIB),
    ([10 * MIB - 1] * 2, 20 * MIB),
    ([10 * MIB], 10 * MIB),
    ([11 * MIB - 5], 12 * MIB),
    ([10 * MIB, MIB + 1, 9 * MIB], 30 * MIB),
])
def test_segments(sizes, reserved):
    assert simulate(sizes).reserved == reserved


def test_sizes_are_rounded_to_512_bytes():
    allocator = Allocator()
    blocks = [allocator.malloc(size) for size in (1, 512, 513)]
    assert [block.size for block in blocks] == [512, 512, 1024] and allocator.allocated == 2048
    assert [block.start - blocks[0].start for block in blocks] == [0, 512, 1024]


def test_a_large_block_is_split_only_if_more_than_a_mebibyte_remains():
    assert Allocator().malloc(19 * MIB).size == 20 * MIB  # all of its own segment
    assert Allocator().malloc(19 * MIB - 1024).size == 19 * MIB - 1024
    allocator = Allocator()
    first = allocator.malloc(9 * MIB)
    assert (first.size, first.after.size) == (9 * MIB, 11 * MIB)
    assert allocator.malloc(10 * MIB).size == 11 * MIB  # all of the rest


def test_neighbours_merge_and_the_best_fit_is_taken():
    allocator = Allocator()
    a, b, c, d = (allocator.malloc(size * MIB) for size in (4, 5, 6, 5))
    assert allocator.reserved == 20 * MIB
    for block in (a, c):
        allocator.release(block)
    assert allocator.malloc(4 * MIB - 1) is a  # not the larger one
    allocator.release(a)
    allocator.release(b)  # joins both neighbours
    assert allocator.malloc(15 * MIB).start == a.start and allocator.reserved == 20 * MIB
    assert (allocator.allocated, allocator.peak_allocated) == (20 * MIB, 20 * MIB)
    allocator.release(d)


def test_a_full_card_gives_free_segments_back_first():
    events = [30 * MIB, 30 * MIB, -1, 40 * MIB]
    assert simulate(events).reserved == 100 * MIB
    found = simulate(events, capacity=90 * MIB)
    assert (found.reserved, found.peak_reserved) == (70 * MIB, 70 * MIB)
    with pytest.raises(DoesNotFit):
        simulate(events, capacity=60 * MIB)
    # A segment of which a part is in use can't go.
    with pytest.raises(DoesNotFit):
        simulate([2 * MIB, 15 * MIB, -2, 40 * MIB], capacity=50 * MIB)


# ---- The trace


@pytest.mark.parametrize("rung", PUBLISHED)
def test_published(scripts, script, rung):
    """Within 1 % of what the published program reserved after its first epoch."""
    run = scripts.rungs()[rung]
    batch, events = trace(load(script(run.script)), ["--model", "gpt2"])
    assert batch == 8
    assert simulate(events).reserved / GB == pytest.approx(PUBLISHED[rung], rel=0.01)


def test_what_a_step_keeps(script):
    """Parameters, gradients and AdamW's state stay; activations grow with the batch."""
    module = load(script("00"))
    sizes = {}
    for batch in (1, 2, 4):
        _, events = trace(module, ["--model", "cpu-demo", "--batch-size", str(batch)])
        found = simulate(events)
        sizes[batch] = found.peak_allocated
        assert found.allocated >= 4 * 4 * 28_000_000  # bytes; as many parameters
    assert sizes[1] < sizes[2] < sizes[4]


def test_the_largest_batch(script):
    options = ["--model", "cpu-demo"]
    small, large, none = 1.2 * GB, 2.4 * GB, GB // 8
    found = predict(script("01"), options, 2, dict(small=small, large=large, none=none))
    assert found["reserved"][0] == 2 and found["largest"]["none"] == (0, 0)
    for card, capacity in (("small", small), ("large", large)):
        batch, reserved = found["largest"][card]
        assert batch > 1 and reserved <= capacity
    assert found["largest"]["small"][0] < found["largest"]["large"][0]


def test_the_command(tmp_path, monkeypatch):
    """A column for each script; a card of one's own; what isn't there is told."""
    study = all_studies()["predict"]
    asked = []

    def answer(*command):
        asked.append(command[-1])
        return '{"reserved": [8, 1073741824], "largest": {"9 GB": [4, 536870912]}}'

    monkeypatch.setattr("bench.studies.predict.processes.ask", answer)
    setup = setup_of(tmp_path)
    setup.args = Namespace(gpu="all", memory=9.0, batch_size=None, names="optimizer-foreach")
    text = study.answer(setup)
    assert "| 01 | 8 | 1.00 |" in text and "| 9 GB | 9 | 4 (0.5 GB) | 4 (0.5 GB) |" in text
    assert "optimizer-foreach" in text and "Predictions" in text
    assert len(asked) == 3 and '"--model", "gpt2"' in asked[0]
    setup.args = Namespace(gpu="H1000", memory=None, batch_size=None, names=None)
    with pytest.raises(UserError, match="'H1000' is none of T4, V100"):
        study.answer(setup)
    assert setup.machine == CPU
