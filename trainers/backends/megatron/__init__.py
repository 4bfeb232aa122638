"""The ``megatron`` backend: megatron-core under the questions of ``backends/base.py``.

    settings.py    what a configuration says of how a model is cut; fields.py: megatron-core's own names
    architectures.py  which Hugging Face models it can be
    layout.py      which of a role's workers hold which part of the model
    layers.py      TransformerEngine's layers or megatron-core's own, and the fields that the former alone read
    model_fields.py  a Hugging Face configuration in megatron-core's words, for workers and for checks before them
    model.py       a model of megatron-core, cut into the stages of this worker
    parts.py       what megatron-core lacks without TransformerEngine: norms, products of gradients
    patches.py     what fails or is rounded in megatron-core without TransformerEngine
    expert_rows.py  tokens on their way to their experts and back
    grouped_experts.py  experts whose products are one call for all of them
    attention.py   attention within documents, also where their tokens are spread over workers
    router.py      losses that balance experts
    packing.py     a micro-batch as one row of documents, and the tokens of it that this worker has
    weights.py     Hugging Face names <-> this worker's shards
    tensors/       which tensors each layer is made of (table.py), experts in stacks, and what is kept as it came
    delta_rule/    layers that keep a state, of Qwen3-Next and Qwen3.5, and the attention between them
    checkpoint.py  the model in parts on the disk, read in any layout; written while training goes on
    moments.py     what the optimizers keep of each weight, as whole tensors
    adapter_targets.py  LoRA: which weights have an adapter
    adapters.py    and its matrices under peft's names; adapter_pieces.py: how these lie over workers
    adapter_checkpoint.py  what is trained under an adapter, whole, on the disk
    low_rank.py    what an adapter adds to one parallel layer
    optimizer.py   gradients, optimizer, learning rate
    residence.py   what of all that is on the device, and what waits in the memory of the host
    pipeline.py    micro-batches through the stages
    backend.py     scores and steps

Nothing else imports megatron. Before a backend is built, what checks its keys does (fields.py).
"""
