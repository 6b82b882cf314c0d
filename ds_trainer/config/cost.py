"""What parameters, gradients, masters and optimizer states cost, stage by stage. Pure."""

from __future__ import annotations


def state_bytes(stage: int, dtype: str, grad_dtype: str, ranks: int, moments: int = 2) -> tuple[float, float]:
    """Bytes per parameter that DeepSpeed keeps on one rank, without offload and without buckets.

    The figures depart from the ZeRO paper's where DeepSpeed does: stage 1 frees the gradients that belong to other
    ranks once they are reduced; with fp32 accumulation at stage 1 the BF16_Optimizer keeps a whole fp32 gradient on
    every rank; stage 3 keeps the buffer of its gradient partition after the step; bf16 at stage 0 is autocast over
    fp32 parameters.

    Args:
        stage: ZeRO stage; 0 also stands for DDP.
        dtype: Format of the backward pass, `fp32` or `bf16`.
        grad_dtype: Format of accumulation, `fp32` or that of the backward pass.
        ranks: Ranks that share the state.
        moments: fp32 tensors that the optimizer keeps per parameter.

    Returns:
        After the backward pass, and after the step.

    Source: ZeRO, Rajbhandari et al. 2020, section 5; measured on DeepSpeed 0.19.8.
    """
    states = 4 * moments
    if stage == 0:
        return 8.0 + states, 4.0 + states
    parameter, gradient = (4 if dtype == "fp32" else 2), (4 if grad_dtype == "fp32" else 2)
    masters = 4 + states
    if stage == 3:
        return (parameter + gradient + masters) / ranks, (parameter + gradient + masters) / ranks
    if stage == 1 and dtype == "bf16" and grad_dtype == "fp32":
        return parameter + 2 + gradient + masters / ranks, parameter + gradient + masters / ranks
    return parameter + (gradient + masters) / ranks, parameter + masters / ranks
