"""Bad input on two ranks: each ends within seconds by our exit code, and one says what is wrong and what to do."""

import io
import json
import os
import re
import shutil
import time
from collections import namedtuple
from collections.abc import Callable
from contextlib import redirect_stderr
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch

from ds_trainer.errors import MachineError, ModelError, exit_on_user_error
from ds_trainer.host import preflight, toolchain
from ds_trainer.trainer import setup
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.launch import chats, run_folder, write_jsonl
from tests.helpers.tokenizers import make_tokenizer

LIMIT_S = 20
"""Seconds that a rank may take; on an idle machine it takes about one."""


@dataclass(frozen=True)
class Fault:
    """A run with one thing wrong.

    Args:
        says: Parts of the text that must be said, in this order, with … between them.
        sections: Laid over a good run's JSON, key by key; `{folder}` in a string stands for the test's folder.
        prepare: Makes files in the test's folder.
        disturb: Called on each rank, with that folder, before the run.
    """

    says: str
    sections: dict = field(default_factory=dict)
    prepare: Callable[[Path], object] | None = None
    disturb: Callable[[Path], None] | None = None


def data(content: str):
    """Writes `train.jsonl`."""
    return lambda folder: (folder / "train.jsonl").write_text(content)


TRAIN = {"data": {"train": "{folder}/train.jsonl"}}
GOOD_LINE = '{"text": "yes"}\n'

CONFIG = {
    "unknown key": Fault("zero.stagee is no key … an unknown key … did you mean zero.stage?", {"zero": {"stagee": 2}}),
    "another trainer's key": Fault(
        "optimizer.learning_rate is no key … learning_rate is called optimizer.lr here",
        {"optimizer": {"learning_rate": 1e-4}},
    ),
    "unknown section": Fault("optimiser is no key … did you mean optimizer?", {"optimiser": {"lr": 1e-4}}),
    "string for a number": Fault(
        'batch.global_size is "8" (string) … must be a valid integer … write 8, without quotes',
        {"batch": {"global_size": "8"}},
    ),
    "contradictory batch numbers": Fault(
        "batch.global_size 8, but batch.micro_size 3 x batch.accumulation 1 x 2 data-parallel ranks = 6 … set batch",
        {"batch": {"global_size": 8, "micro_size": 3, "accumulation": 1}},
    ),
    "parameter offload below stage 3": Fault(
        "zero.offload_param.device … zero.stage … stage 3 only … set zero.stage to 3",
        {"zero": {"stage": 2, "offload_param": {"device": "cpu"}}},
    ),
    "nvme optimizer below stage 3": Fault(
        "zero.offload_optimizer.device … stage 3 only … set zero.stage to 3",
        {"zero": {"stage": 2, "offload_optimizer": {"device": "nvme", "nvme_path": "{folder}"}}},
    ),
    "optimizer offload at stage 0": Fault(
        "zero.offload_optimizer.device … stages 1 to 3 … set zero.stage to 1",
        {"zero": {"stage": 0, "offload_optimizer": {"device": "cpu"}}},
    ),
    "nvme without a path": Fault(
        "without zero.offload_optimizer.nvme_path … set zero.offload_optimizer.nvme_path",
        {"zero": {"stage": 3, "offload_optimizer": {"device": "nvme"}}},
    ),
    "fp16 on a cpu": Fault(
        "precision.dtype … on cpu … set precision.dtype to bf16 or fp32", {"precision": {"dtype": "fp16"}}
    ),
    "native key that contradicts": Fault(
        "zero_optimization.stage … zero.stage", {"native": {"deepspeed": {"zero_optimization": {"stage": 1}}}}
    ),
    "native key that DeepSpeed never reads": Fault(
        "gradient_clip … gradient_clipping", {"native": {"deepspeed": {"gradient_clip": 1.0}}}
    ),
}

