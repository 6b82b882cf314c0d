"""ds_trainer: fine-tune Hugging Face checkpoints from one JSON, on DeepSpeed ZeRO or DDP.

Names are imported when they are first used, so that `import ds_trainer` and the config commands load no torch.
"""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_trainer.callbacks.base import Callback
    from ds_trainer.config.io import load_config
    from ds_trainer.config.schema import RunConfig
    from ds_trainer.errors import UserError, exit_on_user_error
    from ds_trainer.trainer.trainer import Trainer

_WHERE = {
    "Callback": "ds_trainer.callbacks.base",
    "RunConfig": "ds_trainer.config.schema",
    "Trainer": "ds_trainer.trainer.trainer",
    "UserError": "ds_trainer.errors",
    "exit_on_user_error": "ds_trainer.errors",
    "load_config": "ds_trainer.config.io",
}

__all__ = ["Callback", "RunConfig", "Trainer", "UserError", "exit_on_user_error", "load_config"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        with _no_garbage_collection():
            return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Keeps Python from searching what modules define, which lives for good, for garbage.

    Importing torch and transformers makes a million objects: searching them again and again took 0.7 s of 2.9 s, and
    each full search in training would take another 0.3 s.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        if was_enabled:
            gc.enable()
