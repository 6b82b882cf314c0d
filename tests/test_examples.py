"""Every example runs on two ranks, by the command line that a user types, and does what it says."""

import importlib.util
import json
import os
import re
import runpy
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryFile

import pytest
import torch
import torch.nn.functional as F
from transformers import AutoModelForCausalLM, AutoTokenizer, BertForSequenceClassification

from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.metrics import read_metrics
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.launch import chats, run_folder, write_json, write_jsonl
from tests.helpers.runs import D8, make_trainer
from tests.helpers.table import table

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def config(tmp_path):
    """A tiny run on disk with evaluation data."""
    config = run_folder(tmp_path)
    config["data"]["eval"] = write_jsonl(tmp_path / "eval.jsonl", chats(3))
    return write_json(tmp_path / "run.json", config)


def run_script(name, arguments):
    """Runs an example as a launcher does, which adds the local rank, and returns what it says on stderr."""
    sys.argv = [name, f"--local_rank={os.environ.get('LOCAL_RANK', 0)}", *map(str, arguments)]
    with TemporaryFile("w+") as said, redirect_stderr(said):
        runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        said.seek(0)
        return said.read()


def settings(**keys):
    """`--set` for keys whose dots are written as two underscores."""
    return [part for key, item in keys.items() for part in ("--set", f"{key.replace('__', '.')}={item}")]


def on_cpu(out):
    return settings(run__output_dir=out, run__device="cpu", precision__dtype="fp32")


def train_losses(out):
    return [line["loss"] for line in read_metrics(out / "metrics.jsonl") if "loss" in line]


def evaluations(out):
    return [line for line in read_metrics(out / "metrics.jsonl") if "eval_loss" in line]


def module(name):
    """An example as a module, its `main` not called."""
    spec = importlib.util.spec_from_file_location(Path(name).stem, EXAMPLES / name)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


def test_train_takes_its_steps_and_exports(world, config, tmp_path):
    world(run_script, 2, "train.py", ["--config", config])
    assert len(train_losses(tmp_path / "out")) == 3
    AutoModelForCausalLM.from_pretrained(tmp_path / "out" / "model")


def test_sft_chat_learns_the_answers_of_conversations_made_in_python(world, tmp_path):
    model = make_checkpoint(tmp_path / "checkpoint")
    short = settings(model__path=model, data__max_length=64, data__cache_dir=tmp_path / "cache", optimizer__lr="1e-2")
    world(run_script, 2, "sft_chat.py", [*on_cpu(tmp_path), *short])
    before, after = evaluations(tmp_path)
    assert after["eval_loss"] < before["eval_loss"] - 1.0
    assert (before["step"], after["step"]) == (0, 10)


def test_custom_loss_trains_on_the_sum_of_both_terms(world, config, tmp_path):
    world(run_script, 2, "custom_loss.py", ["--config", config])
    losses = train_losses(tmp_path / "out")
    world(run_script, 2, "train.py", ["--config", config, *settings(run__output_dir=tmp_path / "plain")])
    plain = train_losses(tmp_path / "plain")
    # An untrained model's log_z is about log(320) for every token.
    assert losses[0] - plain[0] == pytest.approx(1e-4 * torch.tensor(320.0).log().item() ** 2, rel=0.1)


def test_custom_loss_is_what_it_says_token_by_token():
    generator = torch.Generator().manual_seed(0)
    logits, labels = torch.randn(2, 5, 7, generator=generator), torch.randint(0, 7, (2, 5), generator=generator)
    labels[0, :3] = -100
    expected = sum(
        F.cross_entropy(logits[b, t], labels[b, t + 1]) + 1e-4 * logits[b, t].exp().sum().log() ** 2
        for b in range(2)
        for t in range(4)
        if labels[b, t + 1] != -100
    )
    outputs = type("Outputs", (), {"logits": logits})
    got = module("custom_loss.py").loss_with_z(outputs, labels, num_items_in_batch=6)
    assert got.item() == pytest.approx(expected.item() / 6, rel=1e-6)


