"""What `Trainer` takes: a model by path or instance, an optimizer and a schedule of the user's, and what it refuses."""

import pytest
import torch
from torch.optim.lr_scheduler import LambdaLR

from ds_trainer.errors import ConfigError, DataError
from ds_trainer.trainer.trainer import Trainer
from tests.helpers.runs import D8, ENGINES, collate, largest_difference, make_trainer, run_config, weights
from tests.helpers.tiers import tiers
from tests.helpers.tiny import oracle, tiny_llama


@pytest.mark.parametrize("engine", tiers(["ddp", "zero2", "zero3", "fsdp2"], quick=["zero3"]))
def test_an_instance_trains_as_its_checkpoint_does(world, tmp_path, engine):
    tiny_llama().save_pretrained(tmp_path / "checkpoint")
    for instance, path, key in world(by_instance_and_by_path, 2, engine, tmp_path):
        assert all(torch.equal(instance[name], path[name]) for name in instance)
        assert all(torch.equal(instance[name], key[name]) for name in instance)


def by_instance_and_by_path(engine, out):
    path, finals = str(out / "checkpoint"), []
    for given in ({"model": tiny_llama()}, {"model": path}, {}):
        config = run_config(engine, out, run={"max_steps": 2}, **({} if given else {"model": {"path": path}}))
        trainer = Trainer(**given, config=config, train_dataset=D8, data_collator=collate)
        trainer.train()
        finals.append(weights(trainer))
        trainer.close()
    return finals


STEPS = 4


def own(model):
    """Momentum and decay that the config's optimizer does not have, and a rate that halves at each step."""
    names = dict(model.named_parameters())
    embedding = names.pop("model.embed_tokens.weight")
    groups = [{"params": [embedding], "lr": 0.1}, {"params": list(names.values()), "weight_decay": 0.2}]
    optimizer = torch.optim.AdamW(groups, lr=1e-2, eps=1e-4)
    return optimizer, LambdaLR(optimizer, lambda step: 0.5**step)


@pytest.mark.parametrize("engine", tiers(ENGINES, quick=["ddp", "zero2"]))
def test_an_optimizer_and_a_scheduler_of_the_user_do_what_they_do_in_plain_torch(world, tmp_path, engine):
    model = tiny_llama()
    optimizer, scheduler = own(model)
    for _ in range(STEPS):
        optimizer.zero_grad()
        oracle(model, D8)
        optimizer.step()
        scheduler.step()
    expected = {name: p.detach() for name, p in model.named_parameters()}
    for final, rates, left, optimizer_class in world(users_own, 2, engine, tmp_path):
        assert optimizer_class == "AdamW"
        assert largest_difference(final, expected) <= 1e-5
        assert rates == [0.1, 0.05, 0.025, 0.0125]
        assert left == pytest.approx([0.1 / 16, 1e-2 / 16])


def users_own(engine, out):
    model = tiny_llama()
    trainer = make_trainer(
        engine,
        out,
        model=model,
        given={"optimizers": own(model)},
        optimizer={"name": "adamw"},
        run={"max_steps": STEPS},
    )
    state = trainer.train()
    rates = [line.lr for line in state.log_history]
    left = [group["lr"] for group in trainer.engine.param_groups()]
    return weights(trainer), rates, left, trainer.run.facts.optimizer


def test_an_optimizer_without_a_scheduler_follows_the_config_from_its_own_rates(world, tmp_path):
    for rates in world(optimizer_alone, 1, tmp_path):
        assert rates == pytest.approx([0.1, 0.05])


def optimizer_alone(out):
    model = tiny_llama()
    optimizer, _ = own(model)
    given = {"optimizers": (optimizer, None)}
    trainer = make_trainer("ddp", out, model=model, given=given, schedule={"name": "linear"}, run={"max_steps": 2})
    return [line.lr for line in trainer.train().log_history]


def _on_a_path(model):
    return {"model": "checkpoint", "optimizers": own(model)}


def _scheduler_alone(model):
    return {"model": model, "optimizers": (None, own(model)[1])}


def _of_another_model(model):
    return {"model": model, "optimizers": (torch.optim.SGD(tiny_llama().parameters()), None)}


def _some_parameters_left_out(model):
    return {"model": model, "optimizers": (torch.optim.SGD([model.model.norm.weight]), None)}


def _offloaded(model):
    return {"model": model, "optimizers": own(model), "zero": {"offload_optimizer": {"device": "cpu"}}}


def _looks_beyond_one_element(model):
    return {"model": model, "optimizers": (torch.optim.Adafactor(model.parameters()), None)}


def _smoothed_by_whom(model):
    return {"model": model, "compute_loss_func": lambda *_, **__: 0.0, "loss": {"label_smoothing": 0.1}}


def _no_model(model):
    return {}


REFUSED = {
    _on_a_path: "the model is not an instance",
    _scheduler_alone: "a scheduler without its optimizer",
    _of_another_model: "tensors that are not parameters of the model",
    _some_parameters_left_out: "leaves out .* trainable ones: model.embed_tokens.weight",
    _offloaded: "offload_optimizer.device = cpu",
    _looks_beyond_one_element: "Adafactor, with parallel.engine 'deepspeed'",
    _smoothed_by_whom: "loss.label_smoothing is 0.1 and a compute_loss_func",
    _no_model: "no model was passed to Trainer",
}


def test_what_an_argument_cannot_mean_is_refused(world, tmp_path):
    world(refuse_all, 1, tmp_path)


def refuse_all(out):
    for make, text in REFUSED.items():
        given = make(tiny_llama())
        sections = {name: given.pop(name) for name in ("zero", "loss") if name in given}
        with pytest.raises(ConfigError, match=text):
            Trainer(**given, config=run_config("zero2", out, **sections), train_dataset=D8, data_collator=collate)


def test_training_and_evaluation_without_data_say_which_key_is_missing(world, tmp_path):
    world(without_data, 1, tmp_path)


def without_data(out):
    trainer = Trainer(model=tiny_llama(), config=run_config("ddp", out), data_collator=collate)
    with pytest.raises(ConfigError, match="data.train"):
        trainer.train()
    with pytest.raises(ConfigError, match="data.eval"):
        trainer.evaluate()


@pytest.mark.case("A9")
def test_a_stream_is_refused_as_training_data(world, tmp_path):
    for text in world(train_on_stream, 2, tmp_path):
        assert "the train data set is a list_iterator" in text and "map-style" in text


def train_on_stream(out):
    with pytest.raises(DataError) as caught:
        make_trainer("ddp", out, rows=iter(D8))
    return str(caught.value)
