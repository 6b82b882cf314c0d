"""A pipeline in a config: ranks, stages, micro-batches, what other keys allow, and what is printed of it."""

import json
import subprocess
import sys
import time
from itertools import product

import pytest

from ds_trainer.cli import main
from ds_trainer.cli.config import stage_rows
from ds_trainer.config.batch import Pipeline, solve_batch
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.io import load_config
from ds_trainer.config.resolve import resolve, total_steps
from ds_trainer.config.resolved import Machine
from ds_trainer.config.torch.arguments import fsdp2_arguments
from ds_trainer.config.training_sections import BatchConfig
from ds_trainer.errors import ConfigError, ConfigErrors
from ds_trainer.host.preflight import host_parts
from ds_trainer.interop.torch.snippet import ddp_snippet, fsdp2_snippet
from ds_trainer.planning.pp_schedules import NAMES
from tests.helpers.deepspeed_reads import accept
from tests.helpers.table import table
from tests.helpers.tiers import in_pairs

GPUS = Machine(8, "cuda", ("fp32", "bf16", "fp16"), "Ampere")
ZERO1 = {"zero": {"stage": 1}}


def run(parallel, machine=GPUS, spec=None, **sections):
    return resolve(*load_config({"parallel": {"engine": "ddp", **parallel}, **sections}), machine, spec)


def faults(parallel, machine=GPUS, spec=None, **sections):
    with pytest.raises(ConfigErrors) as caught:
        run(parallel, machine, spec, **sections)
    return caught.value.errors


def llama(layers, tied=True, hidden=64, vocab=65, **config):
    """config.json and tensors of a Llama; 4 heads, so that it splits over two ranks."""
    tensors = {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    tensors |= {} if tied else {"lm_head.weight": (vocab, hidden)}
    for layer in range(layers):
        for name in ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj", "self_attn.o_proj"):
            tensors[f"model.layers.{layer}.{name}.weight"] = (hidden, hidden)
        tensors[f"model.layers.{layer}.mlp.up_proj.weight"] = (2 * hidden, hidden)
        tensors[f"model.layers.{layer}.mlp.down_proj.weight"] = (hidden, 2 * hidden)
    facts = {"model_type": "llama", "tie_word_embeddings": tied, "hidden_size": hidden, "vocab_size": vocab}
    facts |= {"num_attention_heads": 4, "num_key_value_heads": 4, "num_hidden_layers": layers}
    return facts | {"max_position_embeddings": 4096} | config, tensors


@pytest.fixture
def cli(tmp_path, capsys):
    """Runs `ds-trainer config ...` on a run, and returns the exit code and what was printed."""

    def call(action, raw, *arguments):
        path = tmp_path / "run.json"
        path.write_text(json.dumps(raw))
        try:
            code = main(["config", action, str(path), *arguments])
        except SystemExit as stop:
            code = stop.code
        return code, "".join(capsys.readouterr())

    return call


def cell(zero, pp, tp, offload, checkpointing, engine, schedule):
    parts = (
        ("offload_optimizer", "offload_param") if engine == "fsdp2" and offload != "none" else ("offload_optimizer",)
    )
    place = {"device": offload} | ({"nvme_path": "."} if offload == "nvme" else {})
    section = {"stage": zero} | ({part: place for part in parts} if offload != "none" else {})
    return {
        "model": {"gradient_checkpointing": checkpointing},
        "parallel": {"engine": engine, "pp": pp, "tp": tp} | ({"schedule": schedule} if pp > 1 else {}),
        "zero": section,
        "batch": {"accumulation": 8},
    }


def works(zero, pp, tp, offload, engine):
    """What each engine can do, said once more in few words."""
    match engine:
        case "ddp":
            return False  # The cell has a section for ZeRO, which it refuses.
        case "accelerate":
            of_zero = offload == "none" or (zero == 3 if offload == "nvme" else zero >= 1)
            return pp == tp == 1 and of_zero
        case "fsdp2":
            return zero in (2, 3) and offload != "nvme"
        case _:
            of_zero = offload == "none" or (zero == 3 if offload == "nvme" else zero >= 1)
            return of_zero and (pp == 1 or zero <= 1)


AXES = (
    range(4),
    (1, 2),
    (1, 2),
    ("none", "cpu", "nvme"),
    (False, True),
    ("deepspeed", "fsdp2", "ddp", "accelerate"),
    NAMES,
)
CELLS = [values for values in product(*AXES) if values[1] > 1 or values[-1] == NAMES[0]]


@pytest.mark.case("A12")
@pytest.mark.parametrize(
    "cells",
    [in_pairs(CELLS), pytest.param(CELLS, marks=pytest.mark.full)],
    ids=["pairs", "all"],
)
def test_every_combination_is_ok_or_told_why_not(cli, cells):
    for zero, pp, tp, offload, checkpointing, engine, schedule in cells:
        raw = cell(zero, pp, tp, offload, checkpointing, engine, schedule)
        code, text = cli("check", raw, "--world", "8", "--device", "cuda")
        assert code == (0 if works(zero, pp, tp, offload, engine) else 2), (raw, text)
        assert ("ok for 8 x cuda" in text) if code == 0 else all(part in text for part in ("rule:", "change:")), text


@pytest.mark.alone
@pytest.mark.case("A12")
def test_check_answers_at_once_and_without_torch(checkpoint, tmp_path):
    checkpoint(*llama(4))
    (tmp_path / "run.json").write_text(json.dumps({"model": {"path": str(tmp_path)}, "parallel": {"pp": 2}}))
    code = (
        "import sys; from ds_trainer.cli import main; code = main(sys.argv[1:]); "
        "assert not {'torch', 'transformers', 'deepspeed'} & set(sys.modules); sys.exit(code)"
    )
    begin = time.monotonic()
    command = [sys.executable, "-c", code, "config", "check", str(tmp_path / "run.json"), "--world", "8"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 2 and "set zero.stage to 1, or parallel.engine to fsdp2" in done.stderr, done.stderr
    assert time.monotonic() - begin < 2


@pytest.mark.case("A4")
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "ddp"])
def test_data_ranks_are_what_pipeline_and_tensor_ranks_leave_on_every_engine(engine):
    sections = {"batch": {"micro_size": 2, "accumulation": 4}} | (ZERO1 if engine == "deepspeed" else {})
    resolved = run({"engine": engine, "tp": 2, "pp": 2}, **sections)
    assert (resolved.dp_size, resolved.config.batch.global_size) == (2, 16)
    assert resolved.reasons["batch.global_size"].endswith(
        "2 data-parallel ranks (8 ranks / (parallel.pp 2 x parallel.tp 2))"
    )
    if engine == "fsdp2":
        assert resolved.config.parallel.dp_shard == 2 and fsdp2_arguments(resolved).mesh == {"dp_shard": 2}
    if engine == "deepspeed":
        assert accept(to_deepspeed(resolved), resolved.dp_size).train_batch_size == 16


