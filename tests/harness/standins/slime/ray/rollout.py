"""What slime's `RolloutManager`, a Ray actor, does with rewards, with its defect.

Our own text, but for the three lines by which a patch recognizes it.
"""

import ray
import torch


@ray.remote
class RolloutManager:
    def __init__(self, args, pg):
        self.args = args

    def _post_process_rewards(self, samples):
        raw = [sample.reward for sample in samples]
        rewards = torch.tensor(raw)
        each = self.args.n_samples_per_prompt
        if len(raw) == each * self.args.rollout_batch_size:
            rewards = rewards.view(-1, each)
        else:
            rewards = rewards.view(-1, rewards.shape[-1])
        mean = rewards.mean(dim=-1, keepdim=True)
        rewards -= mean
        std = rewards.std(dim=-1, keepdim=True)
        return raw, (rewards / (std + 1e-6)).flatten().tolist()
