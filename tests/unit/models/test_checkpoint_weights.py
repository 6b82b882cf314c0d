"""Skeleton and weights against `from_pretrained`, and what a checkpoint that does not fit leads to."""

from dataclasses import replace
from math import prod
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, AutoModelForSequenceClassification
from transformers.core_model_loading import ConversionOps, WeightConverter

from ds_trainer import log
from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import ConfigError, ModelError
from ds_trainer.layout import TensorSlice
from ds_trainer.models import checkpoint_weights, conversions
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.load_weights import load_full
from ds_trainer.models.loss_kind import is_causal_lm
from ds_trainer.models.pretrained import build_skeleton, prepare_for_training
from ds_trainer.models.resize import resize_embeddings_to_fit
from ds_trainer.models.tokenizer import load_tokenizer
from tests.helpers.checkpoints import KINDS, edit_config, make_checkpoint, make_model
from tests.helpers.rss import rss_anon_peak
from tests.helpers.tokenizers import make_tokenizer

CPU = torch.device("cpu")


def load(folder, dtype=torch.float32, **options):
    model = build_skeleton(folder, ModelConfig(**options), dtype)
    load_full(model, CheckpointWeights(folder, model), CPU, dtype)
    return model


def change_tensors(folder, change):
    path = Path(folder, "model.safetensors")
    tensors = load_file(path)
    change(tensors)
    save_file(tensors, path, metadata={"format": "pt"})


@pytest.fixture
def warnings(monkeypatch):
    """Texts of once-per-run warnings."""
    monkeypatch.setattr(log, "_seen", set())
    return log._seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("kind", KINDS)
def test_loaded_model_equals_from_pretrained_bit_for_bit(tmp_path, kind, dtype):
    folder = make_checkpoint(tmp_path, kind, dtype=torch.bfloat16, max_shard_size="40KB")
    expected = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype)
    model = load(folder, dtype)
    assert model.training
    assert not any(p.is_meta for p in model.parameters())
    theirs, ours = expected.state_dict(), model.state_dict()
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(value.to(ours[name].dtype), ours[name]) for name, value in theirs.items())
    assert {p.dtype for p in model.parameters()} == {dtype}
    theirs, ours = dict(expected.named_buffers()), dict(model.named_buffers())
    assert theirs.keys() == ours.keys()
    assert all(torch.equal(value, ours[name]) and value.dtype == ours[name].dtype for name, value in theirs.items())
    ids = torch.arange(3, 27).view(2, 12)
    assert torch.equal(expected.eval()(ids).logits, model.eval()(ids).logits)


@pytest.mark.case("D4")
@pytest.mark.parametrize("kind, tied", [("llama_tied", True), ("llama", False)])
def test_head_and_embedding_are_one_object_exactly_when_tied(tmp_path, kind, tied):
    folder = make_checkpoint(tmp_path, kind)
    skeleton = build_skeleton(folder, ModelConfig(), torch.float32)
    assert all(p.is_meta for p in skeleton.parameters())
    for model in (skeleton, load(folder)):
        assert (model.get_input_embeddings().weight is model.get_output_embeddings().weight) is tied


CONVERTED = ["mixtral", "deepseek_v3", "sarvam_moe", "inkling2_text"]


