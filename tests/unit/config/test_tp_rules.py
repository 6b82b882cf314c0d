"""Tensor parallelism in a config: ranks, sizes that divide, what other keys allow, and what is printed of it."""

import json
from types import SimpleNamespace

import pytest

from ds_trainer.cli import main
from ds_trainer.cli.config import share_rows
from ds_trainer.config.deepspeed.arguments import to_deepspeed
from ds_trainer.config.engine_sections import ParallelConfig
from ds_trainer.config.io import load_config
from ds_trainer.config.machine import probe_machine_pure
from ds_trainer.config.resolve import resolve
from ds_trainer.config.resolved import Machine
from ds_trainer.config.torch.arguments import fsdp2_arguments
from ds_trainer.config.tp_rules import shares_of
from ds_trainer.errors import ConfigErrors, ModelError
from ds_trainer.host.preflight import host_parts
from ds_trainer.interop.torch.snippet import ddp_snippet, fsdp2_snippet
from ds_trainer.launch.rank_grid import Grid
from ds_trainer.planning.checkpoint_spec import read_spec
from ds_trainer.planning.tp_divisibility import Unit, tp_size_problem, working_sizes
from ds_trainer.planning.tp_plan import plan_for
from ds_trainer.planning.tp_shards import TensorShards
from tests.helpers.deepspeed_reads import accept
from tests.helpers.table import table

GPUS = Machine(8, "cuda", ("fp32", "bf16", "fp16"), "Ampere")


def run(parallel, machine=GPUS, spec=None, **sections):
    return resolve(*load_config({"parallel": parallel, **sections}), machine, spec)


def faults(parallel, machine=GPUS, spec=None, **sections):
    with pytest.raises(ConfigErrors) as caught:
        run(parallel, machine, spec, **sections)
    return caught.value.errors


def llama_sizes(heads=8, kv_heads=2, hidden=64, width=96, vocab=65, **config):
    """config.json and tensors of a Llama with two layers."""
    head_dim, tensors = hidden // heads, {"model.embed_tokens.weight": (vocab, hidden), "model.norm.weight": (hidden,)}
    for layer in range(2):
        matrices = {
            "self_attn.q_proj": (hidden, hidden),
            "self_attn.k_proj": (kv_heads * head_dim, hidden),
            "self_attn.v_proj": (kv_heads * head_dim, hidden),
            "self_attn.o_proj": (hidden, hidden),
            "mlp.gate_proj": (width, hidden),
            "mlp.up_proj": (width, hidden),
            "mlp.down_proj": (hidden, width),
            "input_layernorm": (hidden,),
        }
        tensors |= {f"model.layers.{layer}.{name}.weight": shape for name, shape in matrices.items()}
    sizes = {"hidden_size": hidden, "intermediate_size": width, "vocab_size": vocab}
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    return {"model_type": "llama", "tie_word_embeddings": True, **sizes, **config}, tensors


def test_a_size_works_where_every_number_divides_and_heads_that_are_fewer_repeat():
    heads, kv_heads = Unit("attention heads", 12), Unit("KV heads", 2, repeats=True)
    assert working_sizes([heads, kv_heads]) == [1, 2, 4, 6, 12]
    assert working_sizes([heads, kv_heads, Unit("features", 32)]) == [1, 2, 4]
    assert [kv_heads.per_rank(tp) for tp in (1, 2, 4)] == [2, 1, 1]
    assert [kv_heads.replicas(tp) for tp in (1, 2, 4)] == [1, 1, 2]
    assert tp_size_problem(4, [heads, kv_heads]) is None


def test_a_refusal_names_each_number_once_and_the_sizes_that_work_for_all():
    units = [Unit("outputs of up", 10), Unit("attention heads", 6), Unit("inputs of down", 10), Unit("columns", 8)]
    found, _, change = tp_size_problem(4, units)
    assert found == "parallel.tp is 4, and the model has 10 outputs of up, 6 attention heads"
    assert change.endswith(": 1, 2")


