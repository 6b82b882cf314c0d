"""Every name of the installed transformers' Trainer is here, or is refused with what to use instead."""

import inspect

import pytest
import transformers

from ds_trainer.errors import ConfigError, UserError
from ds_trainer.trainer.hf_names import REFUSED, REFUSED_ARGUMENTS
from ds_trainer.trainer.trainer import Trainer

pytestmark = [pytest.mark.case("K11"), pytest.mark.case("N10")]


HERE = {name for name in vars(Trainer) if not name.startswith("_")} | {"is_world_process_zero", "is_local_process_zero"}
"""The last two are set by the constructor."""


def _names():
    return [name for name in vars(transformers.Trainer) if not name.startswith("__") and name != "_abc_impl"]


def test_every_name_of_the_installed_trainer_is_here_or_refused_with_a_reason():
    assert [name for name in _names() if name not in REFUSED and name not in HERE] == []


def test_no_refused_name_is_a_public_method_here():
    assert [name for name in REFUSED if hasattr(Trainer, name) and not name.startswith("_")] == []


def test_every_argument_of_the_installed_trainer_is_here_or_refused():
    theirs = set(inspect.signature(transformers.Trainer.__init__).parameters)
    assert theirs - set(inspect.signature(Trainer.__init__).parameters) - set(REFUSED_ARGUMENTS) == set()


@pytest.mark.parametrize("name", REFUSED)
def test_a_subclass_that_overrides_what_is_never_called_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=f"class Mine overrides {name} of transformers' Trainer"):
        type("Mine", (Trainer,), {name: lambda self: None})


def test_an_override_that_a_mixin_brings_is_refused_too_and_all_are_named_together():
    class Losses:
        def compute_loss(self, model, inputs):
            return model(**inputs).loss

        def log(self, logs):
            pass

    with pytest.raises(ConfigError) as error:
        type("Mine", (Losses, Trainer), {})
    assert "compute_loss, log" in error.value.found
    assert "compute_loss_func" in error.value.change
    assert "on_log" in error.value.change


def test_a_subclass_with_methods_of_its_own_or_of_ours_is_taken():
    class Mine(Trainer):
        def evaluate(self):
            return super().evaluate()

        def report(self):
            return 1

    assert issubclass(Mine, Trainer)


def test_a_refused_name_that_is_used_says_what_to_use_and_another_is_an_ordinary_error():
    trainer = object.__new__(Trainer)
    with pytest.raises(UserError, match="upload_folder"):
        _ = trainer.push_to_hub
    assert not hasattr(trainer, "push_to_hub")
    with pytest.raises(AttributeError, match="'Trainer' object has no attribute 'nothing'"):
        _ = trainer.nothing


@pytest.mark.parametrize("name", REFUSED_ARGUMENTS)
def test_an_argument_of_transformers_that_is_not_here_is_refused_by_name(name):
    with pytest.raises(ConfigError, match=rf"Trainer\({name}=...\) is an argument of transformers' Trainer"):
        Trainer(**{name: None})


def test_an_argument_of_nobody_is_pythons_own_error():
    with pytest.raises(TypeError, match="no argument 'modle'"):
        Trainer(modle=None)
