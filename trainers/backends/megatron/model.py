"""A Hugging Face configuration as a model of megatron-core: the stages of it that this worker has.

A stage gets the tokens of a micro-batch as one row of documents (``packing.py``), and gives hidden states; the last one
gives those of the targets, on which ``backend.py`` puts the head.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, Literal

import torch
from megatron.core import parallel_state, tensor_parallel
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.transformer.module import MegatronModule
from megatron.core.transformer.moe.moe_layer import MoELayer
from megatron.core.transformer.spec_utils import ModuleSpec
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import get_transformer_layer_offset

from rayhelper import ConfigError
from trainers.backends.fresh_weights import value_head
from trainers.backends.megatron import patches
from trainers.backends.megatron.architectures import architecture_mistakes, head_width
from trainers.backends.megatron.attention import Added, DocumentAttention, rotation, told
from trainers.backends.megatron.delta_rule.attention import GatedAttention
from trainers.backends.megatron.delta_rule.layer import GatedDeltaNet
from trainers.backends.megatron.grouped_experts import GroupedExperts
from trainers.backends.megatron.layers import LOCAL
from trainers.backends.megatron.model_fields import model_fields
from trainers.backends.megatron.packing import Packed
from trainers.backends.megatron.parts import Norm
from trainers.backends.megatron.router import Balance, BalancedRouter
from trainers.backends.megatron.settings import MegatronSettings
from trainers.backends.megatron.vision.rotation import angles, axes_of
from trainers.backends.megatron.vision.tower import Tower, freeze_language

Head = Literal["lm", "value", "embedding"]  # an embedding is a hidden state behind the final norm


class Stage(GPTModel):  # type: ignore[misc]
    """The layers of one stage of a pipeline; the first has the embedding, the last the final norm and the head."""

    def __init__(
        self,
        config: TransformerConfig,
        hf: Any,
        *,
        head: Head,
        num_labels: int,
        seed: int,
        balance: Balance | None = None,
        tower: Tower | None = None,
        **settings: Any,
    ) -> None:
        super().__init__(
            config, max_sequence_length=hf.max_position_embeddings, position_embedding_type="none", **settings
        )
        frequencies, self.rotary_factor = rotary_frequencies(hf)
        self.register_buffer("frequencies", frequencies, persistent=False)
        self.register_buffer("axes", axes_of(hf), persistent=False)
        self.tower = tower
        if tower is not None and self.pre_process:
            tower.join(self)
        # as torch's embeddings have it: a negative one is counted from the end
        self.padding: int | None = None if hf.pad_token_id is None else hf.pad_token_id % hf.vocab_size
        self.balance = balance
        for part in self.modules():
            if isinstance(part, BalancedRouter):
                assert balance is not None, "it is why there are such routers"
                part.balance = balance
        self.values: torch.nn.Linear | None = None
        self.has_words = head == "lm"
        if self.post_process and not self.has_words:
            del self.output_layer
        if self.post_process and head == "value":
            self.values = torch.nn.Linear(config.hidden_size, num_labels, bias=False)
            self.values.weight.data.copy_(value_head(config.hidden_size, hf.initializer_range, seed, num_labels))
            self.values.to(config.params_dtype)
        elif self.post_process and self.has_words:
            self.output_layer.forward = self.head_weight

    def forward(self, packed: Packed) -> Any:
        """(S, 1, H) hidden states; from the last stage the (M, H) from which the targets are predicted."""
        hidden: Any = None
        spread_over = self.pg_collection.tp if self.config.sequence_parallel else None
        added: list[Added] = []
        if self.pre_process:
            hidden = self.embed(packed.input_ids_S)
            if self.tower is not None:
                hidden, added = self.tower.put_in(hidden, packed.pictures, spread_over)
        angles_SR = angles(packed.positions_S, self.frequencies, self.axes)
        turns = rotation(angles_SR, self.rotary_factor, self.config.params_dtype)
        further = {}
        if self.balance is not None and self.training:
            further = {"padding_mask": self.balance.told(packed, divided_over=spread_over)}
        hidden = self.decoder(hidden, told(packed.documents, turns, added), **further)
        if not self.post_process:
            return hidden
        if self.config.sequence_parallel:
            hidden = tensor_parallel.gather_from_sequence_parallel_region(hidden, tensor_parallel_output_grad=False)
        return hidden[:, 0].index_select(0, packed.places_M)

    def embed(self, ids_S: torch.Tensor) -> torch.Tensor:
        """(S, 1, H); (S / tensor size, 1, H) where the sequence is spread. As in transformers, the embedding of the
        model's padding token does not learn."""
        hidden: torch.Tensor = self.embedding(input_ids=ids_S[None], position_ids=None)
        if self.padding is None:
            return hidden
        is_padding_S = ids_S == self.padding
        if self.config.sequence_parallel:
            group = self.pg_collection.tp
            is_padding_S = is_padding_S.chunk(group.size())[group.rank()]
        return torch.where(is_padding_S[:, None, None], hidden.detach(), hidden)

    def sharded_state_dict(self, *args: Any, **settings: Any) -> dict[str, Any]:
        """Where the weights lie in the whole model, as megatron-core's checkpoints know them."""
        if self.has_words or not self.post_process:
            found: dict[str, Any] = super().sharded_state_dict(*args, **settings)
            return found
        found = MegatronModule.sharded_state_dict(self, *args, **settings)  # which asks for no output layer
        return found

    def numbers(self, features_MH: torch.Tensor) -> torch.Tensor:
        """float32 (M,) or (M, num_labels) values, or (M, H) embeddings, of what ``forward`` gave on the last stage."""
        if self.values is None:
            return features_MH.float()
        values: torch.Tensor = self.values(features_MH).float().squeeze(-1)
        return values

    def head_weight(self) -> Any:
        """This worker's rows of the output embedding. In the place of the output layer's product: hooks run with it."""
        if self.share_embeddings_and_output_weights:
            return self.shared_embedding_or_output_weight()
        return self.output_layer.weight


