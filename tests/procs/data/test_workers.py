"""Workers change how fast batches come and nothing else, end with the run, and are never waited for in vain."""

import gc
import io
import multiprocessing
import os
import pickle
import random
import resource
import signal
import subprocess
import sys
import time
import traceback
from itertools import chain

import numpy as np
import psutil
import pytest
import torch

from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.sampler import GlobalBatchSampler
from ds_trainer.errors import DataError, MachineError
from tests.helpers.runs import make_trainer, weights

fork = multiprocessing.get_context("fork")


class Numbers:
    """Sample `i` is `i`; hooks say what else reading it does."""

    def __init__(self, n=40, hook=lambda i: None):
        self.n, self.hook = n, hook

    def __len__(self):
        return self.n

    def __getitem__(self, i):
        self.hook(i)
        return i


def collate(samples):
    return {"labels": torch.tensor(samples)[:, None]}


def make_loader(dataset, collate_fn=collate, *, num_workers=2, rank=0, ranks=1, global_size=4, micro_size=2, **given):
    sampler = GlobalBatchSampler(len(dataset), global_size, micro_size, rank, ranks, seed=7)
    return BatchLoader(dataset, sampler, collate_fn, num_workers=num_workers, **given)


@pytest.fixture
def loader_of(request):
    """`make_loader`, closed at the test's end."""

    def make(*args, **given):
        loader = make_loader(*args, **given)
        request.addfinalizer(loader.close)
        return loader

    return make


def ids(loader, steps):
    return [batch["labels"].flatten().tolist() for k in steps for batch in loader.step(k)]


def workers():
    return [psutil.Process(child.pid) for child in multiprocessing.active_children()]


def wait_until_gone(processes, seconds=15):
    deadline = time.monotonic() + seconds
    while any(p.is_running() and p.status() != psutil.STATUS_ZOMBIE for p in processes):
        assert time.monotonic() < deadline, "workers live on"
        time.sleep(0.02)


@pytest.mark.case("C3")
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize(("rank", "ranks"), [(0, 1), (1, 2)])
def test_batches_do_not_depend_on_the_number_of_workers(loader_of, num_workers, rank, ranks):
    alone, loader = (loader_of(Numbers(23), num_workers=n, rank=rank, ranks=ranks) for n in (0, num_workers))
    in_order, resumed, back = range(14), range(8, 11), [3]
    for steps in (in_order, resumed, back):
        assert ids(loader, steps) == ids(alone, steps)
    assert len(workers()) == num_workers


def test_workers_stay_while_steps_come_in_order_and_a_step_left_half_way_is_begun_anew(loader_of):
    loader = loader_of(Numbers())
    ids(loader, range(3))
    first = workers()
    ids(loader, range(3, 20))
    assert workers() == first
    next(loader.step(20))
    assert ids(loader, [20]) == ids(loader_of(Numbers(), num_workers=0), [20])
    assert not set(workers()) & set(first)


@pytest.mark.case("C3")
@pytest.mark.parametrize("num_workers", [0, 2])
def test_a_late_step_is_begun_without_reading_what_lies_before_it(loader_of, tmp_path, num_workers):
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    dataset = Numbers(400_000, hook=lambda i: os.write(log, f"{i}\n".encode()))
    loader = loader_of(dataset, num_workers=num_workers)
    seconds = []
    for step in (0, 99_000):
        began = time.perf_counter()
        seen = ids(loader, [step])
        seconds.append(time.perf_counter() - began)
        loader.close()
    read = {int(line) for line in (tmp_path / "log").read_text().split()}
    ahead = range(99_000, 99_000 + 1 + num_workers * 2)
    assert set(chain(*seen)) <= read
    assert read <= set(chain(*(loader.sampler.global_batch(step) for step in chain(range(5), ahead))))
    assert seconds[1] < seconds[0] + 0.5


def draw(i):
    return [i, random.random(), float(np.random.rand()), torch.rand(()).item()]


def drawing_collator(samples):
    noise = [random.random(), float(np.random.rand()), torch.rand(()).item()]
    return {"labels": torch.tensor(samples, dtype=torch.float64), "noise": torch.tensor(noise, dtype=torch.float64)}


class Drawing(Numbers):
    def __getitem__(self, i):
        return draw(i)


