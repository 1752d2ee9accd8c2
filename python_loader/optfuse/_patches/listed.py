# SPDX-License-Identifier: BSD-3-Clause
"""Everything of PyTorch that optfuse replaces or reaches into, and why.

PATCHES: what Python code exchanges (replacing.py). PLACES: where Python code stands in an object
of PyTorch's. PRIVATE: what the compiled library replaces, or uses although it is private, and
what notices that it has changed."""

from __future__ import annotations

from dataclasses import dataclass

from optfuse._library.releases import TESTED


@dataclass(frozen=True)
class Patch:
    """A function of PyTorch that another one takes the place of, which calls it."""

    target: str
    why: str
    takes: tuple[str, ...] = ()  # its first parameters; (): any, or written in C++
    asked_by: str = ""  # the function of PyTorch that has to look it up by its name
    since: str = TESTED[0]  # seen in the releases from this one to TESTED[-1]
    optional: bool = False  # some builds have none, and need no patch


@dataclass(frozen=True)
class Private:
    """A private part of PyTorch that C++ code uses. noticed: who notices that a release changed
    it."""

    name: str
    file: str  # of shim/
    why: str
    noticed: str
    since: str = TESTED[0]


_RAW = "gives raw memory to whoever asks, without an operator: launch what is pending first"
_SAVED = "TorchScript reads the memory of a whole module in C++: launch what is pending first"
_GRAPH = "a CUDA graph records and replays raw memory: launch what is pending first"
_ORDER = "a step() that is recorded has yet to put its operators on the stream: it does so first"
_PROFILER = "a profiler that notes addresses asks the tensors past the dispatcher"
_CLIPS = "on parameters of fused optimizers it does all in one call of the library"
_CLIP = "torch.nn.utils.clip_grad"
_CHECKPOINT = "torch.utils.checkpoint"
_RECOMPUTES = "it computes a block again inside backward: refuse weights that are updated already"
_GRAPHS = (("torch.cuda.CUDAGraph", TESTED[0]), ("torch.accelerator.Graph", "2.12"))
#: Methods that give a graph's handle away.
GRAPH_HANDLES = ("raw_cuda_graph", "raw_cuda_graph_exec")