@pytest.mark.case("A4")
@pytest.mark.parametrize(("ranks", "pp", "steps"), [(4, 2, 8), (2, 1, 8), (1, 1, 16)])
def test_steps_of_an_epoch_go_by_data_ranks(ranks, pp, steps):
    resolved = run({"pp": pp}, Machine(ranks), batch={"micro_size": 2, "accumulation": 2})
    assert total_steps(64, resolved.config.batch.global_size, 1, None) == steps


@pytest.mark.parametrize(
    ("pp", "tp", "change"),
    [
        (3, 1, "set parallel.pp to one of 1, 2, 4, 8, or start a multiple of 3 ranks"),
        (2, 3, "set parallel.tp to one of 1, 2, 4, or start a multiple of 6 ranks"),
        (3, 2, "set parallel.pp to one of 1, 2, 4, or start a multiple of 6 ranks"),
        (4, 4, "set parallel.tp to one of 1, 2, or start a multiple of 16 ranks"),
        (3, 5, "sizes whose product is one of 1, 2, 4, 8, or start a multiple of 15 ranks"),
    ],
)
def test_ranks_that_are_no_whole_copies_are_refused_with_what_the_other_axis_leaves(pp, tp, change):
    (error,) = faults({"pp": pp, "tp": tp})
    assert f"parallel.pp is {pp} (config)" in error.found and error.change.endswith(change)


