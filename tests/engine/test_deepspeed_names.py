"""Names that users of DeepSpeed type.

They mean what they mean there, or are refused with the one to use.
"""

from typing import Any

import jax
import numpy as np
import optax
import pytest
from _refusals import assert_refused
from _small import MICROBATCH, MICROBATCHES, SIZES, build, build_alone, entries, entry, module

import jaxpipe
from jaxpipe import PipelineEngine
from jaxpipe.errors import PipelineError

FURTHER = """
    agg_additional_losses agg_loss agg_train_loss aio_config all_gather_scalar all_to_all_group
    allreduce_and_copy allreduce_bucket allreduce_gradients allreduce_no_retain amp_enabled
    amp_params autotp_size autotuning_enabled autotuning_end_profile_step autotuning_metric
    autotuning_metric_path autotuning_model_info autotuning_model_info_path
    autotuning_profile_model_info autotuning_start_profile_step basic_optimizer batch_fn
    batch_timer bf16_master_weights_and_gradients bf16_optimizer_states bfloat16_enabled
    block_eigenvalue buffered_allreduce_fallback checkpoint_engine checkpoint_mp_rank
    checkpoint_serialization_enabled checkpoint_tag_validation_enabled
    checkpoint_tag_validation_fail checkpoint_writer_enabled client_lr_scheduler
    client_optimizer clip_fp32_gradients coalesce_grad_reduction collate_fn
    communication_data_type compile compile_autosp compile_autotp
    compile_zero_optimization_stage compression_scheduler cpuadam_cores_perc
    curriculum_enabled_legacy curriculum_learning_config curriculum_learning_enabled
    curriculum_params_legacy curriculum_scheduler_legacy data_efficiency_config
    data_efficiency_enabled data_iterator data_parallel_group data_sampling_config
    data_sampling_enabled dataloader_drop_last deepspeed_io destroy device dist_backend
    dont_change_device dp_group_loss dp_world_size dump_state dynamic_loss_scale
    dynamic_loss_scale_args dynamic_shape eigenvalue eigenvalue_enabled
    eigenvalue_gas_boundary_resolution eigenvalue_layer_name eigenvalue_layer_num
    eigenvalue_max_iter eigenvalue_stability eigenvalue_tol eigenvalue_verbose
    elasticity_enabled empty_partition_cache enable_backward_allreduce engine_timers
    engine_timers_cache eval_return_logits expert_data_parallel_group expert_parallel_group
    first_dataloader_check first_gradient_send first_output_send flatten flops flops_profiler
    flops_profiler_detailed flops_profiler_enabled flops_profiler_module_depth
    flops_profiler_output_file flops_profiler_profile_step flops_profiler_recompute_fwd_factor
    flops_profiler_top_modules fp16_auto_cast fp16_enabled fp16_master_weights_and_gradients
    fwd_duration fwd_outputs gas_boundary_ctr gate_modules get_autosp_backend get_autotp_backend
    get_compile_time get_data_parallel_rank get_data_types get_deepcompile_backend
    get_deepspeed_compile_backend get_model_parallel_rank get_pipeline_parallel_rank
    get_pld_theta get_sequence_parallel_group get_tensor_parallel_rank get_type
    get_wall_clock_timers global_rank grad_layer grad_partition_grad_layer_meta_cache
    gradient_average gradient_clipping gradient_predivide_factor graph_harvesting
    has_attention_mask has_bool_tensors has_moe_layers initial_dynamic_scale inside_no_sync_ctxt
    is_compiled is_data_parallel is_deepcompile_active is_deepcompile_enabled
    is_elastic_model_parallel_supported is_first_weights_partition_group is_grad_partitioned
    is_iterable_style_dataset is_map_style_dataset is_model_parallel is_pipe_parallel
    is_pipe_partitioned is_sanity_checks_enabled load_moe_state_dict load_universal_checkpoint
    loaded_checkpoint_dp_world_size loaded_checkpoint_mp_world_size local_all_to_all_group
    local_rank log_batch_step_id log_for_device log_level loss loss_model losses
    managed_gradient_accumulation memory_breakdown mesh_device meta_buffer mics_shard_size
    module_forward_post_hook module_forward_pre_hook moe_layers monitor mp_world_size mpu
    no_sync num_experts num_pipe_buffers offload_states optimized_linear_base_weight_sharding
    optimized_linear_lora_enabled optimizer_legacy_fusion optimizer_name optimizer_params
    outputs param_names pipe_buffers pipe_partition_grad_meta_cache
    pipe_partition_input_meta_cache pipe_partition_output_meta_cache pipe_recv_buf
    pipeline_enable_backward_allreduce pipeline_parallelism pld_enabled pld_gamma pld_params
    pld_theta postscale_gradients print_forward_breakdown progressive_layer_drop
    quantize_training quantizer random_ltd_config random_ltd_enabled random_ltd_initialize
    random_ltd_scheduler register_compile_pass reload_states save_16bit_model save_fp16_model
    save_non_zero_checkpoint save_zero_checkpoint scale scale_wrt_gas scheduler_name
    scheduler_params seq_data_parallel_group seq_dp_world_size seq_parallel_group
    sequence_parallel_size set_custom_curriculum_learning_schedule set_data_post_process_func
    set_gradient_accumulation_boundary set_has_attention_mask sparse_all_gather sparse_allreduce
    sparse_allreduce_bucket sparse_allreduce_no_retain sparse_gradients_enabled
    sparse_tensor_module_names steps_per_print summary_events super_offload swap_tensor_config
    tensor_parallel_config timers torch_autocast_dtype torch_autocast_enabled
    torch_autocast_lower_precision_safe_modules torch_autocast_z0_gradscaler
    total_additional_losses total_loss tput_log tput_timer training_data unflatten
    update_interval use_ds_comm use_node_local_storage uses_parallelization_pass_only
    using_bf16_optimizer wall_clock_breakdown warn_unscaled_loss zenflow_config
    zero_allgather_bucket_size zero_allgather_partitions zero_allgather_sequential
    zero_allow_untested_optimizer zero_contiguous_gradients zero_cpu_offload
    zero_elastic_checkpoint zero_force_ds_cpu_optimizer zero_gather_16bit_weights_on_model_save
    zero_grad zero_grad_hooks zero_hpz_partition_size zero_ignore_unused_parameters
    zero_legacy_stage1 zero_load_from_fp32_weights zero_log_trace_cache_warnings
    zero_max_live_parameters zero_max_reuse_distance zero_model_persistence_threshold
    zero_module_granularity_threshold zero_multi_rank_bucket_allreduce
    zero_nvme_offload_optimizer zero_offload_optimizer zero_offload_param zero_optimization
    zero_optimization_partition_gradients zero_optimization_partition_weights
    zero_optimization_stage zero_overlap_comm zero_param_persistence_threshold
    zero_partial_offload zero_prefetch_bucket_size zero_quantized_gradients
    zero_quantized_nontrainable_weights zero_quantized_weights zero_reduce_bucket_size
    zero_reduce_scatter zero_round_robin_gradients zero_save_muon_momentum_buffer_in_memory
    zero_sub_group_size zero_use_cpu_optimizer zeropp_loco_param
    parameters named_parameters state_dict load_state_dict modules named_modules half cuda to
    training xpu ipu mtia get_submodule set_submodule get_extra_state set_extra_state
    call_super_init dump_patches T_destination ID_TO_DTYPE DTYPE_TO_ID
"""
"""DeepSpeed 0.19's other public names on a `PipelineEngine`, which is a `torch.nn.Module` there."""


