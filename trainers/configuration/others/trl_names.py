"""Fields of TRL's configurations and of transformers' TrainingArguments that are no keys here: tables alone.

In the words of ``other_names.py``, whose tables hold these too: ``ALIASES``, ``NEUTRAL``, ``HINTS``, ``REFUSED``. A
field at its own default is never an error. Fields whose value is translated are ``trl_translations.py``; which fields
there are, ``benchmarks/trl_fields.py`` asks the installed TRL.
"""

from __future__ import annotations

from typing import Any

ANY = ("any value",)

ALIASES = {
    "reward_model_name_or_path": "reward_model",
    "vllm_importance_sampling_cap": "rollout_importance_sampling_clip_max",
    "dataset_streaming": "streaming",
    "dataset_train_split": "dataset_split",
    "dataset_test_split": "eval_dataset_split",
}

# What an engine of TRL's has if nobody says otherwise, under our names; without use_vllm TRL reads none of it
VLLM_DEFAULTS: dict[str, Any] = {
    "vllm_mode": "colocate",
    "vllm_model_impl": "vllm",
    "vllm_enable_sleep_mode": False,
    "vllm_structured_outputs_regex": None,
    "vllm_server_base_url": None,
    "vllm_server_host": "0.0.0.0",
    "vllm_server_port": 8000,
    "vllm_server_timeout": 240.0,
    "vllm_group_port": 51216,
    "vllm_gpu_memory_utilization": 0.3,
    "vllm_max_model_len": None,
    "vllm_tensor_parallel_size": 1,
    "rollout_importance_sampling_correction": True,
    "rollout_importance_sampling_mode": "sequence_mask",
    "rollout_importance_sampling_clip_max": 3.0,
    "rollout_importance_sampling_clip_min": None,
}
# ModelConfig's adapter, under our names; without use_peft TRL reads none of it
PEFT_DEFAULTS: dict[str, Any] = {
    "lora_rank": 16,
    "lora_alpha": 32,
    "lora_dropout": 0.05,
    "lora_target_modules": None,
    "lora_target_parameters": None,
    "lora_modules_to_save": None,
    "use_rslora": False,
    "use_dora": False,
}
ACCELERATOR_DEFAULTS: dict[str, Any] = {
    "split_batches": False,
    "dispatch_batches": None,
    "even_batches": True,
    "use_seedable_sampler": True,
    "non_blocking": False,
    "gradient_accumulation_kwargs": None,
    "use_configured_state": False,
}

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # transformers: optimizer, precision, compilation
    "optim_args": (None, ""),
    "optim_target_modules": (None, []),
    "label_smoothing_factor": (0,),
    "bf16_full_eval": (False,),
    "fp16_full_eval": (False,),
    "tf32": (None,),
    "torch_compile_backend": (None, "inductor"),
    "torch_compile_mode": (None, "default"),
    "liger_kernel_config": (None, {}),
    "use_liger_kernel": (False,),
    "use_cache": (False,),
    "torch_empty_cache_steps": (None,),
    "auto_find_batch_size": (False,),
    "activation_offloading": (False,),
    "cast_lm_head_to_fp32": (False,),
    "cache_implementation": (None,),
    "use_transformers_continuous_batching": (False,),
    "transformers_continuous_batching_config": (None, {}),
    "use_transformers_paged": (False,),
    "ds3_gather_for_generation": (True,),
    # logs
    "logging_strategy": ("steps",),
    "logging_first_step": (False,),
    "log_on_each_node": ANY,  # process 0 of all nodes writes
    "logging_nan_inf_filter": (True,),
    "include_num_input_tokens_seen": ("no", False),
    "log_level_replica": ("warning",),
    "disable_tqdm": (None, False),
    "project": ("huggingface",),
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), (None,)),
    "skip_memory_metrics": (True,),
    "debug": ("", []),
    "log_multimodal": ANY,  # a language model reads text alone
    "num_completions_to_print": (None,),
    "log_unique_prompts": (False,),
    "log_completions_hub_repo": (None,),
    # evaluation
    "eval_delay": (0, None),
    "prediction_loss_only": ANY,  # evaluation keeps no predictions
    "eval_do_concat_batches": ANY,
    "eval_use_gather_object": (False,),
    "eval_accumulation_steps": (None,),
    "include_for_metrics": ([],),
    "batch_eval_metrics": (False,),
    "label_names": (None, []),
    "eval_packing": (None,),
    # checkpoints and the hub
    "save_only_model": (False,),
    "enable_jit_checkpoint": (False,),
    "restore_callback_states_from_checkpoint": (False,),
    **dict.fromkeys(("hub_token", "hub_private_repo", "hub_model_id", "hub_revision"), (None,)),
    "hub_strategy": ("every_save",),
    "hub_always_push": (False,),
    # processes and data loaders
    "use_cpu": (False,),
    "accelerator_config": (None, {}, ACCELERATOR_DEFAULTS),
    "parallelism_config": (None,),
    "local_rank": (-1,),
    "do_train": ANY,  # transformers' Trainer reads none of the three
    "do_eval": ANY,
    "do_predict": (False,),
    "ddp_backend": (None,),
    "ddp_timeout": (1800,),
    "ddp_find_unused_parameters": (None, False),
    **dict.fromkeys(("ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph"), (None,)),
    "ignore_bias_buffers": (False,),
    "dataloader_num_workers": (0,),
    "dataloader_pin_memory": (True,),
    "dataloader_persistent_workers": (False,),
    "dataloader_prefetch_factor": (None,),
    "dataloader_multiprocessing_context": (None,),
    "dataloader_in_order": (True,),
    "length_column_name": ("length",),
    # data and models
    "dataset_kwargs": (None, {}),
    "dataset_config": (None,),
    "loss_type": ("nll",),
    "pad_token": (None,),
    "pad_to_multiple_of": ("auto", None),
    "chat_template_path": (None,),
    "model_revision": ("main", None),
    "teacher_model_revision": ("main", None),
    "load_in_8bit": (False,),
    "load_in_4bit": (False,),
    "bnb_4bit_quant_type": ("nf4",),
    "use_bnb_nested_quant": (False,),
    "bnb_4bit_quant_storage": (None,),
    # of trainers that have no such key
    "dataset_text_field": ("text",),
    "eos_token": (None,),
    "packing": (False,),
    "packing_strategy": ("bfd",),
    "padding_free": (False,),
    "completion_only_loss": (None,),
    "assistant_only_loss": (False,),
    "truncation_mode": ("keep_start",),
    "max_tool_calling_iterations": (None,),
    "num_generations": (1,),
    "generation_batch_size": (None,),
}