@table(
    ("parallel", "sections", "change"),
    [
        ({"schedule": "zbv"}, {}, "set parallel.pp or remove parallel.schedule"),
        ({"virtual_stages": 2}, {}, "set parallel.pp or remove parallel.virtual_stages"),
        ({"pp_split": [2]}, {}, "set parallel.pp or remove parallel.pp_split"),
        ({"pp": 2, "virtual_stages": 2}, {}, "set parallel.virtual_stages to 1, or parallel.schedule to one of inter"),
        ({"pp": 2, "schedule": "zbv", "virtual_stages": 3}, {}, "set parallel.virtual_stages to 2, or"),
        ({"pp": 2, "pp_split": [1, 1, 1]}, {}, "set parallel.pp_split to 2 numbers"),
        ({"pp": 2, "schedule": "zbv", "pp_split": [3, 2]}, {}, "set parallel.pp_split to 4 numbers"),
        ({"pp": 2}, {"evaluation": {"generate_samples": 1}}, "generate from the exported model"),
        ({"pp": 2}, {"model": {"auto_class": "AutoModel"}}, "set model.auto_class to AutoModelForCausalLM"),
        ({"pp": 2}, {"ddp": {"comm_hook": "powersgd"}}, "set ddp.comm_hook to bf16 or fp16"),
        ({"pp": 2}, {"ddp": {"static_graph": True}}, "remove ddp.static_graph"),
        ({"pp": 2, "engine": "deepspeed"}, {"zero": {"stage": 2}}, "or parallel.engine to fsdp2, which shards grad"),
        ({"pp": 2, "engine": "deepspeed"}, {"zero": {"stage": 1, "overlap_comm": True}}, "remove zero.overlap_comm"),
        ({"pp": 2, "engine": "deepspeed"}, {"zero": {"stage": 0}, "precision": {"dtype": "fp16"}}, "zero.stage to 1"),
        (
            {"pp": 2, "engine": "deepspeed"},
            {"zero": {"stage": 1, "offload_optimizer": {"device": "nvme", "nvme_path": "/n"}}},
            "set zero.offload_optimizer.device to cpu",
        ),
        ({"pp": 2, "engine": "fsdp2"}, {"fsdp": {"reshard_after_forward": 2}}, "remove fsdp.reshard_after_forward"),
        ({"pp": 2, "engine": "fsdp2"}, {"zero": {"zero_hpz_partition_size": 2}}, "remove zero.zero_hpz_partition_size"),
        ({"pp": 2, "engine": "deepspeed"}, {"optimizer": {"name": "adafactor"}, **ZERO1}, "parallel.engine to ddp"),
        (
            {"pp": 2, "engine": "deepspeed"},
            {"native": {"deepspeed": {"pipeline": {"stages": 2}}}, **ZERO1},
            "set parallel.pp",
        ),
    ],
    ids=str,
)
def test_what_does_not_go_with_a_pipeline_is_refused_with_what_does(parallel, sections, change):
    (error,) = faults(parallel, **sections)
    assert change in error.change


@pytest.mark.parametrize(
    ("parallel", "sections"),
    [
        ({"pp": 1, "schedule": "1f1b"}, {}),
        ({"pp": 2}, {"optimizer": {"name": "adafactor"}}),
        ({"pp": 2}, {"ddp": {"comm_hook": "fp16", "find_unused_parameters": True}}),
        ({"pp": 2, "engine": "fsdp2", "dp_replicate": 2}, {"fsdp": {"cpu_offload": True}}),
        (
            {"pp": 2, "engine": "deepspeed", "schedule": "zbv"},
            {"zero": {"stage": 1, "offload_optimizer": {"device": "cpu"}}},
        ),
        ({"pp": 2, "engine": "deepspeed"}, {"zero": {"stage": 0}, "precision": {"dtype": "bf16"}}),
        ({"pp": 2}, {"model": {"gradient_checkpointing": True, "compile": True}}),
    ],
    ids=str,
)
def test_what_goes_with_it_is_let_through(parallel, sections):
    run(parallel, **sections)


def test_what_the_reducer_alone_would_read_is_said_to_have_no_effect():
    warnings = run({"pp": 2}, ddp={"gradient_as_bucket_view": False}).warnings
    assert any(text.startswith("ddp.gradient_as_bucket_view has no effect") for text in warnings)
    assert not any("gradient_as_bucket_view" in text for text in run({"pp": 2}).warnings)


def test_parameters_stay_gathered_under_a_pipeline_unless_the_user_says_otherwise():
    resolved = run({"pp": 2, "engine": "fsdp2"})
    assert resolved.config.fsdp.reshard_after_forward is False
    assert "gathered again for each micro-batch" in resolved.reasons["fsdp.reshard_after_forward"]
    assert run({"engine": "fsdp2"}).config.fsdp.reshard_after_forward is True
    for said in ({"fsdp": {"reshard_after_forward": True}}, {"zero": {"stage": 3}}):
        assert run({"pp": 2, "engine": "fsdp2"}, **said).config.fsdp.reshard_after_forward is True


