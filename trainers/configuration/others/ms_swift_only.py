"""Keys that ms-swift (4.6) alone has: a file with one of them is one of its own, whose defaults and meanings hold.

``NEUTRAL``, ``HINTS`` and ``REFUSED`` hold, in the words of ``other_names.py``, those that have no meaning here. A key
at its default is never an error.

Fields of the dataclasses in ``swift/arguments``, ``swift/megatron/arguments``, ``swift/trainers/arguments.py`` and
``swift/rlhf_trainers/args_mixin.py``, without what TRL 1.16, transformers, megatron-core, vLLM, peft or a trainer here
calls by the same name.
"""

from __future__ import annotations

from typing import Any

from trainers.configuration.others.trl_names import ANY

MS_SWIFT_ONLY = frozenset(
    """
    acc_strategy accumulate_allreduce_grads_in_fp32 adalora_beta1 adalora_beta2 adalora_deltaT adalora_init_r
    adalora_orth_reg_weight adalora_target_r adalora_tfinal adalora_tinit adapter_act adapter_length
    add_non_thinking_prefix add_version advantage_reweight agent_template align_grad_reduce
    apply_dsa_kernel_fusion async_generate attn_impl bnb_4bit_compute_dtype bnb_4bit_use_double_quant boft_block_num
    boft_block_size boft_dropout boft_n_butterfly_factor bridge_backend cached_dataset cached_val_dataset
    calculate_KL check_model chord_enable_phi_function chord_mu_decay_steps chord_mu_peak chord_mu_valley
    chord_mu_warmup_steps chord_sft_dataset chord_sft_per_device_train_batch_size
    cosine_max_len cosine_max_len_value_correct cosine_max_len_value_wrong cosine_min_len_value_correct
    cosine_min_len_value_wrong cp_partition_mode create_checkpoint_symlink csa_dense_mode custom_dataset_info
    custom_register_path data_parallel_random_init data_sharding dataset_shuffle
    deepspeed_autotp_size disable_auto_column_mapping disable_ignore_empty_think
    dist_ckpt_optim_fully_reshardable dist_ckpt_save_pre_mcore_014 distrib_optim_fully_reshardable_mem_efficient
    early_stop_interval enable_channel_loss enable_dft_loss enable_flattened_weight_sync enable_npu_model_patch
    enable_thinking end_weight_decay eval_dataset_args eval_generation_config eval_iters eval_limit eval_metric
    eval_use_evalscope experts_impl extra_eval_args fourier_n_frequency fourier_scaling fp4_format fp4_param_gather
    fp8_format freeze_parameters freeze_parameters_ratio freeze_parameters_regex
    galore_cos_threshold galore_gamma_proj galore_optim_per_parameter galore_proj_bits
    galore_proj_group_size galore_proj_quant galore_proj_type galore_quantization galore_queue_size galore_rank
    galore_scale galore_target_modules galore_update_proj_gap galore_with_embedding gym_env hqq_axis
    ignore_args_error init_strategy init_weights interleave_prob is_binary_loss_scale language_model_only
    lazy_tokenize linear_decoupled_in_proj lisa_activated_layers lisa_step_interval llamapro_num_groups
    llamapro_num_new_blocks load_args load_data_args load_from_cache_file local_repo_path log_entropy
    log_rollout_offpolicy_metrics lora_bias lora_dtype lora_ga_batch_size lora_ga_direction lora_ga_iters
    lora_ga_max_length lora_ga_scale lora_ga_stable_gamma lorap_lr_ratio lr_decay_iters lr_decay_style
    lr_warmup_fraction lr_warmup_init lr_warmup_iters lr_wsd_decay_iters lr_wsd_decay_style manual_gc manual_gc_eval
    manual_gc_steps max_epochs max_shard_size mcore_adapter mcore_model mcore_ref_adapter mcore_ref_model
    megatron_extra_kwargs mhc_recompute_layer_num micro_batch_size mlp_padding_free model_author model_name
    move_model_batches mtp_decoder_input_detach mtp_shared_weights multi_turn_scheduler
    muon_coefficient_type muon_scalar_optimizer nccl_comm_warmup no_load_optim no_load_rng
    no_save_optim no_save_rng norm_bbox off_policy_sequence_mask_delta offload_bridge optimizer_cuda_graph
    overlong_filter packing_length packing_num_proc preserve_thinking quant_bits quant_method ref_adapters
    ref_model_revision ref_model_type reft_args reft_intervention_type reft_layer_key reft_layers reft_rank
    repetition_max_penalty repetition_n_grams response_prefix resume_only_model reward_adapters reward_model_plugin
    reward_model_revision reward_model_type reward_template rlhf_type rlsd_lambda rlsd_lambda_decay_steps
    rlsd_lambda_warmup_steps rlsd_negative_only rlsd_reweight_clip_range rollout_importance_sampling_threshold
    router_replay_mode save_missing_weights sdar_gate_beta sdar_loss_coef sequence_packing_scheduler
    skip_megatron_init soft_cache_length soft_max_length
    split_dataset_ratio start_weight_decay stop_words stopping_strategy swanlab_email_language swanlab_exp_name
    swanlab_mode swanlab_notification_method swanlab_project swanlab_receiver_email swanlab_secret
    swanlab_sender_email swanlab_smtp_port swanlab_smtp_server swanlab_token swanlab_webhook_url swanlab_workspace
    target_modules target_regex tau_neg tau_pos te_rng_tracker teacher_adapters teacher_deepspeed
    teacher_model_server teacher_model_type teacher_tag_key template template_backend tensorboard_dir
    tensorboard_queue_size train_dataloader_shuffle train_iters trainable_parameters trainable_parameters_regex
    truncation_strategy tuner_backend use_chat_template use_flash_ckpt use_fused_mhc use_galore use_gym_env
    use_logits_to_keep use_persistent_ckpt_worker use_swift_lora val_dataset val_dataset_shuffle vera_d_initial
    vera_dropout vera_projection_prng_key vera_rank vit_attn_impl vit_gradient_checkpointing
    vit_gradient_checkpointing_kwargs wandb_exp_name wandb_project weight_decay_incr_style
    zero_hpz_partition_size
    """.split()
)

