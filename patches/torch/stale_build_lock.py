"""A C++ extension build that was killed: the next process builds, and does not wait for the lock file forever."""

from __future__ import annotations

from rlhf_patches import Guard, Patch, Rewrite, Variant

PATCH = Patch(
    name="torch-stale-build-lock",
    summary="the next build takes over the lock file of a killed build, and a process that waits for a build logs it",
    harm="hang",
    bug="a killed build of a C++ extension leaves a lock file, and every later start waits for its removal forever",
    when="an extension built at run time (DeepSpeed's operators), after a kill or after a build by torch 2.14",
    symptom="""\
A run hangs at its start and logs nothing: in `deepspeed.initialize`, in `CPUAdamBuilder().load()` or that of another
operator, in DeepSpeed's `init_distributed`, or in other callers of `torch.utils.cpp_extension.load`. Every other start
that needs the same extension hangs, too. `py-spy dump` shows `wait (torch/utils/file_baton.py)` below `_jit_compile
(torch/utils/cpp_extension.py)`. An earlier build was killed: out of memory, at the end of a job, with its container. Or
torch 2.14 or later has built the extension in the same folder, which it shares with older releases.""",
    cause="""\
A builder creates the file `lock` in the folder of the extension, below `~/.cache/torch_extensions` or
`TORCH_EXTENSIONS_DIR`, and removes it at the end. A process that is killed removes nothing, and torch 2.14 leaves the
file there after every build. A process that detects the file waits as long as the file exists.""",
    repair="""\
A process that detects such a file, and is certain that the builder is gone, logs one line that names the file, takes
the file over, and builds; if several processes wait, one of them builds. If the builder may be alive, the process waits
as before, and logs a line each minute: it names the file and the builder, or why the builder is unknown, and states
that you may delete the file if nothing builds.

How the process is certain: a builder with the patch writes its machine, boot and process into the file and holds a lock
on it (`flock`), which the kernel releases when the process ends. This lock is valid on the same machine, in the same
boot. A builder without the patch keeps the file open while it builds, and the kernel grants a lease on a file only if
nobody else has it open. The lease, and a file of an earlier boot, count on file systems of one machine only (ext4, xfs,
btrfs, f2fs, zfs, tmpfs, overlay). On any other, such as NFS, a builder may run on another machine, so the process
waits. Compilers may outlive the builder: the process does not take the file over while a process works in the folder of
the extension, or if processes of another container are not visible. Nor does it take over another user's file.

Processes with and without the patch work together: the existence of the file has the same meaning as before. On systems
other than Linux everything is as released. torch 2.14.0 itself locks the file by `flock`, everywhere.""",
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
