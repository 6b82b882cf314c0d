"""Config files as people have them: the forms in the documentation of DeepSpeed, transformers and accelerate."""

HF_ZERO3 = """{
    "bf16": {"enabled": "auto"},
    "fp16": {
        "enabled": "auto",
        "loss_scale": 0,
        "loss_scale_window": 1000,
        "initial_scale_power": 16,
        "hysteresis": 2,
        "min_loss_scale": 1
    },
    "optimizer": {
        "type": "AdamW",
        "params": {"lr": "auto", "betas": "auto", "eps": "auto", "weight_decay": "auto"}
    },
    "scheduler": {
        "type": "WarmupLR",
        "params": {"warmup_min_lr": "auto", "warmup_max_lr": "auto", "warmup_num_steps": "auto"}
    },
    "zero_optimization": {
        "stage": 3,
        "offload_optimizer": {"device": "cpu", "pin_memory": true},
        "offload_param": {"device": "cpu", "pin_memory": true},
        "overlap_comm": true,
        "contiguous_gradients": true,
        "sub_group_size": 1e9,
        "reduce_bucket_size": "auto",
        "stage3_prefetch_bucket_size": "auto",
        "stage3_param_persistence_threshold": "auto",
        "stage3_max_live_parameters": 1e9,
        "stage3_max_reuse_distance": 1e9,
        "stage3_gather_16bit_weights_on_model_save": true
    },
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "steps_per_print": 2000,
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "wall_clock_breakdown": false
}
"""

DEEPSPEED_TUTORIAL = """{
  // as in the tutorial
  "train_batch_size": 16,
  "steps_per_print": 2000,
  "optimizer": {
    "type": "Adam",
    "params": {"lr": 0.001, "betas": [0.8, 0.999], "eps": 1e-8, "weight_decay": 3e-7},
  },
  "scheduler": {
    "type": "WarmupDecayLR", # one line
    "params": {
      "warmup_min_lr": 0, "warmup_max_lr": 0.002, "warmup_num_steps": 100, "warmup_type": "linear",
      "total_num_steps": 1000
    }
  },
  /* half a
     precision */
  "gradient_clipping": 0.5,
  "prescale_gradients": false,
  "bf16": {"enabled": false},
  "fp16": {"enabled": true, "fp16_master_weights_and_grads": false, "loss_scale": 0, "loss_scale_window": 500,
           "hysteresis": 2, "min_loss_scale": 1, "initial_scale_power": 15},
  "wall_clock_breakdown": false,
  "zero_optimization": {
    "stage": 2,
    "allgather_partitions": true,
    "reduce_scatter": true,
    "allgather_bucket_size": 5e7,
    "reduce_bucket_size": 5e7,
    "overlap_comm": true,
    "contiguous_gradients": true,
  },
}
"""

DEEPSPEED_NVME = """{
  "train_micro_batch_size_per_gpu": 2,
  "bf16": {"enabled": true},
  "zero_optimization": {
    "stage": 3,
    "offload_optimizer": {"device": "nvme", "nvme_path": "/local_nvme", "pin_memory": true, "buffer_count": 4,
                          "fast_init": false},
    "offload_param": {"device": "nvme", "nvme_path": "/local_nvme", "buffer_count": 5, "buffer_size": 1e8},
    "stage3_max_live_parameters": 1e9
  },
  "aio": {"block_size": 262144, "queue_depth": 32, "intra_op_parallelism": 1, "single_submit": false,
          "overlap_events": true},
  "optimizer": {"type": "AdamW", "params": {"lr": 3e-5}},
  "comms_logger": {"enabled": true, "verbose": false}
}
"""

DEEPSPEED_OLD = """{
  "train_batch_size": 8,
  "fp32_allreduce": true,
  "bfloat16": {"enabled": true},
  "sparse_gradients": false,
  "activation_checkpointing": {"partition_activations": true, "cpu_checkpointing": false},
  "elasticity": {"enabled": false},
  "dataloader_drop_last": true,
  "zero_optimization": {
    "stage": 3, "cpu_offload": true, "cpu_offload_params": true, "cpu_offload_use_pin_memory": false,
    "stage3_gather_fp16_weights_on_model_save": true, "allgather_bucket_size": 500000000,
    "prefetch_bucket_size": 1e7
  },
  "scheduler": {"type": "OneCycle", "params": {"cycle_min_lr": 0.00001, "cycle_max_lr": 0.0001}},
  "no_such_key": null,
  "zero_optimisation": {"stage": 1}
}
"""