def rotary_frequencies(hf: Any) -> tuple[torch.Tensor, float]:
    """(D / 2,) float32 angles a position, as transformers has them, and what it multiplies queries and keys by.

    Fewer where only a part of each head is turned.
    """
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    kind = hf.rope_parameters["rope_type"]
    if kind != "default":
        found, factor = ROPE_INIT_FUNCTIONS[kind](hf, torch.device("cpu"))
        return found.float(), factor
    width = int(head_width(hf) * hf.rope_parameters.get("partial_rotary_factor", 1.0))
    powers = torch.arange(0, width, 2, dtype=torch.int64).float() / width
    frequencies: torch.Tensor = 1.0 / (hf.rope_parameters["rope_theta"] ** powers)
    return frequencies, 1.0


def build_stages(
    hf: Any,
    settings: MegatronSettings,
    *,
    head: Head,
    dtype: torch.dtype,
    device: torch.device,
    num_labels: int = 1,
    has_adapter: bool = False,
    seed: int = 0,
    tower: Tower | None = None,
) -> list[Stage]:
    """The stages of this worker, one or, with virtual stages, several, with weights that are yet to be loaded.

    A value head is drawn, for a model that has none (``fresh_weights.py``). ``tower``: of a model that sees pictures.
    """
    from transformers.models.auto.modeling_auto import MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES

    for mistake in architecture_mistakes(hf.to_dict()):
        raise ConfigError(f"backend: megatron does not support this model: {mistake}. Write backend: fsdp.")
    is_known = tower is not None or hf.model_type in MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
    if head == "value" and not is_known:
        raise ConfigError(
            f"transformers has no sequence classifier of {hf.model_type}, so no model of it with values can be written "
            "or read. Use another model."
        )
    patches.apply()
    fields = model_fields(hf, settings, dtype=dtype, on_gpu=device.type == "cuda", has_adapter=has_adapter)
    config = TransformerConfig(**fields)
    tied = bool(hf.tie_word_embeddings) and head == "lm"
    balance = Balance.of(config)
    width = settings.tensor_model_parallel_size
    pieces = settings.virtual_stages
    stages = []
    for piece in range(pieces or 1):
        which = {"ignore_virtual": False, "vp_stage": piece if pieces else None}
        first, last = (
            is_end(**which)
            for is_end in (parallel_state.is_pipeline_first_stage, parallel_state.is_pipeline_last_stage)
        )
        stage = Stage(
            config,
            hf,
            head=head,
            num_labels=num_labels,
            seed=seed,
            balance=balance,
            tower=tower,
            transformer_layer_spec=layer_spec(
                config, vp_stage=which["vp_stage"], balanced=balance is not None, by_head=hf.model_type == "qwen3_next"
            ),
            vocab_size=-(-hf.vocab_size // width) * width,
            pre_process=first,
            post_process=last,
            share_embeddings_and_output_weights=tied,
            vp_stage=which["vp_stage"],
        )
        mark_shards(stage)
        if tower is not None and tower.freezes_language:
            freeze_language(stage)
        stages.append(stage.to(device))
    return stages


def mark_shards(stage: torch.nn.Module) -> None:
    """Says of each weight whether it lies in shards, without which norms of gradients count some once and some often.

    megatron-core says it where it draws initial weights, which are not wanted here; TransformerEngine always does.
    """
    kinds = {tensor_parallel.ColumnParallelLinear: 0, tensor_parallel.RowParallelLinear: 1}
    kinds |= {tensor_parallel.VocabParallelEmbedding: 0, GroupedExperts: 0}
    for part in stage.modules():
        for kind, dim in kinds.items():
            if isinstance(part, kind):
                for weight in part.parameters(recurse=False):
                    if not hasattr(weight, "tensor_model_parallel") and (weight.dim() > 1 or dim == 0):
                        tensor_parallel.set_tensor_model_parallel_attributes(weight, True, dim, 1)


def layer_spec(config: TransformerConfig, *, vp_stage: int | None, balanced: bool, by_head: bool = False) -> Any:
    """megatron-core's layers with attention within documents; its own ones with our norms and grouped experts.

    ``balanced``: whether losses balance their experts. ``by_head``: as ``GatedDeltaNet`` has it.
    """
    is_local = config.transformer_impl == LOCAL
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=not is_local, normalization="RMSNorm", vp_stage=vp_stage
    )
    for layer in spec.layer_specs:
        layer.submodules.self_attention.submodules.core_attention = DocumentAttention
        # a checkpoint has one name for a norm, in whichever module it is
        layer.submodules.sharded_state_dict_keys_map = {
            "input_layernorm.": "self_attention.linear_qkv.layer_norm_",
            "pre_mlp_layernorm.": "mlp.linear_fc1.layer_norm_",
        }
        if balanced and layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.router = BalancedRouter
        if is_local and config.moe_grouped_gemm and layer.submodules.mlp.module is MoELayer:
            layer.submodules.mlp.submodules.experts.module = GroupedExperts
    if is_local:
        use_own_norms(spec, config)
    if config.linear_attention_freq is not None:
        use_delta_rule(spec, config, vp_stage=vp_stage, by_head=by_head)
    return spec


def use_own_norms(spec: Any, config: TransformerConfig) -> None:
    """In megatron-core's own layers, whose norms know no spread sequence."""
    spec.layer_norm = Norm
    for layer in spec.layer_specs:
        parts = layer.submodules
        parts.input_layernorm = parts.pre_mlp_layernorm = Norm
        if config.qk_layernorm:
            attention = parts.self_attention.submodules
            attention.q_layernorm = attention.k_layernorm = Norm


def use_delta_rule(spec: Any, config: TransformerConfig, *, vp_stage: int | None, by_head: bool) -> None:
    """In the layers that go by the gated delta rule; the output of attention in the others is gated."""
    first = get_transformer_layer_offset(config, vp_stage=vp_stage)
    layers = []
    for number, layer in enumerate(spec.layer_specs, start=first):  # one object may stand for several layers
        attention = replace(layer.submodules.self_attention, module=GatedAttention)
        if config.linear_attention_freq[number]:
            attention = ModuleSpec(module=GatedDeltaNet, params={"by_head": by_head})
        layers.append(replace(layer, submodules=replace(layer.submodules, self_attention=attention)))
    spec.layer_specs = layers