_EVALSCOPE = ("eval_use_evalscope", "eval_dataset_args", "eval_limit", "eval_generation_config", "extra_eval_args")
_CHORD = (
    *("chord_sft_dataset", "chord_sft_per_device_train_batch_size", "chord_enable_phi_function"),
    *("chord_mu_warmup_steps", "chord_mu_decay_steps", "chord_mu_peak", "chord_mu_valley"),
)
_SELF_DISTILLED = (
    *("advantage_reweight", "rlsd_lambda", "rlsd_reweight_clip_range", "rlsd_lambda_warmup_steps"),
    *("rlsd_lambda_decay_steps", "rlsd_negative_only", "sdar_loss_coef", "sdar_gate_beta"),
)
_KERNELS = (
    *("bias_dropout_fusion", "bias_activation_fusion", "apply_rope_fusion", "apply_dsa_kernel_fusion"),
    *("use_fused_mhc", "optimizer_cuda_graph", "mlp_padding_free"),
)
_COMMUNICATION = (
    *("align_grad_reduce", "align_param_gather", "overlap_param_gather_with_optimizer_step", "nccl_comm_warmup"),
    *("overlap_p2p_comm", "batch_p2p_comm", "tp_comm_overlap"),
)
_CHECKPOINTS = (
    *("use_persistent_ckpt_worker", "dist_ckpt_save_pre_mcore_014", "dist_ckpt_optim_fully_reshardable"),
    *("distrib_optim_fully_reshardable_mem_efficient", "use_flash_ckpt"),
)
_MUON = (
    *("muon_momentum", "muon_split_qkv", "muon_use_nesterov", "muon_scale_mode", "muon_fp32_matmul_prec"),
    *("muon_coefficient_type", "muon_num_ns_steps", "muon_tp_mode", "muon_extra_scale_factor"),
    "muon_scalar_optimizer",
)
_LAYOUT = (
    *("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"),
    *("pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage"),
)