DEEPSPEED_FILES = {
    "hf_zero3": HF_ZERO3,
    "tutorial": DEEPSPEED_TUTORIAL,
    "nvme": DEEPSPEED_NVME,
    "old": DEEPSPEED_OLD,
    "legacy_zero": '{"train_batch_size": 4, "zero_optimization": true, "amp": {"enabled": true}, "allgather_size": 4}',
}

_LAUNCH = """
compute_environment: LOCAL_MACHINE
debug: false
downcast_bf16: 'no'
enable_cpu_affinity: false
machine_rank: 0
main_process_ip: null
main_training_function: main
num_machines: 2
num_processes: 16
rdzv_backend: static
same_network: true
tpu_env: []
tpu_use_cluster: false
tpu_use_sudo: false
use_cpu: false
"""

ACCELERATE_DEEPSPEED = (
    """
deepspeed_config:
  deepspeed_multinode_launcher: standard
  gradient_accumulation_steps: 4
  gradient_clipping: 0.7
  offload_optimizer_device: cpu
  offload_optimizer_nvme_path: null
  offload_param_device: none
  zero3_init_flag: true
  zero3_save_16bit_model: true
  zero_stage: 3
distributed_type: DEEPSPEED
mixed_precision: bf16
"""
    + _LAUNCH
)

ACCELERATE_DEEPSPEED_FILE = (
    """
deepspeed_config:
  deepspeed_config_file: ds.json
  zero3_init_flag: true
distributed_type: DEEPSPEED
"""
    + _LAUNCH
)

ACCELERATE_FSDP1 = (
    """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: true
  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP
  fsdp_backward_prefetch: BACKWARD_PRE
  fsdp_cpu_ram_efficient_loading: true
  fsdp_forward_prefetch: false
  fsdp_offload_params: true
  fsdp_sharding_strategy: SHARD_GRAD_OP
  fsdp_state_dict_type: SHARDED_STATE_DICT
  fsdp_sync_module_states: true
  fsdp_transformer_layer_cls_to_wrap: LlamaDecoderLayer,LlamaMLP
  fsdp_use_orig_params: true
mixed_precision: bf16
"""
    + _LAUNCH
)

ACCELERATE_FSDP2 = (
    """
distributed_type: FSDP
fsdp_config:
  fsdp_activation_checkpointing: false
  fsdp_auto_wrap_policy: SIZE_BASED_WRAP
  fsdp_cpu_ram_efficient_loading: false
  fsdp_min_num_params: 1000000
  fsdp_offload_params: false
  fsdp_reshard_after_forward: true
  fsdp_state_dict_type: FULL_STATE_DICT
  fsdp_version: 2
mixed_precision: 'no'
parallelism_config:
  parallelism_config_cp_size: 1
  parallelism_config_dp_replicate_size: 2
  parallelism_config_dp_shard_size: 8
  parallelism_config_tp_size: 1
"""
    + _LAUNCH
)

ACCELERATE_MULTI_GPU = (
    """
distributed_type: MULTI_GPU
dynamo_config:
  dynamo_backend: INDUCTOR
  dynamo_mode: default
  dynamo_use_dynamic: false
  dynamo_use_fullgraph: true
  dynamo_use_regional_compilation: true
fsdp_config: {}
gpu_ids: all
mixed_precision: fp16
"""
    + _LAUNCH
)

ACCELERATE_FILES = {
    "deepspeed": ACCELERATE_DEEPSPEED,
    "fsdp1": ACCELERATE_FSDP1,
    "fsdp2": ACCELERATE_FSDP2,
    "multi_gpu": ACCELERATE_MULTI_GPU,
}