_PADDED = "padding is masked: it changes no number"
_ORDER = "rows are read in the order that the seed draws"
_FINITE = "a step that is not finite changes nothing and is counted (max_bad_steps)"
_CACHE = "the hf engine has a paged cache and batches continuously"

HINTS = {
    "bnb_4bit_quant_storage": "quantized weights are not sharded, and the storage of their bytes changes no number",
    "pad_token": _PADDED,
    "pad_to_multiple_of": _PADDED,
    "use_cache": "training keeps no cache",
    "liger_kernel_config": "log-probabilities are computed a chunk of tokens at a time",
    "torch_empty_cache_steps": "torch's allocator keeps its memory",
    "logging_nan_inf_filter": _FINITE,
    "include_num_input_tokens_seen": "num_tokens is logged always",
    "eval_accumulation_steps": "evaluation keeps no logits",
    "enable_jit_checkpoint": "SIGTERM always finishes the step and saves",
    "dataloader_multiprocessing_context": "rows are held in memory",
    "dataloader_in_order": _ORDER,
    "ddp_bucket_cap_mb": "DDP chooses its own buckets",
    "ddp_broadcast_buffers": "these models' buffers never change",
    "ddp_static_graph": "DDP looks at every step",
    "ignore_bias_buffers": "buffers are not sent between workers",
    "cache_implementation": _CACHE,
    "use_transformers_continuous_batching": _CACHE,
    "use_transformers_paged": _CACHE,
    "num_completions_to_print": "a few are shown; completions/*.parquet has all of them",
    "log_unique_prompts": "a few are shown; completions/*.parquet has all of them",
    "skip_memory_metrics": "memory of a GPU is not a metric; rayhelper plan estimates it",
}

_HUB = "nothing is uploaded. Remove it, and upload output_dir/final yourself"
_TRACKIO = "trackio reads its own variables: write env: {TRACKIO_PROJECT: ..., TRACKIO_SPACE_ID: ...}"
QLORA = "nothing is trained here, and a model that is only read is not quantized. Remove it"
_REVISION = "a revision is chosen where a model is downloaded. Download it, and write its folder as model"
_PREDICTIONS = "there is no compute_metrics: evaluation gives the trainer's own numbers. Remove it"
_FULL = "evaluation computes in dtype. Remove it"
_LEARNED = "this trainer learns only from completions. Remove it"

