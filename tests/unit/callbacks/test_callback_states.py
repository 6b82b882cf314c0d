"""Callbacks' states by class name."""

from ds_trainer.callbacks.base import Callback, restore_states, states_of


class Counter(Callback):
    def __init__(self, count: int = 0) -> None:
        self.count = count

    def state_dict(self):
        return {"count": self.count}

    def load_state_dict(self, state):
        self.count = state["count"]


def test_each_callback_gets_the_state_of_its_class_and_place():
    states = states_of([Counter(1), Callback(), Counter(2)])
    assert states == {"Counter": [{"count": 1}, {"count": 2}]}
    callbacks = [Callback(), Counter(), Counter(), Counter(7)]
    restore_states(callbacks, states)
    assert [callback.count for callback in callbacks[1:]] == [1, 2, 7]


def test_a_state_that_nothing_takes_is_said(capsys):
    restore_states([Counter()], {"Counter": [{"count": 1}], "Gone": [{"x": 1}]})
    assert "the checkpoint holds a state of Gone, which this run does not have" in capsys.readouterr().err