@pytest.fixture(scope="module")
def engine() -> PipelineEngine:
    return build(module(data=2))


@pytest.mark.slow
def test_a_loader_is_read_from_one_iteration_of_it() -> None:
    engine, plain = build_alone(example_batch=entry()), build_alone(example_batch=entry())
    assert engine.training_dataloader is None
    loader = list(entries(count=2 * MICROBATCHES))
    engine.set_dataloader(loader)
    assert engine.training_dataloader is loader
    assert [float(engine.train_batch()) for _ in range(2)] == [
        float(plain.train_batch(entries(k * MICROBATCHES))) for k in range(2)
    ]
    with pytest.raises(
        StopIteration,
        match=r"ended before step 3: a list has no more entries.*RepeatingLoader\(\.\.\.\)",
    ):
        engine.train_batch()


def test_sizes(engine: PipelineEngine) -> None:
    assert engine.get_batch_info() == (2 * MICROBATCH * MICROBATCHES, MICROBATCH, MICROBATCHES)
    assert engine.world_size == 4


def test_the_stage_of_a_process() -> None:
    one = build(module(stages=1))
    assert (one.stage_id, one.prev_stage, one.next_stage) == (0, -1, 1)


@pytest.mark.slow
def test_modes_change_nothing(engine: PipelineEngine) -> None:
    loss = float(engine.eval_batch(entries(samples=4)))
    engine.train()
    assert float(engine.eval_batch(entries(samples=4))) == loss
    engine.eval()
    engine.train(mode=False)