PATCHES = (
    Patch(
        "torch._dynamo.eval_frame._is_skip_guard_eval_unsafe_stance",
        "every compiled callable asks it on entry, before its guards compare dispatch keys",
        asked_by="torch._dynamo.eval_frame._TorchDynamoContext.__call__",
    ),
    *(
        Patch(f"torch.Tensor.{name}", _RAW)
        for name in ("data_ptr", "untyped_storage", "apply_", "map_", "map2_")
    ),
    Patch("torch.Tensor.const_data_ptr", _RAW, optional=True),  # torch 2.11 has none
    Patch("torch.Tensor.__dlpack__", _RAW, ("self",)),
    Patch("torch.Tensor.share_memory_", _RAW, ("self",)),
    *(
        Patch(f"torch._C.{name}", _RAW, optional=True)
        for name in ("_to_dlpack", "_to_dlpack_versioned", "_data_address", "_is_cow_tensor")
    ),
    *(
        Patch(
            f"torch.Tensor.{name}",
            "it takes the dispatch key of a pending tensor for a device: give it another tensor",
        )
        for name in ("new", "new_tensor")
    ),
    *(
        Patch(f"torch.{name}", _ORDER, optional=True)
        for name in (
            "Event.record",
            *(f"Stream.{way}" for way in ("record_event", "wait_stream", "synchronize", "query")),
            "_C._CudaEventBase.record",
            "_C._CudaStreamBase.synchronize",
            "_C._CudaStreamBase.query",
            "_C._cuda_synchronize",
            "_C._accelerator_synchronizeDevice",
        )
    ),
    Patch(
        "torch.autograd.Variable._execution_engine.run_backward",
        "the engine's threads for GPUs read what a step() that is recorded has yet to compute",
        optional=True,
    ),
    Patch("torch._C.ScriptModule.save", _SAVED),
    Patch("torch._C.ScriptModule.save_to_buffer", _SAVED),
    Patch(
        "torch._C._swap_tensor_impl",
        "it exchanges what is behind two tensors that plans may know: tell these",
        asked_by="torch.utils.swap_tensors",
    ),
    *(
        Patch(f"{graph}.{name}", _GRAPH, ("self",), since=since, optional=True)
        for graph, since in _GRAPHS
        for name in ("capture_begin", "capture_end", "replay")
    ),
    *(
        Patch(
            f"torch.cuda.CUDAGraph.{name}",
            "whoever has a graph's handle replays it unseen: leave nothing pending from then on",
            ("self",),
            optional=True,
        )
        for name in GRAPH_HANDLES
    ),
    Patch(
        "torch.autograd.profiler.profile._start_trace",
        _PROFILER,
        ("self",),
        asked_by="torch.autograd.profiler.profile.__enter__",
    ),
    Patch(
        "torch.autograd.profiler.profile.toggle_collection_dynamic",
        _PROFILER,
        ("self",),
        optional=True,
    ),
    Patch("torch.profiler.ExecutionTraceObserver.start", _PROFILER, ("self",)),
    Patch(
        "torch.amp.GradScaler.scale",
        "backward fusion must not update with gradients of a scaled loss: mark its backward",
        ("self", "outputs"),
    ),
    Patch(
        "torch.amp.GradScaler._unscale_grads_",
        "the division by the scale is left to the update, which reads the gradients anyway; and "
        "K-FAC has to know the scale, and whether the optimizer's step will be left out",
        ("self", "optimizer", "inv_scale", "found_inf", "allow_fp16"),
        asked_by="torch.amp.GradScaler.unscale_",
    ),
    *(
        Patch(f"torch.nn.utils.{name}", _CLIPS, takes)
        for name, takes in (
            ("clip_grad_norm_", ("parameters", "max_norm", "norm_type", "error_if_nonfinite")),
            ("clip_grad_value_", ("parameters", "clip_value")),
        )
    ),
    *(
        Patch(path, _CLIPS, takes, asked_by)
        for private, public, takes in (
            ("_get_total_norm", "get_total_norm", ("tensors", "norm_type", "error_if_nonfinite")),
            (
                "_clip_grads_with_norm_",
                "clip_grads_with_norm_",
                ("parameters", "max_norm", "total_norm"),
            ),
        )
        for path, asked_by in (
            (f"torch.nn.utils.{public}", ""),
            (f"{_CLIP}.{private}", f"{_CLIP}.clip_grad_norm_"),
        )
    ),
    Patch(
        "torch._ops.HigherOrderOperator.__call__",
        "PyTorch dispatches it in Python and refuses the key of pending tensors: launch first",
        ("self",),
    ),
    *(
        Patch(f"{_CHECKPOINT}.{name}", _RECOMPUTES, (takes,))
        for name, takes in (
            ("_recomputation_hook.__enter__", "self"),
            ("_recomputation_hook.__exit__", "self"),
            ("CheckpointFunction.backward", "ctx"),
        )
    ),
    Patch(
        "torch.optim.swa_utils.AveragedModel.update_parameters",
        "averages of weights are made in one call of the library, or with the weights' updates",
        ("self", "model"),
    ),
    *(
        Patch(
            f"torch.nn.parallel.DistributedDataParallel.{name}",
            "where gradients are views of buckets DDP copies those that are there when it makes a "
            "bucket, and what backward fusion has consumed can't be copied: put it aside",
            takes,
            asked_by=f"torch.nn.parallel.DistributedDataParallel.{caller}",
        )
        for name, takes, caller in (
            ("_ddp_init_helper", ("self", "parameters"), "__init__"),
            ("_pre_forward", ("self",), "forward"),
        )
    ),
)

