"""What an export would be is known before the first step, by names and shapes alone."""

import os
import stat

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from transformers import LlamaForCausalLM

from ds_trainer.checkpoint.export import export_model, prove_export
from ds_trainer.config.input_sections import ModelConfig
from ds_trainer.errors import ModelError
from ds_trainer.models.checkpoint_weights import CheckpointWeights
from ds_trainer.models.pretrained import build_skeleton
from ds_trainer.models.torch_wrappers import unwrapped_model
from tests.helpers.checkpoints import KINDS, make_checkpoint, make_model


class Adapted(nn.Module):
    """A linear layer with a low-rank update beside it."""

    def __init__(self, base):
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, 2, bias=False)
        self.up = nn.Linear(2, base.out_features, bias=False)

    def forward(self, hidden):
        return self.base(hidden) + self.up(self.down(hidden))


class NeedsMore(LlamaForCausalLM):
    """A class whose constructor takes more than a config."""

    def __init__(self, config, width):
        super().__init__(config)
        self.width = width


def with_adapters():
    model = make_model("llama")
    for layer in model.model.layers:
        layer.self_attn.q_proj = Adapted(layer.self_attn.q_proj)
    return model


def with_a_head_of_its_own():
    model = make_model("llama_tied")
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())
    return model


def with_a_wider_head():
    model = make_model("llama")
    model.lm_head = nn.Linear(32, 400, bias=False)
    return model


def wrapped(wrap):
    model = make_model("llama")
    for index, layer in enumerate(model.model.layers):
        model.model.layers[index] = wrap(layer)
    return model


@pytest.mark.case("L3")
@pytest.mark.parametrize("kind", KINDS)
def test_what_can_be_exported_is_not_refused(tmp_path, kind):
    prove_export(make_model(kind))
    folder = make_checkpoint(tmp_path / kind, kind)
    skeleton = build_skeleton(folder, ModelConfig(), torch.float32)
    CheckpointWeights(folder, skeleton)
    prove_export(skeleton)


@pytest.mark.case("L3")
@pytest.mark.parametrize(
    ("make", "found"),
    [
        (with_adapters, "has 6 parameters that its class lacks: model.layers.0.self_attn.q_proj.base.weight"),
        (with_a_head_of_its_own, "has values of their own for what its config ties: model.embed_tokens.weight and lm"),
        (with_a_wider_head, r"lm_head.weight \[400, 32\] instead of \[320, 32\]"),
        (lambda: NeedsMore(make_model("llama").config, 3), "cannot be built from its config alone"),
    ],
)
def test_what_its_class_would_not_load_is_refused_by_name(make, found):
    with pytest.raises(ModelError, match=found) as caught:
        prove_export(make())
    assert "checkpoint.export" in caught.value.change


@pytest.mark.case("L3")
@pytest.mark.parametrize(
    "wrap", [torch.compile, checkpoint_wrapper, lambda layer: torch.compile(checkpoint_wrapper(layer))]
)
def test_wrapped_layers_are_exported_under_the_names_of_the_class(tmp_path, wrap):
    model, plain = wrapped(wrap), make_model("llama")
    assert model.state_dict().keys() != plain.state_dict().keys() or wrap is checkpoint_wrapper
    prove_export(model)
    for name, each in (("wrapped", model), ("plain", plain)):
        export_model(
            ((n, p.detach()) for n, p in each.named_parameters()),
            each,
            None,
            str(tmp_path / name),
            dtype=torch.float32,
            max_shard_size="5GB",
            is_writer=True,
        )
    files = [{path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in ("wrapped", "plain")]
    assert files[0] == files[1]


@pytest.mark.case("L3")
def test_wrappers_around_the_model_are_seen_through():
    model = make_model("llama")
    assert unwrapped_model(torch.compile(checkpoint_wrapper(model))) is model
    assert unwrapped_model(model) is model
    linear = nn.Sequential(nn.Linear(2, 2))
    assert unwrapped_model(linear) is linear


@pytest.mark.case("N13")
@pytest.mark.parametrize(("umask", "mode"), [(0o022, 0o644), (0o002, 0o664), (0o077, 0o600)])
def test_files_of_an_export_have_the_mode_that_the_umask_gives(tmp_path, umask, mode):
    before = os.umask(umask)
    try:
        model = make_model("llama")
        parameters = ((name, p.detach()) for name, p in model.named_parameters())
        export_model(
            parameters, model, None, str(tmp_path / "out"), dtype=torch.float32, max_shard_size="60KB", is_writer=True
        )
    finally:
        os.umask(before)
    assert {stat.S_IMODE(path.stat().st_mode) for path in (tmp_path / "out").iterdir()} == {mode}
