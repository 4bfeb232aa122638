"""What other systems call things: ms-swift's names above all (and its Megatron's), transformers', TRL's.

Tables alone. ``ALIASES``: the same thing under another name. ``NEUTRAL``: a value that asks for exactly what is done
here. ``HINTS``: asks for speed or memory alone; the run gives the same numbers, and is told what is done instead.
``REFUSED`` and ``REFUSED_BEGINNINGS``: what has no meaning here, and what to write. Keys whose value is translated, or
which say something together with others, are ``translations.py``. A key of the trainer itself is none of these.

For people: docs/equivalents.md.
"""

from __future__ import annotations

import json
from typing import Any

from trainers.configuration.others import ms_swift_only, trl_names

KNOWN_TUNERS = "lora, adalora, boft, fourierft, ia3, bone, vera"
QUANTIZED = ("quant_method", "quant_bits", "hqq_axis", "bnb_4bit_compute_dtype", "bnb_4bit_use_double_quant")

ALIASES = {
    **trl_names.ALIASES,
    "eval_on_start": "val_before_train",
    "ENV": "env",
    "lr": "learning_rate",
    "train_iters": "max_steps",
    "max_epochs": "num_train_epochs",
    "micro_batch_size": "per_device_train_batch_size",
    "model_name_or_path": "model",
    "response_length": "max_completion_length",
    "reward_model_path": "reward_model",
    "sft_model_path": "model",
    "torch_dtype": "dtype",
    "lr_warmup_fraction": "warmup_ratio",
    "lr_warmup_iters": "warmup_steps",
    "clip_grad": "max_grad_norm",
    "adam_eps": "adam_epsilon",
    "val_dataset": "eval_dataset",
    "eval_before_train": "val_before_train",
    "save": "output_dir",
    "save_interval": "save_steps",
    "eval_interval": "eval_steps",
    "log_interval": "logging_steps",
    "custom_register_path": "external_plugins",
    "max_new_tokens": "max_completion_length",
    "num_sampling_per_gpu_batch_size": "num_sampling_batch_size",
    "teacher_model_name_or_path": "teacher_model",
    "dataset_shuffle": "shuffle_dataset",
    "train_type": "tuner_type",
    "lora_r": "lora_rank",
    "target_modules": "lora_target_modules",
    "overlong_filter": "mask_truncated_completions",
    "tau_pos": "sapo_temperature_pos",
    "tau_neg": "sapo_temperature_neg",
    "vllm_max_model_length": "vllm_max_model_len",
    "vllm_importance_sampling_correction": "rollout_importance_sampling_correction",
    "vllm_importance_sampling_mode": "rollout_importance_sampling_mode",
    "vllm_importance_sampling_clip_max": "rollout_importance_sampling_clip_max",
    "vllm_importance_sampling_clip_min": "rollout_importance_sampling_clip_min",
    "rollout_importance_sampling_threshold": "rollout_importance_sampling_clip_max",
    "off_policy_sequence_mask_delta": "off_policy_mask_threshold",
    "gym_env": "environment",
}

# Keys of some trainers, which other trainers know by another name: ms-swift's max_length of GRPO is the prompt's.
ELSEWHERE = {"max_length": "max_prompt_length", "data_seed": "dataset_seed"}

# What a section ``rollout`` calls its engine's keys in verl, siiRL and ROLL
IN_ROLLOUT = {
    "name": "rollout_engine",
    "strategy_name": "rollout_engine",
    "n": "num_generations",
    "infer_batch_size": "rollout_batch_size",
    "tensor_model_parallel_size": "vllm_tensor_parallel_size",
    **{
        name: f"vllm_{name}"
        for name in (
            *("gpu_memory_utilization", "max_model_len", "max_num_seqs", "enforce_eager", "enable_prefix_caching"),
            *("max_num_batched_tokens", "enable_chunked_prefill", "disable_log_stats", "load_format", "quantization"),
        )
    },
}

ANY = trl_names.ANY