@pytest.mark.parametrize("kind", ["llama", "gpt2", *CONVERTED])
def test_flat_ranges_are_cuts_of_the_whole_tensor(tmp_path, kind):
    folder = make_checkpoint(tmp_path, kind)
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    weights = CheckpointWeights(folder, model)
    for name, parameter in model.named_parameters():
        whole = weights.read(name, torch.float32)
        assert whole.shape == parameter.shape
        n = whole.numel()
        for start, stop in ((0, n), (n // 3, 2 * n // 3 + 1), (n - 1, n), (1, 1)):
            assert torch.equal(weights.read(name, torch.float32, (start, stop)), whole.flatten()[start:stop])


@pytest.mark.parametrize("kind", ["llama", "gpt2", *CONVERTED])
def test_boxes_are_cuts_of_the_whole_tensor(tmp_path, kind):
    folder = make_checkpoint(tmp_path, kind)
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    weights = CheckpointWeights(folder, model)
    for name, parameter in model.named_parameters():
        shape = tuple(parameter.shape)
        for dim, size in enumerate(shape):
            wanted = TensorSlice.whole(shape).along(dim, size // 2, size - size // 2)
            assert torch.equal(weights.read_slice(name, wanted), weights.view(name)[wanted.index])


class Counting:
    """The data of a stored tensor, of which it counts the elements that are asked for."""

    def __init__(self, data, read):
        self.data, self.read = data, read

    def __getitem__(self, index):
        value = self.data[index]
        self.read.append(value.numel())
        return value


@pytest.mark.parametrize("kind", ["mixtral", "qwen3_moe", "deepseek_v3", "sarvam_moe"])
def test_of_tensors_that_are_merged_or_split_on_load_a_box_reads_only_what_it_holds(
    tmp_path, kind, warnings, monkeypatch
):
    folder = make_checkpoint(tmp_path, kind)
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    read = []

    def counting(path):
        return {name: replace(t, data=Counting(t.data, read)) for name, t in open_safetensors(path).items()}

    open_safetensors = checkpoint_weights._open_safetensors
    monkeypatch.setattr(checkpoint_weights, "_open_safetensors", counting)
    weights = CheckpointWeights(folder, model)
    for name, parameter in model.named_parameters():
        if len(shape := tuple(parameter.shape)) == 1:
            continue
        for dim in range(len(shape)):
            wanted = TensorSlice.whole(shape).along(dim, shape[dim] // 2, shape[dim] // 2)
            read.clear()
            weights.read_slice(name, wanted)
            assert sum(read) == wanted.numel
    assert not warnings


def test_a_skeleton_costs_no_memory_whatever_the_size_of_the_model(tmp_path):
    CONFIG_MAPPING["deepseek_v3"]().save_pretrained(tmp_path)
    with rss_anon_peak() as peak:
        model = build_skeleton(str(tmp_path), ModelConfig(), torch.float32)
    assert sum(p.numel() for p in model.parameters()) > 5e11
    assert peak.bytes < 200e6


def test_values_are_read_as_asked_while_the_model_s_own_parameters_are_cut(tmp_path):
    folder = make_checkpoint(tmp_path, "mixtral")
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    shapes = {name: p.shape for name, p in model.named_parameters()}
    weights = CheckpointWeights(folder, model)
    for parameter in model.parameters():  # As ZeRO-3 leaves them.
        parameter.data = torch.empty(0, device="meta")
    assert all(weights.read(name, torch.float32).shape == shape for name, shape in shapes.items())


def test_slices_of_a_large_tensor_take_no_more_memory_than_they_hold(tmp_path):
    folder = make_checkpoint(tmp_path, "llama", vocab_size=400_000)
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    weights = CheckpointWeights(folder, model)
    numel = prod(model.get_input_embeddings().weight.shape)
    with rss_anon_peak() as peak:
        part = weights.read("model.embed_tokens.weight", torch.float32, (numel // 4, numel // 2))
    assert part.nbytes == numel
    assert peak.bytes < 1.2 * part.nbytes


def test_tensors_that_are_read_whole_are_said_once_and_others_not(tmp_path, warnings):
    for kind in ("llama", "mixtral", "inkling2_text"):
        folder = make_checkpoint(tmp_path / kind, kind)
        weights = CheckpointWeights(folder, model := build_skeleton(folder, ModelConfig(), torch.float32))
        for name, _ in model.named_parameters():
            weights.read(name, torch.float32, (0, 1))
    text = "tensors made by {} on load are read in full by every rank, one at a time"
    assert warnings == {text.format("Interleave"), text.format("Inkling2UnpadVocab")}


class Doubled(ConversionOps):
    """Writes into a tensor of its own, which no record of operations shows."""

    def convert(self, input_dict, source_patterns, target_patterns, **kwargs):
        ((source,),) = input_dict.values()
        out = torch.empty_like(source)
        out[:] = source
        return {target_patterns[0]: out * 2}

    @property
    def reverse_op(self):
        raise NotImplementedError


def test_a_conversion_that_writes_into_tensors_is_run_on_whole_ones(tmp_path, warnings, monkeypatch):
    folder = make_checkpoint(tmp_path)
    converter = WeightConverter("mlp.up_proj.weight", "mlp.up_proj.weight", operations=[Doubled()])
    monkeypatch.setattr(conversions, "get_model_conversion_mapping", lambda *_, **__: [converter])
    weights = CheckpointWeights(folder, build_skeleton(folder, ModelConfig(), torch.float32))
    name = "model.layers.1.mlp.up_proj.weight"
    expected = 2 * load_file(Path(folder, "model.safetensors"))[name]
    assert torch.equal(weights.view(name), expected)
    assert not warnings
    assert torch.equal(weights.read_slice(name, TensorSlice((3, 5), (2, 4))), expected[3:5, 5:9])
    assert torch.equal(weights.view(name, (7, 70)), expected.flatten()[7:70])
    assert ["Doubled" in text for text in warnings] == [True]


def test_a_missing_tensor_is_refused_and_named(tmp_path):
    folder = make_checkpoint(tmp_path)
    change_tensors(folder, lambda t: t.pop("model.layers.1.mlp.up_proj.weight"))
    with pytest.raises(ModelError, match=r"lacks 1 tensors .*layers\.1\.mlp\.up_proj\.weight"):
        load(folder)


def test_a_tensor_the_model_has_no_place_for_is_warned_of_once(tmp_path, warnings):
    folder = make_checkpoint(tmp_path)
    change_tensors(
        folder, lambda t: t.update({"extra.weight": torch.ones(2), "model.rotary_emb.inv_freq": torch.ones(4)})
    )
    load(folder)
    load(folder)
    assert len(warnings) == 1
    assert "extra.weight" in next(iter(warnings))
    assert "inv_freq" not in next(iter(warnings))


def test_a_tensor_of_another_shape_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path)
    edit_config(folder, intermediate_size=24)
    with pytest.raises(ModelError, match=r"gate_proj\.weight \[48, 32\] instead of \[24, 32\]"):
        load(folder)


@pytest.mark.case("D4")
def test_a_tied_config_over_two_different_tensors_is_refused_and_over_equal_ones_loads(tmp_path):
    folder = make_checkpoint(tmp_path, "llama")
    edit_config(folder, tie_word_embeddings=True)
    with pytest.raises(ModelError, match="tie_word_embeddings"):
        load(folder)
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t["model.embed_tokens.weight"].clone()}))
    assert load(folder).lm_head.weight is not None


def test_a_tied_checkpoint_may_hold_its_one_tensor_under_the_head_s_name(tmp_path):
    folder = make_checkpoint(tmp_path, "llama_tied")
    expected = load(folder).state_dict()
    change_tensors(folder, lambda t: t.update({"lm_head.weight": t.pop("model.embed_tokens.weight")}))
    assert torch.equal(load(folder).state_dict()["model.embed_tokens.weight"], expected["lm_head.weight"])


def test_pickled_weights_need_permission_and_then_load_the_same_values(tmp_path):
    folder = make_checkpoint(tmp_path, "llama_tied", pickled=True)
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    with pytest.raises(ModelError, match=r"model\.allow_pickle"):
        CheckpointWeights(folder, model)
    load_full(model, CheckpointWeights(folder, model, allow_pickle=True), CPU, torch.float32)
    expected = make_model("llama_tied").state_dict()
    assert all(torch.equal(value, expected[name]) for name, value in model.state_dict().items())


def test_a_pickle_that_would_run_code_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, pickled=True)
    torch.save({"model.norm.weight": Path.cwd}, Path(folder, "pytorch_model.bin"))
    with pytest.raises(ModelError, match=r"pytorch_model\.bin"):
        CheckpointWeights(folder, build_skeleton(folder, ModelConfig(), torch.float32), allow_pickle=True)


@pytest.mark.parametrize("kind", ["llama", "llama_tied", "phi"])
def test_embeddings_grow_to_the_tokenizer_with_the_mean_of_the_old_rows(tmp_path, kind):
    folder = make_checkpoint(tmp_path, kind, vocab_size=270)
    tokenizer = make_tokenizer()
    config = ModelConfig(resize_embeddings=True, pad_embeddings_to_multiple_of=16)
    rows = -(-len(tokenizer) // 16) * 16
    model = build_skeleton(folder, config, torch.float32)
    weights = resize_embeddings_to_fit(model, tokenizer, CheckpointWeights(folder, model), config)
    assert model.config.vocab_size == rows > len(tokenizer) > 270
    name = "model.embed_tokens.weight"
    whole = weights.read(name, torch.float32)
    for start, stop in ((0, 100), (8000, 270 * 32 + 40), (270 * 32 + 5, rows * 32)):
        assert torch.equal(weights.read(name, torch.float32, (start, stop)), whole.flatten()[start:stop])
    load_full(model, weights, CPU, torch.float32)
    old = make_model(kind, vocab_size=270).state_dict()
    changed = {n for n, value in model.state_dict().items() if value.shape != old[n].shape}
    assert {name, "lm_head.weight"} <= changed
    for n, value in model.state_dict().items():
        assert torch.equal(value[: len(old[n])], old[n])
        assert torch.equal(value[len(old[n]) :], old[n].mean(0).expand(len(value) - len(old[n]), *value.shape[1:]))
    assert model(torch.tensor([[rows - 1]])).logits.shape == (1, 1, rows)


def test_a_model_instance_grows_in_place(tmp_path):
    model, old = make_model("llama", vocab_size=270), make_model("llama", vocab_size=270)
    assert resize_embeddings_to_fit(model, make_tokenizer(), None, ModelConfig(resize_embeddings=True)) is None
    for name in ("model.embed_tokens.weight", "lm_head.weight"):
        value, before = model.state_dict()[name], old.state_dict()[name]
        assert torch.equal(value[:270], before)
        assert torch.equal(value[270:], before.mean(0).expand(len(value) - 270, -1))


def test_token_ids_beyond_the_embedding_are_refused_unless_it_may_grow(tmp_path):
    model = make_model("llama", vocab_size=270)
    with pytest.raises(ModelError, match=r"model\.resize_embeddings"):
        resize_embeddings_to_fit(model, make_tokenizer(), None, ModelConfig())


def test_a_fitting_embedding_is_left_alone_even_when_it_may_grow(tmp_path):
    folder = make_checkpoint(tmp_path)
    model = build_skeleton(folder, ModelConfig(), torch.float32)
    weights = CheckpointWeights(folder, model)
    config = ModelConfig(resize_embeddings=True, pad_embeddings_to_multiple_of=256)
    assert resize_embeddings_to_fit(model, load_tokenizer(config, folder), weights, config) is weights


def test_activation_checkpointing_recomputes_and_leaves_gradients_unchanged(tmp_path):
    folder = make_checkpoint(tmp_path)
    ids, calls, gradients = torch.arange(3, 27).view(2, 12), [], []
    for enabled in (False, True):
        model = load(folder, gradient_checkpointing=enabled)
        model.model.layers[0].self_attn.register_forward_hook(lambda *_, enabled=enabled: calls.append(enabled))
        model(input_ids=ids, labels=ids).loss.backward()
        gradients.append({name: p.grad for name, p in model.named_parameters()})
    assert (calls.count(False), calls.count(True)) == (1, 2)
    assert all(torch.equal(g, gradients[1][name]) for name, g in gradients[0].items())
    assert model(input_ids=ids).past_key_values is None


def test_the_attention_implementation_is_the_one_asked_for(tmp_path):
    folder = make_checkpoint(tmp_path)
    assert load(folder, attn_implementation="eager").config._attn_implementation == "eager"
    with pytest.raises(ModelError, match=r"model\.attn_implementation"):
        load(folder, attn_implementation="no_such_kernel")


def test_other_auto_classes_build_and_misspelt_ones_name_the_nearest(tmp_path):
    folder = make_checkpoint(tmp_path)
    with pytest.raises(ConfigError, match="AutoModelForCausalLM"):
        load(folder, auto_class="AutoModelForCausalML")
    config = ModelConfig(auto_class="AutoModelForSequenceClassification")
    model = build_skeleton(folder, config, torch.float32)
    assert not is_causal_lm(model)
    with pytest.raises(ModelError, match=r"score\.weight"):  # Not made up by a reader of exports.
        CheckpointWeights(folder, model)
    AutoModelForSequenceClassification.from_config(make_model("llama").config).save_pretrained(folder)
    load(folder, auto_class="AutoModelForSequenceClassification")


def test_a_router_loss_with_weight_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path, "mixtral")
    edit_config(folder, output_router_logits=True, router_aux_loss_coef=0.0)
    load(folder)
    edit_config(folder, router_aux_loss_coef=0.02)
    with pytest.raises(ModelError, match="output_router_logits"):
        load(folder)


def test_a_quantised_checkpoint_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path)
    edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    with pytest.raises(ModelError, match="quantization_config"):
        load(folder)


def test_an_unknown_model_type_is_refused(tmp_path):
    folder = make_checkpoint(tmp_path)
    edit_config(folder, model_type="brand_new")
    with pytest.raises(ModelError, match="brand_new"):
        load(folder)


def test_a_model_that_cannot_recompute_is_refused(monkeypatch):
    model = make_model("llama")
    monkeypatch.setattr(type(model), "supports_gradient_checkpointing", False)
    with pytest.raises(ModelError, match=r"model\.gradient_checkpointing"):
        prepare_for_training(model, ModelConfig(gradient_checkpointing=True))


def test_a_folder_without_tokenizer_names_the_key(tmp_path):
    make_model("llama").save_pretrained(tmp_path)
    with pytest.raises(ModelError, match=r"model\.tokenizer"):
        load_tokenizer(ModelConfig(), str(tmp_path))
    make_tokenizer(tmp_path / "tokenizer")
    assert len(load_tokenizer(ModelConfig(tokenizer=str(tmp_path / "tokenizer")), str(tmp_path))) > 260