#: (what is replaced, why, the function of PyTorch that puts it there or uses it, the names
#: that this function has to mention)
PLACES = (
    (
        "an optimizer's __class__",
        "step(), zero_grad() and the like of a fused optimizer are its own",
        "torch.optim.Optimizer.profile_hook_step",
        ("_optimizer_step_pre_hooks", "_optimizer_step_post_hooks"),
    ),
    (
        "the step() that a scheduler has put into an optimizer",
        "it calls the stock class's step(): wrap the fused one instead, and count likewise",
        "torch.optim.lr_scheduler.LRScheduler.__init__",
        ("_wrapped_by_lr_sched", "_opt_called"),
    ),
    (
        "the function that the decorator of clip_grad_value_() calls",
        "who has imported that one before must not clip nothing, with Backward(final=True)",
        f"{_CLIP}.clip_grad_value_",
        ("_group_tensors_by_device_and_dtype",),
    ),
    (
        "the call of a model about which reorder() is undecided",
        "a forward hook would be scripted, copied and saved with the model",
        "torch.nn.Module._wrapped_call_impl",
        ("_compiled_call_impl", "_call_impl"),
    ),
    (
        "the attributes that TorchScript leaves alone",
        "that call of a model is one of them",
        "torch.jit._recursive.infer_concrete_type_builder",
        ("ignored_attributes",),
    ),
    (
        "nothing, but has Python's dispatcher forget where an operator has kernels,",
        "what is compiled once our kernels for linear and conv2d have gone would have no gradients",
        "torch._ops.OpOverload._uncache_dispatch",
        ("_dispatch_cache",),
    ),
    (
        "the communication hook of a model of Backward(ddp=) and Forward(ddp=)",
        "an update runs as soon as the reduction of its bucket is done",
        "torch.nn.parallel.DistributedDataParallel._register_accum_grad_hook",
        ("_comm_hooks",),
    ),
    (
        "what that model does with the reduced gradients",
        "the updates have used them; we hand out the others, to its own parameters",
        "torch.nn.parallel.DistributedDataParallel._setup_in_backward_optimizers",
        ("_set_optimizer_in_backward", "_module_parameters"),
    ),
    (
        "nothing, but asks whether that model has rearranged its buckets,",
        "it does so once, and needs consumed gradients put aside then",
        "torch.nn.parallel.DistributedDataParallel._update_process_group",
        ("_has_rebuilt_buckets",),
    ),
    (
        "the hooks under which it does so",
        _RECOMPUTES,
        f"{_CHECKPOINT}._checkpoint_hook.__init__",
        ("_recomputation_hook",),
    ),
    (
        "the reduction of that model",
        "a communication hook has to start it by itself",
        "torch.distributed.algorithms.ddp_comm_hooks.optimizer_overlap_hooks."
        "_apply_optim_in_backward_hook",
        ("_run_allreduce_hook",),
    ),
)


@dataclass(frozen=True)
class Lists:
    """The lists that are checked together."""

    patches: tuple[Patch, ...]
    places: tuple[tuple[str, str, str, tuple[str, ...]], ...]


#: The lists that the first fuse() checks.
EVERYWHERE = Lists(PATCHES, PLACES)

_FSDP = "torch.distributed.fsdp._fully_shard"
_LOCAL = "the library updates the local tensors of a DTensor's parameter, gradient and state"
_SHARD = "an update that is not seen by all who read the shard would be missed"