def test_callbacks_keeps_the_best_model_of_the_evaluations(world, config, tmp_path):
    # At this rate the loss falls in the first step and rises in the last ones.
    rates = settings(evaluation__every_steps=1, optimizer__lr=0.3, schedule__name="constant", run__max_steps=4)
    world(run_script, 2, "callbacks.py", ["--config", config, *rates])
    by_loss = sorted(evaluations(tmp_path / "out"), key=lambda line: line["eval_loss"])
    assert by_loss[0]["step"] < 4, "the last model must not be the best, or keeping it proves nothing"
    best, last = (
        AutoModelForCausalLM.from_pretrained(tmp_path / "out" / name).state_dict() for name in ("best", "model")
    )
    assert not all(torch.equal(best[name], last[name]) for name in last)
    at_best = settings(run__max_steps=by_loss[0]["step"], run__output_dir=tmp_path / "until_best")
    world(run_script, 2, "train.py", ["--config", config, *rates[:-2], *at_best])
    there = AutoModelForCausalLM.from_pretrained(tmp_path / "until_best" / "model").state_dict()
    assert all(torch.equal(best[name], there[name]) for name in there)


def stop_at_goal(out, goal):
    given = {"eval_dataset": D8[:2], "callbacks": [module("callbacks.py").StopAtGoal(goal)]}
    evaluation = {"every_steps": 1}
    return make_trainer("ddp", out, given=given, run={"max_steps": 3}, evaluation=evaluation).train().global_step


@pytest.mark.parametrize(("goal", "steps"), [(100.0, 1), (0.0, 3)])
def test_callbacks_stops_at_its_goal(world, tmp_path, goal, steps):
    assert world(stop_at_goal, 2, tmp_path, goal) == [steps, steps]


def test_custom_model_learns_to_classify_and_exports_its_class(world, tmp_path):
    world(run_script, 2, "custom_model.py", on_cpu(tmp_path))
    before, after = evaluations(tmp_path)
    assert before["eval_accuracy"] < 0.7 < 0.95 < after["eval_accuracy"]
    exported, info = BertForSequenceClassification.from_pretrained(tmp_path / "model", output_loading_info=True)
    assert not any(info.values()), info
    rows = module("custom_model.py").samples(100, seed=2)
    with torch.no_grad():
        chosen = exported(torch.tensor([row["input_ids"] for row in rows])).logits.argmax(-1)
    share = (chosen == torch.tensor([row["label"] for row in rows])).float().mean().item()
    assert share == pytest.approx(after["eval_accuracy"])


def printed_by_hand(faulty_layer=None):
    """What the example prints, and how it ends; with the sums of a layer left out where one is named."""
    with redirect_stdout(StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        if faulty_layer is not None:
            patch.setattr(f"ds_trainer.parallel.tensor.{faulty_layer}", lambda x, group: x)
        try:
            module("tp_by_hand.py").main()
            end = None
        except SystemExit as stop:
            end = str(stop.code)
    return said.getvalue(), end


def test_tp_by_hand_shows_what_is_sent_and_that_nothing_changes(world):
    (text, end), (silent, _) = world(printed_by_hand, 2)
    assert end is None and not silent
    number = 2 * 10 * 64 * 4
    blocks = [block.splitlines() for block in text.split("\n\n")[1:5]]
    assert [block[0] for block in blocks] == [
        name + mode for mode in ("", ", with sequence parallelism") for name in ("MLP", "Attention")
    ]
    for block in blocks:
        sequence = "sequence" in block[0]
        forward = ["all-gather", "reduce-scatter"] if sequence else ["all-reduce"]
        backward = ["all-gather", "all-gather", "reduce-scatter"] if sequence else ["all-reduce"]
        for direction, sent in (("forward", forward), ("backward", backward)):
            assert f"  {direction} sends: " + ", ".join(f"{kind} of {number:,} bytes" for kind in sent) in block
        assert float(re.search(r"largest difference from the whole block: (\S+)", block[-1])[1]) < 1e-5


def test_tp_by_hand_finds_a_sum_that_is_missing(world):
    for _, end in world(printed_by_hand, 2, "linear.reduce_from_group"):
        assert re.search("MLP on rank . differs from the whole block: {'output'", end)


def test_tp_by_hand_says_how_to_start_it():
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="torchrun --nproc_per_node 2"):
        patch.delenv("RANK", raising=False)
        module("tp_by_hand.py").main()


def test_tp_by_hand_says_which_numbers_of_ranks_it_takes(world):
    ends = [end for _, end in world(printed_by_hand, 3)]
    assert ends == ["8 heads do not divide by 3 ranks: start 1, 2, 4 or 8", "1", "1"]