def drawn(num_workers, steps, **given):
    """What every sample and every micro-batch drew, by epoch and id."""
    loader = make_loader(Drawing(8), drawing_collator, num_workers=num_workers, seed=5, **given)
    samples, batches = {}, {}
    for k in steps:
        for batch in loader.step(k):
            batches[k, int(batch["labels"][0, 0])] = batch["noise"].tolist()
            samples |= {(k // 2, int(row[0])): row[1:].tolist() for row in batch["labels"]}
    loader.close()
    return samples, batches


@pytest.mark.case("C3")
def test_what_a_sample_draws_depends_on_seed_epoch_and_index_alone():
    samples, batches = drawn(0, range(4))
    assert len({tuple(numbers) for numbers in samples.values()}) == 16  # 8 samples in 2 epochs, no two alike
    assert len({tuple(numbers) for numbers in batches.values()}) == 8
    for num_workers in (1, 2):
        assert drawn(num_workers, range(4)) == (samples, batches)
    late_samples, late_batches = drawn(2, range(3, 4))
    assert late_samples.items() <= samples.items() and late_batches.items() <= batches.items()
    by_rank = [drawn(2, range(4), rank=rank, ranks=2) for rank in range(2)]
    assert by_rank[0][0] | by_rank[1][0] == samples
    assert by_rank[0][1] | by_rank[1][1] == batches
    assert drawn(1, range(4), micro_size=1)[0] == samples


@pytest.mark.parametrize("num_workers", [0, 2])
def test_the_training_process_own_streams_stay_where_they_were(num_workers):
    def streams():
        return pickle.dumps((random.getstate(), np.random.get_state(), torch.get_rng_state().tolist()))

    before = streams()
    drawn(num_workers, range(3))
    assert streams() == before


class PickyError(Exception):
    """Cannot be unpickled."""

    def __init__(self, what, why):
        super().__init__(f"{what}: {why}")


FAULTS = {
    "plain": (lambda: KeyError("column"), KeyError, "^'column'"),
    "three parts": (
        lambda: DataError("found", "rule", "change"),
        DataError,
        r"found\n  rule:   rule\n  change: change",
    ),
    "no pickle": (lambda: PickyError("what", "why"), (PickyError, RuntimeError), "what: why"),
    "stop": (StopIteration, RuntimeError, "StopIteration"),
}


@pytest.mark.parametrize("num_workers", [0, 2])
@pytest.mark.parametrize("fault", FAULTS)
def test_an_error_of_the_data_set_arrives_as_itself_naming_step_and_samples(loader_of, num_workers, fault):
    make_error, kind, text = FAULTS[fault]

    def break_down(i):
        if i == 13:
            raise make_error()

    loader = loader_of(Numbers(40, break_down), num_workers=num_workers)
    step = next(k for k in range(10) if 13 in loader.sampler.global_batch(k))
    samples = next(samples for samples in loader.sampler.microbatches(step) if 13 in samples)
    with pytest.raises(kind, match=text) as caught:
        ids(loader, range(10))
    told = "".join(traceback.format_exception(caught.value))
    assert "while reading sample 13" in told
    assert f"in data.train, step {step + 1}, samples {samples}" in told
    assert "in break_down" in told
    assert ("in a worker process" in told) == (num_workers > 0)
    if fault == "three parts":
        assert (caught.value.found, caught.value.rule, caught.value.change) == ("found", "rule", "change")
    assert ids(loader, [step + 1]) == ids(loader_of(Numbers(), num_workers=0), [step + 1])


@pytest.mark.parametrize("num_workers", [0, 1])
def test_an_error_of_the_collator_names_its_samples(loader_of, num_workers):
    def collator(samples):
        raise ZeroDivisionError("in the collator")

    loader = loader_of(Numbers(), collator, num_workers=num_workers, what="eval")
    with pytest.raises(ZeroDivisionError, match="in the collator") as caught:
        next(loader.step(2))
    assert caught.value.__notes__ == [f"in data.eval, step 3, samples {loader.sampler.global_batch(2)[:2]}"]


def test_a_batch_that_cannot_leave_its_worker_is_refused_instead_of_waited_for(loader_of):
    def collator(samples):
        return collate(samples) | {"later": lambda: samples}

    with pytest.raises(DataError, match="cannot be pickled.*lambda"):
        next(loader_of(Numbers(), collator).step(0))
    assert next(loader_of(Numbers(), collator, num_workers=0).step(0))["later"]()


def test_a_step_of_more_micro_batches_than_file_descriptors_can_be_held(loader_of):
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (len(os.listdir("/proc/self/fd")) + 60, limits[1]))
    try:
        assert len(list(loader_of(Numbers(200), global_size=200, micro_size=1).step(0))) == 200
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)


@pytest.mark.case("F10")
def test_signals_that_reach_workers_too_do_not_end_them(loader_of):
    def ask_for_everything(i):
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1):
            os.kill(os.getpid(), number)

    loader = loader_of(Numbers(40, ask_for_everything))
    assert ids(loader, range(10)) == ids(loader_of(Numbers(), num_workers=0), range(10))


def test_programs_that_a_data_set_starts_do_not_inherit_the_deafness(loader_of):
    def start_program(i):
        program = subprocess.Popen(["sleep", "60"])
        program.terminate()
        assert program.wait(10) == -signal.SIGTERM

    next(loader_of(Numbers(hook=start_program), num_workers=1, prefetch_factor=1).step(0))