#: Checked where a DTensor is fused: its modules take long to import.
DISTRIBUTED = Lists(
    (
        Patch(
            f"{_FSDP}._fsdp_param_group.FSDPParamGroup.post_backward",
            "the gradients of a group have been reduced when it returns: backward fusion updates",
            ("self",),
            asked_by=f"{_FSDP}._fsdp_param_group.RegisterPostBackwardFunction.backward",
        ),
    ),
    (
        (
            "the .grad of a DTensor's local tensor",
            _LOCAL,
            "torch.distributed.tensor.DTensor.__repr__",
            ("_local_tensor", "_spec", "mesh", "placements"),
        ),
        (
            "nothing, but asks which modules FSDP2 shards,",
            _SHARD,
            "torch.distributed._composable_state._insert_module_state",
            ("_module_state_mapping",),
        ),
        (
            "nothing, but asks for the tensors that FSDP2 reads,",
            _SHARD,
            f"{_FSDP}._fsdp_param.FSDPParam.reset_sharded_param",
            ("_sharded_param_data", "sharded_param", "_local_tensor"),
        ),
        (
            "nothing, but has a hook called that notes a reduced gradient,",
            "FSDP2 calls the hooks of a parameter itself",
            f"{_FSDP}._fsdp_collectives.foreach_reduce",
            ("_post_accumulate_grad_hooks",),
        ),
        (
            "nothing, but waits for a gradient's copy on the CPU,",
            "an update would use numbers that are not there yet",
            f"{_FSDP}._fsdp_param_group.FSDPParamGroup.finalize_backward",
            ("fsdp_params", "grad_offload_event", "synchronize"),
        ),
        *(
            (
                "nothing, but asks who else gets a reduced gradient,",
                "whoever writes to it before step() is obeyed",
                f"{_FSDP}._fully_shard.FSDPModule.{function}",
                (attribute,),
            )
            for function, attribute in (
                ("set_custom_reduce_scatter", "_reduce_scatter_comm"),
                ("set_all_reduce_hook", "_all_reduce_hook"),
            )
        ),
    ),
)

#: Checked where the first masters are made.
_ZEROES = "it zeroes the gradients of the weights that an optimizer's masters stand for"
MASTERS = Lists((Patch("torch.optim.Optimizer.zero_grad", _ZEROES, ("self", "set_to_none")),), ())

_BACKWARD = "torch.distributed.pipelining._backward"
_APART = "it computes dX and dW of a layer apart, with the bits of one backward pass"

#: Checked where reductions are to be awaited at first use.
AWAITED = Lists(
    (
        Patch(
            "torch.nn.parallel.DistributedDataParallel._post_forward",
            "from here on DDP may write into its buckets: wait for what is still on its way from "
            "them",
            ("self", "output"),
            asked_by="torch.nn.parallel.DistributedDataParallel.forward",
        ),
    ),
    (),
)

#: Checked where the first optimizer is fused whose updates are final.
FINAL_UPDATES = Lists(
    (
        *(
            Patch(
                f"torch.{module}._engine_run_backward",
                "a backward pass inside of another one is a part of that",
            )
            for module in ("autograd", "autograd.graph")
        ),
        Patch(
            "torch.Tensor.register_post_accumulate_grad_hook",
            "it puts Python's hooks in the place of ours: ours comes behind them again",
            ("self", "hook"),
        ),
    ),
    (),
)

#: Checked where a layer pipeline is made.
PIPELINES = Lists(
    (),
    (
        (
            "nothing, but calls it for dX,",
            _APART,
            f"{_BACKWARD}.stage_backward_input",
            ("stage_outputs_or_loss", "output_grads", "input_values", "weights"),
        ),
        (
            "nothing, but calls it for dW,",
            _APART,
            f"{_BACKWARD}.stage_backward_weight",
            ("weights", "param_groups"),
        ),
    ),
)

#: Functions that _run/watch.py replaces in a script's process, before this file can be imported.
WATCHED = Lists(
    (
        Patch(
            "torch.optim.Optimizer.__init_subclass__",
            "each class gets an __init__() that says when an optimizer has been made: fuse it then",
        ),
        Patch(
            "torch.nn.parallel.DistributedDataParallel.__init__",
            "backward mode has to know the model that reduces an optimizer's gradients",
            ("self", "module"),
        ),
    ),
    (),
)