def solved(name, pp, virtual_stages, dp_size=1, **batch):
    return solve_batch(BatchConfig(**batch), dp_size, pipeline=Pipeline(name, pp, virtual_stages))


def test_where_nothing_says_how_many_micro_batches_there_are_four_to_a_pipeline_rank():
    for name in NAMES:
        found = solved(name, 4, 1 if name in ("gpipe", "1f1b") else 2, 2)
        assert (found.micro_size, found.accumulation, found.global_size) == (1, 16, 32)
        assert found.reasons["accumulation"].startswith("4 x parallel.pp 4: the pipeline fills and drains in 16% of")


def test_a_batch_that_leaves_the_micro_size_open_is_cut_into_as_many_as_the_schedule_takes():
    assert solved("1f1b", 4, 1, 2, global_size=16).accumulation == 8
    # 14 micro-batches would be 3 rounds of unequal length, so that two samples go together.
    found = solved("interleaved_1f1b", 4, 2, global_size=14)
    assert (found.micro_size, found.accumulation) == (2, 7)
    assert found.reasons["micro_size"] == "the smallest that leaves as many micro-batches as interleaved_1f1b takes"


@pytest.mark.case("I9")
@table(
    ("name", "pp", "batch", "change"),
    [
        ("1f1b", 2, {"accumulation": 1}, "set batch.accumulation to 2 or more"),
        ("interleaved_1f1b", 2, {"accumulation": 5}, "set batch.accumulation to 4 or 6"),
        ("dualpipev", 4, {"accumulation": 4}, "set batch.accumulation to 8 or more"),
        ("1f1b", 2, {"global_size": 12, "micro_size": 6}, "set batch.global_size to 24, or batch.micro_size to 3"),
        ("1f1b", 2, {"global_size": 2}, "set batch.global_size to 4"),
        (
            "1f1b",
            2,
            {"global_size": 12, "accumulation": 1},
            "set batch.global_size to 24 and batch.accumulation to 2, or batch.accumulation to 2",
        ),
        (
            "1f1b",
            2,
            {"global_size": 12, "micro_size": 6, "accumulation": 1},
            "set batch.global_size to 24 and batch.accumulation to 2, or batch.accumulation to 2 and batch.micro_size "
            "to 3",
        ),
        ("interleaved_1f1b", 2, {"global_size": 14, "micro_size": 1}, "set batch.global_size to 12 or 16"),
    ],
)
def test_micro_batches_that_a_schedule_does_not_take_are_refused_with_what_it_does(name, pp, batch, change):
    virtual_stages = 1 if name == "1f1b" else 2
    with pytest.raises(ConfigError) as caught:
        solved(name, pp, virtual_stages, 2, **batch)
    assert caught.value.change == change
    assert f"parallel.pp {pp} with batch.accumulation" in caught.value.found
    assert ("global_size" in caught.value.found) is ("accumulation" not in batch), "what was not said is explained"


@pytest.mark.case("I9")
def test_three_micro_batches_run_interleaved_as_one_round():
    assert solved("interleaved_1f1b", 2, 2, accumulation=3).accumulation == 3


@pytest.mark.case("I9")
@pytest.mark.parametrize(
    ("layers", "pp", "schedule", "split"),
    [(5, 2, "1f1b", (3, 2)), (5, 2, "interleaved_1f1b", (1, 1, 2, 1)), (80, 16, "interleaved_1f1b", None)],
)
def test_layers_that_do_not_divide_are_dealt_out_all_of_them_and_printed(cli, checkpoint, layers, pp, schedule, split):
    spec = checkpoint(*llama(layers, tied=False))
    resolved = run({"pp": pp, "schedule": schedule}, Machine(pp), spec)
    assert resolved.config.parallel.pp_split == split or (split is None and len(resolved.stages) == 32)
    assert resolved.stages[0][0] == 0 and resolved.stages[-1][1] == layers
    assert "above the mean at 2048 positions" in resolved.reasons["parallel.pp_split"]
    rows = stage_rows(resolved, spec)
    assert sum(int(row[-1].replace(",", "")) for row in rows) == spec.num_parameters
    assert sum(float(row[3].rstrip("%")) for row in rows) == pytest.approx(100, abs=0.1 * len(rows))
    raw = {"model": {"path": spec.folder}, "parallel": {"engine": "ddp", "pp": pp, "schedule": schedule}}
    code, text = cli("show", raw, "--world", str(pp))
    assert code == 0 and f"the layers on each of {pp} pipeline ranks" in text
    if split == (3, 2):
        assert "embedding + layers 0 to 2" in text and "layers 3 to 4 + head" in text