@pytest.mark.case("A4")
@pytest.mark.parametrize("engine", ["deepspeed", "fsdp2", "ddp"])
def test_data_ranks_are_ranks_over_tensor_ranks_on_every_engine(engine):
    resolved = run({"engine": engine, "tp": 2}, batch={"micro_size": 2, "accumulation": 3})
    assert (resolved.dp_size, resolved.config.batch.global_size) == (4, 24)
    assert resolved.reasons["batch.global_size"].endswith("x 4 data-parallel ranks (8 ranks / parallel.tp 2)")
    if engine == "fsdp2":
        assert resolved.config.parallel.dp_shard == 4 and fsdp2_arguments(resolved).mesh == {"dp_shard": 4}
    if engine == "deepspeed":
        assert accept(to_deepspeed(resolved), resolved.dp_size).train_batch_size == 24


@pytest.mark.case("A3")
def test_a_batch_that_does_not_divide_is_told_with_data_ranks_and_where_they_come_from():
    (error,) = faults({"tp": 2}, batch={"global_size": 6, "micro_size": 1})
    assert "batch.micro_size 1 x 4 data-parallel ranks (8 ranks / parallel.tp 2) = 4" in error.found
    assert error.change == "set batch.global_size to 4 or 8"


def test_hsdp_divides_the_data_ranks():
    plan = {"engine": "fsdp2", "tp": 2, "dp_replicate": 2}
    assert run(plan).config.parallel.dp_shard == 2
    (error,) = faults(plan | {"dp_replicate": 8})
    assert error.found.endswith("on 4 data-parallel ranks")


def test_ranks_that_are_no_whole_copies_are_refused_with_the_sizes_alone():
    (error,) = faults({"tp": 3, "engine": "fsdp2", "dp_replicate": 3}, batch={"global_size": 7})
    assert error.found == "parallel.tp is 3 (config) on 8 ranks"
    assert error.change == "set parallel.tp to one of 1, 2, 4, 8, or start a multiple of 3 ranks"


@table(
    ("parallel", "sections", "change"),
    [
        ({"sequence_parallel": True}, {}, "set parallel.tp or remove parallel.sequence_parallel"),
        ({"tp_plan": {"*": "colwise"}}, {}, "set parallel.tp or remove parallel.tp_plan"),
        ({"tp": 2, "keep_gathered_input": True}, {}, "set parallel.sequence_parallel to true"),
        ({"tp": 2, "tp_plan": {"*.up": "colums"}}, {}, "use colwise, "),
        ({"tp": 2, "engine": "ddp"}, {"optimizer": {"name": "adafactor"}}, "optimizer.name to adamw or parallel.tp"),
        ({"tp": 2}, {"zero": {"stage": 0}, "precision": {"dtype": "fp16"}}, "zero.stage to 1, precision.dtype to bf16"),
        ({"tp": 2}, {"zero": {"stage": 3, "zero_hpz_partition_size": 2}}, "remove zero.zero_hpz_partition_size"),
        ({"tp": 2}, {"zero": {"stage": 3, "zero_quantized_gradients": True}}, "remove zero.zero_quantized_gradients"),
        ({"tp": 2}, {"native": {"deepspeed": {"tensor_parallel": {"autotp_size": 2}}}}, "set parallel.tp"),
        (
            {"tp": 2, "engine": "fsdp2"},
            {"fsdp": {"reshard_after_forward": 2}},
            "reshard_after_forward to true or false",
        ),
        ({"tp": 2, "engine": "fsdp2"}, {"zero": {"zero_hpz_partition_size": 2}}, "remove zero.zero_hpz_partition_size"),
        ({"tp": 2, "engine": "accelerate"}, {}, "remove parallel.tp or change parallel.engine"),
    ],
    ids=str,
)
def test_what_does_not_go_with_tensor_parallelism_is_refused(parallel, sections, change):
    (error,) = faults(parallel, **sections)
    assert change in error.change


