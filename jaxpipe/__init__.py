"""DeepSpeed-style pipeline parallelism for JAX and Flax.

A model is a list of layers, divided into stages along the `stage` axis of a mesh. A schedule such
as 1F1B is compiled into one program that sends activations and gradients between the stages.

    model = jaxpipe.PipelineModule(layers, num_stages=4, loss_fn=loss_fn)
    engine, optimizer, loader, schedule = jaxpipe.initialize(
        model=model, optimizer=optax.adamw(3e-4), config=config
    )
    loss = engine.train_batch(data_iter)

Main entry points:
    `PipelineModule`, `LayerSpec`, `TiedLayerSpec`: the model. `jaxpipe.layers` has more kinds of
        layers.
    `initialize`: creates an engine with `train_batch`, `eval_batch`, `predict`, `save_checkpoint`
        and `load_checkpoint`.
    `make_pipeline`, `describe_pipeline`: a pipeline without an engine, and a description of it.
    `plan`: estimates memory and time of a job without a GPU. `jaxpipe.forecast` lists the hardware
        that it knows.
    `jaxpipe.schedules`: 1F1B, interleaved, zero-bubble, GPipe, and the base class for your own.
    `jaxpipe.config`: the keys of a configuration. `jaxpipe.errors`: all exceptions.
    `attention`: attention for transformer blocks, by cuDNN where possible. `jaxpipe.transformer`:
        DeepSpeed's transformer layer.
    `jaxpipe.losses`: cross entropy of language models, which can be split over the stages.
    `jaxpipe.models`: Llama, Mistral, Qwen, SmolLM, GPT-2 and BERT as lists of layers.
    `jaxpipe.weights`: weights of other libraries, by tables of names.
    `jaxpipe.checkpoint`: files on disk. `jaxpipe.checkpointing`: recompute, under DeepSpeed's name.
    `jaxpipe.deepspeed`: names of DeepSpeed that have no counterpart in JAX.
    `jaxpipe launch`, on the command line: starts the processes of a job.
"""

import lazy_loader

__version__ = "0.2.0"

# The stub names everything once, for type checkers and for this call. JAX is imported with the
# first name that needs it, so that `jaxpipe --help` and `jaxpipe.config` answer at once.
__getattr__, __dir__, __all__ = lazy_loader.attach_stub(__name__, __file__)
