"""Keys that ms-swift (4.6) alone has: a file with one of them is one of its own, whose defaults and meanings hold.

Fields of the dataclasses in ``swift/arguments``, ``swift/megatron/arguments``, ``swift/trainers/arguments.py`` and
``swift/rlhf_trainers/args_mixin.py``, without what TRL 1.16, transformers, megatron-core, vLLM, peft or a trainer here
calls by the same name.
"""

from __future__ import annotations

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