@pytest.mark.parametrize(
    "sections",
    [
        {"zero": {"stage": 3, "zero_quantized_weights": True}},
        {"zero": {"stage": 2, "offload_optimizer": {"device": "cpu"}}},
        {"parallel": {"tp": 2, "sequence_parallel": True, "keep_gathered_input": True}},
        {"parallel": {"tp": 2, "engine": "ddp"}, "ddp": {"comm_hook": "powersgd"}},
        {"parallel": {"tp": 1, "engine": "accelerate"}},
    ],
    ids=str,
)
def test_what_goes_with_it_is_let_through(sections):
    resolve(*load_config({"parallel": {"tp": 2}} | sections), GPUS)


@pytest.mark.parametrize(
    ("tp", "ranks", "node", "warns"), [(8, 16, 8, False), (16, 16, 8, True), (3, 24, 8, True), (4, 4, 4, False)]
)
def test_tensor_ranks_on_several_nodes_are_warned_of_with_the_reason(tp, ranks, node, warns):
    resolved = run({"tp": tp}, Machine(ranks, "cuda", ("fp32",), "", node_ranks=node))
    found = [text for text in resolved.warnings if "crosses nodes of 8 ranks" in text]
    assert bool(found) is warns and all("all-reduces" in text and "1, 2, 4, 8" in text for text in found)


def test_where_the_node_is_not_known_nothing_is_said_of_it():
    assert probe_machine_pure(16, "cpu").node_ranks is None
    assert not any("crosses" in text for text in run({"tp": 16}, probe_machine_pure(16, "cpu")).warnings)


def test_heads_that_do_not_divide_are_refused_with_the_sizes_that_work(checkpoint):
    spec = checkpoint(*llama_sizes(heads=9, kv_heads=3, hidden=576, width=1536))
    (error,) = faults({"tp": 2}, spec=spec)
    assert error.found == "parallel.tp is 2, and the model has 9 attention heads, 3 KV heads (config)"
    assert error.change == "set parallel.tp to a size that works: 1, 3"
    run({"tp": 3}, Machine(3), spec)


@pytest.mark.case("I1")
@pytest.mark.parametrize(("heads", "kv_heads", "tp", "works"), [(8, 1, 2, True), (8, 2, 4, True), (8, 3, 2, False)])
def test_fewer_kv_heads_than_ranks_repeat_where_they_divide_them(checkpoint, heads, kv_heads, tp, works):
    spec = checkpoint(*llama_sizes(heads, kv_heads))
    if works:
        run({"tp": tp}, spec=spec)
    else:
        assert f"{kv_heads} KV heads" in faults({"tp": tp}, spec=spec)[0].found


def test_a_width_that_does_not_divide_is_told_beside_the_heads_and_other_faults(checkpoint):
    spec = checkpoint(*llama_sizes(heads=6, kv_heads=6, hidden=48, width=90))
    batch, sizes = faults({"tp": 4}, spec=spec, batch={"global_size": 3})[::-1]
    assert "6 attention heads, 90 features inside mlp" in sizes.found and sizes.change.endswith(": 1, 2, 3, 6")
    assert "batch.global_size 3" in batch.found


def test_a_type_without_a_plan_is_refused_unless_the_config_brings_one(checkpoint):
    spec = checkpoint(*llama_sizes(model_type="bert"))
    assert plan_for("bert") is None
    (error,) = faults({"tp": 2}, spec=spec)
    assert "no plan for model type 'bert'" in error.found and "set parallel.tp_plan" in error.change
    own = {"*.q_proj": "colwise", "*.[kv]_proj": "colwise", "*.o_proj": "rowwise"}
    shards = shares_of(load_config({"parallel": {"tp": 2, "tp_plan": own}})[0], spec)
    assert [unit.name for unit in shards.units()] == ["attention heads", "KV heads"]
    run({"tp": 2, "tp_plan": own}, spec=spec)


@pytest.mark.parametrize(
    ("model_type", "prefix", "says"),
    [
        ("of_the_future", "model", "model type 'of_the_future' is not in families.json"),
        ("llama", "other", "the checkpoint's names are not those of the model"),
    ],
)
def test_what_only_the_load_can_tell_is_said_to_be_checked_there(checkpoint, model_type, prefix, says):
    config, tensors = llama_sizes(model_type=model_type)
    named = {name.replace("model.layers", f"{prefix}.blocks"): shape for name, shape in tensors.items()}
    spec = checkpoint(config, named)
    assert f"{says}: whether parallel.tp 2 fits is checked at load" in run({"tp": 2}, spec=spec).warnings