def test_what_an_engine_and_a_pipeline_show() -> None:
    engine = build(module(data=2), example_batch=entry(samples=4))
    assert repr(engine) == (
        "<PipelineEngine: 2 layers on 2 stages x 2 replicas; 2 microbatches of 2 samples a "
        "replica, schedule 1f1b, compute in float32; 0 steps>"
    )
    assert repr(engine.pipeline) == (
        "<Pipeline: 2 layers of 19 parameters on 2 stages x 2 replicas, cut at (0, 1, 2); schedule "
        "OneFOneBSchedule, 2 microbatches of 2 samples a replica>"
    )


def test_arguments_that_change_nothing_are_taken() -> None:
    x = np.ones((jax.device_count(), 3), np.float32)
    config = {**SIZES, "train_micro_batch_size_per_gpu": 1}
    engine: Any = jaxpipe.initialize(
        model=lambda x: x.mean(), optimizer=optax.sgd(0.1), config=config
    )[0]
    loss = engine(x)
    wrong = {
        "allreduce_gradients": False,
        "release_loss": True,
        "retain_graph": True,
        "scale_wrt_gas": False,
    }
    for name, value in wrong.items():
        words = (
            f"{name} must be {not value} in backward, but got {name}={value}. ... : leave it out"
        )
        assert_refused(PipelineError, words, engine.backward, loss, **{name: value})
    assert engine.backward(loss, **{name: not value for name, value in wrong.items()}) is loss
    words = "lr_kwargs must be None in step, but got lr_kwargs={'epoch': 3}. A sch"
    assert_refused(PipelineError, words, engine.step, lr_kwargs={"epoch": 3})
    engine.step(lr_kwargs=None)
    assert engine.micro_steps == 1


def test_every_further_name_works_or_gives_its_replacement(engine: PipelineEngine) -> None:
    working = {name for name in FURTHER.split() if hasattr(engine, name)}
    assert len(working) == 34
    for name in set(FURTHER.split()) - working:
        with pytest.raises(PipelineError, match=rf"^PipelineEngine\.{name} must not be used: \w"):
            getattr(engine, name)
    absent = "'PipelineEngine' object has no attribute 'train_bath'"
    with pytest.raises(AttributeError, match=absent) as found:
        engine.train_bath  # noqa: B018  # pyright: ignore[reportAttributeAccessIssue]
    assert not isinstance(found.value, PipelineError)


@pytest.mark.slow
def test_what_further_names_return() -> None:
    engine: Any = build(
        module(data=2), {"gradient_clipping": 0.5, "zero_optimization": {"stage": 1}}
    )
    found = {
        "bfloat16_enabled": False,
        "dynamic_loss_scale": False,
        "fp16_enabled": False,
        "gradient_clipping": 0.5,
        "optimizer_name": "Adam",
        "scheduler_name": None,
        "steps_per_print": None,
        "zero_optimization": True,
        "zero_optimization_stage": 1,
        "zero_optimization_partition_gradients": False,
    }
    assert {name: getattr(engine, name)() for name in found} == found
    assert engine.set_has_attention_mask(True) is None
    assert (engine.is_pipe_parallel, engine.is_data_parallel, engine.is_model_parallel) == (
        True,
        True,
        False,
    )
    assert (engine.global_rank, engine.dp_world_size, engine.micro_steps) == (0, 2, 0)
    engine.train_batch(entries(samples=4))
    assert engine.micro_steps == MICROBATCHES


def test_names_of_the_optimizer_and_the_scheduler() -> None:
    given, schedule = optax.adamw, optax.constant_schedule(0.25)
    engine: Any
    engine, optimizer, _, scheduler = jaxpipe.initialize(
        model=module(), optimizer=given, lr_scheduler=schedule, config=SIZES
    )
    assert isinstance(optimizer, optax.GradientTransformation)
    assert not hasattr(optimizer, "param_groups")
    for name, match in {
        "cur_scale": r"must not be used: engine\.loss_scale",
        "param_groups": r"must not be used: engine\.get_lr\(\)",
        "state_dict": r"must not be used: it is an optax",
    }.items():
        with pytest.raises(PipelineError, match=match):
            getattr(optimizer, name)
    assert scheduler == schedule
    assert scheduler is not None
    assert scheduler(3) == 0.25
    assert engine.lr_scheduler.get_last_lr() == engine.lr_scheduler.get_lr() == [0.25]
    with pytest.raises(
        PipelineError, match=r"^lr_scheduler\.step must not be used: a schedule is a"
    ):
        engine.lr_scheduler.step()
    plain: Any = build()
    assert not plain.lr_scheduler
    assert plain.lr_scheduler.get_lr() == [0.01]
    words = "must be given to initialize to be called, but got no"
    assert_refused(PipelineError, words, plain.lr_scheduler, 0)