def piped_by_hand(schedule, ties_are_summed=True):
    """What the example prints on the first rank, and how each rank's ends."""
    with redirect_stdout(StringIO()) as said, pytest.MonkeyPatch.context() as patch:
        if not ties_are_summed:
            patch.setattr("ds_trainer.parallel.tied_parameters.StageParameters.sum_tied", lambda self, gradients: None)
        try:
            module("pipeline_by_hand.py").main(["--schedule", schedule])
            end = None
        except SystemExit as stop:
            end = str(stop.code)
    return said.getvalue(), end


@pytest.mark.parametrize(("schedule", "stages"), [("1f1b", ["0", "1"]), ("zbv", ["0, 3", "1, 2"])])
def test_pipeline_by_hand_shows_the_plan_and_that_nothing_changes(world, schedule, stages):
    (text, end), (silent, other_end) = world(piped_by_hand, 2, schedule)
    assert end is None and other_end is None and not silent
    plan, held, result = (block.splitlines() for block in text.strip().split("\n\n"))
    assert [line.split()[:2] for line in plan] == [["rank", "0"], ["rank", "1"]]
    assert [line.partition(" parameters, in stages ")[2] for line in held] == stages
    losses = [line.partition(":")[2].split() for line in result if line.startswith("losses of")]
    assert losses[0] == losses[1] and len(set(losses[0])) == 8
    assert [line.split(":")[0] for line in result if "differ" in line] == ["rank 0", "rank 1"]


def test_pipeline_by_hand_finds_a_tied_gradient_that_is_missing(world):
    ends = [end for _, end in world(piped_by_hand, 2, "gpipe", False)]
    assert ends == ["rank 0 computes something else than the whole model", None]


def test_pipeline_by_hand_says_how_to_start_it():
    with pytest.MonkeyPatch.context() as patch, pytest.raises(SystemExit, match="torchrun --nproc_per_node 2"):
        patch.delenv("RANK", raising=False)
        module("pipeline_by_hand.py").main([])


def test_pipeline_by_hand_says_which_numbers_of_ranks_it_takes(world):
    ends = [end for _, end in world(piped_by_hand, 3, "1f1b")]
    assert ends == ["8 layers make two equal stages on each of 2 or 4 ranks, not 3", "1", "1"]


@pytest.mark.nvme
def test_zero3_nvme_trains_from_swap_files_and_removes_them(world, nvme, tmp_path):
    # DeepSpeed leaves in memory what has less than 1 MiB on a rank.
    model = make_checkpoint(tmp_path / "checkpoint", hidden_size=256, vocab_size=4096)
    data = write_jsonl(tmp_path / "train.jsonl", chats())
    tiny = settings(
        model__path=model,
        data__train=data,
        data__max_length=64,
        data__cache_dir=tmp_path / "cache",
        zero__offload_optimizer__nvme_path=nvme,
        zero__offload_param__nvme_path=nvme,
    )
    said = world(run_script, 2, "train.py", ["--config", EXAMPLES / "zero3_nvme.json", *on_cpu(tmp_path), *tiny])
    assert re.search(r"parameters: .* on nvme; optimizer: .* on nvme; swap files: [1-9]", said[0])
    assert len(train_losses(tmp_path)) == 3
    assert list(nvme.iterdir()) == []


def losses_of_transformers(arguments):
    """Runs the example's Trainer: every step's loss and gradient norm, and what the model was wrapped in."""
    example = module("hf_trainer.py")
    sys.argv = ["hf_trainer.py", *map(str, arguments)]
    trainer = example.make_trainer(example.parse_train_arguments(default_config="unused"))
    trainer.train()
    log = [line[key] for line in trainer.state.log_history if "loss" in line for key in ("loss", "grad_norm")]
    wrapped = trainer.model_wrapped
    return log, type(wrapped).__name__, getattr(wrapped, "zero_optimization_stage", lambda: None)()


BY_TRANSFORMERS = [
    pytest.param(
        ["parallel.engine=ddp", "zero=null"], "DistributedDataParallel", None, id="ddp", marks=pytest.mark.slow
    ),
    pytest.param(["zero.stage=2"], "DeepSpeedEngine", 2, id="zero2"),
    pytest.param(["zero.stage=3"], "DeepSpeedEngine", 3, id="zero3", marks=pytest.mark.slow),
]