def test_a_rank_keeps_and_buffers_what_is_left_of_the_model(checkpoint):
    spec = checkpoint(*llama_sizes(heads=8, kv_heads=2, hidden=64, width=96, vocab=65))
    resolved = run({"tp": 4}, Machine(8), spec)
    attention, mlp, norms = 2 * 64 * 64 // 4 + 2 * 16 * 64 // 2, 3 * 96 * 64 // 4, 64
    assert resolved.size.num_parameters == 17 * 64 + 2 * (attention + mlp + norms) + 64
    assert resolved.size.largest_parameter == 96 * 64 // 4
    assert resolved.config.zero.reduce_bucket_size == resolved.size.num_parameters
    parts = {part.name: part.size for part in host_parts(resolved)}
    assert parts["moments"] == 8 * resolved.size.num_parameters / 2


KINDS = ("llama", "qwen2", "gpt2", "phi3", "gemma2", "mixtral", "qwen3_moe", "deepseek_v2")


class OneOf:
    """Stands for a tensor group: the split of a model communicates nothing."""

    def __init__(self, size):
        self.size, self.rank = lambda: size, lambda: 0


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_told_from_headers_is_what_the_split_makes(tmp_path, kind):
    from ds_trainer.models.small_configs import causal_lm_classes, small_configs
    from ds_trainer.parallel.tensor.parallelize import split_model

    cls, config_class = causal_lm_classes(kind)
    cls(small_configs(config_class)[0]).save_pretrained(tmp_path)
    shards = TensorShards(read_spec(str(tmp_path)), plan_for(kind))
    for tp in (2, 3, 4, 8):
        model = cls(small_configs(config_class)[0])
        mesh = SimpleNamespace(tp_group=OneOf(tp), grid=Grid(tp, tp_size=tp))
        mesh.tp_host_group = mesh.tp_group
        if refused := tp_size_problem(tp, shards.units()):
            with pytest.raises(ModelError) as caught:
                split_model(model, ParallelConfig(tp=tp), mesh)
            assert caught.value.change == refused[2]
        else:
            split_model(model, ParallelConfig(tp=tp), mesh)
            assert shards.elements(tp)[0] == sum(parameter.numel() for parameter in model.parameters())


def test_show_prints_heads_widths_and_vocabulary_per_rank(checkpoint, capsys, monkeypatch, tmp_path):
    config, tensors = llama_sizes(heads=8, kv_heads=2, num_local_experts=4)
    spec = checkpoint(config, tensors)
    rows = share_rows(load_config({"parallel": {"tp": 4}})[0], spec)
    assert rows[:5] == [
        ("attention heads", "8", "2"),
        ("KV heads", "2", "1 (2 ranks hold the same)"),
        ("features inside mlp", "96", "24"),
        ("experts", "4", "4, 1/4 of each"),
        ("vocabulary", "65", "17 (3 of 68 are padding)"),
    ]
    (tmp_path / "run.json").write_text(json.dumps({"model": {"path": str(tmp_path)}, "parallel": {"tp": 4}}))
    monkeypatch.setenv("COLUMNS", "100")
    for tp, shown in (("4", True), ("1", False)):
        assert main(["config", "show", str(tmp_path / "run.json"), "--world", "8", "--set", f"parallel.tp={tp}"]) == 0
        text = capsys.readouterr().out
        assert ("the model on each of 4 tensor-parallel ranks" in text and "3 of 68 are padding" in text) is shown
        assert ("of its part of the model that each of 2 data-parallel ranks keeps" in text) is shown


def test_check_refuses_what_does_not_divide_without_loading_torch(checkpoint, capsys, tmp_path):
    checkpoint(*llama_sizes(heads=9, kv_heads=3, hidden=576, width=1536))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": {"path": str(tmp_path)}, "parallel": {"tp": 2}}))
    assert main(["config", "check", str(path), "--world", "4"]) == 2
    assert "set parallel.tp to a size that works: 1, 3" in capsys.readouterr().err
    assert main(["config", "check", str(path), "--world", "4", "--set", "model.path=owner/name"]) == 0
    assert "whether parallel.tp 2 fits the model is checked at load" in capsys.readouterr().out