MODEL = {
    "no model named": Fault("model.path is not set … set model.path", {"model": {"path": None}}),
    "missing folder": Fault("model.path is './none' … no folder … set model.path", {"model": {"path": "./none"}}),
    "hub id that cannot be fetched": Fault(
        "model.path is 'nobody/none': there is no folder … /nobody/none, … hub id", {"model": {"path": "nobody/none"}}
    ),
    "folder without config.json": Fault(
        "there is no … /empty/config.json … set model.path to a complete checkpoint",
        {"model": {"path": "{folder}/empty"}},
        prepare=lambda folder: (folder / "empty").mkdir(),
    ),
    "pickled weights": Fault(
        "holds only pickled weights (pytorch_model.bin) … can run code … set model.allow_pickle to true",
        {"model": {"path": "{folder}/pickled"}},
        prepare=lambda folder: make_checkpoint(folder / "pickled", pickled=True),
    ),
    "unknown auto class": Fault(
        "model.auto_class is 'AutoModelForCausalML' … AutoModelForCausalLM",
        {"model": {"auto_class": "AutoModelForCausalML"}},
    ),
    "no tokenizer": Fault(
        "holds no tokenizer … set model.tokenizer",
        {"model": {"tokenizer": "{folder}/none"}},
        prepare=lambda folder: (folder / "none").mkdir(),
    ),
}

DATA = {
    "missing file": Fault("no file none.jsonl … correct the path in data.train", {"data": {"train": "none.jsonl"}}),
    "broken line": Fault(
        "/train.jsonl:2:  … every line must be one JSON record … repair or delete the line",
        TRAIN,
        data(GOOD_LINE + '{"text": "no\n'),
    ),
    "record of a wrong shape": Fault(
        "/train.jsonl:3: the record has the keys ['question'] … a record is … rename or reshape",
        TRAIN,
        data(GOOD_LINE * 2 + '{"question": "yes?"}\n'),
    ),
    "message without a role": Fault(
        "/train.jsonl:1: 'role' of message 0 … a conversation is a list",
        TRAIN,
        data('{"messages": [{"content": "yes"}]}\n'),
    ),
    "empty file": Fault("data.train … has no records", TRAIN, data("\n")),
    "nothing to learn": Fault(
        "0 of 1 samples have supervised tokens … at least one token must be learned",
        TRAIN,
        data('{"messages": [{"role": "user", "content": "yes"}]}\n'),
    ),
    "no chat template": Fault(
        "/train.jsonl:1 is a conversation, and the tokenizer has no chat template … set data.chat_template",
        TRAIN | {"model": {"tokenizer": "{folder}/plain"}},
        lambda folder: (
            make_tokenizer(folder / "plain", chat_template=None),
            write_jsonl(folder / "train.jsonl", chats()),
        ),
    ),
    "chat template that is not there": Fault(
        "data.chat_template: none.jinja … correct the path", {"data": {"chat_template": "none.jinja"}}
    ),
    "token ids beyond the embedding": Fault(
        "/train.jsonl:1: token id 400, the model's embedding has 320 rows … set model.resize_embeddings to true",
        TRAIN,
        data('{"input_ids": [1, 400]}\n'),
    ),
    "length beyond the model's positions": Fault(
        "data.max_length is 65 … the model has 64 positions … set data.max_length to at most 64",
        {"data": {"max_length": 65}},
    ),
    "record that is too long": Fault(
        "train.jsonl:1 has  … a sample has at most 8 tokens … raise data.max_length",
        {"data": {"max_length": 8, "on_too_long": "error"}},
    ),
}


def no_disk(folder):
    usage = namedtuple("Usage", "total used free")
    shutil.disk_usage = lambda path: usage(1, 1, 0)


def no_memory(folder):
    preflight.available_bytes = lambda: (1000, "a limit")


def no_gpu(folder):
    torch.cuda.is_available = lambda: False


def no_libaio(folder):
    toolchain.has_libaio = lambda: False


def no_compiler(folder):
    """PATH holds Python and ninja only, and nothing is built yet."""
    os.environ["PATH"] = os.environ["PATH"].split(os.pathsep)[0]
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def stale_lock(folder):
    """What a process that was killed while it compiled an op leaves behind."""
    os.environ["TORCH_EXTENSIONS_DIR"] = str(folder)


def no_tokenizer_on_rank_1(folder):
    if os.environ["RANK"] == "1":
        setup.find_tokenizer = refuse


def refuse(*args):
    raise ModelError("the tokenizer is broken", "a tokenizer is whole", "mend it")


CPU_OFFLOAD = {"zero": {"stage": 3, "offload_optimizer": {"device": "cpu"}}}


