"""A pipeline runs only on an engine that declares that it can."""

from types import SimpleNamespace

import pytest

from ds_trainer.engines import base
from ds_trainer.engines.base import make_engine
from ds_trainer.errors import EngineError


class Undeclared:
    def __init__(self, resolved, mesh):
        pass


class Declines(Undeclared):
    supports_pipeline = False


class Supports(Undeclared):
    supports_pipeline = True


@pytest.fixture
def make(monkeypatch):
    def make(engine, pp_size):
        point = SimpleNamespace(name="plug-in", load=lambda: engine)
        monkeypatch.setattr(base, "entry_points", lambda group: [point])
        resolved = SimpleNamespace(config=SimpleNamespace(parallel=SimpleNamespace(engine="plug-in")))
        return make_engine(resolved, SimpleNamespace(grid=SimpleNamespace(pp_size=pp_size)))

    return make


@pytest.mark.parametrize("engine", [Undeclared, Declines])
def test_a_pipeline_is_refused_on_an_engine_that_does_not_declare_support(make, engine):
    with pytest.raises(EngineError) as caught:
        make(engine, 2)
    assert caught.value.found == f"parallel.pp is 2 and {engine.__name__} does not declare supports_pipeline"
    assert "only the engine itself" in caught.value.rule and "parallel.pp to 1" in caught.value.change
    assert type(make(engine, 1)) is engine


def test_an_engine_that_declares_support_runs_a_pipeline(make):
    assert type(make(Supports, 2)) is Supports