def test_the_snippets_lay_the_tensor_ranks_innermost_and_say_who_cuts_the_layers():
    hsdp = fsdp2_snippet(run({"engine": "fsdp2", "tp": 2, "dp_replicate": 2}))
    names = '("dp_replicate", "dp_shard", "tp",)'
    assert f'init_device_mesh("cuda", (2, 2, 2), mesh_dim_names={names})[("dp_replicate", "dp_shard",)]' in hsdp
    ddp = ddp_snippet(run({"engine": "ddp", "tp": 2}))
    assert 'init_device_mesh("cuda", (4, 2), mesh_dim_names=("dp", "tp",))["dp"].get_group()' in ddp
    assert all("sharded over 2 ranks" in text and "4 data-parallel ranks" in text for text in (hsdp, ddp))
    assert all(compile(text, "snippet", "exec") for text in (hsdp, ddp))


def test_a_translation_for_deepspeed_says_what_the_json_cannot(capsys, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"parallel": {"tp": 2}, "schedule": {"name": "constant"}}))
    command = ["config", "translate", str(path), "--to", "deepspeed", "--world", "4", "--device", "cpu"]
    for more, note in (([], "passes DeepSpeed an mpu"), (["--standalone"], "AutoTP")):
        assert main([*command, *more]) == 0
        out, err = capsys.readouterr()
        assert note in err and ("autotp_size" in out) is bool(more)


def test_a_translation_for_what_cannot_cut_layers_says_so(capsys, tmp_path):
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"parallel": {"tp": 2, "engine": "ddp"}}))
    for to, name in (("accelerate", "accelerate"), ("hf", "transformers' Trainer")):
        with pytest.raises(SystemExit):
            main(["config", "translate", str(path), "--to", to, "--world", "4"])
        said = capsys.readouterr().err
        assert f"parallel.tp is 2, for {name}" in said and "set parallel.tp to 1" in said
        assert "change parallel.engine" not in said


def test_where_one_size_works_it_alone_is_named():
    assert tp_size_problem(2, [Unit("attention heads", 9), Unit("features", 5)])[2] == "set parallel.tp to 1"
    assert faults({"tp": 2}, Machine(1))[0].change == "set parallel.tp to 1, or start a multiple of 2 ranks"
    (error,) = faults({"engine": "fsdp2", "dp_replicate": 2}, Machine(1))
    assert error.change.startswith("set parallel.dp_replicate to 1, and")


@pytest.mark.parametrize(
    ("entry", "style", "found"),
    [
        ("*.q_prj", "colwise", "has *.q_prj, which matches no module"),
        ("modl.layers.*.mlp.up_proj", "colwise", "has modl.layers.*.mlp.up_proj, which matches no module"),
        ("model.norm", "colwise", "gives colwise to model.norm by model.norm, and that is no matrix"),
        ("model.layers.0.mlp", "rowwise", "gives rowwise to model.layers.0.mlp by model.layers.0.mlp, and that is a m"),
        ("*", "replicate", "shards no layer"),
    ],
)
def test_a_plan_that_cannot_fit_the_checkpoint_is_refused_before_the_load(checkpoint, entry, style, found):
    (error,) = faults({"tp": 2, "tp_plan": {entry: style}}, spec=checkpoint(*llama_sizes()))
    assert error.found.startswith(f"parallel.tp_plan (config) {found}")


@pytest.mark.parametrize(
    ("plan", "prefix"),
    [
        ({"lm_head": "colwise"}, ""),  # tied, so that the checkpoint lacks it
        ({"model.layers.*.mlp.*": "replicate"}, ""),
        ({"model.layers.1.mlp.up_proj": "colwise"}, "model."),  # a checkpoint of the model without its head
        ({"model.layers.0.mlp.up_proj.weight": "colwise", "model.norm.weight": "colwise"}, ""),
    ],
    ids=str,
)
def test_a_plan_that_fits_says_nothing_of_itself(checkpoint, plan, prefix):
    config, tensors = llama_sizes()
    spec = checkpoint(config, {name.removeprefix(prefix): shape for name, shape in tensors.items()})
    assert not any("parallel.tp_plan" in text for text in run({"tp": 2, "tp_plan": plan}, spec=spec).warnings)