NEUTRAL: dict[str, tuple[Any, ...]] = {
    **trl_names.NEUTRAL,
    **ms_swift_only.NEUTRAL,
    # engines and backends
    "use_vllm": (False,),
    "vllm_mode": ("colocate", None),
    "vllm_server_pass_dataset": (False,),
    "vllm_tensor_parallel_size": (1,),
    "vllm_pipeline_parallel_size": (1,),
    "vllm_data_parallel_size": (1,),
    "async_generate": (False,),
    "tensor_model_parallel_size": (1,),
    "pipeline_model_parallel_size": (1,),
    "context_parallel_size": (1,),
    "expert_model_parallel_size": (1,),
    "expert_tensor_parallel_size": (1, None),
    "virtual_pipeline_model_parallel_size": (None,),
    "decoder_first_pipeline_num_layers": (None,),
    "decoder_last_pipeline_num_layers": (None,),
    "sequence_parallel": (True, False, None),  # of Megatron: does nothing without tensor parallelism
    "sequence_parallel_size": (1,),
    "recompute_method": ("uniform", None),
    "recompute_num_layers": (1, None),
    "recompute_modules": (["core_attn"], None),
    "infer_backend": ("pt", "transformers"),
    "router_replay_mode": ("disabled",),
    "use_dist_checkpointing": (False,),
    "dist_checkpointing_path": (None,),
    "deepspeed": (None,),
    "tuner_backend": ("peft",),
    # model
    **dict.fromkeys(("vit_gradient_checkpointing", "vit_gradient_checkpointing_kwargs"), ANY),  # as the whole model
    "task_type": ("causal_lm",),
    "num_labels": (None,),
    "problem_type": (None,),
    "template_backend": ("jinja",),
    "use_hf": (True,),
    "check_model": (False,),
    "device_map": (None,),
    **dict.fromkeys(("quant_method", "quant_bits", "hqq_axis", "bnb_4bit_compute_dtype"), (None,)),
    "bnb_4bit_use_double_quant": (True,),
    "lora_bias": ("none",),
    "lora_dtype": (None,),
    "adapters": ([], None),
    "ref_adapters": ([], None),
    "modules_to_save": ([], None),
    "new_special_tokens": ([], None),
    "use_galore": (False,),
    # data
    "streaming": (False,),
    "padding_side": ANY,  # padding is never looked at, wherever it stands
    "interleave_prob": (None, []),
    "stopping_strategy": ("first_exhausted", "all_exhausted"),  # of interleave_prob
    "target_parameters": (None, []),
    **dict.fromkeys(("freeze_parameters", "trainable_parameters"), ([], None)),
    **dict.fromkeys(("freeze_parameters_regex", "trainable_parameters_regex"), (None,)),
    "freeze_parameters_ratio": (0, 0.0),
    "val_dataset_shuffle": (False,),
    "remove_unused_columns": (False,),
    "load_args": (False,),
    "load_data_args": (False,),
    "predict_with_generate": (False,),
    # optimization
    "optimizer": ("adam", None),
    "optimizer_cpu_offload": (False,),
    "calculate_per_token_loss": (True,),
    "average_tokens_across_devices": (True,),
    "gradient_checkpointing_kwargs": ({"use_reentrant": False}, None),
    "neftune_noise_alpha": (0, None),
    "router_aux_loss_coef": (0,),
    "moe_aux_loss_coeff": (0,),
    "lr_decay_iters": (None,),
    "full_determinism": (False,),
    "label_names": ("labels", ["labels"], None),
    "logging_strategy": ("steps",),
    "add_non_thinking_prefix": (True, None),  # the model's own chat template writes empty thoughts
    "loss_scale": ("last_round", "default", None),  # of trainers that learn one completion a prompt
    "use_chat_template": (True,),
    # rewards and completions
    "completion_length_limit_scope": ("total",),
    **dict.fromkeys(("stop_words", "stop_strings", "stop"), ([], None)),
    "wandb_log_unique_prompts": (False,),
    # checkpoints
    "add_version": (False,),
    "save_safetensors": (True,),
    "safe_serialization": (True,),
    "save_on_each_node": (False,),
    "resume_only_model": (False,),
    "ignore_data_skip": (False,),
    "no_load_optim": (False,),
    "no_load_rng": (False,),
    "push_to_hub": (False,),
    "eval_iters": (-1,),
    "mtp_num_layers": (None,),
    **dict.fromkeys(("mtp_loss_scaling_factor", "mtp_decoder_input_detach", "mtp_shared_weights"), ANY),  # of that
}

_ROWS = "rows are held in memory"
_TOKENIZED = "rows are tokenized where they are used"
_KERNELS = "log-probabilities are computed a chunk of tokens at a time"
_RESUMABLE = "checkpoints hold optimizer and random states, so that the run can continue"
_NO_ENGINE = "nothing generates beside this training"
_GATHERED = "sharded weights are gathered where an engine needs them"