@pytest.mark.case("N11")
def test_the_copy_of_a_tied_head_is_counted_where_it_is_held(cli, checkpoint):
    spec, embedding = checkpoint(*llama(4)), 65 * 64
    told = {}
    for schedule in ("1f1b", "zbv"):
        resolved = run({"pp": 2, "schedule": schedule}, Machine(2), spec)
        told[schedule] = [row[-1] for row in stage_rows(resolved, spec)]
    numbers = [int(number.split()[0].replace(",", "")) for number in told["1f1b"]]
    assert sum(numbers) == spec.num_parameters + embedding
    assert told["1f1b"][-1].endswith(f"(tied: {embedding:,} of them are a copy)")
    assert "tied" not in "".join(told["zbv"]), "one rank has both stages, and one parameter for both"
    raw = {"model": {"path": spec.folder}, "parallel": {"engine": "ddp", "pp": 2, "schedule": "1f1b"}}
    assert f"tied: {embedding:,} of them are a copy" in cli("show", raw, "--world", "2")[1]


@pytest.mark.case("N11")
@pytest.mark.parametrize(
    ("parallel", "world", "bytes_per_parameter"),
    [({"engine": "ddp"}, 2, (16, 16)), ({"engine": "deepspeed"}, 2, (12, 10))],
)
def test_show_says_how_large_the_model_is_and_what_a_rank_keeps(cli, checkpoint, parallel, world, bytes_per_parameter):
    spec = checkpoint(*llama(4))
    raw = {"model": {"path": spec.folder}, "parallel": parallel, "zero": {"stage": 2}}
    raw = raw if parallel["engine"] == "deepspeed" else {key: raw[key] for key in ("model", "parallel")}
    code, text = cli("show", raw, "--world", str(world))
    held = [f"{size * spec.num_parameters / 1e9:,.3g} GB" for size in bytes_per_parameter]
    line = " ".join(text.split())
    assert code == 0
    assert (
        f"{spec.num_parameters:,} parameters; a rank keeps {held[0]} after a backward pass and {held[1]} after" in line
    )


@pytest.mark.case("I9")
@pytest.mark.parametrize(
    ("parallel", "layers", "found", "change"),
    [
        ({"pp": 8}, 5, "parallel.pp is 8 (config), and the model has 5 layers", "set parallel.pp to 5 or less"),
        (
            {"pp": 4, "schedule": "zbv"},
            5,
            "parallel.pp is 4 (config) x 2 stages on each rank, and the model has 5 layers",
            "set parallel.schedule to 1f1b, which has one stage on each rank",
        ),
        (
            {"pp": 2, "schedule": "interleaved_1f1b", "virtual_stages": 3},
            5,
            "x 3 stages on each rank",
            "set parallel.virtual_stages to 2 or less",
        ),
        (
            {"pp": 2, "pp_split": [2, 2]},
            5,
            "[2, 2] (config), 4 layers, and the model has 5",
            "2 numbers that add up to 5",
        ),
    ],
)
def test_stages_that_do_not_fit_the_layers_are_refused_before_the_load(checkpoint, parallel, layers, found, change):
    (error,) = faults(parallel, spec=checkpoint(*llama(layers)))
    assert found in error.found and change in error.change


def test_a_split_of_the_users_is_taken_as_it_is(checkpoint):
    resolved = run({"pp": 2, "pp_split": [1, 4]}, spec=checkpoint(*llama(5)))
    assert resolved.stages == ((0, 1), (1, 5)) and resolved.reasons["parallel.pp_split"] == "config"


def test_longer_sequences_give_the_last_stage_more_layers(checkpoint):
    """A head costs the same at any length, layers with attention do not."""
    spec = checkpoint(*llama(8, vocab=9999))
    last = [run({"pp": 2}, spec=spec, data={"max_length": n}).config.parallel.pp_split[1] for n in (2, 4096)]
    assert last[0] < last[1] <= 4