NEUTRAL: dict[str, tuple[Any, ...]] = {
    # model and data
    **dict.fromkeys(("init_strategy", "local_repo_path", "max_memory", "norm_bbox", "preserve_thinking"), (None,)),
    **dict.fromkeys(("ref_model_revision", "reward_model_revision", "reward_template"), (None,)),
    **dict.fromkeys(("disable_auto_column_mapping", "language_model_only", "csa_dense_mode"), (False,)),
    **dict.fromkeys(("save_missing_weights", "ignore_args_error", "use_swift_lora", "enable_channel_loss"), (False,)),
    "custom_dataset_info": (None, []),
    "download_mode": ("reuse_dataset_if_exists",),
    "response_prefix": (None, ""),
    "disable_ignore_empty_think": (False,),
    # optimization
    **dict.fromkeys(("lorap_lr_ratio", "zero_hpz_partition_size", "start_weight_decay", "end_weight_decay"), (None,)),
    "enable_dft_loss": (False,),
    "deepspeed_autotp_size": (None, 1),
    "weight_decay_incr_style": ("constant",),
    "lr_warmup_init": (0,),
    **dict.fromkeys(("lr_wsd_decay_style", "lr_wsd_decay_iters"), ANY),  # of lr_decay_style WSD, which is refused
    "mrl_dims": (None,),
    "use_megatron_fsdp": (False,),
    "cp_partition_mode": ("zigzag",),
    "sequence_packing_scheduler": (None,),
    "fp4_format": (None,),
    **dict.fromkeys(("cp_comm_type", "pipeline_model_parallel_layout", "microbatch_group_size_per_vp_stage"), (None,)),
    **dict.fromkeys(("account_for_embedding_in_pipeline_split", "account_for_loss_in_pipeline_split"), (False,)),
    **dict.fromkeys(("mcore_ref_model", "mcore_ref_adapter", "apply_query_key_layer_scaling"), (None,)),
    **dict.fromkeys(("apply_wd_to_qk_layernorm", "dsa_indexer_use_sparse_loss"), (False,)),
    "dsa_indexer_loss_coeff": (0,),
    "data_parallel_sharding_strategy": ANY,  # of use_megatron_fsdp
    **dict.fromkeys(("fp4_recipe", "fp4_param_gather"), ANY),  # of fp4_format
    "megatron_extra_kwargs": (None, {}),
    # completions and rewards
    **dict.fromkeys(("num_beams", "repetition_penalty"), (1,)),
    "logprobs": (False,),
    **dict.fromkeys(("top_logprobs", "structured_outputs_regex", "advantage_reweight"), (None,)),
    "sdar_loss_coef": (0,),
    # evaluation and reports
    **dict.fromkeys(_EVALSCOPE, (None, False)),
    **dict.fromkeys(("eval_metric", "logging_dir", "tensorboard_dir", "wandb_exp_name"), (None,)),
    **dict.fromkeys(("callbacks", "chord_sft_dataset"), (None, [])),
}

_SHARDED = "FSDP2 shards weights and optimizer"
HINTS = {
    **dict.fromkeys(_KERNELS, "the backend chooses its kernels, and they change no number"),
    **dict.fromkeys(_COMMUNICATION, "the backend decides when workers exchange gradients and weights"),
    **dict.fromkeys(_CHECKPOINTS, "checkpoints have RayHelper's own form"),
    **dict.fromkeys(("manual_gc", "manual_gc_steps", "manual_gc_eval"), "Python collects its garbage by itself"),
    **dict.fromkeys(("perform_initialization", "use_cpu_initialization", "skip_megatron_init"), "weights are loaded"),
    **dict.fromkeys(("te_rng_tracker", "data_parallel_random_init"), "weights are loaded, and seed sets what is drawn"),
    **dict.fromkeys(("ref_model_type", "reward_model_type", "teacher_model_type"), "the model's config.json sets it"),
    "is_binary_loss_scale": "tokens of weight 0 are left out of the loss in any case",
    "vit_attn_impl": "the whole model has one attention: that of attn_impl",
    "acc_strategy": "accuracy is logged per token",
    "data_sharding": "the order of rows is drawn for all workers together",
    "enable_npu_model_patch": "the models are those of transformers",
    "enable_flattened_weight_sync": "weights are streamed in buckets",
    "mhc_recompute_layer_num": "no model here has such connections",
    "max_shard_size": "transformers chooses the size of the files of a saved model",
    "tensorboard_queue_size": "TensorBoard decides when it writes",
    "accumulate_allreduce_grads_in_fp32": "gradients are added in float32",
    "local_rollout_forward_batch_size": "a forward pass has per_device_train_batch_size sequences",
    "strict": "a row that cannot be read ends the run",
    "num_sample_generations": "completions/*.parquet has all completions",
}

