"""A build of a C++ extension that was killed: the next process builds, and does not wait for it for ever."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="torch-stale-build-lock",
    summary="the lock file of a build that was killed is taken over, and whoever waits for a build says so",
    harm="hang",
    bug="a build of a C++ extension that was killed leaves a lock file, for which every later start waits for ever",
    when="an extension built at run time (DeepSpeed's operators, cpp_extension.load), and a kill, or torch 2.14 beside",
    symptom="""\
A run stands still at its start and says nothing: in `deepspeed.initialize`, in `CPUAdamBuilder().load()` or that of
another operator, in DeepSpeed's `init_distributed`, in whatever calls `torch.utils.cpp_extension.load`. So does every
other start that needs the same extension. `py-spy dump` shows `wait (torch/utils/file_baton.py)` below `_jit_compile
(torch/utils/cpp_extension.py)`. Some build before was killed: out of memory, at the end of a job, with its container.
Or torch 2.14 or later has built the extension in the same folder, which it shares with older releases.""",
    cause="""\
Who builds makes the file `lock` in the folder of the extension, below `~/.cache/torch_extensions` or
`TORCH_EXTENSIONS_DIR`, and removes it in the end. A process that is killed removes nothing, and torch 2.14 leaves its
file there after every build. Who finds the file waits for as long as it is there.""",
    repair="""\
Who finds such a file, and is certain that its builder is gone, says so in one line that names the file, makes it its
own, and builds; of several that wait, one does. For a builder that may be alive it waits as before, with a line each
minute that names the file, says who builds, or why that cannot be told, and that you may delete it if nobody does.

How it is certain: a builder with the patch writes its machine, boot and process into the file and holds a lock on it
(`flock`), which the kernel takes back from a process that ends; that counts on the same machine, in the same boot. One
without the patch has the file open while it builds, and the kernel gives a lease on a file only if nobody else has it
open. That, and a file of an earlier boot, count on file systems of one machine only (ext4, xfs, btrfs, f2fs, zfs,
tmpfs, overlay): on any other, NFS say, a builder may run on another machine, and is waited for. Compilers may outlive
the builder: while a process works in the folder of the extension, or those of another container cannot be seen, nothing
is taken over. Nor is the file of another user.

Processes with the patch and without it can wait for each other: that the file exists means what it did. On other
systems than Linux everything is as released. torch 2.14.0 itself holds the file by `flock`, everywhere.""",
    references=(
        "https://github.com/pytorch/pytorch/issues/189245",
        "https://github.com/pytorch/pytorch/pull/190543",
    ),
    variants=(
        Variant(
            Guard("torch", ">=1.0.0,<2.14.0"),
            (
                Rewrite(
                    target="torch.utils.cpp_extension:_jit_compile",
                    pattern="baton.try_acquire()",
                    replacement="$ACQUIRED(baton)",
                    alongside=("baton.release()", "baton.wait()"),
                    uses={"ACQUIRED": "rlhf_patches.patches.torch._build_lock:acquired"},
                ),
            ),
        ),
    ),
    obsolete_when="when the oldest torch in use is 2.14.0",
)
