"""An assembled model as a stock Mixtral folder: the same logits in plain transformers, and wherever Mixtral runs.

What can be said in Mixtral's form, and what cannot: `moe_runtime.hf.mixtral`. Streamed: memory holds a tensor of the backbone,
one expert's matrices and a shard of the target.
"""

from pathlib import Path

from moe_runtime.checkpoint import Checkpoint, CheckpointWriter, TensorSpec, check_keys
from moe_runtime.files import check_out_dir
from moe_runtime.hf import folders
from moe_runtime.hf.configuration import moe_config
from moe_runtime.hf.mixtral import Names, mixtral_config
from moe_runtime.methods.conversions import SHARD, Conversion, FolderReceipt, Progress


def export_mixtral(
    folder: str | Path,
    out: str | Path,
    *,
    max_shard_size: int | str = SHARD,
    overwrite: bool = False,
    progress: Progress | None = None,
) -> FolderReceipt:
    """Write the upcycled model `folder` as a MixtralForCausalLM to the folder `out`, with its tokenizer.

    Raises ValueError, with nothing written, for whatever Mixtral does not have, by name, for an existing target and too little
    disk space.
    """
    check_out_dir(out, overwrite, [folder])
    config = folders.read_config(folder)
    target = mixtral_config(config)
    names, moe = Names(target), moe_config(config)
    with Checkpoint(folder) as source:
        # old checkpoints hold what every model computes itself
        specs = {key: spec for key, spec in source.specs().items() if not key.endswith("rotary_emb.inv_freq")}
        tied = set(names.model.all_tied_weights_keys)
        want = {key: TensorSpec(shape, specs[key].dtype) for key, shape in names.specs.items() if key in specs}
        want |= {
            key: TensorSpec(shape, target.dtype) for key, shape in names.specs.items() if key not in {*specs, *tied}
        }
        check_keys(specs, want, source=source.path)
        total = sum(spec.nbytes for spec in specs.values())
        with CheckpointWriter(out, max_shard_size, overwrite=overwrite, expected_bytes=total) as writer:
            folders.write_config(writer, target)
            side_files = folders.copy_side_files(Path(folder), writer)
            job = Conversion(source, writer, progress, specs)
            for key in specs:
                if ".experts." in key:
                    rows = (names.row(key, e, source.get_rows(key, slice(e, e + 1))) for e in range(moe.num_experts))
                else:
                    rows = (names.whole(key, source.get(key)),)
                for saved in rows:
                    for name, tensor in saved.items():
                        job.add(name, tensor)
                job.read(key)
    layers = list(range(config.num_hidden_layers))
    return FolderReceipt(Path(out), moe, job.tensors, job.bytes, side_files, layers)