HINTS = {
    **trl_names.HINTS,
    **ms_swift_only.HINTS,
    "dataset_num_proc": _TOKENIZED,
    "packing_num_proc": _TOKENIZED,
    "lazy_tokenize": _TOKENIZED,
    "load_from_cache_file": _TOKENIZED,
    "dataloader_num_workers": _ROWS,
    "dataloader_pin_memory": _ROWS,
    "dataloader_persistent_workers": _ROWS,
    "dataloader_prefetch_factor": _ROWS,
    "num_workers": _ROWS,
    "per_device_eval_batch_size": "evaluation completes rollout_batch_size prompts at once",
    "cross_entropy_loss_fusion": _KERNELS,
    "cross_entropy_fusion_impl": _KERNELS,
    "masked_softmax_fusion": "attention is one kernel, with its scale, mask and softmax",
    "offload_bridge": "weights are converted a tensor at a time",
    "linear_decoupled_in_proj": "without fp8 it changes no number, and layers of the gated delta rule have none",
    "model_type": "the model's config.json sets it",
    "ddp_find_unused_parameters": "every weight of the model is used",
    "use_liger_kernel": _KERNELS,
    "use_logits_to_keep": _KERNELS,
    "gradient_accumulation_fusion": "gradients are added by torch",
    "no_gradient_accumulation_fusion": "gradients are added by torch",
    "overlap_grad_reduce": "FSDP2 overlaps what it can",
    "overlap_param_gather": "FSDP2 overlaps what it can",
    "use_distributed_optimizer": "fsdp_sharding_strategy decides whether the optimizer is sharded",
    "no_save_optim": _RESUMABLE,
    "no_save_rng": _RESUMABLE,
    "save_only_model": _RESUMABLE,
    "offload_model": _NO_ENGINE,
    "offload_optimizer": _NO_ENGINE,
    "sleep_level": _NO_ENGINE,
    "teacher_deepspeed": "the teacher's weights are sharded like the policy's: the fsdp_* keys also apply to it",
    "offload_teacher_model": "the teacher keeps its memory. Give role teacher its own device group to save memory",
    "move_model_batches": _GATHERED,
    "ds3_gather_for_generation": _GATHERED,
    "vllm_enable_lora": "no engine gets an adapter here",
    "vllm_max_lora_rank": "engines have room for an adapter of lora_rank",
    "vllm_server_pass_dataset": "an environment gets all columns of its row",
    "vllm_use_async_engine": "prompts enter the engine while others are completed",
    "ray_exp_name": "workers are named after their groups",
    "merge_lora": "final has the model with the adapter merged, and final/adapter only the adapter",
    "stream": "an answer is read whole",
    "log_entropy": "entropy is logged always",
    "log_rollout_offpolicy_metrics": "sampling/* is logged with rollout_importance_sampling_mode; the hf engine "
    "computes the same numbers as the training code",
    "logging_first_step": "metrics.jsonl holds every step",
}

_VLLM = "vLLM completes prompts only in GRPO, PPO and GKD. Remove it"
_SERVER = "prompts are completed by the workers of role rollout. Remove it, and give rollout its own device group "
_SERVER += "where it shall not share that of train"
_MEGATRON = "nothing is trained or scored by a backend here. Remove it (or write 1)"
_MEGATRON_ONLY = "it is a setting of Megatron's. Also write backend: megatron, or remove it"
_BRIDGE = "weights are converted by the backend itself, tensor by tensor. Remove it"
_ADAPTERS = "merge the adapter into its model and name the folder as model"
_TEMPLATE = "the tokenizer's own chat template is used. Remove it, or write another as chat_template"
_VERL = "it is a section of verl and siiRL. rayhelper translate FILE --from verl writes such a file in RayHelper's keys"
_ROLL = "it is a section of ROLL. rayhelper translate FILE --from roll writes such a file in RayHelper's keys"
_SOFT = "it belongs to the reward soft_overlong. Name that in reward_funcs"
_COSINE = "it belongs to the reward cosine. Name that in reward_funcs"
_REPETITION = "ms-swift's reward counts repeated words, TRL's repeated tokens. Write reward_funcs: [{name: "
_REPETITION += "repetition_penalty, ngram_size: 3, max_penalty: -1.0}] for the latter"
_STOPS = "a completion ends with a token, not with text: write stop_token_ids, a list of ids of the tokenizer"
_WATCHED = "trackers read their own variables, such as SWANLAB_PROJECT: write report_to and env"