REFUSED = {
    "optim_target_modules": "GaLore and APOLLO are not implemented. Remove it",
    "label_smoothing_factor": "labels are not smoothed. Remove it, or write 0",
    "bf16_full_eval": _FULL,
    "fp16_full_eval": _FULL,
    "tf32": "products of float32 are exact. Remove it; dtype: bfloat16 uses tensor cores",
    "torch_compile_backend": "layers are compiled by inductor. Remove it",
    "torch_compile_mode": "layers are compiled in inductor's default mode. Remove it",
    "auto_find_batch_size": "an automatic size would change the run. Write per_device_train_batch_size, or "
    "token_budget",
    "activation_offloading": "activations stay on the device. Write gradient_checkpointing, or torch_compile with "
    "activation_memory_budget",
    "cast_lm_head_to_fp32": "the head computes in dtype, and log-probabilities in float32 from its logits. Write "
    "dtype: float32, or remove it",
    "transformers_continuous_batching_config": "the hf engine sizes its cache by itself. Remove it",
    "logging_strategy": "write logging_steps",
    "log_level_replica": "all processes have log_level. Write that",
    "disable_tqdm": "write env: {TQDM_DISABLE: 1}",
    "project": _TRACKIO,
    **dict.fromkeys(("trackio_space_id", "trackio_bucket_id", "trackio_static_space_id"), _TRACKIO),
    "debug": "rayhelper stacks and prove inspect a run. Remove it",
    "log_completions_hub_repo": _HUB,
    "eval_delay": "evaluation begins after eval_steps. Remove it",
    "eval_use_gather_object": _PREDICTIONS,
    "include_for_metrics": _PREDICTIONS,
    "batch_eval_metrics": _PREDICTIONS,
    "label_names": _PREDICTIONS,
    "do_predict": _PREDICTIONS,
    "eval_packing": "evaluation data are packed as the training data are. Remove it, or write the same as packing",
    "restore_callback_states_from_checkpoint": "a checkpoint restores the whole run; there are no callbacks. Remove it",
    **dict.fromkeys(("push_to_hub", "hub_token", "hub_private_repo", "hub_model_id", "hub_revision"), _HUB),
    **dict.fromkeys(("hub_strategy", "hub_always_push"), _HUB),
    "use_cpu": "write env: {CUDA_VISIBLE_DEVICES: ''}, or device: CPU in device_groups",
    "accelerator_config": "RayHelper does not use Accelerate. Remove it",
    "parallelism_config": "write backend: megatron with tensor_model_parallel_size and context_parallel_size, or the "
    "fsdp_* keys",
    "local_rank": "torchrun and Ray number their processes. Remove it",
    "length_column_name": "lengths are counted. Remove it",
    "dataset_kwargs": "rows are tokenized here. Remove it; chat_template_kwargs may be a column of the rows",
    "loss_type": "this trainer has one loss. Remove it",
    "model_revision": _REVISION,
    "teacher_model_revision": _REVISION,
    **dict.fromkeys(("load_in_8bit", "load_in_4bit", "bnb_4bit_quant_type", "use_bnb_nested_quant"), QLORA),
    "vllm_structured_outputs_regex": "completions are not constrained. Remove it",
    "eos_token": "the chat template, or the tokenizer, decides the end of a sequence. Remove it",
    "dataset_text_field": "rename the column with columns: {name: text}",
    "packing": "this trainer packs no rows. Remove it, or write padding_free: true",
    "packing_strategy": "rows are packed as bfd packs them: the longest first, each into the fullest pack with room. "
    "Remove it",
    "completion_only_loss": _LEARNED,
    "assistant_only_loss": _LEARNED,
    "truncation_mode": "long rows are cut at the beginning of their prompt. Remove it",
    "max_tool_calling_iterations": "this trainer calls no tools. Remove it",
    "num_generations": "this trainer draws one completion for each prompt. Write 1",
    "generation_batch_size": "completions are drawn for one step at a time. Remove it",
    "num_processes": "torchrun --nproc-per-node sets the number, or device_groups. Remove it",
    "num_machines": "torchrun --nnodes sets the number, or device_groups. Remove it",
    "config_file": "RayHelper does not use Accelerate. Write the fsdp_* keys, or accelerate_config: fsdp2",
}
