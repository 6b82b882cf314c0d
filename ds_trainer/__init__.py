"""ds_trainer: fine-tune Hugging Face checkpoints from one JSON, on DeepSpeed ZeRO or DDP.

Names are imported when they are first used, so that `import ds_trainer` and the config commands load no torch.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ds_trainer.callbacks.base import Callback
    from ds_trainer.config.io import load_config
    from ds_trainer.config.schema import RunConfig
    from ds_trainer.errors import UserError, exit_on_user_error
    from ds_trainer.trainer import Trainer

_WHERE = {
    "Callback": "ds_trainer.callbacks.base",
    "RunConfig": "ds_trainer.config.schema",
    "Trainer": "ds_trainer.trainer",
    "UserError": "ds_trainer.errors",
    "exit_on_user_error": "ds_trainer.errors",
    "load_config": "ds_trainer.config.io",
}

__all__ = ["Callback", "RunConfig", "Trainer", "UserError", "exit_on_user_error", "load_config"]


def __getattr__(name: str) -> Any:
    if name in _WHERE:
        return getattr(import_module(_WHERE[name]), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
