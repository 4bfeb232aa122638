"""What fails or is rounded in megatron-core 0.16 without TransformerEngine or grouped_gemm, and is put right here.

Found by running it; seen in 0.15.3 to 0.16.1, and guarded by what it corrects where that can be asked. Sources:
https://github.com/NVIDIA/Megatron-LM/tree/core_v0.16.1/megatron/core
"""

from __future__ import annotations

from types import SimpleNamespace


def apply() -> None:
    """Before a model is built; again is harmless."""
    router_products()
    recomputed_parts()
    grouped_products()
    rows_of_experts()
    gradient_products()


def router_products() -> None:
    """transformer/moe/moe_utils.py names TransformerEngine's product and asks whether it is None, but nowhere says so.

    Without this a router raises NameError. To delete: when the module defines it where the import fails.
    """
    from megatron.core.transformer.moe import moe_utils

    if not hasattr(moe_utils, "te_general_gemm"):
        moe_utils.te_general_gemm = None


def recomputed_parts() -> None:
    """tensor_parallel/random.py takes the default ``fp8=False`` for fp8, as it is not None, and asks TransformerEngine.

    Without this selective recomputation raises NameError. To delete: when the default is None, or the test ``if fp8``.
    """
    from megatron.core.tensor_parallel import random

    if not hasattr(random, "FP8GlobalStateManager") and random.CheckpointWithoutOutput.__init__.__defaults__ == (
        False,
    ):
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


def grouped_products() -> None:
    """transformer/moe/experts.py asks for the package grouped_gemm, which GroupedExperts does not use.

    To delete: with GroupedMLP, and GroupedExperts that is made of it.
    """
    from megatron.core.transformer.moe import experts

    if hasattr(experts, "gg") and not experts.gg.grouped_gemm_is_available():
        experts.gg.grouped_gemm = SimpleNamespace()


def rows_of_experts() -> None:
    """transformer/moe/token_dispatcher.py adds up what experts answer in bfloat16, in no fixed order (expert_rows.py).

    But for TransformerEngine's fused permutations (``moe_permute_fusion``). To delete: when others add up in float32.
    """
    from megatron.core.transformer.moe import token_dispatcher

    from trainers.backends.megatron import expert_rows

    token_dispatcher.permute = expert_rows.permute
    token_dispatcher.unpermute = expert_rows.unpermute
    token_dispatcher.sort_chunks_by_idxs = expert_rows.sort_chunks_by_idxs


def gradient_products() -> None:
    """tensor_parallel/layers.py adds the gradients of linear layers in one product with apex's extension alone.

    Without it gradients are rounded to the dtype of the weights before they are added. To delete: when it asks torch.
    """
    from megatron.core.tensor_parallel import layers

    from trainers.backends.megatron.parts import add_weight_gradient

    if not layers._grad_accum_fusion_available:
        layers.fused_weight_gradient_mlp_cuda = SimpleNamespace(
            wgrad_gemm_accum_fp32=add_weight_gradient, wgrad_gemm_accum_fp16=add_weight_gradient
        )
        layers._grad_accum_fusion_available = True


def forget_reduce_scatter() -> None:
    """distributed/param_and_grad_buffer.py keeps ``reduce_scatter_with_fp32_accumulation`` of a model for later ones.

    With overlap_grad_reduce those do not wait for it, and step before gradients are added up. To be called before a
    model gets its buffers. To delete: when the function is of the buffer, not of the module.
    """
    import torch
    from megatron.core.distributed import param_and_grad_buffer

    param_and_grad_buffer.dist_reduce_scatter_func = torch.distributed.reduce_scatter_tensor