REFUSED = {
    **trl_names.REFUSED,
    **ms_swift_only.REFUSED,
    # habits of transformers' Trainer
    "create_checkpoint_symlink": "checkpoint-N folders are found by resume_from_checkpoint: auto. Remove it",
    "ddp_backend": "NCCL on GPUs, gloo on CPUs. Remove it",
    # engines and backends
    "use_vllm": _VLLM,
    "vllm_mode": _SERVER,
    "vllm_group_port": _SERVER,
    "vllm_pipeline_parallel_size": "an engine uses vllm_tensor_parallel_size workers. Remove it",
    "vllm_data_parallel_size": "every vllm_tensor_parallel_size workers of role rollout are an engine. Remove it",
    "async_generate": "completions are drawn by the policy as it is. Remove it",
    **dict.fromkeys(
        (
            "tensor_model_parallel_size",
            "pipeline_model_parallel_size",
            "context_parallel_size",
            "expert_model_parallel_size",
            "expert_tensor_parallel_size",
            "virtual_pipeline_model_parallel_size",
            "decoder_first_pipeline_num_layers",
            "decoder_last_pipeline_num_layers",
        ),
        _MEGATRON,
    ),
    "sequence_parallel_size": _MEGATRON,
    **dict.fromkeys(
        (
            "recompute_method",
            "recompute_num_layers",
            "recompute_modules",
            "attention_softmax_in_fp32",
        ),
        _MEGATRON_ONLY,
    ),
    **dict.fromkeys(("mcore_model", "mcore_adapter", "use_mbridge"), _BRIDGE),
    "mtp_num_layers": "layers that predict further tokens are not trained, and are saved as they were. Remove it",
    **dict.fromkeys(
        ("vanilla_mbridge", "bridge_backend", "use_dist_checkpointing", "dist_checkpointing_path"), _BRIDGE
    ),
    **dict.fromkeys(
        ("exp_avg_dtype", "exp_avg_sq_dtype", "main_grads_dtype", "main_params_dtype"),
        "states of the optimizer, gradients and trained weights are float32. Remove it",
    ),
    "optimizer_cpu_offload": "write optimizer_offload, or fsdp_offload_params",
    "infer_backend": "write use_vllm: true in GRPO, PPO and GKD. Remove it elsewhere",
    "router_replay_mode": "routing is not replayed. Remove it",
    "teacher_model_server": "the teacher answers in role teacher: write teacher_model",
    # model
    "adapters": _ADAPTERS,
    "ref_adapters": _ADAPTERS,
    "teacher_adapters": _ADAPTERS,
    "reward_adapters": _ADAPTERS,
    "model_kwargs": "RayHelper accepts only model_kwargs for images, videos and sounds, which a language model does "
    "not read. Remove the others",
    "load": "write model, or resume_from_checkpoint for a checkpoint of this library",
    "task_type": "sft learns causal_lm, seq_cls, embedding, reranker or generative_reranker. Write one of them",
    "num_labels": "sft with task_type: seq_cls classifies rows. Remove it elsewhere",
    "problem_type": "sft with task_type: seq_cls classifies rows. Remove it elsewhere",
    **dict.fromkeys(QUANTIZED, trl_names.QLORA),
    "neftune_noise_alpha": "only SFT and pretraining add noise to embeddings. Remove it",
    "interleave_prob": "rows of several files are read in a random order. Write datasets, each with its fraction",
    "target_parameters": "write lora_kwargs: {target_parameters: [...]}",
    **dict.fromkeys(
        (
            *("freeze_parameters", "freeze_parameters_regex", "freeze_parameters_ratio"),
            *("trainable_parameters", "trainable_parameters_regex"),
        ),
        "RayHelper trains all weights, or an adapter, or the parts of a vision model without freeze_vit, "
        "freeze_aligner and freeze_llm. Remove it, or write tuner_type: lora with lora_target_modules",
    ),
    "target_regex": "write lora_target_modules, the names of layers",
    "template": _TEMPLATE,
    "template_backend": _TEMPLATE,
    "agent_template": _TEMPLATE,
    "use_hf": "models and data are read from folders or the Hugging Face hub. Remove it",
    # data
    "streaming": "SFT and pretraining stream; this trainer reads all rows at the start. Write streaming: false",
    "loss_scale": "this trainer learns the last answer, which is loss_scale last_round. Write that, or remove it",
    "data_seed": "seed is also the seed of the data. Remove it, or write the same number",
    "train_dataloader_shuffle": "shuffle_dataset sets the order of rows. Write that key, or also write defaults: "
    "ms-swift",
    "packing_length": "packed rows have max_length tokens. Write that",
    "enable_thinking": "this trainer gives the chat template no variables. Write a chat_template",
    # optimization
    "lr_decay_iters": "the schedule ends with the run. Remove it",
    "optimizer": "write optim",
    "ddp_timeout": "write timeout_s",
    "max_grad_norm_kwargs": "write max_grad_norm",
    # rewards and completions
    "soft_max_length": _SOFT,
    "soft_cache_length": _SOFT,
    "cosine_max_len": _COSINE,
    "cosine_min_len_value_wrong": _COSINE,
    "cosine_max_len_value_wrong": _COSINE,
    "cosine_min_len_value_correct": _COSINE,
    "cosine_max_len_value_correct": _COSINE,
    "repetition_n_grams": _REPETITION,
    "repetition_max_penalty": _REPETITION,
    "reward_model_plugin": "write a reward function in a file of external_plugins",
    "multi_turn_scheduler": "only GRPO and GKD have it, and not together with environment. Write one of them, or "
    "remove it",
    "use_gym_env": "write environment: name",
    "completion_length_limit_scope": "only GRPO and GKD have completions of several turns. Remove it",
    **dict.fromkeys(("stop_words", "stop_strings", "stop"), _STOPS),
    "teacher_tag_key": "there is one teacher. Write teacher_model",
    "calculate_KL": "loss_type decides whether KTO estimates a KL: kto does, apo_zero_unpaired does not. Remove it",
    # checkpoints
    "add_version": "output_dir is used as it is written. Write add_version: false",
    "resume_only_model": "write model: the checkpoint's folder",
    "no_load_optim": "write model: the checkpoint's folder",
    "no_load_rng": "write model: the checkpoint's folder",
    "eval_iters": "all rows of eval_dataset are evaluated. Remove it",
    # sections of others
    **dict.fromkeys(("actor_rollout_ref", "actor", "critic", "algorithm", "trainer", "data"), _VERL),
    **dict.fromkeys(("actor_train", "actor_infer", "rewards", "strategy_args", "training_args"), _ROLL),
}