@pytest.mark.case("F8")
@pytest.mark.parametrize(
    ("while_awaited", "how"), [(False, "was killed by SIGKILL"), (True, "exited with code 3")], ids=["idle", "awaited"]
)
def test_a_worker_that_ends_is_named_within_seconds(loader_of, while_awaited, how):
    def leave(i):
        if i == 13 and while_awaited:
            os._exit(3)

    loader = loader_of(Numbers(40, leave))
    began = time.monotonic()
    ids(loader, range(2))
    if not while_awaited:
        workers()[0].kill()
    with pytest.raises(MachineError, match=rf"worker process \d+, which reads data.train, {how}"):
        ids(loader, range(2, 10))
    assert time.monotonic() - began < 10
    loader.close()
    assert not workers()


def test_closing_ends_the_workers_and_a_later_step_starts_others(loader_of):
    loader = loader_of(Numbers())
    ids(loader, [0])
    before = workers()
    loader.close()
    wait_until_gone(before, 0)
    assert ids(loader, [1]) == ids(loader_of(Numbers(), num_workers=0), [1])


def test_workers_that_are_stuck_are_ended_by_force(loader_of, monkeypatch):
    monkeypatch.setattr("ds_trainer.data.workers.CLOSE_TIMEOUT_S", 0.5)
    loader = loader_of(Numbers(hook=lambda i: time.sleep(600) if i not in first else None))
    first = set(loader.sampler.global_batch(0))
    ids(loader, [0])
    before = workers()
    began = time.monotonic()
    loader.close()
    assert time.monotonic() - began < 4
    wait_until_gone(before, 0)


def test_a_worker_collects_its_own_garbage_and_none_of_the_training_process(loader_of):
    def collator(samples):
        return collate(samples) | {"frozen": gc.get_freeze_count(), "on": gc.isenabled()}

    batch = next(loader_of(Numbers(), collator).step(0))
    assert batch["frozen"] > 10_000 and batch["on"]
    assert gc.isenabled()


def test_workers_of_a_single_pass_read_nothing_beyond_it_and_end_with_it(loader_of, tmp_path):
    log = os.open(tmp_path / "log", os.O_CREAT | os.O_APPEND | os.O_WRONLY)
    loader = loader_of(Numbers(6, hook=lambda i: os.write(log, b"x")), one_pass=True)
    for passes in (1, 2):
        assert sorted(chain(*ids(loader, range(2)))) == list(range(6))
        assert not workers()
        assert len((tmp_path / "log").read_bytes()) == 6 * passes


def train_and_tell(sender, after):
    loader = make_loader(Numbers())
    next(loader.step(0))
    sender.send([worker.pid for worker in workers()])
    after()


def sleep():
    time.sleep(600)


def raise_error():
    sys.stderr = io.StringIO()
    raise RuntimeError("the run fails without closing its loader")


@pytest.mark.parametrize("after", [sleep, raise_error])
def test_workers_end_with_their_training_process(after):
    """Killed at once, so that they do not hold its locks and ports; at an orderly exit although they ignore SIGTERM."""
    receiver, sender = fork.Pipe(duplex=False)
    training = fork.Process(target=train_and_tell, args=(sender, after))
    training.start()
    processes = [psutil.Process(pid) for pid in receiver.recv()]
    assert len(processes) == 2
    if after is sleep:
        training.kill()
    wait_until_gone(processes, 3)
    training.join(5)
    assert training.exitcode == (-signal.SIGKILL if after is sleep else 1)


def test_reading_goes_on_while_the_training_process_computes(loader_of):
    waits = {}
    for num_workers in (0, 2):
        loader = loader_of(Numbers(40, hook=lambda i: time.sleep(0.05)), num_workers=num_workers)
        for k in range(5):
            for _ in loader.step(k):
                time.sleep(0.15)
            if k == 0:
                start_up_s = loader.input_wait_s
        waits[num_workers] = loader.input_wait_s - start_up_s
        loader.close()
    assert waits[0] > 0.75
    assert waits[2] < 0.5 * waits[0]


ROWS = [{"input_ids": [3 + i] * (4 + i), "labels": [3 + i] * (4 + i)} for i in range(14)]


@pytest.mark.case("C3")
@pytest.mark.parametrize("engine", ["ddp", "zero2"])
def test_a_run_with_workers_is_bit_for_bit_the_run_without(world, tmp_path, engine):
    for alone, helped, evaluations, left in world(train_with_and_without, 2, engine, tmp_path):
        assert all(torch.equal(alone[name], helped[name]) for name in alone)
        assert len(set(evaluations)) == 2 and evaluations[:2] == evaluations[2:]
        assert left == 0


def train_with_and_without(engine, out):
    multiprocessing.current_process().daemon = False  # A daemon may have no children.
    finals, evaluations = [], []
    for num_workers in (0, 2):
        trainer = make_trainer(
            engine,
            out,
            rows=ROWS,
            given={"eval_dataset": ROWS[:3]},
            data={"num_workers": num_workers, "shuffle": True},
            evaluation={"every_steps": 3},
            run={"max_steps": 6},
        )
        history = trainer.train().log_history
        evaluations += [line.eval_loss for line in history if hasattr(line, "eval_loss")]
        finals.append(weights(trainer))
        trainer.run.train_loader.close()
        trainer.close()
    return *finals, evaluations, len(workers())
