"""What the steps of set-up pass on to one another."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ds_trainer.checkpoint.verified import VerifiedCheckpoint
from ds_trainer.config.provenance import Provenance
from ds_trainer.config.resolved import ResolvedConfig
from ds_trainer.data.loader import BatchLoader
from ds_trainer.data.loader_factory import LoaderFactory
from ds_trainer.data.prompts import Prompt
from ds_trainer.loss import LossFunction
from ds_trainer.models.source import ModelSource
from ds_trainer.models.weight_source import WeightSource
from ds_trainer.parallel.model_split import ModelSplit
from ds_trainer.parallel.pipeline.stages import StagedModel


@dataclass(frozen=True)
class SetupPlan:
    """What is to be set up.

    Args:
        resolved: The config without open values.
        provenance: Which values of the config the user has set.
        source: The model before it is built.
        checkpoint: Its weights replace those of the model's source; None: the run starts anew.
    """

    resolved: ResolvedConfig
    provenance: Provenance
    source: ModelSource
    checkpoint: VerifiedCheckpoint | None

    @property
    def resumed(self) -> VerifiedCheckpoint | None:
        """The checkpoint that the run goes on from; None where it begins, from a checkpoint's weights or others."""
        return None if self.resolved.config.checkpoint.resume_weights_only else self.checkpoint


@dataclass(frozen=True)
class LoadedData:
    """The data of a run.

    Args:
        tokenizer: None: the run has none.
        loaders: Makes loaders of further data sets.
        train_loader: None: the run has no training data.
        eval_loader: None: the run has no evaluation data.
        probes: Digests of the first, middle and last training sample; None where they cannot be compared.
    """

    tokenizer: Any
    loaders: LoaderFactory
    train_loader: BatchLoader | None
    eval_loader: BatchLoader | None
    probes: tuple[str | None, ...] | None


@dataclass(frozen=True)
class BuiltModel:
    """This rank's shard of the model, without values yet.

    Args:
        model: The model.
        weights: Where the values of the full model come from.
        trained: Full shape of every trained parameter.
        staged: Its pipeline stages; None: there is no pipeline.
        split: How its parameters are sharded.
        loss: The run's loss.
        eval_prompts: What the model continues in each evaluation.
    """

    model: Any
    weights: WeightSource
    trained: dict[str, tuple[int, ...]]
    staged: StagedModel | None
    split: ModelSplit
    loss: LossFunction
    eval_prompts: list[Prompt]