def nvme(path):
    return {"zero": {"stage": 3, "offload_optimizer": {"device": "nvme", "nvme_path": path}}}


MACHINE = {
    "nvme path whose parent is missing": Fault(
        "zero.offload_optimizer.nvme_path is … No such file … set zero.offload_optimizer.nvme_path to a writable",
        nvme("{folder}/none/swap"),
    ),
    "nvme path that cannot be written": Fault(
        "zero.offload_optimizer.nvme_path is '/proc/self' … set zero.offload_optimizer.nvme_path", nvme("/proc/self")
    ),
    "output folder that cannot be made": Fault(
        "run.output_dir is '/proc/none' … set run.output_dir", {"run": {"output_dir": "/proc/none"}}
    ),
    "no GPU": Fault(
        "run.device is cuda, and torch sees no GPU … set run.device to cpu",
        {"run": {"device": "cuda"}},
        disturb=no_gpu,
    ),
    "too little disk": Fault(
        "the exported model: needs about … 0.0 MB free … checkpoint.export to false", disturb=no_disk
    ),
    "too little memory": Fault("needs about … of host memory … use fewer ranks", disturb=no_memory),
    "no libaio": Fault(
        "libaio's header or library is missing … apt install libaio-dev", nvme("{folder}"), disturb=no_libaio
    ),
    "no compiler": Fault("no C++ compiler … cpu_adam … apt install g++", CPU_OFFLOAD, disturb=no_compiler),
    "stale build lock": Fault(
        "/cpu_adam/lock exists, and no process … would wait for ever … delete it: rm ",
        CPU_OFFLOAD,
        lambda folder: [(folder / "cpu_adam").mkdir(), (folder / "cpu_adam" / "lock").touch()],
        stale_lock,
    ),
    "tokenizer broken on one rank": Fault(
        "on rank 1: the tokenizer is broken … a tokenizer is whole … mend it", disturb=no_tokenizer_on_rank_1
    ),
}


@pytest.fixture(scope="module")
def good(tmp_path_factory):
    """The JSON of a run without a fault."""
    return run_folder(tmp_path_factory.mktemp("good"))


def voice(config, disturb, folder):
    """Exit code, what this rank says on stderr, and how long that took."""
    if disturb is not None:
        disturb(folder)
    began, spoken = time.monotonic(), io.StringIO()
    with redirect_stderr(spoken), pytest.raises(SystemExit) as ended, exit_on_user_error():
        Trainer(config=config)
    return ended.value.code, spoken.getvalue(), time.monotonic() - began


FAULTS = CONFIG | MODEL | DATA | MACHINE


@pytest.mark.parametrize("fault", FAULTS.values(), ids=FAULTS)
def test_every_rank_ends_and_one_says_what_is_wrong_and_what_to_do(world, good, tmp_path, fault):
    if fault.prepare is not None:
        fault.prepare(tmp_path)
    sections = json.loads(json.dumps(fault.sections).replace("{folder}", str(tmp_path)))
    config = good | {name: good.get(name, {}) | section for name, section in sections.items()}
    codes, spoken, seconds = zip(*world(voice, 2, config, fault.disturb, tmp_path), strict=True)
    assert codes == (2, 2)
    assert max(seconds) < LIMIT_S
    text = "".join(spoken)
    assert [text.count(part) for part in ("error: ", "  rule:   ", "  change: ", "Traceback")] == [1, 1, 1, 0]
    assert re.search(".*".join(map(re.escape, fault.says.split(" … "))), text, re.DOTALL), text


def accept(config):
    trainer = Trainer(config=config)
    trainer.train_step()
    return trainer.state.global_step


def test_the_run_that_the_faults_are_laid_over_trains(world, good):
    assert world(accept, 2, good) == [1, 1]


def join_another_world(config):
    os.environ["WORLD_SIZE"] = "4"
    with pytest.raises(MachineError) as error:
        Trainer(config=config)
    return error.value.found


def test_a_process_group_of_another_size_than_the_launcher_says_is_refused(world, good):
    assert world(join_another_world, 2, good) == [
        f"the process group has rank {rank} of 2, the launcher says rank {rank} of 4" for rank in (0, 1)
    ]