_BUILD = "the compiler, when the library is built for a release"
PRIVATE = (
    Private(
        "TESTING_ONLY_GenericWrapper",
        "base/compat.h",
        "a backend fallback for this dispatch key sees every operator that gets a pending tensor",
        "of_shim_init(), if somebody else has one",
    ),
    Private("key_set_", "base/compat.h", "marks a pending tensor by that key", _BUILD),
    Private(
        "throw_on_immutable_data_ptr_",
        "base/compat.h",
        "seals a storage: an address that is asked for past the dispatcher is refused",
        _BUILD + "; tests/python/installation/test_patches.py, if a seal has no effect",
    ),
    Private(
        "throw_on_mutable_data_ptr_",
        "base/compat.h",
        "seals what a recorded step() reads: an address to write to is refused",
        _BUILD + "; tests/python/recorded, where a write past the dispatcher must be refused",
    ),
    Private("refresh_has_data_ptr_check", "base/compat.h", "makes a changed seal count", _BUILD),
    Private(
        "autograd_meta_",
        "base/compat.h",
        "finds a parameter's gradient without a call, which each update does several times",
        _BUILD,
    ),
    Private(
        "has_unique_reference",
        "base/compat.h",
        "tells a Python wrapper that nobody holds from another owner of a tensor",
        _BUILD,
    ),
    Private(
        "load_pyobj",
        "base/compat.h",
        "tells a reference of Python's to a gradient from that of DistributedDataParallel",
        _BUILD,
    ),
    Private(
        "PyTorchError",
        "base/error.h",
        "a copy of the class by which PyTorch raises a Python type of the thrower's choice",
        "the first fuse(), which raises one and looks how it arrives",
    ),
    Private(
        "post_acc_grad_hooks_",
        "autograd/gradient_hook.cpp",
        "our hook takes a parameter's one place for such hooks, and calls what was there",
        _BUILD,
    ),
    Private(
        "PyMethodDef",
        "python/call_first.c",
        "Python's record of a function that is written in C: all that stand for it go by it",
        "call_first(), which compares the name in it",
    ),
    *(
        Private(
            name,
            "layers/tap.cpp",
            "a composite operator, with kernels of ours at autograd's keys while layers are known",
            "the first step() after reorder(), if no layer was seen",
        )
        for name in ("linear", "conv2d")
    ),
    Private(
        "ToCopyBackward0",
        "layers/tap.cpp",
        "autocast hands over a copy of a weight: its node leads to the weight",
        "the first step() after reorder(), if no layer was seen",
    ),
    Private(
        "ToCopyBackward0",
        "gpu/beside.cpp",
        "such a copy's node runs where dW does: on the side stream, if dW has one",
        "tests/device/test_side_stream.py, where the plan must say that dW is there",
    ),
    *(
        Private(
            name,
            "promises/operators.cpp",
            what,
            f"tests/python/promises/{test}, where the gradients must be promises",
        )
        for name, what, test in (
            (
                "ToCopyBackward0",
                "a promised gradient of 16 bits is cast by that node on its way to .grad",
                "test_promised_ways.py",
            ),
            (
                "TBackward0",
                "a linear layer's promised gradient is turned by that node on its way to .grad",
                "test_promised_nodes.py",
            ),
            *(
                (node, "the node whose hook asks for a promised gradient", test)
                for node, test in (
                    ("AddmmBackward0", "test_promised_nodes.py"),
                    ("MmBackward0", "test_promised_nodes.py"),
                    ("EmbeddingBackward0", "test_promised_embeddings.py"),
                )
            ),
        )
    ),
    Private(
        "set_sequence_nr",
        "layers/tasks.cpp",
        "autograd's engine runs what is ready by this number: a dW that waits gets a low one",
        "tests/python/reorder/test_reorder.py, which reads the order from a trace",
    ),
    *(
        Private(name, "host/square_roots.cpp", why, "its first use; it compares or does without")
        for name, why in (
            ("VMSSQRT_64_", "square roots of float32 with the bits of torch.sqrt()"),
            ("VMDSQRT_64_", "square roots of float64 with the bits of torch.sqrt()"),
        )
    ),
    *(
        Private(name, "base/mkl.cpp", why, "its first use; the library does without")
        for name, why in (
            ("MKL_Set_Num_Threads_Local", "keeps MKL from opening parallel regions in ours"),
            ("MKL_Get_Max_Threads", "products round by the number of its threads"),
        )
    ),
    *(
        Private(
            name,
            "promises/linear.cpp",
            "panels of a product with the bits of torch.mm()",
            "the first trial of a shape, which compares; without it nothing is promised",
        )
        for name in ("sgemm_", "dgemm_", "_ZN2at6native13mkldnn_matmulERKNS_6TensorES3_S3_ff")
    ),
)