REFUSED_BEGINNINGS = {
    "vllm_server_": _SERVER,
    "vllm_": _VLLM,
    **dict.fromkeys(("sglang_", "lmdeploy_"), "rollout_engine is hf or vllm. Remove it"),
    **dict.fromkeys(("moe_", "fp8_"), _MEGATRON_ONLY),
    "swanlab_": _WATCHED,
    **dict.fromkeys(
        ("galore_", "use_galore", "lisa_", "reft_", "lora_ga_", "llamapro_", "adapter_act", "adapter_length"),
        f"of tuners there are {KNOWN_TUNERS}. Write tuner_type: lora (or full), and remove it",
    ),
}

# Keys of translations.py, which hold for the whole run
TRANSLATED = (
    *("rlhf_type", "bf16", "fp16", "attn_impl", "attention_backend", "min_lr", "lr_decay_style", "deepspeed"),
    *("recompute_granularity", "finetune", "truncation_strategy", "enable_dft_loss"),
    *("use_rslora", "use_dora", "init_weights", "modules_to_save", "enable_thinking", *QUANTIZED),
)


def is_neutral(name: str, value: Any) -> bool:
    """Whether the value asks for exactly what is done here."""
    allowed = NEUTRAL.get(name, ())
    return (
        allowed is ANY or any(type(value) is type(one) and value == one for one in allowed) or _is_zero(value, allowed)
    )


def why_refused(name: str) -> str | None:
    """What to do instead of writing ``name``; None if nobody knows it, or as what it is another name of."""
    if name in ALIASES:
        return None
    beginnings = (reason for beginning, reason in REFUSED_BEGINNINGS.items() if name.startswith(beginning))
    allowed = ", ".join("null" if value is None else json.dumps(value) for value in NEUTRAL.get(name, ()))
    return REFUSED.get(name) or next(beginnings, f"what is done here is {allowed}. Write that" if allowed else None)


def _is_zero(value: Any, allowed: tuple[Any, ...]) -> bool:
    """0.0 is 0, but false is not."""
    return isinstance(value, float) and any(type(one) is int and one == value for one in allowed)
