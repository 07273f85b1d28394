"""Short names of the keys of ``Parallelism``, for tables of layouts."""

NAMES = {
    "dpr": "data_parallel_replicate_degree",
    "dps": "data_parallel_shard_degree",
    "cp": "context_parallel_degree",
    "tp": "tensor_parallel_degree",
    "pp": "pipeline_parallel_degree",
    "ep": "expert_parallel_degree",
    "etp": "expert_tensor_parallel_degree",
    "vpp": "virtual_pipeline_degree",
    "sp": "enable_sequence_parallel",
    "method": "context_parallel_method",
    "schedule": "pipeline_parallel_schedule",
    "layout": "pipeline_parallel_layout",
    "micro": "pipeline_parallel_microbatch_size",
    "reshard": "fsdp_reshard_after_forward",
}