def test_a_type_that_cannot_be_cut_is_refused_with_the_reason_and_an_unknown_one_left_to_the_load(checkpoint):
    from ds_trainer.planning.checkpoint_spec import families

    refused = {name: family.pp_refused for name, family in families().items() if family.pp_refused}
    for name, reason in list(refused.items())[:1]:
        (error,) = faults({"pp": 2}, spec=checkpoint(*llama(4, model_type=name)))
        assert error.rule == reason and error.change == "set parallel.pp to 1"
    spec = checkpoint(*llama(4, model_type="of_the_future"))
    assert any("whether it can be split is checked at load" in text for text in run({"pp": 2}, spec=spec).warnings)
    nothing = checkpoint({"model_type": "llama"}, {"weight": (3, 3)})
    resolved = run({"pp": 2}, spec=nothing)
    assert any("do not show its layers" in text for text in resolved.warnings)
    assert resolved.stages is None and resolved.reasons["parallel.pp_split"].endswith("at load")


def test_a_rank_keeps_and_buffers_the_largest_stages_part(checkpoint):
    spec = checkpoint(*llama(5, tied=False))
    layer, vocabulary = 4 * 64 * 64 + 2 * 128 * 64, 65 * 64
    machine = Machine(4)
    resolved = run({"engine": "deepspeed", "pp": 2}, machine, spec, **ZERO1)
    assert resolved.config.parallel.pp_split == (3, 2)
    assert resolved.size.num_parameters == vocabulary + 3 * layer
    assert resolved.config.zero.reduce_bucket_size == resolved.size.num_parameters
    moments = {part.name: part.size for part in host_parts(resolved)}["moments"]
    assert moments == 8 * resolved.size.num_parameters / 2, "shared by two data-parallel ranks"
    both = run({"engine": "deepspeed", "pp": 2, "tp": 2}, machine, spec, **ZERO1)
    assert both.size.num_parameters == 33 * 64 + 3 * layer // 2
    folded = run({"engine": "deepspeed", "pp": 2, "schedule": "zbv"}, machine, spec, **ZERO1)
    assert folded.config.parallel.pp_split == (1, 1, 2, 1)
    assert folded.size.num_parameters == 3 * layer, "stages 1 and 2, in the middle of the V, are on one rank"
    instance = resolve(*load_config({"parallel": {"engine": "ddp", "pp": 2, "tp": 2}}), machine, None, 1001)
    assert instance.size.num_parameters == 251


def test_ddp_puts_gradients_into_one_bucket_after_another():
    for cap, size in ((1, 2**20), (10**6, 4 * 10**6)):
        resolved = resolve(
            *load_config({"parallel": {"engine": "ddp", "pp": 2}, "ddp": {"bucket_cap_mb": cap}}),
            Machine(2),
            None,
            2 * 10**6,
        )
        assert {part.name: part.size for part in host_parts(resolved)}["gradient buckets"] == size


def test_the_snippets_lay_the_pipeline_outermost_and_say_who_runs_it():
    hsdp = fsdp2_snippet(run({"engine": "fsdp2", "tp": 2, "pp": 2, "dp_replicate": 2}))
    names = '("pp", "dp_replicate", "dp_shard", "tp",)'
    assert f'init_device_mesh("cuda", (2, 2, 1, 2), mesh_dim_names={names})[("dp_replicate", "dp_shard",)]' in hsdp
    ddp = ddp_snippet(run({"pp": 2, "schedule": "gpipe"}))
    assert 'init_device_mesh("cuda", (2, 4), mesh_dim_names=("pp", "dp",))["dp"].get_group()' in ddp
    assert "one of 2 stages" in hsdp and "in the order gpipe" in ddp
    assert all(compile(text, "snippet", "exec") for text in (hsdp, ddp))


def test_a_translation_says_what_another_tool_cannot(cli):
    raw = {"parallel": {"pp": 2}, "zero": {"stage": 1}, "schedule": {"name": "constant"}}
    world = ("--world", "4", "--device", "cpu")
    for more, note in (((), "sees those of one rank as a model"), (("--standalone",), "takes a PipelineModule")):
        code, text = cli("translate", raw, "--to", "deepspeed", *world, *more)
        assert code == 0 and note in text
    for to, name in (("accelerate", "accelerate"), ("hf", "transformers' Trainer")):
        code, text = cli("translate", raw, "--to", to, *world)
        assert code == 2 and f"parallel.pp is 2, for {name}" in text and "set parallel.pp to 1" in text


def test_a_hub_id_is_left_to_the_load(cli):
    raw = {"model": {"path": "owner/name"}, "parallel": {"engine": "ddp", "pp": 2}}
    code, text = cli("check", raw, "--world", "4")
    assert code == 0 and "whether parallel.pp 2 fits the model is checked at load" in text