_REVISION = "a revision is chosen where a model is downloaded. Download it, and name its folder"
_DECAY = "weight decay is constant. Write weight_decay"
_TENSORBOARD = "TensorBoard's files are in the folder tensorboard of output_dir. Remove it"
_MCORE_REFERENCE = "weights are read in the form of Hugging Face. Write ref_model"
REFUSED = {
    # model and data
    "init_strategy": "weights that are missing in a checkpoint are an error. Remove it",
    "local_repo_path": "the code of a model comes with transformers, or with the model. Remove it",
    "max_memory": "a worker holds its model, or a shard of it, on its own device. Remove it",
    "norm_bbox": "boxes stay as the rows have them. Remove it",
    "ref_model_revision": _REVISION,
    "reward_model_revision": _REVISION,
    "reward_template": "a reward model has its own chat template. Remove it",
    "disable_auto_column_mapping": "columns are found by their names. Write columns for others, and remove it",
    "custom_dataset_info": "data sets are not registered in a file. Write their paths as dataset, or register a "
    "function in a file of external_plugins",
    "download_mode": "the Hugging Face hub's cache is used. Remove the data from the cache, and remove this key",
    "preserve_thinking": "the chat template decides which thoughts of a prompt stay. Write a chat_template, or remove "
    "it",
    "language_model_only": "name a language model as model. Remove it",
    "csa_dense_mode": "models with compressed sparse attention are not supported. Remove it",
    "save_missing_weights": "all weights of the model are saved. Remove it",
    "ignore_args_error": "a key that nobody knows is an error. Write false",
    "disable_ignore_empty_think": "loss_scale decides whether empty thoughts are learned. Write that",
    "response_prefix": "a completion begins where the chat template's generation prompt ends. Write a chat_template "
    "whose generation prompt ends with this text, or remove it",
    # optimization
    "use_swift_lora": "peft holds the adapter. Remove it",
    "lorap_lr_ratio": "both matrices of LoRA have one learning rate, and LoRA+ is not implemented. Remove it",
    "enable_dft_loss": "only SFT and pretraining have this loss. Remove it",
    "enable_channel_loss": "the loss is logged for all rows together. Remove it",
    "zero_hpz_partition_size": f"{_SHARDED}, over all workers. Remove it",
    "deepspeed_autotp_size": f"{_SHARDED}. Remove it, or write backend: megatron with tensor_model_parallel_size",
    "start_weight_decay": _DECAY,
    "end_weight_decay": _DECAY,
    "weight_decay_incr_style": _DECAY,
    "lr_warmup_init": "the learning rate rises from 0. Remove it",
    "mrl_dims": "an embedding is learned at its whole size. Remove it",
    **dict.fromkeys(_MUON, "Muon has the settings of torch.optim.Muon. Write optim_kwargs, or remove it"),
    "use_megatron_fsdp": "write backend: fsdp, or remove it",
    **dict.fromkeys(
        _LAYOUT,
        "layers are divided evenly, except as decoder_first_pipeline_num_layers and "
        "decoder_last_pipeline_num_layers say. Remove it",
    ),
    **dict.fromkeys(
        ("dsa_indexer_loss_coeff", "dsa_indexer_use_sparse_loss", "apply_query_key_layer_scaling"),
        "it follows from the model's config.json. Remove it",
    ),
    "apply_wd_to_qk_layernorm": "it is a setting of Megatron's. Also write backend: megatron, or remove it",
    "megatron_extra_kwargs": "it is a setting of Megatron's. Also write backend: megatron, or remove it",
    "sgd_momentum": "write optim_kwargs: {momentum: ...}",
    "cp_comm_type": "the backend decides how parts of a sequence are exchanged. Remove it",
    "cp_partition_mode": "the backend decides how a sequence is cut. Remove it",
    "sequence_packing_scheduler": "packs are balanced by their tokens. Remove it",
    "fp4_format": "products in four bits are not supported. Remove it, or write fp8_format",
    **dict.fromkeys(("mcore_ref_model", "mcore_ref_adapter"), _MCORE_REFERENCE),
    # completions and rewards
    "num_beams": "completions are drawn one by one, without beams. Remove it",
    "repetition_penalty": "completions are drawn from the policy's own probabilities. Write 1.0",
    **dict.fromkeys(("logprobs", "top_logprobs"), "log-probabilities of other tokens are not kept. Remove it"),
    "structured_outputs_regex": "completions are not constrained. Remove it",
    **dict.fromkeys(_CHORD, "RayHelper does not have CHORD, which adds a loss of SFT to that of GRPO. Remove it"),
    **dict.fromkeys(_SELF_DISTILLED, "RayHelper does not have RLSD and SDAR. Remove it"),
    # evaluation and reports
    **dict.fromkeys(
        _EVALSCOPE,
        "it belongs to evalscope, which measures a model on benchmarks. RayHelper does not run it. Remove it; "
        "val_dataset names rows to evaluate on",
    ),
    "eval_metric": "the trainer has its own metrics. Remove it",
    "callbacks": "no code of a user's runs inside the loop of a trainer. Remove it",
    "logging_dir": _TENSORBOARD,
    "tensorboard_dir": _TENSORBOARD,
    "wandb_project": "Weights & Biases reads a variable. Write env: {WANDB_PROJECT: name}",
    "wandb_exp_name": "a run is named after its output_dir. Remove it",
}
