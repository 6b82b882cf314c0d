"""An engine as a third party would write it: one process, one SGD, no base class."""

from __future__ import annotations

from contextlib import contextmanager, nullcontext

import torch

from ds_trainer.engines.base import EngineFacts, StepOutcome
from ds_trainer.engines.state_handles import MASTER, live
from ds_trainer.layout import ParameterSlice


class ToyEngine:
    """Runs the plain model."""

    supports_pipeline = False

    def __init__(self, resolved, mesh):
        self.mesh = mesh
        self.windows = []

    def load(self, model, weights, split):
        self.module = model
        for name, parameter in model.named_parameters():
            value = weights.read(name, torch.float32)
            torch.utils.swap_tensors(parameter, torch.nn.Parameter(value))

    def wrap(self, make_optimizer):
        self._optimizer = make_optimizer(list(self.module.named_parameters()))

    @contextmanager
    def microbatch(self, is_last):
        self.windows.append(is_last)
        yield

    def forward(self, **inputs):
        return self.module(**inputs)

    def autocast(self):
        return nullcontext()

    def scale_loss(self, loss):
        return loss

    def backward(self, loss):
        loss.backward()

    def pipeline(self):
        raise NotImplementedError

    def optimizer_step(self):
        norm = torch.nn.utils.get_total_norm([p.grad for p in self.module.parameters()])
        self._optimizer.step()
        self._optimizer.zero_grad()
        return StepOutcome(norm.item(), skipped=False)

    def param_groups(self):
        return self._optimizer.param_groups

    def parameter_layout(self):
        return [ParameterSlice.whole(name, tuple(p.shape)) for name, p in self.module.named_parameters()]

    def full_parameters(self):
        return ((name, p.detach()) for name, p in self.module.named_parameters())

    def full_gradients(self):
        return ((name, p.grad) for name, p in self.module.named_parameters())

    def state(self):
        return {name: {MASTER: live(p, p.numel())} for name, p in self.module.named_parameters()}

    def scalar_state(self):
        return {"windows": self.windows}

    def load_scalar_state(self, values):
        self.windows = list(values["windows"])

    def rank_state(self):
        return {}

    def load_rank_state(self, tensors):
        pass

    def parameter_hash(self):
        return None

    def shared_parameters(self):
        return {}

    def facts(self):
        return EngineFacts("Toy", "SGD", None, 1, "cpu", "cpu", 0, 0, 0, "fp32")

    def close(self):
        pass
