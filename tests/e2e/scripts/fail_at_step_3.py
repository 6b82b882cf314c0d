"""A run on two ranks, one of which fails after step 3: `fail_at_step_3.py <run.json> <way>`, under any launcher.

With " in a forward pass" behind the way it fails in the middle of step 4.
"""

import os
import signal
import sys
import time

from ds_trainer import Callback, Trainer, exit_on_user_error


def raise_error():
    raise ValueError("boom")


def sleep_in_a_loop():
    while True:
        time.sleep(1)


ON_RANK_1 = {
    "raises": raise_error,
    "exits": lambda: os._exit(1),
    "is killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "sleeps": lambda: time.sleep(10**6),
    "sleeps in a loop": sleep_in_a_loop,
}


IN_FORWARD = " in a forward pass"


class Fail(Callback):
    def __init__(self, way):
        self.way = way

    def on_step_end(self, trainer):
        if trainer.state.global_step != 3:
            return
        rank = int(os.environ["RANK"])
        if self.way.endswith(IN_FORWARD) and rank == 1:
            self.way = self.way.removesuffix(IN_FORWARD)
            trainer.run.model.model.layers[-1].mlp.register_forward_hook(self.fail)
            return
        if self.way == "saves alone" and rank == 0:
            print("failing now", flush=True)
            trainer.save_model()
        elif self.way in ON_RANK_1 and rank == 1:
            self.fail()

    def fail(self, *_):
        print("failing now", flush=True)
        ON_RANK_1[self.way]()


if __name__ == "__main__":
    *_, config, way = sys.argv  # deepspeed puts an option before them.
    with exit_on_user_error():
        Trainer(config=config, callbacks=[Fail(way)]).train()