@pytest.mark.parametrize(
    ("model_type", "entry", "style", "model"),
    [
        ("llama", "*.act_fn", "replicate", {}),  # without weights, so that the checkpoint has it not
        ("mixtral", "*.q_prj", "colwise", {}),  # renamed on load
        ("llama", "layers.*.mlp.up_prj", "colwise", {"auto_class": "AutoModel"}),
    ],
)
def test_an_entry_of_which_only_the_load_can_tell_is_warned_of(checkpoint, model_type, entry, style, model):
    spec = checkpoint(*llama_sizes(model_type=model_type))
    warnings = run({"tp": 2, "tp_plan": {entry: style}}, spec=spec, model=model).warnings
    assert any(f"parallel.tp_plan has {entry}, which matches no name in the checkpoint" in text for text in warnings)


def test_a_plan_for_a_type_without_one_is_suggested_in_the_checkpoints_own_names(checkpoint):
    change = faults({"tp": 2}, spec=checkpoint(*llama_sizes(model_type="bert")))[0].change
    names = [f"model.layers.*.self_attn.{part}_proj" for part in "qkvo"]
    assert ", ".join(names) in change and "model.layers.*.mlp.down_proj" in change and "layernorm" not in change


@pytest.mark.parametrize(("head", "embedding"), [("replicate", "65"), ("colwise", "33")])
def test_an_embedding_that_no_entry_names_is_cut_as_the_head_is(checkpoint, head, embedding):
    config, tensors = llama_sizes(model_type="gpt2", tie_word_embeddings=False)
    spec = checkpoint(config, tensors | {"lm_head.weight": (65, 64)})
    plan = {"*.up_proj": "colwise", "*.down_proj": "rowwise", "lm_head": head}
    rows = dict(row[::2] for row in share_rows(load_config({"parallel": {"tp": 2, "tp_plan": plan}})[0], spec))
    assert rows.get("vocabulary", "65").startswith(embedding)


@pytest.mark.parametrize(
    ("config", "found"),
    [
        ({"quantization_config": {"quant_method": "gptq"}}, "has a quantization_config"),
        ({"model_type": "t5", "is_encoder_decoder": True}, "is of an encoder and a decoder (t5)"),
        (
            {"architectures": ["LlamaForSequenceClassification"], "tie_word_embeddings": False},
            "LlamaForSequenceClassification, and its weights have no head",
        ),
    ],
    ids=str,
)
def test_check_refuses_a_checkpoint_that_the_load_would(checkpoint, capsys, tmp_path, config, found):
    checkpoint(*llama_sizes(**config))
    path = tmp_path / "run.json"
    path.write_text(json.dumps({"model": {"path": str(tmp_path)}}))
    assert main(["config", "check", str(path), "--world", "2"]) == 2
    assert found in capsys.readouterr().err


def test_another_head_whose_weights_would_be_left_out_is_warned_of(checkpoint):
    config, tensors = llama_sizes(architectures=["LlamaForSequenceClassification"])
    warnings = run({}, spec=checkpoint(config, tensors | {"score.weight": (2, 64)})).warnings
    assert any("the checkpoint's own head is left out" in text for text in warnings)


def test_a_plan_of_ones_own_may_use_the_prefix_that_a_checkpoint_lacks(checkpoint):
    config, tensors = llama_sizes(model_type="bert", tie_word_embeddings=False)
    spec = checkpoint(config, {name.removeprefix("model."): shape for name, shape in tensors.items()})
    plan = {"model.layers.*.mlp.up_proj": "colwise", "model.layers.*.mlp.down_proj": "rowwise"}
    assert [unit.number for unit in shares_of(run({"tp": 2, "tp_plan": plan}, spec=spec).config, spec).units()] == [96]