@pytest.mark.parametrize(("engine", "wrapper", "stage"), BY_TRANSFORMERS)
def test_hf_trainer_gets_our_losses_from_transformers(world, config, tmp_path, engine, wrapper, stage):
    # Short and long answers in one step, accumulation, clipping, decay and a schedule: all of it must agree.
    run = settings(
        batch__global_size=4, batch__accumulation=2, optimizer__max_grad_norm=0.3, optimizer__weight_decay=0.1
    )
    run += settings(schedule__name="cosine", schedule__warmup_ratio=0.4, schedule__min_lr_ratio=0.1, run__max_steps=5)
    run += settings(checkpoint__every_steps=0)
    arguments = ["--config", config, *run, *(part for key in engine for part in ("--set", key))]
    world(run_script, 2, "train.py", arguments)
    lines = [line for line in read_metrics(tmp_path / "out" / "metrics.jsonl") if "loss" in line]
    assert lines[-1]["loss"] < lines[0]["loss"] - 0.5, "the weights must have moved, or equal losses prove nothing"
    ours = [line[key] for line in lines for key in ("loss", "grad_norm")]
    for log, wrapped, at_stage in world(losses_of_transformers, 2, arguments):
        assert (wrapped, at_stage) == (wrapper, stage)
        assert log == pytest.approx(ours, rel=1e-5)


def saved_by_transformers(arguments):
    """Runs the whole example; the format in which it computed."""
    sys.argv = ["hf_trainer.py", *map(str, arguments)]
    made = []
    example = module("hf_trainer.py")
    make = example.make_trainer
    example.make_trainer = lambda args: made.append(make(args)) or made[0]
    example.main()
    return str(next(made[0].model_wrapped.module.parameters()).dtype)


@pytest.mark.parametrize("stage", [2, 3])
def test_hf_trainer_saves_a_folder_that_loads_with_its_tokenizer_whatever_precision_is_left_open(
    world, config, tmp_path, stage
):
    tree = json.loads(config.read_text())
    del tree["precision"]
    write_json(config, tree)
    dtypes = world(saved_by_transformers, 2, ["--config", config, *settings(zero__stage=stage)])
    assert dtypes == ["torch.float32"] * 2
    saved = tmp_path / "out" / "model"
    model, info = AutoModelForCausalLM.from_pretrained(saved, output_loading_info=True)
    assert not any(info.values()), info
    before = AutoModelForCausalLM.from_pretrained(tmp_path / "checkpoint").state_dict()
    assert not all(torch.equal(before[name], item) for name, item in model.state_dict().items())
    assert AutoTokenizer.from_pretrained(saved)("Paris").input_ids


def refused_by_transformers(arguments):
    """What the example says, and its exit code, where its Trainer cannot be had."""
    with TemporaryFile("w+") as said, redirect_stderr(said), pytest.raises(SystemExit) as stop:
        sys.argv = ["hf_trainer.py", *map(str, arguments)]
        try:
            module("hf_trainer.py").main()
        finally:
            said.seek(0)
            text = said.read()
    return stop.value.code, text


ON_CPU_IN_VAIN = [
    pytest.param({"zero__stage": 2, "precision__dtype": "bf16"}, "set precision.dtype to fp32", id="zero2-bf16"),
    pytest.param({"parallel__engine": "fsdp2", "zero": "null"}, "set parallel.engine to ddp", id="fsdp2"),
]


@pytest.mark.parametrize(("keys", "change"), ON_CPU_IN_VAIN)
def test_hf_trainer_says_what_transformers_does_not_run_on_a_cpu(world, config, keys, change):
    code, text = world(refused_by_transformers, 1, ["--config", config, *settings(**keys)])[0]
    assert code == 2 and change in text and "Traceback" not in text


@table("ranks", [1, 2, 4, 8])
@table("name", sorted(str(path.relative_to(EXAMPLES)) for path in EXAMPLES.rglob("*.json")))
def test_a_default_config_runs_on_any_usual_number_of_ranks(name, ranks):
    config, origins = load_config(EXAMPLES / name)
    batch = resolve(config, origins, Machine(ranks, "cuda", ("fp32", "bf16"), "a GPU")).config.batch
    assert batch.micro_size * batch.accumulation * ranks == batch.global_size


def test_no_example_is_left_without_a_test():
    tested = {name.split("_", 1)[1] for name in globals() if name.startswith("test_")}
    untested = [path.stem for path in EXAMPLES.glob("*.py") if not any(t.startswith(path.stem) for t in tested)]
    assert not untested
